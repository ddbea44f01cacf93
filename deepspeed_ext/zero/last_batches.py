# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Ranks that run out of batches before others, and take part in the others' steps.

Note [Shadow micro-steps]
    In the context of ``last_batches``, ranks count at the start of each micro-step how many ranks of each group have
    a batch. A rank without one runs a *shadow* micro-step, which adds zeros to all gradients:

    - With p = N, a backward without gradients, since buckets are fixed: Note [Fixed buckets] in ``flat/buckets.py``.
    - Ranks that gather parameters together must run the same modules. So with p = I or G a shadow repeats the forwards
      of the rank's last micro-step, and a backward of zeros through the outputs that had gradients. It also runs a
      backward without gradients if no rank that gathers with it has a batch.

    The factor for absent micro-batches is in Note [Weights of micro-batches] of ``sample_weights.py``.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.utils import _pytree as pytree

from deepspeed_ext.comm.agreement import all_reduce
from deepspeed_ext.config.keys import MICRO_BATCHES, OUTER, SECTION, STRATEGY
from deepspeed_ext.overrides import replace_attributes
from deepspeed_ext.strategy import Placement
from deepspeed_ext.zero.optimizer import ParoOptimizer
from deepspeed_ext.zero.updates_in_flight import wait_for_updates


@contextmanager
def last_batches(engine: Any) -> Iterator[None]:
    """Train in this context with ranks that have different numbers of batches: no rank waits forever, and each step's
    gradient is the mean over the micro-batches that exist.

    At its end, a rank takes part in the steps of the ranks that still have batches. Collective over all ranks. An
    exception ends the context at once.

    Args:
        engine: DeepSpeed's engine with a strategy, used as usual: a forward, ``engine.backward``, and ``engine.step``
            for each batch.

    Raises:
        ValueError: the engine does not support it.
        RuntimeError: on all ranks, if a rank has not had any batch but gathers parameters with ranks that have one; or
            if ranks save after others have run out of batches. On a rank that evaluates with p = I or G, or whose
            micro-batch is not a forward in training mode, one ``engine.backward``, and ``engine.step``.
    """
    _refuse_unsupported(engine)
    batches = _LastBatches(engine)
    names = "forward", "backward", "step", "save_checkpoint"
    with replace_attributes(engine, **{name: getattr(batches, name) for name in names}):
        try:
            yield
            batches.end()
        except BaseException:
            engine.optimizer.sample_weights.reset()
            raise


def _refuse_unsupported(engine: Any) -> None:
    """Refuse engines in which a rank cannot know what others do in a micro-step; the same on all ranks.

    Raises:
        ValueError: the engine is one of them.
    """
    if not isinstance(engine.optimizer, ParoOptimizer):
        raise ValueError(f"last_batches needs {SECTION}.{STRATEGY}, got an engine without a strategy's optimizer.")
    keys = engine._config.zero_config
    unsupported = {
        f"{SECTION}.{MICRO_BATCHES}": keys.paro_micro_batches,
        f"{SECTION}.{OUTER}": keys.paro_outer_optimizer,
        "managed_gradient_accumulation false": not engine.managed_gradient_accumulation(),
        "a pipeline": engine.pipeline_parallelism,
        "a mixture of experts": engine.has_moe_layers,
    }
    for name in (name for name, is_set in unsupported.items() if is_set):
        raise ValueError(f"last_batches cannot be combined with {name}: ranks must run the same micro-batches there.")


@dataclass
class _Forward:
    """A forward of a micro-step: its arguments, without their graphs, and the numbers of its output tensors that had
    gradients."""

    args: Sequence[Any]
    kwargs: dict[str, Any]
    used: set[int] = field(default_factory=set)

    def watch(self, outputs: Any) -> None:
        """Record the outputs that get gradients."""
        for number, tensor in enumerate(_tensors(outputs)):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient, number=number: self.used.add(number))


