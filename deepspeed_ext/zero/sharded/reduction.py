# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of all families of a stage-3 optimizer: from the parameters' hooks to the shard that a step reads.

With g = N gradients are stored unreduced until the accumulation boundary. Meanwhile a placeholder replaces the shard:
one repeated element, so that DeepSpeed gets tensors of the sizes it expects.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.torch_autocast import sort_dtypes
from torch import Tensor

from deepspeed_ext.comm.agreement import all_reduce_max
from deepspeed_ext.deepspeed_types import ZeroParameter
from deepspeed_ext.leaf.gradients import zero_gradients
from deepspeed_ext.strategy import Placement, full_bucket
from deepspeed_ext.zero.context import Context
from deepspeed_ext.zero.families import DENSE, family_of
from deepspeed_ext.zero.micro_steps import MicroSteps
from deepspeed_ext.zero.module_placements import is_whole
from deepspeed_ext.zero.sharded.expert_windows import WindowGradients
from deepspeed_ext.zero.sharded.gradients import ShardedGradients
from deepspeed_ext.zero.sharded.slices import Slices
from deepspeed_ext.zero.sharded.stage3_view import Stage3View


class GradientShards:
    """Tensor in which gradients of all families are accumulated, one part for each family."""

    accumulator: Tensor  # the tensor, 1D
    chunks: dict[int, Tensor]  # DeepSpeed's map from ds_id to the gradient in the optimizer's shard, 1D

    def __init__(self, context: Context, *, gradients: Mapping[str, ShardedGradients], optimizer: Stage3View) -> None:
        self._gradients, self._optimizer, self._dtype = gradients, optimizer, context.accumulation_dtype
        self.chunks = optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        unreduced = context.strategy.g == Placement.N
        if all(family.rows == 1 for family in gradients.values()) and (not unreduced or context.offload):
            # DeepSpeed's buffer has the right size.
            self.set_accumulator(optimizer.grad_partitions_flat_buffer.view(-1))
            return
        if context.pinned:
            get_accelerator().unpin_memory(optimizer.grad_partitions_flat_buffer)
        self.chunks.clear()
        optimizer.grad_partitions_flat_buffer = None  # freed before another buffer is allocated
        if unreduced:
            self.drop()
        else:
            self.allocate()
            optimizer.inf_or_nan_tracker = optimizer.inf_or_nan_tracker.to(get_accelerator().current_device_name())

    @property
    def _numels(self) -> list[int]:
        """Number of elements of each family's part."""
        return [gradients.rows * gradients.numel for gradients in self._gradients.values()]

    def set_accumulator(self, accumulator: Tensor) -> None:
        """Accumulate in this tensor, 1D: all rows, one family after the other."""
        self.accumulator = accumulator
        for gradients, part in zip(self._gradients.values(), accumulator.split(self._numels), strict=True):
            self.chunks.update(gradients.set_accumulator(part))
        # With several families DeepSpeed checks all rows for overflow: a row's overflow appears in their sum as well.
        has_experts = len(self._gradients) > 1
        self._optimizer.grad_partitions_flat_buffer = accumulator if has_experts else self._gradients[DENSE].shard

    def allocate(self) -> None:
        """Accumulate in zeros on the device."""
        device = get_accelerator().current_device_name()
        self.set_accumulator(torch.zeros(sum(self._numels), dtype=self._dtype, device=device))

    def allocate_if_missing(self) -> None:
        """Replace a placeholder by zeros."""
        if self.is_placeholder:
            self.allocate()

    def drop(self) -> None:
        """Replace the tensor by a placeholder: with g = N there is no shard before gradients are reduced."""
        self._optimizer.averaged_gradients = {}  # views would keep the tensor's memory
        device = get_accelerator().current_device_name()
        self.set_accumulator(torch.zeros(1, dtype=self._dtype, device=device).expand(sum(self._numels)))

    @property
    def is_placeholder(self) -> bool:
        """Whether a placeholder replaces the tensor."""
        return any(gradients.is_placeholder for gradients in self._gradients.values())

    @property
    def has_gradients(self) -> bool:
        """Whether the tensor has gradients of this accumulation."""
        return any(gradients.has_gradients for gradients in self._gradients.values())

    def expose_to_step(self) -> None:
        """Make DeepSpeed's step read the gradients in place."""
        self._optimizer.averaged_gradients = {
            number: [self.chunks[param.ds_id] for param in group]
            for number, group in enumerate(self._optimizer.fp16_groups)
        }


