# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The runs of ``outer_convergence.py``: which there are, what each has found, and what is said of them together."""

import csv
import itertools
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from tests.perf.lib.records import RESULTS

KEPT = RESULTS / "outer_convergence.csv"
STEPS = 2100  # a tenth of them ends with an outer step, with 10 and with 30 inner steps
BITS_BOUND = 0.002  # of the loss: what few bits may cost
EXACT = "NIG"


@dataclass(frozen=True)
class Trained:
    """A way to train: a strategy alone, or groups that train apart.

    Attributes:
        strategy: its name.
        zero: more of ``zero_optimization``.
        outer: of ``paro_outer_optimizer``, but for its rate and momentum; None: there is no outer optimizer.
        plain: the method that it is held against beside NIG, since it has the same in 32 bits.
    """

    strategy: str
    zero: Mapping[str, Any] = field(default_factory=dict)
    outer: Mapping[str, Any] | None = None
    plain: str | None = None


def _apart(steps: int, plain: str | None = None, **keys: int) -> Trained:
    return Trained("NII", outer={"steps": steps, **keys}, plain=plain)


BITS: dict[str, Any] = {"bits": 4}
LONG: dict[str, Any] = {"fragments": 3, "delay": 5}
METHODS = {  # what says most comes first
    EXACT: Trained(EXACT),
    "H=30": _apart(30),
    "H=30, 4 bits": _apart(30, "H=30", **BITS),
    "H=10": _apart(10),
    "H=30, streaming": _apart(30, **LONG),
    "NIG + LoCo + updates": Trained(EXACT, {"zeropp_loco_param": {}, "paro_quantized_updates": {"bits": 4}}),
    "H=10, 4 bits": _apart(10, "H=10", **BITS),
    "H=30, streaming, 4 bits": _apart(30, "H=30, streaming", **LONG, **BITS),
}
OUTER_SGD: dict[str, dict[str, float]] = {  # for Muon inside a smaller momentum is best, arXiv:2503.09799
    "AdamW": {"lr": 0.7, "momentum": 0.9},
    "Muon": {"lr": 0.7, "momentum": 0.7},
}
GROUPS = (2, 4)
GROUP_SIZE = 1
SEEDS = (0, 1, 2)


class Run(NamedTuple):
    """What tells one training run of a set of settings from the others."""

    optimizer: str
    groups: int
    seed: int
    method: str


def planned(
    optimizers: Iterable[str], groups: Iterable[int], seeds: Iterable[int], methods: Iterable[str]
) -> list[Run]:
    """Return all runs in the order in which they train: a seed of all of them, before the next one."""
    product = itertools.product(seeds, groups, optimizers, methods)
    return [Run(optimizer, number, seed, method) for seed, number, optimizer, method in product]


@dataclass(frozen=True)
class OuterRow:
    """What one training run has found.

    Attributes:
        dtype, ranks, groups, steps, optimizer, method, strategy, seed: of the run.
        outer: ``paro_outer_optimizer``, JSON; empty if there is none.
        tokens: on which it has trained.
        final_loss: on text that is held out, of the outer weights, after all steps.
        own_loss: on the same text, of each group's own weights, on average, a step before the end.
        training_loss: mean over the last tenth of the steps, of each group's own weights.
        inter_bytes: that a rank received in a step from other groups.
        seconds: that the run took, evaluations included.
        curve: steps and losses of the outer weights on that text.
    """

    dtype: str
    ranks: int
    groups: int
    steps: int
    optimizer: str
    method: str
    strategy: str
    outer: str
    seed: int
    tokens: int
    final_loss: float
    own_loss: float
    training_loss: float
    inter_bytes: float
    seconds: float
    curve: tuple[tuple[int, float], ...]

    @property
    def run(self) -> Run:
        """Return which of the runs it is."""
        return Run(self.optimizer, self.groups, self.seed, self.method)

    @property
    def settings(self) -> tuple[Any, ...]:
        """Return what must be the same of two runs that are one."""
        return (self.dtype, self.ranks, self.steps, self.strategy, self.outer)

    def to_csv(self) -> dict[str, Any]:
        """Return what identifies it, and what it has found."""
        losses = {name: round(getattr(self, name), 6) for name in ("final_loss", "own_loss", "training_loss")}
        curve = " ".join(f"{step}:{loss:.4f}" for step, loss in self.curve)
        rest = {"inter_bytes": round(self.inter_bytes), "seconds": round(self.seconds, 1), "curve": curve}
        return asdict(self) | losses | rest

    @classmethod
    def from_csv(cls, kept: Mapping[str, str]) -> "OuterRow":
        """Return the same again."""
        kinds: dict[str, Any] = {one.name: one.type for one in fields(cls) if one.name != "curve"}
        values = {name: kind(kept[name]) for name, kind in kinds.items()}
        points = [one.partition(":") for one in kept["curve"].split()]
        return cls(**values, curve=tuple((int(step), float(loss)) for step, _, loss in points))


def outer_keys(method: str, optimizer: str, **given: float | None) -> dict[str, Any] | None:
    """Return ``paro_outer_optimizer`` of a method; None if it has none.

    Args:
        given: keys of the outer SGD that take the place of ``OUTER_SGD``; None: they do not.
    """
    outer = METHODS[method].outer
    if outer is None:
        return None
    return {**outer, **OUTER_SGD[optimizer], **{name: value for name, value in given.items() if value is not None}}


