# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Statistics and sentences of the verdict, from series with known results."""

import json
import math
import random
from typing import Any

import pytest

from deepspeed_ext.tools.compare.verdict import Comparison, ConfigRuns, compare, loss_difference, ratio, table
from tests.harness.tiers import with_cases

pytestmark = pytest.mark.quick


def series(seconds: float, noise: float = 0.02, rounds: int = 3, steps: int = 10, seed: int = 0) -> list[list[float]]:
    draw = random.Random(seed)
    return [[seconds * (1 + noise * draw.uniform(-1, 1)) for _ in range(steps)] for _ in range(rounds)]


def test_ratios_and_their_intervals() -> None:
    found, other = ratio(series(1.0), series(2.0, seed=1)), ratio(series(2.0, seed=1), series(1.0))
    assert found.value == pytest.approx(2, rel=0.02) and found.is_significant
    assert 1.95 < found.low < found.value < found.high < 2.05
    assert other.value == pytest.approx(1 / found.value) and other.high < 0.55
    misses = sum(ratio(series(1, seed=s), series(1, seed=100 + s)).is_significant for s in range(40))
    assert misses <= 8  # of the same; one of twenty, were it not for few rounds
    # A machine that slows between rounds changes nothing, nor does a slow step; rounds that disagree do.
    pair = series(1.0), series(1.5, seed=1)
    drifted = ratio(*([[step * 3**number for step in row] for number, row in enumerate(rounds)] for rounds in pair))
    assert drifted.value == pytest.approx(ratio(*pair).value) and drifted.high - drifted.low < 0.1
    assert ratio([[1.0] * 9 + [50.0]] * 3, [[1.0] * 10] * 3).value == 1
    apart = ratio([[1.0] * 5] * 3, [[1.0] * 5, [1.1] * 5, [1.9] * 5])
    assert apart.low == pytest.approx(1) and apart.high == pytest.approx(1.9)
    single = series(1.0, 0.5, 9, 1), series(1.0, 0.5, 9, 1, seed=1)  # draws no steps, so the interval is symmetric
    assert ratio(*single).low == pytest.approx(1 / ratio(*single[::-1]).high)


def test_losses_differ_by_the_worst_step() -> None:
    assert loss_difference([2.0, 4.0, -1.0], [2.0, 4.4, -1.0]) == pytest.approx(0.4 / 4.4)
    assert loss_difference([0.0, 1.0], [0.0, 1.0]) == 0 and loss_difference([0.0], [1e-9]) == 1
    assert all(loss_difference([1.0, wrong], [1.0, wrong]) == math.inf for wrong in (math.nan, math.inf))


LOSSES = [1.0, 0.5, 0.25]


def report(seconds: float, losses: list[Any] = LOSSES, **values: Any) -> dict[str, Any]:
    fields = {"strategy": "ZeRO-3", "dtype": "float32", "samples": 32, "seconds": [seconds, 1.1 * seconds]}
    memory = {"peak_bytes": 2e9, "parameter_bytes": 1e9, "optimizer_bytes": 3e8}
    return {**fields, **memory, "losses": losses, **values}


def found(*runs: dict[str, Any], bound: float | None = None, first: list[dict[str, Any]] | None = None) -> Comparison:
    """Compare reports of rounds with as many of the first configuration."""
    first = first or [report(1.0) for _ in runs]
    return compare(ConfigRuns("A", "a.json", first), ConfigRuns("B", "b.json", runs), bound)


def test_faster_with_the_same_losses() -> None:
    fast = report(0.5, strategy="NIG")
    comparison = found(fast, fast)
    assert comparison.problem == "" and comparison.loss == 0
    assert comparison.sentence == (
        "B (b.json, N-I-G) is 2 times as fast as A (a.json, ZeRO-3): 0.525 s instead of 1.05 s per step, 95% "
        "interval 1.86 to 2.15; losses agree (largest difference 0, bound 1e-05)."
    )


def test_slower_or_as_fast() -> None:
    slow = report(4.0)
    comparison = found(slow, slow)
    low, high = 1 / comparison.speed.high, 1 / comparison.speed.low
    assert low < 4 < high
    assert comparison.sentence.startswith(
        "B (b.json, ZeRO-3) takes 4 times as long as A (a.json, ZeRO-3): 4.2 s instead of 1.05 s per step, "
        f"95% interval {low:.3g} to {high:.3g}; losses agree"
    )
    equal = report(1.0)
    assert found(equal, equal).sentence.startswith("No difference in speed is shown between B (b.json")


def test_losses_that_differ_are_a_problem() -> None:
    other = report(1.0, [1.0, 0.5, 0.26])
    comparison = found(other, other)
    assert "the largest relative difference is 3.8e-02, the bound 1e-05" in comparison.problem
    assert "but losses do not agree" in comparison.sentence and "losses agree" not in comparison.sentence
    assert not found(other, other, bound=0.05).problem
    rounds = [report(1.0), report(1.0, [0.9, 0.4, 0.3])]  # without a seed
    problem = found(report(1.0), report(1.0), first=rounds).problem
    assert problem.endswith("two runs of A differ by 2.0e-01: set the same seed in each run")
    coarser = found(report(1.0, [1.0, 0.501, 0.25], dtype="bfloat16"))
    assert coarser.bound == 2e-2 and not coarser.problem
    assert found(report(1.0, dtype="float64")).bound == 2e-2  # as of a dtype that is not known


@with_cases(
    ("other", "problem"),
    (report(1.0, [None, None, None]), "B passed no losses to engine.backward"),
    (report(1.0, samples=64), "a step of A has 32 samples, one of B 64"),
    (report(1.0, [1.0, math.nan, 0.25]), "the largest relative difference is inf"),
)
def test_losses_that_cannot_be_compared_do_not_agree(other: dict[str, Any], problem: str) -> None:
    comparison = found(other)
    assert comparison.problem.startswith(problem)
    json.dumps(comparison.as_dict(), allow_nan=False)


def test_more_samples_in_a_step_count() -> None:
    comparison = found(report(1.0, samples=64))
    assert comparison.speed.value == pytest.approx(2) and "s per sample" in comparison.sentence


def test_the_table_has_a_row_each_in_columns() -> None:
    contestants = [ConfigRuns("A", "a.json", [report(1.0)]), ConfigRuns("B", "b.json", [report(0.5, strategy="NIG")])]
    titles, *rows = table(contestants, [compare(*contestants)]).splitlines()
    assert [row.split()[:4] for row in rows] == [["A", "a.json", "ZeRO-3", "1.05"], ["B", "b.json", "N-I-G", "0.525"]]
    for title, value in (("times", "2 ("), ("peak GB", "2  "), ("optimizer", "0.3")):
        assert rows[1][titles.index(title) :].startswith(value), title
    assert "0.5..0.55" in rows[1]
