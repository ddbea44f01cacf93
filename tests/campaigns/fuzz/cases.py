# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A case of the fuzzer: a model, a configuration, and events between steps. Plain values, no torch. The ``repr`` of a
case, without default values, is the text from which it can be run again."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, NamedTuple

ORACLE = "Now stock DeepSpeed trains."  # what a rank logs before that


class Plain:
    """Prints only the fields that differ from the defaults."""

    def __repr__(self) -> str:
        provided = []
        for item in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            default = item.default_factory() if callable(item.default_factory) else item.default
            if value != default:
                provided.append(f"{item.name}={value!r}")
        return f"{type(self).__name__}({', '.join(provided)})"


def is_exact(zero: dict[str, Any]) -> bool:
    """Whether updates are sent without loss, by the keys of zero_optimization."""
    return bool((zero.get("paro_quantized_updates") or {}).get("bits") == "exact")


def is_lossy(zero: dict[str, Any]) -> bool:
    """Whether gradients or updates are sent in few bits, by the keys of zero_optimization."""
    updates = "paro_quantized_updates" in zero and not is_exact(zero)
    return updates or any(key in zero for key in ("zeropp_loco_param", "zero_quantized_gradients"))


@dataclass(frozen=True, repr=False)
class Block(Plain):
    """A part of a model."""

    # "linear"; "norm"; "gain", a parameter of one element; "again", a layer that is applied twice; "tied", two layers
    # with one weight and another layer between them; "lent", a layer and a module that uses its weight without owning
    # it; "experts", a leaf module with three parts, and each call uses one or two of them; "unit", a mixture of many
    # small parameters; "packed", a router and five experts in 3-D parameters, and each call uses some of them.
    kind: str = "linear"
    width: int = 7  # width of the output of "linear", and of the inside of the others
    bias: bool = True  # whether a linear layer has one
    frozen: bool = False  # whether its parameters have no gradients
    recomputed: bool | None = None  # None, or use_reentrant of torch's activation checkpointing


class Event(NamedTuple):
    """An event between two steps; see ``events.py``."""

    name: str
    value: Any = None


@dataclass(frozen=True, repr=False)
class Step(Plain):
    """An optimizer step."""

    before: tuple[Event, ...] = ()
    micro_steps: int = 0  # their number; 0: the number in the configuration
    # (micro-step, block): blocks that this micro-step leaves out, on all ranks.
    skipped: tuple[tuple[int, int], ...] = ()
    overflow: tuple[tuple[int, int], ...] = ()  # (micro-step, rank) where the loss becomes infinite
    twice: tuple[int, ...] = ()  # micro-steps with a backward in two parts


@dataclass(frozen=True, repr=False)
class Case(Plain):
    """A run of ours, compared with stock DeepSpeed.

    Attributes:
        kind: its kind, for counting.
        world: ranks.
        zero: keys of zero_optimization, a strategy's among them.
        config: further keys of the configuration.
        inputs, outputs, blocks, unused, empty: the model; elements of a parameter that nothing uses (0 for none), and
            whether there is a parameter without elements.
        routed: whether each rank uses other experts.
        network: name of a class of ``tests.harness.networks`` in place of blocks.
        steps: optimizer steps.
        streams: whether it is also run on a simulated device with streams.
        reference: whether it is also run without kernels, if data is sent compressed.
        others: as of ``tests.harness.training.Job``.
    """

    kind: str = "replicated"
    world: int = 2
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    inputs: int = 5
    outputs: int = 3
    blocks: tuple[Block, ...] = (Block(),)
    unused: int = 0
    empty: bool = False
    routed: bool = False
    network: str = ""
    dtype: str = "fp32"
    optimizer: str = "SGD"
    accumulation: int = 1
    clipping: float = 0.0
    groups: int = 1
    backward: str = "engine"
    boundary: str = "engine"
    no_sync: bool = False
    tensor_parallel: int = 1
    zero_init: str | None = None
    streams: bool = True
    reference: bool = False
    steps: tuple[Step, ...] = (Step(), Step())

    @property
    def strategy(self) -> str:
        """The three letters; of a stage, those that it amounts to."""
        if "mics_shard_size" in self.zero:
            return "III"
        return str(self.zero.get("paro_strategy") or {0: "NNG", 1: "NNG", 2: "NGG", 3: "GGG"}[self.zero["stage"]])

    @property
    def stage(self) -> int:
        """DeepSpeed's stage that is nearest to the strategy."""
        p, g, _ = self.strategy
        return 3 if p != "N" else 2 if g != "N" else 1

    @property
    def exact(self) -> bool:
        return is_exact(self.zero)

    @property
    def lossy(self) -> bool:
        return is_lossy(self.zero)

    def events(self) -> list[Event]:
        return [event for step in self.steps for event in step.before]


@dataclass(frozen=True, repr=False)
class PipeCase(Plain):
    """A pipeline."""

    kind: str = "pipeline"
    world: int = 4
    strategy: str = "NIG"
    zero: dict[str, Any] = field(default_factory=dict)  # keys of zero_optimization, in addition to the strategy
    pipe: dict[str, Any] = field(default_factory=dict)  # attributes of ``tests.harness.pipelines.Pipe``
    resumed: int = 0  # steps after which training continues in a new engine; 0 for not
