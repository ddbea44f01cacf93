# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""ZeRO's stage-3 optimizer for strategies with p = I or G, with all three states placed by the table.

Note [Order of work, parameters sharded]
    The parent stores, steps, and saves chunks of parameters over the process group that shards the optimizer states.
    This class overrides how parameters and gradients get there:

    - Forward and backward gather parameters p -> N (``sharded/gathers.py``).
    - A full bucket is reduced N -> g (``__avg_scatter_grads``) in every micro-step if g is I or G. With g = N
      gradients are kept until the accumulation boundary. All of them are reduced there, in one order, so that ranks
      may have used different parameters (``sharded/gradients.py``).
    - At the boundary, gradients in I are reduced to ``os`` once (``sync_gradients``).
    - If the engine knows that a micro-batch is the last one, the boundary's buckets are already sent during its
      backward, as they become complete; see Note [Early reduction] in ``boundary.py``.
    - After the step, updated parameters are gathered os -> p (``gather_updates``).

    The parts are in ``sharded/``: parameters, gradient reduction, and this rank's flat partitions.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, cast

import torch
from deepspeed import comm as dist
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank
from torch import Tensor, nn

from deepspeed_ext.comm.spans import Span
from deepspeed_ext.deepspeed_types import ZeroParameter
from deepspeed_ext.leaf.gradients import LeafGradients
from deepspeed_ext.overrides import check_overrides, override, replace_attributes
from deepspeed_ext.strategy import Placement
from deepspeed_ext.zero.checkpoint_ranks import CheckpointWriters
from deepspeed_ext.zero.context import Context
from deepspeed_ext.zero.families import DENSE, family_of
from deepspeed_ext.zero.norms import without_duplicates
from deepspeed_ext.zero.optimizer import ParoOptimizer, is_replica, without_host_synchronization
from deepspeed_ext.zero.sharded.coordinator import drop_references, use_coordinator
from deepspeed_ext.zero.sharded.parameter_chunks import owned_span, with_padding, without_padding
from deepspeed_ext.zero.sharded.parameters import GatherSettings, ShardedParameters, slices_name
from deepspeed_ext.zero.sharded.partitions import FlatPartitions, OffloadedStates
from deepspeed_ext.zero.sharded.reduction import GradientReduction
from deepspeed_ext.zero.sharded.stage3_view import Stage3View
from deepspeed_ext.zero.shards import FlatShard, InterGroupSpan


