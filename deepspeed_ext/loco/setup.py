# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Creates the hops for an engine's configuration, and reports their compression."""

from collections.abc import Sequence
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger
from torch.distributed import ProcessGroup

from deepspeed_ext.comm.backends import make_reduce
from deepspeed_ext.comm.hops import GatherHop, ReduceHop
from deepspeed_ext.config.keys import GROUP_SIZE, REDUCE, SECTION
from deepspeed_ext.config.section import offloads
from deepspeed_ext.config.settings import EXACT, ORDERED_LEVELS, LocoSettings, UpdateSettings, outer_step_settings
from deepspeed_ext.console import log_on_rank_0
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.loco.hop import COMPRESS_TIMER, DECOMPRESS_TIMER, LocoHop, QuantizedSums
from deepspeed_ext.loco.ops import BUILD_ADVICE, lacks_kernels, load_kernels, require_kernels
from deepspeed_ext.loco.sampling import StepReport
from deepspeed_ext.loco.updates import HalfDifferences, LosslessDifferences, QuantizedDifferences
from deepspeed_ext.strategy import Placement, Strategy

EVENTS, UPDATE_EVENTS = "Train/LoCo", "Train/Updates"
_DENSE = "inter"  # name of the hop between groups for dense parameters; experts have others, with a prefix


def _events(label: str, name: str) -> str:
    """Return the label of a hop's events; hops of experts have their own."""
    return label if name == _DENSE else f"{label}/{name.removesuffix(f'_{_DENSE}')}"


class ConfiguredHops:
    """Creates the hops for an engine's configuration.

    Args:
        engine: the engine; its monitor and timers get reports.
        strategy: placement of model states.
    """

    def __init__(self, engine: Engine, strategy: Strategy) -> None:
        self._engine = engine
        config = engine._config.zero_config
        self._loco: LocoSettings | None = config.zeropp_loco_param
        self._ordered = ORDERED_LEVELS[config.paro_reduce]
        if self._ordered:  # without kernels, ordered sums run in plain PyTorch
            load_kernels()
            if lacks_kernels(get_accelerator().device_name()):
                logger.warning(f"deepspeed_ext: {SECTION}.{REDUCE} sums without a kernel on GPUs. {BUILD_ADVICE}")
        updates: UpdateSettings | None = config.paro_quantized_updates
        # If optimizer states are not sharded over all ranks, sums of gradients are gathered instead of parameters.
        self._updates = updates if strategy.os == Placement.G else None
        self._sums = updates if strategy.os != Placement.G else None

    def reduce(self, group: ProcessGroup | None, name: str, reduce_scatter: bool = True) -> ReduceHop:
        """Create a hop of gradients between groups: a LocoHop if configured, else an exact one."""
        if self._loco:
            hop: ReduceHop = self._loco_hop(group, name)
        else:
            hop = make_reduce(group, name, reduce_scatter, "inter" in self._ordered)
        if name == _DENSE and self._ordered:
            log_ordered_sums(self._ordered, hop.size)
        if self._sums is None:
            return hop
        require_kernels(get_accelerator().device_name(), hop.collectives.group, UpdateSettings.key)
        hop.sums = sums = QuantizedSums(self._sums.sums, *_error_device(self._engine))
        sums.errors.report = StepReport(self._engine, sums.sampling, _events(UPDATE_EVENTS, name))
        if name == _DENSE:
            description, action = "gradient sums are gathered", "their quantization errors are reset"
            log_update_settings(self._sums, self._sums.sums.block_size, hop.size, description, action)
        return hop

    def reduce_intra(self, group: ProcessGroup | None, name: str, reduce_scatter: bool = True) -> ReduceHop:
        """Create an exact hop of gradients within a group."""
        return make_reduce(group, name, reduce_scatter, "intra" in self._ordered)

    def _loco_hop(self, group: ProcessGroup | None, name: str) -> LocoHop:
        assert self._loco is not None
        hop = LocoHop(group, name, self._loco, *_error_device(self._engine))
        if name == _DENSE:
            log_loco_settings(self._loco, hop.size)
        has_timers = self._engine.wall_clock_breakdown()
        hop.timers = self._engine.timers if has_timers else hop.timers
        timers = [COMPRESS_TIMER, DECOMPRESS_TIMER] if has_timers else []
        hop.errors.report = StepReport(self._engine, hop.sampling, _events(EVENTS, name), timers)
        return hop

    def gather(self, group: ProcessGroup | None, name: str) -> GatherHop:
        """Create a hop of parameters between groups: of differences if configured, else unencoded."""
        exact_hop = GatherHop(group, name)
        if self._updates is None:
            return exact_hop
        if name == _DENSE:
            description, action = "updated parameters are sent as differences", "they are sent unencoded"
            log_update_settings(self._updates, self._updates.difference_block, exact_hop.size, description, action)
        if exact_hop.size == 1:  # no receivers, so no differences
            return exact_hop
        difference_class = LosslessDifferences if self._updates.bits == EXACT else QuantizedDifferences
        differences = difference_class(exact_hop.collectives, self._updates)
        differences.report = StepReport(self._engine, differences.sampling, _events(UPDATE_EVENTS, name))
        return GatherHop(group, name, differences)

    def outer(self, bits: int) -> "OuterHops":
        """Return the factory of the hops of an outer optimizer in ``bits`` bits."""
        return OuterHops(self._engine, bits)


