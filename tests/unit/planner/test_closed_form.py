# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The seconds of a step in closed form, against a simulation, bounds, and figures by hand. Pure."""

from dataclasses import replace
from random import Random
from unittest import mock

import pytest

from deepspeed_ext.config.settings import LocoSettings
from deepspeed_ext.planner.closed_form import Step
from deepspeed_ext.planner.compression import Compression
from deepspeed_ext.planner.costs import PLAIN, predict, predict_plain, predict_plain_stage
from deepspeed_ext.planner.memory import HostParameters, Model, Part
from deepspeed_ext.planner.rates import HopRates, Rate, Rates
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates
from tests.harness.step_simulator import simulate_step
from tests.harness.tiers import with_cases

pytestmark = pytest.mark.quick

LAYERS = 20
CLUSTER = GroupSizes(8, 2)
STATES = ModelStates.of(10**9)
FORWARD, BACKWARD = 1.0, 2.0  # seconds of a micro-step
MODEL = Model(STATES, compute=3.0, fetches=LAYERS, bucket=10**9 // LAYERS, overlap_updates=True)
LATER = 1 - 1 / LAYERS  # of a backward what is left when its first layer is done


def links(between: float, within: float = 1e-3) -> Rates:
    """Rates at which all gradients take these seconds from group to group, and inside a group."""
    hops = HopRates(Rate(0.0, 1e9 / within), Rate(0.0, 3 / 8 * 2e9 / between))
    return Rates(hops, hops, memory=1e13)


@pytest.mark.parametrize("accumulation", [1, 9])
@pytest.mark.parametrize("between", [0.3, 1.5, 6.0])
@pytest.mark.parametrize("name", ["NNG", "NIG", "NII", "IIG", "III", "NNI"])
def test_the_period_is_the_bound(name: str, between: float, accumulation: int) -> None:
    """The minimum: the part of the reduction that a backward cannot hide, and of the gather that a forward cannot."""
    reduction = between if name[2] == "G" else 2 * between  # sums that come back
    gather = between if name[2] == "G" else 0.0
    bound = accumulation * (FORWARD + BACKWARD)
    bound += max(0.0, reduction - BACKWARD * LATER) + max(0.0, gather - FORWARD * LATER)
    prediction = predict(STRATEGIES[name], CLUSTER, replace(MODEL, accumulation=accumulation), links(between))
    layer = (reduction + gather) / LAYERS
    assert bound <= prediction.total_seconds <= bound + layer + 0.005 * accumulation
    assert sum(prediction.seconds.values()) == pytest.approx(prediction.total_seconds)
    assert prediction.busy["between"] == pytest.approx(reduction + gather)
    compute = [seconds["compute"] for seconds in (prediction.seconds, prediction.busy)]
    assert compute == pytest.approx([3.0 * accumulation] * 2)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name[0] == "N"])
def test_nothing_of_p_n_overlaps_on_a_host(name: str) -> None:
    host = replace(MODEL, accumulation=3, streams=False, overlap_updates=False)
    prediction = predict(STRATEGIES[name], CLUSTER, host, links(1.5, within=0.5))
    assert prediction.seconds == pytest.approx(prediction.busy)


def test_prefetches_by_hand() -> None:
    """A device starts a layer's first hop under the second one of the layer before, a host after it."""
    free = replace(MODEL, compute=0.0, accumulation=2, regathered=False)
    rates = links(2.0, within=1.0)
    totals = [predict(STRATEGIES["GNG"], CLUSTER, replace(free, streams=on), rates) for on in (True, False)]
    last = 2.0 / LAYERS  # of a pipeline, what is not under another
    reduced = 1.0 + 2.0  # at the boundary, on one link after the other
    for prediction, gathered in zip(totals, (2.0, 2.0 + 1.0), strict=True):
        assert prediction.total_seconds == pytest.approx(2 * gathered + reduced - 1.0, abs=3 * last)
        assert prediction.busy["within"] == pytest.approx((2 + 1) * 1.0)
        assert prediction.busy["between"] == pytest.approx(3 * 2.0)
    # Two layers take a layer's compute and both of its hops, all 1 s a pass, for each.
    alike = predict(STRATEGIES["GNG"], CLUSTER, replace(free, compute=3.0, accumulation=1), links(1.0, within=1.0))
    assert alike.total_seconds == pytest.approx(1.5 + BACKWARD, abs=0.2)
    twice = predict(STRATEGIES["GNG"], CLUSTER, replace(free, regathered=True), rates)
    assert twice.busy["within"] == pytest.approx((4 + 1) * 1.0)


