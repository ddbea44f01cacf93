# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Strategies with p = I or G: ZeRO's stage-3 optimizer with all three states placed by the table.

Note [What runs when, parameters sharded]
    The parent holds, steps and saves chunks of parameters over the process group in which the optimizer states are
    sharded. Ours are the ways to and from them:

    - Forward and backward gather parameters p -> N (``gathers.py``).
    - A full bucket moves N -> g (``__avg_scatter_grads``) in every micro-step if g is I or G. With g = N gradients
      stay where they are, and move at the accumulation boundary: all of them, in one order, so that ranks may have
      used different parameters (``sharded/gradients.py``).
    - At the boundary what is in I moves on to ``os`` once (``sync_gradients``).
    - What moves at the boundary leaves under the last micro-batch's backward already, as it gets complete, wherever
      the engine knows that it is the last; see Note [Leaving early] in ``boundary.py``.
    - After the step, updated parameters move os -> p (``gather_updates``).
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.torch_autocast import sort_dtypes
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.utils import get_norm_dtype
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank
from torch import Tensor, nn

from deepspeed_ext.comm.agreement import all_reduce_max
from deepspeed_ext.comm.layout import Stripe
from deepspeed_ext.comm.spans import Span
from deepspeed_ext.deepspeed_types import ZeroParameter
from deepspeed_ext.leaf.gradients import LeafReducer, end_of_backward, leave_modules, zero_gradients
from deepspeed_ext.leaf.windows import windowed_modules
from deepspeed_ext.overrides import checked, override
from deepspeed_ext.strategy import Placement
from deepspeed_ext.zero.context import Context
from deepspeed_ext.zero.families import DENSE, family_of, name_in_all
from deepspeed_ext.zero.muon import uses_muon
from deepspeed_ext.zero.norms import without_duplicates
from deepspeed_ext.zero.optimizer import ParoOptimizer, is_replica, without_host_synchronization
from deepspeed_ext.zero.sharded import saved
from deepspeed_ext.zero.sharded.coordinator import coordinator_of, forget
from deepspeed_ext.zero.sharded.expert_windows import WindowGradients
from deepspeed_ext.zero.sharded.gathers import Gathers, GatherSettings, partition
from deepspeed_ext.zero.sharded.gradients import ShardedGradients
from deepspeed_ext.zero.sharded.shards import GradientShards
from deepspeed_ext.zero.sharded.slices import Slices, with_padding, without_padding
from deepspeed_ext.zero.shards import CrossingSpan, FlatShard, Member
from deepspeed_ext.zero.writers import CheckpointWriters

_HELD_BY_US = {OffloadStateTypeEnum.lp_params, OffloadStateTypeEnum.lp_grads}
_OF_OPTIMIZER = {OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.optim_states}


class GradientState(Enum):
    """Where gradients are, between the end of a micro-step and the optimizer's step; the same on all ranks."""

    NONE = "there are none, or a step has taken them"
    IN_G = "where g says, of at least one micro-step"
    IN_OS = "complete, in the optimizer's shard"


