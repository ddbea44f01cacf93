# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""With an outer optimizer a group that stops for a while delays others only where they use what it has not sent."""

from typing import Any

import pytest

from tests.harness.tiers import deep

MOMENTS = {False: "before it sends", True: "when it has sent"}
SLEEP = 3.0  # seconds, in which the other group takes at most ten steps
H, DELAY = 6, 3
STOP = 2 * H  # the step before or after which a group stops: what leaves after it is used DELAY steps later


@pytest.mark.parametrize(
    "name, after",
    [("III", False), ("NII", True), *deep(("III", True), ("NII", False))],
    ids=lambda value: MOMENTS.get(value, value),
)
def test_a_group_that_stops_delays_others_where_they_use_its_fragment(ranks: Any, name: str, after: bool) -> None:
    found = ranks(4).run(case, name, after)
    sleeping, waking = min(begin for begin, *_ in found[2:]), min(end for _, end, _ in found[2:])
    waits = STOP + DELAY + (H if after else 0)  # what it has sent travels though it sleeps
    for _, _, ends in found[:2]:
        early = [step for step, end in ends.items() if end < waking]
        assert early == list(range(STOP, waits)), [(step, end - sleeping) for step, end in ends.items()]


def case(name: str, after: bool) -> tuple[float, float, dict[int, float]]:
    """When this rank has begun and ended to sleep, and when each step from the one in question on has ended."""
    import time

    from deepspeed import comm as dist

    from tests.harness import training
    from tests.harness.outer_oracle import KEY

    job = training.Job(empty=False)
    outer = {"steps": H, "fragments": 1, "delay": DELAY}
    engine, _ = training.make_engine(job, training.placed(name, 2, **{KEY: outer}))
    data, slow = training.batches(job), dist.get_rank() >= 2
    begin = end = 0.0
    ends = {}
    for step in range(1, STOP + 2 * H):
        if step == STOP:
            dist.barrier()
        if slow and step == STOP + after:
            begin = time.monotonic()
            time.sleep(SLEEP)
            end = time.monotonic()
        training.micro_step(engine, job, step - 1, *next(data))
        engine.step()
        if step >= STOP:
            ends[step] = time.monotonic()
    engine.destroy()
    return begin, end, ends
