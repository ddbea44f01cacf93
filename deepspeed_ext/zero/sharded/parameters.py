# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Parameters of a model with p = I or G: shards and gathers of all families.

With ``offload_param`` some shards are cached on the device (``paro_parameter_cache_bytes``), from both ends of the
model to its middle: no compute overlaps a copy before the first module, nor between the forward and the backward of
the last module.

Note [Modules sharded inside groups]
    With p = G, ``paro_modules`` may place the parameters of modules in I. Only p differs for them, so they have slices
    (Note [Rows]), gathers, and sub-groups of their own, and share everything else with the dense family: buckets of
    gradients, error feedback, and the order of optimizer states. So neither sums nor checkpoints depend on the key.
    Ranks still gather all modules in one order: those of other placements are gathered in the same calls.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.utils import get_z3_leaf_modules
from torch import Tensor, nn

from deepspeed_ext.comm.layout import FlatLayout
from deepspeed_ext.comm.redistribution import ParameterRedistribution
from deepspeed_ext.config.keys import CACHE_BYTES, LEAF_BYTES, MODULES, SECTION
from deepspeed_ext.config.section import offloads
from deepspeed_ext.console import warn_on_rank_0
from deepspeed_ext.deepspeed_types import ZeroConfig, ZeroParameter
from deepspeed_ext.leaf.chunks import ChunkedModule, chunked_modules
from deepspeed_ext.leaf.units import cache_signatures, exclude_from_fetches
from deepspeed_ext.leaf.windows import WindowedModule, windowed_modules
from deepspeed_ext.strategy import Placement
from deepspeed_ext.zero.context import Context
from deepspeed_ext.zero.families import DENSE, GROUPED, family_of
from deepspeed_ext.zero.module_placements import is_whole, placement_of, whole_modules
from deepspeed_ext.zero.resync import Resync
from deepspeed_ext.zero.sharded.gathers import Gathers
from deepspeed_ext.zero.sharded.row_storage import DeviceRows, HostRows
from deepspeed_ext.zero.sharded.slices import Slices
from deepspeed_ext.zero.sharded.whole import WholeParameters


class GatherSettings(NamedTuple):
    """Keys for gathering parameters."""

    sequential: bool  # whether to gather each parameter on its own (DeepSpeed's ``allgather_sequential``)
    on_host: bool = False  # whether slices are in host memory
    pinned: bool = False  # whether that memory is pinned
    cache_bytes: int = 0  # bytes of slices that are on the device as well

    @classmethod
    def from_config(cls, config: ZeroConfig) -> "GatherSettings":
        """Return the settings of a configuration."""
        section: Any = config.offload_param
        if not offloads(section):
            return cls(config.allgather_sequential)
        return cls(config.allgather_sequential, True, section.pin_memory, config.paro_parameter_cache_bytes)

    def make_rows(self, redistribution: ParameterRedistribution, cached: frozenset[int]) -> DeviceRows:
        """Return the memory of slices; ``cached`` as in ``DeviceRows``."""
        return HostRows(redistribution, cached, self.pinned) if self.on_host else DeviceRows(redistribution)


class ShardedParameters:
    """Shards and gathers of all families of a model, once DeepSpeed has sharded it. Collective.

    Args:
        offload: DeepSpeed's, with a ``GroupCoordinator``.
        resync: the optimizer's; None without an optimizer.
    """

    def __init__(
        self,
        context: Context,
        *,
        module: nn.Module,
        offload: DeepSpeedZeRoOffload,
        settings: GatherSettings,
        resync: Resync | None = None,
    ) -> None:
        coordinator = offload.param_coordinator
        blocks, windowed = chunked_modules(module), windowed_modules(module)
        _refuse_placed_experts([*blocks, *windowed])
        coordinator.fetch_in_windows(blocks, windowed)
        cache_signatures(module)
        _disable_persistence(windowed, offload)
        chunks = [chunk for block in blocks for chunk in block.chunks]
        experts = {id(expert) for chunk in chunks for expert in chunk.experts}
        experts.update(id(packed.module) for packed in windowed)
        leaves = [*(leaf for leaf in get_z3_leaf_modules(module) if id(leaf) not in experts), *chunks]
        cached = _choose_cached(context, module, settings.cache_bytes)
        params = cast(list[ZeroParameter], list(module.parameters()))
        self.slices: dict[str, Slices] = {}  # of each family, and of ``grouped`` parameters
        self.gathers: dict[str, Gathers] = {}  # the same
        families = [(context, family) for family in context.families.values()]
        if context.grouped is not None:
            inside_groups = replace(context, strategy=replace(context.strategy, p=Placement.I))
            families.append((inside_groups, context.grouped))
        for placed, family in families:
            slices = self.slices[family.name] = Slices(
                placed,
                family=family,
                params=[param for param in params if slices_name(param) == family.name],
                rows=settings.make_rows(family.gather, cached),
                coordinator=coordinator,
            )
            self.gathers[family.name] = Gathers(slices, sequential=settings.sequential, resync=resync)
        for gathers in self.gathers.values():  # after those of an earlier engine have dropped their units
            gathers.make_units(leaves)
        self.gathers[DENSE].fetch_windows(windowed)
        self.whole = WholeParameters(params, self.gathers[DENSE])
        offload.persistent_parameters = [param for param in offload.persistent_parameters if not is_whole(param)]
        offload.partition_all_parameters = self.whole.keep_in(offload.partition_all_parameters)
        coordinator.compare_order(module)
        coordinator.keep_whole(self.whole, whole_modules(module))

    def slices_of(self, sub_group: Sequence[ZeroParameter]) -> Slices:
        """Return the shards of a sub-group's parameters, which are all of one name; see ``slices_name``."""
        return self.slices[slices_name(sub_group[0])]

    @property
    def has_slices(self) -> bool:
        """Whether a family has slices of several rows."""
        return any(slices.has_slices for slices in self.slices.values())

    # Flat buffers of the optimizer ####################################################################

    def make_blocks(
        self, buffer: Tensor, sub_groups: Sequence[Sequence[ZeroParameter]]
    ) -> tuple[Tensor, list[Tensor]]:
        """Make the parameters of all sub-groups views of a flat buffer, 1D.

        Returns:
            The buffer, in its final memory; and for each sub-group the part of it that a step updates, 1D.
        """
        self.drop_blocks()
        buffer, offset, flats = self.slices[DENSE].rows.to_storage(buffer), 0, []
        for number, sub_group in enumerate(sub_groups):
            flat, offset = self.slices_of(sub_group).make_block(number, buffer, offset, sub_group)
            flats.append(flat)
        return buffer, flats

    def make_views(self, buffer: Tensor, sub_groups: Sequence[Sequence[ZeroParameter]]) -> None:
        """Make the parameters views of a copy of the flat buffer, on any device, without gathers."""
        offset = 0
        for sub_group in sub_groups:
            offset = self.slices_of(sub_group).make_views(buffer, offset, sub_group)

    def drop_blocks(self) -> None:
        """Release the flat buffer."""
        for slices in self.slices.values():
            slices.drop_blocks()

    # Updated parameters: os -> p ######################################################################

    def begin_step(self) -> None:
        """Receive the parameters of the last step, before this step writes the rows; drop a failed step's updates."""
        self.receive_updates()
        for slices in self.slices.values():
            slices.drop_row_updates()

    def gather_updates(self) -> None:
        """Start to gather updated parameters os -> p: one family after the other, in one order on all ranks."""
        for slices in self.slices.values():
            slices.gather_updates()

    def receive_updates(self) -> None:
        """Wait for the gathers of all updated parameters."""
        self.whole.wait()
        for slices in self.slices.values():
            slices.drain()

    # Checkpoints ######################################################################################

    def wait_on_host(self) -> None:
        """Make the host wait for updated parameters, before it reads them."""
        self.whole.wait()
        for slices in self.slices.values():
            slices.wait_on_host()

    def complete_slices(self) -> None:
        """Complete slices after a load, which writes this rank's rows only."""
        for slices in self.slices.values():
            slices.complete()
        self.whole.gather()

    def release(self) -> None:
        """Return the parameters to DeepSpeed."""
        for gathers in self.gathers.values():
            gathers.release()


