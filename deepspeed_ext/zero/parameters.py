# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Parameters with p = I or G: how they are held, and how they are gathered for use.

Note [Rows]
    ZeRO-3 cuts each parameter into chunks, over the process group in which its optimizer states are cut: with os = G
    a rank holds chunk r of n, with os = I chunk i of m, as ``ds_tensor``. Where parameters are cut likewise (p = os)
    that is all. With p = I and os = G a rank holds its I-slice, k chunks of n: one *row* for each group, of which its
    own, row j, is ``ds_tensor``: a view, not a copy. An optimizer step changes row j; then one all-gather between
    groups completes the slice (``gather_updates``), and forward and backward gather inside the group only.

    The slices of the trainable parameters of a sub-group make one block, (k, elements of the sub-group): row j of it
    is the sub-group's flat partition, the all-gather runs in place, without a buffer. It is started after the step
    and waited for when a parameter of the block is first used.

What DeepSpeed knows of a parameter is replaced in one place: its methods ``all_gather``, ``all_gather_coalesced`` and
``partition``. They are put back by ``release``.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.torch_autocast import sort_dtypes
from deepspeed.runtime.zero.partition_parameters import MultipleAllGatherHandles, ZeroParamStatus, get_allgather_dtype
from deepspeed.utils import get_z3_leaf_modules
from torch import Tensor

from deepspeed_ext.comm.layout import FlatLayout
from deepspeed_ext.comm.packing import fill_up, joined_and_aligned
from deepspeed_ext.comm.parameter_bucket import ParameterBucket
from deepspeed_ext.comm.process_groups import Topology, data_parallel_ranks
from deepspeed_ext.comm.reshard import ParameterReshard
from deepspeed_ext.comm.schedule import Schedule, Started
from deepspeed_ext.leaf.chunks import blocks_of
from deepspeed_ext.leaf.units import UNIT, Unit, UnitGather, forget_units, make_units
from deepspeed_ext.strategy import Placement, Strategy
from deepspeed_ext.zero.gathers import Gather, Held
from deepspeed_ext.zero.modifier_rank import OWNER, REPLICAS

_METHODS = ("all_gather", "all_gather_coalesced", "partition")


