# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Where the parts of a bucket of flat buffers belong.

Note [Rows that are alike]
    A bucket has some stretches of flat buffers, each of which runs through many cells: with 16,384 ranks a stripe has
    as many. Most of them are in it as a whole. So a plan does not list cells but, for each column, stretches of rows
    of which the bucket has the same elements: a handful, whatever the number of ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from deepspeed_ext.comm.hops import Contents, Span
from deepspeed_ext.comm.layout import FlatLayout


class Range(NamedTuple):
    """Elements ``start`` to ``start + numel`` of flat buffer number ``buffer``."""

    buffer: int
    start: int
    numel: int


def parts_of(tensors: Sequence[Tensor], ranges: Sequence[Range]) -> Iterator[Tensor]:
    """Yield of each range of a bucket its part, 1D. ``tensors``: the bucket, 1D, or one tensor for each range."""
    if len(tensors) == len(ranges):
        yield from tensors
        return
    (bucket,) = tensors
    yield from bucket.split([one.numel for one in ranges])


class Cut(NamedTuple):
    """Elements of a row: ``numel`` from ``start`` on in its chunk of a flat buffer.

    Attributes:
        offset: of the first row's in the bucket; those of each further row start ``stride`` later.
    """

    buffer: int
    start: int
    numel: int
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
        return sum(cut.numel for cut in self.cuts)

    def stretches(self) -> list[Range]:
        """Return what each row holds in its chunks, in order: cuts, neighbors joined."""
        joined: list[Range] = []
        for buffer, start, numel, *_ in self.cuts:
            last = joined[-1] if joined else None
            if last and (last.buffer, last.start + last.numel) == (buffer, start):
                joined[-1] = last._replace(numel=last.numel + numel)
            else:
                joined.append(Range(buffer, start, numel))
        return joined


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
        parts: list[tuple[Span, ...]] = [()] * rows
        for some in self.columns[col]:
            stretches = some.stretches()
            for row in range(some.first, some.first + some.times):
                parts[row] = tuple(Span(buffer, row, start, numel) for buffer, start, numel in stretches)
        return tuple(parts)

    def row(self, col: int, row: int) -> list[Rows]:
        """Return what a column's part holds for one group, if anything."""
        return [Rows(row, 1, some.cuts) for some in self.columns[col] if 0 <= row - some.first < some.times]


@lru_cache(maxsize=4096)  # training repeats the same buckets
def plan_bucket(layouts: tuple[FlatLayout, ...], ranges: tuple[Range, ...]) -> BucketPlan:
    """Divide a bucket that holds ``ranges``, one after the other, along the cells of their buffers, which have as many
    rows and columns as one another."""
    columns: list[list[Rows]] = [[] for _ in range(layouts[ranges[0].buffer].cols)]
    offset = 0
    for buffer, start, numel in ranges:
        for col, rows in _cells(layouts[buffer], buffer, start, numel, offset):
            columns[col].append(rows)
        offset += numel
    return BucketPlan(tuple(tuple(_alike(some)) for some in columns))


def _cells(layout: FlatLayout, buffer: int, start: int, numel: int, offset: int) -> Iterator[tuple[int, Rows]]:
    """Give the cells that a stretch of a flat buffer runs through, by column: each with one cut.

    Args:
        layout: of the flat buffer.
        buffer: its number.
        start, numel: the stretch.
        offset: of the stretch in the bucket.
    """
    end = start + numel
    while start < end:
        stripe = layout.stripe_of(start)
        first, last = start - stripe.start, min(end, stripe.start + stripe.numel) - stripe.start  # in the stripe
        width, stride = stripe.width, layout.cols * stripe.width
        whole = -(-first // width), last // width  # cells that are in it as a whole
        for cell in sorted({first // width, (last - 1) // width}):
            if not whole[0] <= cell < whole[1]:
                begin, stop = max(first, cell * width), min(last, (cell + 1) * width)
                cut = Cut(buffer, stripe.column + begin - cell * width, stop - begin, offset + begin - first, stride)
                yield cell % layout.cols, Rows(cell // layout.cols, 1, (cut,))
        for col in range(layout.cols):
            rows = [-(-(cell - col) // layout.cols) for cell in whole]
            if rows[0] < rows[1]:
                at = (rows[0] * layout.cols + col) * width - first
                cut = Cut(buffer, stripe.column, width, offset + at, stride)
                yield col, Rows(rows[0], rows[1] - rows[0], (cut,))
        start, offset = stripe.start + last, offset + last - first


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
