# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""In program order, no data is read before it is received. See Note [How the wire works]."""

from typing import Any

import pytest

from tests.harness.fake_wire import JOB, Wire, enter_virtual_world, train_over
from tests.harness.tiers import deep
from tests.harness.training import PARTITIONED, REPLICATED, placed

EVERY = (*REPLICATED, *PARTITIONED)

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("name", [*EVERY[::3], *deep(*EVERY[1::3], *EVERY[2::3])])
def test_training_waits_for_late_results(ranks: Any, kernels: bool, name: str) -> None:
    assert ranks(1).run(wired_case, name) == [[]]


def wired_case(name: str) -> list[dict[str, Any]]:
    """Train over a late wire and over a prompt one, in groups of three; return the keys with which weights differ."""
    enter_virtual_world(6)
    different = []
    for more in ({}, {"zeropp_loco_param": {}}) if name in ("NIG", "IGG") else ({},):
        zero = placed(name, group_size=3, overlap_comm=True, **more)
        expected, weights = (train_over(Wire(prompt=prompt), JOB, zero) for prompt in (True, False))
        if weights != expected or not expected[1]:
            different.append(more)
    return different