@check_overrides
class Stage3Optimizer(ParoOptimizer, Stage3View, DeepSpeedZeroOptimizer_Stage3):
    """Stage-3 optimizer of a strategy with p = I or G. See Note [Order of work, parameters sharded].

    Args:
        context: shared constants, with a strategy of p = I or G.
        gathering: keys for gathering parameters.
        dp_process_group: the data-parallel group, as the engine passes it; ``context`` replaces it.
        The others are the parent's.

    Attributes:
        parameters: shards and gathers of parameters; ``slices`` and ``gathers`` have one entry per family.
        reduction: reduces gradients to the optimizer's shard; ``gradients`` has one entry per family.
        partitions: this rank's elements of the optimizer states.
        leaves: reduction of leaf modules.
    """

    # ``ParoOptimizer`` runs Muon. DeepSpeed's own needs full gradients, and refuses ``reduce_scatter``.
    use_muon = property(lambda self: False, lambda self, value: None)

    def __init__(
        self, *args: Any, context: Context, gathering: GatherSettings, dp_process_group: object = None, **kwargs: Any
    ) -> None:
        self._attach_parts(context)
        self._gathering = gathering
        super().__init__(*args, dp_process_group=self.topology.shard_group(self.strategy.os), **kwargs)
        ranks = [dist.get_rank(group) for group in self.sub_group_process_groups]
        self.writers = CheckpointWriters(self.families, self.strategy, ranks)
        self.unscaled_updates = None if self.offload_optimizer else self.sub_groups_lacking_loss_scale
        # The norm counts parameters of all pipeline stages, but replicated ones of one tensor-parallel rank only.
        if self.model_parallel_group is not None:
            self.model_parallel_rank = bwc_tensor_model_parallel_rank(kwargs.get("mpu"))
        self.parameters.whole.gather()
        self.parameters.whole.wait()  # the first forward may read one outside of its module

    # Parameters #######################################################################################

    @override
    def initialize_ds_offload(self, **kwargs: Any) -> Any:
        """Shard parameters by p, after DeepSpeed has sharded them and hooked their modules."""
        with use_coordinator(self.topology.shard_group(self.strategy.p)):
            offload = super().initialize_ds_offload(**kwargs)
        self.parameters = ShardedParameters(
            self.context, module=kwargs["module"], offload=offload, settings=self._gathering, resync=self.resync
        )
        self.slices, self.gathers = self.parameters.slices, self.parameters.gathers
        return offload

    @override
    def _configure_offloading(self, *args: Any, **kwargs: Any) -> None:
        """Clear ``offload_param`` for slices: the parent builds their flat buffer as on the device."""
        super()._configure_offloading(*args, **kwargs)
        self.offload_param = self.offload_param and not self.parameters.has_slices

    @override
    def _create_fp16_sub_groups(self, params_group: list[ZeroParameter]) -> list[list[ZeroParameter]]:
        """Create sub-groups of neighbors with one kind of shards, so that their order does not depend on the kinds.

        With slices, each is sent in one all-gather after the step, of at most a bucket.
        """
        configured, sub_groups = self.sub_group_size, list[list[ZeroParameter]]()
        for name, run in groupby(params_group, slices_name):
            if self.parameters.slices[name].has_slices:
                self.sub_group_size = min(configured, max(1, self.context.gather_bucket // self.context.ranks))
            sub_groups += super()._create_fp16_sub_groups(list(run))
            self.sub_group_size = configured
        return sub_groups

    @override
    def _get_parameter_partitions(self) -> list[Tensor]:
        """Return the tensors for the flat parameter buffer: all rows of slices."""
        return [part for group in self.fp16_groups for part in self.parameters.slices_of(group).partitions(group)]

    @override
    def _set_fp16_partitioned_groups_flat(self) -> None:
        self.lp_param_buffer, flats = self.parameters.make_blocks(self.lp_param_buffer, self.fp16_groups)
        self.fp16_partitioned_groups_flat.extend(flats)

    @override
    def _pre_step(self) -> None:
        """Prepare a step: complete gradients if the caller has declared the boundary after the last backward."""
        self.parameters.begin_step()  # gathers of the last step may still write rows that this step writes
        if self.reduction.awaits_boundary:
            self.sync_gradients()
        self.reduction.learn_order()
        self.reduction.clear()
        super()._pre_step()

    # Gradients: N -> g ################################################################################

    @override
    def _setup_for_real_optimizer(self) -> None:
        """Create the parts for gradients and optimizer states, after DeepSpeed has created its flat buffers."""
        super()._setup_for_real_optimizer()
        self.reductions.set_stream(self.reduce_and_partition_stream)  # None on devices without streams
        self.reduction = GradientReduction(self.context, self, micro_steps=self.micro_steps, slices=self.slices)
        self.gradients = self.reduction.gradients
        self.partitions = FlatPartitions(self.context, optimizer=self, reduction=self.reduction)
        self._offloaded = OffloadedStates(optimizer=self, parameters=self.parameters, reduction=self.reduction)

    @override
    def create_reduce_and_remove_grad_hooks(self) -> None:
        """Reduce the gradients of a leaf module together, when all of them exist."""
        super().create_reduce_and_remove_grad_hooks()
        self.leaves = LeafGradients(self, self.reduction)

    @override
    def reduce_ready_partitions_and_remove_grads(self, param: Any) -> None:
        """Put a complete gradient into a bucket, or store it unreduced until the boundary."""
        if self.strategy.g != Placement.N and not self.reduction.waits(param):
            super().reduce_ready_partitions_and_remove_grads(param)
            self.reduction.reduce_if_full(self.context.message_dtype(param))
        elif self.reduction.keeps_full and not self._coalesce_grad_reduction:
            self.reduction.keep_full(param)

    @override
    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(
        self, params_to_reduce: list[ZeroParameter], communication_data_type: torch.dtype
    ) -> list[Tensor]:
        """Start to reduce a bucket N -> g. The parent gets no partitions here, because the result is in flight."""
        self.reduction.reduce_bucket(communication_data_type)
        return []

    @override
    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads(
        self, buffer_to_reduce: Tensor, communication_data_type: torch.dtype
    ) -> list[Tensor]:
        """Reduce with ``reduce_scatter`` false, the only case in which ZeRO-3 counts sequence parallelism."""
        self.reduction.reduce_bucket(communication_data_type, self.sequence_parallel_size)
        return []

    @override
    def partition_grads(self, params_to_release: list[ZeroParameter], grad_partitions: list[Tensor]) -> None:
        """Release the gradients of a bucket that has been packed."""
        self.reduction.release(params_to_release)

    @override
    def backward_epilogue(self) -> None:
        """End a backward, even if it reduces nothing."""
        self.leaves.end_open_passes()
        super().backward_epilogue()

    # The accumulation boundary: g -> os ###############################################################

    @override
    def independent_gradient_partition_epilogue(self) -> None:
        """End a micro-step: flush the buckets and, at the accumulation boundary, reduce g -> os."""
        self.leaves.end_of_backward()
        self.reduction.flush_buckets()
        with without_host_synchronization():
            super().independent_gradient_partition_epilogue()
        self.reduction.end_backward()
        self.micro_steps.end_micro_step()

    def sync_gradients(self) -> None:
        """Complete the gradients of the optimizer's shard; see ``ParoOptimizer``."""
        self.reduction.complete_shards()
        self.complete_gradients()
        self.reduction.pass_to_optimizer()

    @override
    def _apply_muon_to_accumulated_grads(self) -> None:
        """Apply Muon, between the overflow check and the norm."""
        self.muon.apply()

    @override
    def _loss_scale_update_and_overflow_cleanup(self) -> bool:
        """Return whether the step is skipped, and notify Muon."""
        skipped = bool(super()._loss_scale_update_and_overflow_cleanup())
        self.muon.finish_step(not skipped)
        return skipped

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop accumulated gradients, too."""
        super().zero_grad(set_to_none)
        self.micro_steps.finish_buckets()  # or buckets in flight would be added after the reset
        self.reduction.reset()
        self.gradients_dropped()

    # Flat partitions, as ``ParoOptimizer`` and ``FlatShards`` describe them ###########################

    def family_of_buffer(self, buffer: int) -> str:
        """Return the family of a flat buffer, by its number in hops; see ``ParoOptimizer``."""
        return list(self.families)[buffer]

    def inter_group_spans(self) -> list[InterGroupSpan]:
        """Return the gradient spans that are sent between groups; see ``ParoOptimizer``."""
        return list(self.partitions.inter_group_spans())

    def owned_span(self, param: Any) -> Span:
        """Return the elements whose optimizer states are on this rank; see ``ParoOptimizer``."""
        return owned_span(param)

    def owned_gradient(self, param: Any) -> Tensor:
        """Return the gradient of these elements; see ``ParoOptimizer``."""
        return self.reduction.shards.chunks[param.ds_id][: owned_span(param).numel]

    def owned_gradients(self) -> list[Tensor]:
        """Return all gradients in the optimizer's shard; see ``ParoOptimizer``."""
        return [gradients.shard for gradients in self.gradients.values()]

    def flat_shards(self) -> list[FlatShard]:
        """Return the contents of this rank's flat partitions; see ``FlatShards``."""
        return self.partitions.flat_shards()

    def shard_weights(self, number: int) -> nn.Parameter:
        """Return this rank's partition of the optimizer's weights; see ``FlatShards``."""
        return cast(nn.Parameter, self.fp32_partitioned_groups_flat[number])

    def shard_gradient(self, number: int) -> Tensor:
        """Return the gradient of a partition; see ``FlatShards``."""
        return self.partitions.gradient(number)

    def gradients_replaced(self, shards: Sequence[FlatShard]) -> None:
        """Update the norms of an offloaded optimizer; see ``FlatShards``."""
        self.partitions.set_norms(shards)

    # Checkpoints ######################################################################################

    def check_states(self, state: Mapping[str, Any]) -> None:
        """Reject a rank's state dict with other sharding.

        Raises:
            ValueError: the sharding differs.
        """
        self.partitions.check(state)

    @override
    def load_state_dict(
        self,
        state_dict_list: list[dict[str, Any]],
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = False,
        checkpoint_folder: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Reject states with other sharding, and adapt the sizes of sub-groups.

        Raises:
            ValueError: see ``check_states``.
        """
        if not checkpoint_folder:
            rank = dist.get_rank(group=self.dp_process_group)
            state_dict_list[rank] = self.partitions.adapt(state_dict_list[rank])
        options = load_optimizer_states, load_from_fp32_weights, checkpoint_folder
        super().load_state_dict(state_dict_list, *options, **kwargs)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return DeepSpeed's state dict, with momentum in the format of its stage 3."""
        return self.partitions.with_saved_momentum(super().state_dict())

    @override
    def _get_sub_group_partition_ranks(self, sub_group_id: int) -> list[int]:
        """Return the ranks that share a sub-group, as DeepSpeed's stage 3 saves and compares them with AutoEP."""
        return self.writers.ranks_of_writer(super()._get_sub_group_partition_ranks(sub_group_id))

    @override
    def checkpoint_event_prologue(self) -> None:
        """Prepare to save or load a checkpoint."""
        self.parameters.wait_on_host()  # the host reads rows that gathers may still write
        super().checkpoint_event_prologue()

    @override
    def checkpoint_event_epilogue(self) -> None:
        """Complete slices after a load, which writes this rank's rows only."""
        if not self.is_saved:
            self.parameters.complete_slices()
        super().checkpoint_event_epilogue()

    # Parameters: os -> p ##############################################################################

    @override
    def _post_step(self, timer_names: set[str]) -> None:
        """Start to gather updated parameters os -> p, after the step.

        The parent gathers persistent parameters here. They are in every block, so that would wait for all gathers
        between groups. With slices, modules of the next forward gather them instead, and then they persist.
        """
        if not self._starts_updates_early:
            self.parameters.gather_updates()
        persistent = [] if self.parameters.has_slices else self.persistent_parameters
        with replace_attributes(self, persistent_parameters=persistent):
            super()._post_step(timer_names)
        self.parameters.whole.gather_trained()

    @override
    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        """Also send the updated weights to the other groups, at once if the optimizer is offloaded."""
        if self.gradient_scale.stepping and sub_group_id == 0:  # only now it is known that the step is applied
            self.resync.begin_update(stepping=True)
        slices = self.parameters.slices_of(self.fp16_groups[sub_group_id])
        if slices.steps_in_place(self.resync.in_full):
            super()._reassign_or_swap_out_partitioned_parameters(sub_group_id)
        else:
            weights = self.fp32_partitioned_groups_flat[sub_group_id].detach()
            slices.set_row(sub_group_id, weights, self.fp16_partitioned_groups_flat[sub_group_id], self.resync.in_full)
        if self._starts_updates_early:
            slices.gather_updates_of(sub_group_id)

    @property
    def _starts_updates_early(self) -> bool:
        return self.gradient_scale.stepping and bool(self.offload_optimizer)

    def drain_parameters(self) -> None:
        """Wait for the gathers of all updated parameters."""
        self.parameters.receive_updates()

    def send_parameters(self) -> None:
        """Send the optimizer's weights to all ranks; see ``ParoOptimizer``."""
        self._require_parameters()
        self.parameters.begin_step()  # gathers of the last step may still write rows that are written here
        self.resync.begin_update(stepping=False)
        for sub_group in range(len(self.fp16_partitioned_groups_flat)):
            self._reassign_or_swap_out_partitioned_parameters(sub_group)
        self.parameters.gather_updates()
        self.drain_parameters()
        if not self.parameters.has_slices and self.persistent_parameters:  # gathered with their old values
            self.persistent_parameters[0].partition(self.persistent_parameters)
            self.persistent_parameters[0].all_gather(self.persistent_parameters)
        self.parameters.whole.gather_trained()

    @override
    def _optimizer_step(self, sub_group_id: int) -> None:
        """Also pass the weights of this step to an outer optimizer."""
        super()._optimizer_step(sub_group_id)
        self.outer.after_step(sub_group_id)

    # Reads and writes of user code ####################################################################

    @override
    def set_full_hp_param(self, value: Tensor, param: ZeroParameter, optim_state_key: str | None = None) -> None:
        """Implement DeepSpeed's safe_set_full_fp32_param and safe_set_full_optimizer_state.

        If the number of ranks does not divide a parameter, DeepSpeed's method reads past its end, and only the last
        rank raises.
        """
        self.resync.request()
        if not param.requires_grad or value.numel() != param.ds_numel:
            super().set_full_hp_param(value, param, optim_state_key)
            return
        self.partitions.set_weights(value, param, optim_state_key)
        self._update_outer(param, optim_state_key)

    @override
    def set_local_hp_param(self, value: Tensor, param: ZeroParameter, optim_state_key: str | None = None) -> None:
        """Implement DeepSpeed's safe_set_local_fp32_param and safe_set_local_optimizer_state."""
        self.resync.request()
        super().set_local_hp_param(without_padding(value, param), param, optim_state_key)
        self._update_outer(param, optim_state_key)

    def _update_outer(self, param: ZeroParameter, state: str | None) -> None:
        """Pass newly set weights of a parameter to an outer optimizer."""
        for number, span in self.partitions.members_of(param) if state is None else ():
            self.outer.copy_weights(number, span)

    @override
    def _get_fp32_grad_state_partition(self, *args: Any, **kwargs: Any) -> Any:
        """Implement DeepSpeed's safe_get_full_grad and safe_get_local_grad."""
        self.reduction.require_complete()
        return super()._get_fp32_grad_state_partition(*args, **kwargs)

    @override
    def set_fp32_grad_for_param(self, value: Tensor, param: ZeroParameter) -> None:
        """Implement DeepSpeed's safe_set_full_grad, also for parameters that ranks do not divide."""
        super().set_fp32_grad_for_param(with_padding(value, param), param)

    @override
    def set_local_grad_for_param(self, value: Tensor, param: ZeroParameter) -> None:
        """Implement DeepSpeed's safe_set_local_grad."""
        super().set_local_grad_for_param(without_padding(value, param), param)

    @override
    def update_fp32_grad_for_param_vectorized(
        self, update_func: Callable[..., Tensor], param_list: Sequence[ZeroParameter]
    ) -> None:
        """Implement DeepSpeed's safe_update_full_grad_vectorized, also for parameters that ranks do not divide."""
        self.reduction.require_complete()

        def update(gradient: Tensor, param: ZeroParameter) -> Tensor:
            return with_padding(update_func(gradient, param), param)

        super().update_fp32_grad_for_param_vectorized(update, param_list)

    @override
    def offload_states(
        self,
        include: Iterable[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        **kwargs: Any,
    ) -> None:
        """Offload DeepSpeed's states, and this package's parameters and gradients."""
        # Gathers and buckets in flight write to the memory that is moved.
        self.drain_parameters()
        self.micro_steps.finish_buckets()
        states = set(OffloadStateTypeEnum if include is None else include) - self.offloaded_states
        super().offload_states(states - self._offloaded.kinds, device, pin_memory, **kwargs)
        self._offloaded.offload(states & self._offloaded.kinds, device.value, pin_memory)
        self.offloaded_states |= states & self._offloaded.kinds

    @override
    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        """Reload DeepSpeed's states, and this package's parameters and gradients."""
        self._offloaded.reload(self.offloaded_states & self._offloaded.kinds)
        self.offloaded_states -= self._offloaded.kinds
        super().reload_states(*args, **kwargs)

    # Norms: the same on all replicas (os = I), even if a backend rounds differently in each group ##################

    @override
    def _get_norm_groups(self) -> list[Tensor]:
        parents = super()._get_norm_groups
        return [self._global_norm(lambda: combine_grad_norm_groups(parents()))]

    @override
    def get_grad_norm_direct(
        self, gradients: Sequence[Tensor], params: Sequence[ZeroParameter], norm_type: int = 2
    ) -> Tensor:
        """Return the parent's norm, without replicas that another pipeline stage counts."""
        counted = [g[:0] if is_replica(p) else g for g, p in zip(gradients, params, strict=False)]
        norm = super().get_grad_norm_direct(counted, params, norm_type)
        return norm if self.autoep_folding_spec is None else self._divide_by_tp_duplicates(norm, params)

    def _divide_by_tp_duplicates(self, norm: Tensor, params: Sequence[ZeroParameter]) -> Tensor:
        """Return a tensor-parallel rank's share of the global norm: the parent has summed folded experts over these
        ranks already. See Note [Folded experts] in ``families.py``."""
        if family_of(params[0]) == DENSE:
            return norm
        self._model_parallel_all_reduce(norm, dist.ReduceOp.SUM)  # deferred: ``_global_norm`` sums at its end
        return without_duplicates(norm, self.autoep_folding_spec.tp_size)

    @override
    def complete_grad_norm_calculation_for_cpu_offload(self, params: Sequence[ZeroParameter]) -> Tensor:
        """Return the same norm with an offloaded optimizer."""
        for param in filter(is_replica, params):
            self.norm_for_param_grads.pop(self.get_param_id(param), None)
        return super().complete_grad_norm_calculation_for_cpu_offload(params)

    # Destruction ######################################################################################

    @override
    def destroy(self) -> None:
        """Also return the parameters to DeepSpeed, drop unfinished gradients, and release the model."""
        self.parameters.release()
        self.reduction.drop()
        super().destroy()
        drop_references(self.module)
