# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What a save writes, for how long it holds training up, and how often to save. Pure.

Note [Cost of a save]
    *Files.* Of optimizer states of X bytes (12 for each parameter that AdamW trains) a rank has X/S, S the number of
    shards. All ranks write theirs with os = G, the first group with I, the first rank with N; with experts, as many of
    the first ranks as have all states together (``zero/writers.py``). With p = N the first rank writes the weights,
    and the first E ranks write those of experts, E the expert-parallel size. Frozen weights are in that file twice, in
    the model's state dict and as what ``zero_to_fp32.py`` reads. With p = I and G, the optimizer's states have what is
    trained, and the ranks that write these write their slices of frozen weights, too. All ranks write what error
    feedback has kept. So each kind of file is of the first so many ranks, and the first rank and node write most.

    *Synchronous.* All ranks wait for the last one: C = L = crossing + copying + writing. With p = N, partitions go
    back to DeepSpeed's order first (``comm/relayout.py``): of the X/S bytes of a shard, all but 1/S come from other
    ranks, half of what ``Strategy.exchange`` says. Partitions of plain stages are in that order, and those of small
    models, which have no stripes. Writing takes as long as the first node does at the rate of a node, or all do at
    the rate of a storage that they share.

    *Asynchronous.* Weights and errors are copied to pinned host memory while training waits. Optimizer states change
    in a step only: they are copied under the next forward and backward, and the step waits for what is left. Then
    files are written. Nothing crosses. A rank pins as many bytes as it writes. C is what training waits for, L all of
    it. A plain stage is predicted as if it could do so, too.

    Left out: copies within the host (of an offloaded optimizer), buffers and padding, an outer optimizer's states,
    agreements between ranks and the two renames, and that a writer takes a core, and links, from training.

Note [When to save]
    A run trains for T seconds between two saves. A save holds training up for C seconds, its critical path, and is
    *good* L >= C seconds after it has begun: it is written and committed then. A synchronous save has L = C; during
    the L - C seconds of an asynchronous one, training goes on. Failures of the job come independently of each other,
    M seconds apart in the mean, and may come during a restart, which takes R seconds. Then the run continues from the
    last good save.

    *Time of a period.* From one good save to the next T + C seconds pass, in which T seconds are trained. If the job
    fails, it has also lost what it had trained while the last good save was being written. So each further attempt
    takes R + (L - C) + (T + C) = R + L + T seconds. An attempt of S seconds that is repeated until it succeeds takes
    M (e^(S/M) - 1) seconds in the mean. The first attempt takes only T + C seconds, so that in the mean a period takes

        E = M (1 - q) + (1 - q) M (e^((R + L + T)/M) - 1) = M e^((R + L - C)/M) (e^((T + C)/M) - 1),

    with q = e^(-(T + C)/M). The share of the time that is lost to saves, to work done again, and to restarts is
    1 - T/E. Source: overhead C and latency L are those of N. H. Vaidya, "Impact of checkpoint latency on overhead
    ratio of a checkpointing scheme", IEEE Transactions on Computers 46(8), 1997, pp. 942-947. With L = C this is the
    complete cost function of Daly's paper, below.

    *Best interval.* E/T is least where (1 - T/M) e^((T + C)/M) = 1. Neither R nor L is in that: the interval goes by
    what holds training up alone. Two approximations of T:

        Young   sqrt(2 C M)
        Daly    sqrt(2 C M) (1 + sqrt(C/2M)/3 + (C/2M)/9) - C     if C < 2M;     M otherwise

    J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17(9),
    1974, pp. 530-531. J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22(3), 2006, pp. 303-312, equation 37.

    *Asynchronous saves.* The next save waits until the last one is good, so T + C >= L. E/T only rises beyond its
    minimum, hence the best interval that is possible is max(Daly, L - C). If nothing holds training up (C = 0), a run
    saves all the time: T = L.

    Left out: that training may be slower while files are written.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

from deepspeed_ext.planner.choice import Plan
from deepspeed_ext.planner.closed_form import UPDATE
from deepspeed_ext.planner.compression import AS_IT_IS, Compression
from deepspeed_ext.planner.costs import Prediction
from deepspeed_ext.planner.memory import Model
from deepspeed_ext.planner.rates import Rates
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates, Placement, Strategy, Volume


def young(held: float, mtbf: float) -> float:
    """Return Young's interval; see Note [When to save].

    Args:
        held: C, seconds for which a save holds training up.
        mtbf: M, mean seconds between failures of the job.
    """
    return math.sqrt(2 * held * mtbf)


