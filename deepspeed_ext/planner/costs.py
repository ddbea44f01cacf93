# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Predicts the cost of a step under a strategy: bytes, memory, and seconds. Pure.

Note [Cost model]
    The inputs are the strategy's phases. Each takes messages * latency + bytes / bandwidth over each hop. Sharded
    parameters and their updates are sent layer by layer. Gradients, and updates of replicated parameters, are sent
    bucket by bucket. A closed form gives the part that compute hides (Note [Closed form of a step]). A parameter that
    modules share is gathered for each of them, as a head that is tied to an embedding.

    Between forward and backward, either all parameters are kept or none. Small parameters that persist are not
    modeled. The model ranks strategies; it does not promise their times.

    An Adam update reads and writes its 12 bytes per parameter (master copy and two moments in fp32), reads the
    gradient and writes the parameter. In the rank's memory, this is 2.5 times the bytes of its states.

Note [Plain ZeRO]
    DDP and the plain stages are predicted as if configured for the fewest bytes (reductions to one rank instead of
    all-reduces; unsharded gradients reduced at the boundary only), and with ``overlap_comm``. Collectives are over all
    ranks, and both of their hops run at the same time. Gradients are reduced during the backward. ZeRO-1 and ZeRO-2
    wait for updated parameters, and ZeRO-3 prefetches, without units. On a host, DeepSpeed's stages wait for each
    reduction, and only DDP hides them. With Muon there is no such prediction, since DeepSpeed's stages send much more
    for it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from deepspeed_ext.comm.owners import ROUNDS
from deepspeed_ext.config.model import PLAIN
from deepspeed_ext.planner.closed_form import Move, Overlap, Seconds, Step
from deepspeed_ext.planner.compression import UNCOMPRESSED, Compression, label
from deepspeed_ext.planner.memory import Copies, Model, count_copies, held_bytes, transient_bytes
from deepspeed_ext.planner.rates import Rates
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, Placement, StateBytes, Strategy, Volume

UPDATE_TRAFFIC = 2.5  # bytes that an update reads and writes, per byte of optimizer states
DDP_BUCKET = 25 * 2**20  # bytes; PyTorch's default


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of a strategy for each rank.

    Attributes:
        strategy: the three letters.
        loco: whether gradients are sent between groups in few bits.
        updates: whether updated parameters, or gathered gradient sums, are sent between groups in few bits.
        memory: bytes of model states.
        transient: other bytes that a step holds: the fp32 gradient for the optimizer, or, before that, Muon's momentum
            until the step is known to be applied; the largest gathered layer, or unit and its gradients; the error
            feedback before and after the step (Note [Bucket errors]); windows of updates that are copied to host
            memory; the parts that ordered sums receive; full gradients of parameters that stay whole. Activations and
            other buckets are not included.
        host: bytes in host memory.
        volume: bytes received in a step; ``of_experts``: the part that belongs to experts.
        seconds: seconds that each part adds to a step: compute, the exposed part of hops within groups and between
            groups, the update, and the exposed part of copies from and to the host.
        busy: seconds for which each part is active in a step, exposed or not.
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
        """Return plain values, with the totals."""
        totals = {"total_memory": self.total_memory, "total_seconds": self.total_seconds}
        return asdict(self) | totals


def predict(
    strategy: Strategy, sizes: GroupSizes, model: Model, rates: Rates, compression: Compression = UNCOMPRESSED
) -> Prediction:
    """Predict the cost of a strategy; see Note [Cost model]."""
    return _prediction(strategy, sizes, model, rates, compression, model.overlaps(strategy))


def predict_plain(sizes: GroupSizes, model: Model, rates: Rates) -> list[Prediction]:
    """Predict the cost of the plain stages; see Note [Plain ZeRO]."""
    if model.all_matrices:
        return []
    return [predict_plain_stage(name, sizes, model, rates) for name in PLAIN]


