# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""With p = I, os = G and ``offload_param``: slices are on the host, and training is that of stock DeepSpeed."""

from dataclasses import replace
from typing import Any

import pytest

from tests.harness import training
from tests.harness.training import SMALL, Job, placed

NAMES = ("ING", "IIG", "IGG")
CPU = {"offload_param": {"device": "cpu"}}
PAGEABLE = {"offload_param": {"device": "cpu", "pin_memory": False}}
OPTIMIZER = {"offload_optimizer": {"device": "cpu"}}
CACHED = {**CPU, "paro_parameter_cache_bytes": 3000}
JOB = Job(zero=SMALL, empty=False, groups=2)
JOBS = {
    "plain": (JOB, CPU),
    "accumulation, clipping": (replace(JOB, accumulation=3, clipping=0.01), CPU),
    "frozen": (replace(JOB, frozen=(1,), accumulation=2), CPU),
    "frozen, cached": (replace(JOB, frozen=(1,), accumulation=2), CACHED),
    "unused": (replace(JOB, skipped=((1, 1), (2, 1)), accumulation=2), CACHED),
    "zero.Init": (replace(JOB, zero_init="config"), CPU),
    "saved between": (replace(JOB, between=True, optimizer="Adam"), CACHED),
    "optimizer": (replace(JOB, optimizer="Adam", accumulation=2), {**CACHED, **OPTIMIZER}),
    "pageable": (replace(JOB, optimizer="Adam"), {**PAGEABLE, **OPTIMIZER}),
    "checkpointing": (replace(JOB, checkpointing=False, frozen=(1,)), CPU),
}


@pytest.mark.parametrize("title", JOBS)
def test_training_is_that_of_stock(ranks: Any, title: str) -> None:
    job, zero = JOBS[title]
    stock = {"stage": 2 if job.skipped else 3}  # stock's stage 3 steps with old gradients of what rests
    stock |= {key: value for key, value in zero.items() if key in OPTIMIZER}
    for row in ranks(4).run(training.against, job, [placed(name, **zero) for name in NAMES], stock)[0]:
        assert row.weights < 2e-6 and row.replicas_equal and row.same_decisions, row