@checked
class Stage3Optimizer(ParoOptimizer, LeafReducer, DeepSpeedZeroOptimizer_Stage3):
    """Stage-3 optimizer of a strategy with p = I or G. See Note [What runs when, parameters sharded].

    Args:
        context: with a strategy of p = I or G.
        gathering: how parameters are gathered, and where they are.
        dp_process_group: the data-parallel group, as the engine passes it; ``context`` replaces it.
        The others are the parent's.

    Attributes:
        slices, gathers: what is held of parameters, and how they are gathered for use, of each family.
        gradients: on their way to the optimizer's shard, of each family.
        shards: where gradients are held.
    """

    gradients: Mapping[str, ShardedGradients]
    slices: dict[str, Slices]
    gathers: dict[str, Gathers]
    shards: GradientShards
    _bucket: int  # elements of a full bucket
    _state: GradientState

    # Attributes of DeepSpeed's that are read or written here.
    _DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition: dict[int, Tensor]
    autoep_folding_spec: Any  # None unless experts are folded
    averaged_gradients: dict[int, list[Tensor]]  # by sub-group
    device: Any  # of the optimizer's shard
    dp_process_group: Any
    fp16_groups: list[list[ZeroParameter]]  # sub-groups
    fp16_partitioned_groups_flat: list[Tensor]  # by sub-group
    fp32_partitioned_groups_flat: list[Any]  # the optimizer's weights, by sub-group
    grad_partitions_flat_buffer: Any  # a tensor, or None before it is made anew
    gradient_accumulation_dtype: torch.dtype
    inf_or_nan_tracker: Tensor
    ipg_buckets: dict[torch.dtype, Any]
    lp_param_buffer: Tensor
    module: nn.Module
    model_parallel_group: Any
    model_parallel_rank: int
    norm_for_param_grads: dict[int, Tensor]
    offload_optimizer: bool
    offload_param: bool
    offload_optimizer_pin_memory: bool
    param_names: dict[Any, str]
    partition_count: Any
    persistent_parameters: list[ZeroParameter]
    reduce_and_partition_stream: Any
    reduce_scatter: bool
    sequence_parallel_size: int
    sub_group_process_groups: list[Any]
    sub_group_size: int
    sub_group_to_group_id: dict[int, int]
    sub_groups_lacking_loss_scale: set[int]
    _coalesce_grad_reduction: bool
    _offload_boundary_param_ids: set[int]
    # Its way with Muon is not ours, and it would refuse what it needs whole gradients for.
    use_muon = property(lambda self: False, lambda self, found: None)

    def __init__(
        self,
        *args: Any,
        context: Context,
        gathering: GatherSettings,
        dp_process_group: object = None,
        reduce_scatter: bool = True,
        overlap_comm: bool = False,
        **kwargs: Any,
    ) -> None:
        self._attach_parts(context)
        strategy, families = context.strategy, context.families
        self._gathering = gathering
        self._overlap = overlap_comm
        self._state = GradientState.NONE
        super().__init__(
            *args,
            dp_process_group=self.topology.shard_group(strategy.os),
            reduce_scatter=reduce_scatter,
            overlap_comm=overlap_comm,
            **kwargs,
        )
        numbers = [dist.get_rank(group) for group in self.sub_group_process_groups]
        self.writers = CheckpointWriters(families, strategy, numbers)
        self.unscaled_updates = None if self.offload_optimizer else self.sub_groups_lacking_loss_scale
        # Which ranks count a parameter in the norm: those of other tensors' slices do not, those of other stages do.
        if self.model_parallel_group is not None:
            self.model_parallel_rank = bwc_tensor_model_parallel_rank(kwargs.get("mpu"))

    # Parameters #######################################################################################

    @override
    def initialize_ds_offload(self, **kwargs: Any) -> Any:
        """Hold parameters as p says, once DeepSpeed has sharded them and watches their modules."""
        with coordinator_of(self.topology.shard_group(self.strategy.p)):
            offload = super().initialize_ds_offload(**kwargs)
        self.gathers = partition(kwargs["module"], offload, self.strategy, self.families, self._gathering)
        self.slices = {name: gathers.slices for name, gathers in self.gathers.items()}
        for gathers in self.gathers.values():
            gathers.on_change(self.resync.ask)
        return offload

    @override
    def _configure_offloading(self, *args: Any, **kwargs: Any) -> None:
        """Let the parent make flat buffers of slices on the host as of those on the device."""
        super()._configure_offloading(*args, **kwargs)
        self.offload_param = self.offload_param and not self._sliced

    @override
    def _get_parameter_partitions(self) -> list[Tensor]:
        """Return what goes into the flat parameter buffer: all rows of slices."""
        return [part for group in self.fp16_groups for part in self._slices_of(group).partitions(group)]

    @override
    def _set_fp16_partitioned_groups_flat(self) -> None:
        for slices in self.slices.values():
            slices.forget_blocks()
        self.lp_param_buffer = self.slices[DENSE].rows.home(self.lp_param_buffer)
        offset = 0
        for number, group in enumerate(self.fp16_groups):
            flat, offset = self._slices_of(group).make_block(number, self.lp_param_buffer, offset, group)
            self.fp16_partitioned_groups_flat.append(flat)

    @override
    def _pre_step(self) -> None:
        self.drain_parameters()
        for slices in self.slices.values():
            slices.forget_changes()
        if self._state is GradientState.IN_G:  # the caller has declared the boundary after the last backward only
            self.sync_gradients()
        self.micro_steps.learn()
        self._forget_gradients()
        super()._pre_step()

    # Gradients: N -> g ################################################################################

    @override
    def _setup_for_real_optimizer(self) -> None:
        """Hold gradients as g says."""
        super()._setup_for_real_optimizer()
        self.reductions.use(self.reduce_and_partition_stream)  # None on devices without streams
        if self.strategy.g == Placement.N:
            for bucket in self.ipg_buckets.values():
                bucket.buffer = None  # gradients do not go through the parent's buckets
        self._bucket = self.micro_steps.measure(param.ds_numel for group in self.fp16_groups for param in group)
        self.gradients = {name: self._make_gradients(name) for name in self.families}
        self._windows = self._make_windows()
        self.shards = self._make_shards()
        self._place_gradients()

    def _make_windows(self) -> WindowGradients:
        over_sequence = 1 if self.reduce_scatter else self.sequence_parallel_size
        return WindowGradients(
            windowed_modules(self.module),
            self.gradients[DENSE],
            self.slices[DENSE].layout,
            self.reductions,
            stays_whole=self.strategy.g == Placement.N,
            coalesces=lambda: self._coalesce_grad_reduction,
            hand_over=self.reduce_ready_partitions_and_remove_grads,
            is_last=lambda: self.micro_steps.is_last,
            dtype_of=self.get_param_comm_dtype,
            scale=self.topology.sizes.ranks / over_sequence,
        )

    def _make_shards(self) -> GradientShards:
        return GradientShards(
            self.gradients,
            self.gradient_accumulation_dtype,
            self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition,
            lambda flat: setattr(self, "grad_partitions_flat_buffer", flat),
        )

    def _place_gradients(self) -> None:
        """Hold gradients in the parent's tensor if that will do."""
        if self.shards.one_row and (self.strategy.g != Placement.N or self.offload_optimizer):
            self.shards.place(self.grad_partitions_flat_buffer.view(-1))
            return
        if self.offload_optimizer_pin_memory:
            get_accelerator().unpin_memory(self.grad_partitions_flat_buffer)
        self.shards.chunks.clear()
        self.grad_partitions_flat_buffer = None  # the parent's, before ours is made
        if self.strategy.g == Placement.N:
            self._drop_shard()
        else:
            self.shards.make(get_accelerator().current_device_name())
            self.inf_or_nan_tracker = self.inf_or_nan_tracker.to(get_accelerator().current_device_name())

    def _make_gradients(self, family: str) -> ShardedGradients:
        dtypes = list(self.ipg_buckets)
        return ShardedGradients(
            [param for group in self.fp16_groups for param in group if family_of(param) == family],
            self.slices[family].layout,
            self.strategy,
            self.topology.sizes.ranks,
            self.families[family].reduce,
            self._bucket,
            self._overlap,
            not self.offload_optimizer or self.offload_optimizer_pin_memory,
            dtype_of=self.get_param_comm_dtype,
            dtype=dtypes[0] if len(dtypes) == 1 else torch.float32,  # several with torch.autocast
            by_host=bool(self.offload_optimizer) and self.reductions.stream is not None,
            name=lambda param: self.param_names[param],
            number=list(self.families).index(family),
        )

    def _drop_shard(self) -> None:
        """Drop the shard: with g = N there is none beside whole gradients."""
        self.averaged_gradients = {}
        self.shards.drop(self.device)

    def _make_shard(self) -> None:
        """Make the shard, if there is none beside whole gradients."""
        if self.shards.is_placeholder:
            self.shards.make(self.device)

    @override
    def reduce_ready_partitions_and_remove_grads(self, param: Any) -> None:
        """Put a complete gradient into a bucket, or to those that stay until the boundary."""
        if self.strategy.g != Placement.N:
            super().reduce_ready_partitions_and_remove_grads(param)
            self._reduce_if_full(self.get_param_comm_dtype(param))
        elif not self._coalesce_grad_reduction and getattr(param, "ds_grad_is_ready", True):
            self._keep_whole(param)

    def _keep_whole(self, param: Any) -> None:
        """Keep a gradient whole until the boundary; what is complete may leave."""
        if not (self.shards.begun or self.shards.is_placeholder or self.offload_optimizer):
            self._drop_shard()
        self._apply_autoep_folding_tp_correction(param)
        last = self.micro_steps.is_last
        if last:
            self.reductions.receive_current()  # it packs this; a model may compute on several streams
        gradients = self._gradients_of(param)
        left = gradients.keep(param, param.grad, self.gradient_accumulation_dtype, last)
        param.grad = None
        if left:
            with self.reductions.after_current():
                self._make_shard()
                gradients.reduce_buckets(left)

    def reduce_leaf(self, params: Sequence[ZeroParameter]) -> None:
        """Put a leaf module's gradients into buckets, without a copy and a stream for each."""
        if self._coalesce_grad_reduction:
            return
        ready = [param for param in params if getattr(param, "ds_grad_is_ready", True)]
        if self.strategy.g == Placement.N:
            for param in (param for param in ready if param.grad is not None):
                self.reduce_ready_partitions_and_remove_grads(param)
            return
        # All are written before the stream of reductions waits for that.
        ready = list(self._corrected(zero_gradients(ready)))
        self.reductions.receive_current()
        for param in ready:
            self._fill_bucket(param)

    def _corrected(self, params: Iterable[ZeroParameter]) -> Iterator[ZeroParameter]:
        """Yield parameters whose gradients are corrected if experts are folded; Note [Folded experts]."""
        for param in params:
            self._apply_autoep_folding_tp_correction(param)
            yield param

    def _fill_bucket(self, param: ZeroParameter) -> None:
        """Put a gradient into DeepSpeed's bucket of its dtype, and reduce buckets that are full."""
        dtype = self.get_param_comm_dtype(param)
        bucket = self.ipg_buckets[dtype]
        another = bucket.process_group is not param.ds_process_group
        if bucket.elements and (another or bucket.elements + param.ds_numel > self.context.reduce_bucket):
            self._DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads(dtype)
        bucket.params.append(param)
        bucket.process_group = param.ds_process_group
        bucket.elements += param.ds_numel
        self._reduce_if_full(dtype)

    def reduce_window(self, *window: Any) -> None:
        """Reduce the gradients of a window of packed experts; see ``LeafReducer``."""
        self._windows.reduce(*window)

    def _reduce_if_full(self, dtype: torch.dtype) -> None:
        if self.micro_steps.is_full(self.ipg_buckets[dtype]):
            self._DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads(dtype)

    @override
    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(
        self, params_to_reduce: list[ZeroParameter], communication_data_type: torch.dtype
    ) -> list[Tensor]:
        """Move a bucket from N to g. It arrives later: the parent gets no partitions here."""
        self._reduce(params_to_reduce, communication_data_type)
        return []

    @override
    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads(
        self, buffer_to_reduce: Tensor, communication_data_type: torch.dtype
    ) -> list[Tensor]:
        """Do the same with ``reduce_scatter`` false. Only here ZeRO-3 counts sequence parallelism."""
        params = self.ipg_buckets[communication_data_type].params
        self._reduce(params, communication_data_type, self.sequence_parallel_size)
        return []

    def _reduce(self, params: Sequence[ZeroParameter], dtype: torch.dtype, sequence_parallel_size: int = 1) -> None:
        """Move a bucket to where it arrives: what it has of each family by itself."""
        for name, gradients in self.gradients.items():
            mine = [(param, param.grad) for param in params if family_of(param) == name]
            if mine:
                gradients.reduce(mine, dtype, sequence_parallel_size, self.micro_steps.is_last)

    @override
    def partition_grads(self, params_to_release: list[ZeroParameter], grad_partitions: list[Tensor]) -> None:
        """Release the gradients of a bucket, which are packed by now."""
        for param in params_to_release:
            if param.grad is not None and not get_accelerator().is_synchronized_device():
                param.grad.record_stream(get_accelerator().current_stream())
            param.grad = None

    @override
    def backward_epilogue(self) -> None:
        """End of a backward, also where nothing is reduced at it."""
        leave_modules(self)
        super().backward_epilogue()

    # The accumulation boundary: g -> os ###############################################################

    @override
    def independent_gradient_partition_epilogue(self) -> None:
        """End a micro-step: flush the buckets and, at the accumulation boundary, move g to os."""
        end_of_backward(self)
        for dtype in sort_dtypes(self.ipg_buckets):
            self._DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads(dtype)
        with without_host_synchronization():
            super().independent_gradient_partition_epilogue()
        with self.reductions.after_current():
            for gradients in self.gradients.values():
                gradients.end_backward(partial(all_reduce_max, group=self.topology.world))
        self._state = GradientState.IN_G
        self.micro_steps.end()

    def sync_gradients(self) -> None:
        """Complete the gradients of the optimizer's shard; all parameters on all ranks, used or not."""
        with self.reductions.after_current():
            if self.strategy.g == Placement.N:
                self._make_shard()
                for gradients in self.gradients.values():
                    gradients.reduce_kept()
        self._finish_for_host()
        with self.reductions.after_current():
            for gradients in self.gradients.values():
                gradients.finish()
        self._state = GradientState.IN_OS
        self.reductions.wait()
        if self.offload_optimizer:
            self.reductions.synchronize()  # gradients may be in host memory
        self.complete_gradients()
        self.reductions.receive_current()  # where DeepSpeed looks for overflows
        self._hand_to_optimizer()

    def _hand_to_optimizer(self) -> None:
        """Make the parent's step read complete gradients."""
        if not self.offload_optimizer:
            self._show_gradients()
            return
        self._offload_boundary_param_ids = set(self.shards.chunks)
        self._finalize_offload_gradient_accumulation()
        if (stream := self.reductions.stream) is not None:  # the step reads host memory
            stream.synchronize()
            get_accelerator().current_stream().synchronize()

    @override
    def _apply_muon_to_accumulated_grads(self) -> None:
        """Apply Muon, between the overflow check and the norm."""
        self.muon.apply()

    @override
    def _loss_scale_update_and_overflow_cleanup(self) -> bool:
        """Return whether the step is skipped, and have Muon know."""
        skipped = bool(super()._loss_scale_update_and_overflow_cleanup())
        self.muon.finish_step(not skipped)
        return skipped

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also forget what has been accumulated."""
        super().zero_grad(set_to_none)
        self.micro_steps.finish_buckets()
        self._finish_for_host()
        self._forget_gradients()
        self.gradients_dropped()
        self._state = GradientState.NONE

    # What others ask for ##############################################################################

    def _slices_of(self, sub_group: Sequence[ZeroParameter]) -> Slices:
        """Return those of the family of a sub-group, which is of one family."""
        return self.slices[family_of(sub_group[0])]

    def _gradients_of(self, param: ZeroParameter) -> ShardedGradients:
        """Return those of the family of a parameter."""
        return self.gradients[family_of(param)]

    def drain_parameters(self) -> None:
        """Wait for the gathers of all updated parameters."""
        for slices in self.slices.values():
            slices.drain()

    def _forget_gradients(self) -> None:
        """Drop what has been accumulated."""
        for gradients in self.gradients.values():
            gradients.forget()

    @property
    def _sliced(self) -> bool:
        """Whether parameters of a family are held as slices of several rows."""
        return any(slices.sliced for slices in self.slices.values())

    @override
    def _create_fp16_sub_groups(self, params_group: list[ZeroParameter]) -> list[list[ZeroParameter]]:
        """Make sub-groups; where slices are completed after the step, each is one all-gather of at most a bucket."""
        configured = self.sub_group_size
        if self._sliced:
            self.sub_group_size = min(configured, max(1, self._gathering.bucket // self.topology.sizes.ranks))
        try:
            return super()._create_fp16_sub_groups(params_group)
        finally:
            self.sub_group_size = configured

    def _show_gradients(self) -> None:
        """Make the parent's step read them where they are."""
        self.averaged_gradients = {
            i: [self.shards.chunks[param.ds_id] for param in group] for i, group in enumerate(self.fp16_groups)
        }

    def family_of_buffer(self, buffer: int) -> str:
        """Return the family of what a hop is told to be of a flat buffer; see ``ParoOptimizer``."""
        return list(self.families)[buffer]

    def crossing_spans(self) -> list[CrossingSpan]:
        """Return them; see ``ParoOptimizer``."""
        return [
            span
            for group in self.fp16_groups
            for param in group
            for span in self._gradients_of(param).crossing_spans(param, name_in_all(param, self.param_names[param]))
        ]

    def owned_span(self, param: Any) -> Span:
        """Return the elements whose optimizer states this rank has; see ``ParoOptimizer``."""
        chunk = param.ds_tensor.ds_numel
        start = min(dist.get_rank(group=param.ds_process_group) * chunk, param.ds_numel)
        return Span.between(start, min(start + chunk, param.ds_numel))

    def owned_gradient(self, param: Any) -> Tensor:
        """Return the gradient of these elements; see ``ParoOptimizer``."""
        return self.shards.chunks[param.ds_id][: self.owned_span(param).numel]

    def flat_shards(self) -> list[FlatShard]:
        """Return what is in this rank's flat partitions; see ``FlatShards``."""
        found = []
        for number, params in enumerate(self.fp16_groups):
            members, offset = [], 0
            for param in params:
                stripe = Stripe(Span(0, param.ds_numel), 0, param.ds_tensor.ds_numel)
                members.append(Member(param, tuple(param.ds_shape), stripe, self.owned_span(param), offset))
                offset += stripe.width
            found.append(FlatShard(number, self.sub_group_to_group_id[number], tuple(members)))
        return found

    def shard_weights(self, number: int) -> nn.Parameter:
        """Return this rank's partition of the optimizer's weights; see ``FlatShards``."""
        weights: nn.Parameter = self.fp32_partitioned_groups_flat[number]
        return weights

    def shard_gradient(self, number: int) -> Tensor:
        """Return its gradient; see ``FlatShards``."""
        if self.offload_optimizer:
            gradient: Tensor = self.fp32_partitioned_groups_flat[number].grad
            return gradient
        params = self.fp16_groups[number]
        return self._gradients_of(params[0]).shard_of(params)

    # What takes the place of gradients ################################################################

    def gradients_replaced(self, shards: Sequence[FlatShard]) -> None:
        """Tell an offloaded optimizer their norms; see ``FlatShards``."""
        for shard in shards if self.offload_optimizer else ():
            update = self.shard_gradient(shard.number)
            for member in shard.members:
                norm = member.in_shard.of(update).to(get_norm_dtype()).norm(2)
                self.norm_for_param_grads[self.get_param_id(member.param)] = norm

    # Into checkpoints and back ########################################################################

    def check_states(self, state: Mapping[str, Any]) -> None:
        """Refuse a rank's state dict that is sharded otherwise; see ``sharded/saved.py``.

        Raises:
            ValueError: it is.
        """
        placement = self._zero3_partition_group_metadata() if saved.PLACEMENT in state else None
        saved.check(state, self.partition_count, placement, self._sub_group_numels())

    @override
    def load_state_dict(
        self,
        state_dict_list: list[dict[str, Any]],
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = False,
        checkpoint_folder: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Also refuse states that are sharded otherwise, and divide sub-groups anew.

        Raises:
            ValueError: see ``check_states``.
        """
        if not checkpoint_folder:
            rank = dist.get_rank(group=self.dp_process_group)
            self.check_states(state_dict_list[rank])
            state = saved.regroup(state_dict_list[rank], self._sub_group_numels())
            state_dict_list[rank] = saved.with_own_momentum(state, bool(self.offload_optimizer))
        how = load_optimizer_states, load_from_fp32_weights, checkpoint_folder
        super().load_state_dict(state_dict_list, *how, **kwargs)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return DeepSpeed's, with momentum as its stage 3 has it; see Note [Momentum of DeepSpeed's stages]."""
        state = dict(super().state_dict())
        if not uses_muon(self.optimizer):
            return state
        return saved.with_saved_momentum(state, float(self.loss_scale), bool(self.offload_optimizer))

    @override
    def _get_sub_group_partition_ranks(self, sub_group_id: int) -> list[int]:
        """Return which ranks share a sub-group, as DeepSpeed's stage 3 notes and compares it with AutoEP."""
        return self.writers.as_written(super()._get_sub_group_partition_ranks(sub_group_id))

    def _sub_group_numels(self) -> list[list[int]]:
        """Return for each parameter group the elements of this rank's sub-groups."""
        numels: list[list[int]] = [[] for _ in self.optimizer.param_groups]
        for sub_group, flat in enumerate(self.fp32_partitioned_groups_flat):
            numels[self.sub_group_to_group_id[sub_group]].append(flat.numel())
        return numels

    @override
    def checkpoint_event_prologue(self) -> None:
        """Prepare for a checkpoint that is saved or loaded."""
        for slices in self.slices.values():
            slices.settle()
        super().checkpoint_event_prologue()

    @override
    def checkpoint_event_epilogue(self) -> None:
        """Complete slices after a load: what was loaded is in this rank's rows only."""
        for slices in () if self.is_saved else self.slices.values():
            slices.complete()
        super().checkpoint_event_epilogue()

    # Parameters: os -> p ##############################################################################

    @override
    def _post_step(self, timer_names: set[str]) -> None:
        """Move updated parameters os -> p, after the step.

        The parent gathers persistent parameters here. They are in every block, so that would wait for all gathers
        between groups: where there are any, the modules of the next forward gather them, which then persist.
        """
        if not self._starts_updates_early:
            self._gather_updates()
        persistent = self.persistent_parameters
        if self._sliced:
            self.persistent_parameters = []
        try:
            super()._post_step(timer_names)
        finally:
            self.persistent_parameters = persistent

    @override
    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        """Also send what a step has written to the other groups, at once if the next sub-group's step takes long."""
        if self.gradient_scale.stepping and sub_group_id == 0:  # not before the step is known to be applied
            self.resync.begin(stepping=True)
        slices = self._slices_of(self.fp16_groups[sub_group_id])
        if slices.stepped_in_place(self.resync.now):
            super()._reassign_or_swap_out_partitioned_parameters(sub_group_id)
        else:
            weights = self.fp32_partitioned_groups_flat[sub_group_id].detach()
            slices.change(sub_group_id, weights, self.fp16_partitioned_groups_flat[sub_group_id], self.resync.now)
        if self._starts_updates_early:
            slices.gather_updates_of(sub_group_id)

    def _gather_updates(self) -> None:
        """Start to move updated parameters os -> p: those of one family after the other, on all ranks."""
        for slices in self.slices.values():
            slices.gather_updates()

    @property
    def _starts_updates_early(self) -> bool:
        return self.gradient_scale.stepping and bool(self.offload_optimizer)

    def send_parameters(self) -> None:
        """Make all ranks hold the optimizer's weights; see ``ParoOptimizer``."""
        self._require_parameters()
        self.drain_parameters()  # what the last step has sent is written to the rows that are written here
        for slices in self.slices.values():
            slices.forget_changes()
        self.resync.begin(stepping=False)
        for sub_group in range(len(self.fp16_partitioned_groups_flat)):
            self._reassign_or_swap_out_partitioned_parameters(sub_group)
        self._gather_updates()
        self.drain_parameters()
        if not self._sliced and self.persistent_parameters:  # whole, of before
            self.persistent_parameters[0].partition(self.persistent_parameters)
            self.persistent_parameters[0].all_gather(self.persistent_parameters)

    @override
    def _optimizer_step(self, sub_group_id: int) -> None:
        """Also let an outer optimizer have the weights of this step."""
        super()._optimizer_step(sub_group_id)
        self.outer.after_step(sub_group_id)

    @override
    def set_full_hp_param(self, value: Tensor, param: ZeroParameter, optim_state_key: str | None = None) -> None:
        """Serve DeepSpeed's safe_set_full_fp32_param and its like.

        Where ranks do not divide a parameter, DeepSpeed's own reads past its end: the last rank alone raises.
        """
        self.resync.ask()
        if not param.requires_grad or value.numel() != param.ds_numel:
            super().set_full_hp_param(value, param, optim_state_key)
            return
        self._set_owned(value, param, optim_state_key)
        self._tell_outer(param, optim_state_key)

    def _set_owned(self, value: Tensor, param: ZeroParameter, key: str | None) -> None:
        """Set what this rank owns of a parameter's weights, or of a state of the optimizer."""
        held, _ = self._get_fp32_opt_state_partition(param, release_swap_buffers=False, optim_state_key=key)
        start = held.numel() * self._get_param_partition_rank(param)
        mine = value.flatten()[start : start + held.numel()]
        held.data[: mine.numel()].copy_(mine)

    def _tell_outer(self, param: ZeroParameter, key: str | None) -> None:
        """Let an outer optimizer take over weights of a parameter that were set."""
        for shard in self.flat_shards() if key is None else ():
            for member in (member for member in shard.members if member.param is param):
                self.outer.take(shard.number, member.in_shard)

    @override
    def set_local_hp_param(self, value: Tensor, param: ZeroParameter, optim_state_key: str | None = None) -> None:
        """Serve DeepSpeed's safe_set_local_fp32_param and its like."""
        self.resync.ask()
        super().set_local_hp_param(without_padding(value, param), param, optim_state_key)
        self._tell_outer(param, optim_state_key)

    @override
    def offload_states(
        self,
        include: Iterable[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        **kwargs: Any,
    ) -> None:
        """Offload DeepSpeed's states, with parameters and gradients as we hold them."""
        self.drain_parameters()
        self.micro_steps.finish_buckets()
        wanted = set(OffloadStateTypeEnum if include is None else include) - self.offloaded_states
        held = self._held_by_us
        super().offload_states(wanted - held, device, pin_memory, **kwargs)
        self._move_held(wanted & held, lambda tensor: _moved(tensor, device.value, pin_memory))
        self._forget_views(wanted)
        self.offloaded_states |= wanted & held

    @override
    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        """Move back parameters and gradients as we hold them."""
        device = get_accelerator().current_device_name()
        offloaded, ours = set(self.offloaded_states), self._held_by_us
        self._move_held(offloaded & ours, lambda tensor: tensor.to(device))
        if OffloadStateTypeEnum.lp_params in offloaded:
            self._set_fp16_partitioned_groups_flat()
        if OffloadStateTypeEnum.lp_grads in offloaded:
            self._show_gradients()
        self.offloaded_states -= ours
        super().reload_states(*args, **kwargs)

    def _forget_views(self, moved: Container[OffloadStateTypeEnum]) -> None:
        """Let go of views of what has been on the device."""
        if OffloadStateTypeEnum.lp_params in moved:
            self.fp16_partitioned_groups_flat.clear()
            for slices in self.slices.values():
                slices.forget_blocks()
        if OffloadStateTypeEnum.lp_grads in moved:
            self.averaged_gradients = {}

    @property
    def _held_by_us(self) -> set[OffloadStateTypeEnum]:
        """States that DeepSpeed does not move: parameters and gradients as we hold them, and of optimizers that are
        not its FusedAdam all there is."""
        return _HELD_BY_US | (_OF_OPTIMIZER if uses_muon(self.optimizer) else set())

    def _move_held(self, wanted: Container[OffloadStateTypeEnum], move: Callable[[Tensor], Tensor]) -> None:
        if OffloadStateTypeEnum.lp_params in wanted:
            self.lp_param_buffer, offset = move(self.lp_param_buffer), 0
            for group in self.fp16_groups:
                offset = self._slices_of(group).place(self.lp_param_buffer, offset, group)
        if OffloadStateTypeEnum.lp_grads in wanted:
            self.shards.place(move(self.shards.held))
        if OffloadStateTypeEnum.hp_params in wanted:
            for weights in self.fp32_partitioned_groups_flat:
                weights.data = move(weights.data)
        if OffloadStateTypeEnum.optim_states in wanted:
            for states in self.optimizer.state.values():
                # Step counts stay on the host, where they are read.
                held = {key: one for key, one in states.items() if isinstance(one, Tensor) and one.dim()}
                states.update({key: move(one) for key, one in held.items()})

    @override
    def _get_fp32_grad_state_partition(self, *args: Any, **kwargs: Any) -> Any:
        """Serve DeepSpeed's safe_get_full_grad and its like."""
        self._refuse_unfinished_gradients()
        return super()._get_fp32_grad_state_partition(*args, **kwargs)

    @override
    def set_fp32_grad_for_param(self, value: Tensor, param: ZeroParameter) -> None:
        """Serve DeepSpeed's safe_set_full_grad, also where ranks do not divide a parameter."""
        super().set_fp32_grad_for_param(with_padding(value, param), param)

    @override
    def set_local_grad_for_param(self, value: Tensor, param: ZeroParameter) -> None:
        """Serve DeepSpeed's safe_set_local_grad."""
        super().set_local_grad_for_param(without_padding(value, param), param)

    @override
    def update_fp32_grad_for_param_vectorized(
        self, update_func: Callable[..., Tensor], param_list: Sequence[ZeroParameter]
    ) -> None:
        """Serve DeepSpeed's safe_update_full_grad_vectorized, also where ranks do not divide a parameter."""
        self._refuse_unfinished_gradients()

        def update(gradient: Tensor, param: ZeroParameter) -> Tensor:
            return with_padding(update_func(gradient, param), param)

        super().update_fp32_grad_for_param_vectorized(update, param_list)

    def _refuse_unfinished_gradients(self) -> None:
        self.micro_steps.finish_buckets()
        self._finish_for_host()
        if self._state is GradientState.IN_G and self.strategy.g != self.strategy.os:
            raise RuntimeError(
                f"Gradients can be read and changed at the accumulation boundary only: with paro_strategy "
                f"{self.strategy.name} (g = {self.strategy.g.name}, os = {self.strategy.os.name}) they are not summed "
                f"over all ranks before it."
            )

    # Replicas of the optimizer (os = I) decide alike, even if a backend rounds differently in each group ###########

    @override
    def _get_norm_groups(self) -> list[Tensor]:
        parents = super()._get_norm_groups
        return [self._global_norm(lambda: combine_grad_norm_groups(parents()))]

    @override
    def get_grad_norm_direct(
        self, gradients: Sequence[Tensor], params: Sequence[ZeroParameter], norm_type: int = 2
    ) -> Tensor:
        """Return the parent's norm, without what another stage of a pipeline counts."""
        counted = [g[:0] if is_replica(p) else g for g, p in zip(gradients, params, strict=False)]
        norm = super().get_grad_norm_direct(counted, params, norm_type)
        return norm if self.autoep_folding_spec is None else self._of_one_lane(norm, params)

    def _of_one_lane(self, norm: Tensor, params: Sequence[ZeroParameter]) -> Tensor:
        """Return what a tensor-parallel rank adds to the norm of all: the parent has summed folded experts over them
        already. See Note [Folded experts] in ``families.py``."""
        if family_of(params[0]) == DENSE:
            return norm
        self._model_parallel_all_reduce(norm, dist.ReduceOp.SUM)  # put off: the sum is owed
        return without_duplicates(norm, self.autoep_folding_spec.tp_size)

    @override
    def complete_grad_norm_calculation_for_cpu_offload(self, params: Sequence[ZeroParameter]) -> Tensor:
        """Return the same norm with an offloaded optimizer."""
        for param in filter(is_replica, params):
            self.norm_for_param_grads.pop(self.get_param_id(param), None)
        return super().complete_grad_norm_calculation_for_cpu_offload(params)

    # The end ##########################################################################################

    @override
    def destroy(self) -> None:
        """Also give the parameters back to DeepSpeed, drop unfinished gradients, and be let go of."""
        for gathers in self.gathers.values():
            gathers.release()
        for gradients in self.gradients.values():
            gradients.drop()
        super().destroy()
        forget(self.module)

    def _finish_for_host(self) -> None:
        """Make the host wait for all buckets, where an offloaded optimizer's gradients are in its memory."""
        if self.offload_optimizer and self.reductions.stream is not None:
            with self.reductions.after_current():
                for gradients in self.gradients.values():
                    gradients.drain()
            self.reductions.synchronize()


def _moved(tensor: Tensor, device: str, pin_memory: bool) -> Tensor:
    moved = tensor.to(device)
    return get_accelerator().pin_memory(moved) if pin_memory else moved