def slices_name(param: nn.Parameter) -> str:
    """Return the key of a parameter's shards and gathers: ``grouped``, or its family."""
    return GROUPED if placement_of(param) == Placement.I else family_of(param)


def _refuse_placed_experts(modules: Iterable[ChunkedModule | WindowedModule]) -> None:
    """Reject patterns that match experts which are fetched in windows.

    Raises:
        ValueError: one does.
    """
    for one in modules:
        if any(placement_of(param) is not None for param in one.module.parameters()):
            raise ValueError(
                f"{SECTION}.{MODULES} matches parameters of a {type(one.module).__name__}, whose experts are fetched "
                f"in windows. Use a pattern without experts, or raise {SECTION}.{LEAF_BYTES} until it is one unit."
            )


def _disable_persistence(windowed: Iterable[WindowedModule], offload: DeepSpeedZeRoOffload) -> None:
    """Disable persistence of packed parameters that are fetched in windows, small ones included."""
    packed = {id(param) for module in windowed for param in module.params}
    offload.persistent_parameters = [p for p in offload.persistent_parameters if id(p) not in packed]
    for module in windowed:
        exclude_from_fetches(module.module)
        for param in module.params:
            param.ds_persist = False


def _choose_cached(context: Context, module: nn.Module, budget: int) -> frozenset[int]:
    """Select parameters whose slices are cached on the device, module by module; return their ds_ids, and log them.

    Args:
        budget: maximum number of bytes of the cache.
    """
    if not budget:
        return frozenset()
    params = cast(list[ZeroParameter], list(module.parameters()))
    sizes = {param.ds_id: _slice_bytes(context, param) for param in params}
    cached: set[int] = set()
    free = budget
    for owner in _from_both_ends([m for m in module.modules() if any(True for _ in m.parameters(recurse=False))]):
        ds_ids = {p.ds_id for p in cast(Iterable[ZeroParameter], owner.parameters(recurse=False)) if sizes[p.ds_id]}
        nbytes = sum(sizes[ds_id] for ds_id in ds_ids - cached)
        if nbytes <= free:
            free -= nbytes
            cached |= ds_ids
    warn_on_rank_0(
        f"{SECTION}.{CACHE_BYTES} {budget} keeps {budget - free:,} of {sum(sizes.values()):,} bytes of "
        f"slices on each device ({len(cached)} of {len(sizes)} parameters), the ends of the model first"
    )
    return frozenset(cached)


def _slice_bytes(context: Context, param: ZeroParameter) -> int:
    """Return the bytes of a parameter's slice; 0 if it has none, or persists and is never copied."""
    topology = context.families[family_of(param)].topology
    if param.ds_persist or topology.sizes.groups == 1:
        return 0
    chunk = FlatLayout.from_placement(param.ds_numel, context.strategy.os, topology).chunk
    return chunk * topology.sizes.groups * param.ds_tensor.element_size()


def _from_both_ends(modules: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Yield modules from the ends of a list to its middle: the first, the last, the second, ..."""
    first, last = 0, len(modules) - 1
    while first <= last:
        yield modules[first]
        if first < last:
            yield modules[last]
        first, last = first + 1, last - 1