def settings_of(run: Run, dtype: str, group_size: int, steps: int, outer: Mapping[str, Any] | None) -> tuple[Any, ...]:
    """Return what ``OuterRow.settings`` is of a run."""
    return (
        dtype,
        run.groups * group_size,
        steps,
        METHODS[run.method].strategy,
        "" if outer is None else json.dumps(outer),
    )


def read(path: Path = KEPT) -> list[OuterRow]:
    """Return the rows of a file; none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [OuterRow.from_csv(kept) for kept in csv.DictReader(file)]


def by_run(rows: Iterable[OuterRow], wanted: Mapping[Run, tuple[Any, ...]]) -> dict[Run, OuterRow]:
    """Return the last row of each run that has the settings that are wanted of it."""
    return {row.run: row for row in rows if wanted.get(row.run) == row.settings}


def of_defaults(rows: Iterable[OuterRow]) -> list[OuterRow]:
    """Return the last row of each run that trained as the program does if nothing else is said, in their order."""
    runs = planned(OUTER_SGD, GROUPS, SEEDS, METHODS)
    wanted = {run: settings_of(run, "bf16", GROUP_SIZE, STEPS, outer_keys(run.method, run.optimizer)) for run in runs}
    found = by_run(rows, wanted)
    return [found[run] for run in runs if run in found]


@dataclass(frozen=True)
class Cell:
    """The seeds of one method."""

    rows: tuple[OuterRow, ...]
    exact: tuple[OuterRow, ...]  # NIG with the same seeds, as far as they are there
    plain: tuple[OuterRow, ...]  # the same in 32 bits, if the method is in few

    @property
    def loss(self) -> float:
        """Return the mean of the final losses."""
        return statistics.fmean(row.final_loss for row in self.rows)

    @property
    def spread(self) -> float | None:
        """Return the standard deviation over seeds; None of one seed."""
        return statistics.stdev(row.final_loss for row in self.rows) if len(self.rows) > 1 else None

    @property
    def from_exact(self) -> list[float]:
        """Return the relative differences from NIG, a seed each."""
        return _differences(self.rows, self.exact)

    @property
    def from_plain(self) -> list[float]:
        """Return the relative differences from the same in 32 bits, a seed each."""
        return _differences(self.rows, self.plain)


def _differences(rows: Sequence[OuterRow], others: Sequence[OuterRow]) -> list[float]:
    there = {row.seed: row.final_loss for row in others}
    return [row.final_loss / there[row.seed] - 1 for row in rows if row.seed in there]


def cells(rows: Sequence[OuterRow]) -> dict[tuple[str, int, str], Cell]:
    """Return what is known of each method, by optimizer, groups and name; rows are of different runs."""
    kinds = dict.fromkeys((row.optimizer, row.groups, row.method) for row in rows)

    def some(optimizer: str, groups: int, method: str | None) -> tuple[OuterRow, ...]:
        return tuple(row for row in rows if (row.optimizer, row.groups, row.method) == (optimizer, groups, method))

    return {
        (optimizer, groups, method): Cell(
            some(optimizer, groups, method),
            some(optimizer, groups, EXACT),
            some(optimizer, groups, METHODS[method].plain),
        )
        for optimizer, groups, method in kinds
    }


def verdict(rows: Sequence[OuterRow]) -> Iterator[tuple[bool, str]]:
    """Say of each method in few bits whether it ends where the same in 32 bits does, on average over seeds."""
    for (optimizer, groups, method), cell in cells(rows).items():
        found = cell.from_plain
        if not found:
            continue
        mean = statistics.fmean(found)
        kept = abs(mean) <= BITS_BOUND
        yield (
            kept,
            f"{'PASS' if kept else 'FAIL'}  {optimizer}, {groups} groups, {method}: the final loss is {mean:+.2%} "
            f"from that in 32 bits on average of {len(found)} seeds (bound {BITS_BOUND:.1%}); "
            f"each {', '.join(f'{one:+.2%}' for one in found)}",
        )


def table(rows: Sequence[OuterRow]) -> tuple[list[str], list[list[str]]]:
    """Return header and lines of a table of all methods."""
    header = ["inside", "groups", "method", "seeds", "held-out loss", "± seeds", "% from NIG", "each seed"]
    header += ["% from 32 bits", "own weights", "training", "kB a step"]
    lines = []
    for (optimizer, groups, method), cell in cells(rows).items():
        lines.append(
            [
                optimizer,
                str(groups),
                method,
                " ".join(str(row.seed) for row in cell.rows),
                f"{cell.loss:.4f}",
                "" if cell.spread is None else f"{cell.spread:.4f}",
                _mean(cell.from_exact),
                _percents(cell.from_exact),
                _mean(cell.from_plain),
                f"{statistics.fmean(row.own_loss for row in cell.rows):.4f}",
                f"{statistics.fmean(row.training_loss for row in cell.rows):.4f}",
                f"{statistics.fmean(row.inter_bytes for row in cell.rows) / 1e3:.1f}",
            ]
        )
    return header, lines


def _mean(values: Sequence[float]) -> str:
    return _percents([statistics.fmean(values)] if values else [])


def _percents(values: Sequence[float]) -> str:
    return ", ".join(f"{100 * value:+.2f}" for value in values)
