# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3's coordinator for one process group: its record of the order of modules, and persistent parameters.

DeepSpeed compares the record over all ranks of the job, by broadcasts that a rank enters while its own is incomplete.
With p = I groups gather separately and may see different data: a group with an invalid record must not wait for the
others. So it is compared among the ranks that gather together.

Parameters that persist stay gathered between uses. DeepSpeed keeps them only once the record is complete. In a model
whose path differs in every step the record is never complete, and small parameters would be gathered for each use.

Note [Frozen parameters under checkpoints]
    A non-reentrant checkpoint runs a block again while the backward of one of its modules waits, and saves the
    tensors of that forward through hooks, frozen parameters included. These must stay gathered, so DeepSpeed makes
    the module whose backward runs their owner. A reentrant checkpoint has no such hooks: autograd saves parameters
    there as in any forward, and the block's own backward follows, which fetches again. There, DeepSpeed would choose a
    module around the block as owner, in the end the model, whose backward ends last: all frozen parameters of the
    model would be gathered at once. So parameters get no owner here without hooks.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import deepspeed.runtime.zero.parameter_offload as parameter_offload
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import compiler
from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import z3_leaf_module
from torch import nn
from torch.distributed import ProcessGroup

from deepspeed_ext.comm.agreement import bounds
from deepspeed_ext.comm.process_groups import data_parallel_ranks
from deepspeed_ext.leaf.chunks import INCOMPLETE, Chunk, ChunkedModule
from deepspeed_ext.leaf.windows import WindowedModule
from deepspeed_ext.overrides import check_overrides, override, replace_attributes
from deepspeed_ext.zero.module_placements import Whole, is_whole
from deepspeed_ext.zero.sharded.fetch_order import FetchOrder

_comparing: ContextVar[ProcessGroup | None] = ContextVar(
    "process group whose ranks compare their records", default=None
)
_coordinating: ContextVar[bool] = ContextVar("whether a coordinator that is made is one of ours", default=False)


