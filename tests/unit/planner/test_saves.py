# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Interval between saves, against published figures, a simulation of failures, and figures by hand."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from deepspeed_ext.config.settings import LocoSettings
from deepspeed_ext.planner.compression import UNCOMPRESSED, Compression
from deepspeed_ext.planner.costs import predict, predict_plain_stage
from deepspeed_ext.planner.memory import Model, Part
from deepspeed_ext.planner.rates import HopRates, Rate, Rates
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates
from deepspeed_ext.tools.plan.saves import Family, SaveFiles, Saves, Schedule, daly, predict_saves, share_lost, young
from tests.harness.tiers import with_cases

pytestmark = pytest.mark.quick

CLUSTER = GroupSizes(8, 4)  # on two nodes
STATES = ModelStates.of(10**9, 4 * 10**8)  # weights 2 GB, of which 1.2 GB are frozen; optimizer states 4.8 GB
HOPS = HopRates(Rate(0.0, 10e9), Rate(0.0, 1e9))
RATES = Rates(HOPS, HOPS, host=4e9)
SAVES = Saves(mtbf=36e3, ranks_per_node=4, disk=2e9, restart=120.0)
MODEL = Model(STATES, compute=10.0)
LOCO = Compression(LocoSettings())
ERRORS = 1e8 * (8 + 16 / 128) / 8  # of a rank's slice


def simulated(interval: float, held: float, lasts: float, mtbf: float, restart: float, failures: int = 4000) -> float:
    """The share of the time that is lost by a run that fails so often, step by step on a clock."""
    chance, clock, good = random.Random(46), 0.0, 0.0
    for _ in range(failures):
        fails = clock + chance.expovariate(1 / mtbf)
        now, trained = clock + restart, good
        while now < fails:
            now, trained = now + interval, trained + interval
            if now + lasts < fails:
                good = trained
            now += held
        clock = fails
    return 1 - good / clock


@pytest.mark.parametrize("mtbf, minutes, digits", [(24 * 60, 117, 0), (6 * 60, 57, 0), (15, 9.1, 1)])
def test_intervals_are_those_of_dalys_figures(mtbf: float, minutes: float, digits: int) -> None:
    """Figures 3 to 5 of the paper, for saves of 5 minutes."""
    assert round(daly(5, mtbf), digits) == minutes
    least = min(share_lost(minute / 10, 5, 5, mtbf, 10) for minute in range(1, 3000))
    assert share_lost(daly(5, mtbf), 5, 5, mtbf, 10) == pytest.approx(least, rel=1e-3)
    assert young(5, mtbf) == math.sqrt(10 * mtbf)
    assert share_lost(daly(5, mtbf), 5, 5, mtbf) < share_lost(young(5, mtbf), 5, 5, mtbf)
    # Saves that take longer than the time between failures.
    assert daly(30, 15) == daly(100, 15) == 15 and daly(0, 15) == 0
    assert daly(29.999, 15) == pytest.approx(30 * (1 + 1 / 3 + 1 / 9) - 30, rel=1e-3)
    assert share_lost(15, 1e9, 1e9, 15) == 1.0


@with_cases(
    "held, lasts, restart",
    (60.0, 60.0, 300.0),  # synchronous
    (5.0, 100.0, 0.0),  # asynchronous: more is trained between saves than while one is written
    (5.0, 100.0, 3000.0),  # and many restarts fail
    (1.0, 900.0, 60.0),  # the next save waits for the last one
    (0.0, 50.0, 60.0),  # nothing holds training up
)
def test_a_simulation_of_failures_loses_the_same_and_least(held: float, lasts: float, restart: float) -> None:
    mtbf = 7200.0
    best = Schedule.best(held, lasts, 1.0, replace(SAVES, mtbf=mtbf, restart=restart))
    assert best.seconds == best.steps and best.seconds + held >= lasts
    prediction = simulated(best.seconds, held, lasts, mtbf, restart)
    assert prediction == pytest.approx(best.lost, rel=0.05)
    shorter, longer = (simulated(best.seconds * times, held, lasts, mtbf, restart) for times in (0.6, 1.8))
    assert prediction < longer
    # Where the next save waits, a shorter interval is none that is possible.
    assert prediction < shorter or 0.6 * best.seconds + held < lasts


@pytest.mark.parametrize("name", STRATEGIES)
def test_bytes_of_files_by_hand(name: str) -> None:
    files = SaveFiles.for_strategy(STRATEGIES[name], [Family(CLUSTER, STATES, ERRORS)])
    writers, states = {"N": (1, 4.8e9), "I": (4, 1.2e9), "G": (8, 0.6e9)}[name[2]]
    weights = {"N": (1, 2e9 + 1.2e9), "I": (writers, 0.3e9), "G": (writers, 0.15e9)}[name[0]]
    assert (files.states, files.errors, *files.weights) == ((writers, states), (8, ERRORS), weights)


@with_cases(
    "name, m, size, writers, states",
    ("NII", 4, 2, 4, 4.8e9 / 4 + 2.4e9 / 2),
    ("NII", 2, 4, 4, 4.8e9 / 2 + 2.4e9),  # every group has other experts
    ("NNN", 4, 4, 4, 4.8e9 + 2.4e9),
    ("NIG", 4, 2, 8, 4.8e9 / 8 + 2.4e9 / 4),
)
def test_ranks_that_share_all_experts_write_them(name: str, m: int, size: int, writers: int, states: float) -> None:
    sizes = GroupSizes(8, m)
    own = Family(sizes.of_experts(size), ModelStates.of(2 * 10**8))
    files = SaveFiles.for_strategy(STRATEGIES[name], [Family(sizes, STATES), own])
    assert files.weights == ((1, 3.2e9), (size, 0.4e9)) and files.states == (writers, pytest.approx(states))


