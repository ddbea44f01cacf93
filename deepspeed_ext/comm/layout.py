# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Layouts of flat buffers as cells, and plans that map buckets to cells.

Note [Flat buffers, cells and slices]
    A flat buffer is divided into rows x cols *cells* of ``chunk`` elements; cell (row j, column i) starts at element
    (j*cols + i)*chunk. With columns = numbers in the group (m) and rows = groups (k), cell (j, i) is the chunk that
    ZeRO gives to data-parallel rank j*m + i. The I-slice of a rank is its column, the *strided* chunks
    {i, m+i, 2m+i, ...}: its reduce-scatter between groups produces exactly ZeRO's chunk, so checkpoints need no
    permutation. If the optimizer's states are not sharded between groups, there is one row, and the slice is
    contiguous.
    With p = N the flat buffer is all parameters of a parameter group, as in ZeRO-1/2; with p = I or G it is each
    parameter, as in ZeRO-3, and the cells of several parameters are sent side by side: (cols, rows, width).

Note [Stripes]
    ZeRO-1/2 gives each rank one span of the flat buffer. A bucket of a few neighboring layers therefore belongs to few
    ranks: only these receive it, between groups over one link of k, and updated parameters are gathered in an order
    unrelated to that of the modules. So the flat buffer may first be divided into *stripes* of complete parameters,
    each of which is divided into cells separately; chunk r is then the r-th cell of every stripe, side by side. A
    stripe is balanced over all ranks, and a window of all chunks is a span of the model. (Megatron-LM's distributed
    optimizer divides each of its buckets among all ranks, for the same reason.)
    This adds only padding: the cells of a stripe have equal widths. A parameter is in one stripe, so a rank has at
    most one piece of it, as DeepSpeed's mapping of parameters requires.

Note [Equal rows]
    A bucket has several spans of flat buffers, each of which covers many cells: with 16,384 ranks a stripe has 16,384.
    Most of these cells are covered completely. So a plan does not list cells but, for each column, neighboring rows of
    which the bucket has the same elements: a handful, independent of the number of ranks.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.comm.packing import fill_up
from deepspeed_ext.comm.process_groups import Topology
from deepspeed_ext.comm.spans import BufferSpan, Contents, ShardSpan, Span, Spans, merge_in_buffers
from deepspeed_ext.strategy import Placement

# Windows start at multiples of the first of these that fits: complete blocks of LoCo, aligned buckets.
_STRIDES = (512, 16)
_PADDING_SHARE = 64  # at most 1 in 64 elements of a cell is padding, so that windows start at such multiples ...
_WIDTH_MULTIPLE = 2  # ... and always at a multiple of 2: ZeRO-1/2 requires partitions aligned to 4 bytes


def _stride(width: int, least: int = 1) -> int:
    return next((stride for stride in _STRIDES if stride <= width), least)