class OuterHops:
    """Creates the hops of an outer optimizer: 32 and 16 bits need no kernels."""

    def __init__(self, engine: Engine, bits: int) -> None:
        self._bits = bits
        self._settings = None if bits in (32, 16) else outer_step_settings(bits)
        self._errors = _error_device(engine)

    def reduce(self, group: ProcessGroup | None, name: str, reduce_scatter: bool = True) -> ReduceHop:
        """Create the hop of weight changes."""
        if self._settings is None:
            return make_reduce(group, name, reduce_scatter)
        return LocoHop(group, name, self._settings[0], *self._errors)

    def gather(self, group: ProcessGroup | None, name: str) -> GatherHop:
        """Create the hop of outer weights."""
        if self._settings is not None:
            collectives = GatherHop(group, name).collectives
            return GatherHop(group, name, QuantizedDifferences(collectives, self._settings[1]))
        return GatherHop(group, name, HalfDifferences() if self._bits == 16 else None)


def _error_device(engine: Engine) -> tuple[str | None, bool]:
    """Return (device of the error feedback, None for that of gradients; whether it is in pinned memory)."""
    section: Any = engine._config.zero_config.offload_optimizer
    return ("cpu", section.pin_memory) if offloads(section) else (None, False)


def log_ordered_sums(levels: Sequence[str], groups: int) -> None:
    """Log on rank 0 the reductions that sum in rank order."""
    message = f"gradients are summed in fp32 in rank order between {groups} groups"
    within = "; sums within groups are in rank order" if "intra" in levels else ""
    _log(f"{SECTION}.{REDUCE}", groups, message, within)


def log_update_settings(settings: UpdateSettings, block_size: int, groups: int, description: str, action: str) -> None:
    """Log on rank 0 the data that groups exchange in few bits, and the action every ``resync_T`` steps."""
    encoding = "without loss" if settings.bits == EXACT else f"in {settings.bits} bits, blocks of {block_size}"
    message = f"{description} between {groups} groups {encoding}; every {settings.resync_T} steps {action}"
    _log(UpdateSettings.key, groups, message)


def log_loco_settings(settings: LocoSettings, groups: int) -> None:
    """Log LoCo's settings on rank 0."""
    feedback = "without error feedback"
    if settings.error_feedback:
        averaging = f"err_beta {settings.err_beta}, reset_T {settings.reset_T}"
        feedback = f"with error feedback in {settings.error_bits} bits ({averaging})"
    message = f"gradients are reduced between {groups} groups in {settings.bits} bits, blocks of {settings.block_size}"
    rotated = ", rotated" if settings.hadamard else ""
    _log(LocoSettings.key, groups, f"{message}{rotated}, {feedback}")


def _log(name: str, groups: int, message: str, within: str = "") -> None:
    """Log a key's effect between groups, if there are several, and within them."""
    if groups == 1:
        message = "there is one group, so nothing is sent between groups"
        within += f". Set {SECTION}.{GROUP_SIZE} for more groups"
    log_on_rank_0(f"{name}: {message}{within}")
