# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Placements of model states, and the cost of redistributing them. Pure: no torch, no DeepSpeed.

Note [Placements, moves and strategies]
    n ranks train data-parallel, in k = n/m groups of m ranks; links inside a group are fast.
    A *placement* says where a model state is: N (replicated: every rank holds all of it), I (sharded inside the
    group: every group holds all of it) or G (sharded over all ranks). N < I < G: later is finer.
    A *move* takes a state from one placement to another over at most two *hops*, one inside the group and one
    between groups. If the state has X bytes, a rank receives over each hop

        within the group    a X,  a = (m-1)/m
        between groups      b X,  b = (k-1)/n      (each rank of a group fetches its own 1/m from the other groups)

    This holds both for a gather (towards N: all-gather) and for a reduce (towards G: reduce-scatter). An all-reduce is
    a reduce to G and a gather back.
    A *strategy* places parameters p, gradients g and optimizer states os. Its name is the three letters in that
    order. Source: PaRO, arXiv:2310.06003; formulas checked against its appendix tables.
"""

import functools
import operator
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from enum import Enum, IntEnum

# A model is reduced in at least this many buckets, so that one travels while the others are computed ...
_BUCKETS = 16
# ... unless a bucket would have fewer elements than this; DDP's have 25 MB.
_LEAST_BUCKET = 1 << 22
_PLAIN_NAME = re.compile(r"^([NIG])([NIG])([NIG])(?![\w-])")
_HYPHENATED_NAME = re.compile(r"^([NIG])-([NIG])-([NIG])(?![\w-])")


class Placement(IntEnum):
    """Placement of a model state; a greater value is a finer sharding."""

    N = 0
    I = 1
    G = 2


@dataclass(frozen=True)
class GroupSizes:
    """n data-parallel ranks in groups of m.

    Raises:
        ValueError: unless 1 <= m <= n and m divides n.
    """

    ranks: int
    group_size: int

    def __post_init__(self) -> None:
        n, m = self.ranks, self.group_size
        if m < 1:
            raise ValueError(f"paro_group_size must be at least 1, got {m}.")
        if m > n:
            raise ValueError(
                f"paro_group_size must not exceed the data-parallel size, got paro_group_size {m} with {n} "
                f"data-parallel rank(s). Set zero_optimization.paro_group_size to a divisor of {n}."
            )
        if n % m:
            divisors = [d for d in range(1, n + 1) if n % d == 0]
            raise ValueError(
                f"paro_group_size must divide the data-parallel size, got paro_group_size {m} with {n} data-parallel "
                f"ranks ({n} = {n // m} x {m} + {n % m}). Set zero_optimization.paro_group_size to one of {divisors}."
            )

    @property
    def groups(self) -> int:
        """k, the number of groups."""
        return self.ranks // self.group_size

    def of_experts(self, size: int) -> "GroupSizes":
        """Return the group sizes of the ranks with the same experts, if ``size`` neighbors together have all experts.

        Raises:
            ValueError: groups have different numbers of these ranks.
        """
        n, m = self.ranks, self.group_size
        found = {
            count
            for first in range(min(size, n))
            for count in Counter(rank // m for rank in range(first, n, size)).values()
        }
        if n % size or len(found) > 1:
            raise ValueError(
                f"an expert-parallel size must divide the data-parallel ranks, and groups have as many ranks with the "
                f"same experts, as where it is a multiple or a divisor of paro_group_size, got {size} with {n} ranks "
                f"in groups of {m}."
            )
        return GroupSizes(n // size, found.pop())

    def shards(self, placement: Placement) -> int:
        """Return the number of different shards of a state in this placement."""
        return {Placement.N: 1, Placement.I: self.group_size, Placement.G: self.ranks}[placement]


@dataclass(frozen=True)
class Volume:
    """Bytes that one rank receives: ``intra`` from its own group, ``inter`` from other groups."""

    intra: float = 0.0
    inter: float = 0.0

    def __add__(self, other: "Volume") -> "Volume":
        return Volume(self.intra + other.intra, self.inter + other.inter)

    def __mul__(self, times: float) -> "Volume":
        return Volume(self.intra * times, self.inter * times)


def redistribution_volume(sizes: GroupSizes, source: Placement, target: Placement, nbytes: float) -> Volume:
    """Return what one rank receives when a state of ``nbytes`` bytes (whole) moves from one placement to the other.

    It is the same for a gather (``target`` is coarser) and a reduce (``target`` is finer). See Note [Placements, moves
    and strategies].
    """
    coarse, fine = sorted((source, target))
    a = (sizes.group_size - 1) / sizes.group_size
    b = (sizes.groups - 1) / sizes.ranks
    intra = a * nbytes if coarse == Placement.N < fine else 0.0
    inter = b * nbytes if fine == Placement.G > coarse else 0.0
    return Volume(intra, inter)


class Direction(Enum):
    """The direction of a move: towards N, or towards G."""

    GATHER = "gather"
    REDUCE = "reduce"


@dataclass(frozen=True)
class Phase:
    """One of the moves of a step, as one rank sees it.

    Attributes:
        name: what the move is for.
        kind: its direction.
        volume: bytes that a rank receives each time.
        each_micro_step: how often it runs in a micro-step; 0 for once per step.
    """

    name: str
    kind: Direction
    volume: Volume
    each_micro_step: int = 0

    def times(self, accumulation: int) -> int:
        """Return how often the move runs in a step of ``accumulation`` micro-steps."""
        return self.each_micro_step * accumulation or 1


@dataclass(frozen=True)
class ModelStates:
    """Bytes of the model's states before any sharding.

    Attributes:
        parameters: all parameters, in the dtype of forward and backward (2 bytes each in bf16).
        gradients: gradients of trainable parameters, in the dtype in which they are communicated and kept.
        updated: trainable parameters, which an optimizer step changes, in the dtype of ``parameters``.
        optimizer: the optimizer's states, fp32 master copy included (12 bytes per trainable parameter for Adam).
    """

    parameters: float
    gradients: float
    updated: float
    optimizer: float

    def __sub__(self, part: "ModelStates") -> "ModelStates":
        return ModelStates(*map(operator.sub, astuple(self), astuple(part)))

    @classmethod
    def of(
        cls,
        parameters: int,
        trainable: int | None = None,
        *,
        parameter_bytes: int = 2,
        gradient_bytes: int = 2,
        optimizer_bytes: int = 12,
    ) -> "ModelStates":
        """Return states from parameter counts and bytes per element; the defaults are bf16 training with Adam."""
        trainable = parameters if trainable is None else trainable
        return cls(
            parameters * parameter_bytes,
            trainable * gradient_bytes,
            trainable * parameter_bytes,
            trainable * optimizer_bytes,
        )


@dataclass(frozen=True)
class StateBytes:
    """Bytes of each model state that one rank holds, without buckets and gathered layers."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Return the sum of the three states."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class Strategy:
    """Placements of parameters, gradients and optimizer states: one row of ``STRATEGIES``."""

    p: Placement
    g: Placement
    os: Placement
    known_as: str = ""

    def __post_init__(self) -> None:
        coarser = [letter for letter in ("p", "g") if getattr(self, letter) > self.os]
        if coarser:
            raise ValueError(
                f"{self} is not a strategy: optimizer states must be sharded at least as finely as parameters "
                f"and as gradients (N < I < G), but os = {self.os.name} is coarser than "
                f"{' and than '.join(f'{c} = {getattr(self, c).name}' for c in coarser)}. Optimizer states are the "
                f"largest of the three and are used once a step: replicating them to save a smaller one costs memory."
            )

    def __str__(self) -> str:
        """Return the three letters with hyphens, as in messages: N-I-G."""
        return hyphenate(self.name)

    @property
    def name(self) -> str:
        """Return the three letters, in the order p, g, os, as in configurations and files: NIG."""
        return self.p.name + self.g.name + self.os.name

    @property
    def stage(self) -> int:
        """Return the ZeRO stage of this strategy's optimizer: 3 if p is sharded, else 2 if g is sharded, else 1."""
        if self.p > Placement.N:
            return 3
        return 2 if self.g > Placement.N else 1

    def phases(self, sizes: GroupSizes, states: ModelStates, whole: bool = False) -> tuple[Phase, ...]:
        """Return the moves of a step in order, including empty ones.

        If optimizer states are coarser than G, an all-reduce is a reduce to G and a gather back.

        Args:
            sizes: ranks and groups.
            states: the states that are moved.
            whole: whether their parameters also stay whole on every rank (``paro_modules``).
        """
        move = functools.partial(redistribution_volume, sizes)
        n, g = Placement.N, Placement.G
        used, updates = (0.0, "gather whole updates") if whole else (states.parameters, "gather updates")
        gradients, updated = states.gradients, states.updated
        return (
            # For forward, and again for backward.
            Phase("gather parameters", Direction.GATHER, move(self.p, n, used), each_micro_step=2),
            Phase("reduce gradients", Direction.REDUCE, move(n, self.g, gradients), each_micro_step=1),
            Phase("reduce at the boundary", Direction.REDUCE, move(self.g, g, gradients)),
            Phase("gather at the boundary", Direction.GATHER, move(g, self.os, gradients)),
            Phase(updates, Direction.GATHER, move(self.os, n if whole else self.p, updated)),
        )

    def volume(self, sizes: GroupSizes, states: ModelStates, accumulation: int = 1) -> Volume:
        """Return the bytes that one rank receives in an optimizer step of ``accumulation`` micro-steps."""
        phases = self.phases(sizes, states)
        return sum((phase.volume * phase.times(accumulation) for phase in phases), Volume())

    def exchange(self, sizes: GroupSizes, nbytes: float) -> Volume:
        """Return the bytes that one rank receives for matrices that the step needs whole, as Muon's does.

        With sharded states, each matrix goes to one of the ranks that share it, and its update comes back; the
        matrices are divided evenly among these ranks. With replicated states, the ranks of a group divide the
        matrices among them, and gather the updates.

        Args:
            sizes: ranks and groups.
            nbytes: bytes of all matrices, as they travel.
        """
        if self.os == Placement.N:
            return redistribution_volume(sizes, Placement.I, Placement.N, nbytes)
        share = sizes.shards(self.os)
        both_ways = 2 * nbytes / share**2  # from each of the others
        return Volume((sizes.group_size - 1) * both_ways, (share - sizes.group_size) * both_ways)

    def memory(self, sizes: GroupSizes, states: ModelStates) -> StateBytes:
        """Return the bytes that one rank holds of each state: all of its bytes, divided by its number of shards."""
        return StateBytes(
            states.parameters / sizes.shards(self.p),
            states.gradients / sizes.shards(self.g),
            states.optimizer / sizes.shards(self.os),
        )


