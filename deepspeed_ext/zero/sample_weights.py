# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Weights of micro-batches, with which a step's gradient is the mean over all samples or tokens.

Note [Weights of micro-batches]
    DeepSpeed divides each loss by the rank's number of micro-batches in a step, and gradients by the number of ranks.
    If ranks have equal numbers of micro-batches, the result is the mean. Otherwise losses are multiplied by weights,
    and gradients by a factor at the accumulation boundary, before norms, clipping, and overflow checks:

    - Groups with different numbers (``paro_micro_batches``): the losses of a group are multiplied by its *share*,
      its number of micro-batches over the mean of all groups. The factor is 1.
    - Ranks without a batch (``last_batches.py``) add zeros. If a share A of a step's micro-batches is absent, the
      factor is 1 / (1 - A). It is known before the last backward, so the errors of lossy reductions, which send
      gradients before the factor, are kept in units of gradients after it. With g = G, LoCo also sends gradients in
      earlier micro-batches, when only a part of A may be known: an error that is carried from one of them into the
      next then shrinks with 1 - A.
    - Tokens (``paro_weights``): losses are also multiplied by their numbers of tokens. The factor is n times the mean
      number of micro-batches over the total number of tokens, which is reduced over all ranks at the boundary.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Protocol

import torch
from deepspeed import comm as dist
from deepspeed.runtime.utils import maybe_loss_for_backward
from torch import Tensor

from deepspeed_ext.comm.agreement import all_reduce, run_on_all_or_raise
from deepspeed_ext.comm.hops import GradientScale
from deepspeed_ext.comm.process_groups import Topology
from deepspeed_ext.config.keys import MEASURED, MICRO_BATCHES, SECTION, WEIGHTS, configured_value
from deepspeed_ext.deepspeed_types import Config, Engine


class WeightedOptimizer(Protocol):
    """The optimizer whose gradients are weighted."""

    @property
    def gradient_scale(self) -> GradientScale: ...
    @property
    def topology(self) -> Topology: ...

    def owned_gradients(self) -> list[Tensor]: ...


class SampleWeights(GradientScale):
    """Weights of this rank's micro-batches. See Note [Weights of micro-batches].

    Attributes:
        absent: share of this step's micro-batches, over all ranks, that are absent so far.
        share: this rank's number of micro-batches over the mean of all ranks.
        are_used: whether losses have weights; the same on all ranks.
        expected_tokens: with weights by tokens, the total over all ranks if each micro-batch had one token; else 0.
    """

    def __init__(self, optimizer: WeightedOptimizer) -> None:
        self._optimizer = optimizer
        self.share = 1.0
        self.are_used = False
        self.expected_tokens = 0.0
        self.reset()

    def reset(self) -> None:
        """Forget this accumulation: its gradients will not be applied."""
        self.absent: Fraction | int = 0
        self._tokens: Tensor | None = None  # of the next loss
        self.finish_step()

    def finish_step(self) -> None:
        """Record that the gradients of a step have been applied or dropped."""
        self._total: float | Tensor = 0.0  # this rank's tokens in this accumulation
        self._has_factor = False  # whether gradients have been multiplied by the factor

    def value(self) -> float:
        """Return the factor by which the loss scale and absent micro-batches multiply gradients before a step."""
        scale = self._optimizer.gradient_scale.value()
        return scale * float(1 - self.absent) if self.absent else scale

    def set_tokens(self, tokens: float | Tensor) -> None:
        """Set the number of tokens of the next loss."""
        self._tokens = torch.as_tensor(tokens).detach().to(torch.float64, copy=True)

    def weigh(self, loss: Any) -> Any:
        """Return a loss times its weight; anything else unchanged.

        Raises:
            RuntimeError: its number of tokens has not been set.
        """
        if not self.are_used or not maybe_loss_for_backward(loss):
            return loss
        if not self.expected_tokens:
            return loss * self.share
        if self._tokens is None:
            raise RuntimeError(
                f'{SECTION}.{WEIGHTS} is "tokens", so the number of tokens of each loss is needed: call '
                f"deepspeed_ext.set_tokens(engine, tokens) before each backward."
            )
        tokens, self._tokens = self._tokens, None
        self._total = self._total + tokens
        return loss * (self.share * tokens).to(loss.device, torch.float32)

    def complete_gradients(self) -> None:
        """Multiply the optimizer's shard by the factor of this step. Collective with weights by tokens.

        Raises:
            RuntimeError: after another backward in the same step, whose gradients have the factor already.
        """
        if self._has_factor:
            raise RuntimeError(
                f"{SECTION}.{WEIGHTS} and last_batches need one engine.backward per engine.step: add up the losses."
            )
        self._has_factor = bool(self.expected_tokens or self.absent)
        factor = self._factor()
        if factor != 1:
            torch._foreach_mul_(self._optimizer.owned_gradients(), factor)

    def _factor(self) -> float:
        absent, self.absent = self.absent, 0
        if not self.expected_tokens:
            return float(1 / (1 - absent))
        own = torch.as_tensor(self._total, dtype=torch.float64)
        total = float(all_reduce(own, dist.ReduceOp.SUM, self._optimizer.topology.world))
        return self.expected_tokens / (total or 1.0)


