# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What the planner says of an outer optimizer: by hand, and against what an outer optimizer holds and sends."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from deepspeed_ext.config.outer import MOST_AT_ONCE, NEEDS, OuterSettings
from deepspeed_ext.planner.cost import Experts, Model, predict
from deepspeed_ext.planner.outer import OuterPrediction, plan_outer, predict_outer
from deepspeed_ext.planner.rates import HopRates, Rate, Rates
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates
from tests.harness.tiers import deep

CLUSTER = GroupSizes(16, 4)  # b = 3/16
TRAINED = 6e8  # of 10^9: 1.5e8 in a slice, 3.75e7 in a row
MODEL = Model(ModelStates.of(10**9, int(TRAINED)), accumulation=4, compute=0.005)
# Within groups nothing takes time, so an inner step takes 0.02 s.
WITHIN = Rate(0.0, float("inf"))
RATES = Rates(HopRates(WITHIN, Rate(1e-2, 2e9)), HopRates(WITHIN, Rate(2e-2, 1e9)))
STREAMING = OuterSettings(steps=30, bits=4, fragments=5, delay=2)
ERRORS = 1.5e8 * (8 + 16 / 128) / 8
RELATIVE, ABSOLUTE = 0.01, 2000  # of what is due; bytes where nothing is: barriers, norms, flags


def of(name: str, settings: OuterSettings, model: Model = MODEL, sizes: GroupSizes = CLUSTER) -> OuterPrediction:
    return predict_outer(STRATEGIES[name], sizes, model, RATES, settings)


@pytest.mark.quick
@pytest.mark.parametrize("name", NEEDS)
def test_an_outer_step_by_hand(name: str) -> None:
    row, found = STRATEGIES[name], of(name, OuterSettings())
    alone = predict(row, CLUSTER, MODEL, RATES)
    assert found.received == pytest.approx(2 * 3 / 16 * 4 * TRAINED) == pytest.approx(9e8)
    assert found.average.volume.inter == pytest.approx(9e8 / 30)
    assert found.average.volume.intra == pytest.approx(row.volume(CLUSTER, MODEL.states, 4).intra)
    assert found.held == pytest.approx(4 * TRAINED / 4 + 8 * TRAINED / 16)
    assert found.transfer == 4 * MOST_AT_ONCE and found.average.host == 0
    assert found.average.memory == alone.memory
    assert found.average.total_memory == pytest.approx(alone.total_memory + found.held + found.transfer)
    # Three pieces of at most 2^26 elements there in 4.5e8 bytes, and as many back.
    assert found.exposed == found.busy == pytest.approx(3 * 2e-2 + 4.5e8 / 1e9 + 3 * 1e-2 + 4.5e8 / 2e9)
    assert found.average.total_seconds == pytest.approx(0.02 + found.exposed / 30)
    assert found.average.seconds["between"] == found.average.busy["between"] == pytest.approx(found.exposed / 30)


@pytest.mark.quick
@pytest.mark.parametrize("name", NEEDS)
def test_fragments_in_few_bits_under_inner_steps_by_hand(name: str) -> None:
    found = of(name, STREAMING)
    each_way = 3 / 16 * TRAINED * 4.125 / 8
    assert found.received == pytest.approx(2 * each_way)
    assert found.held == pytest.approx(9e8 + ERRORS)
    assert found.transfer == pytest.approx(4 * 1.5e8 / 5 + ERRORS / 5)
    fragment = 2e-2 + each_way / 5 / 1e9 + 1e-2 + each_way / 5 / 2e9
    assert 0.04 < fragment < 0.08  # so two inner steps hide some of it, and twice as long ones all
    assert found.busy == pytest.approx(5 * fragment)
    assert found.exposed == pytest.approx(5 * (fragment - 2 * 0.02))
    slower = of(name, STREAMING, replace(MODEL, compute=0.01)).average
    assert slower.total_seconds == pytest.approx(0.04) and slower.seconds["between"] == 0
    assert slower.busy["between"] == pytest.approx(5 * fragment / 30)
    for delay, copied in ((0, MOST_AT_ONCE), (1, 1.5e8)):
        whole = of(name, replace(STREAMING, fragments=1, delay=delay))
        assert whole.transfer == pytest.approx(4 * copied + ERRORS) and whole.received == found.received


@pytest.mark.quick
def test_bits_and_places_of_what_is_held() -> None:
    for bits, wire in ((32, 32), (16, 16), (8, 8.125), (4, 4.125)):
        found = of("III", OuterSettings(bits=bits))
        assert found.received == pytest.approx(2 * 3 / 16 * TRAINED * wire / 8), bits
        assert found.held == pytest.approx(9e8 + (ERRORS if bits < 16 else 0)), bits
    offloaded = of("III", replace(STREAMING, offload="cpu"))
    assert offloaded.held == pytest.approx(ERRORS) and offloaded.average.host == pytest.approx(9e8)
    assert offloaded.transfer == of("III", STREAMING).transfer
    one_group = of("III", OuterSettings(bits=4), sizes=GroupSizes(4, 4))
    assert (one_group.received, one_group.busy) == (0, 0)
    assert one_group.held == pytest.approx(4 * 1.5e8 + 8 * 1.5e8)  # it has no errors