class PartitionedParameters:
    """The parameters of a model, cut as a strategy says. See Note [Rows].

    Args:
        params: ZeRO parameters, cut over any process group; trainable and frozen.
        strategy: one with p = I or G.
        topology: process groups of the data-parallel group.
        reshard: its hops.
        bucket: elements (of whole parameters) gathered at a time where many are wanted at once.
        sequential: gather each parameter by itself (DeepSpeed's ``allgather_sequential``).
        leaves: leaf modules, whose parameters are taken as units; see ``units.py``.
        written: called when the current stream has been given to write what is held.
    """

    def __init__(
        self,
        params: Iterable[Any],
        strategy: Strategy,
        topology: Topology,
        reshard: ParameterReshard,
        bucket: int,
        sequential: bool = False,
        leaves: Iterable[Any] = (),
        written: Callable[[], None] = lambda: None,
    ) -> None:
        self.strategy = strategy
        self.topology = topology
        self._reshard = reshard
        self._bucket = max(1, bucket)
        self._sequential = sequential
        self._written = written
        self._params = list(params)
        self._layouts = {p.ds_id: FlatLayout.of(p.ds_numel, strategy.os, topology) for p in self._params}
        self._rows: dict[int, list[Tensor]] = {}  # ds_id: the rows of the I-slice
        self._blocks: list[Tensor] = []  # (k, elements and padding) of each sub-group
        self._block_of: dict[int, int] = {}  # ds_id: number of the block
        self._updates = Schedule(overlap=True)  # gathers between groups, after a step
        self._update_of: dict[int, Started] = {}  # number of the block: the gather into it
        self._buckets: dict[tuple[int, ...], ParameterBucket] = {}  # ds_ids of a unit's parameters: where they are
        self._gathers = Schedule(overlap=True)  # gathers for use
        self.live = self.most_live = 0  # elements of gathered parameters: now, and the most that ever were
        for param in self._params:
            if hasattr(param, OWNER):
                getattr(param, OWNER).release()
        self._cut()
        if self.sliced:
            for some in self._batches(self._params):
                self._make_slices(some)
        self._attach()
        self._leaves = list(leaves)
        self._units = [] if sequential else make_units(self._leaves, self._kind, self._make_unit)

    @property
    def sliced(self) -> bool:
        """Whether parameters are held as slices of several rows."""
        return self.strategy.p == Placement.I and self.strategy.os == Placement.G and self.topology.sizes.groups > 1

    def layout(self, param: Any) -> FlatLayout:
        """How the parameter is cut into cells."""
        return self._layouts[param.ds_id]

    # Making ###########################################################################################

    def _cut(self) -> None:
        """Cut every parameter over the group of its optimizer states, with zeros in the padding."""
        group = self.topology.shard_group(self.strategy.os)
        rank, ranks = dist.get_rank(group=group), data_parallel_ranks(group)
        elsewhere = {
            id(other): data_parallel_ranks(other) != ranks for other in {p.ds_process_group for p in self._params}
        }
        for param in self._params:
            if elsewhere[id(param.ds_process_group)]:
                recut(param, group)
            chunk = param.ds_tensor.ds_numel
            param.ds_tensor[max(0, param.ds_numel - rank * chunk) :].zero_()

    def _make_slices(self, params: Sequence[Any]) -> None:
        for param, mine in self._gather_slices(params):
            slice_ = mine.contiguous()
            param.ds_tensor.data = slice_[self._reshard.row]
            self._rows[param.ds_id] = list(slice_)
            self._rows[param.ds_id][self._reshard.row] = param.ds_tensor

    def _batches(self, params: Iterable[Any]) -> list[list[Any]]:
        """The parameters in batches of one dtype and about ``bucket`` elements (of whole parameters)."""
        batches: list[list[Any]] = []
        filled: dict[torch.dtype, tuple[list[Any], int]] = {}
        for param in params:
            dtype = param.ds_tensor.dtype
            batch, numel = filled.get(dtype, ([], math.inf))
            if numel + param.ds_numel > self._bucket:
                batch, numel = [], 0
                batches.append(batch)
            batch.append(param)
            filled[dtype] = batch, numel + param.ds_numel
        return batches

    def _attach(self) -> None:
        for param in self._params:
            setattr(param, OWNER, self)
            if self.strategy.os == Placement.I:
                setattr(param, REPLICAS, self.topology.world)
            elif hasattr(param, REPLICAS):
                delattr(param, REPLICAS)
            partition = param.partition
            originals = {name: getattr(param, name) for name in _METHODS}
            param.paro_originals = originals
            param.all_gather = functools.partial(self._all_gather, param)
            param.all_gather_coalesced = self.all_gather_coalesced
            param.partition = functools.partial(self._partition, param, partition)

    def _kind(self, param: Any) -> Any:
        """Parameters of one kind may be in one unit."""
        if getattr(param, OWNER, None) is not self:
            return None
        return param.dtype, get_allgather_dtype(param, param.ds_tensor), param.ds_persist

    def _make_unit(self, params: Sequence[Any]) -> Unit:
        return Unit(params, self.all_gather_coalesced, self._gone)

    def _live(self, numel: int) -> None:
        self.live += numel
        self.most_live = max(self.most_live, self.live)

    def _gone(self, numel: int) -> None:
        self.live -= numel

    def release(self) -> None:
        """Give the parameters back to DeepSpeed, with its methods; each stays cut over the group that it is cut over.

        No communication: this runs where an engine is deleted. So with os = I parameters stay cut inside groups, and
        ``REPLICAS`` tells those who need them otherwise (``recut_for_stock``).
        """
        self.drain()
        forget_units(self._leaves, self._units)
        self._units.clear()
        for param in self._params:
            if getattr(param, OWNER, None) is self:
                for name, original in param.paro_originals.items():
                    setattr(param, name, original)
                delattr(param, OWNER)
                del param.paro_originals
                if self.sliced:
                    param.ds_tensor.data = param.ds_tensor.data.clone()  # no longer a row that keeps its slice
        self._rows.clear()
        self.forget_blocks()

    # Blocks of slices: the optimizer's side ###########################################################

    def partitions(self, sub_groups: Sequence[Sequence[Any]]) -> list[Tensor]:
        """All that is held of the parameters, block after block, row after row, which are filled up."""
        partitions: list[Tensor] = []
        for sub_group in sub_groups:
            width, filled = self._block_width(sub_group)
            for row in range(len(self._held(sub_group[0]))):
                partitions += [self._held(param)[row] for param in sub_group]
                if filled > width:
                    partitions.append(partitions[-1].new_zeros(filled - width))
        return partitions

    def _block_width(self, sub_group: Sequence[Any]) -> tuple[int, int]:
        """Elements of a row of its block, and with padding: rows that are gathered in place begin where hops like."""
        width = sum(param.ds_tensor.ds_numel for param in sub_group)
        return width, fill_up(width, self._reshard.multiple if self.sliced else 1)

    def make_blocks(self, buffer: Tensor, sub_groups: Sequence[Sequence[Any]]) -> list[Tensor]:
        """Take the flat buffer of ``partitions(sub_groups)`` as blocks.

        Returns:
            For each sub-group the flat partition, 1D, which an optimizer step changes: row j of its block.
        """
        own = self._reshard.row if self.sliced else 0
        self._blocks, offset, flats = [], 0, []
        for number, sub_group in enumerate(sub_groups):
            rows, (width, filled) = len(self._held(sub_group[0])), self._block_width(sub_group)
            self._blocks.append(buffer.narrow(0, offset, rows * filled).view(rows, filled))
            flats.append(self._blocks[-1][own, :width])
            offset += rows * filled
            self._block_of.update((param.ds_id, number) for param in sub_group)
        return flats

    def forget_blocks(self) -> None:
        """Let go of the buffer of ``make_blocks``."""
        self._blocks, self._block_of = [], {}

    @torch.no_grad()
    def complete(self) -> None:
        """Complete all slices after something outside of a step has changed this rank's rows, a checkpoint for one.

        Those of frozen parameters, too, which no step changes.
        """
        self.gather_updates()
        if self.sliced:
            for some in self._batches(param for param in self._params if param.ds_id not in self._block_of):
                for param, mine in self._gather_slices(some):
                    for row, gathered in zip(self._held(param), mine, strict=True):
                        row.copy_(gathered)
            self._written()

    def _gather_slices(self, params: Sequence[Any]) -> list[tuple[Any, Tensor]]:
        """G -> I of their ``ds_tensor``: each parameter and its slice, (k, chunk)."""
        chunks = joined_and_aligned([param.ds_tensor for param in params], self._reshard.multiple)
        chunks = chunks.to(get_accelerator().current_device_name())
        gathered = Started(self._reshard.gather_rows(chunks)).finish()
        rows = gathered.view(self.topology.sizes.groups, chunks.numel())
        numels = [param.ds_tensor.ds_numel for param in params]
        return list(zip(params, rows[:, : sum(numels)].split(numels, dim=1), strict=True))

    @torch.no_grad()
    def gather_updates(self) -> None:
        """os -> p, after a step: start to complete the slices from the groups' rows. Where p = os there are none.

        All gathers are started here, on all ranks in one order, whatever a rank will use: so no rank waits for what
        another does with its data.
        """
        self._written()
        if not self.sliced:
            return
        self.drain()
        for number, block in enumerate(self._blocks):
            self._update_of[number] = self._updates.start(self._reshard.complete_rows(block.detach()))

    def drain(self) -> None:
        """Wait for all gathers; before row j changes again."""
        for update in self._update_of.values():
            self._updates.finish(update)
        self._update_of.clear()

    # Gathering ########################################################################################

    def _held(self, param: Any) -> list[Tensor]:
        """What this rank holds of the parameter: one tensor or the rows of its slice; 1D each."""
        return self._rows[param.ds_id] if self.sliced else [param.ds_tensor]

    def _wait_for_updates(self, params: Iterable[Any]) -> None:
        for number in sorted({self._block_of[p.ds_id] for p in params if p.ds_id in self._block_of}):
            if number in self._update_of:
                self._updates.finish(self._update_of[number])  # for each stream that reads the block
                if get_accelerator().is_synchronized_device():
                    del self._update_of[number]

    def _bucket_of(self, params: Sequence[Any], alone: bool) -> ParameterBucket:
        """Where parameters are in a bucket; remembered for units, which are many parameters time and again."""
        if alone:
            return ParameterBucket([self.layout(param) for param in params], alone)
        key = tuple(param.ds_id for param in params)
        if key not in self._buckets:
            self._buckets[key] = ParameterBucket([self.layout(param) for param in params])
        return self._buckets[key]

    def _start(self, params: Sequence[Any], dtype: torch.dtype, alone: bool = True) -> Gather:
        """p -> N of parameters with one dtype on the wire; ``alone`` if they may be released one by one."""
        self._wait_for_updates(params)
        device = get_accelerator().current_device_name()
        held = [self._held(param) for param in params]
        pieces = [rows[i].to(device=device, dtype=dtype) for i in range(len(held[0])) for rows in held]
        shard = joined_and_aligned(pieces, self._reshard.multiple)
        path = (self.strategy.p, Placement.N)
        started = self._gathers.start(self._reshard.gather(shard, *path), self._reshard.hops(*path))
        self._live(sum(param.ds_numel for param in params))
        return Gather(params, self._gathers, started, self._bucket_of(params, alone), len(held[0]), alone)

    @torch.no_grad()
    def all_gather_coalesced(
        self, params: Iterable[Any], safe_mode: bool = False, quantize: bool = False
    ) -> MultipleAllGatherHandles:
        """Start to gather parameters, none of them available yet.

        Args:
            params: in any order, the same on all ranks that gather together.
            safe_mode, quantize: DeepSpeed's, which nothing sets with a strategy of ours.

        Raises:
            RuntimeError: one is available or in flight.
        """
        ordered = sorted(params, key=lambda param: param.ds_id)
        for param in ordered:
            if param.ds_status != ZeroParamStatus.NOT_AVAILABLE:
                raise RuntimeError(f"expected a parameter that is not available: {param.ds_summary()}")
        units = [param for param in ordered if isinstance(param, Unit)]
        handles: list[Any] = [self._start_unit(unit) for unit in units]
        by_dtype: dict[torch.dtype, list[Any]] = {}
        for param in ordered if not units else [param for param in ordered if not isinstance(param, Unit)]:
            by_dtype.setdefault(get_allgather_dtype(param, param.ds_tensor), []).append(param)
        for dtype in sort_dtypes(by_dtype):
            together = [[param] for param in by_dtype[dtype]] if self._sequential else [by_dtype[dtype]]
            handles += [self._start(some, dtype) for some in together]
        return MultipleAllGatherHandles(handles)

    def _start_unit(self, unit: Unit) -> UnitGather:
        missing = unit.missing()
        if not missing:
            return UnitGather(unit, None)
        whole = self.topology.sizes.ranks == 1 and missing[0].ds_tensor.device == missing[0].device
        if whole:
            self._live(sum(param.ds_numel for param in missing))
        dtype = get_allgather_dtype(missing[0], missing[0].ds_tensor)
        return UnitGather(unit, Held(missing) if whole else self._start(missing, dtype, alone=False))

    def _all_gather(
        self, param: Any, param_list: Sequence[Any] | None = None, async_op: bool = False, hierarchy: int = 0
    ) -> list[Any] | None:
        """DeepSpeed's ``param.all_gather``: those of the list that are not available, in batches."""
        listed = list(dict.fromkeys([param] if param_list is None else param_list))
        mine = [p for p in listed if getattr(p, OWNER, None) is self]
        if len(mine) < len(listed):  # of another engine, or of none
            others = [p for p in listed if getattr(p, OWNER, None) is not self]
            others[0].all_gather(param_list=others, async_op=async_op, hierarchy=hierarchy)
        wanted = [p for p in mine if p.ds_status == ZeroParamStatus.NOT_AVAILABLE]
        if async_op:
            return [self.all_gather_coalesced([p]) for p in wanted]
        for some in self._batches(wanted):
            self.all_gather_coalesced(some).wait()
        return None

    def _partition(
        self,
        param: Any,
        partition: Any,
        param_list: Sequence[Any] | None = None,
        hierarchy: int = 0,
        has_been_updated: bool = False,
        free_data: bool = True,
    ) -> None:
        """DeepSpeed's ``param.partition``, which writes back what was changed: also into the rows of other groups."""
        params = [param] if param_list is None else param_list
        for one in params:
            unit = getattr(one, UNIT, None)
            if unit is not None and unit.ds_active_sub_modules:
                if param_list is None:
                    return  # a module that uses this one alone has ended; its unit still uses it
                raise RuntimeError(f"a parameter is to be released while its leaf module runs: {one.ds_summary()}")
            if unit is not None and one.ds_status == ZeroParamStatus.AVAILABLE == unit.ds_status:
                unit.ds_status = ZeroParamStatus.NOT_AVAILABLE
        self._gone(sum(one.ds_numel for one in params if one.ds_status == ZeroParamStatus.AVAILABLE))
        if has_been_updated and self.sliced:
            for updated in params:
                if updated.ds_status == ZeroParamStatus.AVAILABLE:
                    self._write_rows(updated)
        partition(param_list=params, hierarchy=hierarchy, has_been_updated=has_been_updated, free_data=free_data)
        if has_been_updated:
            self._written()

    @torch.no_grad()
    def _write_rows(self, param: Any) -> None:
        layout, whole = self.layout(param), param.data.reshape(-1)
        for number, row in enumerate(self._held(param)):
            first = (number * layout.cols + self._reshard.col) * layout.chunk
            piece = whole[first : first + layout.chunk]
            row[: piece.numel()].copy_(piece)


