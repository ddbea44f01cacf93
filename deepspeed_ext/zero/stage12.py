# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Strategies with p = N: ZeRO's stage-1/2 optimizer with gradients and optimizer states placed by the table.

Note [What runs when]
    The parent is built over the process group over which the optimizer states are sharded (``Topology.shard_group``),
    so its partitions, norms, overflow checks, steps and checkpoints are right for every ``os`` as they are. What is
    ours is how gradients get there:

    - A full bucket moves N -> g (``average_tensor``): in every micro-step if g is I or G, at the accumulation
      boundary only if g is N (stage 1 fills buckets only then; they go to I first in that case). What is in I moves
      on to ``os`` at the boundary (``sync_gradients``). See Note [Where buckets of flat buffers arrive].
    - After the step, updated parameters move os -> N (``FlatUpdates.gather``).

    The optimizer's shard is the parent's flat ``averaged_gradients``, which it otherwise keeps for fp32 accumulation.
    With optimizer offload it is the gradient on the host that the optimizer reads. So the device holds nothing of the
    gradients between micro-steps if g = G, and with g = I the I-slice, whose hop at the boundary starts there.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject.auto_ep_folding import reduce_autoep_folding_gradient
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from deepspeed_ext.comm.spans import Span
from deepspeed_ext.overrides import checked, override, replaced
from deepspeed_ext.strategy import Placement
from deepspeed_ext.zero.context import Context
from deepspeed_ext.zero.families import DENSE
from deepspeed_ext.zero.flat.buffers import FlatBuffers
from deepspeed_ext.zero.flat.gradients import AllFlatGradients, Mean
from deepspeed_ext.zero.flat.shard_gradients import ShardGradients
from deepspeed_ext.zero.flat.stage12_view import Stage12View
from deepspeed_ext.zero.flat.states import FlatStates
from deepspeed_ext.zero.flat.updates import FlatUpdates, has_own_partition, notify_of_set_weights
from deepspeed_ext.zero.norms import without_duplicates
from deepspeed_ext.zero.optimizer import ParoOptimizer, without_host_synchronization
from deepspeed_ext.zero.shards import CrossingSpan, FlatShard
from deepspeed_ext.zero.writers import CheckpointWriters

BucketEntry = tuple[int, int, int]  # parameter group, index in the group, parameter id


