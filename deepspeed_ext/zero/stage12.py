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
    - After the step, updated parameters move os -> N (``FlatUpdates.gather``).

    The optimizer's shard is the parent's flat ``averaged_gradients``, which it otherwise keeps for fp32 accumulation.
    With optimizer offload it is the gradient on the host that the optimizer reads. So the device holds nothing of the
    gradients between micro-steps if g = G, and with g = I the I-slice, whose hop at the boundary starts there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject.auto_ep_folding import reduce_autoep_folding_gradient
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer, GradPartitionBufferGroup
from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state
from torch import Tensor, nn

from deepspeed_ext.comm.spans import Span
from deepspeed_ext.overrides import checked, override
from deepspeed_ext.strategy import Placement, Strategy
from deepspeed_ext.zero.families import DENSE, Families, experts_of
from deepspeed_ext.zero.flat.buffers import FlatBuffer, buffer_of, windows_in_forward_order
from deepspeed_ext.zero.flat.gradients import FlatGradients, Mean, reduce_by_family
from deepspeed_ext.zero.flat.host_shards import HostShard, HostShards, Place
from deepspeed_ext.zero.flat.states import FlatStates
from deepspeed_ext.zero.flat.updates import FlatGroups, FlatUpdates, has_own_partition, tell_of_setters
from deepspeed_ext.zero.norms import without_duplicates
from deepspeed_ext.zero.optimizer import ParoOptimizer, without_host_synchronization
from deepspeed_ext.zero.shards import CrossingSpan, FlatShard
from deepspeed_ext.zero.streams import ReductionStream
from deepspeed_ext.zero.writers import CheckpointWriters

BucketEntry = tuple[int, int, int]  # parameter group, index in the group, parameter id


