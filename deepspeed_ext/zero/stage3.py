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
    - At the boundary what is in I moves on to ``os`` once (``_sync_gradients``).
    - What moves at the boundary leaves under the last micro-batch's backward already, as it gets complete, wherever
      the engine knows that it is the last; see Note [Leaving early] in ``boundary.py``.
    - After the step, updated parameters move os -> p (``gather_updates``).
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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

from deepspeed_ext.comm.owners import Cells
from deepspeed_ext.deepspeed_types import ZeroParameter
from deepspeed_ext.leaf.gradients import LeafReducer, end_of_backward, leave_modules, zero_gradients
from deepspeed_ext.strategy import Placement, Strategy
from deepspeed_ext.zero.crossing_spans import CrossingSpan
from deepspeed_ext.zero.families import DENSE, Families, family_of, name_in_all
from deepspeed_ext.zero.filing import Filing
from deepspeed_ext.zero.flat_shards import FlatShard, Member
from deepspeed_ext.zero.muon import uses_muon
from deepspeed_ext.zero.optimizer import ParoOptimizer, is_replica, ordered_by_streams
from deepspeed_ext.zero.sharded import saved
from deepspeed_ext.zero.sharded.coordinator import coordinator_of
from deepspeed_ext.zero.sharded.expert_windows import WindowGradients
from deepspeed_ext.zero.sharded.gathers import Gathers, partition
from deepspeed_ext.zero.sharded.gradients import ShardedGradients
from deepspeed_ext.zero.sharded.slices import Slices

_HELD_BY_US = {OffloadStateTypeEnum.lp_params, OffloadStateTypeEnum.lp_grads}
_OF_OPTIMIZER = {OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.optim_states}


