# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Strategies with p = N: ZeRO's stage-1/2 optimizer with gradients and optimizer states placed by the strategy.

Note [Order of operations]
    The parent is built over the process group over which the optimizer states are sharded (``Topology.shard_group``),
    so its partitions, norms, overflow checks, steps, and checkpoints are used unchanged. Only the communication is
    overridden:

    - Buckets are reduced N -> g (``flat/buckets.py``): in every micro-step if g is I or G, only at the accumulation
      boundary if g is N. (Stage 1 fills buckets only then; they are reduced to I first.) Gradients in I are reduced to
      ``os`` at the boundary (``sync_gradients``). See Note [Reduction of flat buffers].
    - After the step, updated parameters are gathered os -> N (``FlatUpdates.gather``).

    The optimizer's shard is the parent's flat ``averaged_gradients``, which it otherwise keeps for fp32 accumulation.
    With optimizer offload it is the gradient on the host that the optimizer reads. So between micro-steps the device
    holds no gradients if g = G. If g = I it holds the I-slice, the input of the hop at the boundary.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject.auto_ep_folding import reduce_autoep_folding_gradient
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from deepspeed_ext.comm.agreement import all_reduce_max
from deepspeed_ext.comm.spans import Span
from deepspeed_ext.overrides import check_overrides, override, replace_attributes
from deepspeed_ext.strategy import Placement
from deepspeed_ext.zero.checkpoint_ranks import CheckpointWriters
from deepspeed_ext.zero.context import Context
from deepspeed_ext.zero.families import DENSE
from deepspeed_ext.zero.flat.buckets import GradientBuckets
from deepspeed_ext.zero.flat.buffers import FlatBuffers
from deepspeed_ext.zero.flat.gradients import AllFlatGradients, Mean
from deepspeed_ext.zero.flat.shard_gradients import ShardGradients
from deepspeed_ext.zero.flat.stage12_view import Stage12View
from deepspeed_ext.zero.flat.states import FlatStates
from deepspeed_ext.zero.flat.updates import FlatUpdates, has_own_partition, notify_of_set_weights
from deepspeed_ext.zero.norms import without_duplicates
from deepspeed_ext.zero.optimizer import ParoOptimizer, without_host_synchronization
from deepspeed_ext.zero.shards import FlatShard, InterGroupSpan


