# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A map from spans to values that finds overlaps without looking at all spans: at scale there are a million."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Generic, TypeVar

from deepspeed_ext.comm.spans import ShardSpan

T = TypeVar("T")


class SpanMap(Generic[T]):
    """Spans that have no element in common, and what belongs to each; in the order of their elements."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], list[tuple[ShardSpan, T]]] = {}

    def add(self, span: ShardSpan, value: T) -> None:
        """Add a span that has no element in common with one that is there; an empty one is left out."""
        if span.numel:
            row = self._rows.setdefault((span.buffer, span.row), [])
            row.insert(bisect_left(row, span.start, key=_start), (span, value))

    def over(self, span: ShardSpan) -> list[tuple[ShardSpan, T]]:
        """Return those that have elements in common with ``span``."""
        row = self._rows.get((span.buffer, span.row), [])
        return row[slice(*_bounds(row, span))]

    def take(self, span: ShardSpan) -> list[tuple[ShardSpan, T]]:
        """Remove those that have elements in common with ``span``, and return them."""
        row = self._rows.get((span.buffer, span.row), [])
        bounds = slice(*_bounds(row, span))
        taken = row[bounds]
        del row[bounds]
        return taken

    def clear(self) -> None:
        """Remove all."""
        self._rows.clear()

    def __iter__(self) -> Iterator[tuple[ShardSpan, T]]:
        return (pair for row in self._rows.values() for pair in row)


def _start(pair: tuple[ShardSpan, object]) -> int:
    return pair[0].start


def _bounds(row: list[tuple[ShardSpan, T]], span: ShardSpan) -> tuple[int, int]:
    """Return between which positions of a row spans overlap with ``span``: only the one before may reach into it."""
    if not span.numel:
        return 0, 0
    first = bisect_right(row, span.start, key=_start)
    if first and row[first - 1][0].elements.stop > span.start:
        first -= 1
    return first, bisect_left(row, span.elements.stop, lo=first, key=_start)
