# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Predictions from a report, under other links and on other nodes."""

import json
from dataclasses import replace

import pytest

from deepspeed_ext.planner.costs import predict
from deepspeed_ext.planner.rates import HopRates, Rate
from deepspeed_ext.strategy import STRATEGIES, GroupSizes
from deepspeed_ext.tools.plan.recorded_training import KEY, RecordedTraining
from deepspeed_ext.tools.plan.what_if import WhatIf
from tests.harness import reports

pytestmark = pytest.mark.quick
BYTES = 4 * 8_400_000


def recorded(name: str = "NIG") -> RecordedTraining:
    report = reports.report() | {KEY: reports.planner_input(name).as_dict()}
    return RecordedTraining.from_report(json.loads(json.dumps(report, allow_nan=False)))


def test_a_report_keeps_all_that_the_planner_needs() -> None:
    assert recorded() == RecordedTraining(reports.planner_input(), step=0.5, update=0.03, other=0.02)
    # Of one group, between whose ranks a rate is infinite.
    assert RecordedTraining.from_report(reports.report(ranks=2)).planner_input == reports.planner_input(ranks=2)


def test_where_it_was_recorded_a_step_has_the_recorded_parts() -> None:
    training = replace(recorded(), step=9.0)
    predicted = WhatIf(training, training.planner_input.cluster, training.planner_input.model)
    parts = predicted.now.prediction.seconds
    assert parts["compute"] == pytest.approx(0.25) and parts["update"] == pytest.approx(0.03)
    assert predicted.now.seconds == sum(parts.values()) + 0.02  # "other" of the report; the rest is left as it is
    steps = [sum(parts.values()) + more for more in (-1, 0.01)]
    assert [replace(training, step=step).unexplained_seconds for step in steps] == [0.0, pytest.approx(0.01)]
    (other,) = (row for row in predicted.rows if row.prediction.name == "NNN")
    assert other.prediction.seconds["update"] == pytest.approx(4 * 0.03)  # of all states, rather than of a quarter
    given = training.planner_input
    exact = predict(STRATEGIES["NIG"], given.cluster.sizes, given.model, given.rates)
    assert parts["between"] == exact.seconds["between"]


def test_ordered_sums_have_no_rows_with_loco() -> None:
    training = recorded()
    model = replace(training.planner_input.model, ordered=("inter",))
    rows = WhatIf(training, training.planner_input.cluster, model).rows
    assert rows and not any(row.prediction.loco for row in rows)


def test_links_are_those_given_and_else_the_probed_ones() -> None:
    training = recorded()
    was, model = training.planner_input.cluster, training.planner_input.model
    slower = training.predict("NIG", replace(was, inter_gbps=0.1), model)
    before = training.predict("NIG", was, model)
    assert slower.busy["between"] == pytest.approx(5 * before.busy["between"])
    assert slower.busy["within"] == pytest.approx(before.busy["within"])
    # Eight ranks on two nodes: four flows share what two did.
    wider = training.predict("NIG", replace(was, sizes=GroupSizes(8, 4), ranks_per_node=4), model)
    assert wider.volume.inter == before.volume.inter / 2 and wider.busy["between"] == before.busy["between"]


@pytest.mark.parametrize("nodes", [2, 4])
def test_plain_stages_send_as_many_rings_as_were_probed(nodes: int) -> None:
    training = recorded("ZeRO-3")
    cluster = replace(training.planner_input.cluster, sizes=GroupSizes(2 * nodes, 2), inter_gbps=0.1)
    predicted = training.predict("ZeRO-3", cluster, training.planner_input.model)
    ring = BYTES * (2 * nodes - 1) / (2 * nodes) / (0.1e9 / 8)
    # Two gathers, and a reduction of two rings.
    assert predicted.busy["between"] == pytest.approx(4 * (2 * 1 + 2) * ring)


def test_latencies_grow_as_those_of_rings() -> None:
    training, hops = recorded(), HopRates(Rate(1e-3, 1e9), Rate(2e-3, 1e7))
    rates = replace(training.planner_input.rates, gather=hops, reduce=hops)
    training = replace(training, planner_input=replace(training.planner_input, rates=rates))
    wider = replace(training.planner_input.cluster, sizes=GroupSizes(8, 2))
    predicted = training._rates(wider).gather
    assert (predicted.intra.latency, predicted.inter.latency) == (1e-3, 3 * 2e-3)
    assert training._rates(replace(wider, latency=5e-6)).gather.inter.latency == 5e-6
