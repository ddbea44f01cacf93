# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The fuzzer finds faults, runs some cases, and faults that it has found stay fixed."""

import time
from typing import Any
from unittest import mock

import pytest

from tests.campaigns.fuzz import campaign
from tests.campaigns.fuzz.cases import Block, Case, Event, Step
from tests.campaigns.fuzz.drawing import KINDS
from tests.campaigns.soak import Sample, growth
from tests.harness.tiers import deep

TWO = {"paro_group_size": 2}
ADAM = {"optimizer": "Adam"}
FOUND = {
    "what stage 1 has left over was put into a bucket that was still read": Case(
        world=4,
        zero={"paro_strategy": "NNI", **TWO, "reduce_bucket_size": 50},
        accumulation=2,
        steps=(Step(skipped=((1, 0),)),),
    ),
    "with round_robin_gradients universal checkpoints had other parameters' weights": Case(
        zero={"paro_strategy": "NGG", "paro_group_size": 1, "round_robin_gradients": True},
        steps=(Step(), Step(), Step((Event("universal", {"paro_strategy": "NNG", "paro_group_size": 1}),))),
        **ADAM,
    ),
    "states could not be read behind a load, nor those of a second parameter group": Case(
        zero={"paro_strategy": "NGG", **TWO},
        groups=2,
        steps=(Step(), Step((Event("states", 1), Event("save and load"), Event("states", 0)))),
        **ADAM,
    ),
    "weights that ranks do not divide could not be set": Case(
        world=4,
        zero={"paro_strategy": "GIG", **TWO},
        inputs=3,
        outputs=1,
        blocks=(Block(width=3, bias=False),),
        steps=(Step(), Step((Event("weights", 1.25),))),
    ),
    "memory of a leaf module was given out while it was still read": Case(
        world=4,
        zero={"paro_strategy": "INI", **TWO, "stage3_module_granularity_threshold": 60, "zeropp_loco_param": {}}
        | {"stage3_prefetch_bucket_size": 100, "stage3_max_reuse_distance": 100, "sub_group_size": 100}
        | {"stage3_param_persistence_threshold": 20, "allgather_bucket_size": 300},
        inputs=3,
        outputs=7,
        blocks=(Block(recomputed=False), Block("experts", frozen=True)),
        dtype="bf16",
        accumulation=3,
        groups=3,
        steps=(Step(), Step((Event("export"),)), Step()),
    ),
    "a gate reads the weight of a part that it does not call": Case(
        network="RoutedOverTwo",
        zero={"paro_strategy": "NIG", **TWO, "paro_overlap_updates": True, "reduce_bucket_size": 300},
        blocks=(Block(), Block(), Block()),
    ),
    "gathered chunks of one element were no bytes": Case(
        zero={"paro_strategy": "IIG", "paro_group_size": 1},
        outputs=1,
        steps=(Step((Event("write nothing", 3),)), Step()),
    ),
    "sums in 16 bits gave their memory out while they were sent": Case(
        world=4,
        zero={"paro_strategy": "NNN", **TWO, "reduce_bucket_size": 50, "overlap_comm": True},
        config={"data_types": {"grad_accum_dtype": "fp32"}},
        dtype="bf16",
    ),
    "parameters in the graph of a router's loss kept the engine that was destroyed": Case(
        world=4,
        network="RoutedOverTwo",
        zero={"paro_strategy": "NGG", **TWO, "paro_quantized_updates": {}},
        blocks=(Block(), Block(), Block()),
    ),
    "saves were taken for quiet beside updates in few bits": Case(
        zero={"paro_strategy": "NNG", "paro_group_size": 1, "paro_quantized_updates": {"bits": 8, "block_size": 64}},
        blocks=(Block("experts"),),
        dtype="bf16",
        steps=(Step(), Step((Event("resume"),))),
        **ADAM,
    ),
    "a backward in coalesce_grad_reduction did not leave a unit whose input needs no gradient": Case(
        zero={"paro_strategy": "GGG", "paro_group_size": 1, "stage3_leaf_bytes": 10368},
        inputs=13,
        blocks=(Block("unit", 13), Block()),
        accumulation=2,
        boundary="coalesce",
        streams=False,
        steps=(Step(skipped=((1, 0),)), Step()),
    ),
    "a load waited forever where the file of one tensor-parallel rank was missing": Case(
        world=4,
        tensor_parallel=2,
        zero={"paro_strategy": "NIG", "paro_group_size": 1},
        steps=(Step(), Step((Event("broken load", (1, "gone")),))),
    ),
    "a load waited forever where the file of one rank's expert was cut": Case(
        network="RoutedOverTwo",
        zero={"paro_strategy": "NIG", **TWO, "paro_overlap_updates": True},
        blocks=(Block(), Block(), Block()),
        steps=(Step(), Step((Event("broken load", (1, "cut")),))),
    ),
    "LoCo reported every None steps": Case(
        zero={"paro_strategy": "NIG", **TWO, "zeropp_loco_param": {}}, config={"wall_clock_breakdown": True}
    ),
}