def partition(
    module: Any,
    offload: Any,
    strategy: Strategy,
    topology: Topology,
    reshard: ParameterReshard,
    gathers: Mapping[str, Any],
) -> PartitionedParameters:
    """Hold the parameters of a model, which DeepSpeed has cut, as a strategy says.

    Args:
        offload: DeepSpeed's, with a coordinator of ours.
        gathers: ``bucket`` and ``sequential`` of ``PartitionedParameters``.
    """
    blocks, coordinator = blocks_of(module), offload.param_coordinator
    coordinator.watch(blocks)
    chunks = [chunk for block in blocks for chunk in block.chunks]
    experts = {id(expert) for chunk in chunks for expert in chunk.experts}
    leaves = [leaf for leaf in get_z3_leaf_modules(module) if id(leaf) not in experts]
    return PartitionedParameters(
        module.parameters(),
        strategy,
        topology,
        reshard,
        leaves=[*leaves, *chunks],
        written=coordinator.follow,
        **gathers,
    )


def recut(param: Any, group: Any) -> None:
    """Cut a ZeRO parameter, which has DeepSpeed's own methods, over another process group. Collective over both."""
    param.all_gather()
    param.ds_process_group = group
    param.ds_zero_partition_rank = dist.get_rank(group=group)
    param.ds_zero_partition_world_size = dist.get_world_size(group=group)
    param.ds_tensor = None
    param.partition()


def recut_for_stock(module: Any) -> None:
    """Cut what an engine of ours has cut inside groups over all data-parallel ranks, for DeepSpeed's own ZeRO-3.

    It reduces each parameter over the group that the parameter is cut over: that must be the one it was cut over
    before ours, and not the group that its engine names, which with a mesh is a part of it.
    """
    for param in module.parameters():
        if hasattr(param, REPLICAS):
            recut(param, getattr(param, REPLICAS))
            delattr(param, REPLICAS)