@pytest.mark.quick
def test_all_strategies_it_may_be_used_with_and_no_choice() -> None:
    model = replace(MODEL, compute=0.5, fetches=20)  # which hides gathers of parameters, but not of updates
    found = plan_outer(CLUSTER, model, Rates.of_links(CLUSTER, 4, 800, 1), STREAMING, budget=5e9)
    assert {one.average.strategy for one in found.predictions} == set(NEEDS) == {"NNI", "NII", "INI", "III"}
    seconds = [one.average.total_seconds for one in found.predictions]
    assert seconds == sorted(seconds) and found.predictions[0].average.strategy != NEEDS[0]
    fitting = [one for one in found.predictions if found.fits(one)]
    assert 0 < len(fitting) < 4 and all(one.average.total_memory <= 5e9 for one in fitting)
    written = found.as_dict()
    assert "choice" not in written and written["settings"]["fragments"] == 5
    assert [one["fits"] for one in written["predictions"]] == [found.fits(one) for one in found.predictions]
    assert written["predictions"][0]["outer_step"]["received"] == found.predictions[0].received


@pytest.mark.quick
def test_what_it_cannot_be_used_with_is_refused() -> None:
    with pytest.raises(ValueError, match="needs one of NNI, NII, INI, III, got IIG"):
        of("IIG", STREAMING)
    with pytest.raises(ValueError, match="an outer optimizer takes no experts of expert parallelism"):
        of("III", STREAMING, replace(MODEL, experts=(Experts(2, MODEL.states),)))


class Seen(NamedTuple):
    """What an outer optimizer held and sent on one rank.

    Attributes:
        trained: parameters.
        states: bytes of anchors, outer weights and momenta.
        errors: bytes of errors after the last fragment of an outer step has been used.
        copies: most bytes of results that were on their way.
        twice: most bytes of errors.
        received: mean bytes a rank from other groups in each step, of the two outer steps that were counted.
    """

    trained: int
    states: int
    errors: int
    copies: int
    twice: int
    received: list[float]


@pytest.mark.parametrize("bits", [32, 4, *deep(16, 8)])
def test_it_is_what_an_outer_optimizer_holds_and_sends(ranks: Any, kernels: bool, bits: int) -> None:
    given = {"steps": 4, "fragments": 2, "delay": 1, "bits": bits}
    for rows in ranks(6).run(outer_case, ("NII", "III"), given):
        for name, seen in rows.items():
            model = Model(ModelStates.of(seen.trained, parameter_bytes=4, gradient_bytes=4), gradient_bytes=4)
            due = of(name, OuterSettings(**given), model, GroupSizes(6, 2))
            assert seen.states + seen.errors == pytest.approx(due.held, rel=RELATIVE), name
            assert seen.copies + seen.twice - seen.errors == pytest.approx(due.transfer, rel=RELATIVE), name
            # In the second step from an outer step on, and in the fourth, half of it.
            expected = [0, due.received / 2] * 4
            assert seen.received == pytest.approx(expected, rel=RELATIVE, abs=ABSOLUTE), name
            assert sum(seen.received) / 8 == pytest.approx(due.average.volume.inter, rel=RELATIVE), name


def outer_case(names: tuple[str, ...], given: dict[str, Any]) -> dict[str, Seen]:
    """Train strategies for three outer steps, of which the last two are counted."""
    from deepspeed import comm as dist

    from scripts.emulation.traffic import TrafficMeter
    from tests.harness import training

    job = training.Job(sizes=(512, 1023, 1024, 600), empty=False)
    found = {}
    for name in names:
        engine, model = training.make_engine(job, training.placed(name, 2, paro_outer_optimizer=given))
        data, outer = training.batches(job), engine.optimizer.outer
        received, copies, twice = [], [], []
        for number in range(3 * given["steps"]):
            meter = TrafficMeter()
            dist.barrier()
            meter.start()
            dist.barrier()
            training.micro_step(engine, job, number, *next(data))
            engine.step()
            twice.append(outer.reduce.errors.nbytes() if outer.reduce.keeps_errors else 0)
            on_the_way = [one.started for one in outer.fragments if one.started is not None]
            copies.append(sum(outer._queue.finish(one).nbytes for one in on_the_way))
            dist.barrier()
            meter.stop()
            dist.barrier()
            received.append(meter.split(2).inter_mean)
        states = sum(t.nbytes for one in outer.fragments for t in (one.anchor, one.weights, one.momentum))
        trained = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
        errors = twice[-2]  # nothing has left since the first fragment was used
        found[name] = Seen(trained, states, errors, max(copies), max(twice), received[given["steps"] :])
        engine.destroy()
    return found
