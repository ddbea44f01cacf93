# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Parameters with p = I or G, gathered for use.

What DeepSpeed knows of a parameter is replaced in one place: its methods ``all_gather``, ``all_gather_coalesced`` and
``partition``. They are put back by ``release``.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.torch_autocast import sort_dtypes
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import MultipleAllGatherHandles, ZeroParamStatus, get_allgather_dtype
from deepspeed.utils import get_z3_leaf_modules, log_dist
from torch import Tensor, nn

from deepspeed_ext.comm.hops import Transfer
from deepspeed_ext.comm.layout import FlatLayout
from deepspeed_ext.comm.packing import fill_up, joined_and_aligned
from deepspeed_ext.comm.parameter_bucket import ParameterBucket
from deepspeed_ext.comm.transfer_queue import TransferQueue
from deepspeed_ext.config.keys import CACHE_BYTES, SECTION
from deepspeed_ext.deepspeed_types import ZeroConfig, ZeroParameter
from deepspeed_ext.leaf.chunks import chunked_modules
from deepspeed_ext.leaf.units import UNIT, Unit, UnitGather, fetch_nothing, forget_units, make_units
from deepspeed_ext.leaf.windows import WindowedModule, windowed_modules
from deepspeed_ext.strategy import Placement, Strategy
from deepspeed_ext.zero.families import DENSE, Families, family_of
from deepspeed_ext.zero.sharded.expert_windows import WindowGathers
from deepspeed_ext.zero.sharded.handles import GatherHandle, ResidentHandle
from deepspeed_ext.zero.sharded.modifier_rank import OWNER, REPLICAS
from deepspeed_ext.zero.sharded.rows import HostMemory, RowCache, choose_cached
from deepspeed_ext.zero.sharded.slices import Slices

_METHODS = ("all_gather", "all_gather_coalesced", "partition")


class GatherSettings(NamedTuple):
    """How the parameters of a model are gathered, and where they are.

    Attributes:
        bucket: elements (of whole parameters) gathered at a time where many are wanted at once.
        sequential: whether each parameter is gathered by itself (DeepSpeed's ``allgather_sequential``).
        host: which slices are in host memory.
    """

    bucket: int
    sequential: bool
    host: HostMemory

    @classmethod
    def of(cls, config: ZeroConfig) -> "GatherSettings":
        """Return what a configuration says."""
        host = HostMemory.of(config.offload_param, config.paro_parameter_cache_bytes)
        return cls(config.allgather_bucket_size, config.allgather_sequential, host)


