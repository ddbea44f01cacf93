# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Where model states live, and what moving them costs. Pure: no torch, no DeepSpeed.

Note [Placements, moves and strategies]
    n ranks train data-parallel, in k = n/m groups of m ranks; links inside a group are fast.
    A *placement* says where a model state is: N (replicated: every rank holds all of it), I (sharded inside the
    group: every group holds all of it) or G (sharded over all ranks). N < I < G: later is finer.
    A *move* takes a state from one placement to another over at most two *hops*, one inside the group and one
    between groups. Moving X bytes, a rank receives over each hop

        within the group    a X,  a = (m-1)/m
        between groups      b X,  b = (k-1)/n      (each rank of a group fetches its own 1/m from the other groups)

    whether the move is a gather (towards N: all-gather) or a reduce (towards G: reduce-scatter). An all-reduce is a
    reduce to G and a gather back.
    A *strategy* places parameters p, gradients g and optimizer states os. Its name is the three letters in that
    order. Source: PaRO, arXiv:2310.06003; formulas checked against its appendix tables.
"""

import functools
from collections import Counter
from dataclasses import dataclass
from enum import Enum, IntEnum

# A model is reduced in this number of buckets or more, so that one travels while the others are computed ...
_BUCKETS = 16
# ... unless they had less elements than this: DDP's have 25 MB.
_LEAST_BUCKET = 1 << 22


class Placement(IntEnum):
    """How a model state is sharded; a greater value is finer."""

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
        """Return the sizes of the ranks that have the same experts, where ``size`` neighbors divide all of them.

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
        """Return in how many different shards a state in this placement is."""
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

    The same for a gather (``target`` coarser) and a reduce (``target`` finer): see Note [Placements, moves and
    strategies].
    """
    coarse, fine = sorted((source, target))
    a = (sizes.group_size - 1) / sizes.group_size
    b = (sizes.groups - 1) / sizes.ranks
    intra = a * nbytes if coarse == Placement.N < fine else 0.0
    inter = b * nbytes if fine == Placement.G > coarse else 0.0
    return Volume(intra, inter)


class Direction(Enum):
    """Where a move goes: towards N, or towards G."""

    GATHER = "gather"
    REDUCE = "reduce"


@dataclass(frozen=True)
class Phase:
    """One of the moves that a step is made of, as one rank sees it.

    Attributes:
        name: what it is for.
        kind: of the move.
        volume: bytes that a rank receives each time.
        each_micro_step: how often in a micro-step; 0 for once a step.
    """

    name: str
    kind: Direction
    volume: Volume
    each_micro_step: int = 0

    def times(self, accumulation: int) -> int:
        """Return how often in a step of so many micro-steps."""
        return self.each_micro_step * accumulation or 1


@dataclass(frozen=True)
class ModelStates:
    """Bytes of the model's states before any sharding.

    Attributes:
        parameters: of all parameters, in the dtype of forward and backward (2 bytes each in bf16).
        gradients: of the trainable parameters, in the dtype in which they are communicated and kept.
        updated: of the trainable parameters, in the dtype of ``parameters``: what an optimizer step changes.
        optimizer: of the optimizer's states, fp32 master copy included (12 bytes a trainable parameter for Adam).
    """

    parameters: float
    gradients: float
    updated: float
    optimizer: float

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
    """Bytes of each model state that one rank holds (buckets and gathered layers not included)."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Sum of the three states."""
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
                f"{self.name} is not a strategy: optimizer states must be sharded at least as finely as parameters "
                f"and as gradients (N < I < G), but os = {self.os.name} is coarser than "
                f"{' and than '.join(f'{c} = {getattr(self, c).name}' for c in coarser)}. Optimizer states are the "
                f"largest of the three and are used once a step: replicating them to save a smaller one costs memory."
            )

    @property
    def name(self) -> str:
        """The three letters, in the order p, g, os."""
        return self.p.name + self.g.name + self.os.name

    @property
    def stage(self) -> int:
        """ZeRO stage whose optimizer runs this strategy: 3 if p is sharded, else 2 if g is sharded, else 1."""
        if self.p > Placement.N:
            return 3
        return 2 if self.g > Placement.N else 1

    def phases(self, sizes: GroupSizes, states: ModelStates) -> tuple[Phase, ...]:
        """Return what moves in a step, in order; empty moves included.

        An all-reduce, where optimizer states are coarser than G, is a reduce to G and a gather back.
        """
        move = functools.partial(redistribution_volume, sizes)
        n, g = Placement.N, Placement.G
        gradients, updated = states.gradients, states.updated
        return (
            # For forward, and again for backward.
            Phase("gather parameters", Direction.GATHER, move(self.p, n, states.parameters), each_micro_step=2),
            Phase("reduce gradients", Direction.REDUCE, move(n, self.g, gradients), each_micro_step=1),
            Phase("reduce at the boundary", Direction.REDUCE, move(self.g, g, gradients)),
            Phase("gather at the boundary", Direction.GATHER, move(g, self.os, gradients)),
            Phase("gather updates", Direction.GATHER, move(self.os, self.p, updated)),
        )

    def volume(self, sizes: GroupSizes, states: ModelStates, accumulation: int = 1) -> Volume:
        """Return the bytes that one rank receives in an optimizer step of ``accumulation`` micro-steps."""
        phases = self.phases(sizes, states)
        return sum((phase.volume * phase.times(accumulation) for phase in phases), Volume())

    def exchange(self, sizes: GroupSizes, nbytes: float) -> Volume:
        """Return the bytes that one rank receives where the step needs matrices whole, as Muon's does: there and back.

        With sharded states each matrix goes to one of the ranks that share it, in equal parts, and its update comes
        back. With replicated ones the ranks of a group divide the matrices, and gather the updates.

        Args:
            sizes: ranks and groups.
            nbytes: of all matrices, as they travel.
        """
        if self.os == Placement.N:
            return redistribution_volume(sizes, Placement.I, Placement.N, nbytes)
        share = sizes.shards(self.os)
        both_ways = 2 * nbytes / share**2  # from each of the others
        return Volume((sizes.group_size - 1) * both_ways, (share - sizes.group_size) * both_ways)

    def memory(self, sizes: GroupSizes, states: ModelStates) -> StateBytes:
        """Return the bytes that one rank holds of each state: the whole divided by the number of its shards."""
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


def parse_strategy(name: object, besides: str = "") -> Strategy:
    """Return the strategy of that name.

    Args:
        name: the three letters.
        besides: what else would be accepted, for the message.

    Raises:
        ValueError: not a string of that set. The message names the 14; for one of the 13 other combinations of the
            letters it says why it is none.
    """
    if isinstance(name, str) and name in STRATEGIES:
        return STRATEGIES[name]
    why = ""
    if isinstance(name, str) and len(name) == 3 and set(name) <= set(Placement.__members__):
        try:
            _row(name, "")
        except ValueError as error:
            why = f" {error}"
    elif isinstance(name, str) and name.strip().upper() in STRATEGIES:
        why = f" Did you mean {name.strip().upper()!r}?"
    raise ValueError(
        f"paro_strategy must be one of {', '.join(STRATEGIES)} (placements of p, g, os){besides}, got {name!r}.{why}"
    )


def full_bucket(most: int, total: int) -> int:
    """Return how many elements cross together: of gradients, and of updated parameters that are sharded.

    Args:
        most: elements, as ``reduce_bucket_size`` or ``allgather_bucket_size`` says.
        total: elements of all gradients, or of all parameters that are updated.
    """
    return min(most, max(-(-total // _BUCKETS), _LEAST_BUCKET))
