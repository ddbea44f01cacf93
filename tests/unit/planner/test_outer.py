# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Predictions for an outer optimizer, against figures by hand."""

from dataclasses import replace

import pytest

from deepspeed_ext.config.model import OUTER_STRATEGIES
from deepspeed_ext.config.settings import MAX_TRANSFER_NUMEL, OuterSettings
from deepspeed_ext.planner.costs import predict
from deepspeed_ext.planner.memory import Model, Part
from deepspeed_ext.planner.rates import HopRates, Rate, Rates
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates
from deepspeed_ext.tools.plan.outer import OuterPrediction, predict_outer

pytestmark = pytest.mark.quick

CLUSTER = GroupSizes(16, 4)  # b = 3/16
TRAINED = 6e8  # of 10^9: 1.5e8 in a slice, 3.75e7 in a row
MODEL = Model(ModelStates.of(10**9, int(TRAINED)), accumulation=4, compute=0.005)
# Within groups nothing takes time, so an inner step takes 0.02 s.
WITHIN = Rate(0.0, float("inf"))
RATES = Rates(HopRates(WITHIN, Rate(1e-2, 2e9)), HopRates(WITHIN, Rate(2e-2, 1e9)))
STREAMING = OuterSettings(steps=30, bits=4, fragments=5, delay=2)
ERRORS = 1.5e8 * (8 + 16 / 128) / 8


def of(name: str, settings: OuterSettings, model: Model = MODEL, sizes: GroupSizes = CLUSTER) -> OuterPrediction:
    return predict_outer(STRATEGIES[name], sizes, model, RATES, settings)


@pytest.mark.parametrize("name", OUTER_STRATEGIES)
def test_an_outer_step_by_hand(name: str) -> None:
    row, prediction = STRATEGIES[name], of(name, OuterSettings())
    alone = predict(row, CLUSTER, MODEL, RATES)
    assert prediction.received == pytest.approx(2 * 3 / 16 * 4 * TRAINED) == pytest.approx(9e8)
    assert prediction.average.volume.inter == pytest.approx(9e8 / 30)
    assert prediction.average.volume.intra == pytest.approx(row.volume(CLUSTER, MODEL.states, 4).intra)
    assert prediction.held == pytest.approx(4 * TRAINED / 4 + 8 * TRAINED / 16)
    assert prediction.transfer == 4 * MAX_TRANSFER_NUMEL and prediction.average.host == 0
    assert prediction.average.memory == alone.memory
    assert prediction.average.total_memory == pytest.approx(alone.total_memory + prediction.held + prediction.transfer)
    # Three pieces of at most 2^26 elements there in 4.5e8 bytes, and as many back.
    assert prediction.exposed == prediction.busy == pytest.approx(3 * 2e-2 + 4.5e8 / 1e9 + 3 * 1e-2 + 4.5e8 / 2e9)
    assert prediction.average.total_seconds == pytest.approx(0.02 + prediction.exposed / 30)
    between = [seconds["between"] for seconds in (prediction.average.seconds, prediction.average.busy)]
    assert between == pytest.approx([prediction.exposed / 30] * 2)


@pytest.mark.parametrize("name", OUTER_STRATEGIES)
def test_fragments_in_few_bits_under_inner_steps_by_hand(name: str) -> None:
    prediction = of(name, STREAMING)
    each_way = 3 / 16 * TRAINED * 4.125 / 8
    assert prediction.received == pytest.approx(2 * each_way)
    assert prediction.held == pytest.approx(9e8 + ERRORS)
    assert prediction.transfer == pytest.approx(4 * 1.5e8 / 5 + ERRORS / 5)
    fragment = 2e-2 + each_way / 5 / 1e9 + 1e-2 + each_way / 5 / 2e9
    assert 0.04 < fragment < 0.08  # so two inner steps hide some of it, and twice as long ones all
    assert prediction.busy == pytest.approx(5 * fragment)
    assert prediction.exposed == pytest.approx(5 * (fragment - 2 * 0.02))
    slower = of(name, STREAMING, replace(MODEL, compute=0.01)).average
    assert slower.total_seconds == pytest.approx(0.04) and slower.seconds["between"] == 0
    assert slower.busy["between"] == pytest.approx(5 * fragment / 30)
    for delay, copied in ((0, MAX_TRANSFER_NUMEL), (1, 1.5e8)):
        undivided = of(name, STREAMING.model_copy(update={"fragments": 1, "delay": delay}))
        assert undivided.transfer == pytest.approx(4 * copied + ERRORS) and undivided.received == prediction.received


def test_bits_and_places_of_what_is_held_and_refusals() -> None:
    for bits, wire in ((32, 32), (16, 16), (8, 8.125), (4, 4.125)):
        prediction = of("III", OuterSettings(bits=bits))
        assert prediction.received == pytest.approx(2 * 3 / 16 * TRAINED * wire / 8), bits
        assert prediction.held == pytest.approx(9e8 + (ERRORS if bits < 16 else 0)), bits
    offloaded = of("III", STREAMING.model_copy(update={"offload": "cpu"}))
    assert offloaded.held == pytest.approx(ERRORS) and offloaded.average.host == pytest.approx(9e8)
    assert offloaded.transfer == of("III", STREAMING).transfer
    one_group = of("III", OuterSettings(bits=4), sizes=GroupSizes(4, 4))
    assert (one_group.received, one_group.busy) == (0, 0)
    assert one_group.held == pytest.approx(4 * 1.5e8 + 8 * 1.5e8)  # it has no errors
    with pytest.raises(ValueError, match="needs one of N-N-I, N-I-I, I-N-I, I-I-I, got I-I-G"):
        of("IIG", STREAMING)
    with pytest.raises(ValueError, match="an outer optimizer does not support expert parallelism"):
        of("III", STREAMING, replace(MODEL, experts=(Part(2, MODEL.states),)))
