# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Finds what belongs to the elements of a run without a look at all runs: there are a million of them at scale."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Generic, TypeVar

from deepspeed_ext.comm.hops import Span

T = TypeVar("T")


def common(one: Span, other: Span) -> Span | None:
    """The elements that are in both runs."""
    if (one.buffer, one.row) != (other.buffer, other.row):
        return None
    start = max(one.start, other.start)
    end = min(one.start + one.numel, other.start + other.numel)
    return Span(one.buffer, one.row, start, end - start) if start < end else None


def without(run: Span, taken: Span) -> list[Span]:
    """What is left of a run, of which ``taken`` is a part: none, one or two runs."""
    after = taken.start + taken.numel
    pieces = (
        run._replace(numel=taken.start - run.start),
        run._replace(start=after, numel=run.start + run.numel - after),
    )
    return [piece for piece in pieces if piece.numel]


class Stretches(Generic[T]):
    """Runs that have no element in common, and what belongs to each; in the order of their elements."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], list[tuple[Span, T]]] = {}

    def add(self, run: Span, value: T) -> None:
        """Add a run that has no element in common with one that is there; an empty one is left out."""
        if run.numel:
            row = self._rows.setdefault((run.buffer, run.row), [])
            row.insert(bisect_left(row, run.start, key=_start), (run, value))

    def over(self, run: Span) -> list[tuple[Span, T]]:
        """Those that have elements in common with ``run``."""
        row = self._rows.get((run.buffer, run.row), [])
        return row[slice(*_bounds(row, run))]

    def take(self, run: Span) -> list[tuple[Span, T]]:
        """As ``over``; they are no longer here."""
        row = self._rows.get((run.buffer, run.row), [])
        bounds = slice(*_bounds(row, run))
        taken = row[bounds]
        del row[bounds]
        return taken

    def clear(self) -> None:
        """Leave none."""
        self._rows.clear()

    def __iter__(self) -> Iterator[tuple[Span, T]]:
        return (pair for row in self._rows.values() for pair in row)


def _start(pair: tuple[Span, object]) -> int:
    return pair[0].start


def _bounds(row: list[tuple[Span, T]], run: Span) -> tuple[int, int]:
    """Between which positions of a row its runs overlap with ``run``: only the one before may reach into it."""
    if not run.numel:
        return 0, 0
    first = bisect_right(row, run.start, key=_start)
    if first and common(row[first - 1][0], run):
        first -= 1
    return first, bisect_left(row, run.start + run.numel, lo=first, key=_start)
