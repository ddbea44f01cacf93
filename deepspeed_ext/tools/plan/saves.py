# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Predicts the bytes of a save, the time that it blocks training, and the best interval between saves. Pure.

Note [Cost of a save]
    *Files.* Of X bytes of optimizer states (12 for each parameter that AdamW trains) a rank has X/S, S the number of
    shards. All ranks write theirs with os = G, the first group with I, the first rank with N. With experts, as many
    first ranks write as have all states together (``zero/checkpoint_ranks.py``). With p = N the first rank writes the
    weights, and the first E ranks write those of experts, E the expert-parallel size. Frozen weights are in that file
    twice, in the model's state dict and for ``zero_to_fp32.py``. With p = I and G, the optimizer's states contain the
    trained weights, and the same ranks also write their slices of frozen weights. All ranks write their error
    feedback. So each file type is written by a number of first ranks, and the first rank and node write most.

    *Synchronous.* All ranks wait for the last rank: C = L = exchange + copying + writing. With p = N, partitions are
    first restored to DeepSpeed's order (``comm/relayout.py``): of the X/S bytes of a shard, all but 1/S are received
    from other ranks, half of ``Strategy.exchange``. Partitions of plain stages are already in that order, as are those
    of small models, which have no stripes. Writing takes the longer of two times: the first node's bytes at a node's
    rate, or all bytes at the rate of shared storage.

    *Asynchronous.* Weights and errors are copied to pinned host memory while training waits. Optimizer states change
    only in a step: they are copied during the next forward and backward, and the step waits for the rest. Then files
    are written. Ranks exchange nothing. A rank pins as many bytes as it writes. C is the time for which training
    waits, L the total. A plain stage is predicted as if it supported this, too.

    Left out: copies within the host (of an offloaded optimizer), buffers and padding, an outer optimizer's states,
    votes between ranks and the two renames, and the core and links that a writer takes from training.

Note [When to save]
    A run trains for T seconds between two saves. A save blocks training for C seconds, its critical path, and is
    *good* (written and committed) L >= C seconds after its start. A synchronous save has L = C; during the L - C
    seconds of an asynchronous save, training continues. Failures of the job are independent of each other, M seconds
    apart on average, and may occur during a restart, which takes R seconds. Then the run continues from the last good
    save.

    *Time of a period.* From one good save to the next T + C seconds pass, with T seconds of training. If the job
    fails, it also loses the training done while the last good save was being written. So each further attempt
    takes R + (L - C) + (T + C) = R + L + T seconds. An attempt of S seconds that is repeated until it succeeds takes
    M (e^(S/M) - 1) seconds on average. The first attempt takes only T + C seconds, so an average period takes

        E = M (1 - q) + (1 - q) M (e^((R + L + T)/M) - 1) = M e^((R + L - C)/M) (e^((T + C)/M) - 1),

    with q = e^(-(T + C)/M). The share of the time that is lost to saves, to repeated work, and to restarts is
    1 - T/E. Source: overhead C and latency L are those of N. H. Vaidya, "Impact of checkpoint latency on overhead
    ratio of a checkpointing scheme", IEEE Transactions on Computers 46(8), 1997, pp. 942-947. With L = C this is the
    complete cost function of Daly's paper, below.

    *Best interval.* E/T is least where (1 - T/M) e^((T + C)/M) = 1. This has neither R nor L: the interval depends
    only on the time that blocks training. Two approximations of T:

        Young   sqrt(2 C M)
        Daly    sqrt(2 C M) (1 + sqrt(C/2M)/3 + (C/2M)/9) - C     if C < 2M;     M otherwise

    J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17(9),
    1974, pp. 530-531. J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22(3), 2006, pp. 303-312, equation 37.

    *Asynchronous saves.* The next save waits until the last save is good, so T + C >= L. E/T only rises beyond its
    minimum, hence the best possible interval is max(Daly, L - C). If saves do not block training (C = 0), a run
    saves continuously: T = L.

    Left out: training may be slower while files are written.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

from deepspeed_ext.planner.choice import Plan
from deepspeed_ext.planner.closed_form import UPDATE
from deepspeed_ext.planner.compression import UNCOMPRESSED, Compression
from deepspeed_ext.planner.costs import Prediction
from deepspeed_ext.planner.memory import Model
from deepspeed_ext.planner.rates import Rates
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates, Placement, Strategy, Volume


def young(held: float, mtbf: float) -> float:
    """Return Young's interval; see Note [When to save].

    Args:
        held: C, seconds for which a save blocks training.
        mtbf: M, mean seconds between failures of the job.
    """
    return math.sqrt(2 * held * mtbf)


