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
from deepspeed_ext.planner.closed_form import LAYERS, Move, Overlap, Seconds, Step
from deepspeed_ext.planner.compression import AS_IT_IS, Compression, label
from deepspeed_ext.planner.host import Copies, HostParameters
from deepspeed_ext.planner.rates import Rates
from deepspeed_ext.strategy import (
    STRATEGIES,
    GroupSizes,
    ModelStates,
    Phase,
    Placement,
    StateBytes,
    Strategy,
    Volume,
    full_bucket,
)

UPDATE_TOUCHES = 2.5  # bytes that an update reads and writes, for each byte of the optimizer's states
BUCKET = 500_000_000  # elements; DeepSpeed's default reduce_bucket_size and allgather_bucket_size
FETCHED = 50_000_000  # elements in a gather, assumed if only the size of the model is known
OPTIMIZER_BYTES = {"adam": 12, "muon": 8}  # for each parameter: fp32 master copy and two moments, or a momentum
# The strategies that plain stages run, without groups.
PLAIN = {"NNN": "DDP", "NNG": "ZeRO-1", "NGG": "ZeRO-2", "GGG": "ZeRO-3"}
DDP_BUCKET = 25 * 2**20  # bytes; PyTorch's default


@dataclass(frozen=True)
class Experts:
    """The experts of one expert-parallel size: a family with fewer data-parallel ranks. Each rank has some experts.

    Attributes:
        size: expert-parallel size: the number of neighboring ranks that together have all experts.
        states, held, fetches, matrices: as in ``Model``, for the experts that one rank has.
    """

    size: int
    states: ModelStates
    held: ModelStates | None = None
    fetches: int = 1
    matrices: float = 0.0


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        states: bytes of all dense parameters, gradients and states, as they are moved.
        gradient_bytes: bytes of one gradient, as it is moved.
        accumulation: micro-steps per step.
        compute: seconds of forward and backward of a micro-step.
        fetches: messages that gather all parameters: one for each module that has some.
        largest_layer: bytes of the parameters that one module holds itself, the most that is gathered at a time.
        bucket: elements of a bucket of gradients.
        held: bytes as they are held on the device, if they differ from ``states``: what is offloaded takes none, and
            gradients may be summed in another dtype.
        regathered: whether sharded parameters are gathered again for backward, rather than kept since forward.
        streams: whether transfers run beside compute on streams of their own; on a host, hops inside a group are
            copies by the cores that compute.
        overlap: ``overlap_comm``; None for its default, which is true except for p = N on a host.
        overlap_updates: ``paro_overlap_updates``: with p = N, updated parameters come under the next forward.
        matrices: bytes of the dense matrices that the step needs whole, as they are moved: those of Muon.
        orthogonalizing: seconds that one rank would take to orthogonalize all that it has of matrices, experts' too.
        experts: experts of expert parallelism.
        host: how parameters are in host memory, where they are sharded; None if they are on the device.
    """

    states: ModelStates
    gradient_bytes: int = 2
    accumulation: int = 1
    compute: float = 0.0
    fetches: int = 1
    largest_layer: float = 0.0
    bucket: int = BUCKET
    held: ModelStates | None = None
    regathered: bool = True
    streams: bool = True
    overlap: bool | None = None
    overlap_updates: bool = False
    matrices: float = 0.0
    orthogonalizing: float = 0.0
    experts: tuple[Experts, ...] = ()
    host: HostParameters | None = None

    @classmethod
    def of_size(
        cls,
        parameters: int,
        trainable: int | None = None,
        *,
        width: int = 2,
        experts: int = 0,
        expert_parallel: int = 1,
        muon: bool = False,
        largest_layer: int = 0,
    ) -> "Model":
        """Return a model of which only sizes are known.

        Args:
            parameters: number of parameters, experts' included.
            trainable: how many of them are trained; None for all.
            width: bytes of a parameter and of a gradient.
            experts: how many of the parameters are in experts.
            expert_parallel: expert-parallel size: ranks that together have all experts.
            muon: whether Muon trains all of them, rather than Adam.
            largest_layer: parameters of the largest module.
        """
        optimizer_bytes = OPTIMIZER_BYTES["muon" if muon else "adam"]
        each = {"parameter_bytes": width, "gradient_bytes": width, "optimizer_bytes": optimizer_bytes}
        dense, of_rank = parameters - experts, experts // expert_parallel
        states, own = ModelStates.of(dense, trainable, **each), ModelStates.of(of_rank, **each)
        trained = round((states.gradients + own.gradients) / width)
        family = Experts(expert_parallel, own, None, max(1, of_rank // FETCHED), own.gradients if muon else 0.0)
        return cls(
            states,
            width,
            fetches=max(1, dense // FETCHED),
            largest_layer=float(largest_layer * width),
            bucket=full_bucket(BUCKET, trained),
            matrices=states.gradients if muon else 0.0,
            experts=(family,) if experts else (),
        )

    def families(self, sizes: GroupSizes) -> list[tuple[GroupSizes, "Model"]]:
        """Return each family of parameters as a model, with the sizes of its groups; the dense family first."""
        alone = [
            (
                sizes.of_experts(one.size),
                replace(
                    self,
                    states=one.states,
                    held=one.held,
                    fetches=one.fetches,
                    largest_layer=0.0,
                    matrices=one.matrices,
                    experts=(),
                ),
            )
            for one in self.experts
        ]
        return [(sizes, self), *alone]

    @property
    def all_matrices(self) -> float:
        """Return the bytes of the matrices that a rank has, experts' included."""
        return self.matrices + sum(one.matrices for one in self.experts)

    @property
    def trainable(self) -> float:
        """Return the elements of the dense parameters that are trained."""
        return self.states.gradients / self.gradient_bytes

    @property
    def updated_bytes(self) -> float:
        """Return the bytes of one updated parameter."""
        return self.states.updated / self.trainable if self.trainable else 1.0

    @property
    def layers(self) -> int:
        """Return the number of layers that the closed form has for the model."""
        return max(1, min(self.fetches, LAYERS))

    @property
    def gathers(self) -> int:
        """Return how often sharded parameters are gathered in a micro-step."""
        return 2 if self.regathered else 1

    def times(self, phase: Phase) -> int:
        """Return how often a phase runs in a step."""
        kept = phase.each_micro_step == 2 and not self.regathered
        return phase.times(self.accumulation) // (2 if kept else 1)

    @property
    def buckets(self) -> int:
        """Return how many buckets the gradients fill."""
        return max(1, round(self.trainable / self.bucket))

    def overlaps(self, strategy: Strategy) -> Overlap:
        """Return what runs under compute."""
        sharded = strategy.p != Placement.N
        gradients = sharded or self.streams if self.overlap is None else self.overlap
        copies = self.streams and (self.host is None or self.host.pinned)
        return Overlap(gradients, updates=sharded or self.overlap_updates, within=self.streams, copies=copies)


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
    strategy: Strategy,
    sizes: GroupSizes,
    model: Model,
    rates: Rates,
    sent: Compression,
    overlap: Overlap,
) -> Prediction:
    families = model.families(sizes)
    copies = _copies(strategy, families, sent)
    volumes, (use, reduce, cross, back, updates) = _moves(strategy, families, model, rates, sent, copies)
    exchanged = [strategy.exchange(ranks, family.matrices) for ranks, family in families]
    of_experts = sum([*volumes[1:], *exchanged[1:]], Volume())
    memory = _sum_of([strategy.memory(ranks, _held(strategy, family)) for ranks, family in families])
    whole = _sum_of([strategy.memory(ranks, family.states) for ranks, family in families])
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
        memory=replace(memory, parameters=memory.parameters + copies.cached),
        transient=sum(_transient(strategy, ranks, family, sent) for ranks, family in families) + copies.windows,
        host=whole.parameters - memory.parameters + whole.optimizer - memory.optimizer,
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
    copies: Copies,
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
    moves[0] = replace(moves[0], up=copies.use / rates.host)
    # What a step waits for is one unit, which every layer waits for.
    units = 1 if copies.in_step else moves[-1].units
    moves[-1] = replace(moves[-1], units=units, up=copies.up / rates.host, down=copies.down / rates.host)
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


