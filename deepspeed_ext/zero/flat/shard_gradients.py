# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of the optimizer's shards with p = N, on the device or, with optimizer offload, in host memory."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup, get_norm_dtype
from torch import Tensor

from deepspeed_ext.zero.context import Context
from deepspeed_ext.zero.flat.buffers import FlatBuffers
from deepspeed_ext.zero.flat.stage12_view import Stage12View
from deepspeed_ext.zero.shards import FlatShard


class HostShard(list[Tensor]):
    """An entry of ``averaged_gradients`` that is in host memory, so that offloading states does not move it."""

    def __init__(self, flat_partition: Tensor) -> None:
        super().__init__()
        self.flat_partition = flat_partition


class ShardGradients:
    """Gradients of the optimizer's shards, a 1D tensor for each parameter group.

    With optimizer offload they are the gradients that the optimizer reads, or other tensors in host memory if the
    optimizer's gradients have a lower precision than accumulation.

    Args:
        context: shared constants.
        optimizer: the optimizer that has the gradients.
        buffers: its flat buffers.
    """

    def __init__(self, context: Context, *, optimizer: Stage12View, buffers: FlatBuffers) -> None:
        self._context, self._optimizer, self._buffers = context, optimizer, buffers

    def gradient_of(self, number: int) -> Tensor:
        """Return the gradient of a shard, 1D; zeros if there was none."""
        gradient: Tensor = self._optimizer._get_compact_grad_partition_buffer(number).flat_partition
        return gradient

    def make_shard(self, number: int) -> Any:
        """Return a zero entry of ``averaged_gradients``, on the host or for a striped buffer."""
        if self._context.offload:
            return self._make_on_host(number)
        buffer, device = self._buffers[number], get_accelerator().current_device_name()
        zeros = torch.zeros(buffer.shard_numel, dtype=self._context.accumulation_dtype, device=device)
        return GradPartitionBufferGroup(buffer.split(zeros), zeros)

    def note_addition(self) -> None:
        """Record an addition to a shard: with offload the host waits for it before it reads gradients."""
        if self._context.offload:
            self._optimizer._record_offload_copy()

    def clear_padding(self) -> None:
        """Set padding to zero if reductions do not keep it zero."""
        for buffer in self._buffers:
            for padding in () if buffer.family.reduce.inter.keeps_zeros else buffer.padding():
                padding.of(self.gradient_of(buffer.number)).zero_()

    # Optimizer offload ################################################################################

    def _make_on_host(self, number: int) -> HostShard:
        shard = self._optimizer_gradient(number)
        if shard.dtype not in (torch.float32, self._context.accumulation_dtype):
            shard = torch.empty_like(shard, dtype=self._context.accumulation_dtype)
        shard.zero_()
        views = {param: shard.narrow(0, start, numel) for param, start, numel in self._positions(number)}
        self._optimizer.accumulated_grads_in_cpu.update(views)
        return HostShard(shard)

    def _optimizer_gradient(self, number: int) -> Tensor:
        """Return the gradient that the optimizer reads, 1D."""
        gradient: Tensor = self._optimizer.single_partition_of_fp32_groups[number].grad
        return gradient.view(-1)

    def _positions(self, number: int) -> Iterator[tuple[int, int, int]]:
        """Yield (id, first element in the shard, elements) of the parameters in a shard."""
        for param in self._optimizer.params_in_partition[number]:
            param_id = self._optimizer.get_param_id(param)
            _, _, start, numel = self._optimizer.grad_position[param_id]
            yield param_id, start, numel

    def pass_to_optimizer(self, shards: Sequence[FlatShard] | None = None) -> None:
        """Pass complete gradients to an offloaded optimizer, and their norms and overflows to DeepSpeed.

        Args:
            shards: shards whose gradients have been replaced by updates, with new norms; None for all shards.
        """
        for number in range(len(self._buffers)) if shards is None else [shard.number for shard in shards]:
            self._optimizer.norm_for_param_grads.update(self._norms(number))
            gradient, shard = self._optimizer_gradient(number), self.gradient_of(number)
            if gradient.data_ptr() != shard.data_ptr():
                gradient.copy_(shard)

    def _norms(self, number: int) -> dict[int, Tensor]:
        """Return the norms of all gradients, and check them for overflows. Other ranks may have used a parameter that
        this rank has not."""
        norms, device, shard = {}, get_accelerator().current_device_name(), self.gradient_of(number)
        for param, start, numel in self._positions(number):
            parts = []
            for part in shard.narrow(0, start, numel).split(self._context.reduce_bucket):
                on_device = part.to(device)
                self._optimizer.update_offload_overflow_tracker(on_device)
                parts.append(on_device.to(get_norm_dtype()).norm(2))
            norms[param] = torch.stack(parts).norm(2)
        return norms
