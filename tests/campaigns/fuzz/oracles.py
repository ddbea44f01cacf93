# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Which stage of stock DeepSpeed a case is compared with, and where stock is known to be wrong."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.campaigns.fuzz.cases import Block, Case, Event, Step

OURS = ("paro_strategy", "paro_group_size", "paro_overlap_updates", "paro_quantized_updates", "stage3_leaf_bytes")
REVIVED = ("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param", "zero_quantized_gradients")
OF_PIPELINES = ("reduce_bucket_size", "allgather_bucket_size")


class Fault(NamedTuple):
    """Something that DeepSpeed 0.19.8 does wrong.

    Attributes:
        what: in a sentence.
        stages: that do.
        found: whether a case meets it.
        without: keys of the configuration, or of zero_optimization, without which it does not happen, and which change
            no numbers otherwise; none if another stage has to be the oracle.
        smallest: a case that shows it, of stock itself, at a stage that has it, or beside which one that has it is
            other; None where ranks abort, or wait for each other, or where it is a matter of a bound.
    """

    what: str
    stages: tuple[int, ...]
    found: Callable[[Case], Any]
    without: tuple[str, ...] = ()
    smallest: Case | None = None


def _never(case: Case) -> bool:
    """For what no case is drawn with, or what the oracle's run leaves out."""
    return False


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


def _accumulates_muon_wider(case: Case) -> bool:
    """Whether Muon's gradients are accumulated in more bits than parameters have."""
    return case.optimizer == "Muon" and "data_types" in case.config and case.dtype != "fp32"


_RESTS_LAST = (Step(skipped=((1, 0),)),)
_ON_HOST = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}

FAULTS: tuple[Fault, ...] = (
    Fault(
        "With an optimizer on the host, gradients of a parameter that the last micro-step does not use are lost, of "
        "one that a step does not use they stay, and of a step that overflows they are added to the next one's.",
        (1, 2, 3),
        lambda case: "offload_optimizer" in case.zero,
        ("offload_optimizer",),
        Case(
            zero={"stage": 2, **_ON_HOST},
            config={"zero_force_ds_cpu_optimizer": False},
            accumulation=2,
            steps=_RESTS_LAST,
        ),
    ),
    Fault(
        "With round_robin_gradients, safe_get_full_... and universal checkpoints have weights of other parameters.",
        (1, 2),
        lambda case: case.zero.get("round_robin_gradients"),
        ("round_robin_gradients",),
        Case(zero={"stage": 2, "round_robin_gradients": True}),
    ),
    Fault(
        "With contiguous_gradients false, norms of models with experts are others.",
        (1, 2),
        lambda case: case.network and case.zero.get("contiguous_gradients") is False,
        ("contiguous_gradients",),
        Case(
            network="RoutedOverTwo",
            zero={"stage": 1, "contiguous_gradients": False},
            blocks=(Block(), Block(), Block()),
            clipping=0.5,
            steps=(Step(), Step()),
        ),
    ),
    Fault(
        "With overlap_comm, a parameter that the last micro-step does not use steps with this rank's own gradient.",
        (1,),
        lambda case: case.zero.get("overlap_comm") and _rests(case, -1),
        ("overlap_comm",),
        Case(zero={"stage": 1, "overlap_comm": True}, accumulation=2, steps=_RESTS_LAST),
    ),
    Fault(
        "Of a parameter that the first micro-step of a step does not use, the gradient of the step before stays.",
        (3,),
        lambda case: _rests(case, 0),
        smallest=Case(zero={"stage": 3}, steps=(Step(), Step(skipped=((0, 0),)))),
    ),
    Fault(
        "With reduce_scatter false, gradients stay divided by gradient_predivide_factor.",
        (3,),
        lambda case: case.config.get("gradient_predivide_factor", 1.0) != 1.0,
        smallest=Case(
            zero={"stage": 3, "reduce_scatter": False}, config={"gradient_predivide_factor": 2.0}, steps=(Step(),)
        ),
    ),
    Fault(
        "With a granularity threshold, the whole model may be a leaf module, and where its inputs need no gradients "
        "its backward raises; with small buckets and coalesce_grad_reduction, gradients of leaf modules are others.",
        (3,),
        lambda case: "stage3_module_granularity_threshold" in case.zero,
        ("stage3_module_granularity_threshold",),
    ),
    Fault(
        "With grad_accum_dtype fp32 and parameters of 16 bits, Muon's updates are others, by half a percent and more.",
        (2,),
        _accumulates_muon_wider,
    ),
    Fault(
        "With grad_accum_dtype fp32 and parameters of 16 bits, norms of Muon's updates are of a part of them.",
        (1,),
        _accumulates_muon_wider,
        ("data_types",),
        Case(
            zero={"stage": 1},
            config={"data_types": {"grad_accum_dtype": "fp32"}},
            blocks=(Block(width=1),),
            dtype="bf16",
            optimizer="Muon",
        ),
    ),
    Fault(
        "With Muon and a loss scale, norms are divided by it on a rank that has no part of the matrices.",
        (1, 2),
        lambda case: case.optimizer == "Muon" and case.dtype == "fp16",
        smallest=Case(
            zero={"stage": 1},
            inputs=1,
            outputs=1,
            blocks=(Block(width=1),),
            dtype="fp16",
            optimizer="Muon",
        ),
    ),
    Fault(
        "With Muon and fp16, its updates are others.",
        (0,),
        lambda case: case.optimizer == "Muon" and case.dtype == "fp16",
        smallest=Case(zero={"stage": 1}, dtype="fp16", optimizer="Muon"),
    ),
    Fault(
        "With Muon, it clips gradients; stages 1 to 3 clip updates.",
        (0,),
        lambda case: case.optimizer == "Muon" and case.clipping,
        smallest=Case(zero={"stage": 1}, optimizer="Muon", clipping=0.05),
    ),
    Fault(
        "In a step in which the loss scale grows, gradients and their norm are divided by the next one, also at "
        "strategies with p = I and G.",
        (3,),
        _never,
        smallest=Case(zero={"stage": 3}, config={"fp16": {"loss_scale_window": 1}}, dtype="fp16"),
    ),
    Fault(
        "All ranks must use the same parameters; else it aborts, or hangs.",
        (1, 2),
        lambda case: case.routed and any(block.kind == "experts" for block in case.blocks),
    ),
    Fault(
        "Of two engine.backward() at one accumulation boundary, the first is lost.",
        (1, 2),
        _never,
        smallest=Case(zero={"stage": 2}, steps=(Step(twice=(0,)),)),
    ),
    Fault(
        "Of two loss.backward() behind one forward, one is lost, also at strategies with p = N; or they raise.",
        (1, 2, 3),
        _never,
        smallest=Case(zero={"stage": 2}, accumulation=3, backward="loss", boundary="step", steps=(Step(twice=(1,)),)),
    ),
    Fault(
        "safe_get_full_optimizer_state raises behind a load, and for all parameter groups but the first.",
        (1, 2),
        _never,
        smallest=Case(zero={"stage": 2}, steps=(Step(), Step((Event("save and load"), Event("states", 0))))),
    ),
    Fault(
        "With Muon, it raises on some ranks, and others wait for them.",
        (1, 2),
        _never,
    ),
    Fault(
        "safe_set_full_fp32_param raises on the last rank if ranks do not divide the parameter, and others wait.",
        (3,),
        _never,
    ),
)