@checked
class Stage12Optimizer(ParoOptimizer, Stage12View, DeepSpeedZeroOptimizer):
    """Stage-1/2 optimizer of a strategy with p = N. See Note [What runs when].

    Args:
        context: with a strategy of p = N.
        dp_process_group: the data-parallel group, as the engine passes it; ``context`` replaces it.
        The others are the parent's.

    Attributes:
        buffers: the parent's flat buffers, one for each parameter group.
        shards: gradients of the optimizer's shards.
        gradients: gradients that are being reduced to these, by family.
        updates: updated parameters after a step.
        flat_states: state dicts of checkpoints.
    """

    gradients: AllFlatGradients

    def __init__(self, *args: Any, context: Context, dp_process_group: object = None, **kwargs: Any) -> None:
        self._attach_parts(context)
        self.buffers = FlatBuffers(context, self)
        groups = {name: family.topology.shard_group(self.strategy.os) for name, family in self.families.items()}
        dense = groups.pop(DENSE)
        if groups:
            kwargs["expert_data_parallel_group"] = groups
        super().__init__(*args, dp_process_group=dense, **kwargs)
        context.reductions.use(self.reduction_stream if context.overlap else None)
        self.micro_steps.measure(param.numel() for param in self.buffers.params())
        self.buffers.number_parameters(self.param_names)
        if self.cpu_offload:  # memory for the parent's accumulation on the device, parameter by parameter
            self.temp_grad_buffer_for_gpu_offload = torch.empty(0)
        self.unscaled_updates = None if self.cpu_offload else self.groups_lacking_loss_scale
        self.shards = ShardGradients(context, optimizer=self, buffers=self.buffers)
        mean = Mean.of_optimizer(context, self)
        self.gradients = AllFlatGradients(context, buffers=self.buffers, shards=self.shards, mean=mean)
        self.updates = FlatUpdates(
            context,
            buffers=self.buffers,
            resync=self.resync,
            flat=self.bit16_groups_flat,
            partitions=self.parallel_partitioned_bit16_groups,
        )
        self.bit16_groups_flat = self.updates.flat
        self.flat_states = FlatStates(self)
        self.writers = CheckpointWriters(self.families, self.strategy, [buffer.rank for buffer in self.buffers])

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
        buffer = self.buffers.add(tensor_list, alignment, any(param_padding))
        paddings = [*param_padding[:-1], param_padding[-1] + buffer.filling]
        return super().flatten_dense_tensors_aligned(tensor_list, alignment, use_cpu_data, paddings)

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
        elif partition_id == buffer.rank:
            self.buffers.fill_tables(i)

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
        if self.buffers[group_id].striped:
            self.buffers.fill_positions(group_id)
        else:
            super().get_grad_position(group_id, tensor_list, first_offset, partition_size)

    @override
    def _link_all_hp_params(self) -> None:
        """Tell parameters where their weights and states are, for DeepSpeed's ``safe_get_full_...``.

        The parent goes by the model's order unless it has padded a parameter, so with ``round_robin_gradients`` it
        would name other parameters, also in universal checkpoints. Any padding has it look at the real places.
        """
        paddings = self.round_robin_bit16_padding
        in_any_order = [[1]] * len(paddings) if self.round_robin_gradients else paddings
        with replaced(self, round_robin_bit16_padding=in_any_order):
            super()._link_all_hp_params()
        self.buffers.link_stripes()
        self._hp_optimizer_states_linked = self.buffers.link_states()
        notify_of_set_weights(self.buffers, self)

    @override
    def _lazy_init_hp_params_optimizer_state(self) -> None:
        """Link states as soon as a parameter group has some: the parent links all groups when the first has."""
        if not self._hp_optimizer_states_linked:
            self._hp_optimizer_states_linked = self.buffers.link_states()

    @override
    def _restore_from_bit16_weights(self) -> None:
        """Take the optimizer's weights from the model's, which somebody has just loaded."""
        with self.updates.partitions():
            self.updates.take_weights()
            super()._restore_from_bit16_weights()
        self.outer.restart()

    # What others ask for ##########################################################################

    def family_of_buffer(self, buffer: int) -> str:
        """Return the family of a flat buffer; see ``ParoOptimizer``."""
        return self.buffers[buffer].family.name

    def crossing_spans(self) -> list[CrossingSpan]:
        """Return where gradients that cross between groups are; see ``ParoOptimizer``."""
        return [span for buffer in self.buffers for span in buffer.crossing_spans(self.param_names)]

    def owned_span(self, param: nn.Parameter) -> Span:
        """Return the elements whose optimizer states this rank has; see ``ParoOptimizer``."""
        return self.buffers.buffer_of(param).member(param).span

    def owned_gradient(self, param: nn.Parameter) -> Tensor:
        """Return the gradient of these elements; see ``ParoOptimizer``."""
        buffer = self.buffers.buffer_of(param)
        return buffer.member(param).in_shard.of(self.shards.of(buffer.number))

    def flat_shards(self) -> list[FlatShard]:
        """Return the parameters in this rank's partitions; see ``FlatShards``."""
        return [buffer.flat_shard() for buffer in self.buffers]

    def shard_weights(self, number: int) -> nn.Parameter:
        """Return this rank's partition of the optimizer's weights; see ``FlatShards``."""
        weights: nn.Parameter = self.single_partition_of_fp32_groups[number]
        return weights

    def shard_gradient(self, number: int) -> Tensor:
        """Return the gradient of this rank's partition; see ``FlatShards``."""
        return self.shards.of(number)

    def gradients_replaced(self, shards: Sequence[FlatShard]) -> None:
        """Give updates to an offloaded optimizer; see ``FlatShards``."""
        if self.cpu_offload:
            self.shards.hand_over(shards)

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
        if self.micro_steps.is_full(bucket):
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
        kept = tensor.untyped_storage().data_ptr() in storages and not self.micro_steps.overlap
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
        """Move a bucket N -> g. ``freed``: tensors that may be freed before it has been waited for."""
        if entries:
            members = [(number, self.bit16_groups[number][index]) for number, index, _ in entries]
            last, bucket = self.micro_steps.is_last, self.ipg_buckets[dtype]
            self.gradients.reduce(tensors, members, bucket, dtype=dtype, last=last, freed=freed)

    @override
    def _build_compact_grad_partition_buffer(self, group_idx: int) -> Any:
        """Return a shard of zeros: the parent's, or ours on the host and for a buffer with stripes."""
        if self.cpu_offload or self.buffers[group_idx].striped:
            return self.shards.make(group_idx)
        return super()._build_compact_grad_partition_buffer(group_idx)

    @override
    def _use_compact_grad_partition_buffer(self, group_idx: int) -> bool:
        """Say yes: one flat buffer is what hops deliver into, and what the step reads without another copy."""
        return True

    # The accumulation boundary: g -> os ###########################################################

    @override
    def independent_gradient_partition_epilogue(self) -> None:
        """End a micro-step: flush the buckets and, at the accumulation boundary, move g to os."""
        self.updates.settle()
        self.setup_buckets()  # no hook has done it in a stage of a pipeline that has nothing to train
        boundary = self.is_gradient_accumulation_boundary()
        self._flush_buckets(boundary and self.strategy.g == Placement.N)
        self.micro_steps.end()
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
        if not left_over:
            return
        for bucket in filled:
            self._fill_other_buffer(bucket)
        for i, group in enumerate(self.bit16_groups):
            for param in group:
                waiting = not self.params_already_reduced[self.get_param_id(param)]
                if waiting and param.numel() and self.get_gradient_for_reduction(param) is not None:
                    self.setup_buckets()
                    self.reduce_ready_partitions_and_remove_grads(param, i)
        self.reduce_ipg_grads()

    def sync_gradients(self) -> None:
        """Finish all buckets, and complete the gradients of the optimizer's shards; see ``ParoOptimizer``."""
        self.micro_steps.finish_buckets()
        self.gradients.complete_shards()
        if self.cpu_offload:
            self._wait_for_offload_copies()
        self.shards.clear_padding()
        self.micro_steps.learn()
        self.complete_gradients()
        if self.cpu_offload:
            self.shards.hand_over()

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
        number = next(number for number, held in self.averaged_gradients.items() if held is gradients)
        with self._over_all_experts(number):
            norm = super().get_grad_norm_direct(gradients, params, norm_type)
        return without_duplicates(norm, self.buffers[number].replicas)

    @override
    def complete_grad_norm_calculation_for_cpu_offload(self, params: Any) -> Tensor:
        """Return the same norm with an offloaded optimizer."""
        number = next(number for number, held in enumerate(self.params_in_partition) if held is params)
        with self._over_all_experts(number):
            norm = super().complete_grad_norm_calculation_for_cpu_offload(params)
        return without_duplicates(norm, self.buffers[number].replicas)

    def _over_all_experts(self, number: int) -> AbstractContextManager[None]:
        """Within this context the parent computes a norm of experts over all data-parallel ranks: the ranks that shard
        their optimizer states may not hold every expert. Each tensor-parallel rank counts its own folded experts."""
        if not self.buffers[number].has_experts:
            return nullcontext()
        counting = self.model_parallel_rank if self.autoep_folding_tp_group is None else 0
        return replaced(self, dp_process_group=self.topology.world, model_parallel_rank=counting)

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
        self.micro_steps.finish_buckets()
        super().offload_states(*args, **kwargs)
        if OffloadStateTypeEnum.lp_grads in self.offloaded_states:
            self.gradients.to("cpu")

    @override
    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        """Bring back what ``offload_states`` has moved; partitions are made anew for that."""
        self.updates.settle()
        super().reload_states(*args, **kwargs)
        # The parent links before it makes new tensors of states on the device: those of the host would stay linked.
        self._hp_optimizer_states_linked = self.buffers.link_states()
        self.gradients.to(get_accelerator().current_device_name())
        self.updates.give_up()

    @override
    def copy_grads_in_partition(self, param: nn.Parameter, group_idx: int | None = None) -> None:
        """Note each parameter of a bucket. Nothing is copied yet: shards are complete after ``sync_gradients``."""
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
        self.gradients.drop()
        self.updates.drop()
        super().destroy()
