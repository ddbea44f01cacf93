# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Gathers of parameters with p = I or G for forward and backward.

Three methods that DeepSpeed attaches to each parameter are replaced: ``all_gather``, ``all_gather_coalesced``, and
``partition``. ``release`` restores them.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.torch_autocast import sort_dtypes
from deepspeed.runtime.zero.partition_parameters import MultipleAllGatherHandles, ZeroParamStatus, get_allgather_dtype
from torch import Tensor, nn

from deepspeed_ext.comm.hops import Transfer
from deepspeed_ext.comm.packing import concat_aligned, fill_up
from deepspeed_ext.comm.parameter_bucket import ParameterBucket
from deepspeed_ext.comm.transfer_queue import ActiveTransfer, TransferQueue, outside_autograd
from deepspeed_ext.config.keys import LEAF_BYTES, SECTION
from deepspeed_ext.deepspeed_types import ZeroParameter
from deepspeed_ext.leaf.units import UNIT, LiveElements, Unit, UnitGather, make_units, remove_units
from deepspeed_ext.leaf.windows import WindowedModule
from deepspeed_ext.strategy import Placement
from deepspeed_ext.zero.module_placements import Whole, is_whole
from deepspeed_ext.zero.resync import Resync
from deepspeed_ext.zero.sharded.expert_windows import WindowGathers
from deepspeed_ext.zero.sharded.parameter_chunks import OWNER, REPLICAS
from deepspeed_ext.zero.sharded.slices import Slices

_METHODS = ("all_gather", "all_gather_coalesced", "partition")


class GatherHandle:
    """A gather of parameters in flight. DeepSpeed's coordinator waits for it.

    Args:
        params: unavailable parameters, all of one dtype on the wire; they are marked as in flight.
        queue: queue of the gather. Completes gathers in the same order on all ranks; DeepSpeed may wait in any order.
        started: the gather of their cells side by side.
        bucket: layout of these cells.
        parts: rows of the bucket that a rank has sent together.
        separately: whether parameters may be released one by one, and must not share memory.
    """

    def __init__(
        self,
        params: Sequence[ZeroParameter],
        queue: TransferQueue,
        started: ActiveTransfer,
        *,
        bucket: ParameterBucket,
        parts: int,
        separately: bool,
    ) -> None:
        self._params = params
        self._queue = queue
        self._bucket = bucket
        self._parts = parts
        self._copies = separately and bucket.rows * bucket.cols == 1 and len(params) > 1  # otherwise they share memory
        for param in params:
            param.ds_status = ZeroParamStatus.INFLIGHT
        self._started: ActiveTransfer | None = started

    @outside_autograd
    def wait(self, handle_dependency: bool = True) -> None:
        """Make the parameters available, on the current stream. ``handle_dependency`` is ignored: the result is
        this stream's memory, or recorded on it."""
        if self._started is None:
            return
        flat, self._started = self._queue.finish(self._started), None
        cells = self._bucket.received_cells(flat, self._parts)
        for param, full in zip(self._params, self._bucket.unpack(cells), strict=True):
            data = full.clone() if self._copies else full
            param.data = data.view(param.ds_shape).to(param.ds_tensor.dtype)
            param.ds_status = ZeroParamStatus.AVAILABLE


class ResidentHandle:
    """Handle of parameters on a single rank: their unsharded ``ds_tensor`` is used without a gather."""

    def __init__(self, params: Sequence[ZeroParameter]) -> None:
        self._params = params
        for param in params:
            param.ds_status = ZeroParamStatus.INFLIGHT

    def wait(self, handle_dependency: bool = True) -> None:
        """Make the parameters available."""
        for param in self._params:
            if param.ds_status == ZeroParamStatus.INFLIGHT:
                param.data = param.ds_tensor.data[: param.ds_numel].view(param.ds_shape)
                param.ds_status = ZeroParamStatus.AVAILABLE


