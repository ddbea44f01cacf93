# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The stage of stock DeepSpeed for a comparison with a case, and known faults of stock."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.campaigns.fuzz.cases import Case

OURS = ("paro_strategy", "paro_group_size", "paro_overlap_updates", "paro_quantized_updates", "stage3_leaf_bytes")
REVIVED = ("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param", "zero_quantized_gradients")
OF_PIPELINES = ("reduce_bucket_size", "allgather_bucket_size")


class Fault(NamedTuple):
    """A fault of DeepSpeed 0.19.8."""

    stages: tuple[int, ...]  # the stages that have it
    found: Callable[[Case], Any]  # whether a case meets it
    # Keys of the configuration, or of zero_optimization, without which it does not happen, and which change no numbers
    # otherwise; none if another stage has to be the oracle.
    without: tuple[str, ...] = ()


def _rests(case: Case, at_end: int) -> bool:
    """Whether a step skips a block in its first (0) or last (-1) micro-step."""
    if any(block.kind == "experts" for block in case.blocks):
        return True
    for step in case.steps:
        count = step.micro_steps or case.accumulation
        for number in range(len(case.blocks)):
            used = [(at, number) not in step.skipped for at in range(count)]
            if not used[at_end]:
                return True
    return False


def _accumulates_muon_wider(case: Case) -> bool:
    """Whether Muon's gradients are accumulated in more bits than parameters have."""
    return case.optimizer == "Muon" and "data_types" in case.config and case.dtype != "fp32"


FAULTS: tuple[Fault, ...] = (
    # With an optimizer on the host, gradients of a parameter that the last micro-step does not use are lost, of one
    # that a step does not use they stay, and of a step that overflows they are added to the next one's.
    Fault((1, 2, 3), lambda case: "offload_optimizer" in case.zero, ("offload_optimizer",)),
    # With round_robin_gradients, safe_get_full_... and universal checkpoints have weights of other parameters.
    Fault((1, 2), lambda case: case.zero.get("round_robin_gradients"), ("round_robin_gradients",)),
    # With contiguous_gradients false, norms of models with experts are others.
    Fault(
        (1, 2), lambda case: case.network and case.zero.get("contiguous_gradients") is False, ("contiguous_gradients",)
    ),
    # With overlap_comm, a parameter that the last micro-step does not use steps with this rank's own gradient.
    Fault((1,), lambda case: case.zero.get("overlap_comm") and _rests(case, -1), ("overlap_comm",)),
    # Of a parameter that the first micro-step of a step does not use, the gradient of the step before stays.
    Fault((3,), lambda case: _rests(case, 0)),
    # With reduce_scatter false, gradients stay divided by gradient_predivide_factor.
    Fault((3,), lambda case: case.config.get("gradient_predivide_factor", 1.0) != 1.0),
    # With a granularity threshold, the whole model may be a leaf module, and where its inputs need no gradients its
    # backward raises; with small buckets and coalesce_grad_reduction, gradients of leaf modules are others.
    Fault(
        (3,), lambda case: "stage3_module_granularity_threshold" in case.zero, ("stage3_module_granularity_threshold",)
    ),
    # With grad_accum_dtype fp32 and parameters of 16 bits, Muon's updates are others, by half a percent and more.
    Fault((2,), _accumulates_muon_wider),
    # With grad_accum_dtype fp32 and parameters of 16 bits, norms of Muon's updates are of a part of them.
    Fault((1,), _accumulates_muon_wider, ("data_types",)),
    # With Muon and a loss scale, norms are divided by it on a rank that has no part of the matrices.
    Fault((1, 2), lambda case: case.optimizer == "Muon" and case.dtype == "fp16"),
    # With Muon and fp16, its updates are others.
    Fault((0,), lambda case: case.optimizer == "Muon" and case.dtype == "fp16"),
    # With Muon, it clips gradients; stages 1 to 3 clip updates.
    Fault((0,), lambda case: case.optimizer == "Muon" and case.clipping),
    # All ranks must use the same parameters; else it aborts, or hangs.
    Fault((1, 2), lambda case: case.routed and any(block.kind == "experts" for block in case.blocks)),
)


def stage_for(case: Case) -> int | None:
    """The stage that is nearest to a case's strategy and has no known fault with it, if there is one."""
    nearest = case.stage
    if case.tensor_parallel > 1:  # norms are others at each stage: of replicated parameters stage 3 counts each copy
        return None if any(not fault.without for fault in faults(case, nearest)) else nearest
    # A model that is made in 16 bits has other weights.
    made_in_16_bits = case.zero_init is not None and case.dtype != "fp32"
    other_ranks = [] if made_in_16_bits else [stage for stage in (2, 1, 3, 0) if stage != nearest]
    # In a step in which the loss scale grows, stage 3 divides gradients by the next scale, and ours with it.
    if "loss_scale_window" in case.config.get("fp16", {}):
        other_ranks = [] if nearest == 3 else [stage for stage in other_ranks if stage != 3]
    able = (stage for stage in (nearest, *other_ranks) if not any(not fault.without for fault in faults(case, stage)))
    return next(able, None)


def faults(case: Case, stage: int) -> list[Fault]:
    """Return the known faults of a stage for a case."""
    return [fault for fault in FAULTS if stage in fault.stages and fault.found(case)]


def keys_of(case: Case, stage: int) -> dict[str, Any]:
    """A case's keys of zero_optimization without ours, and without those that have a known fault, at a stage."""
    left_out = {*OURS, *REVIVED, *(key for fault in faults(case, stage) for key in fault.without)}
    if stage < 3:
        left_out.add("offload_param")
    keys = {**{key: value for key, value in case.zero.items() if key not in left_out}, "stage": stage}
    if stage == 3 and case.optimizer == "Muon":
        keys["reduce_scatter"] = False  # else stage 3 refuses Muon; it changes no numbers
    return keys


def as_stock_runs_it(case: Case, stage: int) -> Case:
    """Return a case without the options that give stock wrong numbers at a stage. Of two backwards at one accumulation
    boundary, stages 1 and 2 lose the first, or raise; their sum is the same."""
    without = {key for fault in faults(case, stage) for key in fault.without}
    return dataclasses.replace(
        case,
        config={key: value for key, value in case.config.items() if key not in without},
        steps=tuple(dataclasses.replace(step, twice=()) for step in case.steps),
    )