def _row(letters: str, known_as: str) -> Strategy:
    p, g, os = (Placement[letter] for letter in letters)
    return Strategy(p, g, os, known_as)


STRATEGIES: dict[str, Strategy] = {
    row.name: row
    for row in (
        _row("NNN", "DDP"),
        _row("NNI", "Megatron distributed optimizer with several instances"),
        _row("NNG", "ZeRO-1"),
        _row("NII", "PaRO"),
        _row("NIG", "PaRO"),
        _row("NGG", "ZeRO-2"),
        _row("INI", "PaRO, for few trainable parameters"),
        _row("ING", "PaRO, for few trainable parameters"),
        _row("III", "MiCS, HSDP, FSDP HYBRID_SHARD"),
        _row("IIG", "PaRO, Megatron-FSDP HFSDP"),
        _row("IGG", "PaRO"),
        _row("GNG", "for a large frozen model with few trainable parameters"),
        _row("GIG", "for a large frozen model with few trainable parameters"),
        _row("GGG", "ZeRO-3, FSDP FULL_SHARD"),
    )
}


def hyphenate(name: str) -> str:
    """Return the name of a strategy, which may have a suffix, as messages write it: ``N-I-G + LoCo``.

    Other names are returned unchanged.
    """
    return _PLAIN_NAME.sub(r"\1-\2-\3", name)