def test_what_is_exposed_is_told_apart() -> None:
    """NII reduces and gathers within its group, 2.5 s each, and adds up between groups, in 0.4 s."""
    prediction = predict(STRATEGIES["NII"], CLUSTER, MODEL, links(0.2, within=2.5)).seconds
    assert prediction["within"] == pytest.approx(2.5 - BACKWARD * LATER + 2.5 - FORWARD * LATER, abs=0.01)
    assert prediction["between"] == pytest.approx(0.4 / LAYERS, abs=0.01)


def test_updates_come_before_the_forward_or_under_it() -> None:
    for between, saved in ((0.8, 0.8), (3.0, FORWARD)):
        under, before = (
            predict(STRATEGIES["NIG"], CLUSTER, replace(MODEL, overlap_updates=on), links(between)).total_seconds
            for on in (True, False)
        )
        assert before - under == pytest.approx(saved * LATER, abs=0.01)
    # Where they are sharded they come under it anyway; where nothing has changed they do not come.
    for row in (STRATEGIES[name] for name in ("IIG", "III", "GGG")):
        off = predict(row, CLUSTER, replace(MODEL, overlap_updates=False), links(3.0))
        assert off == predict(row, CLUSTER, MODEL, links(3.0))


def test_a_unit_is_a_bucket() -> None:
    """A single bucket is sent after the backward; the first of two is sent half-way."""
    for buckets, hidden in ((1, 0.0), (2, BACKWARD / 2), (LAYERS, BACKWARD * LATER)):
        prediction = predict(STRATEGIES["NNI"], CLUSTER, replace(MODEL, bucket=10**9 // buckets), links(3.0))
        assert prediction.seconds["between"] == pytest.approx(6.0 - hidden, abs=0.01)


def test_what_crosses_in_each_micro_step_by_hand() -> None:
    """Between groups, GGG gathers twice and reduces in each micro-step: the link never rests. IGG and NGG reduce, and
    the next micro-step waits for it: the link rests in each forward but the first, and until the first unit is there.
    """
    model = replace(MODEL, accumulation=4)
    rests = 3 * FORWARD + 4 * BACKWARD / LAYERS + FORWARD / LAYERS
    for name, times, beside in (("GGG", 4 * 3, 0.0), ("IGG", 4 + 1, rests), ("NGG", 4 + 1, rests)):
        prediction = predict(STRATEGIES[name], CLUSTER, model, links(6.0))
        assert prediction.busy["between"] == pytest.approx(6.0 * times)
        assert prediction.total_seconds == pytest.approx(6.0 * times + beside, abs=0.05)
    loco = predict(STRATEGIES["IGG"], CLUSTER, model, links(6.0), Compression(LocoSettings(bits=4, block_size=32)))
    reduction = 6.0 * 4.5 / 16  # less than a backward takes, so all is hidden but the last unit
    assert loco.busy["between"] == pytest.approx(4 * reduction + 6.0)
    assert loco.seconds["between"] == pytest.approx(4 * reduction / LAYERS + 6.0 - FORWARD * LATER, abs=0.01)


def drawn(random: Random) -> Step:
    """Return a random step of a strategy or a plain stage, as in real runs and measurements."""
    sizes = GroupSizes(*random.choice([(8, 1), (16, 4), (8, 8), (32, 8), (4, 2)]))
    states = ModelStates.of(10**9, random.choice([10**9, 10**8]))

    def rate() -> Rate:
        return Rate(random.choice([0.0, 1e-4, 1e-3]), 10 ** random.uniform(8, 11.3))

    rates = Rates(HopRates(rate(), rate()), HopRates(rate(), rate()), 1e12, host=10 ** random.uniform(8.5, 10.5))
    on_host, with_muon, own = (random.random() < 0.2 for _ in range(3))
    model = Model(
        states,
        accumulation=random.choice([1, 2, 3, 8]),
        compute=random.choice([0.0, 0.3, 1.0, 3.0]),
        fetches=random.choice([4, 16, 32, 100]),
        bucket=random.choice([10**9, 2 * 10**8, 625 * 10**5, 10**7]),
        streams=random.random() < 0.6,
        overlap=random.choice([None, None, True, False]),
        overlap_updates=random.random() < 0.5,
        regathered=random.random() < 0.8,
        host=HostParameters(pinned=random.random() < 0.7) if on_host else None,
        held=replace(states, parameters=0.0) if on_host else None,
        matrices=states.gradients if with_muon else 0.0,
        orthogonalizing=10 ** random.uniform(-1, 1) if with_muon else 0.0,
        experts=(Part(2, ModelStates.of(10**8), fetches=8),) if own and sizes.ranks > sizes.group_size > 1 else (),
    )
    steps: list[Step] = []
    with mock.patch.object(Step, "busy", lambda step: steps.append(step) or busy(step)):
        if random.random() < 0.15:
            predict_plain_stage(random.choice(list(PLAIN)), sizes, model, rates)
        else:
            predict(random.choice(list(STRATEGIES.values())), sizes, model, rates)
    return steps[0]


busy = Step.busy
CASES = 250


def test_the_closed_form_is_near_a_simulation() -> None:
    """It is inexact where buckets hold up gathers, and in the first and last layers."""
    errors = []
    for seed in range(CASES):
        step = drawn(Random(seed))
        prediction, expected = step.seconds(), simulate_step(step)
        assert step.busy() == pytest.approx(expected.busy)
        assert prediction["compute"] == pytest.approx(expected.exposed["compute"])
        assert all(0 <= seconds <= step.busy()[part] * (1 + 1e-9) for part, seconds in prediction.items()), seed
        errors.append(abs(sum(prediction.values()) / sum(expected.exposed.values()) - 1))
    errors.sort()
    assert errors[CASES // 2] < 1e-9 and errors[int(0.95 * CASES)] < 0.02 and errors[-1] < 0.1


MUON = replace(MODEL, matrices=STATES.gradients)
ROUND = 1 / 8


@with_cases(
    "name, orthogonalizing, between, within, added",
    # IIG's ranks exchange half of what a reduction moves, in 0.4 s, and each orthogonalizes an eighth.
    ("IIG", 8 * 4.0, 0.8, 1e-3, 4.0 + 0.4 * ROUND),  # the first round to owners, and the last one back
    ("IIG", 8 * 0.1, 0.8, 1e-3, 0.4),  # all of it under the exchange
    ("IIG", 0.0, 0.8, 1e-3, 0.4),
    # III's exchange as much as a reduction moves inside the group, and each orthogonalizes half.
    ("III", 2 * 4.0, 0.8, 0.4, 4.0 + 0.4 * ROUND),
    ("III", 2 * 0.1, 0.8, 0.4, 0.4),
    ("NNN", 2 * 4.0, 0.8, 1e-3, 4.0),
)
def test_matrices_are_orthogonalized_while_others_travel(
    name: str, orthogonalizing: float, between: float, within: float, added: float
) -> None:
    """In 8 rounds, when all reductions are over."""
    rates = links(between, within)
    without = predict(STRATEGIES[name], CLUSTER, MODEL, rates)
    prediction = predict(STRATEGIES[name], CLUSTER, replace(MUON, orthogonalizing=orthogonalizing), rates)
    assert prediction.total_seconds - without.total_seconds == pytest.approx(added, abs=0.002)
    shared = {"G": 8, "I": 2, "N": 2}[name[2]]
    assert prediction.busy["update"] - without.busy["update"] == pytest.approx(orthogonalizing / shared)
    assert prediction.busy["between"] - without.busy["between"] == pytest.approx(0.4 if name == "IIG" else 0.0)
    # To owners and back: two messages a round.
    slow = Rates(*(HopRates(Rate(0.0, 1e15), Rate(0.5, 1e15)) for _ in range(2)), memory=1e13)
    with_muon, without = (predict(STRATEGIES["IIG"], CLUSTER, model, slow) for model in (MUON, MODEL))
    assert with_muon.busy["between"] - without.busy["between"] == pytest.approx(2 * 8 * 0.5, abs=1e-3)


def test_plain_stages_by_hand() -> None:
    """ZeRO-1 waits for updated parameters; its hops run at the same time, so the hop inside a group is hidden."""
    plain = {row.name: row.total_seconds for row in predict_plain(CLUSTER, MODEL, links(3.0, within=2.0))}
    assert plain["ZeRO-1"] == pytest.approx(3.0 + (3.0 - BACKWARD * LATER) + 3.0, abs=0.01)
    assert plain["ZeRO-2"] == pytest.approx(plain["ZeRO-1"])
    assert plain["DDP"] == pytest.approx(3.0 + 6.0 - BACKWARD * LATER, abs=0.3)
    one_bucket = predict_plain(CLUSTER, replace(MODEL, bucket=10**9), links(3.0, within=2.0))
    assert one_bucket[0].total_seconds == pytest.approx(plain["DDP"])  # DDP has buckets of its own
    assert plain["ZeRO-3"] == pytest.approx(3 * 3.0, abs=0.3)
    # Where the first hop costs next to nothing GGG is ZeRO-3: a reduction holds up no prefetch in either.
    coarse = replace(MODEL, bucket=10**9 // 5)
    for between in (0.5, 0.9, 1.3):
        stock = predict_plain(CLUSTER, coarse, links(between))[-1]
        assert stock.name == "ZeRO-3"
        ours = predict(STRATEGIES["GGG"], CLUSTER, coarse, links(between))
        assert ours.total_seconds == pytest.approx(stock.total_seconds, rel=0.01)