def windows(span: Span, rows: int, most_numel: int) -> list[Span]:
    """Return windows over the columns of a span; ``rows`` rows of a window have at most ``most_numel`` elements."""
    width = max(1, most_numel // rows)
    width -= width % _stride(width)
    return [Span(start, width).common(span) for start in range(span.start, span.stop, width)]


class Stripe(NamedTuple):
    """A span of a flat buffer, divided into cells of ``width`` elements, which start at ``column`` in their chunks."""

    span: Span
    column: int
    width: int

    def cell(self, number: int) -> Span:
        """Return the elements in a cell; none if it is after the end of the stripe."""
        return Span(self.span.start + number * self.width, self.width).common(self.span)

    def cells(self, span: Span) -> range:
        """Return the numbers of the cells that overlap a span."""
        first, last = span.start - self.span.start, span.stop - 1 - self.span.start
        return range(first // self.width, last // self.width + 1)

    def shifted(self, by: int) -> "Stripe":
        """Return the stripe with all elements renumbered by ``by``."""
        return self._replace(span=self.span.shifted(by))


class Piece(NamedTuple):
    """A span of a flat buffer inside one cell; it starts at ``column`` in the chunk."""

    row: int
    col: int
    column: int
    span: Span

    @property
    def columns(self) -> Span:
        """The same elements in the chunk."""
        return Span(self.column, self.span.numel)


@dataclass(frozen=True)
class FlatLayout:
    """Division of a flat buffer of ``numel`` elements into cells; see Note [Flat buffers, cells and slices].

    Attributes:
        starts: first elements of the stripes in the flat buffer; see Note [Stripes].
    """

    numel: int
    rows: int
    cols: int
    starts: tuple[int, ...] = (0,)

    @classmethod
    def from_placement(
        cls, numel: int, placement: Placement, topology: Topology, starts: tuple[int, ...] = (0,)
    ) -> "FlatLayout":
        """Return the layout of a buffer whose optimizer states are in ``placement``."""
        rows = topology.sizes.groups if placement == Placement.G else 1
        return cls(numel, rows, topology.sizes.group_size, starts)

    @cached_property
    def stripes(self) -> tuple[Stripe, ...]:
        """The stripes, in order. The cells of a single stripe have the minimum width, as in ZeRO."""
        cells, stripes, column = self.rows * self.cols, list[Stripe](), 0
        for start, end in zip(self.starts, (*self.starts[1:], self.numel), strict=True):
            width = -(-(end - start) // cells)
            if len(self.starts) > 1:
                width = fill_up(width, _stride(width // _PADDING_SHARE, _WIDTH_MULTIPLE))
            stripes.append(Stripe(Span.between(start, end), column, width))
            column += width
        return tuple(stripes)

    @property
    def chunk(self) -> int:
        """Elements of a chunk. The last cells extend beyond the end if ``numel`` is not divisible."""
        return self.stripes[-1].column + self.stripes[-1].width

    def windows(self, rows: int, most_numel: int, number: int | None = None) -> list[Span]:
        """Return windows over the columns, each in one stripe; ``rows`` rows of a window have at most ``most_numel``
        elements. ``number``: only windows of this stripe."""
        stripes = self.stripes if number is None else self.stripes[number : number + 1]
        return [
            window for stripe in stripes for window in windows(Span(stripe.column, stripe.width), rows, most_numel)
        ]

    def stripe_of(self, element: int) -> Stripe:
        """Return the stripe of an element of the flat buffer."""
        return self.stripes[bisect_right(self.starts, element) - 1]

    def pieces(self, span: Span) -> Iterator[Piece]:
        """Yield the pieces of a span of the flat buffer, in its order."""
        while span.numel:
            stripe = self.stripe_of(span.start)
            number, within = divmod(span.start - stripe.span.start, stripe.width)
            inside = span.common(stripe.cell(number))
            yield Piece(*divmod(number, self.cols), stripe.column + within, inside)
            span = Span.between(inside.stop, span.stop)

    def cells_of(self, row: int, col: int) -> Iterator[Piece]:
        """Yield the contents of a chunk, in its order; padding follows the elements of a cell."""
        for stripe in self.stripes:
            span = stripe.cell(row * self.cols + col)
            if span.numel:
                yield Piece(row, col, stripe.column, span)

    def pack(self, flat: Tensor, cells: Tensor) -> None:
        """Copy the flat buffer, which must have one stripe, into its cells, with zeros after its end.

        Args:
            flat: 1D of ``numel`` elements.
            cells: (cols, rows, chunk), of any dtype and strides.
        """
        missing = self.rows * self.cols * self.chunk - self.numel
        # Zeros: norms, scales, and overflow checks include padding.
        padded = torch.nn.functional.pad(flat, (0, missing)) if missing else flat
        cells.copy_(padded.view(self.rows, self.cols, self.chunk).transpose(0, 1))

    def unpack(self, cells: Tensor) -> Tensor:
        """Return the flat buffer (1D) of one stripe from its cells (cols, rows, chunk); a view if possible."""
        return cells.transpose(0, 1).reshape(-1)[: self.numel]

    def unpack_window(self, flat: Tensor, start: int, cells: Tensor, add: bool = False) -> None:
        """Copy (or add) a window of every cell into the flat buffer.

        Args:
            flat: 1D of at least ``numel`` elements.
            start: first element of the window within each chunk; the window is in one stripe.
            cells: (cols, rows, width): an intra gather of inter gathers.
            add: whether to add instead of copying.
        """
        by_rows, parts = cells.transpose(0, 1), list[tuple[Tensor, Tensor]]()
        for numbers, target_cells in self.window_views(flat, Span(start, cells.shape[-1])):
            source = by_rows[..., : target_cells.shape[1]]
            full_rows = numbers.stop // self.cols if not numbers.start else 0  # rows
            if full_rows:
                parts.append(
                    (target_cells[: full_rows * self.cols].unflatten(0, (full_rows, self.cols)), source[:full_rows])
                )
            row, col = divmod(numbers.start + full_rows * self.cols, self.cols)
            last_cells = target_cells[full_rows * self.cols :]
            if len(last_cells):
                parts.append((last_cells, source[row, col : col + len(last_cells)]))
        for target, part in parts:
            target.add_(part) if add else target.copy_(part)

    def window_views(self, flat: Tensor, window: Span) -> list[tuple[slice, Tensor]]:
        """Return a window of every cell as views of the flat buffer.

        Args:
            flat: 1D of at least ``numel`` elements.
            window: elements of each chunk, in one stripe.

        Returns:
            Numbers of cells, row by row, and their windows, (cells, elements). If the last nonempty window has fewer
            elements than the others, it is a separate entry.
        """
        stripe = self._stripe_at(window.start)
        numel, within, width = stripe.span.numel, window.start - stripe.column, window.numel
        full_cells = max(0, min(self.rows * self.cols, (numel - within - width) // stripe.width + 1))
        views = []
        if full_cells:
            first = flat.storage_offset() + stripe.span.start + within
            views.append((slice(0, full_cells), flat.as_strided((full_cells, width), (stripe.width, 1), first)))
        rest = numel - (full_cells * stripe.width + within)
        if full_cells < self.rows * self.cols and rest > 0:
            first = stripe.span.start + full_cells * stripe.width + within
            views.append((slice(full_cells, full_cells + 1), flat[first : first + rest].view(1, rest)))
        return views

    def _stripe_at(self, column: int) -> Stripe:
        return self.stripes[bisect_right(self.stripes, column, key=lambda stripe: stripe.column) - 1]


class Cut(NamedTuple):
    """The same span of several rows' chunks of a flat buffer.

    Attributes:
        offset: offset of the first row's span in the bucket; the span of each further row starts ``stride`` later.
    """

    buffer: int
    span: Span
    offset: int
    stride: int


class RowRange(NamedTuple):
    """Neighboring rows of a column of which a bucket has the same elements: ``times`` rows from ``first`` on."""

    first: int
    times: int
    cuts: tuple[Cut, ...]

    @property
    def numel(self) -> int:
        """Elements of each row."""
        return sum(cut.span.numel for cut in self.cuts)

    def spans(self) -> list[BufferSpan]:
        """Return the contents of each row in its chunks, in order: cuts, with neighbors joined."""
        return merge_in_buffers((cut.buffer, cut.span) for cut in self.cuts)


@dataclass(frozen=True, eq=False)
class BucketPlan:
    """Maps the parts of a bucket to cells; see Note [Equal rows].

    Attributes:
        columns: for each column, the contents of its part of the packed bucket, row by row.
    """

    columns: tuple[tuple[RowRange, ...], ...]

    def splits(self, col: int, rows: int) -> list[int]:
        """Return the elements of a column's part for each group."""
        splits = [0] * rows
        for row_range in self.columns[col]:
            splits[row_range.first : row_range.first + row_range.times] = [row_range.numel] * row_range.times
        return splits

    def rows_of(self, col: int, rows: int) -> Contents:
        """Return the contents of a column's part for each group."""
        parts: list[Spans] = [()] * rows
        for row_range in self.columns[col]:
            spans = row_range.spans()
            for row in range(row_range.first, row_range.first + row_range.times):
                parts[row] = tuple(ShardSpan(buffer, row, *span) for buffer, span in spans)
        return tuple(parts)

    def row(self, col: int, row: int) -> list[RowRange]:
        """Return the contents of a column's part for one group; possibly none."""
        return [
            RowRange(row, 1, row_range.cuts)
            for row_range in self.columns[col]
            if 0 <= row - row_range.first < row_range.times
        ]


def plan_bucket(layouts: tuple[FlatLayout, ...], spans: tuple[BufferSpan, ...]) -> BucketPlan:
    """Divide a bucket of concatenated ``spans`` along the cells of their buffers, which all have the same numbers of
    rows and columns."""
    columns: list[list[RowRange]] = [[] for _ in range(layouts[spans[0][0]].cols)]
    offset = 0
    for buffer, span in spans:
        for col, rows in _cells(layouts[buffer], buffer, span, offset):
            columns[col].append(rows)
        offset += span.numel
    return BucketPlan(tuple(tuple(_merge_equal_rows(rows)) for rows in columns))


def _cells(layout: FlatLayout, buffer: int, span: Span, offset: int) -> Iterator[tuple[int, RowRange]]:
    """Yield the cells that a span of a flat buffer covers, by column: each with one cut.

    Args:
        layout: layout of the flat buffer.
        buffer: number of the flat buffer.
        span: elements of the flat buffer.
        offset: offset of the span in the bucket.
    """
    while span.numel:
        stripe = layout.stripe_of(span.start)
        inside = span.common(stripe.span)
        first, last = inside.start - stripe.span.start, inside.stop - stripe.span.start
        width, stride = stripe.width, layout.cols * stripe.width
        full_cells = -(-first // width), last // width  # range of cells that it covers completely
        for cell in sorted({first // width, (last - 1) // width}):
            if not full_cells[0] <= cell < full_cells[1]:
                part = stripe.cell(cell).common(inside)
                elements = part.shifted(stripe.column - stripe.span.start - cell * width)
                cut = Cut(buffer, elements, offset + part.start - inside.start, stride)
                yield cell % layout.cols, RowRange(cell // layout.cols, 1, (cut,))
        for col in range(layout.cols):
            rows = [-(-(cell - col) // layout.cols) for cell in full_cells]
            if rows[0] < rows[1]:
                first_offset = (rows[0] * layout.cols + col) * width - first
                cut = Cut(buffer, Span(stripe.column, width), offset + first_offset, stride)
                yield col, RowRange(rows[0], rows[1] - rows[0], (cut,))
        span, offset = Span.between(inside.stop, span.stop), offset + inside.numel


def _merge_equal_rows(row_ranges: Sequence[RowRange]) -> Iterator[RowRange]:
    """Yield the rows of a column in order, each with all its cuts; rows with the same cuts are merged."""
    sorted_ranges = sorted(row_ranges)
    borders = sorted({border for rows in row_ranges for border in (rows.first, rows.first + rows.times)})
    active: list[RowRange] = []
    position = 0
    for first, end in pairwise(borders):
        active = [rows for rows in active if rows.first + rows.times > first]
        while position < len(sorted_ranges) and sorted_ranges[position].first == first:
            active.append(sorted_ranges[position])
            position += 1
        cuts = [
            cut._replace(offset=cut.offset + (first - rows.first) * cut.stride) for rows in active for cut in rows.cuts
        ]
        if cuts:
            yield RowRange(first, end - first, tuple(sorted(cuts)))