def daly(held: float, mtbf: float) -> float:
    """Return Daly's interval; see Note [When to save]. Arguments as of ``young``."""
    ratio = held / (2 * mtbf)
    if ratio >= 1:
        return mtbf
    return young(held, mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - held


def share_lost(interval: float, held: float, lasts: float, mtbf: float, restart: float = 0.0) -> float:
    """Return the share of the time in which nothing is trained that lasts; see Note [When to save].

    Args:
        interval: T, seconds of training between two saves; above 0.
        held: C, seconds for which a save holds training up.
        lasts: L, seconds from the beginning of a save until it is good, at most ``interval + held``.
        mtbf: M, mean seconds between failures of the job.
        restart: R, seconds from a failure until training goes on.
    """
    # As E with all exponents negative, so that none is too large for a float.
    succeeds = math.exp(-(restart + lasts + interval) / mtbf)
    return 1 - interval / mtbf * succeeds / -math.expm1(-(interval + held) / mtbf)


@dataclass(frozen=True)
class Saves:
    """Where a run saves, and how often it fails.

    Attributes:
        mtbf: mean seconds between failures of the whole job.
        ranks_per_node: number of ranks of a node.
        disk: bytes per second that a node writes.
        shared: bytes per second that the storage takes from all nodes together.
        restart: seconds from a failure until training goes on from the last save.
        asynchronous: whether training goes on while files are written.

    Raises:
        ValueError: a figure is out of bounds.
    """

    mtbf: float
    ranks_per_node: int
    disk: float
    shared: float = math.inf
    restart: float = 0.0
    asynchronous: bool = False

    def __post_init__(self) -> None:
        for name, value in (("mtbf", self.mtbf), ("disk", self.disk)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be a finite number above 0, got {value!r}.")
        if not self.shared > 0:
            raise ValueError(f"shared must be above 0, got {self.shared!r}.")
        if not 0 <= self.restart < math.inf:
            raise ValueError(f"restart must be a finite number of at least 0, got {self.restart!r}.")

    def as_dict(self) -> dict[str, Any]:
        """Return plain values; None for a storage without bound, since JSON has no infinity."""
        return asdict(self) | {"shared": None if self.shared == math.inf else self.shared}

    def writing(self, files: Sequence["Files"]) -> float:
        """Return the seconds until the last node has written its files."""
        of_first = sum(min(file.ranks, self.ranks_per_node) * file.each for file in files)
        return max(of_first / self.disk, sum(file.total for file in files) / self.shared)


class Family(NamedTuple):
    """A family of parameters: the sizes of its groups, its states, and the bytes of errors that a rank keeps."""

    sizes: GroupSizes
    states: ModelStates
    errors: float = 0.0


class Files(NamedTuple):
    """The first ``ranks`` ranks write ``each`` bytes."""

    ranks: int
    each: float

    @property
    def total(self) -> float:
        """Return the bytes of all of them."""
        return self.ranks * self.each


class Contents(NamedTuple):
    """The files of one save: of weights, of optimizer states, and of errors."""

    weights: tuple[Files, ...]
    states: Files
    errors: Files

    @property
    def all(self) -> tuple[Files, ...]:
        return (*self.weights, self.states, self.errors)

    @classmethod
    def of(cls, strategy: Strategy, families: Sequence[Family]) -> "Contents":
        """Return what a strategy writes; see Note [Cost of a save].

        Args:
            strategy: whose files.
            families: the dense one first.
        """
        ranks = families[0].sizes.ranks
        together = [ranks // family.sizes.ranks for family in families]  # ranks that have all parameters of a family
        writers = ranks
        if strategy.os != Placement.G:
            writers = math.lcm(families[0].sizes.shards(strategy.os), *together)
        states = sum(family.states.optimizer / family.sizes.shards(strategy.os) for family in families)
        frozen = [family.states.parameters - family.states.updated for family in families]
        if strategy.p == Placement.N:
            whole = (family.states.parameters + extra for family, extra in zip(families, frozen, strict=True))
            weights = tuple(Files(*pair) for pair in zip(together, whole, strict=True))
        else:
            slices = (extra / family.sizes.shards(strategy.p) for family, extra in zip(families, frozen, strict=True))
            weights = (Files(writers, sum(slices)),)
        return cls(weights, Files(writers, states), Files(ranks, sum(family.errors for family in families)))


@dataclass(frozen=True)
class Schedule:
    """How often to save in one way; see Note [When to save].

    Attributes:
        held: seconds for which a save holds training up.
        lasts: seconds from its beginning until it is good.
        steps, seconds: of training between two saves.
        young_seconds: Young's first-order estimate of the latter, before bounds and whole steps.
        lost: share of the time that is lost to saves, work done again and restarts.
    """

    held: float
    lasts: float
    steps: int
    seconds: float
    young_seconds: float
    lost: float

    @classmethod
    def of(cls, held: float, lasts: float, step: float, saves: Saves) -> "Schedule":
        """Return the best schedule for a save, if a step of training takes ``step`` seconds.

        Raises:
            ValueError: a step takes no time, so an interval has no number of steps.
        """
        if not step > 0:
            raise ValueError(f"how often to save needs the seconds of a step, which are predicted as {step:g}.")
        steps = max(1, round(daly(held, saves.mtbf) / step), math.ceil((lasts - held) / step))
        lost = share_lost(steps * step, held, lasts, saves.mtbf, saves.restart)
        return cls(held, lasts, steps, steps * step, young(held, saves.mtbf), lost)


@dataclass(frozen=True)
class SavePrediction:
    """What saves cost under a strategy.

    Attributes:
        of_first_rank, total: bytes of files that the first rank writes, which has most, and that all write.
        pinned: bytes of pinned host memory of the first rank; 0 unless saves are asynchronous.
        kind: "synchronous" or "asynchronous": how the run saves.
        synchronous, asynchronous: how often to save in either way.
    """

    of_first_rank: float
    total: float
    pinned: float
    kind: str
    synchronous: Schedule
    asynchronous: Schedule

    @property
    def schedule(self) -> Schedule:
        """Return the schedule of the way in which the run saves."""
        return self.asynchronous if self.kind == "asynchronous" else self.synchronous

    @property
    def reason(self) -> str:
        """Return a clause on how often to save, and what that costs in either way."""
        now = self.schedule
        others = {"synchronous": self.synchronous, "asynchronous": self.asynchronous}
        other, then = next((name, schedule) for name, schedule in others.items() if name != self.kind)
        return (
            f"save every {now.steps} steps ({figure(now.seconds)} s): {self.kind} saves hold training up for "
            f"{figure(now.held)} s and take {figure(now.lasts)} s, and {now.lost:.2%} of the time is lost; {other} "
            f"ones hold it up for {figure(then.held)} s, and lose {then.lost:.2%} at every {then.steps} steps"
        )


@dataclass(frozen=True)
class SavedPrediction(Prediction):
    """A prediction with what saves cost; ``host`` includes what they pin."""

    saves: SavePrediction = field(kw_only=True)


def plan_saves(plan: Plan, saves: Saves, sent: Compression) -> Plan:
    """Return a plan whose predictions include saves; ``sent``: the form of its strategies.

    Raises:
        ValueError: see ``Schedule.of``.
    """

    def of(row: Prediction) -> SavedPrediction:
        return predict_saves(saves, row, plan.sizes, plan.model, plan.rates, AS_IT_IS if row.plain else sent)

    predictions = tuple(map(of, plan.predictions))
    choice = None if plan.choice is None else predictions[plan.predictions.index(plan.choice)]
    return replace(plan, predictions=predictions, choice=choice, plain=tuple(map(of, plan.plain)))


def predict_saves(
    saves: Saves, row: Prediction, sizes: GroupSizes, model: Model, rates: Rates, sent: Compression = AS_IT_IS
) -> SavedPrediction:
    """Add what saves cost to a prediction; see Note [Cost of a save].

    Args:
        saves: where and how.
        row: of a strategy or a plain stage, whose partitions are in DeepSpeed's order.
        sizes, model, rates, sent: what it was predicted from.

    Raises:
        ValueError: see ``Schedule.of``.
    """
    strategy, step = STRATEGIES[row.strategy], row.total_seconds
    families = [
        Family(ranks, part.states, sent.saved_bytes(strategy, ranks, part.trainable))
        for ranks, part in model.families(sizes)
    ]
    files = Contents.of(strategy, families)
    of_first = sum(file.each for file in files.all)
    of_states = files.states.each / rates.host if (model.held or model.states).optimizer else 0.0  # not offloaded
    waits = (of_first - files.states.each) / rates.host  # for weights and errors
    writing = saves.writing(files.all)
    at_once = (0.0 if row.plain else _crossing(strategy, families, rates)) + waits + of_states + writing
    beside = min(of_states, step - row.seconds[UPDATE])
    held = waits + of_states - beside
    found = SavePrediction(
        of_first,
        sum(file.total for file in files.all),
        of_first if saves.asynchronous else 0.0,
        "asynchronous" if saves.asynchronous else "synchronous",
        Schedule.of(at_once, at_once, step, saves),
        Schedule.of(held, held + beside + writing, step, saves),
    )
    given = {field.name: getattr(row, field.name) for field in fields(row)}
    return SavedPrediction(**given | {"host": row.host + found.pinned}, saves=found)


def figure(value: float) -> str:
    """Return seconds or steps in three digits, or in as many as an integer has."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _crossing(strategy: Strategy, families: Sequence[Family], rates: Rates) -> float:
    """Return the seconds in which partitions with stripes go back to DeepSpeed's order."""
    if strategy.p != Placement.N or strategy.os == Placement.N:
        return 0.0
    there_and_back = sum((strategy.exchange(part.sizes, part.states.optimizer) for part in families), Volume())
    return rates.gather.seconds(there_and_back * 0.5)