def daly(held: float, mtbf: float) -> float:
    """Return Daly's interval; see Note [When to save]. Same arguments as ``young``."""
    ratio = held / (2 * mtbf)
    if ratio >= 1:
        return mtbf
    return young(held, mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - held


def share_lost(interval: float, held: float, lasts: float, mtbf: float, restart: float = 0.0) -> float:
    """Return the share of the time without lasting progress; see Note [When to save].

    Args:
        interval: T, seconds of training between two saves; above 0.
        held: C, seconds for which a save blocks training.
        lasts: L, seconds from the start of a save until it is good, at most ``interval + held``.
        mtbf: M, mean seconds between failures of the job.
        restart: R, seconds from a failure until training continues.
    """
    # E is rearranged so that all exponents are negative: positive exponents may overflow a float.
    succeeds = math.exp(-(restart + lasts + interval) / mtbf)
    return 1 - interval / mtbf * succeeds / -math.expm1(-(interval + held) / mtbf)


@dataclass(frozen=True)
class Saves:
    """Storage and failure rate of a run.

    Attributes:
        mtbf: mean seconds between failures of the job.
        ranks_per_node: number of ranks on a node.
        disk: bytes per second that a node writes.
        shared: bytes per second that all nodes write together.
        restart: seconds from a failure until training continues from the last save.
        asynchronous: whether training continues while files are written.

    Raises:
        ValueError: a value is out of bounds.
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
        """Return plain values; None for unlimited storage, since JSON has no infinity."""
        return asdict(self) | {"shared": None if self.shared == math.inf else self.shared}

    def writing(self, files: Sequence["Files"]) -> float:
        """Return the seconds until the last node has written its files."""
        of_first = sum(min(file.ranks, self.ranks_per_node) * file.each for file in files)
        return max(of_first / self.disk, sum(file.total for file in files) / self.shared)


class Family(NamedTuple):
    """A family of parameters: its group sizes, its states, and a rank's bytes of error feedback."""

    sizes: GroupSizes
    states: ModelStates
    errors: float = 0.0


class Files(NamedTuple):
    """Files of the first ``ranks`` ranks, with ``each`` bytes per rank."""

    ranks: int
    each: float

    @property
    def total(self) -> float:
        """Return the bytes of all ranks."""
        return self.ranks * self.each


class SaveFiles(NamedTuple):
    """The files of one save: of weights, of optimizer states, and of errors."""

    weights: tuple[Files, ...]
    states: Files
    errors: Files

    @property
    def all(self) -> tuple[Files, ...]:
        return (*self.weights, self.states, self.errors)

    @classmethod
    def for_strategy(cls, strategy: Strategy, families: Sequence[Family]) -> "SaveFiles":
        """Return the files of a strategy; see Note [Cost of a save].

        Args:
            strategy: the strategy.
            families: all families; the dense family is first.
        """
        ranks = families[0].sizes.ranks
        rank_counts = [
            ranks // family.sizes.ranks for family in families
        ]  # ranks that hold a complete family together
        writers = ranks
        # As many first ranks write as have all states of each family together.
        if strategy.os != Placement.G:
            writers = math.lcm(families[0].sizes.shards(strategy.os), *rank_counts)
        states = sum(family.states.optimizer / family.sizes.shards(strategy.os) for family in families)
        frozen = [family.states.parameters - family.states.updated for family in families]
        if strategy.p == Placement.N:
            file_bytes = (family.states.parameters + extra for family, extra in zip(families, frozen, strict=True))
            weights = tuple(Files(*pair) for pair in zip(rank_counts, file_bytes, strict=True))
        else:
            slices = (extra / family.sizes.shards(strategy.p) for family, extra in zip(families, frozen, strict=True))
            weights = (Files(writers, sum(slices)),)
        return cls(weights, Files(writers, states), Files(ranks, sum(family.errors for family in families)))


@dataclass(frozen=True)
class Schedule:
    """The interval of synchronous or asynchronous saves; see Note [When to save].

    Attributes:
        held: seconds for which a save blocks training.
        lasts: seconds from its start until it is good.
        steps, seconds: training between two saves.
        young_seconds: Young's first-order estimate of ``seconds``, without bounds or rounding to steps.
        lost: share of the time that is lost to saves, repeated work and restarts.
    """

    held: float
    lasts: float
    steps: int
    seconds: float
    young_seconds: float
    lost: float

    @classmethod
    def best(cls, held: float, lasts: float, step: float, saves: Saves) -> "Schedule":
        """Return the best schedule for a save, if a step of training takes ``step`` seconds.

        Raises:
            ValueError: a step takes no time, so the interval cannot be expressed in steps.
        """
        if not step > 0:
            raise ValueError(f"how often to save needs the seconds of a step, which are predicted as {step:g}.")
        # T + C >= L: the next save waits until the last save is good.
        steps = max(1, round(daly(held, saves.mtbf) / step), math.ceil((lasts - held) / step))
        lost = share_lost(steps * step, held, lasts, saves.mtbf, saves.restart)
        return cls(
            held=held, lasts=lasts, steps=steps, seconds=steps * step, young_seconds=young(held, saves.mtbf), lost=lost
        )


@dataclass(frozen=True)
class SavePrediction:
    """The predicted cost of saves under a strategy.

    Attributes:
        of_first_rank, total: bytes of files that the first rank writes, which is the most of any rank, and of all.
        pinned: bytes of pinned host memory of the first rank; 0 unless saves are asynchronous.
        kind: "synchronous" or "asynchronous": the saves of the run.
        synchronous, asynchronous: the schedule for each kind.
    """

    of_first_rank: float
    total: float
    pinned: float
    kind: str
    synchronous: Schedule
    asynchronous: Schedule

    @property
    def schedule(self) -> Schedule:
        """Return the schedule of the run's kind of saves."""
        return self.asynchronous if self.kind == "asynchronous" else self.synchronous

    @property
    def reason(self) -> str:
        """Return a clause on the interval between saves, and the costs of both kinds."""
        now = self.schedule
        schedules = {"synchronous": self.synchronous, "asynchronous": self.asynchronous}
        other, then = next((name, schedule) for name, schedule in schedules.items() if name != self.kind)
        return (
            f"save every {now.steps} steps ({format_figure(now.seconds)} s): {self.kind} saves block training for "
            f"{format_figure(now.held)} s and take {format_figure(now.lasts)} s, and {now.lost:.2%} of the time is "
            f"lost; {other} saves every {then.steps} steps would block it for {format_figure(then.held)} s, and lose "
            f"{then.lost:.2%}"
        )


@dataclass(frozen=True)
class PredictionWithSaves(Prediction):
    """A prediction with the cost of saves; ``host`` includes their pinned memory."""

    saves: SavePrediction = field(kw_only=True)


def plan_saves(plan: Plan, saves: Saves, compression: Compression) -> Plan:
    """Return a plan whose predictions include saves; ``compression``: the compression of its strategies.

    Raises:
        ValueError: see ``Schedule.best``.
    """

    def with_saves(row: Prediction) -> PredictionWithSaves:
        return predict_saves(
            saves, row, plan.sizes, plan.model, plan.rates, UNCOMPRESSED if row.plain else compression
        )

    predictions = tuple(map(with_saves, plan.predictions))
    choice = None if plan.choice is None else predictions[plan.predictions.index(plan.choice)]
    return replace(plan, predictions=predictions, choice=choice, plain=tuple(map(with_saves, plan.plain)))


def predict_saves(
    saves: Saves,
    row: Prediction,
    sizes: GroupSizes,
    model: Model,
    rates: Rates,
    compression: Compression = UNCOMPRESSED,
) -> PredictionWithSaves:
    """Add the cost of saves to a prediction; see Note [Cost of a save].

    Args:
        saves: storage and failure rate.
        row: prediction for a strategy, or for a plain stage, whose partitions are in DeepSpeed's order.
        sizes, model, rates, compression: inputs of the prediction.

    Raises:
        ValueError: see ``Schedule.best``.
    """
    strategy, step = STRATEGIES[row.strategy], row.total_seconds
    families = [
        Family(ranks, part.states, compression.error_bytes(strategy, ranks, part.trainable))
        for ranks, part in model.families(sizes)
    ]
    files = SaveFiles.for_strategy(strategy, families)
    of_first = sum(file.each for file in files.all)
    of_states = files.states.each / rates.host if (model.held or model.states).optimizer else 0.0  # not offloaded
    waits = (of_first - files.states.each) / rates.host  # for weights and errors
    writing = saves.writing(files.all)
    # Plain stages are in DeepSpeed's order already.
    at_once = (0.0 if row.plain else _reorder_seconds(strategy, families, rates)) + waits + of_states + writing
    # Optimizer states are copied during forward and backward, which is the step without its update.
    overlapped = min(of_states, step - row.seconds[UPDATE])
    blocked = waits + of_states - overlapped
    save_prediction = SavePrediction(
        of_first_rank=of_first,
        total=sum(file.total for file in files.all),
        pinned=of_first if saves.asynchronous else 0.0,
        kind="asynchronous" if saves.asynchronous else "synchronous",
        synchronous=Schedule.best(at_once, at_once, step, saves),
        asynchronous=Schedule.best(blocked, blocked + overlapped + writing, step, saves),
    )
    fields_of_row = {field.name: getattr(row, field.name) for field in fields(row)}
    return PredictionWithSaves(**fields_of_row | {"host": row.host + save_prediction.pinned}, saves=save_prediction)


def format_figure(value: float) -> str:
    """Return seconds or steps with three digits, or all digits of a larger integer part."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _reorder_seconds(strategy: Strategy, families: Sequence[Family], rates: Rates) -> float:
    """Return the seconds for restoring DeepSpeed's order of partitions with stripes."""
    if strategy.p != Placement.N or strategy.os == Placement.N:
        return 0.0
    exchanged = sum((strategy.exchange(part.sizes, part.states.optimizer) for part in families), Volume())
    return rates.gather.seconds(exchanged * 0.5)