@check_overrides
class GroupCoordinator(PartitionedParameterCoordinator):
    """DeepSpeed's coordinator, with a separate process group.

    Args:
        group: the ranks that gather parameters together; None for all ranks of the job. Other arguments are the
            parent's.
    """

    # DeepSpeed's attributes that are read or written here.
    _PartitionedParameterCoordinator__active_backward_submodules: dict[int, nn.Module]  # in backward now, by ds_id
    _PartitionedParameterCoordinator__allgather_stream: Any  # stream on which parameters are gathered for use
    fast_sharding_for_leaf_module: bool  # with a granularity threshold: drop gathered leaf modules completely

    def __init__(self, *args: Any, group: ProcessGroup | None, **kwargs: Any) -> None:
        self._gathering_group = group
        self._blocks: dict[int, ChunkedModule] = {}  # by id of the module
        self._chunk_of: dict[int, tuple[ChunkedModule, int]] = {}  # of an expert, by its id
        self._windowed: list[WindowedModule] = []
        self._order: FetchOrder | None = None
        self._whole: Whole | None = None
        self._whole_modules: set[int] = set()  # by id; see Note [Whole modules]
        super().__init__(*args, **kwargs)

    def fetch_in_windows(self, blocks: Sequence[ChunkedModule], windowed: Sequence[WindowedModule]) -> None:
        """Fetch the experts of blocks in windows. Windowed modules fetch packed experts themselves.

        Args:
            blocks: blocks of listed experts; see ``leaf/chunks.py``.
            windowed: modules with packed experts; see ``leaf/windows.py``.
        """
        self._windowed = list(windowed)
        for block in blocks:
            block.fetcher = self
            self._blocks[id(block.module)] = block
            for number, chunk in enumerate(block.chunks):
                self._chunk_of.update((id(expert), (block, number)) for expert in chunk.experts)

    def compare_order(self, model: nn.Module) -> None:
        """Compare the order of modules with the other ranks that gather them, in the first steps. Collective."""
        if FetchOrder.is_possible(self._gathering_group):
            self._order = FetchOrder(self._gathering_group, model)

    def keep_whole(self, whole: Whole, modules: Iterable[nn.Module]) -> None:
        """Leave whole modules out of the record, and wait for whole parameters before they are used."""
        self._whole = whole
        self._whole_modules.update(map(id, modules))

    @override
    def trace_prologue(self, sub_module: nn.Module) -> None:
        """Check the module against the record, which has a window's ``Chunk`` instead of its experts."""
        if not self._gathers_nothing(sub_module):
            super().trace_prologue(sub_module)

    @override
    def record_module(self, sub_module: nn.Module) -> None:
        """Add the module to the record, except for experts in windows and whole modules."""
        if not self._gathers_nothing(sub_module):
            super().record_module(sub_module)

    @override
    def fetch_sub_module(self, current_submodule: nn.Module, forward: bool) -> None:
        """Fetch a module's parameters; for an expert, the windows up to its own."""
        expert = self._chunk_of.get(id(current_submodule))
        if expert is not None:
            block, number = expert
            block.enter(number, forward)
            return
        if self._whole is not None and self._whole.in_flight and self._uses_whole(current_submodule):
            self._whole.wait()
        if self._gathers_nothing(current_submodule):
            return
        if self._order is not None and self._order.is_compared and self._needs_others(current_submodule):
            self._order.compare(current_submodule)
        with self._without_owners_in_reentrant_checkpoint(forward):
            super().fetch_sub_module(current_submodule, forward)
        block_ = self._blocks.get(id(current_submodule))
        if block_ is not None:
            block_.begin(forward)

    @contextmanager
    def _without_owners_in_reentrant_checkpoint(self, forward: bool) -> Iterator[None]:
        """Release frozen parameters of modules that a reentrant checkpoint runs again; see the note above."""
        active = self._PartitionedParameterCoordinator__active_backward_submodules
        if not (forward and active) or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            yield
            return
        self._PartitionedParameterCoordinator__active_backward_submodules = {}
        try:
            yield
        finally:
            self._PartitionedParameterCoordinator__active_backward_submodules = active

    @override
    def release_sub_module(self, submodule: nn.Module, forward: bool = False) -> None:
        """Release a module's parameters, except persistent ones; a block gathers its remaining windows first."""
        if self._gathers_nothing(submodule):
            return
        block = self._blocks.get(id(submodule))
        if block is not None:
            block.end(forward)
        self._release(submodule, forward)

    def _gathers_nothing(self, module: nn.Module) -> bool:
        """Whether a module is an expert in a window, or all parameters that it uses are whole."""
        if id(module) in self._chunk_of:
            return True
        return id(module) in self._whole_modules and all(map(is_whole, _entries(module)))

    def _uses_whole(self, module: nn.Module) -> bool:
        """Whether a module uses whole parameters, its children's included: it may read them itself."""
        return any(is_whole(entry) for one in (module, *module.children()) for entry in _entries(one))

    def _needs_others(self, module: nn.Module) -> bool:
        """Whether other ranks wait if this one skips the module: in a gather, possibly prefetched, or a reduction."""
        entries = _entries(module)
        return any(not is_whole(entry) and (entry.requires_grad or not entry.ds_persist) for entry in entries)

    def fetch_chunk(self, chunk: Chunk, forward: bool) -> None:
        """Fetch a window of listed experts, and record it."""
        super().trace_prologue(chunk)
        if self.is_record_trace():
            super().record_module(chunk)
        with self._without_owners_in_reentrant_checkpoint(forward):
            super().fetch_sub_module(chunk, forward)

    def release_chunk(self, chunk: Chunk, forward: bool) -> None:
        """Release a window of listed experts."""
        self._release(chunk, forward)

    def _release(self, submodule: nn.Module, forward: bool) -> None:
        incomplete_record = not self.is_complete_trace()
        entries = list(_entries(submodule))
        if self.fast_sharding_for_leaf_module and z3_leaf_module(submodule):
            _record_use(entries)
        retained = [
            entry
            for entry in entries
            if ((incomplete_record and entry.ds_persist) or INCOMPLETE in entry.ds_active_sub_modules)
            and not entry.is_external_param
        ]
        for entry in retained:
            entry.is_external_param = True  # DeepSpeed does not release these with the module
        try:
            super().release_sub_module(submodule, forward)
        finally:
            for entry in retained:
                entry.is_external_param = False

    @override
    @compiler.lazy_disable
    def reset_step(self) -> None:
        """Begin a forward; compare the record of the previous forward within the group."""
        if self._order is not None:
            self._order.begin_forward()
        if torch._C._current_graph_task_id() == -1:
            for block in self._blocks.values():
                block.drop_passes()
            for windowed in self._windowed:
                windowed.drop_gradients()
        with _comparing_within(self._gathering_group):
            super().reset_step()
        self.wait_for_current()

    def wait_for_current(self) -> None:
        """Make the all-gather stream wait for everything that is queued on the current stream.

        Nothing else orders that stream: an optimizer step, a checkpoint or the user may just have written the shards
        that all-gathers read. It is idle at these moments, so it loses no time.
        """
        if not get_accelerator().is_synchronized_device():
            gathers = self._PartitionedParameterCoordinator__allgather_stream
            gathers.wait_stream(get_accelerator().current_stream())