class Stage3Optimizer(ParoOptimizer, LeafReducer, DeepSpeedZeroOptimizer_Stage3):
    """Stage-3 optimizer of a strategy with p = I or G. See Note [What runs when, parameters sharded].

    Args:
        strategy: one with p = I or G.
        families: of parameters, with their process groups and hops.
        bucket: elements (of whole parameters) gathered at a time after the step.
        sequential: whether parameters are gathered one by one.
        dp_process_group: the data-parallel group, as the engine passes it; ``families`` replaces it.
        The others are the parent's.

    Attributes:
        slices, gathers: what is held of parameters, and how they are gathered for use, of each family.
        gradients: on their way to the optimizer's shard, of each family.
    """

    gradients: Mapping[str, ShardedGradients]
    slices: dict[str, Slices]
    gathers: dict[str, Gathers]
    _held: Tensor  # what is held of all families' gradients, 1D
    _waiting: bool  # whether a micro-step has ended since gradients moved to os; the same on all ranks

    # The parent's.
    sub_group_size: int
    fp16_groups: list[list[ZeroParameter]]
    averaged_gradients: dict[int, list[Tensor]]  # by sub-group
    persistent_parameters: list[ZeroParameter]
    grad_partitions_flat_buffer: Any  # a tensor, or None before it is made anew
    inf_or_nan_tracker: Tensor
    # Its way with Muon is not ours, and it would refuse what it needs whole gradients for.
    use_muon = property(lambda self: False, lambda self, found: None)

    def __init__(
        self,
        *args: Any,
        strategy: Strategy,
        families: Families,
        bucket: int,
        sequential: bool = False,
        dp_process_group: object = None,
        reduce_scatter: bool = True,
        overlap_comm: bool = False,
        **kwargs: Any,
    ) -> None:
        self.strategy = strategy
        self._take_families(families)
        self._gather_bucket, self._sequential = bucket, sequential
        self._overlap = overlap_comm
        self._waiting = False
        super().__init__(
            *args,
            dp_process_group=self.topology.shard_group(strategy.os),
            reduce_scatter=reduce_scatter,
            overlap_comm=overlap_comm,
            **kwargs,
        )
        self.filing = Filing(families, strategy, [dist.get_rank(group) for group in self.sub_group_process_groups])
        # Which ranks count a parameter in the norm: those of other tensors' slices do not, those of other stages do.
        if self.model_parallel_group is not None:
            self.model_parallel_rank = bwc_tensor_model_parallel_rank(kwargs.get("mpu"))

    # Parameters #######################################################################################

    def initialize_ds_offload(self, **kwargs: Any) -> Any:
        """Have DeepSpeed shard the model's parameters and watch its modules; then hold the parameters as p says."""
        with coordinator_of(self.topology.shard_group(self.strategy.p)):
            offload = super().initialize_ds_offload(**kwargs)
        how = self._gather_bucket, self._sequential
        self.gathers = partition(kwargs["module"], offload, self.strategy, self.families, *how)
        self.slices = {name: gathers.slices for name, gathers in self.gathers.items()}
        for gathers in self.gathers.values():
            gathers.on_change(self.whole.ask)
        return offload

    def _get_parameter_partitions(self) -> list[Tensor]:
        """Return what goes into the flat parameter buffer: all rows of slices."""
        return [part for group in self.fp16_groups for part in self._slices_of(group).partitions(group)]

    def _set_fp16_partitioned_groups_flat(self) -> None:
        for slices in self.slices.values():
            slices.forget_blocks()
        offset = 0
        for number, group in enumerate(self.fp16_groups):
            flat, offset = self._slices_of(group).make_block(number, self.lp_param_buffer, offset, group)
            self.fp16_partitioned_groups_flat.append(flat)

    def _pre_step(self) -> None:
        self.drain_parameters()
        for slices in self.slices.values():
            slices.forget_changes()
        if self._waiting:  # the caller has declared the boundary after the last backward only
            self._sync_gradients()
        self._learn_from_first_step()
        self._forget_gradients()
        super()._pre_step()

    # Gradients: N -> g ################################################################################

    def _setup_for_real_optimizer(self) -> None:
        """Also hold gradients as g says."""
        super()._setup_for_real_optimizer()
        if self.strategy.g == Placement.N:
            for bucket in self.ipg_buckets.values():
                bucket.buffer = None  # gradients do not go through the parent's buckets
        self._measure_buckets(param.ds_numel for group in self.fp16_groups for param in group)
        self.gradients = {name: self._make_gradients(name) for name in self.families}
        self._windows = WindowGradients(self, self.gradients[DENSE])
        one_row = all(gradients.rows == 1 for gradients in self.gradients.values())
        if one_row and (self.strategy.g != Placement.N or self.offload_optimizer):
            self._place_gradients(self.grad_partitions_flat_buffer.view(-1))
            return
        if self.offload_optimizer_pin_memory:
            get_accelerator().unpin_memory(self.grad_partitions_flat_buffer)
        self._gradient_shards.clear()
        self.grad_partitions_flat_buffer = None  # the parent's, before ours is made
        if self.strategy.g == Placement.N:
            self._drop_shard()
        else:
            device = get_accelerator().current_device_name()
            self._place_gradients(self._new_gradients(device))
            self.inf_or_nan_tracker = self.inf_or_nan_tracker.to(device)

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
            by_host=bool(self.offload_optimizer) and self._gradient_stream is not None,
            name=lambda param: self.param_names[param],
            number=list(self.families).index(family),
        )

    def _drop_shard(self) -> None:
        """Drop the shard: with g = N there is none beside whole gradients."""
        self.averaged_gradients = {}
        placeholder = torch.zeros(1, dtype=self.gradient_accumulation_dtype, device=self.device)
        self._place_gradients(placeholder.expand(sum(self._held_numels)))

    @property
    def _held_numels(self) -> list[int]:
        """Elements that are held of each family's gradients."""
        return [gradients.rows * gradients.numel for gradients in self.gradients.values()]

    def _new_gradients(self, device: str | torch.device) -> Tensor:
        """Return zeros for ``_place_gradients``."""
        return torch.zeros(sum(self._held_numels), dtype=self.gradient_accumulation_dtype, device=device)

    def _place_gradients(self, held: Tensor) -> None:
        """Hold gradients in this tensor, 1D: all rows of one family after the other. The parent sees the optimizer's
        row; of several families all rows, of whose sum an overflow is one where it is one of theirs."""
        self._held = held
        for gradients, part in zip(self.gradients.values(), held.split(self._held_numels), strict=True):
            self._gradient_shards.update(gradients.place(part))
        self.grad_partitions_flat_buffer = held if len(self.gradients) > 1 else self.gradients[DENSE].shard

    @property
    def _gradient_shards(self) -> dict[int, Tensor]:
        """The parent's map from ds_id to the gradient of the optimizer's shard, 1D."""
        return self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition

    def reduce_ready_partitions_and_remove_grads(self, param: Any) -> None:
        """Put a complete gradient into a bucket, or to those that stay until the boundary."""
        if self.strategy.g != Placement.N:
            super().reduce_ready_partitions_and_remove_grads(param)
            self._reduce_if_full(self.get_param_comm_dtype(param))
        elif not self._coalesce_grad_reduction and getattr(param, "ds_grad_is_ready", True):
            begun = any(gradients.begun for gradients in self.gradients.values())
            if not (begun or self._is_placeholder or self.offload_optimizer):
                self._drop_shard()
            last = self._is_last_backward
            if last and self._gradient_stream is not None:  # which packs it; a model may compute on several streams
                self._gradient_stream.wait_stream(get_accelerator().current_stream())
            gradients = self._gradients_of(param)
            left = gradients.keep(param, param.grad, self.gradient_accumulation_dtype, last)
            param.grad = None
            if left:
                with self._reduction_stream():
                    self._make_shard()
                    gradients.reduce_buckets(left)

    @property
    def _is_placeholder(self) -> bool:
        """Whether there is no shard beside whole gradients."""
        return any(gradients.is_placeholder for gradients in self.gradients.values())

    def _make_shard(self) -> None:
        """Make the shard, if there is none beside whole gradients."""
        if self._is_placeholder:
            self._place_gradients(self._new_gradients(self.device))

    def reduce_leaf(self, params: Sequence[ZeroParameter]) -> None:
        """Put a leaf module's gradients into buckets, without a copy and a stream for each."""
        if self._coalesce_grad_reduction:
            return
        ready = [param for param in params if getattr(param, "ds_grad_is_ready", True)]
        if self.strategy.g == Placement.N:
            for param in (param for param in ready if param.grad is not None):
                self.reduce_ready_partitions_and_remove_grads(param)
            return
        ready = list(zero_gradients(ready))  # all written before the stream of reductions waits for that
        if self._gradient_stream is not None:
            self._gradient_stream.wait_stream(get_accelerator().current_stream())
        for param in ready:
            dtype = self.get_param_comm_dtype(param)
            bucket = self.ipg_buckets[dtype]
            another = bucket.process_group is not param.ds_process_group
            if bucket.elements and (another or bucket.elements + param.ds_numel > self.reduce_bucket_size):
                self._DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads(dtype)
            bucket.params.append(param)
            bucket.process_group = param.ds_process_group
            bucket.elements += param.ds_numel
            self._reduce_if_full(dtype)

    def reduce_window(self, *window: Any) -> None:
        """Reduce the gradients of a window of packed experts; see ``LeafReducer``."""
        self._windows.reduce(*window)

    def _reduce_if_full(self, dtype: torch.dtype) -> None:
        if self._is_full(self.ipg_buckets[dtype]):
            self._DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads(dtype)

    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(
        self, params_to_reduce: list[ZeroParameter], communication_data_type: torch.dtype
    ) -> list[Tensor]:
        """Move a bucket from N to g. It arrives later: the parent gets no partitions here."""
        self._reduce(params_to_reduce, communication_data_type)
        return []

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
                gradients.reduce(mine, dtype, sequence_parallel_size, self._is_last_backward)

    def partition_grads(self, params_to_release: list[ZeroParameter], grad_partitions: list[Tensor]) -> None:
        """Release the gradients of a bucket, which are packed by now."""
        for param in params_to_release:
            if param.grad is not None and not get_accelerator().is_synchronized_device():
                param.grad.record_stream(get_accelerator().current_stream())
            param.grad = None

    def backward_epilogue(self) -> None:
        """End of a backward, also where nothing is reduced at it."""
        leave_modules(self)
        super().backward_epilogue()

    # The accumulation boundary: g -> os ###############################################################

    def independent_gradient_partition_epilogue(self) -> None:
        """End of a micro-step: flush the buckets and, at the accumulation boundary, move g to os."""
        end_of_backward(self)
        for dtype in sort_dtypes(self.ipg_buckets):
            self._DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads(dtype)
        with ordered_by_streams():
            super().independent_gradient_partition_epilogue()
        with self._reduction_stream():
            for gradients in self.gradients.values():
                gradients.end_backward()
        self._waiting = True
        boundary = self.is_gradient_accumulation_boundary()
        self._last_was_known = boundary or self.flush_follows
        if boundary:
            self._sync_gradients()
        elif self._has_left and not self.flush_follows:
            raise self._boundary_taken_back()
        elif not self.overlaps_micro_steps:
            self._finish_buckets()

    def _sync_gradients(self) -> None:
        """Complete the gradients of the optimizer's shard; all parameters on all ranks, used or not."""
        with self._reduction_stream():
            if self.strategy.g == Placement.N:
                self._make_shard()
                for gradients in self.gradients.values():
                    gradients.reduce_kept()
        self._finish_for_host()
        with self._reduction_stream():
            for gradients in self.gradients.values():
                gradients.finish()
        self._waiting = False
        self._wait_for_reductions()
        if self._gradient_stream is not None and self.offload_optimizer:
            self._gradient_stream.synchronize()  # gradients may be in host memory
        self.complete_gradients()
        if self._gradient_stream is not None:  # where DeepSpeed looks for overflows
            self._gradient_stream.wait_stream(get_accelerator().current_stream())
        if not self.offload_optimizer:
            self._show_gradients()
        else:
            self._offload_boundary_param_ids = set(self._gradient_shards)
            self._finalize_offload_gradient_accumulation()
            if self._gradient_stream is not None:  # the step reads host memory
                self._gradient_stream.synchronize()
                get_accelerator().current_stream().synchronize()

    def _apply_muon_to_accumulated_grads(self) -> None:
        """Apply Muon, between the overflow check and the norm."""
        self.muon.apply()

    def _loss_scale_update_and_overflow_cleanup(self) -> bool:
        """Return whether the step is skipped, and have Muon know."""
        skipped = bool(super()._loss_scale_update_and_overflow_cleanup())
        self.muon.finish_step(not skipped)
        return skipped

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also forget what has been accumulated."""
        super().zero_grad(set_to_none)
        self._finish_buckets()
        self._finish_for_host()
        self._forget_gradients()
        self.gradients_dropped()
        self._waiting = False

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

    def _create_fp16_sub_groups(self, params_group: list[ZeroParameter]) -> list[list[ZeroParameter]]:
        """Make sub-groups; where slices are completed after the step, each is one all-gather of at most a bucket."""
        configured = self.sub_group_size
        if self._sliced:
            self.sub_group_size = min(configured, max(1, self._gather_bucket // self.topology.sizes.ranks))
        try:
            return super()._create_fp16_sub_groups(params_group)
        finally:
            self.sub_group_size = configured

    def _show_gradients(self) -> None:
        """Have the parent's step read them where they are."""
        self.averaged_gradients = {
            i: [self._gradient_shards[param.ds_id] for param in group] for i, group in enumerate(self.fp16_groups)
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

    def owned_span(self, param: Any) -> tuple[int, int]:
        """Return the elements whose optimizer states this rank has; see ``ParoOptimizer``."""
        chunk = param.ds_tensor.ds_numel
        start = min(dist.get_rank(group=param.ds_process_group) * chunk, param.ds_numel)
        return start, min(start + chunk, param.ds_numel)

    def owned_gradient(self, param: Any) -> Tensor:
        """Return the gradient of these elements; see ``ParoOptimizer``."""
        start, end = self.owned_span(param)
        return self._gradient_shards[param.ds_id][: end - start]

    def flat_shards(self) -> list[FlatShard]:
        """Return what is in this rank's flat partitions; see ``FlatShards``."""
        found = []
        for number, params in enumerate(self.fp16_groups):
            members, column = [], 0
            for param in params:
                start, end = self.owned_span(param)
                chunk = param.ds_tensor.ds_numel
                members.append(Member(param, tuple(param.ds_shape), Cells(0, chunk), start, end - start, column))
                column += chunk
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

    @property
    def updates_on_host(self) -> bool:
        """Whether they are: with optimizer offload."""
        return bool(self.offload_optimizer)

    def take_update(self, number: int) -> float:
        """Prepare for an update; see ``FlatShards``."""
        return self._update_factor(number, self.sub_groups_lacking_loss_scale)

    def updates_taken(self, shards: Sequence[FlatShard]) -> None:
        """Have the offloaded optimizer read their norms; see ``FlatShards``."""
        for shard in shards if self.offload_optimizer else ():
            update = self.shard_gradient(shard.number)
            for member in shard.members:
                norm = update.narrow(0, member.column, member.numel).to(get_norm_dtype()).norm(2)
                self.norm_for_param_grads[self.get_param_id(member.param)] = norm

    # Into checkpoints and back ########################################################################

    def check_states(self, state: Mapping[str, Any]) -> None:
        """Refuse a rank's state dict that is sharded otherwise; see ``sharded/saved.py``.

        Raises:
            ValueError: it is.
        """
        placement = self._zero3_partition_group_metadata() if saved.PLACEMENT in state else None
        saved.check(state, self.partition_count, placement, self._sub_group_numels())

    def load_state_dict(self, state_dict_list: list[dict[str, Any]], *args: Any, **kwargs: Any) -> None:
        """Also refuse states that are sharded otherwise, and divide sub-groups anew.

        Raises:
            ValueError: see ``check_states``.
        """
        if not kwargs.get("checkpoint_folder"):
            rank = dist.get_rank(group=self.dp_process_group)
            self.check_states(state_dict_list[rank])
            state = saved.regroup(state_dict_list[rank], self._sub_group_numels())
            state_dict_list[rank] = saved.with_own_momentum(state, self.updates_on_host)
        super().load_state_dict(state_dict_list, *args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return DeepSpeed's, with momentum as its stage 3 has it; see Note [Momentum of DeepSpeed's stages]."""
        state = dict(super().state_dict())
        if not uses_muon(self.optimizer):
            return state
        return saved.with_saved_momentum(state, float(self.loss_scale), self.updates_on_host)

    def _get_sub_group_partition_ranks(self, sub_group_id: int) -> list[int]:
        """Return which ranks share a sub-group, as DeepSpeed's stage 3 notes and compares it with AutoEP."""
        return self.filing.as_written(super()._get_sub_group_partition_ranks(sub_group_id))

    def _sub_group_numels(self) -> list[list[int]]:
        """Return for each parameter group the elements of this rank's sub-groups."""
        numels: list[list[int]] = [[] for _ in self.optimizer.param_groups]
        for sub_group, flat in enumerate(self.fp32_partitioned_groups_flat):
            numels[self.sub_group_to_group_id[sub_group]].append(flat.numel())
        return numels

    def checkpoint_event_prologue(self) -> None:
        """Prepare for a checkpoint that is saved or loaded."""
        self.drain_parameters()
        super().checkpoint_event_prologue()

    def checkpoint_event_epilogue(self) -> None:
        """Complete slices after it: what was loaded is in this rank's rows only."""
        for slices in self.slices.values():
            slices.complete()
        super().checkpoint_event_epilogue()

    # Parameters: os -> p ##############################################################################

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

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        """Also send what a step has written to the other groups, at once if the next sub-group's step takes long."""
        if self._stepping and sub_group_id == 0:  # not before the step is known to be applied
            self.whole.begin(stepping=True)
        slices = self._slices_of(self.fp16_groups[sub_group_id])
        if self.whole.now or slices.always_whole:
            super()._reassign_or_swap_out_partitioned_parameters(sub_group_id)
        else:
            held = self.fp16_partitioned_groups_flat[sub_group_id]
            weights = self.fp32_partitioned_groups_flat[sub_group_id].detach()
            slices.change(sub_group_id, weights, held)
        if self._starts_updates_early:
            slices.gather_updates_of(sub_group_id)

    def _gather_updates(self) -> None:
        """Start to move updated parameters os -> p: those of one family after the other, on all ranks."""
        for slices in self.slices.values():
            slices.gather_updates()

    @property
    def _starts_updates_early(self) -> bool:
        return self._stepping and bool(self.offload_optimizer)

    def send_whole(self) -> None:
        """Have all ranks hold the optimizer's weights, where they may hold something else; see ``ParoOptimizer``."""
        if self.whole.always:
            return
        self._require_parameters()
        self.drain_parameters()  # what the last step has sent is written to the rows that are written here
        for slices in self.slices.values():
            slices.forget_changes()
        self.whole.begin(stepping=False)
        for sub_group in range(len(self.fp16_partitioned_groups_flat)):
            self._reassign_or_swap_out_partitioned_parameters(sub_group)
        self._gather_updates()
        self.drain_parameters()

    def set_full_hp_param(self, value: Tensor, param: ZeroParameter, optim_state_key: str | None = None) -> None:
        """Serve DeepSpeed's safe_set_full_fp32_param and its like.

        Where ranks do not divide a parameter, DeepSpeed's own reads behind its end: the last rank alone raises.
        """
        self.whole.ask()
        if not param.requires_grad or value.numel() != param.ds_numel:
            super().set_full_hp_param(value, param, optim_state_key)
            return
        held, _ = self._get_fp32_opt_state_partition(
            param, release_swap_buffers=False, optim_state_key=optim_state_key
        )
        start = held.numel() * self._get_param_partition_rank(param)
        mine = value.flatten()[start : start + held.numel()]
        held.data[: mine.numel()].copy_(mine)

    def set_local_hp_param(self, *args: Any, **kwargs: Any) -> None:
        """Serve DeepSpeed's safe_set_local_fp32_param and its like."""
        self.whole.ask()
        super().set_local_hp_param(*args, **kwargs)

    def offload_states(
        self,
        include: Iterable[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        **kwargs: Any,
    ) -> None:
        """Offload DeepSpeed's states, with parameters and gradients as we hold them."""
        self.drain_parameters()
        self._finish_buckets()
        wanted = set(OffloadStateTypeEnum if include is None else include) - self.offloaded_states
        held = _HELD_BY_US | (_OF_OPTIMIZER if uses_muon(self.optimizer) else set())
        super().offload_states(wanted - held, device, pin_memory, **kwargs)

        def move(tensor: Tensor) -> Tensor:
            moved = tensor.to(device.value)
            return get_accelerator().pin_memory(moved) if pin_memory else moved

        if OffloadStateTypeEnum.lp_params in wanted:
            self._hold_parameters(move(self.lp_param_buffer))
            self.fp16_partitioned_groups_flat.clear()
            for slices in self.slices.values():
                slices.forget_blocks()
        if OffloadStateTypeEnum.lp_grads in wanted:
            self._place_gradients(move(self._held))
            self.averaged_gradients = {}
        self._move_optimizer(wanted & held, move)
        self.offloaded_states |= wanted & held

    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        """Bring back what ``offload_states`` has moved."""
        device = get_accelerator().current_device_name()
        if OffloadStateTypeEnum.lp_params in self.offloaded_states:
            self._hold_parameters(self.lp_param_buffer.to(device))
            self._set_fp16_partitioned_groups_flat()
        if OffloadStateTypeEnum.lp_grads in self.offloaded_states:
            self._place_gradients(self._held.to(device))
            self._show_gradients()
        self.offloaded_states -= _HELD_BY_US
        if uses_muon(self.optimizer):  # DeepSpeed moves no others
            self._move_optimizer(self.offloaded_states, lambda tensor: tensor.to(device))
            self.offloaded_states -= _OF_OPTIMIZER
        super().reload_states(*args, **kwargs)

    def _move_optimizer(self, wanted: Container[OffloadStateTypeEnum], move: Callable[[Tensor], Tensor]) -> None:
        """Move weights and states of the optimizer, where DeepSpeed's stage 3 knows only those of its FusedAdam."""
        if OffloadStateTypeEnum.hp_params in wanted:
            for weights in self.fp32_partitioned_groups_flat:
                weights.data = move(weights.data)
        if OffloadStateTypeEnum.optim_states in wanted:
            for states in self.optimizer.state.values():
                # Step counts stay on the host, where they are read.
                held = {key: one for key, one in states.items() if isinstance(one, Tensor) and one.dim()}
                states.update({key: move(one) for key, one in held.items()})

    def _hold_parameters(self, buffer: Tensor) -> None:
        self.lp_param_buffer, offset = buffer, 0
        for group in self.fp16_groups:
            offset = self._slices_of(group).place(buffer, offset, group)

    def _get_fp32_grad_state_partition(self, *args: Any, **kwargs: Any) -> Any:
        """Serve DeepSpeed's safe_get_full_grad and its like."""
        self._refuse_unfinished_gradients()
        return super()._get_fp32_grad_state_partition(*args, **kwargs)

    def update_fp32_grad_for_param_vectorized(self, *args: Any, **kwargs: Any) -> None:
        """Serve DeepSpeed's safe_update_full_grad_vectorized."""
        self._refuse_unfinished_gradients()
        super().update_fp32_grad_for_param_vectorized(*args, **kwargs)

    def _refuse_unfinished_gradients(self) -> None:
        self._finish_buckets()
        self._finish_for_host()
        if self._waiting and self.strategy.g != self.strategy.os:
            raise RuntimeError(
                f"Gradients can be read and changed at the accumulation boundary only: with paro_strategy "
                f"{self.strategy.name} (g = {self.strategy.g.name}, os = {self.strategy.os.name}) they are not summed "
                f"over all ranks before it."
            )

    # Replicas of the optimizer (os = I) decide alike, even if a backend rounds differently in each group ###########

    def _get_norm_groups(self) -> list[Tensor]:
        parents = super()._get_norm_groups
        return [self._global_norm(lambda: combine_grad_norm_groups(parents()))]

    def get_grad_norm_direct(
        self, gradients: Sequence[Tensor], params: Sequence[ZeroParameter], norm_type: int = 2
    ) -> Tensor:
        """Return the parent's norm, without what another stage of a pipeline counts."""
        counted = [g[:0] if is_replica(p) else g for g, p in zip(gradients, params, strict=False)]
        return super().get_grad_norm_direct(counted, params, norm_type)

    def complete_grad_norm_calculation_for_cpu_offload(self, params: Sequence[ZeroParameter]) -> Tensor:
        """Return the same norm with an offloaded optimizer."""
        for param in filter(is_replica, params):
            self.norm_for_param_grads.pop(self.get_param_id(param), None)
        return super().complete_grad_norm_calculation_for_cpu_offload(params)

    # The end ##########################################################################################

    def destroy(self) -> None:
        """Also give the parameters back to DeepSpeed, and drop gradients of an unfinished accumulation."""
        for gathers in self.gathers.values():
            gathers.release()
        for gradients in self.gradients.values():
            gradients.drop()
        super().destroy()

    # Streams ##########################################################################################

    @property
    def _gradient_stream(self) -> Any:
        """The stream of reductions; None on devices without streams."""
        return None if get_accelerator().is_synchronized_device() else self.reduce_and_partition_stream

    @contextmanager
    def _reduction_stream(self) -> Iterator[None]:
        """Run on the stream of reductions, behind everything on the current one."""
        stream = self._gradient_stream
        if stream is not None:
            stream.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(stream):
            yield

    def _finish_for_host(self) -> None:
        """Have the host wait for all buckets; see ``Stage3States``."""
        if self._gradient_stream is not None and self.offload_optimizer:
            with self._reduction_stream():
                for gradients in self.gradients.values():
                    gradients.drain()
            self._gradient_stream.synchronize()

    def _wait_for_reductions(self) -> None:
        if self._gradient_stream is not None:
            get_accelerator().current_stream().wait_stream(self._gradient_stream)
