# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Training in bf16 rounds and does nothing else beside exact training: nothing else adds up over many steps.

Parity with stock has bounds of bf16, which are wide, and a few steps. Here each part is held against exact arithmetic.
"""

from typing import Any

import pytest

from tests.harness import rounding
from tests.harness.tiers import deep
from tests.harness.training import SMALL, Job

STEPS = 24
MANY = ("NIG", "IIG", "2")
OTHERS = ("NNG", "NGG", "III", "GGG", "3")
GRADIENTS = 5e-3  # seen: 2.8e-3 to 3.6e-3; bf16 is off by up to 2^-9 of an element, each time that it rounds
BIAS = 2e-4  # seen: up to 8e-5, with both signs
MASTERS = 2e-6  # seen: up to 7e-7, rounding of fp32


@pytest.mark.parametrize("names, accumulation", [(MANY, 1), *deep((MANY, 3), (OTHERS, 1))])
def test_bf16_rounds_and_does_nothing_else(ranks: Any, names: tuple[str, ...], accumulation: int) -> None:
    job = Job(accumulation=accumulation, dtype="bf16", optimizer="Adam", empty=False, zero=SMALL, steps=STEPS)
    for row in ranks(4).run(rounding.roundings, job, names)[0]:
        assert row.gradients <= GRADIENTS and abs(row.bias) <= BIAS and row.masters <= MASTERS, row
        assert row.losses == 0, row  # the forward used rounded masters
