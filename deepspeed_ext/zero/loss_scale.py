# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The loss scale of an optimizer: DeepSpeed's, times that of torch's scaler under ``torch.autocast``."""

from typing import Any, Protocol

from deepspeed_ext.comm.hops import GradientScale


class ScaledOptimizer(Protocol):
    """An optimizer of DeepSpeed."""

    loss_scale: float  # factor of the loss in the next backward
    torch_autocast_gradscaler: Any  # ``torch.amp.GradScaler``; None without fp16 autocast


class LossScale(GradientScale):
    """The factor of this step's gradients. DeepSpeed may change its scale within the step, for the next backward."""

    def __init__(self, optimizer: ScaledOptimizer) -> None:
        self._optimizer = optimizer
        self._step_scale: float | None = None  # DeepSpeed's scale when the running step began; None outside of steps
        self._autocast_scale: float | None = None  # torch's scale in this step, once it has been read

    @property
    def stepping(self) -> bool:
        """Whether a step is running."""
        return self._step_scale is not None

    def begin_step(self) -> None:
        """Record DeepSpeed's scale for this step."""
        self._step_scale = float(self._optimizer.loss_scale)

    def end_step(self) -> None:
        """Use DeepSpeed's current scale again: the step has ended, or failed."""
        self._step_scale = None

    def refresh(self) -> None:
        """Read torch's scale after a step, if it is used: the host waits for the device here, not for each message."""
        if self._autocast_scale is not None:
            self._autocast_scale = None
            self.value()

    def value(self) -> float:
        """Return the factor by which gradients of this step are multiplied."""
        if self._autocast_scale is None:
            scaler = self._optimizer.torch_autocast_gradscaler
            self._autocast_scale = float(scaler.get_scale()) if scaler else 1.0
        return self._deepspeed_scale() * self._autocast_scale

    def _deepspeed_scale(self) -> float:
        return float(self._optimizer.loss_scale) if self._step_scale is None else self._step_scale

    def update_factor(self, number: int, unscaled: set[int] | None) -> float:
        """Return the factor of an update that replaces the gradient of a flat shard.

        Args:
            number: number of the flat shard.
            unscaled: DeepSpeed's record of shards whose updates it multiplies by its loss scale before it divides by
                it; the shard is added. None with optimizer offload, where DeepSpeed does not multiply updates.
        """
        if unscaled is None:
            return self.value()
        unscaled.add(number)
        return self.value() / self._deepspeed_scale()
