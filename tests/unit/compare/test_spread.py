# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The statistics of a comparison, by series whose result is known."""

import math
import random

import pytest

from deepspeed_ext.compare.spread import difference, ratio

pytestmark = pytest.mark.quick


def series(seconds: float, noise: float = 0.02, rounds: int = 3, steps: int = 10, seed: int = 0) -> list[list[float]]:
    draw = random.Random(seed)
    return [[seconds * (1 + noise * draw.uniform(-1, 1)) for _ in range(steps)] for _ in range(rounds)]


def test_twice_as_fast_is_found_with_a_narrow_interval() -> None:
    found = ratio(series(1.0), series(2.0, seed=1))
    assert found.value == pytest.approx(2, rel=0.02) and found.shows_a_difference
    assert 1.95 < found.low < found.value < found.high < 2.05
    other = ratio(series(2.0, seed=1), series(1.0))
    assert other.value == pytest.approx(1 / found.value) and other.high < 0.55


def test_the_same_is_not_told_apart() -> None:
    misses = sum(ratio(series(1, seed=s), series(1, seed=100 + s)).shows_a_difference for s in range(40))
    assert misses <= 8  # one of twenty, were it not for few rounds


def test_a_machine_that_slows_between_rounds_changes_nothing() -> None:
    drifts = (1.0, 3.0, 9.0)
    drifted = [[[one * drift for one in row] for row, drift in zip(some, drifts, strict=True)] for some in _pair()]
    assert ratio(*drifted).value == pytest.approx(ratio(*_pair()).value)
    assert ratio(*drifted).high - ratio(*drifted).low < 0.1


def _pair() -> tuple[list[list[float]], list[list[float]]]:
    return series(1.0), series(1.5, seed=1)


def test_rounds_that_disagree_widen_the_interval() -> None:
    steady = [[1.0] * 5] * 3
    found = ratio(steady, [[1.0] * 5, [1.1] * 5, [1.9] * 5])
    assert found.low == pytest.approx(1) and found.high == pytest.approx(1.9)


def test_one_slow_step_does_not_count() -> None:
    slow = [[1.0] * 9 + [50.0]] * 3
    assert ratio(slow, [[1.0] * 10] * 3).value == 1


def test_losses_differ_by_the_worst_step() -> None:
    assert difference([2.0, 4.0, -1.0], [2.0, 4.4, -1.0]) == pytest.approx(0.4 / 4.4)
    assert difference([0.0, 1.0], [0.0, 1.0]) == 0
    assert difference([0.0], [1e-9]) == 1
    for wrong in (math.nan, math.inf):
        assert difference([1.0, wrong], [1.0, wrong]) == math.inf
