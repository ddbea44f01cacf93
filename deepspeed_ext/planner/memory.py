# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The model to train, and its memory on a rank's device and host. Pure.

Note [Cost of parameters in host memory]
    Of Ψ bytes of parameters, frozen ones included, a rank holds Ψ/m (p = I) or Ψ/n (p = G) on the host. It copies them
    to the device for each gather, except the slices that ``paro_parameter_cache_bytes`` keeps on the device.

    After a step, a slice of several rows (p = I, os = G, more than one group) is completed window by window. The
    received updates, Ψ_t/m of the trained parameters, are copied to the host during the next forward, and the first
    use waits for them. Two windows are on the device. Quantized updates also copy the old parameters to the device,
    Ψ_t/m, and an offloaded optimizer its updated shard, Ψ_t/n. If p = os, DeepSpeed copies Ψ_t/n or Ψ_t/m to the host
    in the step, before anything else begins, unless an offloaded optimizer has the update there.

    Both directions run at once and overlap with compute. With pageable memory, the host waits for each copy and queues
    no compute in that time. Copies of an offloaded optimizer's gradients are not counted.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace

from deepspeed_ext.planner.closed_form import LAYERS, Overlap
from deepspeed_ext.planner.compression import Compression
from deepspeed_ext.strategy import GroupSizes, ModelStates, Phase, Placement, StateBytes, Strategy, full_bucket

BUCKET = 500_000_000  # elements; DeepSpeed's default reduce_bucket_size and allgather_bucket_size
FETCHED = 50_000_000  # elements in a gather, assumed if only the size of the model is known
IN_FLIGHT = 2  # transfers at a time with overlap: the side streams of a ``TransferQueue``
OPTIMIZER_BYTES = {"adam": 12, "muon": 8}  # per parameter: fp32 master copy, and two moments or a momentum


@dataclass(frozen=True)
class HostParameters:
    """Parameters in host memory: ``offload_param``.

    Attributes:
        pinned: whether the memory is pinned.
        cache: bytes of slices that each device keeps as well (``paro_parameter_cache_bytes``).
    """

    pinned: bool = True
    cache: float = 0.0


