# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Strategies with p = N: ZeRO's stage-1/2 optimizer with gradients and optimizer states placed by the table.

Note [What runs when]
    The parent is built over the process group over which the optimizer states are sharded (``Topology.shard_group``),
    so its partitions, norms, overflow checks, steps and checkpoints are right for every ``os`` as they are. What is
    ours is how gradients get there:

    - A full bucket moves N -> g (``average_tensor``): in every micro-step if g is I or G, at the accumulation
      boundary only if g is N (stage 1 fills buckets only then; they go to I first in that case). What is in I moves
      on to ``os`` at the boundary (``_sync_gradients``). See Note [Where buckets of flat buffers arrive].
    - After the step, updated parameters move os -> N (``_gather_parameters``).

    The optimizer's shard is the parent's flat ``averaged_gradients``, which it otherwise keeps for fp32 accumulation.
    With optimizer offload it is the gradient on the host that the optimizer reads. So the device holds nothing of the
    gradients between micro-steps if g = G, and with g = I the I-slice, whose hop at the boundary starts there.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup, get_norm_dtype
from torch import Tensor, nn

from deepspeed_ext.comm.bucket_plan import Range, parts_of
from deepspeed_ext.strategy import Placement, Strategy
from deepspeed_ext.zero.families import Families, experts_of
from deepspeed_ext.zero.filing import Filing
from deepspeed_ext.zero.flat_gradients import FlatGradients, Mean
from deepspeed_ext.zero.flat_shards import FlatShard
from deepspeed_ext.zero.optimizer import ordered_by_streams
from deepspeed_ext.zero.stage12_norms import Stage12Norms

BucketEntry = tuple[int, int, int]  # parameter group, index in the group, parameter id


class _HostShard(list[Tensor]):
    """An entry of ``averaged_gradients`` that is on the host already, and is not moved when states are offloaded."""

    def __init__(self, flat_partition: Tensor) -> None:
        super().__init__()
        self.flat_partition = flat_partition


