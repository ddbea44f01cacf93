# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Strategies with p = I or G: ZeRO's stage-3 optimizer with all three states placed by the table.

Note [What runs when, parameters sharded]
    The parent holds, steps and saves chunks of parameters over the process group in which the optimizer states are
    sharded. Ours are the ways to and from them:

    - Forward and backward gather parameters p -> N (``parameters.py``).
    - A full bucket moves N -> g (``__avg_scatter_grads``) in every micro-step if g is I or G. With g = N gradients
      stay where they are, and move at the accumulation boundary: all of them, in one order, so that ranks may have
      used different parameters (``partitioned_gradients.py``).
    - At the boundary what is in I moves on to ``os`` once (``_sync_gradients``).
    - What moves at the boundary leaves under the last micro-batch's backward already, as it gets complete, wherever
      the engine knows that it is the last; see Note [Leaving early] in ``boundary.py``.
    - After the step, updated parameters move os -> p (``gather_updates``).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.torch_autocast import sort_dtypes
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank
from torch import Tensor

from deepspeed_ext.deepspeed_types import ZeroParameter
from deepspeed_ext.leaf.gradients import LeafReducer, end_of_backward, leave_modules, zero_gradients
from deepspeed_ext.strategy import Placement, Strategy
from deepspeed_ext.zero.coordinator import coordinator_of
from deepspeed_ext.zero.expert_windows import WindowGradients
from deepspeed_ext.zero.families import DENSE, Families, family_of
from deepspeed_ext.zero.filing import Filing
from deepspeed_ext.zero.optimizer import is_replica, ordered_by_streams
from deepspeed_ext.zero.parameters import partition
from deepspeed_ext.zero.partitioned_gradients import PartitionedGradients
from deepspeed_ext.zero.stage3_states import Stage3States


class Stage3Optimizer(Stage3States, LeafReducer, DeepSpeedZeroOptimizer_Stage3):
    """Stage-3 optimizer of a strategy with p = I or G. See Note [What runs when, parameters sharded].

    Args:
        strategy: one with p = I or G.
        families: of parameters, with their process groups and hops.
        bucket: elements (of whole parameters) gathered at a time after the step.
        sequential: whether parameters are gathered one by one.
        dp_process_group: the data-parallel group, as the engine passes it; ``families`` replaces it.
        The others are the parent's.
    """

    # The parent's.
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
        self._gathers = {"bucket": bucket, "sequential": sequential}
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
        self.parameters = partition(kwargs["module"], offload, self.strategy, self.families, self._gathers)
        for parameters in self.parameters.values():
            parameters.on_change(self.whole.ask)
        return offload

    def _get_parameter_partitions(self) -> list[Tensor]:
        """Return what goes into the flat parameter buffer: all rows of slices."""
        return [part for group in self.fp16_groups for part in self._parameters_of(group).partitions(group)]

    def _set_fp16_partitioned_groups_flat(self) -> None:
        for parameters in self.parameters.values():
            parameters.forget_blocks()
        offset = 0
        for number, group in enumerate(self.fp16_groups):
            flat, offset = self._parameters_of(group).make_block(number, self.lp_param_buffer, offset, group)
            self.fp16_partitioned_groups_flat.append(flat)

    def _pre_step(self) -> None:
        self.drain_parameters()
        for parameters in self.parameters.values():
            parameters.forget_changes()
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

    def _make_gradients(self, family: str) -> PartitionedGradients:
        dtypes = list(self.ipg_buckets)
        return PartitionedGradients(
            [param for group in self.fp16_groups for param in group if family_of(param) == family],
            self.parameters[family].layout,
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
        for parameters in self.parameters.values():
            parameters.release()
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
