# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Which stage of stock DeepSpeed a case is compared with, and where stock is known to be wrong."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from scripts.checks.fuzz.cases import Case

OURS = ("paro_strategy", "paro_group_size", "paro_overlap_updates", "paro_quantized_updates", "stage3_leaf_bytes")
REVIVED = ("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param", "zero_quantized_gradients")
OF_PIPELINES = ("reduce_bucket_size", "allgather_bucket_size")


class Fault(NamedTuple):
    """Something that DeepSpeed 0.19.8 does wrong.

    Attributes:
        what: in a sentence.
        stages: that do.
        found: whether a case meets it.
        without: keys of zero_optimization without which it does not happen, and which change no numbers otherwise;
            none if another stage has to be the oracle.
    """

    what: str
    stages: tuple[int, ...]
    found: Callable[[Case], Any]
    without: tuple[str, ...] = ()


def _rests(case: Case, at_end: int) -> bool:
    """Whether a step leaves a block out in its first (0) or last (-1) micro-step."""
    if any(block.kind == "experts" for block in case.blocks):
        return True
    for step in case.steps:
        count = step.micro_steps or case.accumulation
        for number in range(len(case.blocks)):
            used = [(at, number) not in step.skipped for at in range(count)]
            if not used[at_end]:
                return True
    return False


FAULTS: tuple[Fault, ...] = (
    Fault(
        "With an optimizer on the host, gradients of a parameter that the last micro-step does not use are lost, of "
        "one that a step does not use they stay, and of a step that overflows they are added to the next one's.",
        (1, 2, 3),
        lambda case: "offload_optimizer" in case.zero,
        ("offload_optimizer",),
    ),
    Fault(
        "With round_robin_gradients, safe_get_full_... and universal checkpoints have weights of other parameters.",
        (1, 2),
        lambda case: case.zero.get("round_robin_gradients"),
        ("round_robin_gradients",),
    ),
    Fault(
        "With overlap_comm, a parameter that the last micro-step does not use steps with this rank's own gradient.",
        (1,),
        lambda case: case.zero.get("overlap_comm") and _rests(case, -1),
        ("overlap_comm",),
    ),
    Fault(
        "Of a parameter that the first micro-step of a step does not use, the gradient of the step before stays.",
        (3,),
        lambda case: _rests(case, 0),
    ),
    Fault(
        "All ranks must use the same parameters; else it aborts, or hangs.",
        (1, 2),
        lambda case: case.routed and any(block.kind == "experts" for block in case.blocks),
    ),
)


def stage_for(case: Case) -> int:
    """The stage that is nearest to a case's strategy, and has no known fault with it."""
    nearest = case.stage
    if case.tensor_parallel > 1:  # norms are others at each stage: of replicated parameters stage 3 counts each copy
        return nearest
    others = [stage for stage in (2, 3, 1, 0) if stage != nearest]
    return next(stage for stage in (nearest, *others) if not any(not fault.without for fault in faults(case, stage)))


def faults(case: Case, stage: int) -> list[Fault]:
    """What a stage is known to do wrong with a case."""
    return [fault for fault in FAULTS if stage in fault.stages and fault.found(case)]


def keys_of(case: Case, stage: int) -> dict[str, Any]:
    """A case's keys of zero_optimization without ours, and without those that have a known fault, at a stage."""
    left_out = {*OURS, *REVIVED, *(key for fault in faults(case, stage) for key in fault.without)}
    if stage < 3:
        left_out.add("offload_param")
    return {**{key: value for key, value in case.zero.items() if key not in left_out}, "stage": stage}


def as_stock_runs_it(case: Case) -> Case:
    """A case without what gives stock other numbers, though it must not.

    Of two backwards at one accumulation boundary, stages 1 and 2 lose the first, or raise; their sum is the same.
    """
    return dataclasses.replace(case, steps=tuple(dataclasses.replace(step, twice=()) for step in case.steps))