def set_tokens(engine: Any, tokens: float | Tensor) -> None:
    """Set the number of tokens over which the next loss is a mean, with ``zero_optimization.paro_weights`` "tokens".

    Args:
        engine: DeepSpeed's engine; without that key, the call has no effect.
        tokens: the number, before each backward; a tensor on the device does not make the host wait.
    """
    weights = getattr(engine.optimizer, "sample_weights", None)
    if isinstance(weights, SampleWeights) and weights.expected_tokens:
        weights.set_tokens(tokens)


def add_weights(weights: SampleWeights, engine: Engine, topology: Topology) -> None:
    """Set the weights that a configuration asks for, after ``set_micro_batches`` and when numbers change."""
    config = engine._config
    numbers = config.zero_config.paro_micro_batches
    number = config.gradient_accumulation_steps
    mean = Fraction(sum(numbers), len(numbers)) if isinstance(numbers, list) else Fraction(number)
    weights.share = float(number / mean)
    weights.are_used = numbers is not None or config.zero_config.paro_weights is not None
    if config.zero_config.paro_weights is not None:
        weights.expected_tokens = float(topology.sizes.ranks * mean)


def set_micro_batches(engine: Engine, topology: Topology) -> None:
    """Set the number of micro-batches of this rank's group, and the batch size, in an engine's configuration.
    Collective if groups have different numbers.

    Raises:
        ValueError: on all ranks, if there is not one number for each group, or another key contradicts the numbers.
    """
    config = engine._config
    numbers = config.zero_config.paro_micro_batches
    if numbers is None:
        return
    groups, group = topology.sizes.groups, topology.rank // topology.sizes.group_size
    engine.set_train_batch_size = engine.set_train_micro_batch_size = _refuse_another_size
    if isinstance(numbers, list) and len(numbers) != groups:
        raise ValueError(
            f"{SECTION}.{MICRO_BATCHES} must have one number for each group: {topology.sizes.ranks} data-parallel "
            f"ranks in groups of {topology.sizes.group_size} are {groups} groups, got {numbers}."
        )
    if not isinstance(numbers, list):  # the mean number until the pace of groups has been measured
        return
    total = config.train_micro_batch_size_per_gpu * sum(numbers) * (config.world_size // groups)
    if configured_value(config._param_dict, MICRO_BATCHES) != MEASURED:
        # On all ranks, because frameworks may set a rank's own number.
        run_on_all_or_raise(lambda: _refuse_other_numbers(config, numbers, group, total), MICRO_BATCHES, ValueError)
    config.gradient_accumulation_steps, config.train_batch_size = numbers[group], total
    engine.tput_timer.batch_size = total


def _refuse_other_numbers(config: Config, numbers: Sequence[int], group: int, total: int) -> None:
    number, size = (config._param_dict.get(key) for key in ("gradient_accumulation_steps", "train_batch_size"))
    given, expected = ("gradient_accumulation_steps", number), numbers[group]
    if number in (None, "auto"):  # otherwise DeepSpeed compares the batch size with this number
        given, expected = ("train_batch_size", size), total
    if given[1] not in (None, "auto", expected):
        raise ValueError(
            f"{SECTION}.{MICRO_BATCHES} {list(numbers)} gives {given[0]} {expected} to ranks of group {group}, got "
            f"{given[1]!r}. Remove {given[0]}, or set it to that number."
        )


def _refuse_another_size(size: int) -> None:
    raise ValueError(f"{SECTION}.{MICRO_BATCHES} sets the batch size, which cannot be changed to {size}.")
