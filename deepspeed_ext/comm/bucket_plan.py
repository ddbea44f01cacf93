# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Where the parts of a bucket of flat buffers belong.

Note [Rows that are alike]
    A bucket has some spans of flat buffers, each of which runs through many cells: with 16,384 ranks a stripe has as
    many. Most of them are in it as a whole. So a plan does not list cells but, for each column, neighboring rows of
    which the bucket has the same elements: a handful, whatever the number of ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

from torch import Tensor

from deepspeed_ext.comm.layout import FlatLayout
from deepspeed_ext.comm.spans import BufferSpan, Contents, ShardSpan, Span, Spans, neighbors_joined


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
