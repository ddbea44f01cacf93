# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""In the order of the program, nothing is read before it has arrived. See Note [How the wire works]."""

import dataclasses
from typing import Any

import pytest

from tests.harness.fake_wire import JOB, Trained, Wire, enter_virtual_world, train_over
from tests.harness.training import PARTITIONED, REPLICATED, placed

pytestmark = pytest.mark.quick

# Places of ours that wait, with what shows it where a wait is left out.
WAITS = {
    "flat/gradients.py:reduce": "NGG",
    "flat/gradients.py:_cross": "NIG",
    "flat/arrivals.py:start": "NGG",
    "sharded/gradients.py:submit": "GGG",
    "sharded/gradients.py:_cross_bucket": "III",
    "sharded/gradients.py:reduce_buckets": "ING",
    "sharded/slices.py:_gather_slices": "IGG",
    "flat/gradients.py:finish": "NIG",
    "flat/gradients.py:drain": "NGG",
    "sharded/gradients.py:end_backward": "IGG",
    "sharded/gradients.py:finish": "GIG",
    "sharded/gradients.py:drain": "GGG",
    "sharded/handles.py:wait": "GGG",
    "sharded/slices.py:_wait_for_windows": "IGG",
}
STOCK = ("comm/torch.py", "zero/partition_parameters.py")  # DeepSpeed's, which waits for its own
OTHERS = {"sharded/slices.py:drain"}  # it protects what is sent, of parameters that no module uses


def test_late_results_are_waited_for(ranks: Any, kernels: bool) -> None:
    different, places, missed = ranks(1).run(wired_case, [*REPLICATED, *PARTITIONED])[0]
    assert not different
    assert places - OTHERS == set(WAITS), "each place that waits is left out once, below"
    assert not missed, "a wait was left out, and nobody noticed"


def wired_case(names: list[str]) -> tuple[list[str], set[str], list[str]]:
    """Compare training over a late wire with training over a prompt one, in groups of three.

    Returns:
        The strategies that end with other weights; the places where we wait; those without an effect when left out.
    """
    job = dataclasses.replace(JOB, zero={**JOB.zero, "overlap_comm": True})

    def train(wire: Wire, name: str, **more: Any) -> Trained:
        return train_over(wire, job, placed(name, group_size=3, **more))

    enter_virtual_world(6)
    late, expected, different = Wire(), {}, []
    for name in names:
        expected[name] = train(Wire(prompt=True), name)
        if not expected[name][1] or train(late, name) != expected[name]:
            different.append(name)
    for name in ("NIG", "IGG"):
        if train(late, name, zeropp_loco_param={}) != train(Wire(prompt=True), name, zeropp_loco_param={}):
            different.append(f"{name} in four bits")
    missed = [place for place, name in WAITS.items() if train(Wire(ignored=place), name) == expected[name]]
    ours = {place for place in late.waits if place.partition(":")[0] not in STOCK}
    return different, ours, missed