@dataclass(frozen=True)
class Copies:
    """Bytes that one rank copies between host and device.

    Attributes:
        use: bytes to the device, each time that all parameters are gathered.
        up, down: bytes to the device before updates are sent, and to the host afterwards.
        cached: bytes that are always on the device.
        windows: bytes on the device while updates are sent.
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
        return Copies(use=use, up=up, down=down, cached=cached, windows=windows, in_step=bool(in_step))

    @classmethod
    def for_strategy(
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
        """Return the copies of a strategy; see Note [Cost of parameters in host memory].

        Args:
            host: settings of parameters in host memory; None if they are on the device.
            strategy: the strategy; with p = N parameters are on the device.
            sizes: ranks and groups.
            states: states of these parameters, before any sharding.
            few_bits: whether updates are quantized.
            offloaded_optimizer: whether optimizer states are on the host, too.
            window: bytes of a bucket of unsharded parameters.
        """
        if host is None or strategy.p == Placement.N:
            return cls()
        shard, updated_shard = states.parameters / sizes.shards(strategy.p), states.updated / sizes.shards(strategy.os)
        # DeepSpeed itself copies the updated shard to the host, within the step.
        if strategy.p == strategy.os or sizes.groups == 1:
            return cls(use=shard, down=0.0 if offloaded_optimizer else updated_shard, in_step=True)
        updated, cached = states.updated / sizes.shards(strategy.p), min(host.cache, shard)
        return cls(
            use=shard - cached,
            up=(updated if few_bits else 0.0) + (updated_shard if offloaded_optimizer else 0.0),
            down=updated,
            cached=cached,
            windows=min(2 * window / sizes.shards(strategy.p), updated),
        )


@dataclass(frozen=True)
class Part:
    """Parameters with costs of their own: modules with another p, or the experts of one expert-parallel size.

    Attributes:
        size: number of neighboring ranks that together have all of them: 1, or the expert-parallel size.
        states, held, fetches, matrices, shared: as in ``Model``, for those that one rank has.
    """

    size: int
    states: ModelStates
    held: ModelStates | None = None
    fetches: int = 1
    matrices: float = 0.0
    shared: float = 0.0


@dataclass(frozen=True)
class Model:
    """The model to train.

    Attributes:
        states: bytes of all dense parameters, gradients and states, as communicated.
        gradient_bytes: bytes of one gradient, as communicated.
        accumulation: micro-steps per step.
        compute: seconds of forward and backward of a micro-step.
        fetches: messages that gather all parameters: one for each unit, and for each other module with its own.
        largest_layer: bytes of the largest module's own parameters, or of the largest unit and its gradients.
        shared: bytes of parameters that further modules gather again, as a head that is tied to an embedding.
        without_units: ``fetches`` and ``largest_layer`` of plain ZeRO-3; None if they are the same.
        bucket: elements of a bucket of gradients.
        held: bytes on the device, if they differ from ``states``: offloaded states take none, and gradients may be
            summed in another dtype.
        regathered: whether sharded parameters are gathered again for backward, rather than kept since forward.
        streams: whether transfers have their own streams and overlap with compute; on a host, hops inside a group are
            copies by the cores that compute.
        overlap: ``overlap_comm``; None for its default, which is true except for p = N on a host.
        overlap_updates: ``paro_overlap_updates``: with p = N, updated parameters are gathered in the next forward.
        matrices: bytes of the dense matrices that Muon needs unsharded, as communicated.
        orthogonalizing: seconds in which one rank would orthogonalize all of its matrices, experts' included.
        experts: experts of expert parallelism, each size a family with fewer data-parallel ranks.
        placed: dense parameters with a coarser p than the strategy's, by this p (``paro_modules``).
        placement: p of all parameters, if it is not the strategy's.
        host: settings of sharded parameters in host memory; None if they are on the device.
        ordered: hops with ordered sums of gradients (``paro_reduce``), of "intra" and "inter".
    """

    states: ModelStates
    gradient_bytes: int = 2
    accumulation: int = 1
    compute: float = 0.0
    fetches: int = 1
    largest_layer: float = 0.0
    shared: float = 0.0
    without_units: tuple[int, float] | None = None
    bucket: int = BUCKET
    held: ModelStates | None = None
    regathered: bool = True
    streams: bool = True
    overlap: bool | None = None
    overlap_updates: bool = False
    matrices: float = 0.0
    orthogonalizing: float = 0.0
    experts: tuple[Part, ...] = ()
    placed: Mapping[Placement, Part] = field(default_factory=dict)
    placement: Placement | None = None
    host: HostParameters | None = None
    ordered: tuple[str, ...] = ()

    @classmethod
    def of_size(
        cls,
        parameters: int,
        trainable: int | None = None,
        *,
        width: int = 2,
        gradient_width: int | None = None,
        experts: int = 0,
        expert_parallel: int = 1,
        muon: bool = False,
        largest_layer: int = 0,
    ) -> "Model":
        """Return a model for which only sizes are known.

        Args:
            parameters: number of parameters, experts' included.
            trainable: number of trained dense parameters; None for all.
            width: bytes of a parameter.
            gradient_width: bytes of a gradient, as communicated; None for those of a parameter.
            experts: number of parameters in experts.
            expert_parallel: expert-parallel size: ranks that together have all experts.
            muon: whether Muon trains all parameters, rather than Adam.
            largest_layer: number of parameters in the largest module.
        """
        gradient_width = gradient_width or width
        optimizer_bytes = OPTIMIZER_BYTES["muon" if muon else "adam"]
        each = {"parameter_bytes": width, "gradient_bytes": gradient_width, "optimizer_bytes": optimizer_bytes}
        dense, of_rank = parameters - experts, experts // expert_parallel
        states, expert_states = ModelStates.of(dense, trainable, **each), ModelStates.of(of_rank, **each)
        trained = round((states.gradients + expert_states.gradients) / gradient_width)
        family = Part(
            expert_parallel, expert_states, None, max(1, of_rank // FETCHED), expert_states.gradients if muon else 0.0
        )
        return cls(
            states,
            gradient_width,
            fetches=max(1, dense // FETCHED),
            largest_layer=float(largest_layer * width),
            bucket=full_bucket(BUCKET, trained),
            matrices=states.gradients if muon else 0.0,
            experts=(family,) if experts else (),
        )

    def families(self, sizes: GroupSizes, p: Placement = Placement.N) -> list[tuple[GroupSizes, "Model"]]:
        """Return each family of parameters as a model, with its group sizes.

        The first are dense parameters, then experts, and those with a coarser placement than ``p``.
        """
        rest, families = self, [(sizes.of_experts(part.size), self._only(part)) for part in self.experts]
        for placement, part in self.placed.items():
            if placement < p:
                rest = replace(
                    rest,
                    states=rest.states - part.states,
                    held=None if rest.held is None or part.held is None else rest.held - part.held,
                    fetches=max(1, rest.fetches - part.fetches),
                    matrices=rest.matrices - part.matrices,
                    shared=rest.shared - part.shared,
                )
                again = 0.0 if placement == Placement.N else part.shared
                families.append((sizes, replace(self._only(part), placement=placement, shared=again)))
        return [(sizes, rest), *families]

    @property
    def is_whole(self) -> bool:
        """Whether all parameters stay whole on every rank."""
        return self.placement == Placement.N

    def under(self, strategy: Strategy) -> Strategy:
        """Return a strategy with the placement of this family, for phases and memory; whole ones also have shards."""
        return replace(strategy, p=Placement.I) if self.placement == Placement.I else strategy

    def _only(self, part: Part) -> "Model":
        """Return a part as a model."""
        return replace(
            self,
            states=part.states,
            held=part.held,
            fetches=part.fetches,
            largest_layer=0.0,
            shared=0.0,
            without_units=None,
            matrices=part.matrices,
            experts=(),
            placed={},
        )

    def as_plain(self, strategy: Strategy, bucket: int) -> "Model":
        """Return the model under the plain stage that equals a strategy: without units or ordered sums."""
        plain = replace(self, bucket=bucket, without_units=None, ordered=(), placed={})
        if strategy.p == Placement.N or self.without_units is None:
            return plain
        fetches, largest_layer = self.without_units
        return replace(plain, fetches=fetches, largest_layer=largest_layer)

    @property
    def all_matrices(self) -> float:
        """Return the bytes of a rank's matrices, experts' included."""
        return self.matrices + sum(family.matrices for family in self.experts)

    @property
    def trainable(self) -> float:
        """Return the number of trained dense parameters."""
        return self.states.gradients / self.gradient_bytes

    @property
    def updated_bytes(self) -> float:
        """Return the bytes of one updated parameter."""
        return self.states.updated / self.trainable if self.trainable else 1.0

    @property
    def layers(self) -> int:
        """Return the number of layers in the closed form."""
        return max(1, min(self.fetches, LAYERS))

    @property
    def gathers(self) -> int:
        """Return how often sharded parameters are gathered in a micro-step."""
        return 2 if self.regathered else 1

    @property
    def sent(self) -> ModelStates:
        """Return the states as communicated: shared parameters count once for each module that gathers them."""
        again = self.shared if self.regathered else 0.0
        return replace(self.states, parameters=self.states.parameters + again)

    def times(self, phase: Phase) -> int:
        """Return how often a phase runs in a step."""
        is_kept = phase.each_micro_step == 2 and not self.regathered
        return phase.times(self.accumulation) // (2 if is_kept else 1)

    @property
    def buckets(self) -> int:
        """Return how many buckets the gradients fill."""
        return max(1, round(self.trainable / self.bucket))

    def overlaps(self, strategy: Strategy) -> Overlap:
        """Return which communication overlaps with compute."""
        sharded = strategy.p != Placement.N
        gradients = sharded or self.streams if self.overlap is None else self.overlap
        count_copies = self.streams and (self.host is None or self.host.pinned)
        return Overlap(gradients, updates=sharded or self.overlap_updates, within=self.streams, copies=count_copies)


def count_copies(strategy: Strategy, families: Sequence[tuple[GroupSizes, Model]], compression: Compression) -> Copies:
    """Return the copies between host and device of all families; only the first family has the cache."""
    total = Copies()
    for number, (ranks, family) in enumerate(families):
        host = family.host if family.host is None or not number else replace(family.host, cache=0.0)
        copies = Copies.for_strategy(
            host,
            family.under(strategy),
            ranks,
            family.states,
            few_bits=compression.updates is not None,
            offloaded_optimizer=not (family.held or family.states).optimizer,
            window=family.bucket * family.updated_bytes,
        )
        total += replace(copies, use=0.0) if family.is_whole else copies
    return total


def held_bytes(strategy: Strategy, families: Sequence[tuple[GroupSizes, Model]]) -> tuple[StateBytes, float]:
    """Return the bytes of each state on a rank's device, and of all states in its host memory."""

    def held(family: Model) -> ModelStates:
        states = family.held or family.states  # unsharded parameters are not offloaded
        return replace(states, parameters=family.states.parameters) if strategy.p == Placement.N else states

    on_device = _total([family.under(strategy).memory(ranks, held(family)) for ranks, family in families])
    total = _total([family.under(strategy).memory(ranks, family.states) for ranks, family in families])
    in_host = (total.parameters - on_device.parameters) + (total.optimizer - on_device.optimizer)
    whole = sum(family.states.parameters for _, family in families if family.is_whole)  # in addition to shards
    return replace(on_device, parameters=on_device.parameters + whole), in_host


