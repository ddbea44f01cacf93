# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Who takes what must be whole on one rank for a moment: owners, in rounds. Pure, and the same on all ranks."""

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from deepspeed_ext.comm.layout import Stripe
    from deepspeed_ext.comm.spans import Span

ROUNDS = 8  # in which what goes to owners is divided; an owner has more, if what it takes is small


class Job(NamedTuple):
    """A span that one rank must have whole.

    Attributes:
        span: its elements.
        stripe: how they are divided: rank r has those in cell r; None if every rank has all.
        cost: of what is to be done with them.
    """

    span: "Span"
    stripe: "Stripe | None"
    cost: float

    def holders(self, ranks: int) -> range:
        """Return the ranks that have something of it."""
        return range(ranks) if self.stripe is None else self.stripe.cells(self.span)

    def held(self, rank: int) -> "Span":
        """Return which of its elements a rank has; possibly none."""
        return self.span if self.stripe is None else self.stripe.cell(rank).common(self.span)

    @property
    def stays(self) -> bool:
        """Whether one rank has all of it, and no other anything."""
        return self.stripe is not None and len(self.stripe.cells(self.span)) == 1


def assign(jobs: Sequence[Job], ranks: int, group_size: int) -> list[int]:
    """Return the owner of each job: of those that have something of it the one that has least to do by then.

    What one rank has alone is its own; then the costliest come first (longest processing time first: at most 4/3 of
    what is possible where all may own all; R. L. Graham, Bounds on Multiprocessing Timing Anomalies, 1969). Of ranks
    that have as little to do, the first of each group comes before the second of any: so few jobs are spread over all
    groups.

    Args:
        jobs: what is to be owned.
        ranks: n.
        group_size: m; ranks of a group are consecutive.
    """
    loads = [0.0] * ranks
    groups = -(-ranks // group_size)
    places = [rank % group_size * groups + rank // group_size for rank in range(ranks)]
    owners = [0] * len(jobs)
    for number, job in enumerate(jobs):
        if job.stays:
            owners[number] = job.holders(ranks)[0]
            loads[owners[number]] += job.cost
    heap = [(loads[rank], places[rank], rank) for rank in range(ranks)]
    heapq.heapify(heap)
    rest = (number for number, job in enumerate(jobs) if not job.stays)
    for number in sorted(rest, key=lambda number: (-jobs[number].cost, number)):
        job = jobs[number]
        holders = job.holders(ranks)
        if len(holders) == ranks:
            while heap[0][0] != loads[heap[0][2]]:  # has been given something since
                heapq.heapreplace(heap, (loads[heap[0][2]], *heap[0][1:]))
            owner = heap[0][2]
        else:
            owner = min(holders, key=lambda rank: (loads[rank], places[rank]))
        owners[number] = owner
        loads[owner] += job.cost
    return owners


def rounds(jobs: Sequence[Job], owners: Sequence[int], most: int) -> list[list[int]]:
    """Return the numbers of jobs, round by round: in each, an owner has ``most`` elements, or one job.

    The largest come first. What stays where it is comes in rounds of its own, after all others.
    """
    order = sorted(range(len(jobs)), key=lambda number: (-jobs[number].span.numel, number))
    found: list[list[int]] = []
    for stays in (False, True):
        filled: dict[int, tuple[int, int]] = {}  # owner: its last round, and elements in it
        some: list[list[int]] = []
        for number in (one for one in order if jobs[one].stays == stays):
            last, elements = filled.get(owners[number], (0, 0))
            if elements and elements + jobs[number].span.numel > most:
                last, elements = last + 1, 0
            if last == len(some):
                some.append([])
            some[last].append(number)
            filled[owners[number]] = last, elements + jobs[number].span.numel
        found += some
    return found