# In the deep tier.
LATER = ("a gate reads", "parameters in the graph", "saves were taken", "sums in 16 bits", "with round_robin")
IN_DEEP = [what for what in FOUND if what.startswith(LATER)]


@pytest.mark.parametrize("what", [*(what for what in FOUND if what not in IN_DEEP), *deep(*IN_DEEP)])
def test_found_faults_stay_fixed(ranks: Any, kernels: bool, what: str) -> None:
    assert campaign.run_case(ranks, FOUND[what]) == []


BROKEN = {
    "deepspeed_ext.zero.flat.gradients.Mean.divide": Case(zero={"paro_strategy": "NIG", **TWO}, accumulation=2),
    "deepspeed_ext.zero.flat.buckets.GradientBuckets._write_on_current_stream": next(iter(FOUND.values())),
    "deepspeed_ext.zero.sharded.expert_windows.WindowGradients._reduce": Case(
        zero={"paro_strategy": "IIG", **TWO, "stage3_leaf_bytes": 2000}, blocks=(Block("packed"),), streams=False
    ),
    # Weights are near enough without the errors that a checkpoint brings back, but no bits are those of a run without.
    "deepspeed_ext.checkpoint.residuals.Residuals.load": Case(
        zero={"paro_strategy": "NIG", "paro_group_size": 1, "zeropp_loco_param": {}},
        dtype="bf16",
        streams=False,
        steps=(Step(), Step((Event("resume"),)), Step()),
    ),
}


@pytest.mark.parametrize("what", [next(iter(BROKEN)), *deep(*[*BROKEN][1:])])
def test_a_broken_method_is_found(ranks: Any, what: str) -> None:
    case = BROKEN[what]
    assert all(ranks(case.world).run(broken_case, what, case))


def broken_case(what: str, case: Case) -> list[str]:
    """Problems where a method returns what it is given, and does nothing."""
    from tests.campaigns.fuzz.judging import judge

    with mock.patch(what, lambda self, *args: args[0] if args else None):
        return judge(case).problems


def test_a_case_can_be_run_again_from_what_is_printed() -> None:
    for case in FOUND.values():
        assert campaign.parse(repr(case)) == case


@pytest.mark.quick
def test_growth_is_found_and_fluctuation_is_not() -> None:
    def growing(*tensors: float) -> list[str]:
        return growth([Sample(number, 300.0, 12.0, 36.0, 4.0) for number in tensors])

    assert growing(*[10.0, 30.0, 20.0, 10.0, 20.0] * 2, 35.0, 10.0) == []
    assert growing(*range(10, 30)) == ["tensors grows from 21 to 29"]


def test_some_cases_of_the_fuzzer(ranks: Any, kernels: bool) -> None:
    found = campaign.Campaign(ranks, seed=20, worlds=(2,), shrinking=60.0, batch=1)
    found.run(KINDS, 5, time.monotonic() + 240.0)
    assert not found.failures and sum(found.counts.values()) == 5, found.report()
