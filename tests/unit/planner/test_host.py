# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Predicted cost of parameters in host memory, against figures by hand. Pure."""

from dataclasses import replace

import pytest

from deepspeed_ext.config.settings import LocoSettings, UpdateSettings
from deepspeed_ext.planner.compression import UNCOMPRESSED, Compression
from deepspeed_ext.planner.costs import Prediction, predict, predict_plain_stage
from deepspeed_ext.planner.memory import HostParameters, Model, Part
from deepspeed_ext.planner.rates import HopRates, Rate, Rates
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates, Placement

pytestmark = pytest.mark.quick

CLUSTER = GroupSizes(8, 4)  # m = 4, k = 2
STATES = ModelStates.of(10**9, 4 * 10**8)  # 2 GB, of which 0.8 GB are trained
QUICK = HopRates(*[Rate(0.0, 1e15)] * 2)
RATES = Rates(QUICK, QUICK, memory=1e15, host=1e9)
SHARDED = [name for name, row in STRATEGIES.items() if row.p != Placement.N]
MODEL = Model(
    STATES, accumulation=3, fetches=20, bucket=10**7, held=replace(STATES, parameters=0.0), host=HostParameters()
)
FEW_BITS = Compression(LocoSettings(), UpdateSettings())


def of(name: str, model: Model = MODEL, sent: Compression = UNCOMPRESSED, rates: Rates = RATES) -> Prediction:
    return predict(STRATEGIES[name], CLUSTER, model, rates, sent)


@pytest.mark.parametrize("name", SHARDED)
def test_bytes_are_those_of_the_formulas(name: str) -> None:
    """Copies at 1 GB/s: a slice in each of six gathers, and its updated part after the step."""
    row, prediction = STRATEGIES[name], of(name)
    on_device = 2.0 / CLUSTER.shards(row.p)
    assert prediction.busy["host"] == pytest.approx(6 * on_device + 0.8 / CLUSTER.shards(row.p))
    assert prediction.host == pytest.approx(1e9 * on_device) and prediction.memory.parameters == 0.0
    unsharded = of(name, replace(MODEL, held=None, host=None))
    windows = 2 * 2 * 10**7 / 4 if name in ("ING", "IIG", "IGG") else 0.0
    assert prediction.transient == pytest.approx(unsharded.transient + windows)
    assert unsharded.host == unsharded.busy["host"] == 0.0 and unsharded.volume == prediction.volume
    not_regathered = of(name, replace(MODEL, regathered=False))
    assert not_regathered.busy["host"] == pytest.approx(3 * on_device + 0.8 / CLUSTER.shards(row.p))


def test_a_cache_saves_its_bytes_of_each_gather() -> None:
    prediction = of("NIG")
    assert (prediction.busy["host"], prediction.host, prediction.memory.parameters) == (0.0, 0.0, STATES.parameters)
    half = replace(MODEL, host=HostParameters(cache=0.25e9))
    assert of("IIG", half).busy["host"] == pytest.approx(6 * 0.25 + 0.2)
    assert of("IIG", half).memory.parameters == 0.25e9 and of("IIG", half).host == 0.5e9
    assert of("IIG", replace(MODEL, host=HostParameters(cache=9e9))).busy["host"] == pytest.approx(0.2)
    assert of("III", half).busy["host"] == of("III").busy["host"], "it is for slices of several rows"


def test_updates_and_offloaded_states_use_slices_on_the_host() -> None:
    assert of("IIG", sent=FEW_BITS).busy["host"] == pytest.approx(6 * 0.5 + 2 * 0.2)
    both = replace(MODEL, held=replace(STATES, parameters=0.0, optimizer=0.0))
    assert of("IIG", both).busy["host"] == pytest.approx(6 * 0.5 + 0.2 + 0.1)
    assert of("III", both).busy["host"] == pytest.approx(6 * 0.5), "it has updated what is there"


def test_copies_run_under_compute_in_both_directions() -> None:
    """A gather takes 0.5 s and a micro-step 3 s, so only the first gather of a micro-step is waited for."""
    layer = 0.5 / 20
    prediction = of("IIG", replace(MODEL, compute=3.0))
    # The first layer: its window goes down in the first micro-step, and its slice up in each of the three.
    assert prediction.seconds["host"] == pytest.approx(0.2 / 20 + 3 * layer, abs=1e-3)
    assert prediction.total_seconds == pytest.approx(9.0 + prediction.seconds["host"], abs=1e-3)
    within = of("III", replace(MODEL, compute=3.0)).seconds["host"]
    assert within == pytest.approx(0.2 + 3 * layer, abs=1e-3), "a step of DeepSpeed's waits for the copy"
    slow = of("IIG", replace(MODEL, compute=0.3))  # less than the copies: these are what a step takes
    assert slow.total_seconds == pytest.approx(6 * 0.5, abs=0.25)


@pytest.mark.parametrize("n, m, copied", [(4, 4, 6 * 0.5 + 0.2), (8, 1, 6 * 2.0 + 0.8)])
def test_one_group_and_groups_of_one_rank(n: int, m: int, copied: float) -> None:
    model = replace(MODEL, host=HostParameters(cache=0.0 if m == 1 else 9e9))  # one group has no slices of rows
    prediction = predict(STRATEGIES["IIG"], GroupSizes(n, m), model, RATES)
    assert prediction.busy["host"] == pytest.approx(copied) and prediction.memory.parameters == 0.0


def test_pageable_memory_hides_nothing() -> None:
    pageable = replace(MODEL, compute=3.0, host=HostParameters(pinned=False))
    for model in (pageable, replace(MODEL, compute=3.0, streams=False)):
        assert of("IIG", model).seconds["host"] == pytest.approx(of("IIG", model).busy["host"]) == pytest.approx(3.2)
    plain = predict_plain_stage("GGG", CLUSTER, pageable, RATES)
    assert plain.seconds["host"] == pytest.approx(plain.busy["host"])


def test_plain_zero_3_and_experts_are_copied_as_well() -> None:
    assert predict_plain_stage("GGG", CLUSTER, MODEL, RATES).busy["host"] == pytest.approx(6 * 0.25 + 0.1)
    own = ModelStates.of(10**9)
    experts = Part(2, own, held=replace(own, parameters=0.0))  # among 4 ranks in groups of 2
    with_experts = of("IIG", replace(MODEL, experts=(experts,), host=HostParameters(cache=0.25e9)))
    assert with_experts.busy["host"] == pytest.approx(6 * (0.25 + 1.0) + 0.2 + 1.0)