class _LastBatches:
    """The micro-steps in one context. See Note [Shadow micro-steps]."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._optimizer = engine, engine.optimizer
        self._forward, self._backward = engine.forward, engine.backward
        self._step, self._save = engine.step, engine.save_checkpoint
        self._topology, self._gathers = self._optimizer.topology, self._optimizer.strategy.p != Placement.N
        sizes = self._topology.sizes
        self._group, self._groups = self._topology.rank // sizes.group_size, sizes.groups
        everyone = self._optimizer.strategy.p == Placement.G
        # Groups whose ranks gather parameters together with this rank.
        self._peers = slice(None) if everyone else slice(self._group, self._group + 1)
        self._has_begun = self._has_backward = False  # whether a micro-step has begun, and had its backward
        self._forwards: list[_Forward] = []  # of this micro-step, if they may be repeated
        self._last_forwards: list[_Forward] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward; the first of a micro-step announces it."""
        if not (self._engine.module.training and torch.is_grad_enabled()):
            self._require(
                not self._gathers,
                "a forward without training mode or gradients gathers parameters from ranks that may have run out of "
                "batches: evaluate after the context",
            )
            return self._forward(*args, **kwargs)
        if not self._has_begun:
            self._announce(has_batch=True)
            self._has_begun = True
        if not self._gathers:
            return self._forward(*args, **kwargs)
        self._forwards.append(_Forward(*pytree.tree_map_only(Tensor, _without_graph, (args, kwargs))))
        outputs = self._forward(*args, **kwargs)
        self._forwards[-1].watch(outputs)
        return outputs

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the backward of a micro-step."""
        self._require(self._has_begun, "engine.backward without a forward in training mode")
        self._require(not self._has_backward, "expected one engine.backward per engine.step: add up the losses")
        self._has_backward = True
        return self._backward(*args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """End a micro-step."""
        self._require(self._has_begun, "engine.step without a forward in training mode")
        self._require(self._has_backward, "engine.step without engine.backward")
        result = self._step(*args, **kwargs)
        self._has_begun = self._has_backward = False
        self._last_forwards, self._forwards = self._forwards or self._last_forwards, []
        return result

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Save a checkpoint, in which all ranks take part."""
        self._reduce(True, saves=True)
        return self._save(*args, **kwargs)

    def end(self) -> None:
        """Run shadow micro-steps until no rank has a batch."""
        # Not by a reduction, because the others may be in a backward, in which they would wait forever.
        self._require(not self._has_begun, "the context has ended after a forward without engine.step")
        modes = [(module, module.training) for module in self._engine.module.modules()]
        if not self._engine.module.training:
            self._engine.train()
        while any(counts := self._announce(has_batch=False)):
            self._run_shadow(self._gathers and any(counts[self._peers]))
        for module, mode in modes:
            module.training = mode

    @staticmethod
    def _require(condition: bool, problem: str) -> None:
        if not condition:
            raise RuntimeError(f"last_batches: {problem}.")

    # Agreement ########################################################################################

    def _announce(self, has_batch: bool) -> list[int]:
        """Begin a micro-step, and return how many ranks of each group have a batch. Collective."""
        counts = self._reduce(has_batch)
        if any(counts):
            ranks, steps = self._topology.sizes.ranks, self._engine.gradient_accumulation_steps()
            self._optimizer.sample_weights.absent += Fraction(ranks - sum(counts), ranks * steps)
        return counts

    def _reduce(self, has_batch: bool, saves: bool = False) -> list[int]:
        """Return how many ranks of each group have a batch. Collective.

        Args:
            has_batch: whether this rank has one.
            saves: whether it is about to save, instead of beginning a micro-step.

        Raises:
            RuntimeError: on all ranks.
        """
        counts, stuck = [0] * self._groups, [0] * self._groups
        counts[self._group], stuck[self._group] = int(has_batch), int(not has_batch and not self._last_forwards)
        own_boundary = self._engine._is_gradient_accumulation_boundary is not None or self._engine.inside_no_sync_ctxt
        local = torch.tensor([*counts, *stuck, int(own_boundary), int(saves)])
        total = all_reduce(local, dist.ReduceOp.SUM, self._topology.world).tolist()
        counts, stuck = total[: self._groups], total[self._groups : 2 * self._groups]
        is_any_stuck = any(counts) and any(stuck) if self._peers == slice(None) else any(map(min, counts, stuck))
        problems = {
            "a rank without any batch gathers parameters with ranks that have one: give each rank a batch": (
                self._gathers and is_any_stuck
            ),
            "ranks without batches cannot follow engine.set_gradient_accumulation_boundary, no_sync, and "
            "coalesce_grad_reduction": total[-2],
            "some ranks save, but others begin a micro-batch or have run out of batches: save after the context": (
                total[-1] not in (0, self._topology.sizes.ranks)
            ),
        }
        for problem, is_given in problems.items():
            self._require(not is_given, problem)
        return counts

    # Shadow micro-steps ###############################################################################

    def _run_shadow(self, repeats: bool) -> None:
        """Run a micro-step that adds zeros; ``repeats``: whether it repeats the last forwards."""
        with torch.enable_grad():
            loss = self._repeat_forwards() if repeats else None
            if loss is None:
                wait_for_updates()  # a forward would have received them, before gradients on the same communicator
                self._optimizer.clear_backward_seen_flag()  # as a forward does
                loss = torch.zeros((), device=get_accelerator().current_device_name(), requires_grad=True) * 1
                loss.register_hook(lambda gradient: self._engine._backward_prologue())
            self._optimizer.sample_weights.set_tokens(0)
            self._backward(loss)
        self._step()

    def _repeat_forwards(self) -> Tensor | None:
        """Return zero times the outputs that had gradients."""
        outputs = [
            tensor
            for forward in self._last_forwards
            for number, tensor in enumerate(_tensors(self._forward(*forward.args, **forward.kwargs)))
            if number in forward.used
        ]
        return sum((tensor.sum().float() for tensor in outputs), torch.zeros(())) * 0.0 if outputs else None


def _without_graph(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _tensors(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
