# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""How much two series of runs differ, and how far that can be relied on. Pure.

Note [Rounds]
    A machine, and a network even more, is slower at some times than at others. So configurations take turns, and what
    is compared is the ratio within a round, whose turns are close in time. The interval is a bootstrap of two levels:
    rounds are drawn with replacement, and in each of them the steps of each configuration.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy

LEVEL = 0.95  # of the interval
DRAWS = 2000
Rounds = Sequence[Sequence[float]]  # seconds of each step, in each round


@dataclass(frozen=True)
class Ratio:
    """A ratio, and the bounds of its interval."""

    value: float
    low: float
    high: float

    @property
    def shows_a_difference(self) -> bool:
        """Whether the interval is above or below 1."""
        return self.low > 1 or self.high < 1


def ratio(seconds: Rounds, of_other: Rounds) -> Ratio:
    """Return how many times as fast one configuration is as another: the other's seconds over its own.

    The value is the geometric mean of the rounds' ratios of medians; see Note [Rounds].

    Args:
        seconds: of the one, all rounds with as many steps.
        of_other: of the other, as many rounds.
    """
    own, other = numpy.asarray(seconds), numpy.asarray(of_other)
    draw = numpy.random.default_rng(0)  # the same figures for the same seconds
    rounds = draw.integers(len(own), size=(DRAWS, len(own)))
    drawn = [numpy.log(_medians(some, rounds, draw)).mean(axis=1) for some in (own, other)]
    low, high = numpy.quantile(numpy.exp(drawn[1] - drawn[0]), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    logs = [math.log(median(theirs) / median(mine)) for mine, theirs in zip(seconds, of_other, strict=True)]
    return Ratio(math.exp(sum(logs) / len(logs)), float(low), float(high))


def _medians(
    seconds: "numpy.typing.NDArray[numpy.float64]",
    rounds: "numpy.typing.NDArray[numpy.int64]",
    draw: numpy.random.Generator,
) -> "numpy.typing.NDArray[numpy.float64]":
    """Return the medians of drawn steps in drawn rounds, (DRAWS, rounds)."""
    steps = draw.integers(seconds.shape[1], size=(*rounds.shape, seconds.shape[1]))
    found: numpy.typing.NDArray[numpy.float64] = numpy.median(seconds[rounds[..., None], steps], axis=-1)
    return found


def difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest relative difference of two runs' losses of the same steps; infinite if one is not finite."""
    return max(_relative(one, other) for one, other in zip(losses, others, strict=True))


def _relative(one: float, other: float) -> float:
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other)) if one != other else 0.0
