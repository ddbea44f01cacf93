# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Compares the speed and losses of configurations: statistics, sentences, a table. Pure.

Note [Rounds]
    The speed of a machine, and even more of a network, varies over time. So configurations take turns, and the ratio
    is taken within a round, whose turns are close in time. The interval is a two-level bootstrap: rounds are drawn
    with replacement, and in each round the steps of each configuration.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any

import numpy
from numpy.typing import NDArray

from deepspeed_ext.strategy import hyphenate

LEVEL = 0.95  # confidence level of the interval
DRAWS = 2000
# Largest relative difference of losses that counts as rounding, by the dtype of the model: about 100 units in the last
# place for fp32, since training amplifies differences with each step, and a few for 16 bits.
BOUNDS = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2}
GB = 1e9
_TITLES = (
    "",
    "strategy",
    "s per step",
    "min..max",
    "samples/s",
    "times as fast",
    "losses differ by",
    "peak GB",
    "parameters GB",
    "optimizer GB",
)


# Statistics #######################################################################################


@dataclass(frozen=True)
class Ratio:
    """A ratio and the bounds of its confidence interval."""

    value: float
    low: float
    high: float

    @property
    def is_significant(self) -> bool:
        """Whether the interval is above or below 1."""
        return self.low > 1 or self.high < 1


