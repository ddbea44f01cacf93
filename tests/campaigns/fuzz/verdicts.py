# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What is said of a case, and how near is near; inside rank processes only."""

from typing import NamedTuple, TypeVar

from deepspeed import comm as dist

T = TypeVar("T")
# Of what is largest of its kind. An ulp or two in what is added up in another order, and what steps make of that.
WEIGHTS = {"fp32": 3e-5, "bf16": 1.5e-2, "fp16": 4e-3}
MOMENTS = {"fp32": 2e-4, "bf16": 6e-2, "fp16": 2e-2}
LOSSES = {"fp32": 2e-5, "bf16": 3e-2, "fp16": 1e-2}


class Verdict(NamedTuple):
    """What was found: problems, each a line; and what happened, for counting."""

    problems: list[str]
    happened: list[str]


def everybody(mine: T) -> list[T]:
    """What all ranks have. Collective."""
    found = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found