def predict_plain_stage(name: str, sizes: GroupSizes, model: Model, rates: Rates) -> Prediction:
    """Predict the cost of the plain stage ``name``, a key of ``PLAIN``; see Note [Plain ZeRO]."""
    strategy, ddp = STRATEGIES[name], name == "NNN"
    bucket = max(1, min(model.bucket, DDP_BUCKET // model.gradient_bytes)) if ddp else model.bucket
    # DDP gathers no updates, so ``overlap.updates`` has no effect on it.
    copies = model.overlaps(strategy).copies
    overlap = Overlap(model.streams or ddp, strategy.p != Placement.N, model.streams, at_once=True, copies=copies)
    return replace(
        _prediction(strategy, sizes, model.as_plain(strategy, bucket), rates, UNCOMPRESSED, overlap), plain=True
    )


def _prediction(
    strategy: Strategy, sizes: GroupSizes, model: Model, rates: Rates, compression: Compression, overlap: Overlap
) -> Prediction:
    families = model.families(sizes, strategy.p)
    host_copies = count_copies(strategy, families, compression)
    volumes, (use, reduce, cross, back, updates) = _moves(strategy, families, model, rates, compression, host_copies)
    exchanged = [strategy.exchange(ranks, family.matrices) for ranks, family in families]
    of_experts = sum((part for each in (volumes, exchanged) for part in each[1 : 1 + len(model.experts)]), Volume())
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
        # The states on the device: 0 if they are offloaded, since the host's update is not modeled.
        update=UPDATE_TRAFFIC * memory.optimizer / rates.memory,
        overlap=overlap,
        orthogonalize=_orthogonalize_seconds(strategy, families, model),
    )
    return Prediction(
        strategy.name,
        loco=compression.loco is not None,
        updates=compression.updates is not None,
        # Cached slices are on the device in addition to the copy on the host.
        memory=replace(memory, parameters=memory.parameters + host_copies.cached),
        transient=sum(transient_bytes(strategy, ranks, family, compression) for ranks, family in families)
        + host_copies.windows,
        host=host,
        volume=sum([*volumes, *exchanged], Volume()),
        seconds=step.seconds(),
        busy=step.busy(),
        of_experts=of_experts,
    )


def _moves(
    strategy: Strategy,
    families: Sequence[tuple[GroupSizes, Model]],
    model: Model,
    rates: Rates,
    compression: Compression,
    host_copies: Copies,
) -> tuple[list[Volume], list[Move]]:
    """Return the bytes that a rank receives in a step, by family, and the moves. Excludes Muon's exchange."""
    sharded, moves = strategy.p != Placement.N, []
    volumes = [Volume() for _ in families]
    phases_by_family = zip(
        *(family.under(strategy).phases(ranks, family.sent, family.is_whole) for ranks, family in families),
        strict=True,
    )
    for phases, by_layer in zip(phases_by_family, (sharded, False, False, False, sharded), strict=True):
        within = between = 0.0
        units, hops = 0, rates.for_direction(phases[0].kind)
        for index, (phase, (_, family)) in enumerate(zip(phases, families, strict=True)):
            volume = compression.volume(phase, model.gradient_bytes, family.updated_bytes)
            messages = family.fetches if by_layer and not family.is_whole else family.buckets
            volumes[index] += volume * model.times(phase)
            within += hops.intra.seconds(volume.intra, messages)
            between += hops.inter.seconds(volume.inter, messages)
            # Families share the links, so their messages are counted together.
            units += messages
        moves.append(Move(within, between, units=min(units, model.layers)))
    moves[0] = replace(moves[0], up=host_copies.use / rates.host)
    # A copy inside the step must end before any layer of the next forward starts: it is one unit.
    units = 1 if host_copies.in_step else moves[-1].units
    moves[-1] = replace(moves[-1], units=units, up=host_copies.up / rates.host, down=host_copies.down / rates.host)
    return volumes, moves


def _exchange(exchanged: Sequence[Volume], layers: int, rates: Rates) -> Move:
    """Return the move of Muon's matrices to their owners and back. Each family has its own rounds."""
    hops, rounds = rates.gather, min(ROUNDS, layers)
    within = sum(hops.intra.seconds(volume.intra, 2 * rounds) for volume in exchanged)
    between = sum(hops.inter.seconds(volume.inter, 2 * rounds) for volume in exchanged)
    return Move(within, between, rounds)


def _orthogonalize_seconds(strategy: Strategy, families: Sequence[tuple[GroupSizes, Model]], model: Model) -> float:
    """Return the seconds for which a rank orthogonalizes its shares of all families, in proportion to their bytes."""
    shares = [ranks.group_size if strategy.os == Placement.N else ranks.shards(strategy.os) for ranks, _ in families]
    if len(families) == 1 or not model.all_matrices:
        return model.orthogonalizing / shares[0]
    work = sum(family.matrices / share for share, (_, family) in zip(shares, families, strict=True))
    return model.orthogonalizing * work / model.all_matrices