def stage_for(case: Case) -> int | None:
    """The stage that is nearest to a case's strategy and has no known fault with it, if there is one."""
    nearest = case.stage
    if case.tensor_parallel > 1:  # norms are others at each stage: of replicated parameters stage 3 counts each copy
        return None if any(not fault.without for fault in faults(case, nearest)) else nearest
    # A model that is made in 16 bits has other weights.
    made_in_16_bits = case.zero_init is not None and case.dtype != "fp32"
    others = [] if made_in_16_bits else [stage for stage in (2, 1, 3, 0) if stage != nearest]
    if "loss_scale_window" in case.config.get("fp16", {}):  # of stage 3, ours has the fault as well
        others = [] if nearest == 3 else [stage for stage in others if stage != 3]
    able = (stage for stage in (nearest, *others) if not any(not fault.without for fault in faults(case, stage)))
    return next(able, None)


def beside(fault: Fault, case: Case) -> int:
    """The stage beside which a smallest case shows a fault: one that has it if the case's own has not."""
    if case.zero["stage"] not in fault.stages:
        return fault.stages[0]
    return 0 if not faults(case, 0) else 3


def faults(case: Case, stage: int) -> list[Fault]:
    """What a stage is known to do wrong with a case."""
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
    """A case without what gives stock other numbers at a stage, though it must not.

    Of two backwards at one accumulation boundary, stages 1 and 2 lose the first, or raise; their sum is the same.
    """
    without = {key for fault in faults(case, stage) for key in fault.without}
    return dataclasses.replace(
        case,
        config={key: value for key, value in case.config.items() if key not in without},
        steps=tuple(dataclasses.replace(step, twice=()) for step in case.steps),
    )