class Gathers:
    """Gathers the parameters of one family, or of ``grouped`` ones, for use.

    Args:
        sequential: whether to gather each parameter on its own (DeepSpeed's ``allgather_sequential``).
        resync: notified when parameters are written outside of a step; None without an optimizer.

    Attributes:
        whole: the parameters that stay gathered; dense ones only.
    """

    def __init__(self, slices: Slices, *, sequential: bool, resync: Resync | None) -> None:
        self.slices = slices
        self._redistribution, self._topology = slices.redistribution, slices.topology
        self._sequential, self._resync = sequential, resync
        self._rounded_ids: set[int] = set()  # ds_ids of parameters whose last gather was in a lower precision
        self._path = slices.strategy.p, Placement.N
        # A gather may first wait for updates of its slices. On a side stream, this does not block the running module.
        has_two_hops = self._redistribution.count_hops(*self._path) > 1
        self._side_streams = (has_two_hops or slices.has_slices) and slices.rows.is_stream_ordered
        threads = (slices.has_slices and self._redistribution.pairwise, has_two_hops and self._redistribution.pairwise)
        self._queue = TransferQueue(True, self._side_streams, *threads)
        self.live = LiveElements()
        self.whole: Whole | None = None
        for param in slices.params:
            if hasattr(param, OWNER):
                getattr(param, OWNER).release()
        slices.shard_parameters()
        self._attach_methods()
        self._leaves: list[nn.Module] = []
        self._units: list[Unit] = []

    # Making ###########################################################################################

    def _attach_methods(self) -> None:
        for param in self.slices.params:
            setattr(param, OWNER, self)
            if self.slices.strategy.os == Placement.I:
                setattr(param, REPLICAS, self._topology.all_groups.world)
            elif hasattr(param, REPLICAS):
                delattr(param, REPLICAS)
            partition = param.partition
            originals = {name: getattr(param, name) for name in _METHODS}
            param.paro_originals = originals
            param.all_gather = functools.partial(self._all_gather, param)
            param.all_gather_coalesced = self.all_gather_coalesced
            param.partition = functools.partial(self._partition, param, partition)

    def make_units(self, leaves: Iterable[nn.Module]) -> None:
        """Combine the parameters of leaf modules into units; see ``units.py``."""
        self._leaves = list(leaves)
        self._units = [] if self._sequential else make_units(self._leaves, self)

    def fetch_windows(self, windowed: Sequence[WindowedModule]) -> None:
        """Fetch the packed experts of modules in windows."""
        fetcher = WindowGathers(self.slices, self._queue, self.live)
        for module in windowed:
            module.fetcher = fetcher

    def unit_kind(self, param: ZeroParameter) -> Any:
        """Return the kind of a parameter; see ``UnitOwner``."""
        if getattr(param, OWNER, None) is not self or is_whole(param):
            return None
        return param.dtype, wire_dtype(param), param.ds_persist

    def release(self) -> None:
        """Return the parameters to DeepSpeed, with its methods and unchanged sharding.

        Without communication, because this runs when an engine is deleted. So with os = I parameters stay sharded
        inside groups, and ``REPLICAS`` marks them for ``repartition_for_stock``.
        """
        if self.whole is not None:
            self.whole.release()
        self.slices.drain()  # gathers in flight still write to the slices
        remove_units(self._leaves, self._units)
        self._units.clear()
        for param in self.slices.params:
            if getattr(param, OWNER, None) is self:
                for name, original in param.paro_originals.items():
                    setattr(param, name, original)
                delattr(param, OWNER)
                del param.paro_originals
                self.slices.release(param)
        self.slices.drop_slices()

    # Gathering ########################################################################################

    def _start_gather(
        self, params: Sequence[ZeroParameter], dtype: torch.dtype, separately: bool = True
    ) -> GatherHandle:
        """p -> N of parameters with one dtype on the wire; ``separately`` if they may be released one by one."""
        bucket, out = self.slices.layout_of(params, separately), None
        if self._side_streams and self._topology.sizes.group_size > 1:
            # The result outlives the transfer: this stream's allocator reuses its memory sooner than a side stream's.
            width = fill_up(self.slices.row_count * bucket.width, self._redistribution.multiple)
            device = get_accelerator().current_device_name()
            senders = self._topology.sizes.ranks // self.slices.row_count
            out = torch.empty(senders * width, dtype=dtype, device=device)
        started = self._queue.start(self._gather_transfer(params, dtype, out))
        self.live.add(sum(param.ds_numel for param in params))
        if dtype != params[0].ds_tensor.dtype:
            self._rounded_ids.update(param.ds_id for param in params)
        elif self._rounded_ids:
            self._rounded_ids.difference_update(param.ds_id for param in params)
        return GatherHandle(
            params, self._queue, started, bucket=bucket, parts=self.slices.row_count, separately=separately
        )

    def _gather_transfer(self, params: Sequence[ZeroParameter], dtype: torch.dtype, out: Tensor | None) -> Transfer:
        self.slices.wait_for_updates(params)
        # A list, from which the shard is popped, so that the hop can free it.
        shard = [concat_aligned(self.slices.to_device(params, dtype), self._redistribution.multiple)]
        return (yield from self._redistribution.gather(shard.pop(), *self._path, out))

    @outside_autograd
    def all_gather_coalesced(
        self, params: Iterable[ZeroParameter], safe_mode: bool = False, quantize: bool = False
    ) -> MultipleAllGatherHandles:
        """Start to gather unavailable parameters.

        Args:
            params: in any order, the same on all ranks that gather together.
            safe_mode, quantize: DeepSpeed's; never set with a strategy.

        Raises:
            RuntimeError: a parameter is available or in flight.
        """
        # One order on all ranks, or collectives would not match.
        ordered = sorted(params, key=lambda param: param.ds_id)
        for param in ordered:
            if param.ds_status != ZeroParamStatus.NOT_AVAILABLE:
                raise RuntimeError(f"expected a released parameter, got one that is gathered: {param.ds_summary()}")
        # Also one order of families: ``self`` is the first in the caller's set, which has another order on each rank.
        members_of: dict[Gathers, list[Any]] = {}
        for param in ordered:
            members_of.setdefault(_owner(param), []).append(param)
        return MultipleAllGatherHandles(
            [handle for owner, members in members_of.items() for handle in owner._start_gathers(members)]
        )

    def _start_gathers(self, ordered: Sequence[Any]) -> list[Any]:
        """Start to gather units and parameters of this family."""
        units = [param for param in ordered if isinstance(param, Unit)]
        handles: list[Any] = [self._start_unit(unit) for unit in units]
        by_dtype: dict[torch.dtype, list[ZeroParameter]] = {}
        for param in ordered if not units else [param for param in ordered if not isinstance(param, Unit)]:
            by_dtype.setdefault(wire_dtype(param), []).append(param)
        for dtype in sort_dtypes(by_dtype):
            batches = [[param] for param in by_dtype[dtype]] if self._sequential else [by_dtype[dtype]]
            handles += [self._start_gather(batch, dtype) for batch in batches]
        return handles

    def _start_unit(self, unit: Unit) -> UnitGather:
        missing = unit.missing()
        if not missing:
            return UnitGather(unit, None)
        resident = self._topology.sizes.ranks == 1 and missing[0].ds_tensor.device == missing[0].device
        if resident:
            self.live.add(sum(param.ds_numel for param in missing))
            return UnitGather(unit, ResidentHandle(missing))
        return UnitGather(unit, self._start_gather(missing, wire_dtype(missing[0]), separately=False))

    @outside_autograd
    def start_batches(self, params: Iterable[ZeroParameter]) -> list[GatherHandle]:
        """Start to gather released parameters in their own dtype, in few messages."""
        return list(self._gathers_of(params))

    def _gathers_of(self, params: Iterable[ZeroParameter], separately: bool = False) -> Iterator[GatherHandle]:
        batches = ([param] for param in params) if separately else self.slices.batches(params)
        return (self._start_gather(batch, batch[0].ds_tensor.dtype) for batch in batches)

    def drop(self, params: Sequence[ZeroParameter]) -> None:
        """Release gathered parameters without writing them back."""
        self.live.add(-sum(param.ds_numel for param in params))
        params[0].paro_originals["partition"](param_list=params)

    @outside_autograd
    def _all_gather(
        self,
        param: ZeroParameter,
        param_list: Sequence[ZeroParameter] | None = None,
        async_op: bool = False,
        hierarchy: int = 0,
    ) -> list[GatherHandle] | None:
        """Gather the unavailable parameters of the list in batches, as DeepSpeed's ``param.all_gather``.

        Callers read the values, so parameters are gathered in their own dtype. Parameters that are gathered in a
        module's compute dtype are gathered again.
        """
        unique = list(dict.fromkeys([param] if param_list is None else param_list))
        owned = [p for p in unique if getattr(p, OWNER, None) is self]
        if len(owned) < len(unique):  # the rest belongs to another family or engine, or to none
            foreign = [p for p in unique if getattr(p, OWNER, None) is not self]
            foreign[0].all_gather(param_list=foreign, async_op=async_op, hierarchy=hierarchy)
        if self.whole is not None and any(map(is_whole, owned)):
            self.whole.wait()
        rounded = [p for p in owned if p.ds_id in self._rounded_ids and _is_idle(p)]
        if rounded:
            rounded[0].partition(rounded)
        missing = sorted(
            (p for p in owned if p.ds_status == ZeroParamStatus.NOT_AVAILABLE), key=lambda param: param.ds_id
        )
        handles = self._gathers_of(missing, separately=async_op or self._sequential)
        if async_op:
            return list(handles)
        for handle in handles:
            handle.wait()
        return None

    @outside_autograd
    def _partition(
        self,
        param: ZeroParameter,
        partition: Callable[..., None],
        param_list: Sequence[ZeroParameter] | None = None,
        hierarchy: int = 0,
        has_been_updated: bool = False,
        free_data: bool = True,
    ) -> None:
        """Release parameters, except whole ones; write updated values back, also into the rows of other groups."""
        params = list[ZeroParameter]()
        for member in [param] if param_list is None else param_list:
            if is_whole(member) and not has_been_updated:
                continue
            unit = getattr(member, UNIT, None)
            if unit is not None and unit.ds_active_sub_modules:
                if has_been_updated:
                    raise RuntimeError(
                        f"cannot write a parameter while its leaf module runs: {member.ds_summary()}. "
                        f"Write it outside, or set {SECTION}.{LEAF_BYTES} to 0."
                    )
                continue  # one of its modules, or GatheredParameters, has ended; its unit still uses it
            params.append(member)
            if unit is not None and member.ds_status == ZeroParamStatus.AVAILABLE == unit.ds_status:
                unit.ds_status = ZeroParamStatus.NOT_AVAILABLE
        if not params:
            return
        self.live.add(-sum(p.ds_numel for p in params if p.ds_status == ZeroParamStatus.AVAILABLE))
        if has_been_updated and self.slices.has_slices:
            for updated in params:
                if updated.ds_status == ZeroParamStatus.AVAILABLE:
                    self.slices.write_rows(updated)
        partition(param_list=params, hierarchy=hierarchy, has_been_updated=has_been_updated, free_data=free_data)
        if has_been_updated:
            self.slices.order_gathers()  # or the next gather would read rows that are not written yet
            if self._resync is not None:
                self._resync.request()
            if self.whole is not None and (whole := list(filter(is_whole, params))):
                self.whole.gather(whole)
                self.whole.wait()


def wire_dtype(param: ZeroParameter) -> torch.dtype:
    """Return the dtype in which a parameter is gathered for a module: its compute dtype with ``torch_autocast``,
    unless it persists and is read after the module."""
    dtype: torch.dtype = param.ds_tensor.dtype if param.ds_persist else get_allgather_dtype(param, param.ds_tensor)
    return dtype


def _is_idle(param: ZeroParameter) -> bool:
    """Whether a parameter is available, and no running module uses it."""
    users = param.ds_active_sub_modules or getattr(getattr(param, UNIT, None), "ds_active_sub_modules", None)
    return param.ds_status == ZeroParamStatus.AVAILABLE and not users


def _owner(param: ZeroParameter | Unit) -> Gathers:
    owner: Gathers = getattr(param.params[0] if isinstance(param, Unit) else param, OWNER)
    return owner
