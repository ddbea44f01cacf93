# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Who takes what must be whole on one rank for a moment: owners, in rounds. Pure, and the same on all ranks."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

ROUNDS = 8  # in which what goes to owners is divided; an owner has more, if what it takes is small


class Cells(NamedTuple):
    """How elements are divided: rank r has those from ``origin + r * width`` to where the next one's begin."""

    origin: int
    width: int

    def part(self, rank: int, start: int, numel: int) -> tuple[int, int]:
        """Return which of ``numel`` elements from ``start`` on a rank has: (first, number), counted from ``start``."""
        first = max(self.origin + rank * self.width - start, 0)
        end = min(self.origin + (rank + 1) * self.width - start, numel)
        return (first, end - first) if first < end else (0, 0)

    def holders(self, start: int, numel: int) -> range:
        """Return the ranks that have something of at least one element from ``start`` on."""
        return range((start - self.origin) // self.width, (start + numel - 1 - self.origin) // self.width + 1)


class Stretch(NamedTuple):
    """Neighboring elements that one rank must have together.

    Attributes:
        start, numel: which.
        cells: how they are divided among ranks; None if every rank has all.
        cost: of what is to be done with them.
    """

    start: int
    numel: int
    cells: Cells | None
    cost: float

    def holders(self, ranks: int) -> range:
        """Return the ranks that have something of it."""
        return range(ranks) if self.cells is None else self.cells.holders(self.start, self.numel)

    def part(self, rank: int) -> tuple[int, int]:
        """Return which of its elements a rank has: (first, number)."""
        return (0, self.numel) if self.cells is None else self.cells.part(rank, self.start, self.numel)

    @property
    def stays(self) -> bool:
        """Whether one rank has all of it, and no other anything."""
        return self.cells is not None and len(self.cells.holders(self.start, self.numel)) == 1


def assign(stretches: Sequence[Stretch], ranks: int, group_size: int) -> list[int]:
    """Return the owner of each stretch: of those that have something of it the one that has least to do by then.

    What one rank has alone is its own; then the costliest come first (longest processing time first: at most 4/3 of
    what is possible where all may own all; R. L. Graham, Bounds on Multiprocessing Timing Anomalies, 1969). Of ranks
    that have as little to do, the first of each group comes before the second of any: so few stretches are spread over
    all groups.

    Args:
        stretches: what is to be owned.
        ranks: n.
        group_size: m; ranks of a group are consecutive.
    """
    loads = [0.0] * ranks
    groups = -(-ranks // group_size)
    places = [rank % group_size * groups + rank // group_size for rank in range(ranks)]
    owners = [0] * len(stretches)
    for number, stretch in enumerate(stretches):
        if stretch.stays:
            owners[number] = stretch.holders(ranks)[0]
            loads[owners[number]] += stretch.cost
    heap = [(loads[rank], places[rank], rank) for rank in range(ranks)]
    heapq.heapify(heap)
    rest = (number for number, stretch in enumerate(stretches) if not stretch.stays)
    for number in sorted(rest, key=lambda number: (-stretches[number].cost, number)):
        stretch = stretches[number]
        holders = stretch.holders(ranks)
        if len(holders) == ranks:
            while heap[0][0] != loads[heap[0][2]]:  # has been given something since
                heapq.heapreplace(heap, (loads[heap[0][2]], *heap[0][1:]))
            owner = heap[0][2]
        else:
            owner = min(holders, key=lambda rank: (loads[rank], places[rank]))
        owners[number] = owner
        loads[owner] += stretch.cost
    return owners


def rounds(stretches: Sequence[Stretch], owners: Sequence[int], most: int) -> list[list[int]]:
    """Return the numbers of stretches, round by round: in each, an owner has ``most`` elements, or one stretch.

    The largest come first. What stays where it is comes in rounds of its own, after all others.
    """
    order = sorted(range(len(stretches)), key=lambda number: (-stretches[number].numel, number))
    found: list[list[int]] = []
    for stays in (False, True):
        filled: dict[int, tuple[int, int]] = {}  # owner: its last round, and elements in it
        some: list[list[int]] = []
        for number in (one for one in order if stretches[one].stays == stays):
            last, elements = filled.get(owners[number], (0, 0))
            if elements and elements + stretches[number].numel > most:
                last, elements = last + 1, 0
            if last == len(some):
                some.append([])
            some[last].append(number)
            filled[owners[number]] = last, elements + stretches[number].numel
        found += some
    return found