def _entries(module: nn.Module) -> Iterable[Any]:
    entries: Iterable[Any] = coordinator.iter_params(module, recurse=z3_leaf_module(module))
    return entries


@contextmanager
def use_coordinator(group: ProcessGroup | None) -> Iterator[None]:
    """Make a DeepSpeedZeRoOffload that is created in this context use a coordinator of the group.

    Args:
        group: the ranks that gather parameters together.
    """

    def make(*args: Any, **kwargs: Any) -> GroupCoordinator:
        return GroupCoordinator(*args, group=group, **kwargs)

    token = _coordinating.set(True)
    try:
        with replace_attributes(parameter_offload, PartitionedParameterCoordinator=make):
            yield
    finally:
        _coordinating.reset(token)


def is_coordinating() -> bool:
    """Whether a DeepSpeedZeRoOffload is being created within ``use_coordinator``."""
    return _coordinating.get()


@contextmanager
def _comparing_within(group: ProcessGroup | None) -> Iterator[None]:
    token = _comparing.set(group)
    try:
        yield
    finally:
        _comparing.reset(token)


def assert_same_in_group(ints: Sequence[int]) -> bool:
    """Compare a record within the group that ``reset_step`` has set; return False if it has set none.

    One small all-reduce of the length and a checksum: all ranks of the group get the same result, so no rank waits for
    one that has raised.

    Raises:
        RuntimeError: the ranks of the group have different lists. Raised on all of them.
    """
    group = _comparing.get()
    if group is None:
        return False
    checksum = zlib.crc32(torch.tensor(list(ints), dtype=torch.int64).numpy().tobytes())
    (fewest, most), checksums = bounds([len(ints), checksum], group)
    if fewest < most or checksums[0] < checksums[1]:
        raise RuntimeError(
            f"The ranks {data_parallel_ranks(group)}, which gather parameters together, have used modules in "
            f"different orders (rank {dist.get_rank()}: {len(ints)} entries in the record, between "
            f"{fewest} and {most} in the group). Modules that only some ranks use, such as "
            f"experts, must be inside a leaf module: set zero_optimization.leaf_module, or call "
            f"deepspeed.utils.set_z3_leaf_modules."
        )
    return True


def _record_use(params: Sequence[Any]) -> None:
    """Keep the memory of gathered parameters until the current stream has read them.

    DeepSpeed records uses when it frees a parameter, but not when it releases a leaf module with a granularity
    threshold: the next gather could overwrite memory that a computation still reads.
    """
    if not get_accelerator().is_synchronized_device():
        for param in params:
            if hasattr(param, "data") and param.ds_status == ZeroParamStatus.AVAILABLE:  # a unit records its own use
                param.data.record_stream(get_accelerator().current_stream())


def drop_references(model: nn.Module) -> None:
    """Drop DeepSpeed's references to a model whose engine has been destroyed.

    The model is still at the bottom of the stack of modules whose forward runs, and a key of a cache that all
    coordinators share. Its parameters refer to the optimizer, so all states would stay in memory.
    """
    if model in parameter_offload.FWD_MODULE_STACK:
        parameter_offload.FWD_MODULE_STACK.remove(model)
    cached: Any = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    for cell in cached.__closure__ or ():  # an NVTX wrapper encloses the cached method
        getattr(cell.cell_contents, "cache_clear", lambda: None)()
