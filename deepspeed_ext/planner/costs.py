# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What a step costs under a strategy: bytes, memory, and seconds. Pure.

Note [Cost model]
    The input are the strategy's phases: each takes messages * latency + bytes / bandwidth over each hop. Sharded
    parameters, and their updates, are sent layer by layer; gradients, and updates of parameters that each rank holds
    whole, bucket by bucket. How much of that compute hides is in closed form (Note [Closed form of a step]).

    Between forward and backward, either all parameters are kept or none; small parameters that persist, and modules
    that are fetched together, are not modeled. The model ranks strategies; it does not promise their times.

    An Adam update reads and writes its 12 bytes per parameter (master copy and two moments in fp32), reads the
    gradient and writes the parameter. In the rank's memory, this is 2.5 times the bytes of its states.

Note [Plain ZeRO]
    DDP and the plain stages are predicted as if configured for the fewest bytes (reductions to one rank instead of
    all-reduces; whole gradients reduced at the boundary only), and with ``overlap_comm``. Collectives are over all
    ranks, and both of their hops run at the same time. Gradients are reduced under the backward. ZeRO-1 and ZeRO-2
    wait for updated parameters, and ZeRO-3 prefetches. On a host, DeepSpeed's stages wait for each reduction, and only
    DDP hides them. With Muon there is no such prediction, since DeepSpeed's stages send much more for it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from deepspeed_ext.comm.owners import ROUNDS
from deepspeed_ext.planner.closed_form import Move, Overlap, Seconds, Step
from deepspeed_ext.planner.compression import AS_IT_IS, Compression, label
from deepspeed_ext.planner.memory import Copies, Model, copies, held_bytes, transient_bytes
from deepspeed_ext.planner.rates import Rates
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, Placement, StateBytes, Strategy, Volume

UPDATE_TOUCHES = 2.5  # bytes that an update reads and writes, for each byte of the optimizer's states
# The strategies that plain stages run, without groups.
PLAIN = {"NNN": "DDP", "NNG": "ZeRO-1", "NGG": "ZeRO-2", "GGG": "ZeRO-3"}
DDP_BUCKET = 25 * 2**20  # bytes; PyTorch's default


@dataclass(frozen=True)
class Prediction:
    """A strategy, and what it costs each rank.

    Attributes:
        strategy: the three letters.
        loco: whether gradients cross between groups in few bits.
        updates: whether updated parameters, or sums that come back, cross in few bits.
        memory: bytes of model states.
        transient: bytes of what else a step holds: the fp32 gradient that the optimizer updates from, or before that
            Muon's momentum until the step is decided; the largest gathered layer; the error feedback before and after
            the step (Note [Errors of buckets]); windows of updates that go to host memory. Activations and buckets are
            not included.
        host: bytes in host memory.
        volume: bytes received in a step; ``of_experts``: those of them that are of experts.
        seconds: seconds that each part adds to a step: compute, the exposed part of hops within groups and of those
            between, the update, and the exposed part of copies from and to the host.
        busy: seconds for which each part works in a step, exposed or not.
        plain: whether this is a plain stage instead; see Note [Plain ZeRO].
    """

    strategy: str
    loco: bool
    updates: bool
    memory: StateBytes
    transient: float
    host: float
    volume: Volume
    seconds: Seconds
    busy: Seconds
    of_experts: Volume = field(default_factory=Volume)
    plain: bool = False

    @property
    def name(self) -> str:
        if self.plain:
            return PLAIN[self.strategy]
        return self.strategy + label(self.loco, self.updates)

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def total_memory(self) -> float:
        return self.memory.total + self.transient

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        totals = {"total_memory": self.total_memory, "total_seconds": self.total_seconds}
        return asdict(self) | totals


def predict(
    strategy: Strategy, sizes: GroupSizes, model: Model, rates: Rates, sent: Compression = AS_IT_IS
) -> Prediction:
    """Predict what a strategy costs; see Note [Cost model]."""
    return _prediction(strategy, sizes, model, rates, sent, model.overlaps(strategy))


def predict_plain(sizes: GroupSizes, model: Model, rates: Rates) -> list[Prediction]:
    """Predict what the plain stages cost; see Note [Plain ZeRO]."""
    if model.all_matrices:
        return []
    return [predict_plain_stage(name, sizes, model, rates) for name in PLAIN]


