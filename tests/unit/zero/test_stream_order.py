# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""On devices with streams nothing is used before it is complete. See Note [How order is checked]."""

from pathlib import Path
from typing import Any

import pytest

from tests.harness import stream_cases

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
    "windows": 4,
    "LoCo": 14,
    "LoCo, reset": 5,
    "offload": 14,
    "pageable": 2,
    "offload, LoCo": 5,
    "in few bits": 11,
    "in few bits, ahead": 3,
    "without loss": 4,
    "in few bits, offload": 4,
    "Muon": 14,
    "Muon, in few bits": 2,
    "Muon, offload": 4,
    "experts": 3,
    "experts, in few bits": 2,
    "experts, sharded": 4,
    "experts, Muon": 2,
    "outer": 4,
    "outer, delayed": 4,
    "outer, offload": 2,
    "parameters on the host": 3,
    "parameters and offload": 3,
    "parameters, in few bits": 2,
    "parameters, pageable": 1,
    "no_sync": 3,
    "pipeline": 7,
    "pipeline, overlap": 14,
    "pipeline, fp16": 2,
    "pipeline, LoCo": 3,
    "pipeline, offload": 5,
}


EACH_SET = pytest.mark.parametrize("options", SETS)


@EACH_SET
def test_nothing_is_used_before_it_is_complete(ranks: Any, kernels: bool, tmp_path: Path, options: str) -> None:
    """All strategies with defaults; of each other set, in turns, one for each of our two optimizers that it has."""
    optimizers = len({name[0] == "N" for name in stream_cases.OPTIONS[options].strategies})
    watch(ranks, tmp_path, options, SETS[options] if options == "defaults" else optimizers)


@pytest.mark.deep
@EACH_SET
def test_nothing_is_used_before_it_is_complete_whatever_the_strategy(
    ranks: Any, kernels: bool, tmp_path: Path, options: str
) -> None:
    watch(ranks, tmp_path, options, SETS[options])


def watch(ranks: Any, folder: Path, options: str, number: int) -> None:
    """Watch so many cases of a set."""
    accesses = pairs = 0
    for cases in ranks(4).run(stream_cases.watch_cases, options, str(folder), number):
        assert len(cases) == number
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


@pytest.mark.parametrize("name", ["III", "GGG"])
def test_a_gather_that_another_stream_has_finished_is_waited_for(ranks: Any, name: str) -> None:
    assert ranks(4).run(gathers_case, name) == [([], True)] * 4


def gathers_case(name: str) -> tuple[list[str], bool]:
    """What has no order where parameters are gathered by hand; whether they are there."""
    from tests.harness.stream_order import device_with_streams

    with device_with_streams() as order:
        total = stream_cases.gather_by_hand(order, name)
    return [str(finding) for finding in order.findings], total > 0