class Stage12Optimizer(Stage12Norms):
    """Stage-1/2 optimizer of a strategy with p = N. See Note [What runs when].

    Args:
        strategy: one with p = N.
        families: of parameters, with their process groups and hops.
        overlap_updates: whether a step may end before the parameters have arrived that it has changed.
        dp_process_group: the data-parallel group, as the engine passes it; ``families`` replaces it.
        The others are the parent's.
    """

    # The parent's.
    bit16_groups_flat: list[Tensor]
    _offload_accumulated_param_ids: set[int]

    def __init__(
        self,
        *args: Any,
        strategy: Strategy,
        families: Families,
        overlap_updates: bool = False,
        dp_process_group: object = None,
        **kwargs: Any,
    ) -> None:
        self.strategy = strategy
        self._take_families(families)
        if experts := experts_of(families):
            kwargs["expert_data_parallel_group"] = {
                name: families[name].topology.shard_group(strategy.os) for name in experts
            }
        super().__init__(*args, dp_process_group=self.topology.shard_group(strategy.os), **kwargs)
        self._measure_buckets(param.numel() for group in self.bit16_groups for param in group)
        self._places = {id(param): place for place, param in enumerate(self.param_names)}
        self._offsets = {
            self.get_param_id(param): offset
            for params, offsets in zip(self.round_robin_bit16_groups, self.round_robin_bit16_offsets, strict=True)
            for param, offset in zip(params, offsets, strict=True)
        }
        if self.cpu_offload:  # the parent's way of adding on the device, parameter by parameter
            self.temp_grad_buffer_for_gpu_offload = torch.empty(0)
        self.gradients = {name: self._gradients_of(name) for name in families}
        self._make_updates(overlap_updates)
        shards = [self._shard_number(group) for group in range(len(self.layouts))]
        self.filing = Filing(families, strategy, shards)

    def _gradients_of(self, family: str) -> FlatGradients:
        buffers = [buffer for buffer, name in enumerate(self.family_names) if name == family]
        windows = self._windows([layout.rows for layout in self.layouts], self.reduce_bucket_size)
        return FlatGradients(
            self.families[family].reduce,
            self.strategy,
            self.layouts,
            buffers,
            self._mean(),
            self.gradient_accumulation_dtype,
            self._shard,
            [window for window in reversed(windows) if window.buffer in buffers],
            self._slice_wire_dtype(),
            self.overlap_comm,
            not self.cpu_offload or self.cpu_offload_pin_memory,
            self._record_offload_copy if self.cpu_offload else lambda: None,
        )

    # Buckets: N -> g ##############################################################################

    def reduce_independent_p_g_buckets_and_remove_grads(self, param: nn.Parameter, i: int) -> None:
        """Put a gradient into a bucket, and move the bucket on as soon as it is full."""
        super().reduce_independent_p_g_buckets_and_remove_grads(param, i)
        dtype = self.get_param_comm_dtype(param)
        bucket = self.ipg_buckets[dtype]
        if self._is_full(bucket):
            self.reduce_ipg_grads(comm_dtype=dtype)
            self._fill_other_buffer(bucket)

    def _fill_other_buffer(self, bucket: Any) -> None:
        """Have the parent's two buffers take turns: what a bucket held may still be read."""
        if self.contiguous_gradients and self.overlap_comm:
            bucket.index = 1 - bucket.index

    def average_tensor(self, tensor: Tensor, communication_data_type: torch.dtype) -> None:
        """Move a bucket from N to g. ``tensor``: 1D, the bucket's gradients one after the other."""
        bucket = self.ipg_buckets[communication_data_type]
        storages = {buffer.untyped_storage().data_ptr() for buffer in bucket.buffer}
        # A buffer of DeepSpeed's is given back when the micro-step's buckets have been waited for. To record it on
        # the stream of reductions would keep it, and those of micro-steps that the host is ahead.
        kept = tensor.untyped_storage().data_ptr() in storages and not self.overlaps_micro_steps
        self._reduce_bucket([tensor], bucket.params, communication_data_type, [] if kept else [tensor])

    def _buffered_reduce_fallback_preserving_fp32(
        self,
        grads: Sequence[Tensor],
        grad_params: Sequence[BucketEntry],
        communication_data_type: torch.dtype,
        elements_per_buffer: int,
    ) -> None:
        """Do the same without ``contiguous_gradients``: the bucket is a list of gradients."""
        self._clear_previous_reduced_grads()  # of earlier buckets, which are packed by now
        tensors = [grad.reshape(-1) for grad in grads]
        self._reduce_bucket(tensors, grad_params, communication_data_type, tensors)

    def _reduce_bucket(
        self, tensors: list[Tensor], params: Sequence[BucketEntry], dtype: torch.dtype, freed: Sequence[Tensor]
    ) -> None:
        """Move a bucket on; ``freed`` are those of the tensors that may be freed before it has been waited for."""
        if not params:
            return
        ranges = tuple(
            Range(group, self._offsets[param_id], self.bit16_groups[group][index].numel())
            for group, index, param_id in params
        )
        complete: list[int] = []
        if self._is_last_backward:
            complete += [self._places[id(self.bit16_groups[group][index])] for group, index, _ in params]
            for gradients in self.gradients.values():
                gradients.prepare_crossing()
        for group in {entry[0] for entry in params}:
            self.gradients[self.family_names[group]].prepare(group)
        with self._reduction_stream(self.ipg_buckets[dtype], freed):
            for name, gradients in self.gradients.items():
                mine = [number for number, one in enumerate(ranges) if self.family_names[one.buffer] == name]
                if len(mine) == len(ranges):
                    gradients.reduce(tensors, ranges, self._wire_dtype(dtype), complete)
                elif mine:
                    parts, places = list(parts_of(tensors, ranges)), [complete[n] for n in mine] if complete else []
                    of_family = [parts[n] for n in mine], tuple(ranges[n] for n in mine)
                    gradients.reduce(*of_family, self._wire_dtype(dtype), places)

    def _shard(self, group: int) -> Tensor:
        """Return the gradients of the optimizer's shard of a parameter group, 1D."""
        return self._get_compact_grad_partition_buffer(group).flat_partition

    def _build_compact_grad_partition_buffer(self, group_idx: int) -> Any:
        """Return a shard of zeros: the parent's, or with offload the gradient that the optimizer reads on the host.

        It is another tensor on the host where that one has less precision than ``grad_accum_dtype``.
        """
        if not self.cpu_offload:
            if not self.is_striped(group_idx):
                return super()._build_compact_grad_partition_buffer(group_idx)
            held = self.new_shard(group_idx)
            return GradPartitionBufferGroup(self.split_shard(group_idx, held), held)
        shard = self.single_partition_of_fp32_groups[group_idx].grad.view(-1)
        if shard.dtype not in (torch.float32, self.gradient_accumulation_dtype):
            shard = torch.empty_like(shard, dtype=self.gradient_accumulation_dtype)
        shard.zero_()
        for param in self.params_in_partition[group_idx]:
            _, _, start, numel = self.grad_position[self.get_param_id(param)]
            self.accumulated_grads_in_cpu[self.get_param_id(param)] = shard.narrow(0, start, numel)
        return _HostShard(shard)

    def _use_compact_grad_partition_buffer(self, group_idx: int) -> bool:
        """Say yes: one flat buffer is what hops deliver into, and what the step reads without another copy."""
        return True

    def _mean(self) -> Mean:
        """Return the mean over all ranks, whatever the parent is sharded over."""
        ranks = self.topology.sizes.ranks
        if not self.gradient_average:
            return Mean()
        if self.reduce_scatter or not self.postscale_gradients:
            return Mean(before=ranks / self.sequence_parallel_size)
        return Mean(
            self.gradient_predivide_factor, self.gradient_predivide_factor * self.sequence_parallel_size / ranks
        )

    def _wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return fp32 with sequence parallelism, as the parent does."""
        return torch.float32 if self.sequence_parallel_size > 1 else dtype

    # The accumulation boundary: g -> os ###########################################################

    def independent_gradient_partition_epilogue(self) -> None:
        """End of a micro-step: flush the buckets and, at the accumulation boundary, move g to os."""
        boundary = self.is_gradient_accumulation_boundary()
        self._last_was_known = boundary or self.flush_follows
        self.finish_updates()
        self.setup_buckets()  # no hook has done it in a stage of a pipeline that has nothing to train
        filled = [bucket for bucket in self.ipg_buckets.values() if bucket.params]
        self.reduce_ipg_grads()
        if boundary:
            if self.strategy.g == Placement.N:
                for bucket in filled:
                    self._fill_other_buffer(bucket)
                self._reduce_left_over()
            self._sync_gradients()
        elif self._has_left and not self.flush_follows:
            raise self._boundary_taken_back()
        elif not self.overlaps_micro_steps:
            self._finish_buckets()
        with ordered_by_streams():
            super().independent_gradient_partition_epilogue()
        if boundary:
            # All is in the shards now. Kept, as the parent does, it would be reduced again by another backward.
            for group in self.bit16_groups:
                for param in group:
                    param.grad_accum = None

    def _reduce_left_over(self) -> None:
        """Reduce gradients accumulated in earlier micro-steps whose parameters the last one did not use.

        With ``overlap_comm`` stage 1 fills buckets from the hooks of the last micro-step, which they do not see.
        """
        for i, group in enumerate(self.bit16_groups):
            for param in group:
                waiting = not self.params_already_reduced[self.get_param_id(param)]
                if waiting and param.numel() and self.get_gradient_for_reduction(param) is not None:
                    self.setup_buckets()
                    self.reduce_ready_partitions_and_remove_grads(param, i)
        self.reduce_ipg_grads()

    def _sync_gradients(self) -> None:
        """Finish all buckets, move the I-slices on to ``os`` and add them to the optimizer's shards.

        All parameter groups on all ranks, gradients or not: ranks may have used different parameters.
        """
        self._finish_buckets()
        for gradients in self.gradients.values():
            gradients.prepare_all()
        with self._reduction_stream():
            for gradients in self.gradients.values():
                gradients.finish(self._slice_wire_dtype(), self.reduce_bucket_size)
        self._wait_for_reductions()
        for gradients in self.gradients.values():
            gradients.slices.clear()  # which have been moved on
        if self.cpu_offload:
            self._wait_for_offload_copies()
        for group, family in enumerate(self.family_names):
            if not self.families[family].reduce.inter.keeps_zeros:
                for start, length in self.padding(group):
                    self._shard(group)[start : start + length].zero_()
        self._learn_from_first_step()
        self.complete_gradients()
        if self.cpu_offload:
            self._measure_host_shards(range(len(self.layouts)))

    def _slice_wire_dtype(self) -> torch.dtype:
        """Return the dtype of slices, which mix parameters: fp32 where those have several (torch.autocast)."""
        dtypes = list(self.ipg_buckets)
        return self._wire_dtype(dtypes[0] if len(dtypes) == 1 else torch.float32)

    # What takes the place of gradients ############################################################

    def _commit_muon_momentum(self) -> None:
        """Apply Muon also where no norm is taken, and keep its momentum: the step is not skipped."""
        self.muon.apply()
        self.muon.finish_step(True)

    def _apply_muon_updates_cpu_offload(self) -> None:
        """Leave it to ``scaled_global_norm``."""

    @property
    def updates_on_host(self) -> bool:
        """Whether they are: with optimizer offload."""
        return bool(self.cpu_offload)

    def take_update(self, number: int) -> float:
        """Prepare for an update; see ``FlatShards``."""
        return self._update_factor(number, self.groups_lacking_loss_scale)

    def updates_taken(self, shards: Sequence[FlatShard]) -> None:
        """Have the offloaded optimizer read updates; see ``FlatShards``."""
        if self.cpu_offload:
            used = set(self._offload_accumulated_param_ids)
            updated = (self.get_param_id(member.param) for shard in shards for member in shard.members)
            self._offload_accumulated_param_ids.update(updated)
            self._measure_host_shards(shard.number for shard in shards)
            self._offload_accumulated_param_ids = used

    def destroy(self) -> None:
        """Also drop gradients of an accumulation that was not finished."""
        for gradients in self.gradients.values():
            gradients.drop()
        self.updates.drop()
        super().destroy()

    # Optimizer offload ############################################################################

    def copy_grads_in_partition(self, param: nn.Parameter, group_idx: int | None = None) -> None:
        """Note each parameter of a bucket. Nothing is copied yet: shards are complete after ``_sync_gradients``."""
        if self.cpu_offload:
            self._offload_accumulated_param_ids.add(self.get_param_id(param))
        self.clear_grad_attribute(param)

    def _measure_host_shards(self, groups: Iterable[int]) -> None:
        """Tell the offloaded optimizer the norms of parameter groups, and the overflow flag: taken on the device."""
        used, device = self._offload_accumulated_param_ids, get_accelerator().current_device_name()
        for group in groups:
            for param in self.params_in_partition[group]:
                _, _, start, numel = self.grad_position[self.get_param_id(param)]
                norms = []
                for part in self._shard(group).narrow(0, start, numel).split(self.reduce_bucket_size):
                    on_device = part.to(device)
                    self.update_offload_overflow_tracker(on_device)
                    norms.append(on_device.to(get_norm_dtype()).norm(2))
                if self.get_param_id(param) in used:  # others have none: ignore_unused_parameters looks for that
                    self.norm_for_param_grads[self.get_param_id(param)] = torch.stack(norms).norm(2)
            gradient = self.single_partition_of_fp32_groups[group].grad.view(-1)
            if gradient.data_ptr() != self._shard(group).data_ptr():
                gradient.copy_(self._shard(group))

    def reset_cpu_buffers(self) -> None:
        """Also drop the shards: with offload the parent would add the next step's gradients to a skipped step's."""
        super().reset_cpu_buffers()
        self.averaged_gradients.update(dict.fromkeys(self.averaged_gradients))

    # Streams ######################################################################################

    @contextmanager
    def _reduction_stream(self, bucket: Any = None, freed: Sequence[Tensor] = ()) -> Iterator[None]:
        """Run on the stream of reductions, behind all that filled the bucket; buckets are reused behind it."""
        accelerator = get_accelerator()
        stream = self.reduction_stream if self.overlap_comm else accelerator.current_stream()
        for event in bucket.ready_events.values() if bucket else ():
            stream.wait_event(event)
        if self.overlap_comm and not accelerator.resolves_data_dependency():
            for producer in {accelerator.current_stream(), *(bucket.copy_streams if bucket else ())}:
                stream.wait_stream(producer)
            accelerator.current_stream().wait_stream(stream)
            for tensor in freed:
                tensor.record_stream(stream)
        with accelerator.stream(stream):
            yield

    def _wait_for_reductions(self) -> None:
        if self.overlap_comm and not get_accelerator().resolves_data_dependency():
            get_accelerator().current_stream().wait_stream(self.reduction_stream)