def _total(parts: Sequence[StateBytes]) -> StateBytes:
    return StateBytes(*map(sum, zip(*map(astuple, parts), strict=True)))


def transient_bytes(strategy: Strategy, sizes: GroupSizes, model: Model, compression: Compression) -> float:
    """Return the other bytes that a step holds for a family; see ``Prediction.transient``."""
    trainable, states = model.trainable, model.held or model.states
    total = 0.0
    if states.optimizer:  # not both: Muon's new momentum is committed or dropped before gradients are cast to fp32
        elements = trainable if states.gradients < 4 * trainable else model.matrices / model.gradient_bytes
        total += 4 * elements / sizes.shards(strategy.os)
    if model.is_whole:
        total += model.states.updated if strategy.g != Placement.N else 0.0  # full gradients, until a backward ends
    elif strategy.p != Placement.N:
        total += model.largest_layer if model.regathered else model.states.parameters
    total += _received_parts(strategy, sizes, model, "inter" in model.ordered and compression.loco is None)
    return total + 2 * compression.error_bytes(strategy, sizes, trainable)  # before and after the step


def _received_parts(strategy: Strategy, sizes: GroupSizes, model: Model, between_groups: bool) -> float:
    """Return the bytes that ordered sums receive from all ranks before they are summed, at most.

    Within a group a transfer receives as many as in a bucket, between groups as many as in the part of it for one rank
    of a group. At the boundary, windows are parts of stripes, which are as large as buckets. With overlap, several
    transfers are in flight.
    """
    bucket = min(model.bucket, model.trainable)
    elements = bucket if "intra" in model.ordered and sizes.group_size > 1 else 0.0
    elements += bucket / sizes.group_size if between_groups and sizes.groups > 1 else 0.0
    return (IN_FLIGHT if model.overlaps(strategy).gradients else 1) * elements * model.gradient_bytes