class GradientReduction:
    """Reduces gradients from the parameters' hooks to the optimizer's shard.

    Args:
        optimizer: the optimizer, after it has created its sub-groups and buckets.
        slices: shards of the parameters of each family.
    """

    awaits_boundary = False  # whether gradients of a micro-step have not been reduced to the placement of os

    def __init__(
        self, context: Context, optimizer: Stage3View, *, micro_steps: MicroSteps, slices: Mapping[str, Slices]
    ) -> None:
        self._micro_steps = micro_steps
        self._context, self._reductions, self._optimizer = context, context.reductions, optimizer
        self.keeps_full = context.strategy.g == Placement.N
        for bucket in optimizer.ipg_buckets.values() if self.keeps_full else ():
            bucket.buffer = None  # gradients do not go through DeepSpeed's buckets
        numels = [param.ds_numel for group in optimizer.fp16_groups for param in group if param.ds_numel]
        bucket_size = full_bucket(context.reduce_bucket, sum(numels))
        # With more elements, not even the smallest parameter fits into a bucket. DeepSpeed would keep it until a
        # parameter does not fit, which takes as long as the backward of another layer.
        self._full_threshold = max(0, bucket_size - min(numels, default=1))
        self._max_over_ranks = partial(all_reduce_max, group=context.topology.world)
        self.gradients = {  # of each family
            name: ShardedGradients(context, family=name, optimizer=optimizer, slices=slices[name], bucket=bucket_size)
            for name in context.families
        }
        trained = (param for group in optimizer.fp16_groups for param in group)
        self._whole = [] if self.keeps_full else sorted(filter(is_whole, trained), key=lambda param: param.ds_id)
        self.shards = GradientShards(context, gradients=self.gradients, optimizer=optimizer)
        self.windows = WindowGradients(  # packed experts are dense parameters
            context,
            optimizer=optimizer,
            micro_steps=micro_steps,
            gradients=self.gradients[DENSE],
            slices=slices[DENSE],
        )

    def gradients_of(self, param: ZeroParameter) -> ShardedGradients:
        """Return the gradients of a parameter's family."""
        return self.gradients[family_of(param)]

    # In a micro-step: N -> g ##########################################################################

    def keep_full(self, param: ZeroParameter) -> None:
        """Store a gradient unreduced until the boundary, and start to reduce the buckets that it completes."""
        if not getattr(param, "ds_grad_is_ready", True):
            return
        if not (self.shards.has_gradients or self.shards.is_placeholder or self._context.offload):
            self.shards.drop()
        self._optimizer._apply_autoep_folding_tp_correction(param)
        last = self._micro_steps.is_last
        if last:
            self._reductions.wait_for_current()  # packing reads this gradient; a model may use several streams
        gradients = self.gradients_of(param)
        complete = gradients.keep_full_gradient(param, last)
        param.grad = None
        if complete:
            with self._reductions.after_current():
                self.shards.allocate_if_missing()
                gradients.reduce_buckets(complete)

    def reduce_leaf(self, params: Sequence[ZeroParameter]) -> None:
        """Put a leaf module's gradients into buckets, without a copy and a stream switch for each."""
        optimizer = self._optimizer
        if optimizer._coalesce_grad_reduction:
            return
        ready = [param for param in params if getattr(param, "ds_grad_is_ready", True) and not self.waits(param)]
        if self.keeps_full:
            for param in (param for param in ready if param.grad is not None):
                optimizer.reduce_ready_partitions_and_remove_grads(param)
            return
        # All gradients are written before the reduction stream waits for the current one.
        for param in zero_gradients(ready):
            optimizer._apply_autoep_folding_tp_correction(param)
        self._reductions.wait_for_current()
        for param in ready:
            self._fill_bucket(param)

    def _fill_bucket(self, param: ZeroParameter) -> None:
        """Put a gradient into DeepSpeed's bucket of its dtype, and reduce buckets that are full."""
        dtype = self._context.message_dtype(param)
        bucket = self._optimizer.ipg_buckets[dtype]
        other_group = bucket.process_group is not param.ds_process_group
        if bucket.elements and (other_group or bucket.elements + param.ds_numel > self._context.reduce_bucket):
            self._optimizer._DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads(dtype)
        bucket.params.append(param)
        bucket.process_group = param.ds_process_group
        bucket.elements += param.ds_numel
        self.reduce_if_full(dtype)

    def reduce_if_full(self, dtype: torch.dtype) -> None:
        """Reduce DeepSpeed's bucket of a dtype if no other parameter fits into it."""
        if self._optimizer.ipg_buckets[dtype].elements > self._full_threshold:
            self._optimizer._DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads(dtype)

    def reduce_bucket(self, dtype: torch.dtype, sequence_parallel_size: int = 1) -> None:
        """Reduce DeepSpeed's bucket of a dtype, each family's gradients on their own."""
        params, last = self._optimizer.ipg_buckets[dtype].params, self._micro_steps.is_last
        for name, gradients in self.gradients.items():
            members = [(param, param.grad) for param in params if family_of(param) == name]
            if members:
                gradients.reduce(members, dtype, sequence_parallel_size, last)

    def release(self, params: Sequence[ZeroParameter]) -> None:
        """Release the gradients of a bucket that has been packed."""
        for param in params:
            if param.grad is not None and not get_accelerator().is_synchronized_device():
                param.grad.record_stream(get_accelerator().current_stream())  # packing on it still reads them
            param.grad = None

    def waits(self, param: ZeroParameter) -> bool:
        """Whether a gradient is reduced at the end of the backward; see Note [Whole modules] in ``whole.py``."""
        return not self.keeps_full and is_whole(param)

    def flush_buckets(self) -> None:
        """Reduce the gradients in DeepSpeed's buckets, then those of whole parameters."""
        self._flush()
        if self._whole and self._micro_steps.has_begun:
            for param in self._whole:
                self._optimizer._apply_autoep_folding_tp_correction(param)  # does nothing without a gradient
            whole = list(zero_gradients(self._whole))
            self._reductions.wait_for_current()
            for param in whole:
                self._fill_bucket(param)
            self._flush()

    def _flush(self) -> None:
        for dtype in sort_dtypes(self._optimizer.ipg_buckets):
            self._optimizer._DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads(dtype)

    def end_backward(self) -> None:
        """Called at the end of a backward, after its last gradient."""
        with self._reductions.after_current():
            for gradients in self.gradients.values():
                gradients.end_backward(self._max_over_ranks)
        self.awaits_boundary = True

    def learn_order(self) -> None:
        """Learn the order of gradients, if the last micro-batch of the step was known in advance. Collective, once."""
        if self._micro_steps.last_was_declared:
            for gradients in self.gradients.values():
                gradients.learn_order(self._max_over_ranks)

    # The accumulation boundary: g -> os ###############################################################

    def complete_shards(self) -> None:
        """Complete the optimizer's shard: all parameters on all ranks, used or not."""
        with self._reductions.after_current():
            if self.keeps_full:
                self.shards.allocate_if_missing()
                for gradients in self.gradients.values():
                    gradients.reduce_remaining()
        self.wait_on_host()
        with self._reductions.after_current():
            for gradients in self.gradients.values():
                gradients.finish()
        self.awaits_boundary = False
        self._reductions.wait()  # the step reads the shard on the current stream
        if self._context.offload:
            self._reductions.synchronize()  # gradients may be in host memory

    def pass_to_optimizer(self) -> None:
        """Make DeepSpeed's step read the complete gradients."""
        self._reductions.wait_for_current()  # DeepSpeed checks for overflow on this stream
        if not self._context.offload:
            self.shards.expose_to_step()
            return
        self._optimizer._offload_boundary_param_ids = set(self.shards.chunks)
        self._optimizer._finalize_offload_gradient_accumulation()
        if (stream := self._reductions.stream) is not None:  # the step reads host memory
            stream.synchronize()
            get_accelerator().current_stream().synchronize()

    def wait_on_host(self) -> None:
        """Make the host wait for all buckets if an offloaded optimizer's gradients are in its memory."""
        if self._context.offload and self._reductions.stream is not None:
            with self._reductions.after_current():
                for gradients in self.gradients.values():
                    gradients.drain()
            self._reductions.synchronize()

    def require_complete(self) -> None:
        """Wait for buckets in flight, before gradients are read or changed.

        Raises:
            RuntimeError: gradients are not in the placement of os, as this is not the accumulation boundary.
        """
        self._micro_steps.finish_buckets()
        self.wait_on_host()
        strategy = self._context.strategy
        if self.awaits_boundary and strategy.g != strategy.os:
            raise RuntimeError(
                f"Gradients can be read and changed only at the accumulation boundary: with paro_strategy "
                f"{strategy} (g = {strategy.g.name}, os = {strategy.os.name}), they are not summed over all "
                f"ranks earlier."
            )

    # After a step #####################################################################################

    def clear(self) -> None:
        """Drop accumulated gradients."""
        for gradients in self.gradients.values():
            gradients.clear()

    def reset(self) -> None:
        """Drop accumulated gradients outside of a step, after buckets in flight are received."""
        self.wait_on_host()
        self.clear()
        self.awaits_boundary = False

    def drop(self) -> None:
        """Drop gradients that are accumulated or in flight."""
        for gradients in self.gradients.values():
            gradients.drop()