@check_overrides
class Stage12Optimizer(ParoOptimizer, Stage12View, DeepSpeedZeroOptimizer):
    """Stage-1/2 optimizer of a strategy with p = N. See Note [Order of operations].

    Args:
        context: shared constants; a strategy with p = N.
        dp_process_group: the engine's data-parallel group; ignored, because ``context`` has the process groups.
        Other arguments are the parent's.

    Attributes:
        buffers: the parent's flat buffers, one for each parameter group.
        shards: gradients of the optimizer's shards.
        gradients: gradients that are being reduced to the shards, by family.
        buckets: gradients of a backward that have not been sent.
        updates: all-gathers of updated parameters.
        flat_states: converts state dicts of checkpoints.
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
        context.reductions.set_stream(self.reduction_stream if context.overlap else None)
        self.buffers.number_parameters(self.param_names)
        if self.cpu_offload:  # frees the parent's buffer for accumulation on the device, which is not used here
            self.temp_grad_buffer_for_gpu_offload = torch.empty(0)
        self.unscaled_updates = None if self.cpu_offload else self.groups_lacking_loss_scale
        self.shards = ShardGradients(context, optimizer=self, buffers=self.buffers)
        mean = Mean.from_optimizer(context, self)
        self.gradients = AllFlatGradients(context, buffers=self.buffers, shards=self.shards, mean=mean)
        self.buckets = GradientBuckets(
            context,
            optimizer=self,
            buffers=self.buffers,
            gradients=self.gradients,
            micro_steps=self.micro_steps,
        )
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
        """Set process groups of expert parameter groups. The parent asserts one exists; frozen experts have none."""
        if any(map(self.is_moe_group, self.optimizer.param_groups)):
            super()._configure_moe_settings()
        else:
            self.has_moe_layers = False

    # Flat buffers and their partitions ############################################################

    @override
    def flatten_dense_tensors_aligned(
        self,
        tensor_list: Sequence[Any],
        alignment: int,
        use_cpu_data: bool = False,
        param_padding: Sequence[int] | None = None,
    ) -> Tensor:
        """Flatten tensors. A call with ``param_padding`` builds a flat buffer, and adds it to ``buffers``."""
        if param_padding is None:
            return super().flatten_dense_tensors_aligned(tensor_list, alignment, use_cpu_data)
        buffer = self.buffers.add(tensor_list, alignment, any(param_padding))
        paddings = [*param_padding[:-1], param_padding[-1] + buffer.extra_padding]
        return super().flatten_dense_tensors_aligned(tensor_list, alignment, use_cpu_data, paddings)

    @override
    def get_data_parallel_partitions(self, tensor: Tensor, group_id: int) -> list[Tensor]:
        """Return the partitions of a flat buffer: only this rank's if it is striped, else the parent's."""
        buffer = self.buffers[group_id]
        if buffer.striped:
            return buffer.partitions(tensor)
        partitions: list[Tensor] = super().get_data_parallel_partitions(tensor, group_id)
        if has_own_partition(buffer, self.resync):
            # Differences are computed against the flat buffer, so the step must not write to it.
            partitions[buffer.rank] = partitions[buffer.rank].clone()
        return partitions

    @override
    def get_partition_info(
        self, tensor_list: Sequence[nn.Parameter], partition_size: int, partition_id: int, param_padding: Any = None
    ) -> tuple[list[nn.Parameter], list[nn.Parameter], int]:
        """Return the parameters inside and outside this rank's partition of the flat buffer being built."""
        buffer = self.buffers[len(self.partition_size)]
        if not buffer.striped:
            return super().get_partition_info(tensor_list, partition_size, partition_id, param_padding)
        own_params = [param for param in tensor_list if buffer.holds(param)]
        return own_params, [param for param in tensor_list if not buffer.holds(param)], 0

    @override
    def initialize_gradient_partition(self, i: int, param_group: Sequence[nn.Parameter], partition_id: int) -> None:
        """Fill the parent's tables for this rank only. The parent reads other ranks' entries only to send to them.
        Building them needs seconds, and memory, with thousands of ranks."""
        buffer = self.buffers[i]
        if partition_id == buffer.rank and not buffer.striped:
            super().initialize_gradient_partition(i, param_group, partition_id)
        elif partition_id == buffer.rank:
            self.buffers.fill_tables(i)

    @override
    def get_first_param_index(
        self, group_id: int, param_group: Sequence[nn.Parameter], partition_id: int
    ) -> int | None:
        """Return the index of the first parameter in this rank's partition, if any."""
        if partition_id != self.buffers[group_id].rank:
            return None
        first: int | None = super().get_first_param_index(group_id, param_group, partition_id)
        return first

    @override
    def get_grad_position(
        self, group_id: int, tensor_list: Sequence[nn.Parameter], first_offset: int, partition_size: int
    ) -> None:
        """Fill the parent's table of the positions of this rank's gradients, with optimizer offload."""
        if self.buffers[group_id].striped:
            self.buffers.fill_positions(group_id)
        else:
            super().get_grad_position(group_id, tensor_list, first_offset, partition_size)

    @override
    def _link_all_hp_params(self) -> None:
        """Link parameters to their weights and states, for DeepSpeed's ``safe_get_full_...``.

        The parent assumes the model's order unless it has padded a parameter. With ``round_robin_gradients`` it would
        link the wrong parameters, also in universal checkpoints. Any padding makes it use the real offsets.
        """
        paddings = self.round_robin_bit16_padding
        link_paddings = [[1]] * len(paddings) if self.round_robin_gradients else paddings
        with replace_attributes(self, round_robin_bit16_padding=link_paddings):
            super()._link_all_hp_params()
        self.buffers.link_stripes()
        self._hp_optimizer_states_linked = self.buffers.link_states()
        notify_of_set_weights(self.buffers, self)

    @override
    def _lazy_init_hp_params_optimizer_state(self) -> None:
        """Link states of each parameter group once they exist; the parent links all groups once the first has any."""
        if not self._hp_optimizer_states_linked:
            self._hp_optimizer_states_linked = self.buffers.link_states()

    @override
    def _restore_from_bit16_weights(self) -> None:
        """Copy the optimizer's weights from the model's, which were just loaded."""
        with self.updates.partitions():
            self.updates.copy_weights()
            super()._restore_from_bit16_weights()
        self.outer.restart()  # anchors must equal the new weights

    # Queries ######################################################################################

    def family_of_buffer(self, buffer: int) -> str:
        """Return the family of a flat buffer; see ``ParoOptimizer``."""
        return self.buffers[buffer].family.name

    def inter_group_spans(self) -> list[InterGroupSpan]:
        """Return the spans of gradients that are sent between groups; see ``ParoOptimizer``."""
        return [span for buffer in self.buffers for span in buffer.inter_group_spans(self.param_names)]

    def owned_span(self, param: nn.Parameter) -> Span:
        """Return the elements whose optimizer states this rank has; see ``ParoOptimizer``."""
        return self.buffers.buffer_of(param).member(param).span

    def owned_gradient(self, param: nn.Parameter) -> Tensor:
        """Return the gradient of ``owned_span``; see ``ParoOptimizer``."""
        buffer = self.buffers.buffer_of(param)
        return buffer.member(param).in_shard.of(self.shards.gradient_of(buffer.number))

    def owned_gradients(self) -> list[Tensor]:
        """Return all gradients in the optimizer's shard; see ``ParoOptimizer``."""
        return [self.shards.gradient_of(buffer.number) for buffer in self.buffers]

    def flat_shards(self) -> list[FlatShard]:
        """Return the parameters in this rank's partitions; see ``FlatShards``."""
        return [buffer.flat_shard() for buffer in self.buffers]

    def shard_weights(self, number: int) -> nn.Parameter:
        """Return this rank's partition of the optimizer's weights; see ``FlatShards``."""
        weights: nn.Parameter = self.single_partition_of_fp32_groups[number]
        return weights

    def shard_gradient(self, number: int) -> Tensor:
        """Return the gradient of this rank's partition; see ``FlatShards``."""
        return self.shards.gradient_of(number)

    def gradients_replaced(self, shards: Sequence[FlatShard]) -> None:
        """Pass updates to an offloaded optimizer; see ``FlatShards``."""
        if self.cpu_offload:
            self.shards.pass_to_optimizer(shards)

    # Buckets: N -> g ##############################################################################

    @override
    def _maybe_reduce_autoep_folding_tp_gradient(self, param: nn.Parameter, grad: Tensor) -> None:
        """Correct a gradient before it is packed, at any stage; Note [Folded experts] in ``families.py``."""
        if self.autoep_folding_tp_group is not None:
            reduce_autoep_folding_gradient(
                self.autoep_folding_spec, param, grad, tp_group=self.autoep_folding_tp_group
            )

    @override
    def reduce_independent_p_g_buckets_and_remove_grads(self, param: nn.Parameter, i: int) -> None:
        """Put a gradient into its bucket, and reduce the buckets that it completes.

        With g = N, a backward inside a forward is left to ``flush``: the flag of the boundary is not set yet.
        """
        begun = self.strategy.g != Placement.N or self._backward_active_depth > 0
        if begun and param.numel() and getattr(param, "ds_grad_is_ready", True):
            self.buckets.add(param)

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also drop an interrupted backward, with all gradients of its accumulation: some have been added to them."""
        super().zero_grad(set_to_none)
        if not self.micro_steps.has_begun:
            return
        self.buckets.drop()
        self.gradients.reset()
        self.averaged_gradients.update(dict.fromkeys(self.averaged_gradients))
        self.gradients_dropped()
        self.micro_steps.has_begun, self._backward_active_depth = False, 0

    @override
    def reduce_ipg_grads(self, comm_dtype: torch.dtype | None = None) -> None:
        """Do nothing: the parent's buckets are not used."""

    @override
    def _build_compact_grad_partition_buffer(self, group_idx: int) -> Any:
        """Return a zero shard: the parent's, or from ``shards`` with offload or for a striped buffer."""
        if self.cpu_offload or self.buffers[group_idx].striped:
            return self.shards.make_shard(group_idx)
        return super()._build_compact_grad_partition_buffer(group_idx)

    @override
    def _use_compact_grad_partition_buffer(self, group_idx: int) -> bool:
        """Return True: hops write into one flat buffer that the step reads without a copy."""
        return True

    # The accumulation boundary: g -> os ###########################################################

    @override
    def independent_gradient_partition_epilogue(self) -> None:
        """End a micro-step: flush the buckets and, at the accumulation boundary, reduce g -> os."""
        self.updates.wait_and_free()
        self.setup_buckets()  # in a pipeline stage without trained parameters no hook has set them up
        accumulates = self.strategy.g == Placement.N
        at_boundary = self.is_gradient_accumulation_boundary()
        if at_boundary if accumulates else self.micro_steps.has_begun:
            self.buckets.flush()
        self.micro_steps.end_micro_step()
        with without_host_synchronization():
            super().independent_gradient_partition_epilogue()

    def sync_gradients(self) -> None:
        """Finish all buckets, and complete the gradients of the optimizer's shards; see ``ParoOptimizer``."""
        self.micro_steps.finish_buckets()
        self.gradients.complete_shards()
        if self.cpu_offload:
            self._wait_for_offload_copies()
        self.shards.clear_padding()  # or it would count in the norm
        self.buckets.learn_order(partial(all_reduce_max, group=self.topology.world))
        self.buckets.free()
        self.complete_gradients()
        if self.cpu_offload:
            self.shards.pass_to_optimizer()

    # Norms ########################################################################################

    @override
    def scaled_global_norm(self, norm_type: int = 2) -> Tensor:
        """Return the norm of the gradients or updates that the step applies; see ``_global_norm``."""
        self.muon.apply()
        parent_norm = super().scaled_global_norm
        return self._global_norm(lambda: parent_norm(norm_type))

    @override
    def get_grad_norm_direct(self, gradients: Any, params: Any, norm_type: int = 2) -> Tensor:
        """Return the parent's norm of a parameter group; for experts over all ranks, each expert once."""
        number = next(number for number, entry in self.averaged_gradients.items() if entry is gradients)
        with self._over_all_experts(number):
            norm = super().get_grad_norm_direct(gradients, params, norm_type)
        return without_duplicates(norm, self.buffers[number].replicas)

    @override
    def complete_grad_norm_calculation_for_cpu_offload(self, params: Any) -> Tensor:
        """Return the same norm with an offloaded optimizer."""
        number = next(number for number, own_params in enumerate(self.params_in_partition) if own_params is params)
        with self._over_all_experts(number):
            norm = super().complete_grad_norm_calculation_for_cpu_offload(params)
        return without_duplicates(norm, self.buffers[number].replicas)

    def _over_all_experts(self, number: int) -> AbstractContextManager[None]:
        """Make the parent compute norms of experts over all data-parallel ranks: the ranks that shard their optimizer
        states may not hold every expert. Each tensor-parallel rank counts its own folded experts."""
        if not self.buffers[number].has_experts:
            return nullcontext()
        tp_rank = self.model_parallel_rank if self.autoep_folding_tp_group is None else 0
        return replace_attributes(self, dp_process_group=self.topology.world, model_parallel_rank=tp_rank)

    # The step, and parameters after it: os -> N ###################################################

    @override
    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        """Step while this rank's partitions are allocated."""
        with self.updates.partitions(stepping=True):
            return super().step(closure)

    @override
    def update_lp_params(self) -> None:
        """Send the optimizer's weights to all ranks, rounded to the parameters' dtype. Collective."""
        with self.updates.partitions():
            super().update_lp_params()
            self.updates.drain()

    def send_parameters(self) -> None:
        """Send the optimizer's weights to all ranks; see ``ParoOptimizer``."""
        self._require_parameters()
        self.update_lp_params()

    @override
    def _optimizer_step(self, group_no: int) -> None:
        """Also pass the updated weights to an outer optimizer."""
        super()._optimizer_step(group_no)
        self.outer.after_step(group_no)

    # Muon #########################################################################################

    @override
    def _commit_muon_momentum(self) -> None:
        """Apply Muon even if no norm was computed, and keep its momentum, because the step is not skipped."""
        self.muon.apply()
        self.muon.finish_step(True)

    @override
    def _apply_muon_updates_cpu_offload(self) -> None:
        """Do nothing; ``scaled_global_norm`` applies Muon."""

    # Checkpoints ##################################################################################

    def checkpoint_event_prologue(self) -> None:
        """Wait for parameters before the engine saves or loads them."""
        self.updates.drain()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return DeepSpeed's state dict, in its order; see ``flat/states.py``."""
        return self.flat_states.in_stock_order(super().state_dict())

    def check_states(self, state: Mapping[str, Any]) -> None:
        """Reject a rank's state dict that is sharded differently; see ``FlatStates.check``."""
        self.flat_states.check(state)

    @override
    def _load_legacy_checkpoint(
        self, state_dict_list: list[Any], load_optimizer_states: bool = True, load_from_fp32_weights: bool = False
    ) -> None:
        """Reject optimizer states that are sharded differently, and load others in the order of the buffers."""
        states = self.flat_states.in_memory_order(state_dict_list, load_optimizer_states, load_from_fp32_weights)
        super()._load_legacy_checkpoint(states, load_optimizer_states, load_from_fp32_weights)

    # Offloaded states #############################################################################

    @override
    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Offload DeepSpeed's states, and I-slices together with its gradients."""
        self.updates.drain()  # gathers in flight write to the flat buffers
        self.micro_steps.finish_buckets()  # buckets in flight are added to slices and shards
        super().offload_states(*args, **kwargs)
        if OffloadStateTypeEnum.lp_grads in self.offloaded_states:
            self.gradients.to("cpu")

    @override
    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        """Reload offloaded states. This allocates partitions, which are freed again."""
        self.updates.wait_and_free()
        super().reload_states(*args, **kwargs)
        # The parent links states before it creates the device tensors, so host tensors would stay linked.
        self._hp_optimizer_states_linked = self.buffers.link_states()
        self.gradients.to(get_accelerator().current_device_name())
        self.updates.free_partitions()

    @override
    def reset_cpu_buffers(self) -> None:
        """Also drop the shards: with offload the parent would add new gradients to the gradients of a skipped step."""
        super().reset_cpu_buffers()
        self.averaged_gradients.update(dict.fromkeys(self.averaged_gradients))

    @override
    def destroy(self) -> None:
        """Also drop gradients of an unfinished accumulation, and remove hooks from the model."""
        self.buckets.drop()
        self.gradients.drop()
        self.updates.drop()
        super().destroy()