def of(name: str, model: Model = MODEL, sent: Compression = UNCOMPRESSED, rates: Rates = RATES, **more: Any) -> Any:
    saves, sizes = more.get("saves", SAVES), more.get("sizes", CLUSTER)
    return predict_saves(saves, predict(STRATEGIES[name], sizes, model, rates, sent), sizes, model, rates, sent)


def test_seconds_of_a_save_by_hand() -> None:
    """NIG: 0.6 GB of states for each of 8 ranks, 7/8 of them from others, and 3.2 GB of weights on the first."""
    crossing = 0.6 * 3 / 8 / 10 + 0.6 * 4 / 8 / 1
    prediction = of("NIG").saves
    assert (prediction.of_first_rank, prediction.total) == pytest.approx((3.8e9, 3.2e9 + 4.8e9))
    first_node = 3.2 + 4 * 0.6
    assert prediction.synchronous.held == pytest.approx(crossing + 3.8 / 4 + first_node / 2)
    assert prediction.synchronous.lasts == prediction.synchronous.held
    assert prediction.asynchronous.held == pytest.approx(3.2 / 4)
    assert prediction.asynchronous.lasts == pytest.approx(3.8 / 4 + first_node / 2)
    # All write 8 GB, which a storage of 1 GB/s takes longer for.
    shared = of("NIG", saves=replace(SAVES, shared=1e9)).saves
    assert shared.synchronous.held == pytest.approx(crossing + 3.8 / 4 + 8.0)
    # LoCo's errors are copied while training waits.
    with_errors = of("NIG", sent=LOCO).saves
    assert with_errors.asynchronous.held == pytest.approx(3.2 / 4 + ERRORS / 4e9)
    assert with_errors.total == pytest.approx(8e9 + 8 * ERRORS)
    # On one group alone nothing is sent between groups; whole states cross nowhere; plain stages have their order.
    assert of("NII").saves.synchronous.held == pytest.approx(1.2 * 3 / 4 / 10 + 4.4 / 4 + (3.2 + 4.8) / 2)
    assert of("NNN").saves.synchronous.held == pytest.approx(8.0 / 4 + 8.0 / 2)
    plain = predict_saves(SAVES, predict_plain_stage("NGG", CLUSTER, MODEL, RATES), CLUSTER, MODEL, RATES).saves
    assert plain.synchronous.held == pytest.approx(prediction.synchronous.held - crossing)
    sharded = of("IIG").saves
    assert sharded.synchronous.held == pytest.approx(0.9 / 4 + 4 * 0.9 / 2)
    assert sharded.asynchronous.held == pytest.approx(0.3 / 4)


def test_a_step_waits_for_copies_that_it_cannot_hide() -> None:
    # 120 s for the states, under a step of 10 s and more; the 3 s of its update are not among those that hide them.
    slowly = replace(RATES, host=0.01e9, memory=1e9)
    slow = of("NII", rates=slowly).saves
    assert slow.asynchronous.held == pytest.approx(320 + 120 - of("NII", rates=slowly).total_seconds + 3)
    assert slow.asynchronous.lasts == pytest.approx(320 + 120 + 4)
    held = ModelStates(STATES.parameters, STATES.gradients, STATES.updated, 0.0)
    offloaded = of("NII", replace(MODEL, held=held), rates=slowly).saves
    assert offloaded.asynchronous.held == pytest.approx(320), "the states are on the host"


def test_the_interval_is_in_whole_steps() -> None:
    prediction = of("NIG").saves
    step = of("NIG").total_seconds
    for one in (prediction.synchronous, prediction.asynchronous):
        expected = daly(one.held, SAVES.mtbf)
        assert one.steps == round(expected / step) > 5 and one.seconds == one.steps * step
        assert one.young_seconds == young(one.held, SAVES.mtbf)
        assert one.lost == share_lost(one.seconds, one.held, one.lasts, SAVES.mtbf, 120.0)
    slow = of("NIG", saves=replace(SAVES, disk=2e6)).saves  # 2800 s a save
    assert slow.asynchronous.steps == math.ceil((slow.asynchronous.lasts - slow.asynchronous.held) / step)
    assert of("NIG", replace(MODEL, compute=1e6)).saves.synchronous.steps == 1


def test_asynchronous_saves_pin_what_a_rank_writes() -> None:
    assert of("NIG").host == 0 and of("NIG").saves.kind == "synchronous"
    later = replace(SAVES, asynchronous=True)
    assert of("NIG", saves=later).host == of("NIG", saves=later).saves.pinned == pytest.approx(3.8e9)
    assert of("NIG", saves=later).saves.schedule == of("NIG").saves.asynchronous
    experts = Part(2, ModelStates.of(2 * 10**8))  # 0.4 GB, and 2.4 GB of states among 4 ranks
    assert of("NIG", replace(MODEL, experts=(experts,)), saves=later).host == pytest.approx(3.8e9 + 0.4e9 + 0.6e9)
    alone = of("NIG", sent=LOCO, saves=later, sizes=GroupSizes(4, 4))
    assert alone.host == pytest.approx(3.2e9 + 1.2e9), "without other groups no errors are kept"


@with_cases(
    "figure, value, message",
    ("mtbf", math.inf, "mtbf must be a finite number above 0, got inf"),
    ("disk", 0.0, "disk must be a finite number above 0, got 0.0"),
    ("shared", -1.0, "shared must be above 0, got -1.0"),
    ("restart", math.nan, "restart must be a finite number of at least 0, got nan"),
)
def test_figures_out_of_bounds_are_refused(figure: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SAVES, **{figure: value})
    with pytest.raises(ValueError, match="needs the seconds of a step, which are predicted as 0"):
        Schedule.best(1.0, 1.0, 0.0, SAVES)
