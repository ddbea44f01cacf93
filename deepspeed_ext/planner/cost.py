# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What a step costs under a strategy. Pure.

Note [Cost model]
    seconds of a step = s * compute  +  sum over phases of times * (messages * latency + bytes / bandwidth)  +  update

    after the guideline of PaRO (arXiv:2310.06003: 1/T with T the sum of the times of its four moves), with latencies
    and the two terms that it leaves out. Nothing is taken to overlap: where gathers and reductions hide behind compute
    the step is faster by at most the compute time, for all strategies that do so alike. Parameters are gathered
    module by module, and kept or not as a whole; what is small and stays, and modules that are fetched together, are
    not known here. It ranks strategies; it does not promise their times.

    An Adam update reads and writes its 12 bytes a parameter (master copy and two moments in fp32), reads the gradient
    and writes the parameter: 2.5 times the bytes of its states, in the rank's memory.
"""

from dataclasses import asdict, dataclass
from typing import Any

from deepspeed_ext.loco.settings import LocoSettings
from deepspeed_ext.planner.rates import Rates
from deepspeed_ext.strategy import Direction, GroupSizes, ModelStates, Phase, Placement, StateBytes, Strategy, Volume

UPDATE_TOUCHES = 2.5  # bytes that an update reads and writes, for each byte of the optimizer's states
BUCKET = 500_000_000  # elements; DeepSpeed's default reduce_bucket_size and allgather_bucket_size


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        states: bytes of the whole, as they are moved.
        gradient_bytes: of one gradient, as it is moved.
        accumulation: micro-steps of a step.
        compute: seconds of forward and backward of a micro-step.
        fetches: messages in which all parameters are gathered: modules that have some.
        largest_layer: bytes of parameters that a module has by itself, the most that is gathered at once for it.
        bucket: elements that are reduced at once.
        held: bytes of the whole, as they are held on the device, if that differs: nothing of what is offloaded,
            gradients that are summed in another dtype.
        regathered: whether sharded parameters are gathered for forward and again for backward, or kept between.
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

    def times(self, phase: Phase) -> int:
        """Return how often a phase runs in a step."""
        kept = phase.each_micro_step == 2 and not self.regathered
        return phase.times(self.accumulation) // (2 if kept else 1)

    def messages(self, phase: Phase) -> int:
        """Return in how many messages a phase goes, each time."""
        if phase.kind == Direction.GATHER and phase.each_micro_step:
            return self.fetches
        return max(1, round(self.states.gradients / self.gradient_bytes / self.bucket))


@dataclass(frozen=True)
class Prediction:
    """A strategy, and what it costs each rank.

    Attributes:
        strategy: the three letters.
        loco: whether gradients cross between groups in few bits.
        memory: bytes of model states.
        transient: bytes of what else a step holds: the fp32 gradient that the optimizer updates from, the largest
            layer gathered, LoCo's errors, before and after (Note [Errors of buckets]). No activations, no buckets.
        host: bytes of what is offloaded.
        volume: bytes received in a step.
        seconds: of a step, by part: compute, within groups, between groups, update.
    """

    strategy: str
    loco: bool
    memory: StateBytes
    transient: float
    host: float
    volume: Volume
    seconds: dict[str, float]

    @property
    def name(self) -> str:
        return f"{self.strategy} + LoCo" if self.loco else self.strategy

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
    strategy: Strategy, sizes: GroupSizes, model: Model, rates: Rates, loco: LocoSettings | None = None
) -> Prediction:
    """Predict what a strategy costs; see Note [Cost model].

    LoCo shrinks what reductions send between groups; gathers are whole, also those at the boundary where the
    optimizer's states are coarser than G.
    """
    shrunk = 1.0 if loco is None else loco.wire_bits / (8 * model.gradient_bytes)
    total, within, between = Volume(), 0.0, 0.0
    for phase in strategy.phases(sizes, model.states):
        inter = phase.volume.inter * (shrunk if phase.kind == Direction.REDUCE else 1.0)
        volume, times = Volume(phase.volume.intra, inter), model.times(phase)
        hops, messages = rates.of(phase.kind), model.messages(phase)
        total += volume * times
        within += times * hops.intra.seconds(volume.intra, messages)
        between += times * hops.inter.seconds(volume.inter, messages)
    memory, whole = strategy.memory(sizes, model.held or model.states), strategy.memory(sizes, model.states)
    host = whole.parameters - memory.parameters + whole.optimizer - memory.optimizer
    seconds = {
        "compute": model.compute * model.accumulation,
        "within": within,
        "between": between,
        "update": UPDATE_TOUCHES * memory.optimizer / rates.memory,
    }
    transient = _transient(strategy, sizes, model, loco)
    return Prediction(strategy.name, loco is not None, memory, transient, host, total, seconds)


def _transient(strategy: Strategy, sizes: GroupSizes, model: Model, loco: LocoSettings | None) -> float:
    trainable = model.states.gradients / model.gradient_bytes
    held = model.held or model.states
    total = 0.0
    if held.gradients < 4 * trainable and held.optimizer:
        total += 4 * trainable / sizes.shards(strategy.os)
    if strategy.p != Placement.N:
        total += model.largest_layer if model.regathered else model.states.parameters
    if loco is not None:
        total += 2 * loco.kept_bits / 8 * trainable / sizes.shards(Placement.I)
    return total