@checked
class Stage12Optimizer(ParoOptimizer, DeepSpeedZeroOptimizer):
    """Stage-1/2 optimizer of a strategy with p = N. See Note [What runs when].

    Args:
        strategy: one with p = N.
        families: of parameters, with their process groups and hops.
        overlap_updates: whether a step may end before the parameters have arrived that it has changed.
        dp_process_group: the data-parallel group, as the engine passes it; ``families`` replaces it.
        The others are the parent's.

    Attributes:
        buffers: the parent's flat buffers, one for each parameter group.
        gradients: on their way to the optimizer's shards, of each family.
        updates: parameters on their way back after a step.
        flat_states: state dicts of checkpoints.
    """

    gradients: Mapping[str, FlatGradients]

    # Attributes of DeepSpeed's that are read or written here. A number is that of a parameter group.
    accumulated_grads_in_cpu: dict[int, Tensor]  # by parameter
    allgather_bucket_size: int
    autoep_folding_spec: Any
    autoep_folding_tp_group: Any  # None unless experts are folded
    averaged_gradients: dict[int, Any]
    bit16_groups: list[list[nn.Parameter]]
    bit16_groups_flat: list[Tensor]
    contiguous_gradients: bool
    cpu_offload: bool
    cpu_offload_pin_memory: bool
    dp_process_group: Any
    grad_partition_insertion_offset: dict[int, dict[int, dict[int, int]]]  # by number, rank, parameter
    grad_position: dict[int, list[int]]  # of a parameter: number, its element, place in the shard, elements
    grad_start_offset: dict[int, dict[int, dict[int, int]]]  # by number, rank, parameter
    gradient_accumulation_dtype: torch.dtype
    gradient_average: bool
    gradient_predivide_factor: float
    groups_lacking_loss_scale: set[int]
    groups_padding: list[int]
    has_moe_layers: bool
    ipg_buckets: dict[torch.dtype, Any]
    model_parallel_rank: int
    is_grad_computed: dict[int, dict[int, dict[int, bool]]]  # by number, rank, parameter
    norm_for_param_grads: dict[int, Tensor]
    offload_gradient_dict: dict[int, Any]
    overlap_comm: bool
    parallel_partitioned_bit16_groups: list[list[Tensor]]
    param_names: dict[nn.Parameter, str]
    param_to_partition_ids: dict[int, dict[int, list[int]]]  # by number, parameter
    params_already_reduced: list[bool]
    params_in_partition: list[list[nn.Parameter]]
    partition_count: Any
    partition_size: list[int]  # of the buffers made so far
    postscale_gradients: bool
    real_dp_process_group: list[Any]
    reduce_scatter: bool
    reduction_stream: Any
    round_robin_bit16_meta: list[list[Tensor]]
    round_robin_bit16_offsets: list[list[int]]
    round_robin_bit16_padding: list[list[int]]
    round_robin_gradients: bool
    sequence_parallel_size: int
    single_partition_of_fp32_groups: list[Any]  # the optimizer's weights
    temp_grad_buffer_for_gpu_offload: Tensor
    total_grads_in_partition: dict[int, dict[int, int]]  # by number, rank
    _hp_optimizer_states_linked: bool
    _offload_accumulated_param_ids: set[int]
    _param_slice_mappings: list[Any]

    def __init__(
        self,
        *args: Any,
        strategy: Strategy,
        families: Families,
        overlap_updates: bool = False,
        dp_process_group: object = None,
        **kwargs: Any,
    ) -> None:
        self._take(strategy, families, self._make_stream())
        self.buffers: list[FlatBuffer] = []
        self._stripe_bucket = int(kwargs["reduce_bucket_size"])
        if experts := experts_of(families):
            kwargs["expert_data_parallel_group"] = {
                name: families[name].topology.shard_group(strategy.os) for name in experts
            }
        super().__init__(*args, dp_process_group=self.topology.shard_group(strategy.os), **kwargs)
        self._measure_buckets(param.numel() for group in self.bit16_groups for param in group)
        self._places = {id(param): place for place, param in enumerate(self.param_names)}
        if self.cpu_offload:  # the parent's way of adding on the device, parameter by parameter
            self.temp_grad_buffer_for_gpu_offload = torch.empty(0)
        weights = self.single_partition_of_fp32_groups
        where = self.gradient_accumulation_dtype, self.reduce_bucket_size
        self._host_shards = HostShards(weights.__getitem__, self._host_places, *where)
        self.gradients = {name: self._make_gradients(name) for name in families}
        self.bit16_groups_flat = FlatGroups(self.bit16_groups_flat, lambda: self.updates.gather(self._stepping))
        self.updates = self._make_updates(overlap_updates)
        self.flat_states = FlatStates(self)
        self.writers = CheckpointWriters(families, strategy, [buffer.rank for buffer in self.buffers])

    def _make_gradients(self, family: str) -> FlatGradients:
        rows = [buffer.layout.rows for buffer in self.buffers]
        windows = windows_in_forward_order(self.buffers, rows, self.reduce_bucket_size, self._places)
        numbers = [buffer.number for buffer in self.buffers if buffer.family.name == family]
        return FlatGradients(
            self.families[family].reduce,
            self.strategy,
            [buffer.layout for buffer in self.buffers],
            numbers,
            self._mean(),
            self.gradient_accumulation_dtype,
            self._shard,
            [window for window in reversed(windows) if window.buffer in numbers],
            self._slice_wire_dtype(),
            self.overlap_comm,
            not self.cpu_offload or self.cpu_offload_pin_memory,
            self._record_offload_copy if self.cpu_offload else lambda: None,
        )

    def _make_updates(self, ahead: bool) -> FlatUpdates:
        return FlatUpdates(
            self.buffers,
            self.families,
            self.strategy,
            self.resync,
            self._places,
            lambda group: self.bit16_groups_flat[group],
            self._own_partition,
            self.allgather_bucket_size,
            self.overlap_comm,
            ahead,
        )

    @override
    def _configure_moe_settings(self) -> None:
        """Let groups of experts have their ranks. DeepSpeed asserts that there are such; frozen experts have none."""
        if any(map(self.is_moe_group, self.optimizer.param_groups)):
            super()._configure_moe_settings()
        else:
            self.has_moe_layers = False

    # Flat buffers and partitions of them ##########################################################

    @override
    def flatten_dense_tensors_aligned(
        self,
        tensor_list: Sequence[Any],
        alignment: int,
        use_cpu_data: bool = False,
        param_padding: Sequence[int] | None = None,
    ) -> Tensor:
        """Flatten tensors; a flat buffer that is being made, which names paddings, is known from here on."""
        if param_padding is None:
            return super().flatten_dense_tensors_aligned(tensor_list, alignment, use_cpu_data)
        self.buffers.append(self._make_buffer(tensor_list, alignment, any(param_padding)))
        paddings = [*param_padding[:-1], param_padding[-1] + self.buffers[-1].filling]
        return super().flatten_dense_tensors_aligned(tensor_list, alignment, use_cpu_data, paddings)

    def _make_buffer(self, params: Sequence[nn.Parameter], alignment: int, padded: bool) -> FlatBuffer:
        number = len(self.buffers)
        row = self.optimizer.param_groups[number]
        # In another order stripes would not be spans of the model; bitsandbytes has scales for blocks of a shard.
        as_it_is = self.round_robin_gradients or padded or type(self.optimizer).__module__.startswith("bitsandbytes")
        return FlatBuffer(
            number,
            self.families[row["name"] if self.has_moe_layers and self.is_moe_group(row) else DENSE],
            params,
            self.round_robin_bit16_offsets[number],
            [meta.numel() for meta in self.round_robin_bit16_meta[number]],
            alignment,
            self.strategy.os,
            self.real_dp_process_group[number],
            None if as_it_is else self._stripe_bucket,
        )

    def _own_partition(self, group: int) -> Tensor | None:
        """Return this rank's partition of a flat buffer, 1D; None while parameters are offloaded."""
        partitions = self.parallel_partitioned_bit16_groups[group]
        return partitions[self.buffers[group].rank] if partitions else None

    @override
    def get_data_parallel_partitions(self, tensor: Tensor, group_id: int) -> list[Tensor]:
        """Return the partitions of a flat buffer: with stripes this rank's alone, else the parent's."""
        buffer = self.buffers[group_id]
        if buffer.striped:
            return buffer.partitions(tensor)
        partitions: list[Tensor] = super().get_data_parallel_partitions(tensor, group_id)
        if has_own_partition(buffer, self.resync):
            partitions[buffer.rank] = partitions[buffer.rank].clone()
        return partitions

    @override
    def get_partition_info(
        self, tensor_list: Sequence[nn.Parameter], partition_size: int, partition_id: int, param_padding: Any = None
    ) -> tuple[list[nn.Parameter], list[nn.Parameter], int]:
        """Return which parameters are in this rank's partition of the flat buffer that is being made."""
        buffer = self.buffers[len(self.partition_size)]
        if not buffer.striped:
            return super().get_partition_info(tensor_list, partition_size, partition_id, param_padding)
        within = [param for param in tensor_list if buffer.holds(param)]
        return within, [param for param in tensor_list if not buffer.holds(param)], 0

    @override
    def initialize_gradient_partition(self, i: int, param_group: Sequence[nn.Parameter], partition_id: int) -> None:
        """Fill the parent's tables with what this rank has of parameters: it reads of others where it sends to them,
        and with thousands of ranks they take seconds, and memory."""
        buffer = self.buffers[i]
        if partition_id == buffer.rank and not buffer.striped:
            super().initialize_gradient_partition(i, param_group, partition_id)
        for member in buffer.own_members() if partition_id == buffer.rank and buffer.striped else ():
            number = self.get_param_id(member.param)
            self.param_to_partition_ids[i][number] = [partition_id]
            self.total_grads_in_partition[i][partition_id] += 1
            self.is_grad_computed[i][partition_id][number] = False
            self.grad_partition_insertion_offset[i][partition_id][number] = member.offset
            self.grad_start_offset[i][partition_id][number] = member.span.start

    @override
    def get_first_param_index(
        self, group_id: int, param_group: Sequence[nn.Parameter], partition_id: int
    ) -> int | None:
        """Return which parameter is the first in this rank's partition, if any is."""
        if partition_id != self.buffers[group_id].rank:
            return None
        first: int | None = super().get_first_param_index(group_id, param_group, partition_id)
        return first

    @override
    def get_grad_position(
        self, group_id: int, tensor_list: Sequence[nn.Parameter], first_offset: int, partition_size: int
    ) -> None:
        """Fill the parent's table of where this rank's gradients are, with optimizer offload."""
        if not self.buffers[group_id].striped:
            super().get_grad_position(group_id, tensor_list, first_offset, partition_size)
            return
        for param, _, _, span, offset in self.buffers[group_id].own_members():
            self.grad_position[self.get_param_id(param)] = [group_id, span.start, offset, span.numel]

    @override
    def _link_all_hp_params(self) -> None:
        """Tell parameters where their weights and states are, for DeepSpeed's ``safe_get_full_...``.

        The parent goes by the model's order unless it has padded a parameter, so with ``round_robin_gradients`` it
        would name other parameters, also in universal checkpoints. Any padding has it look at the real places.
        """
        paddings = self.round_robin_bit16_padding
        in_any_order = [[1]] * len(paddings) if self.round_robin_gradients else paddings
        with mock.patch.object(self, "round_robin_bit16_padding", in_any_order):
            super()._link_all_hp_params()
        self._link_stripes()
        self._link_states()
        tell_of_setters(self.buffers, self.resync)

    def _link_stripes(self) -> None:
        for buffer in (buffer for buffer in self.buffers if buffer.striped):
            buffer.link(
                self.single_partition_of_fp32_groups[buffer.number],
                not self.cpu_offload,  # then there is no list of gradients
                gradient_dict=self.averaged_gradients,
                offload_gradient_dict=self.offload_gradient_dict,
                use_offload=self.cpu_offload,
            )

    @override
    def _lazy_init_hp_params_optimizer_state(self) -> None:
        """Link states as soon as a parameter group has some: the parent links all groups when the first has."""
        if not self._hp_optimizer_states_linked and any(self._states_by_group):
            self._link_states()

    @property
    def _states_by_group(self) -> list[Any]:
        """The optimizer's states of each parameter group; empty where there are none yet."""
        return [self.optimizer.state.get(partition) or {} for partition in self.single_partition_of_fp32_groups]

    def _link_states(self) -> None:
        """Link what there is: the parent links only after the first step, so after a load or a return from the host
        ``safe_get_full_optimizer_state`` would not find any."""
        held = self._states_by_group
        groups = zip(self.bit16_groups, self.single_partition_of_fp32_groups, held, strict=True)
        for params, partition, states in groups:
            lazy_init_hp_params_optimizer_state(params, partition, {partition: states})
        self._hp_optimizer_states_linked = all(held)

    @override
    def _restore_from_bit16_weights(self) -> None:
        """Take the optimizer's weights from the model's, which somebody has just loaded."""
        with self.updates.partitions():
            self.updates.take_weights()
            super()._restore_from_bit16_weights()
        self.outer.restart()

    # What others ask for ##########################################################################

    def family_of_buffer(self, buffer: int) -> str:
        """Return the family of what is in a flat buffer; see ``ParoOptimizer``."""
        return self.buffers[buffer].family.name

    def crossing_spans(self) -> list[CrossingSpan]:
        """Return them; see ``ParoOptimizer``."""
        return [span for buffer in self.buffers for span in buffer.crossing_spans(self.param_names)]

    def owned_span(self, param: nn.Parameter) -> Span:
        """Return the elements whose optimizer states this rank has; see ``ParoOptimizer``."""
        return buffer_of(self.buffers, param).member(param).span

    def owned_gradient(self, param: nn.Parameter) -> Tensor:
        """Return the gradient of these elements; see ``ParoOptimizer``."""
        buffer = buffer_of(self.buffers, param)
        return buffer.member(param).in_shard.of(self._shard(buffer.number))

    def flat_shards(self) -> list[FlatShard]:
        """Return what is in this rank's partitions; see ``FlatShards``."""
        return [buffer.flat_shard() for buffer in self.buffers]

    def shard_weights(self, number: int) -> nn.Parameter:
        """Return this rank's partition of the optimizer's weights; see ``FlatShards``."""
        weights: nn.Parameter = self.single_partition_of_fp32_groups[number]
        return weights

    def shard_gradient(self, number: int) -> Tensor:
        """Return its gradient; see ``FlatShards``."""
        return self._shard(number)

    # Buckets: N -> g ##############################################################################

    @override
    def _maybe_reduce_autoep_folding_tp_gradient(self, param: nn.Parameter, grad: Tensor) -> None:
        """Correct a gradient where a bucket takes it, at any stage; Note [Folded experts] in ``families.py``."""
        if self.autoep_folding_tp_group is not None:
            reduce_autoep_folding_gradient(
                self.autoep_folding_spec, param, grad, tp_group=self.autoep_folding_tp_group
            )

    @override
    def reduce_independent_p_g_buckets_and_remove_grads(self, param: nn.Parameter, i: int) -> None:
        """Put a gradient into a bucket, and move the bucket on as soon as it is full."""
        super().reduce_independent_p_g_buckets_and_remove_grads(param, i)
        dtype = self.get_param_comm_dtype(param)
        bucket = self.ipg_buckets[dtype]
        if self._is_full(bucket):
            self.reduce_ipg_grads(comm_dtype=dtype)
            self._fill_other_buffer(bucket)

    def _fill_other_buffer(self, bucket: Any) -> None:
        """Let the parent's two buffers take turns: what a bucket held may still be read."""
        if self.contiguous_gradients and self.overlap_comm:
            bucket.index = 1 - bucket.index

    @override
    def average_tensor(self, tensor: Tensor, communication_data_type: torch.dtype) -> None:
        """Move a bucket from N to g. ``tensor``: 1D, the bucket's gradients one after the other."""
        bucket = self.ipg_buckets[communication_data_type]
        storages = {buffer.untyped_storage().data_ptr() for buffer in bucket.buffer}
        # A buffer of DeepSpeed's is given back when the micro-step's buckets have been waited for. To record it on
        # the stream of reductions would keep it, and those of micro-steps that the host is ahead.
        kept = tensor.untyped_storage().data_ptr() in storages and not self.overlaps_micro_steps
        self._reduce_bucket([tensor], bucket.params, communication_data_type, [] if kept else [tensor])

    @override
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
        self, tensors: list[Tensor], entries: Sequence[BucketEntry], dtype: torch.dtype, freed: Sequence[Tensor]
    ) -> None:
        """Move a bucket on; ``freed`` are those of the tensors that may be freed before it has been waited for."""
        if not entries:
            return
        params = [self.bit16_groups[group][index] for group, index, _ in entries]
        spans = tuple(
            (group, Span(self.buffers[group].offset(param), param.numel()))
            for (group, *_), param in zip(entries, params, strict=True)
        )
        complete = [self._places[id(param)] for param in params] if self._is_last_backward else []
        for gradients in self.gradients.values() if complete else ():
            gradients.prepare_crossing()
        for group in {entry[0] for entry in entries}:
            self.gradients[self.family_of_buffer(group)].prepare(group)
        with self.reductions.after_current(self.ipg_buckets[dtype], freed):
            every = list(self.gradients.values())
            reduce_by_family(every, tensors, spans, self._wire_dtype(dtype), complete)

    def _shard(self, group: int) -> Tensor:
        """Return the gradients of the optimizer's shard of a parameter group, 1D."""
        return self._get_compact_grad_partition_buffer(group).flat_partition

    @override
    def _build_compact_grad_partition_buffer(self, group_idx: int) -> Any:
        """Return a shard of zeros: the parent's, or with offload the gradient that the optimizer reads on the host."""
        if self.cpu_offload:
            return self._make_host_shard(group_idx)
        if not self.buffers[group_idx].striped:
            return super()._build_compact_grad_partition_buffer(group_idx)
        numel, device = self.buffers[group_idx].shard_numel, get_accelerator().current_device_name()
        held = torch.zeros(numel, dtype=self.gradient_accumulation_dtype, device=device)
        return GradPartitionBufferGroup(self.buffers[group_idx].split(held), held)

    def _make_host_shard(self, group: int) -> HostShard:
        shard = self._host_shards.make(group)
        self.accumulated_grads_in_cpu.update(self._host_shards.views(group, shard))
        return HostShard(shard)

    def _host_places(self, group: int) -> Iterator[Place]:
        """Yield what the shard of a parameter group has, with optimizer offload."""
        for param in self.params_in_partition[group]:
            number = self.get_param_id(param)
            _, _, start, numel = self.grad_position[number]
            yield number, start, numel

    @override
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

    @override
    def independent_gradient_partition_epilogue(self) -> None:
        """End a micro-step: flush the buckets and, at the accumulation boundary, move g to os."""
        self.updates.settle()
        self.setup_buckets()  # no hook has done it in a stage of a pipeline that has nothing to train
        boundary = self.is_gradient_accumulation_boundary()
        self._flush_buckets(boundary and self.strategy.g == Placement.N)
        self._end_micro_step()
        with without_host_synchronization():
            super().independent_gradient_partition_epilogue()
        if boundary:
            self._forget_accumulated()

    def _forget_accumulated(self) -> None:
        """Drop what stage 1 has accumulated of each parameter: it is in the shards now. Kept, as the parent does, it
        would be reduced again by another backward."""
        for group in self.bit16_groups:
            for param in group:
                param.grad_accum = None  # type: ignore[attr-defined]

    def _flush_buckets(self, left_over: bool) -> None:
        """Reduce what is in buckets.

        Args:
            left_over: also gradients accumulated in earlier micro-steps whose parameters the last one did not use.
                With ``overlap_comm`` stage 1 fills buckets from hooks of the last micro-step, which do not see them.
        """
        filled = [bucket for bucket in self.ipg_buckets.values() if bucket.params]
        self.reduce_ipg_grads()
        if left_over:
            self._reduce_left_over(filled)

    def _reduce_left_over(self, filled: Sequence[Any]) -> None:
        """Reduce what stage 1 has accumulated and not reduced. ``filled``: buckets that have just left."""
        for bucket in filled:
            self._fill_other_buffer(bucket)
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
        with self.reductions.after_current():
            for gradients in self.gradients.values():
                gradients.finish(self._slice_wire_dtype(), self.reduce_bucket_size)
        self.reductions.wait()
        for gradients in self.gradients.values():
            gradients.slices.clear()  # which have been moved on
        if self.cpu_offload:
            self._wait_for_offload_copies()
        for buffer in self.buffers:
            for padding in () if buffer.family.reduce.inter.keeps_zeros else buffer.padding():
                padding.of(self._shard(buffer.number)).zero_()
        self._learn_from_first_step()
        self.complete_gradients()
        if self.cpu_offload:
            self._hand_to_host_optimizer(range(len(self.buffers)), self._offload_accumulated_param_ids)

    def _hand_to_host_optimizer(self, groups: Iterable[int], used: Iterable[int]) -> None:
        """Make an offloaded optimizer read complete gradients, and tell the parent their norms and overflows."""
        for group in groups:
            found = self._host_shards.norms(group, self._shard(group), used, self.update_offload_overflow_tracker)
            self.norm_for_param_grads.update(found)

    def _slice_wire_dtype(self) -> torch.dtype:
        """Return the dtype of slices, which mix parameters: fp32 where those have several (torch.autocast)."""
        dtypes = list(self.ipg_buckets)
        return self._wire_dtype(dtypes[0] if len(dtypes) == 1 else torch.float32)

    # Norms ########################################################################################

    @override
    def scaled_global_norm(self, norm_type: int = 2) -> Tensor:
        """Return the parent's norm over its group, of what the step applies; see ``_global_norm``."""
        self.muon.apply()
        parents = super().scaled_global_norm
        return self._global_norm(lambda: parents(norm_type))

    @override
    def get_grad_norm_direct(self, gradients: Any, params: Any, norm_type: int = 2) -> Tensor:
        """Return the parent's norm of a parameter group; of experts over all ranks, each once."""
        group = next(group for group, held in self.averaged_gradients.items() if held is gradients)
        with self._over_all_experts(group) as once:
            return once(super().get_grad_norm_direct(gradients, params, norm_type))

    @override
    def complete_grad_norm_calculation_for_cpu_offload(self, params: Any) -> Tensor:
        """Return the same norm with an offloaded optimizer."""
        group = next(group for group, held in enumerate(self.params_in_partition) if held is params)
        with self._over_all_experts(group) as once:
            return once(super().complete_grad_norm_calculation_for_cpu_offload(params))

    @contextmanager
    def _over_all_experts(self, group: int) -> Iterator[Callable[[Tensor], Tensor]]:
        """Within this context the parent computes a norm of experts over all data-parallel ranks, since the ranks that
        shard their optimizer states may not hold every expert. Each tensor-parallel rank counts its own folded ones.

        Returns:
            What removes the duplicates that replicas add; -1 stays, which marks an invalid norm.
        """
        ranks = self.buffers[group].family.topology.sizes.ranks
        if self.buffers[group].family.name == DENSE:
            yield lambda norm: norm
            return
        replicas = ranks // dist.get_world_size(group=self.buffers[group].group)
        counting = self.model_parallel_rank if self.autoep_folding_tp_group is None else 0
        with (
            mock.patch.object(self, "dp_process_group", self.topology.world),
            mock.patch.object(self, "model_parallel_rank", counting),
        ):
            yield lambda norm: without_duplicates(norm, replicas)

    # The step, and parameters after it: os -> N ###################################################

    @override
    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        """Take the step, with partitions to write to."""
        with self.updates.partitions(stepping=True):
            return super().step(closure)

    @override
    def update_lp_params(self) -> None:
        """Make all ranks hold the optimizer's weights, rounded to the dtype of the parameters. Collective."""
        with self.updates.partitions():
            super().update_lp_params()
            self.updates.drain()

    def send_parameters(self) -> None:
        """Make all ranks hold the optimizer's weights; see ``ParoOptimizer``."""
        self._require_parameters()
        self.update_lp_params()

    @override
    def _optimizer_step(self, group_no: int) -> None:
        """Also let an outer optimizer have the weights of this step."""
        super()._optimizer_step(group_no)
        self.outer.after_step(group_no)

    # What takes the place of gradients ############################################################

    @override
    def _commit_muon_momentum(self) -> None:
        """Apply Muon also where no norm is taken, and keep its momentum: the step is not skipped."""
        self.muon.apply()
        self.muon.finish_step(True)

    @override
    def _apply_muon_updates_cpu_offload(self) -> None:
        """Leave it to ``scaled_global_norm``."""

    def begin_replacing_gradient(self, number: int) -> float:
        """Prepare for an update; see ``FlatShards``."""
        return self._update_factor(number, None if self.cpu_offload else self.groups_lacking_loss_scale)

    def gradients_replaced(self, shards: Sequence[FlatShard]) -> None:
        """Make an offloaded optimizer read updates; see ``FlatShards``."""
        if self.cpu_offload:
            updated = {self.get_param_id(member.param) for shard in shards for member in shard.members}
            self._hand_to_host_optimizer(
                [shard.number for shard in shards], self._offload_accumulated_param_ids | updated
            )

    # Checkpoints ##################################################################################

    def checkpoint_event_prologue(self) -> None:
        """Wait for parameters before the engine saves or loads them."""
        self.updates.drain()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return DeepSpeed's, in its order; see ``flat/states.py``."""
        return self.flat_states.in_zeros_order(super().state_dict())

    def check_states(self, state: Mapping[str, Any]) -> None:
        """Refuse a rank's state dict that is sharded otherwise; see ``FlatStates.check``."""
        self.flat_states.check(state)

    @override
    def _load_legacy_checkpoint(
        self, state_dict_list: list[Any], load_optimizer_states: bool = True, load_from_fp32_weights: bool = False
    ) -> None:
        """Refuse optimizer states that are sharded otherwise, and take them in our order."""
        states = self.flat_states.as_held(state_dict_list, load_optimizer_states, load_from_fp32_weights)
        super()._load_legacy_checkpoint(states, load_optimizer_states, load_from_fp32_weights)

    # To the host and back #########################################################################

    @override
    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Offload DeepSpeed's states, and with its gradients our slices."""
        self.updates.drain()
        self._finish_buckets()
        super().offload_states(*args, **kwargs)
        if OffloadStateTypeEnum.lp_grads in self.offloaded_states:
            for gradients in self.gradients.values():
                gradients.to("cpu")

    @override
    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        """Bring back what ``offload_states`` has moved; partitions are made anew for that."""
        self.updates.settle()
        super().reload_states(*args, **kwargs)
        # The parent links before it makes new tensors of states on the device: those of the host would stay linked.
        self._link_states()
        for gradients in self.gradients.values():
            gradients.to(get_accelerator().current_device_name())
        self.updates.give_up()

    @override
    def copy_grads_in_partition(self, param: nn.Parameter, group_idx: int | None = None) -> None:
        """Note each parameter of a bucket. Nothing is copied yet: shards are complete after ``_sync_gradients``."""
        if self.cpu_offload:
            self._offload_accumulated_param_ids.add(self.get_param_id(param))
        self.clear_grad_attribute(param)

    @override
    def reset_cpu_buffers(self) -> None:
        """Also drop the shards: with offload the parent would add the next step's gradients to a skipped step's."""
        super().reset_cpu_buffers()
        self.averaged_gradients.update(dict.fromkeys(self.averaged_gradients))

    @override
    def destroy(self) -> None:
        """Also drop gradients of an accumulation that was not finished, and leave the model alone."""
        for gradients in self.gradients.values():
            gradients.drop()
        self.updates.drop()
        super().destroy()

    def _make_stream(self) -> ReductionStream:
        def find() -> Any:
            return self.reduction_stream if self.overlap_comm else None

        return ReductionStream(find, takes_turns=True, by_device=get_accelerator().resolves_data_dependency)
