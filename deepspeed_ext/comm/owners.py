# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Assigns owners, in rounds, to spans that one rank must have completely for a moment. Pure; the same on all ranks."""

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from deepspeed_ext.comm.layout import Stripe
    from deepspeed_ext.comm.spans import Span

ROUNDS = 8  # rounds into which spans for owners are divided; an owner with small spans has more


class Job(NamedTuple):
    """A span that one rank must have completely.

    Attributes:
        span: its elements.
        stripe: division of the elements: rank r has those in cell r; None if every rank has all.
        cost: cost of processing them.
    """

    span: "Span"
    stripe: "Stripe | None"
    cost: float

    def holders(self, ranks: int) -> range:
        """Return the ranks that have elements of the span."""
        return range(ranks) if self.stripe is None else self.stripe.cells(self.span)

    def local_span(self, rank: int) -> "Span":
        """Return the elements of the span on a rank; possibly none."""
        return self.span if self.stripe is None else self.stripe.cell(rank).common(self.span)

    @property
    def is_local(self) -> bool:
        """Whether one rank alone has all elements."""
        return self.stripe is not None and len(self.stripe.cells(self.span)) == 1


def assign_owners(jobs: Sequence[Job], ranks: int, group_size: int) -> list[int]:
    """Return the owner of each job: the least loaded of the ranks that have elements of it.

    Jobs with all elements on one rank are assigned to that rank; then the costliest come first (longest processing
    time first: at most 4/3 of the optimum if every rank may own every job; R. L. Graham, Bounds on Multiprocessing
    Timing Anomalies, 1969). Of equally loaded ranks, the first of each group precedes the second of any, so a few jobs
    are spread over all groups.

    Args:
        ranks: n.
        group_size: m; ranks of a group are consecutive.
    """
    loads = [0.0] * ranks
    groups = -(-ranks // group_size)
    priorities = [rank % group_size * groups + rank // group_size for rank in range(ranks)]
    owners = [0] * len(jobs)
    for number, job in enumerate(jobs):
        if job.is_local:
            owners[number] = job.holders(ranks)[0]
            loads[owners[number]] += job.cost
    heap = [(loads[rank], priorities[rank], rank) for rank in range(ranks)]
    heapq.heapify(heap)
    remaining = (number for number, job in enumerate(jobs) if not job.is_local)
    # Ties are broken by number and by priority, so all ranks compute the same owners.
    for number in sorted(remaining, key=lambda number: (-jobs[number].cost, number)):
        job = jobs[number]
        holders = job.holders(ranks)
        if len(holders) == ranks:
            while heap[0][0] != loads[heap[0][2]]:  # its load has grown since
                heapq.heapreplace(heap, (loads[heap[0][2]], *heap[0][1:]))
            owner = heap[0][2]
        else:
            owner = min(holders, key=lambda rank: (loads[rank], priorities[rank]))
        owners[number] = owner
        loads[owner] += job.cost
    return owners


def rounds(jobs: Sequence[Job], owners: Sequence[int], most_numel: int) -> list[list[int]]:
    """Return the numbers of jobs, round by round: in each, an owner has at most ``most_numel`` elements, or one job.

    The largest come first. Jobs that need no communication are in separate rounds, after all others.
    """
    order = sorted(range(len(jobs)), key=lambda number: (-jobs[number].span.numel, number))
    all_rounds: list[list[int]] = []
    for is_local in (False, True):
        filled: dict[int, tuple[int, int]] = {}  # owner: (its last round, elements in it)
        rounds_of_kind: list[list[int]] = []
        for number in (job for job in order if jobs[job].is_local == is_local):
            last, elements = filled.get(owners[number], (0, 0))
            if elements and elements + jobs[number].span.numel > most_numel:
                last, elements = last + 1, 0
            if last == len(rounds_of_kind):
                rounds_of_kind.append([])
            rounds_of_kind[last].append(number)
            filled[owners[number]] = last, elements + jobs[number].span.numel
        all_rounds += rounds_of_kind
    return all_rounds
