# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of overlap says of its rows: bounds, peers that are ahead, choices that lose. No measurement."""

import pytest

from deepspeed_ext.strategy import STRATEGIES
from tests.perf.lib import overlap_verdict
from tests.perf.lib.overlap_bound import Compute, LinkSeconds, bound, of_peer, of_strategy
from tests.perf.lib.overlap_rows import SETTINGS, OverlapRow

pytestmark = pytest.mark.quick

ONE, FOUR = Compute(1.0, 2.0, 8, 1), Compute(1.0, 2.0, 8, 4)


def row(method: str, seconds: float, memory: float = 1.0, predicted: float = 0.0) -> OverlapRow:
    parts = {"compute": predicted} if predicted else {}
    return OverlapRow("2x2-1", 100.0, method, "", [seconds], [0.0], held=(memory, 0.0, 0.0), parts=parts, compute=0.5)


@pytest.mark.parametrize(
    ("compute", "link", "expected"),
    [
        # By hand: seven of eight blocks hide 1.75 s of a reduction, and 0.875 s of a gather.
        (ONE, LinkSeconds(reduced=1.75, updates=0.875), 3.0),
        (ONE, LinkSeconds(reduced=2.0, updates=1.0), 3.0 + 0.25 + 0.125),
        (FOUR, LinkSeconds(reduced=2.0, updates=1.0), 12.0 + 0.25 + 0.125),
        # Reductions of four micro-batches: 9 + 1.75 s hide them.
        (FOUR, LinkSeconds(gradients=2.6875), 12.0),
        (FOUR, LinkSeconds(gradients=3.0, updates=1.0), 12.0 + 1.25 + 0.125),
        (ONE, LinkSeconds(gradients=2.0), bound(ONE, LinkSeconds(reduced=2.0))),
        (FOUR, LinkSeconds(parameters=2.0, gradients=0.5), 12.0),
        (FOUR, LinkSeconds(parameters=3.0, gradients=0.5), 14.0),
    ],
)
def test_the_bound(compute: Compute, link: LinkSeconds, expected: float) -> None:
    assert bound(compute, link) == pytest.approx(expected)


def test_a_step_without_communication_stands_for_compute() -> None:
    assert bound(ONE, LinkSeconds(reduced=2.0), alone=3.5) == pytest.approx(3.75)
    assert bound(ONE, LinkSeconds(parameters=3.2), alone=3.5) == pytest.approx(3.5)


def test_w_is_two_hops_of_the_whole_model() -> None:
    for setting, share in ((SETTINGS["2x2-1"], 1 / 2), (SETTINGS["4x2-4"], 3 / 4)):
        hop = share * setting.states.parameters * 8 / (setting.mbit * 1e6)  # what a node receives
        assert setting.wire == pytest.approx(2 * hop)
        compute = setting.compute(0.5)
        assert compute.forward + compute.backward == pytest.approx(2 * setting.wire)
        links = {name: of_strategy(s, setting.sizes, setting.states, setting.mbit) for name, s in STRATEGIES.items()}
        assert links["NIG"] == links["IIG"] == LinkSeconds(reduced=pytest.approx(hop), updates=pytest.approx(hop))
        assert links["III"] == LinkSeconds(reduced=pytest.approx(2 * hop))
        assert links["NGG"] == LinkSeconds(gradients=pytest.approx(hop), updates=pytest.approx(hop))
        assert links["GGG"] == LinkSeconds(parameters=pytest.approx(2 * hop), gradients=pytest.approx(hop))
        assert links["GIG"] == LinkSeconds(parameters=pytest.approx(2 * hop), reduced=pytest.approx(hop))


def test_a_peers_link_is_what_was_measured() -> None:
    for name in ("HSDP", "ZeRO-3"):
        assert of_peer(name, 6.0, 4).total(4) == pytest.approx(6.0)
    assert bound(FOUR, of_peer("DDP", 2.0, 4)) > bound(FOUR, of_peer("ZeRO-3", 2.0, 4)) == 12.0


def test_late_strategies_and_faster_peers_are_named() -> None:
    due = row("NIG", 1.0).bound
    assert "within" in overlap_verdict.late([row("NIG", 1.14 * due), row("DDP", 99.0)])[0]
    assert "NIG 1.16" in overlap_verdict.late([row("NIG", 1.16 * due)])[0]
    ours = [row("NIG", 1.0, 10.0), row("NNG", 0.8, 20.0)]
    (line,) = overlap_verdict.ahead([*ours, row("HSDP", 0.9, 10.0)])
    assert line.startswith("AHEAD: HSDP") and "0.90 times" in line
    (line,) = overlap_verdict.ahead([*ours, row("HSDP", 0.9, 20.0)])
    assert line.startswith("HSDP") and "NNG" in line
    (line,) = overlap_verdict.ahead([*ours, row("FSDP2", 0.9, 5.0)])
    assert "no strategy" in line


def test_a_choice_that_loses_to_stock_is_named() -> None:
    rows = [row("NNG", 1.0, 20.0, 1.0), row("IIG", 1.2, 10.0, 1.5), row("IGG", 1.1, 15.0, 2.0)]
    rows += [row("ZeRO-1", 1.0, 20.0), row("ZeRO-3", 1.15, 10.0)]
    _, *chosen = overlap_verdict.planned(rows)
    assert chosen == [
        "chosen NNG takes 1.00 of the time of ZeRO-1",
        "LOSES: chosen IIG takes 1.04 of the time of ZeRO-3",
    ]