class Gathers:
    """The parameters of a model, gathered for use.

    Args:
        slices: what is held of them.
        sequential: gather each parameter by itself (DeepSpeed's ``allgather_sequential``).
        leaves: leaf modules, whose parameters are taken as units; see ``units.py``.

    Attributes:
        slices: the same.
        live, most_live: elements of gathered parameters: now, and the most that ever were.
    """

    def __init__(self, slices: Slices, sequential: bool = False, leaves: Iterable[nn.Module] = ()) -> None:
        self.slices = slices
        self._redistribution, self._topology = slices.redistribution, slices.topology
        self._sequential = sequential
        self._changed_by_others: Callable[[], None] = lambda: None
        self._buckets: dict[tuple[int, ...], ParameterBucket] = {}  # ds_ids of a unit's parameters: where they are
        self._rounded: set[int] = set()  # ds_ids of parameters whose last gather was in a lower precision
        self._path = slices.strategy.p, Placement.N
        # Slices may have to wait for their update first, for which a prefetch must not hold up the module that runs.
        several = self._redistribution.hops(*self._path) > 1
        self._side_streams = (several or slices.sliced) and slices.rows.keeps_order
        threads = (slices.sliced and self._redistribution.pairwise, several and self._redistribution.pairwise)
        self._queue = TransferQueue(True, self._side_streams, *threads)
        self.live = self.most_live = 0
        for param in slices.params:
            if hasattr(param, OWNER):
                getattr(param, OWNER).release()
        slices.make()
        self._attach()
        self._leaves = list(leaves)
        self._units = [] if sequential else make_units(self._leaves, self._kind, self._make_unit)

    # Making ###########################################################################################

    def _attach(self) -> None:
        for param in self.slices.params:
            setattr(param, OWNER, self)
            if self.slices.strategy.os == Placement.I:
                setattr(param, REPLICAS, self._topology.whole.world)
            elif hasattr(param, REPLICAS):
                delattr(param, REPLICAS)
            partition = param.partition
            originals = {name: getattr(param, name) for name in _METHODS}
            param.paro_originals = originals
            param.all_gather = functools.partial(self._all_gather, param)
            param.all_gather_coalesced = self.all_gather_coalesced
            param.partition = functools.partial(self._partition, param, partition)

    def fetch_windows(self, windowed: Sequence[WindowedModule]) -> None:
        """Fetch the packed experts of these modules in windows."""
        windows = WindowGathers(self.slices, self._queue, self._live, self._gone)
        for one in windowed:
            windows.watch(one)

    def _kind(self, param: ZeroParameter) -> Any:
        """Return the kind of a parameter: those of one kind may be in one unit."""
        if getattr(param, OWNER, None) is not self:
            return None
        return param.dtype, wire_dtype(param), param.ds_persist

    def _make_unit(self, params: Sequence[ZeroParameter]) -> Unit:
        return Unit(params, self.all_gather_coalesced, self._gone)

    def on_change(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` from now on when something other than a step has written parameters."""
        self._changed_by_others = changed

    def _live(self, numel: int) -> None:
        self.live += numel
        self.most_live = max(self.most_live, self.live)

    def _gone(self, numel: int) -> None:
        self.live -= numel

    def release(self) -> None:
        """Give the parameters back to DeepSpeed, with its methods; each stays sharded as it is.

        No communication: this runs where an engine is deleted. So with os = I parameters stay sharded inside groups,
        and ``REPLICAS`` tells those who need them otherwise (``repartition_for_stock``).
        """
        self.slices.drain()
        forget_units(self._leaves, self._units)
        self._units.clear()
        for param in self.slices.params:
            if getattr(param, OWNER, None) is self:
                for name, original in param.paro_originals.items():
                    setattr(param, name, original)
                delattr(param, OWNER)
                del param.paro_originals
                self.slices.release(param)
        self.slices.forget()

    # Gathering ########################################################################################

    def _bucket_of(self, params: Sequence[ZeroParameter], alone: bool) -> ParameterBucket:
        """Return where parameters are in a bucket; remembered for units, which are many parameters time and again."""
        if alone:
            return ParameterBucket([self.slices.layout(param) for param in params], alone)
        key = tuple(param.ds_id for param in params)
        if key not in self._buckets:
            self._buckets[key] = ParameterBucket([self.slices.layout(param) for param in params])
        return self._buckets[key]

    def _start(self, params: Sequence[ZeroParameter], dtype: torch.dtype, alone: bool = True) -> GatherHandle:
        """p -> N of parameters with one dtype on the wire; ``alone`` if they may be released one by one."""
        held = [self.slices.held(param) for param in params]
        whole = None
        if self._side_streams and self._topology.sizes.group_size > 1:
            # What outlives the transfer is memory of this stream, which gives it out again sooner than a side stream.
            width = fill_up(sum(rows.numel() for rows in held), self._redistribution.multiple)
            device = get_accelerator().current_device_name()
            senders = self._topology.sizes.ranks // self.slices.row_count
            whole = torch.empty(senders * width, dtype=dtype, device=device)
        started = self._queue.start(self._send(params, dtype, whole))
        self._live(sum(param.ds_numel for param in params))
        if dtype != params[0].ds_tensor.dtype:
            self._rounded.update(param.ds_id for param in params)
        elif self._rounded:
            self._rounded.difference_update(param.ds_id for param in params)
        return GatherHandle(params, self._queue, started, self._bucket_of(params, alone), self.slices.row_count, alone)

    def _send(self, params: Sequence[ZeroParameter], dtype: torch.dtype, whole: Tensor | None) -> Transfer:
        self.slices.wait_for_updates(params)
        shard = [joined_and_aligned(self.slices.use(params, dtype), self._redistribution.multiple)]
        return (yield from self._redistribution.gather(shard.pop(), *self._path, whole))

    @torch.inference_mode(False)
    @torch.no_grad()
    def all_gather_coalesced(
        self, params: Iterable[ZeroParameter], safe_mode: bool = False, quantize: bool = False
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
        handles: list[Any] = []
        others = [param for param in ordered if _owner(param) is not self]
        if others:  # of another family
            ordered = [param for param in ordered if _owner(param) is self]
            handles.append(_owner(others[0]).all_gather_coalesced(others, safe_mode, quantize))
        units = [param for param in ordered if isinstance(param, Unit)]
        handles += [self._start_unit(unit) for unit in units]
        by_dtype: dict[torch.dtype, list[ZeroParameter]] = {}
        for param in ordered if not units else [param for param in ordered if not isinstance(param, Unit)]:
            by_dtype.setdefault(wire_dtype(param), []).append(param)
        for dtype in sort_dtypes(by_dtype):
            together = [[param] for param in by_dtype[dtype]] if self._sequential else [by_dtype[dtype]]
            handles += [self._start(some, dtype) for some in together]
        return MultipleAllGatherHandles(handles)

    def _start_unit(self, unit: Unit) -> UnitGather:
        missing = unit.missing()
        if not missing:
            return UnitGather(unit, None)
        whole = self._topology.sizes.ranks == 1 and missing[0].ds_tensor.device == missing[0].device
        if whole:
            self._live(sum(param.ds_numel for param in missing))
            return UnitGather(unit, ResidentHandle(missing))
        return UnitGather(unit, self._start(missing, wire_dtype(missing[0]), alone=False))

    @torch.inference_mode(False)
    @torch.no_grad()
    def _all_gather(
        self,
        param: ZeroParameter,
        param_list: Sequence[ZeroParameter] | None = None,
        async_op: bool = False,
        hierarchy: int = 0,
    ) -> list[GatherHandle] | None:
        """Gather, as DeepSpeed's ``param.all_gather``: those of the list that are not available, in batches.

        Whoever calls this reads parameters, so they are gathered in the dtype in which they are held. Those that a
        module has left behind in its compute dtype are gathered again.
        """
        listed = list(dict.fromkeys([param] if param_list is None else param_list))
        mine = [p for p in listed if getattr(p, OWNER, None) is self]
        if len(mine) < len(listed):  # of another engine, or of none
            others = [p for p in listed if getattr(p, OWNER, None) is not self]
            others[0].all_gather(param_list=others, async_op=async_op, hierarchy=hierarchy)
        rounded = [p for p in mine if p.ds_id in self._rounded and _is_idle(p)]
        if rounded:
            rounded[0].partition(rounded)
        wanted = sorted(
            (p for p in mine if p.ds_status == ZeroParamStatus.NOT_AVAILABLE), key=lambda param: param.ds_id
        )
        alone = async_op or self._sequential
        handles = (
            self._start(some, some[0].ds_tensor.dtype)
            for some in ([[p] for p in wanted] if alone else self.slices.batches(wanted))
        )
        if async_op:
            return list(handles)
        for handle in handles:
            handle.wait()
        return None

    @torch.inference_mode(False)
    @torch.no_grad()
    def _partition(
        self,
        param: ZeroParameter,
        partition: Callable[..., None],
        param_list: Sequence[ZeroParameter] | None = None,
        hierarchy: int = 0,
        has_been_updated: bool = False,
        free_data: bool = True,
    ) -> None:
        """Release parameters, and write back what was changed: also into the rows of other groups."""
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
        if has_been_updated and self.slices.sliced:
            for updated in params:
                if updated.ds_status == ZeroParamStatus.AVAILABLE:
                    self.slices.write_rows(updated)
        partition(param_list=params, hierarchy=hierarchy, has_been_updated=has_been_updated, free_data=free_data)
        if has_been_updated:
            self.slices.written()
            self._changed_by_others()


def wire_dtype(param: ZeroParameter) -> torch.dtype:
    """Return the dtype in which a parameter is gathered for a module: with ``torch_autocast`` that of its compute,
    unless it persists and is read after the module."""
    dtype: torch.dtype = param.ds_tensor.dtype if param.ds_persist else get_allgather_dtype(param, param.ds_tensor)
    return dtype


def _is_idle(param: ZeroParameter) -> bool:
    """Whether a parameter is available, and no module that uses it runs."""
    users = param.ds_active_sub_modules or getattr(getattr(param, UNIT, None), "ds_active_sub_modules", None)
    return param.ds_status == ZeroParamStatus.AVAILABLE and not users


def _owner(param: ZeroParameter | Unit) -> Gathers:
    owner: Gathers = getattr(param.params[0] if isinstance(param, Unit) else param, OWNER)
    return owner


def partition(
    module: nn.Module,
    offload: DeepSpeedZeRoOffload,
    strategy: Strategy,
    families: Families,
    settings: GatherSettings,
) -> dict[str, Gathers]:
    """Hold the parameters of a model, which DeepSpeed has sharded, as a strategy says; those of each family.

    Args:
        offload: DeepSpeed's, with a coordinator of ours.
        settings: how they are gathered, and where they are.
    """
    blocks, coordinator = chunked_modules(module), offload.param_coordinator
    coordinator.watch(blocks)
    chunks = [chunk for block in blocks for chunk in block.chunks]
    experts = {id(expert) for chunk in chunks for expert in chunk.experts}
    windowed = windowed_modules(module)
    coordinator.watch_windows(windowed)
    _let_go(windowed, offload)
    experts.update(id(one.module) for one in windowed)
    leaves = [leaf for leaf in get_z3_leaf_modules(module) if id(leaf) not in experts]
    cache = RowCache(_cached(module, strategy, families, settings.host))
    members = {
        name: Gathers(
            Slices(
                [param for param in cast(Iterable[ZeroParameter], module.parameters()) if family_of(param) == name],
                strategy,
                family.topology,
                settings.host.rows(family.gather),
                settings.bucket,
                coordinator.wait_for_current,
                cache,
            ),
            settings.sequential,
            [*leaves, *chunks],
        )
        for name, family in families.items()
    }
    members[DENSE].fetch_windows(windowed)
    return members


def _cached(module: nn.Module, strategy: Strategy, families: Families, host: HostMemory) -> frozenset[int]:
    """Return the ds_ids of the parameters whose slices stay on the device, and say how many these are."""
    if not host.cache_bytes:
        return frozenset()
    topologies = {name: family.topology for name, family in families.items()}

    def nbytes_of(param: ZeroParameter) -> int:
        topology = topologies[family_of(param)]
        if param.ds_persist or topology.sizes.groups == 1:
            return 0
        chunk = FlatLayout.of(param.ds_numel, strategy.os, topology).chunk
        return chunk * topology.sizes.groups * param.ds_tensor.element_size()

    chosen = choose_cached(module, nbytes_of, host.cache_bytes)
    sizes = {param.ds_id: nbytes_of(param) for param in cast(Iterable[ZeroParameter], module.parameters())}
    kept, all_of_them = sum(sizes[ds_id] for ds_id in chosen), sum(sizes.values())
    log_dist(
        f"deepspeed_ext: {SECTION}.{CACHE_BYTES} {host.cache_bytes} keeps {kept:,} of {all_of_them:,} bytes of slices "
        f"on each device ({len(chosen)} of {len(sizes)} parameters), the ends of the model first",
        ranks=[0],
        level=logging.WARNING,
    )
    return chosen


def _let_go(windowed: Sequence[WindowedModule], offload: DeepSpeedZeRoOffload) -> None:
    """Let packed parameters that are fetched in windows not persist: small ones are part of a window as well."""
    packed = {id(param) for one in windowed for param in one.params}
    offload.persistent_parameters = [p for p in offload.persistent_parameters if id(p) not in packed]
    for one in windowed:
        fetch_nothing(one.module)
        for param in one.params:
            param.ds_persist = False