def predict_plain_stage(name: str, sizes: GroupSizes, model: Model, rates: Rates) -> Prediction:
    """Predict what one plain stage costs; ``name``: its three letters in ``PLAIN``. See Note [Plain ZeRO]."""
    strategy, ddp = STRATEGIES[name], name == "NNN"
    bucket = max(1, min(model.bucket, DDP_BUCKET // model.gradient_bytes)) if ddp else model.bucket
    # DDP gathers no updates, so nothing waits for any.
    copies = model.overlaps(strategy).copies
    overlap = Overlap(model.streams or ddp, strategy.p != Placement.N, model.streams, at_once=True, copies=copies)
    return replace(_prediction(strategy, sizes, replace(model, bucket=bucket), rates, AS_IT_IS, overlap), plain=True)


def _prediction(
    strategy: Strategy, sizes: GroupSizes, model: Model, rates: Rates, sent: Compression, overlap: Overlap
) -> Prediction:
    families = model.families(sizes)
    copied = copies(strategy, families, sent)
    volumes, (use, reduce, cross, back, updates) = _moves(strategy, families, model, rates, sent, copied)
    exchanged = [strategy.exchange(ranks, family.matrices) for ranks, family in families]
    of_experts = sum([*volumes[1:], *exchanged[1:]], Volume())
    memory, host = held_bytes(strategy, families)
    step = Step(
        use,
        reduce,
        cross,
        back,
        updates,
        exchange=_exchange(exchanged, model.layers, rates),
        layers=model.layers,
        gathers=model.gathers,
        accumulation=model.accumulation,
        compute=model.compute,
        update=UPDATE_TOUCHES * memory.optimizer / rates.memory,
        overlap=overlap,
        orthogonalize=_orthogonalizing(strategy, families),
    )
    return Prediction(
        strategy.name,
        loco=sent.loco is not None,
        updates=sent.updates is not None,
        memory=replace(memory, parameters=memory.parameters + copied.cached),
        transient=sum(transient_bytes(strategy, ranks, family, sent) for ranks, family in families) + copied.windows,
        host=host,
        volume=volumes[0] + exchanged[0] + of_experts,
        seconds=step.seconds(),
        busy=step.busy(),
        of_experts=of_experts,
    )


def _moves(
    strategy: Strategy,
    families: Sequence[tuple[GroupSizes, Model]],
    model: Model,
    rates: Rates,
    sent: Compression,
    copied: Copies,
) -> tuple[list[Volume], list[Move]]:
    """Return the bytes that a rank receives in a step, of each family; and the moves. Without whole matrices."""
    sharded, moves = strategy.p != Placement.N, []
    total = [Volume() for _ in families]
    of_all = zip(*(strategy.phases(ranks, family.states) for ranks, family in families), strict=True)
    for phases, by_layer in zip(of_all, (sharded, False, False, False, sharded), strict=True):
        within = between = 0.0
        units, hops = 0, rates.of(phases[0].kind)
        for number, (phase, (_, family)) in enumerate(zip(phases, families, strict=True)):
            volume = sent.volume(phase, model.gradient_bytes, family.updated_bytes)
            messages = family.fetches if by_layer else family.buckets
            total[number] += volume * model.times(phase)
            within += hops.intra.seconds(volume.intra, messages)
            between += hops.inter.seconds(volume.inter, messages)
            units += messages
        moves.append(Move(within, between, units=min(units, model.layers)))
    moves[0] = replace(moves[0], up=copied.use / rates.host)
    # What a step waits for is one unit, which every layer waits for.
    units = 1 if copied.in_step else moves[-1].units
    moves[-1] = replace(moves[-1], units=units, up=copied.up / rates.host, down=copied.down / rates.host)
    return total, moves


def _exchange(exchanged: Sequence[Volume], layers: int, rates: Rates) -> Move:
    """Return the move of the matrices that a step needs whole, of all families, each in rounds of its own."""
    hops, rounds = rates.gather, min(ROUNDS, layers)
    within = sum(hops.intra.seconds(one.intra, 2 * rounds) for one in exchanged)
    between = sum(hops.inter.seconds(one.inter, 2 * rounds) for one in exchanged)
    return Move(within, between, rounds)


def _orthogonalizing(strategy: Strategy, families: Sequence[tuple[GroupSizes, Model]]) -> float:
    """Return the seconds for which a rank orthogonalizes: its shares of each family, taken to be as long as large."""
    (_, model), *_ = families
    shares = [ranks.group_size if strategy.os == Placement.N else ranks.shards(strategy.os) for ranks, _ in families]
    if len(families) == 1 or not model.all_matrices:
        return model.orthogonalizing / shares[0]
    work = sum(family.matrices / share for share, (_, family) in zip(shares, families, strict=True))
    return model.orthogonalizing * work / model.all_matrices
