# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Owners have equal work, receive only what others hold, and work in rounds that are not too large."""

import random
from collections import Counter

import pytest

from deepspeed_ext.comm.layout import Stripe
from deepspeed_ext.comm.owners import Job, assign, rounds
from deepspeed_ext.comm.spans import Span


@pytest.mark.parametrize("origin, width", [(0, 7), (-5, 7), (-40, 16), (0, 1000)])
def test_parts_of_ranks_make_the_whole(origin: int, width: int) -> None:
    job = Job(Span(11, 90), Stripe(Span(origin, 200), 0, width), 1.0)
    covered: list[int] = []
    for rank in job.holders(20):
        held = job.held(rank)
        assert held.numel
        covered += range(held.start, held.stop)
    assert covered == list(range(11, 101))
    assert sum(held.numel for held in map(job.held, range(200))) == 90  # others have nothing


def test_costs_are_balanced_and_few_jobs_are_spread_over_groups() -> None:
    generator = random.Random(5)
    ranks, group = 12, 4
    costs = [generator.uniform(1, 9) for _ in range(200)]
    jobs = [Job(Span(0, 120), Stripe(Span(0, 120), 0, 10), cost) for cost in costs]
    loads = Counter[int]()
    for owner, cost in zip(assign(jobs, ranks, group), costs, strict=True):
        loads[owner] += cost
    assert len(loads) == ranks and max(loads.values()) < 1.05 * sum(costs) / ranks
    few = assign(jobs[:6], ranks, group)
    assert Counter(owner // group for owner in few) == {0: 2, 1: 2, 2: 2}


def test_holders_own_and_what_one_rank_has_stays() -> None:
    stripe = Stripe(Span(0, 400), 0, 100)
    jobs = [
        Job(Span(0, 90), stripe, 5.0),  # all of it is rank 0's
        Job(Span(90, 20), stripe, 1.0),  # of ranks 0 and 1
        Job(Span(110, 80), stripe, 1.0),  # rank 1's
        Job(Span(190, 150), stripe, 3.0),  # of ranks 1, 2 and 3
    ]
    assert [job.stays for job in jobs] == [True, False, True, False]
    assert assign(jobs, 4, 2) == [0, 1, 1, 2]
    assert not Job(Span(0, 5), None, 1.0).stays


def test_rounds_are_filled_owner_by_owner() -> None:
    stripe = Stripe(Span(0, 120), 0, 10)
    jobs = [Job(Span(0, numel), stripe, 1.0) for numel in (50, 30, 30, 20, 20, 8)]
    owners = [0, 1, 1, 1, 0, 0]
    found = rounds(jobs, owners, most=50)
    assert found == [[0, 1], [2, 3, 4], [5]]  # what stays comes last
    assert sorted(number for some in rounds(jobs, owners, most=1) for number in some) == list(range(6))
    for some in rounds(jobs, owners, most=1):
        assert max(Counter(owners[number] for number in some).values()) == 1
