# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A map from spans to values that finds overlaps without visiting all spans; at scale there are a million."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Generic, TypeVar

from deepspeed_ext.comm.spans import ShardSpan

T = TypeVar("T")


class SpanMap(Generic[T]):
    """Disjoint spans, each with a value, in the order of their elements."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], list[tuple[ShardSpan, T]]] = {}

    def add(self, span: ShardSpan, value: T) -> None:
        """Add a span that overlaps none of the others; an empty one is ignored."""
        if span.numel:
            row = self._rows.setdefault((span.buffer, span.row), [])
            row.insert(bisect_left(row, span.start, key=_start), (span, value))

    def over(self, span: ShardSpan) -> list[tuple[ShardSpan, T]]:
        """Return the spans that overlap ``span``, with their values."""
        row = self._rows.get((span.buffer, span.row), [])
        return row[slice(*_bounds(row, span))]

    def take(self, span: ShardSpan) -> list[tuple[ShardSpan, T]]:
        """Remove and return the spans that overlap ``span``, with their values."""
        row = self._rows.get((span.buffer, span.row), [])
        bounds = slice(*_bounds(row, span))
        taken = row[bounds]
        del row[bounds]
        return taken

    def clear(self) -> None:
        """Remove all spans."""
        self._rows.clear()

    def __iter__(self) -> Iterator[tuple[ShardSpan, T]]:
        return (pair for row in self._rows.values() for pair in row)


def _start(pair: tuple[ShardSpan, object]) -> int:
    return pair[0].start


def _bounds(row: list[tuple[ShardSpan, T]], span: ShardSpan) -> tuple[int, int]:
    """Return the range of positions in a row with spans that overlap ``span``.

    Of the spans that start before it, only the last can reach into it.
    """
    if not span.numel:
        return 0, 0
    first = bisect_right(row, span.start, key=_start)
    if first and row[first - 1][0].elements.stop > span.start:
        first -= 1
    return first, bisect_left(row, span.elements.stop, lo=first, key=_start)