def _copies(strategy: Strategy, families: Sequence[tuple[GroupSizes, Model]], sent: Compression) -> Copies:
    """Return what is copied between host and device, of all families; the first one has the cache."""
    found = Copies()
    for number, (ranks, family) in enumerate(families):
        host = family.host if family.host is None or not number else replace(family.host, cache=0.0)
        found += Copies.of(
            host,
            strategy,
            ranks,
            family.states,
            few_bits=sent.updates is not None,
            offloaded_optimizer=not (family.held or family.states).optimizer,
            window=family.bucket * family.updated_bytes,
        )
    return found


def _held(strategy: Strategy, model: Model) -> ModelStates:
    """Return the bytes that devices hold; whole parameters are not offloaded."""
    held = model.held or model.states
    return replace(held, parameters=model.states.parameters) if strategy.p == Placement.N else held


def _sum_of(parts: Sequence[StateBytes]) -> StateBytes:
    """Return what one rank holds of all families together."""
    return StateBytes(
        *(sum(getattr(part, name) for part in parts) for name in ("parameters", "gradients", "optimizer"))
    )


def _transient(strategy: Strategy, sizes: GroupSizes, model: Model, sent: Compression) -> float:
    trainable, held = model.trainable, model.held or model.states
    total = 0.0
    if held.optimizer:  # not both: Muon's new momentum is kept or dropped before gradients are cast to fp32
        elements = trainable if held.gradients < 4 * trainable else model.matrices / model.gradient_bytes
        total += 4 * elements / sizes.shards(strategy.os)
    if strategy.p != Placement.N:
        total += model.largest_layer if model.regathered else model.states.parameters
    return total + sent.kept_bytes(strategy, sizes, trainable)
