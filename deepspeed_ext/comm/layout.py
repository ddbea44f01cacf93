# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""How flat buffers are divided into cells, and where the parts of a bucket of them belong.

Note [Flat buffers, cells and slices]
    A flat buffer is divided into rows x cols *cells* of ``chunk`` elements; cell (row j, column i) starts at element
    (j*cols + i)*chunk. With columns = numbers in the group (m) and rows = groups (k), cell (j, i) is the chunk that
    ZeRO gives to data-parallel rank j*m + i. The I-slice of a rank is its column, the *strided* chunks
    {i, m+i, 2m+i, ...}: a reduce-scatter of it between groups lands on exactly ZeRO's chunk, so checkpoints need no
    permutation. Where the optimizer's states are not sharded between groups there is one row, and the slice is
    contiguous.
    With p = N the flat buffer is all parameters of a parameter group, as in ZeRO-1/2; with p = I or G it is each
    parameter, as in ZeRO-3, and the cells of several parameters travel side by side: (cols, rows, width).

Note [Stripes]
    ZeRO-1/2 gives each rank one span of the flat buffer. So a bucket, which has a few neighboring layers, is of few
    ranks: it is sent to these alone, between groups over one link of k, and what is updated comes back in an order
    that has nothing to do with that of the modules. So the flat buffer may be divided into *stripes* of whole
    parameters first, each of which is divided into cells by itself; chunk r is then the r-th cell of every stripe,
    side by side. A stripe is balanced over all ranks, and a window of all chunks is a span of the model.
    (Megatron-LM's distributed optimizer divides each of its buckets among all ranks, for the same reason.)
    Nothing but padding is added: the cells of a stripe have equal widths. A parameter is in one stripe, so a rank has
    one piece of it at most, as DeepSpeed's mapping of parameters needs.

Note [Rows that are alike]
    A bucket has some spans of flat buffers, each of which runs through many cells: with 16,384 ranks a stripe has as
    many. Most of them are in it as a whole. So a plan does not list cells but, for each column, neighboring rows of
    which the bucket has the same elements: a handful, whatever the number of ranks.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.comm.packing import fill_up
from deepspeed_ext.comm.process_groups import Topology
from deepspeed_ext.comm.spans import BufferSpan, Contents, ShardSpan, Span, Spans, neighbors_joined
from deepspeed_ext.strategy import Placement

# What starts of windows are multiples of, the first of them that fits: whole blocks of LoCo, aligned buckets.
_STRIDES = (512, 16)
_MOST_PADDING = 64  # of so many elements of a cell one may be padding, so that windows begin at such multiples ...
_NARROWEST = 2  # ... and in any case at this one: ZeRO-1/2 wants partitions that are aligned to 4 bytes


def _stride(width: int, least: int = 1) -> int:
    return next((stride for stride in _STRIDES if stride <= width), least)


def windows(span: Span, rows: int, most: int) -> list[Span]:
    """Return windows over the columns of a span; ``rows`` of one have at most ``most`` elements."""
    width = max(1, most // rows)
    width -= width % _stride(width)
    return [Span(start, width).common(span) for start in range(span.start, span.stop, width)]


class Stripe(NamedTuple):
    """A span of a flat buffer, divided into cells of ``width`` elements, which are in chunks from ``column`` on."""

    span: Span
    column: int
    width: int

    def cell(self, number: int) -> Span:
        """Return the elements that are in a cell; none where it is after the end of the stripe."""
        return Span(self.span.start + number * self.width, self.width).common(self.span)

    def cells(self, span: Span) -> range:
        """Return the numbers of the cells that have something of a span."""
        first, last = span.start - self.span.start, span.stop - 1 - self.span.start
        return range(first // self.width, last // self.width + 1)

    def shifted(self, by: int) -> "Stripe":
        """Return the stripe as something else counts its elements: from ``by`` elements earlier on."""
        return self._replace(span=self.span.shifted(by))


class Piece(NamedTuple):
    """A span of a flat buffer that is in one cell, and in the chunk from ``column`` on."""

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
    """How a flat buffer of ``numel`` elements is divided into cells; see Note [Flat buffers, cells and slices].

    Attributes:
        starts: of the stripes in the flat buffer, where there are several; see Note [Stripes].
    """

    numel: int
    rows: int
    cols: int
    starts: tuple[int, ...] = (0,)

    @classmethod
    def of(cls, numel: int, placement: Placement, topology: Topology, starts: tuple[int, ...] = (0,)) -> "FlatLayout":
        """Return the layout of a buffer whose optimizer states are in ``placement``."""
        rows = topology.sizes.groups if placement == Placement.G else 1
        return cls(numel, rows, topology.sizes.group_size, starts)

    @cached_property
    def stripes(self) -> tuple[Stripe, ...]:
        """The stripes, in order. The cells of the only one are as narrow as can be, as ZeRO's are."""
        cells, made, column = self.rows * self.cols, list[Stripe](), 0
        for start, end in zip(self.starts, (*self.starts[1:], self.numel), strict=True):
            width = -(-(end - start) // cells)
            if len(self.starts) > 1:
                width = fill_up(width, _stride(width // _MOST_PADDING, _NARROWEST))
            made.append(Stripe(Span.between(start, end), column, width))
            column += width
        return tuple(made)

    @property
    def chunk(self) -> int:
        """Elements of a chunk. The last cells reach over the end where ``numel`` does not divide."""
        return self.stripes[-1].column + self.stripes[-1].width

    def windows(self, rows: int, most: int, number: int | None = None) -> list[Span]:
        """Return windows over the columns, each in one stripe; ``rows`` of one have at most ``most`` elements. Of all
        stripes, or of one."""
        stripes = self.stripes if number is None else self.stripes[number : number + 1]
        return [window for one in stripes for window in windows(Span(one.column, one.width), rows, most)]

    def stripe_of(self, element: int) -> Stripe:
        """Return the stripe that an element of the flat buffer is in."""
        return self.stripes[bisect_right(self.starts, element) - 1]

    def pieces(self, span: Span) -> Iterator[Piece]:
        """Return where a span of the flat buffer is, in its order."""
        while span.numel:
            stripe = self.stripe_of(span.start)
            number, within = divmod(span.start - stripe.span.start, stripe.width)
            inside = span.common(stripe.cell(number))
            yield Piece(*divmod(number, self.cols), stripe.column + within, inside)
            span = Span.between(inside.stop, span.stop)

    def cells_of(self, row: int, col: int) -> Iterator[Piece]:
        """Return what a chunk holds, in its order; padding follows the elements of a cell."""
        for stripe in self.stripes:
            span = stripe.cell(row * self.cols + col)
            if span.numel:
                yield Piece(row, col, stripe.column, span)

    def pack(self, flat: Tensor, cells: Tensor) -> None:
        """Copy the flat buffer, of one stripe, into its cells, with zeros after its end.

        Args:
            flat: 1D of ``numel`` elements.
            cells: (cols, rows, chunk), of any dtype and strides.
        """
        missing = self.rows * self.cols * self.chunk - self.numel
        whole = torch.nn.functional.pad(flat, (0, missing)) if missing else flat
        cells.copy_(whole.view(self.rows, self.cols, self.chunk).transpose(0, 1))

    def unpack(self, cells: Tensor) -> Tensor:
        """Return the flat buffer (1D), of one stripe, from its cells (cols, rows, chunk); a view where that can be."""
        return cells.transpose(0, 1).reshape(-1)[: self.numel]

    def place(self, flat: Tensor, start: int, cells: Tensor, add: bool = False) -> None:
        """Copy (or add) a window of every cell into the flat buffer.

        Args:
            flat: 1D of at least ``numel`` elements.
            start: first element of the window within each chunk; the window is in one stripe.
            cells: (cols, rows, width), as a gather inside the group of gathers between groups gives it.
            add: add to what is there.
        """
        by_rows, parts = cells.transpose(0, 1), list[tuple[Tensor, Tensor]]()
        for numbers, held in self.held(flat, Span(start, cells.shape[-1])):
            source = by_rows[..., : held.shape[1]]
            whole = numbers.stop // self.cols if not numbers.start else 0  # rows
            if whole:
                parts.append((held[: whole * self.cols].unflatten(0, (whole, self.cols)), source[:whole]))
            row, col = divmod(numbers.start + whole * self.cols, self.cols)
            rest = held[whole * self.cols :]
            if len(rest):
                parts.append((rest, source[row, col : col + len(rest)]))
        for target, part in parts:
            target.add_(part) if add else target.copy_(part)

    def held(self, flat: Tensor, window: Span) -> list[tuple[slice, Tensor]]:
        """Return a window of every cell as views of the flat buffer.

        Args:
            flat: 1D of at least ``numel`` elements.
            window: elements of each chunk, in one stripe.

        Returns:
            Numbers of cells, row by row, and their windows, (cells, elements). The last window that has elements may
            have less of them than the others, and is by itself then.
        """
        stripe = self._stripe_at(window.start)
        numel, within, width = stripe.span.numel, window.start - stripe.column, window.numel
        whole = max(0, min(self.rows * self.cols, (numel - within - width) // stripe.width + 1))
        found = []
        if whole:
            first = flat.storage_offset() + stripe.span.start + within
            found.append((slice(0, whole), flat.as_strided((whole, width), (stripe.width, 1), first)))
        rest = numel - (whole * stripe.width + within)
        if whole < self.rows * self.cols and rest > 0:
            first = stripe.span.start + whole * stripe.width + within
            found.append((slice(whole, whole + 1), flat[first : first + rest].view(1, rest)))
        return found

    def _stripe_at(self, column: int) -> Stripe:
        return self.stripes[bisect_right(self.stripes, column, key=lambda stripe: stripe.column) - 1]


def parts_of(tensors: Sequence[Tensor], spans: Sequence[BufferSpan]) -> Iterator[Tensor]:
    """Yield of each span of a bucket its part, 1D. ``tensors``: the bucket, 1D, or one tensor for each span."""
    if len(tensors) == len(spans):
        yield from tensors
        return
    (bucket,) = tensors
    yield from bucket.split([span.numel for _, span in spans])


class Cut(NamedTuple):
    """A span of each of some rows, in their chunks of a flat buffer.

    Attributes:
        offset: of the first row's in the bucket; those of each further row start ``stride`` later.
    """

    buffer: int
    span: Span
    offset: int
    stride: int


class Rows(NamedTuple):
    """Neighboring rows of a column, of which a bucket has the same elements: ``times`` from ``first`` on."""

    first: int
    times: int
    cuts: tuple[Cut, ...]

    @property
    def numel(self) -> int:
        """Elements of each row."""
        return sum(cut.span.numel for cut in self.cuts)

    def spans(self) -> list[BufferSpan]:
        """Return what each row holds in its chunks, in order: cuts, neighbors joined."""
        by_buffer = groupby(self.cuts, key=lambda cut: cut.buffer)
        return [(buffer, span) for buffer, cuts in by_buffer for span in neighbors_joined(cut.span for cut in cuts)]


@dataclass(frozen=True, eq=False)
class BucketPlan:
    """Where the parts of a bucket go; see Note [Rows that are alike].

    Attributes:
        columns: for each column, what its part of the packed bucket holds: row after row.
    """

    columns: tuple[tuple[Rows, ...], ...]

    def splits(self, col: int, rows: int) -> list[int]:
        """Return the elements of a column's part for each group."""
        splits = [0] * rows
        for some in self.columns[col]:
            splits[some.first : some.first + some.times] = [some.numel] * some.times
        return splits

    def rows_of(self, col: int, rows: int) -> Contents:
        """Return what a column's part holds for each group."""
        parts: list[Spans] = [()] * rows
        for some in self.columns[col]:
            spans = some.spans()
            for row in range(some.first, some.first + some.times):
                parts[row] = tuple(ShardSpan(buffer, row, *span) for buffer, span in spans)
        return tuple(parts)

    def row(self, col: int, row: int) -> list[Rows]:
        """Return what a column's part holds for one group, if anything."""
        return [Rows(row, 1, some.cuts) for some in self.columns[col] if 0 <= row - some.first < some.times]


@lru_cache(maxsize=4096)  # training repeats the same buckets
def plan_bucket(layouts: tuple[FlatLayout, ...], spans: tuple[BufferSpan, ...]) -> BucketPlan:
    """Divide a bucket that holds ``spans``, one after the other, along the cells of their buffers, which have as many
    rows and columns as one another."""
    columns: list[list[Rows]] = [[] for _ in range(layouts[spans[0][0]].cols)]
    offset = 0
    for buffer, span in spans:
        for col, rows in _cells(layouts[buffer], buffer, span, offset):
            columns[col].append(rows)
        offset += span.numel
    return BucketPlan(tuple(tuple(_alike(some)) for some in columns))


def _cells(layout: FlatLayout, buffer: int, span: Span, offset: int) -> Iterator[tuple[int, Rows]]:
    """Give the cells that a span of a flat buffer runs through, by column: each with one cut.

    Args:
        layout: of the flat buffer.
        buffer: its number.
        span: elements of it.
        offset: of the span in the bucket.
    """
    while span.numel:
        stripe = layout.stripe_of(span.start)
        inside = span.common(stripe.span)
        first, last = inside.start - stripe.span.start, inside.stop - stripe.span.start
        width, stride = stripe.width, layout.cols * stripe.width
        whole = -(-first // width), last // width  # cells that are in it as a whole
        for cell in sorted({first // width, (last - 1) // width}):
            if not whole[0] <= cell < whole[1]:
                mine = stripe.cell(cell).common(inside)
                held = mine.shifted(stripe.column - stripe.span.start - cell * width)
                cut = Cut(buffer, held, offset + mine.start - inside.start, stride)
                yield cell % layout.cols, Rows(cell // layout.cols, 1, (cut,))
        for col in range(layout.cols):
            rows = [-(-(cell - col) // layout.cols) for cell in whole]
            if rows[0] < rows[1]:
                at = (rows[0] * layout.cols + col) * width - first
                cut = Cut(buffer, Span(stripe.column, width), offset + at, stride)
                yield col, Rows(rows[0], rows[1] - rows[0], (cut,))
        span, offset = Span.between(inside.stop, span.stop), offset + inside.numel


def _alike(some: Sequence[Rows]) -> Iterator[Rows]:
    """Give the rows of a column in order, each with all its cuts, those together that have the same."""
    begins = sorted(some)
    borders = sorted({border for rows in some for border in (rows.first, rows.first + rows.times)})
    active: list[Rows] = []
    position = 0
    for first, end in pairwise(borders):
        active = [rows for rows in active if rows.first + rows.times > first]
        while position < len(begins) and begins[position].first == first:
            active.append(begins[position])
            position += 1
        cuts = [
            cut._replace(offset=cut.offset + (first - rows.first) * cut.stride) for rows in active for cut in rows.cuts
        ]
        if cuts:
            yield Rows(first, end - first, tuple(sorted(cuts)))