def ratio(seconds: Sequence[Sequence[float]], of_other: Sequence[Sequence[float]]) -> Ratio:
    """Return the speed of one configuration relative to another: the other's seconds over its own.

    The value is the geometric mean of the rounds' ratios of medians; see Note [Rounds].

    Args:
        seconds: seconds of each step in each round; all rounds have the same number of steps.
        of_other: the other's seconds, with the same number of rounds.
    """
    own, other = numpy.asarray(seconds), numpy.asarray(of_other)
    draw = numpy.random.default_rng(0)  # fixed seed: the same seconds give the same interval
    rounds = draw.integers(len(own), size=(DRAWS, len(own)))
    # Both configurations use the same drawn rounds, since the ratio is taken within a round.
    drawn = [numpy.log(_medians(config_seconds, rounds, draw)).mean(axis=1) for config_seconds in (own, other)]
    low, high = numpy.quantile(numpy.exp(drawn[1] - drawn[0]), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    logs = [
        math.log(median(other_steps) / median(own_steps))
        for own_steps, other_steps in zip(seconds, of_other, strict=True)
    ]
    return Ratio(math.exp(sum(logs) / len(logs)), float(low), float(high))


def _medians(
    seconds: NDArray[numpy.float64], rounds: NDArray[numpy.int64], draw: numpy.random.Generator
) -> NDArray[numpy.float64]:
    """Return the medians of drawn steps in drawn rounds, of shape (DRAWS, rounds)."""
    steps = draw.integers(seconds.shape[1], size=(*rounds.shape, seconds.shape[1]))
    medians: NDArray[numpy.float64] = numpy.median(seconds[rounds[..., None], steps], axis=-1)
    return medians


def loss_difference(losses: Sequence[float], other_losses: Sequence[float]) -> float:
    """Return the largest relative difference of two runs' losses by step; infinite if a loss is not finite."""
    if not all(map(math.isfinite, chain(losses, other_losses))):
        return math.inf
    return max(abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0 for a, b in zip(losses, other_losses, strict=True))


# Configurations ###################################################################################


@dataclass(frozen=True)
class ConfigRuns:
    """A configuration with the reports of its turns.

    Attributes:
        letter: A for the first, and so on.
        file: name of the configuration's file.
        reports: reports of ``measuring.py``, one per round.
    """

    letter: str
    file: str
    reports: Sequence[Mapping[str, Any]]

    @property
    def name(self) -> str:
        """The letter, the file and the strategy."""
        return f"{self.letter} ({self.file}, {hyphenate(self.first['strategy'])})"

    @property
    def first(self) -> Mapping[str, Any]:
        """The report of the first round."""
        return self.reports[0]

    @property
    def seconds(self) -> list[list[float]]:
        """Seconds of each step in each round."""
        return [list(report["seconds"]) for report in self.reports]

    @property
    def seconds_per_sample(self) -> list[list[float]]:
        """``seconds`` divided by the samples of a step."""
        # Configurations may have different batch sizes.
        return [[seconds / self.first["samples"] for seconds in steps] for steps in self.seconds]

    @property
    def median(self) -> float:
        """The median of all steps' seconds."""
        return median(chain(*self.seconds))

    def max_gb(self, key: str) -> float:
        """Return the largest of the reports' values, in GB."""
        return float(max(report[key] for report in self.reports)) / GB


@dataclass(frozen=True)
class Comparison:
    """A configuration against the first one.

    Attributes:
        first, other: the two configurations.
        speed: speed of ``other`` relative to ``first``, per sample.
        loss: the largest relative difference of their losses; None if these cannot be compared.
        bound: upper bound of ``loss``.
        problem: why losses do not agree; empty if they do.
    """

    first: ConfigRuns
    other: ConfigRuns
    speed: Ratio
    loss: float | None
    bound: float
    problem: str

    @property
    def sentence(self) -> str:
        """The verdict."""
        losses = f"losses agree (largest difference {_loss_text(self.loss)}, bound {self.bound:g})"
        return f"{self._speed_clause()}; {f'but losses do not agree: {self.problem}' if self.problem else losses}."

    def _speed_clause(self) -> str:
        first, other, speed = self.first, self.other, self.speed
        unit = "step" if first.first["samples"] == other.first["samples"] else "sample"
        divisors = [1 if unit == "step" else config.first["samples"] for config in (other, first)]
        figures = f"{other.median / divisors[0]:.3g} s instead of {first.median / divisors[1]:.3g} s per {unit}"
        interval = f"{LEVEL:.0%} interval {{:.3g}} to {{:.3g}}"
        if not speed.is_significant:
            return (
                f"No difference in speed is shown between {other.name} and {first.name}: {speed.value:.3g} times as "
                f"fast, {interval.format(speed.low, speed.high)}, {figures}"
            )
        if speed.value > 1:
            verdict, interval = f"is {speed.value:.3g} times as fast as", interval.format(speed.low, speed.high)
        else:
            verdict = f"takes {1 / speed.value:.3g} times as long as"
            interval = interval.format(1 / speed.high, 1 / speed.low)
        return f"{other.name} {verdict} {first.name}: {figures}, {interval}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, with None for a difference that is not finite."""
        finite = self.loss is not None and math.isfinite(self.loss)
        return {
            "first": self.first.letter,
            "other": self.other.letter,
            "times_as_fast": self.speed.value,
            "interval": [self.speed.low, self.speed.high],
            "loss_difference": self.loss if finite else None,
            "loss_bound": self.bound,
            "problem": self.problem,
            "sentence": self.sentence,
        }


def compare(first: ConfigRuns, other: ConfigRuns, bound: float | None = None) -> Comparison:
    """Compare a configuration with the first one.

    Args:
        first, other: the two configurations, with the same number of rounds.
        bound: largest relative difference of losses; by default the bound of the coarser dtype in ``BOUNDS``.
    """
    if bound is None:
        bound = max(BOUNDS.get(config.first["dtype"], max(BOUNDS.values())) for config in (first, other))
    speed = ratio(other.seconds_per_sample, first.seconds_per_sample)
    problem = _incomparable_reason(first, other)
    loss = None
    if not problem:
        pairs = zip(first.reports, other.reports, strict=True)
        loss = max(
            loss_difference(first_report["losses"], other_report["losses"]) for first_report, other_report in pairs
        )
        if loss > bound:
            problem = f"the largest relative difference is {loss:.1e}, the bound {bound:g}"
            problem += _own_difference_clause(first, other, bound)
    return Comparison(first=first, other=other, speed=speed, loss=loss, bound=bound, problem=problem)


def _incomparable_reason(first: ConfigRuns, other: ConfigRuns) -> str:
    """Return why losses cannot be compared; empty if they can."""
    for config in (first, other):
        if any(None in report["losses"] for report in config.reports):
            return f"{config.letter} passed no losses to engine.backward"
    samples, other_samples = first.first["samples"], other.first["samples"]
    equal = samples == other_samples
    return "" if equal else f"a step of {first.letter} has {samples} samples, one of {other.letter} {other_samples}"


def _own_difference_clause(first: ConfigRuns, other: ConfigRuns, bound: float) -> str:
    """Return a clause about a configuration whose own rounds differ, which makes the comparison inconclusive."""
    for config in (first, other):
        spread = max(loss_difference(config.first["losses"], report["losses"]) for report in config.reports)
        if spread > bound:
            return f", and two runs of {config.letter} differ by {spread:.1e}: set the same seed in each run"
    return ""


def table(config_runs: Sequence[ConfigRuns], comparisons: Sequence[Comparison]) -> str:
    """Return a row for each configuration; memory is the maximum over ranks."""
    rows: list[tuple[str, ...]] = [_TITLES]
    for config, comparison in zip(config_runs, [None, *comparisons], strict=True):
        seconds, relative = list(chain(*config.seconds)), ("1", "")
        if comparison is not None:
            speed = comparison.speed
            relative = f"{speed.value:.3g} ({speed.low:.3g}..{speed.high:.3g})", _loss_text(comparison.loss)
        rows.append(
            (
                f"{config.letter} {config.file}",
                hyphenate(config.first["strategy"]),
                f"{config.median:.4g}",
                f"{min(seconds):.4g}..{max(seconds):.4g}",
                f"{config.first['samples'] / config.median:.4g}",
                *relative,
                *(f"{config.max_gb(key):.3g}" for key in ("peak_bytes", "parameter_bytes", "optimizer_bytes")),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _loss_text(loss: float | None) -> str:
    return "not comparable" if loss is None else f"{loss:.1e}" if loss else "0"
