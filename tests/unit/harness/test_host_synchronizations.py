# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Waits of the host are counted, by what it waits for and where."""

from typing import Any

import pytest

SYNCHRONIZED = {"timers": {"throughput": {"synchronized": True}}}


@pytest.mark.parametrize("name", ["NIG", "III"])
def test_waits_of_the_throughput_timer_are_counted(ranks: Any, name: str) -> None:
    for on, off in ranks(4).run(timer_case, name):
        assert sum(on.values()) > 0 == sum(off.values())  # off by default, beside a strategy
        assert all("utils/timer.py" in where for where in on)


def timer_case(name: str) -> list[dict[str, int]]:
    """How often the host waits for the whole device, by place: with DeepSpeed's timer synchronized, and by default."""
    from tests.harness.host_synchronizations import host_synchronizations

    return [
        {
            one.where: count
            for one, count in host_synchronizations(name, {}, config=config).all.items()
            if one.what == "device"
        }
        for config in (SYNCHRONIZED, {})
    ]


def test_questions_to_the_device_are_counted(ranks: Any) -> None:
    assert ranks(1).run(questions_case) == [{"tolist": 1, "cpu": 1, "numpy": 1, "_local_scalar_dense": 2}]


def questions_case() -> dict[str, int]:
    """Count six operations; one of them does not need an answer."""
    from collections import Counter

    import torch

    from tests.harness.host_synchronizations import asking
    from tests.harness.stream_order import device_with_streams

    with device_with_streams() as order:
        values = torch.ones(3)
        with order.watch(), asking(order):
            values.tolist()
            values.cpu()
            values.numpy()
            values.sum().item()
            bool(values.sum() > 1)
            values.sum()
    counted: Counter[str] = Counter()
    for one, count in order.synchronizations.items():
        counted[one.what] += count
    return dict(counted)
