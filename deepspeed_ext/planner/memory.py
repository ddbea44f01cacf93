# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What is trained, and what a rank holds of it on its device and in host memory. Pure.

Note [Cost of parameters in host memory]
    Of parameters of Ψ bytes, frozen ones included, a rank holds Ψ/m (p = I) or Ψ/n (p = G) on the host, and copies
    that to the device each time they are gathered, but for what ``paro_parameter_cache_bytes`` keeps there.

    After a step, a slice of several rows (p = I, os = G, more than one group) is completed window by window. What has
    crossed, Ψ_t/m of the trained parameters, is copied to the host under the next forward, and the first use waits for
    it. Two windows are on the device. Updates in few bits also need what is held, Ψ_t/m the other way, and so does
    what an offloaded optimizer has updated, Ψ_t/n. Where p = os, DeepSpeed copies Ψ_t/n or Ψ_t/m to the host in the
    step, before anything else begins, unless an offloaded optimizer has it there.

    Both directions run at once, beside compute. From pageable memory the host waits for each copy, and queues no
    compute meanwhile. Copies of an offloaded optimizer's gradients are not counted.
"""

import operator
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from deepspeed_ext.planner.closed_form import LAYERS, Overlap
from deepspeed_ext.planner.compression import Compression
from deepspeed_ext.strategy import GroupSizes, ModelStates, Phase, Placement, StateBytes, Strategy, full_bucket

BUCKET = 500_000_000  # elements; DeepSpeed's default reduce_bucket_size and allgather_bucket_size
FETCHED = 50_000_000  # elements in a gather, assumed if only the size of the model is known
OPTIMIZER_BYTES = {"adam": 12, "muon": 8}  # for each parameter: fp32 master copy and two moments, or a momentum


@dataclass(frozen=True)
class HostParameters:
    """How parameters are in host memory: ``offload_param``.

    Attributes:
        pinned: whether that memory is pinned.
        cache: bytes of slices that each device has as well (``paro_parameter_cache_bytes``).
    """

    pinned: bool = True
    cache: float = 0.0


@dataclass(frozen=True)
class Copies:
    """Bytes between host and device, of one rank.

    Attributes:
        use: to the device, each time that all parameters are gathered.
        up, down: to the device before updates cross, and to the host after.
        cached: on the device for good.
        windows: on the device while updates cross.
        in_step: whether a step waits for ``down``.
    """

    use: float = 0.0
    up: float = 0.0
    down: float = 0.0
    cached: float = 0.0
    windows: float = 0.0
    in_step: bool = False

    def __add__(self, other: "Copies") -> "Copies":
        use, up, down, cached, windows, in_step = map(operator.add, astuple(self), astuple(other))
        return Copies(use, up, down, cached, windows, bool(in_step))

    @classmethod
    def of(
        cls,
        host: HostParameters | None,
        strategy: Strategy,
        sizes: GroupSizes,
        states: ModelStates,
        *,
        few_bits: bool = False,
        offloaded_optimizer: bool = False,
        window: float = 0.0,
    ) -> "Copies":
        """Return what a strategy copies; see Note [Cost of parameters in host memory].

        Args:
            host: how parameters are there; None if they are not.
            strategy: which divides them; with p = N they are on the device.
            sizes: of the groups.
            states: of these parameters, before any sharding.
            few_bits: whether updates cross in few bits.
            offloaded_optimizer: whether optimizer states are on the host, too.
            window: bytes of a bucket of whole parameters.
        """
        if host is None or strategy.p == Placement.N:
            return cls()
        held, mine = states.parameters / sizes.shards(strategy.p), states.updated / sizes.shards(strategy.os)
        if strategy.p == strategy.os or sizes.groups == 1:
            return cls(use=held, down=0.0 if offloaded_optimizer else mine, in_step=True)
        updated, cached = states.updated / sizes.shards(strategy.p), min(host.cache, held)
        return cls(
            use=held - cached,
            up=(updated if few_bits else 0.0) + (mine if offloaded_optimizer else 0.0),
            down=updated,
            cached=cached,
            windows=min(2 * window / sizes.shards(strategy.p), updated),
        )


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
                sizes.of_experts(family.size),
                replace(
                    self,
                    states=family.states,
                    held=family.held,
                    fetches=family.fetches,
                    largest_layer=0.0,
                    matrices=family.matrices,
                    experts=(),
                ),
            )
            for family in self.experts
        ]
        return [(sizes, self), *alone]

    @property
    def all_matrices(self) -> float:
        """Return the bytes of the matrices that a rank has, experts' included."""
        return self.matrices + sum(family.matrices for family in self.experts)

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


def copies(strategy: Strategy, families: Sequence[tuple[GroupSizes, Model]], sent: Compression) -> Copies:
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


def held_bytes(strategy: Strategy, families: Sequence[tuple[GroupSizes, Model]]) -> tuple[StateBytes, float]:
    """Return the bytes of each state that a rank holds on its device, and those of all states in host memory."""

    def held(family: Model) -> ModelStates:
        states = family.held or family.states  # whole parameters are not offloaded
        return replace(states, parameters=family.states.parameters) if strategy.p == Placement.N else states

    here = _total([strategy.memory(ranks, held(family)) for ranks, family in families])
    whole = _total([strategy.memory(ranks, family.states) for ranks, family in families])
    return here, (whole.parameters - here.parameters) + (whole.optimizer - here.optimizer)


def _total(parts: Sequence[StateBytes]) -> StateBytes:
    return StateBytes(*map(sum, zip(*map(astuple, parts), strict=True)))


def transient_bytes(strategy: Strategy, sizes: GroupSizes, model: Model, sent: Compression) -> float:
    """Return the bytes of what else a step holds of a family; see ``Prediction.transient``."""
    trainable, held = model.trainable, model.held or model.states
    total = 0.0
    if held.optimizer:  # not both: Muon's new momentum is kept or dropped before gradients are cast to fp32
        elements = trainable if held.gradients < 4 * trainable else model.matrices / model.gradient_bytes
        total += 4 * elements / sizes.shards(strategy.os)
    if strategy.p != Placement.N:
        total += model.largest_layer if model.regathered else model.states.parameters
    return total + sent.kept_bytes(strategy, sizes, trainable)
