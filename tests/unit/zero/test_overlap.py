# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What goes under compute: to the bit what waits for everything would give, and really earlier."""

from typing import Any

import pytest

# Each job, whether something can leave before the boundary in it, and strategies for which it is none.
OPTIONS: dict[str, tuple[dict[str, Any], bool, tuple[str, ...]]] = {
    "one micro-step": ({}, True, ()),
    "three micro-steps, two groups, frozen": ({"accumulation": 3, "groups": 2, "frozen": (1,)}, True, ()),
    "bf16, accumulated in fp32": ({"dtype": "bf16", "config": {"data_types": {"grad_accum_dtype": "fp32"}}}, True, ()),
    "fp16, overflow": ({"dtype": "fp16", "overflow": ((1, 2), (2, 0)), "accumulation": 2}, True, ()),
    "LoCo": ({"zero": {"zeropp_loco_param": {}}, "optimizer": "Adam", "groups": 2}, True, ()),
    "ranks differ in what they use": (
        {"network": "Wandering", "sizes": (13, 13, 13, 13), "accumulation": 2},
        True,
        ("NGG",),
    ),
    "first layers last": ({"skipped": ((1, 0), (2, 2), (3, 1)), "accumulation": 2}, True, ()),
    "boundaries of the user": ({"boundary": "user", "accumulation": 2}, True, ()),
    "boundaries in step": ({"boundary": "step", "accumulation": 2}, False, ("NNN", "NNI", "NNG")),
    "offload": ({"zero": {"offload_optimizer": {"device": "cpu"}}, "optimizer": "Adam"}, True, ()),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_bits_do_not_depend_on_overlap(ranks: Any, option: str) -> None:
    job, early, without = OPTIONS[option]
    for rows in ranks(4).run(bits_case, job, without):
        assert rows
        for name, weights, norms, left, ahead in rows:
            assert weights and norms, name
            assert left == (early and name not in ("NGG",)), name
            assert ahead == (name != "NNN"), name


def bits_case(options: dict[str, Any], without: tuple[str, ...]) -> list[tuple[str, bool, bool, bool, bool]]:
    """Of each strategy: whether weights and norms are equal, whether something left before the boundary, and whether
    steps ended before parameters were back."""
    from unittest import mock

    import torch

    from deepspeed_ext.zero.static_order import StaticOrder
    from tests.harness import networks, training

    network = options.get("network")
    job = training.Job(**{**options, "network": network and getattr(networks, network), "steps": 3})
    rows = []
    for name in (name for name in training.REPLICATED if name not in without):
        keys = training.placed(name, overlap_comm=True, **training.SEVERAL_BUCKETS)
        with mock.patch.object(StaticOrder, "ready", lambda self, member: []):
            serial = training.train(job, keys)
        left: list[int] = []
        ahead: list[bool] = []
        ready = StaticOrder.ready

        def count(self: StaticOrder, member: Any, ready: Any = ready, left: list[int] = left) -> list[int]:
            numbers = ready(self, member)
            left += numbers
            return numbers

        def look(engine: Any, ahead: list[bool] = ahead) -> None:
            ahead.append(bool(engine.optimizer.updates._started))

        with mock.patch.object(StaticOrder, "ready", count):
            overlapped = training.train(job, {**keys, "paro_overlap_updates": True}, look)
        equal = torch.equal(serial.weights, overlapped.weights)
        rows.append((name, equal, serial.norms == overlapped.norms, bool(left), ahead[0]))
    return rows
