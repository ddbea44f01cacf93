# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Strategies with p = I or G: ZeRO's stage-3 optimizer with all three states placed by the table.

Note [What runs when, parameters cut]
    The parent holds, steps and saves chunks of parameters over the process group in which the optimizer states are
    cut. Ours are the ways to and from them:

    - Forward and backward gather parameters p -> N (``parameters.py``).
    - A full bucket moves N -> g (``__avg_scatter_grads``) in every micro-step if g is I or G. With g = N gradients
      stay where they are, and move at the accumulation boundary: all of them, in one order, so that ranks may have
      used different parameters.
    - What arrives is added to ``_gradients``, (rows, elements of the optimizer's shard). It has one row where
      buckets arrive in the placement of os; with g = I and os = G it is the I-slice, and row j of it is the parent's
      flat gradient buffer: a view, not a copy.
    - At the boundary what is in I moves on to ``os`` once, in windows over all parameters (``_sync_gradients``).
    - After the step, updated parameters move os -> p (``gather_updates``).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import PARTITION_COUNT
from deepspeed.runtime.torch_autocast import sort_dtypes
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.utils import get_mapping_to_flat_buffer
from torch import Tensor

from deepspeed_ext.hops import InFlight, Transfer, make_hop
from deepspeed_ext.moves import Moves
from deepspeed_ext.placement import Placement, Strategy
from deepspeed_ext.topology import Topology
from deepspeed_ext.zero.coordinator import coordinator_of
from deepspeed_ext.zero.parameters import PartitionedParameters
from deepspeed_ext.zero.replicas import largest_norm, largest_of_replicas

_HELD_BY_US = {OffloadStateTypeEnum.lp_params, OffloadStateTypeEnum.lp_grads}


class PartitionedOptimizer(DeepSpeedZeroOptimizer_Stage3):
    """Stage-3 optimizer of a strategy with p = I or G. See Note [What runs when, parameters cut].

    Args:
        strategy: one with p = I or G.
        topology: process groups of the data-parallel group.
        bucket: elements (of whole parameters) gathered at a time after the step.
        sequential: whether parameters are gathered one by one.
        dp_process_group: the data-parallel group, as the engine passes it; ``topology`` replaces it.
        The others are the parent's.
    """

    def __init__(
        self,
        *args: Any,
        strategy: Strategy,
        topology: Topology,
        bucket: int,
        sequential: bool = False,
        dp_process_group: Any = None,
        reduce_scatter: bool = True,
        overlap_comm: bool = False,
        **kwargs: Any,
    ) -> None:
        self.strategy = strategy
        self.topology = topology
        self._gathers = {"bucket": bucket, "sequential": sequential}
        self._moves = Moves(
            make_hop(topology.intra, "intra", reduce_scatter), make_hop(topology.inter, "inter", reduce_scatter)
        )
        self._in_flight = InFlight(overlap=overlap_comm)
        self._bucket_target = strategy.os if strategy.g == Placement.N else strategy.g
        self._whole: dict[int, Tensor] = {}  # ds_id: gradient accumulated with g = N
        self._begun = False  # whether _gradients hold something of this accumulation ...
        self._synced = False  # ... which has moved to os already
        super().__init__(
            *args,
            dp_process_group=topology.shard_group(strategy.os),
            reduce_scatter=reduce_scatter,
            overlap_comm=overlap_comm,
            **kwargs,
        )

    # Parameters #######################################################################################

    def initialize_ds_offload(self, **kwargs: Any) -> Any:
        """Have DeepSpeed cut the model's parameters and watch its modules; then hold the parameters as p says."""
        with coordinator_of(self.topology.shard_group(self.strategy.p)):
            offload = super().initialize_ds_offload(**kwargs)
        params = kwargs["module"].parameters()
        self.parameters = PartitionedParameters(params, self.strategy, self.topology, self._moves, **self._gathers)
        return offload

    def _create_fp16_sub_groups(self, params_group: list[Any]) -> list[list[Any]]:
        """Where slices are completed after the step, a sub-group is one all-gather: at most a bucket."""
        configured = self.sub_group_size
        if self.parameters.sliced:
            self.sub_group_size = min(configured, max(1, self._gathers["bucket"] // self.topology.cluster.ranks))
        try:
            return super()._create_fp16_sub_groups(params_group)
        finally:
            self.sub_group_size = configured

    def _get_parameter_partitions(self) -> list[Tensor]:
        """What goes into the flat parameter buffer: all rows of slices."""
        return self.parameters.partitions(self.fp16_groups)

    def _set_fp16_partitioned_groups_flat(self) -> None:
        self.fp16_partitioned_groups_flat.extend(self.parameters.make_blocks(self.lp_param_buffer, self.fp16_groups))

    def _post_step(self, timer_names: set[str]) -> None:
        """After the step: os -> p.

        The parent gathers persistent parameters here. They are in every block, so that would wait for all gathers
        between groups: where there are any, the modules of the next forward gather them, which then persist.
        """
        self.parameters.gather_updates()
        persistent = self.persistent_parameters
        if self.parameters.sliced:
            self.persistent_parameters = []
        try:
            super()._post_step(timer_names)
        finally:
            self.persistent_parameters = persistent

    def _pre_step(self) -> None:
        self.parameters.drain()
        self._begun = False
        super()._pre_step()

    # Gradients: N -> g ################################################################################

    def _setup_for_real_optimizer(self) -> None:
        """Also make the gradients of the optimizer's shard a row of ``_gradients``."""
        super()._setup_for_real_optimizer()
        if self.strategy.g == Placement.N:
            for bucket in self.ipg_buckets.values():
                bucket.buffer = None  # gradients do not go through the parent's buckets
        params = [param for group in self.fp16_groups for param in group]
        self._offsets: dict[int, int] = {}  # ds_id: first column in _gradients
        offset = 0
        for param in params:
            self._offsets[param.ds_id] = offset
            offset += param.ds_tensor.ds_numel
        rows = self.parameters.layout(params[0]).rows if self._bucket_target == Placement.I else 1
        if rows > 1:
            device = get_accelerator().current_device_name()
            self._gradient_shards.clear()
            self.grad_partitions_flat_buffer = None  # the parent's, before ours is made
            self._place_gradients(torch.zeros(rows, offset, dtype=self.gradient_accumulation_dtype, device=device))
            self.inf_or_nan_tracker = self.inf_or_nan_tracker.to(device)
        else:
            self._place_gradients(self.grad_partitions_flat_buffer.view(1, -1))

    def _place_gradients(self, gradients: Tensor) -> None:
        """Hold gradients in this tensor, (rows, elements of the shard), and have the parent see its row."""
        self._gradients = gradients
        self.grad_partitions_flat_buffer = gradients[self._own_row]
        numels = [param.ds_tensor.ds_numel for group in self.fp16_groups for param in group]
        shards = self.grad_partitions_flat_buffer.split(numels)
        self._gradient_shards.update(zip(self._offsets, shards, strict=True))

    @property
    def _own_row(self) -> int:
        return self._moves.inter.rank if self._gradients.shape[0] > 1 else 0

    @property
    def _gradient_shards(self) -> dict[int, Tensor]:
        """The parent's map from ds_id to the gradient of the optimizer's shard, 1D."""
        return self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition

    def reduce_ready_partitions_and_remove_grads(self, param: Any) -> None:
        """A gradient is complete in this micro-step: into a bucket, or to those that stay until the boundary."""
        if self.strategy.g != Placement.N:
            super().reduce_ready_partitions_and_remove_grads(param)
        elif not self._coalesce_grad_reduction and getattr(param, "ds_grad_is_ready", True):
            gradient = param.grad.detach().to(self.gradient_accumulation_dtype)
            if param.ds_id in self._whole:
                self._whole[param.ds_id].add_(gradient)
            else:
                self._whole[param.ds_id] = gradient
            param.grad = None

    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(
        self, params_to_reduce: list[Any], communication_data_type: torch.dtype
    ) -> list[Tensor]:
        """Move a bucket from N to g. It arrives later: the parent gets no partitions here."""
        self._reduce([(param, param.grad) for param in params_to_reduce], communication_data_type)
        return []

    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads(
        self, buffer_to_reduce: Tensor, communication_data_type: torch.dtype
    ) -> list[Tensor]:
        """The same with ``reduce_scatter`` false; the hops know that."""
        params = self.ipg_buckets[communication_data_type].params
        self._reduce([(param, param.grad) for param in params], communication_data_type)
        return []

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[Tensor]) -> None:
        """Release the gradients of a bucket, which are packed into a message by now."""
        for param in params_to_release:
            if param.grad is not None and not get_accelerator().is_synchronized_device():
                param.grad.record_stream(get_accelerator().current_stream())
            param.grad = None

    def _reduce(self, gradients: Sequence[tuple[Any, Tensor | None]], dtype: torch.dtype) -> None:
        """Move gradients N -> ``_bucket_target``, and add them there; None stands for zeros."""
        self._begin()
        layouts = [self.parameters.layout(param) for param, _ in gradients]
        width = sum(layout.chunk for layout in layouts)
        device = get_accelerator().current_device_name()
        cells = torch.empty(layouts[0].cols, layouts[0].rows, width, dtype=dtype, device=device)
        offset = 0
        for (_, gradient), layout in zip(gradients, layouts, strict=True):
            part = cells[:, :, offset : offset + layout.chunk]
            if gradient is None:
                part.zero_()
            else:
                layout.pack(gradient.reshape(-1), part)
            offset += layout.chunk
        # As ZeRO-3: divided before the sum, so that 16-bit sums keep their range; by all ranks, whatever the parent
        # is cut over.
        sequence = 1 if self.reduce_scatter else self.sequence_parallel_size
        cells.div_(self.topology.cluster.ranks / sequence)
        transfer = self._accumulate([param for param, _ in gradients], width, self._bucket_target, cells)
        del cells
        self._in_flight.submit(transfer)

    def _accumulate(self, params: Sequence[Any], width: int, target: Placement, cells: Tensor) -> Transfer:
        move = self._moves.reduce_cells(cells, target)
        del cells
        arrived = (yield from move).view(self._gradients.shape[0], width)
        for start, offset, numel in self._runs(params):
            total = self._gradients[:, start : start + numel]
            part = arrived[:, offset : offset + numel]
            if total.device == part.device:
                total.add_(part)
            else:  # offloaded: adding on the host is slow
                total.copy_(total.to(part.device, non_blocking=True).add_(part), non_blocking=True)
        return arrived

    def _runs(self, params: Sequence[Any]) -> list[tuple[int, int, int]]:
        """(column in ``_gradients``, column in the message, elements) of stretches that are in one order in both."""
        runs: list[tuple[int, int, int]] = []
        offset = 0
        for param in params:
            start, numel = self._offsets[param.ds_id], param.ds_tensor.ds_numel
            if runs and runs[-1][0] + runs[-1][2] == start:
                runs[-1] = (*runs[-1][:2], runs[-1][2] + numel)
            else:
                runs.append((start, offset, numel))
            offset += numel
        return runs

    def _begin(self) -> None:
        """Before something is added to ``_gradients``."""
        if not self._begun:
            self._gradients.zero_()
        elif self._synced and self._bucket_target == Placement.I:
            # Another backward at the boundary: what is complete already must count once when it is summed again.
            elsewhere = self.strategy.os == Placement.I and self._moves.inter.rank != 0
            for row in range(self._gradients.shape[0]):
                if row != self._own_row or elsewhere:
                    self._gradients[row].zero_()
        self._begun, self._synced = True, False

    # The accumulation boundary: g -> os ###############################################################

    def independent_gradient_partition_epilogue(self) -> None:
        """End of a micro-step: flush the buckets and, at the accumulation boundary, move g to os."""
        super().independent_gradient_partition_epilogue()
        with self._reduction_stream():
            self._in_flight.drain()
        if self.is_gradient_accumulation_boundary():
            self._sync_gradients()

    def finalize_gradient_accumulation_boundary(self) -> None:
        """The boundary where the caller owns it (``managed_gradient_accumulation`` false): at ``engine.step()``."""
        self.set_gradient_accumulation_boundary(True)
        self._sync_gradients()

    def _sync_gradients(self) -> None:
        """Complete the gradients of the optimizer's shard; all parameters on all ranks, used or not."""
        with self._reduction_stream():
            if self.strategy.g == Placement.N:
                self._reduce_whole()
            if not self._begun:
                self._begin()
            if self._bucket_target == Placement.I and not self._synced:
                width = max(1, self.reduce_bucket_size // self._gradients.shape[0])
                for start in range(0, self._gradients.shape[1], width):
                    self._in_flight.submit(self._sync_window(self._gradients[:, start : start + width]))
                self._in_flight.drain()
        self._synced = True
        if self._gradient_stream is not None:
            get_accelerator().current_stream().wait_stream(self._gradient_stream)
        if self.offload_optimizer:
            self._offload_boundary_param_ids = set(self._offsets)
            self._finalize_offload_gradient_accumulation()

    def _reduce_whole(self) -> None:
        """g = N: reduce what has been accumulated, in buckets."""
        buckets: dict[torch.dtype, list[tuple[Any, Tensor | None]]] = {}
        numels: dict[torch.dtype, int] = {}
        for param in (param for group in self.fp16_groups for param in group):
            dtype = self.get_param_comm_dtype(param)
            bucket = buckets.setdefault(dtype, [])
            if bucket and numels[dtype] + param.ds_numel > self.reduce_bucket_size:
                self._reduce(bucket, dtype)
                bucket.clear()
            numels[dtype] = param.ds_numel + (numels[dtype] if bucket else 0)
            bucket.append((param, self._whole.pop(param.ds_id, None)))
        for dtype in sort_dtypes(buckets):
            if buckets[dtype]:
                self._reduce(buckets[dtype], dtype)
        self._in_flight.drain()

    def _sync_window(self, window: Tensor) -> Transfer:
        device = get_accelerator().current_device_name()
        dtypes = list(self.ipg_buckets)  # of communication; windows mix parameters
        message = window.to(device=device, dtype=dtypes[0] if len(dtypes) == 1 else torch.float32).contiguous()
        total = yield from self._moves.sync_slice(message, self.strategy.os)
        window[self._own_row].copy_(total)
        return total

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also forget what has been accumulated."""
        super().zero_grad(set_to_none)
        self._whole.clear()
        self._begun = False

    # Replicas of the optimizer (os = I) decide alike, even if a backend rounds differently in each group ###########

    def _get_norm_groups(self) -> list[Tensor]:
        return [largest_norm(norm, self._replicas) for norm in super()._get_norm_groups()]

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Whether a replica has found an overflow."""
        found = torch.tensor([float(super().has_overflow(partition_gradients))])
        return bool(largest_of_replicas(found, self._replicas).item())

    @property
    def _replicas(self) -> Any:
        return self.topology.replica_group(self.strategy.os)

    # Checkpoints, offloaded states, the end ###########################################################

    def load_state_dict(self, state_dict_list: Any, *args: Any, **kwargs: Any) -> None:
        """Also complete the slices.

        Raises:
            ValueError: the checkpoint's states are cut over another number of ranks.
        """
        self.parameters.drain()
        folder = kwargs.get("checkpoint_folder")
        if not folder:
            saved = state_dict_list[dist.get_rank(group=self.dp_process_group)][PARTITION_COUNT]
            if saved != self.partition_count:
                raise ValueError(
                    f"The optimizer states of the checkpoint are cut over {saved} ranks, but paro_strategy "
                    f"{self.strategy.name} in groups of {self.topology.cluster.group_size} cuts them over "
                    f"{self.partition_count}. Load it with the strategy and group size that saved it, or load module "
                    f"weights only."
                )
        super().load_state_dict(state_dict_list, *args, **kwargs)
        self.parameters.gather_updates()

    def offload_states(self, include: Any = None, *args: Any, **kwargs: Any) -> None:
        """DeepSpeed's, for parameters and gradients as we hold them."""
        self.parameters.drain()
        wanted = set(OffloadStateTypeEnum if include is None else include) - self.offloaded_states
        super().offload_states(wanted - _HELD_BY_US, *args, **kwargs)
        if OffloadStateTypeEnum.lp_params in wanted:
            self._move_parameters(torch.device("cpu"))
            self.fp16_partitioned_groups_flat.clear()
        if OffloadStateTypeEnum.lp_grads in wanted:
            self._place_gradients(self._gradients.cpu())
            self.averaged_gradients = {}
        self.offloaded_states |= wanted & _HELD_BY_US

    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        """Brings back what ``offload_states`` has moved."""
        device = get_accelerator().current_device_name()
        if OffloadStateTypeEnum.lp_params in self.offloaded_states:
            self._move_parameters(torch.device(device))
            self._set_fp16_partitioned_groups_flat()
        if OffloadStateTypeEnum.lp_grads in self.offloaded_states:
            self._place_gradients(self._gradients.to(device))
            self.averaged_gradients = {
                i: [self._gradient_shards[param.ds_id] for param in group] for i, group in enumerate(self.fp16_groups)
            }
        self.offloaded_states -= _HELD_BY_US
        super().reload_states(*args, **kwargs)

    def _move_parameters(self, device: torch.device) -> None:
        self.lp_param_buffer = self.lp_param_buffer.to(device)
        for tensor, offset, numel in get_mapping_to_flat_buffer(self._get_parameter_partitions()):
            tensor.data = self.lp_param_buffer.narrow(0, offset, numel)

    def destroy(self) -> None:
        """Also give the parameters back to DeepSpeed, and drop gradients of an unfinished accumulation."""
        self.parameters.release()
        self._whole.clear()
        super().destroy()

    # Streams ##########################################################################################

    @property
    def _gradient_stream(self) -> Any:
        """The stream of reductions; None on devices without streams."""
        return None if get_accelerator().is_synchronized_device() else self.reduce_and_partition_stream

    @contextmanager
    def _reduction_stream(self) -> Iterator[None]:
        """The stream of reductions, behind everything on the current one."""
        stream = self._gradient_stream
        if stream is not None:
            stream.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(stream):
            yield