def hyphenated(names: Iterable[str]) -> str:
    """Return the names of several strategies for a message."""
    return ", ".join(map(hyphenate, names))


def plain_name(text: str) -> str:
    """Return the name of a strategy, which may have a suffix, without hyphens; other texts are returned unchanged."""
    return _HYPHENATED_NAME.sub(r"\1\2\3", text)


def parse_strategy(name: object, besides: str = "") -> Strategy:
    """Return the strategy with that name.

    Args:
        name: the three letters, with or without hyphens.
        besides: other accepted values, for the message.

    Raises:
        ValueError: there is no strategy with that name. The message lists the 14; for one of the other 13 combinations
            of letters, it says why it is no strategy.
    """
    plain = plain_name(name) if isinstance(name, str) else ""
    if plain in STRATEGIES:
        return STRATEGIES[plain]
    why, close = "", plain_name(plain.strip().upper())
    if len(plain) == 3 and set(plain) <= set(Placement.__members__):
        try:
            _row(plain, "")
        except ValueError as error:
            why = f" {error}"
    elif close in STRATEGIES:
        why = f" Did you mean {hyphenate(close)!r}?"
    raise ValueError(
        f"paro_strategy must be one of {hyphenated(STRATEGIES)} (placements of p, g, os){besides}, got {name!r}.{why}"
    )


def full_bucket(most: int, total: int) -> int:
    """Return the elements of a full bucket of gradients, or of updated parameters that are sharded.

    Args:
        most: most elements, from ``reduce_bucket_size`` or ``allgather_bucket_size``.
        total: elements of all gradients, or of all updated parameters.
    """
    return min(most, max(-(-total // _BUCKETS), _LEAST_BUCKET))
