# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""On devices with streams nothing is used before it is complete. See Note [How order is checked]."""

from pathlib import Path
from typing import Any

import pytest

from tests.harness import stream_cases
from tests.harness.fake_wire import FEW_AT_A_TIME, WITHOUT_TIMER
from tests.harness.networks import SQUARE
from tests.harness.training import SMALL, Job, placed

# Sets of options, with how many strategies have a case; see ``stream_cases.OPTIONS``.
SETS = {
    "defaults": 14,
    "plain": 5,
    "overlap": 6,
    "no overlap": 14,
    "every micro-step": 14,
    "bf16": 5,
    "fp16": 14,
    "no buffers": 5,
    "units": 5,
    "chunks": 4,
    "LoCo": 14,
    "LoCo, reset": 5,
    "offload": 14,
    "offload, LoCo": 5,
    "no_sync": 3,
    "pipeline": 7,
    "pipeline, overlap": 14,
    "pipeline, LoCo": 3,
    "pipeline, offload": 5,
}


@pytest.mark.parametrize("options", SETS)
def test_nothing_is_used_before_it_is_complete(ranks: Any, kernels: bool, tmp_path: Path, options: str) -> None:
    accesses = pairs = 0
    for cases in ranks(4).run(stream_cases.watch_cases, options, str(tmp_path)):
        assert len(cases) == SETS[options]
        for name, watched in cases.items():
            assert not watched.findings, name
            assert watched.accesses > 800 and watched.pairs > 60, (name, watched)
            accesses += watched.accesses
            pairs += watched.pairs
    print(f"{options}: {accesses} accesses, {pairs} pairs of them on different streams")


def test_stage_3_of_deepspeed_has_an_order_where_parameters_persist(ranks: Any) -> None:
    # It gathers them after a step, and then has the host wait for the device.
    persist = {"stage3_param_persistence_threshold": 50}
    for watched in ranks(4).run(stream_cases.watch_case, "3", "plain", **persist):
        assert not watched.findings and watched.pairs > 60


def test_compute_waits_for_no_update_that_is_gathered_ahead(ranks: Any) -> None:
    for waits, pulled, calls in ranks(4).run(updates_case):
        assert calls > 10 and not waits and not pulled


def updates_case() -> tuple[int, int, int]:
    """Where a block of slices is waited for under IIG: how often that puts the stream that computes behind a wire, how
    often it puts the stream of gathers behind what computes, and how often it is waited for."""
    from unittest import mock

    from deepspeed_ext.zero.slices import Slices
    from tests.harness import training
    from tests.harness.stream_order import device_with_streams

    job = Job(sizes=SQUARE, empty=False, zero={**SMALL, **FEW_AT_A_TIME}, config=WITHOUT_TIMER)
    waits, pulled = [], []
    plain = Slices._wait_for_updates
    with device_with_streams() as order:

        def seen_of_wires() -> dict[int, int]:
            return {one.number: order.default.clock.get(one.number, 0) for one in order.streams if "wire" in one.name}

        def watched(self: Slices, params: Any) -> None:
            wires, computed = seen_of_wires(), order.current.clock.get(order.default.number, 0)
            plain(self, params)
            waits.append(seen_of_wires() != wires and order.current is not order.default)
            pulled.append(order.current.clock.get(order.default.number, 0) > computed)

        engine, _ = training.make_engine(job, placed("IIG"))
        data = training.batches(job)
        with mock.patch.object(Slices, "_wait_for_updates", watched), order.watch():
            for number in range(3):
                training.micro_step(engine, job, number, *next(data))
                engine.step()
        engine.destroy()
    return sum(waits), sum(pulled), len(waits)


@pytest.mark.parametrize("name", ["III", "GGG"])
def test_a_gather_that_another_stream_has_finished_is_waited_for(ranks: Any, name: str) -> None:
    assert ranks(4).run(gathers_case, name) == [([], True)] * 4


def gathers_case(name: str) -> tuple[list[str], bool]:
    """What has no order where parameters are gathered by hand; whether they are there."""
    from tests.harness.stream_order import device_with_streams

    with device_with_streams() as order:
        total = stream_cases.gather_by_hand(order, name)
    return [str(finding) for finding in order.findings], total > 0
