# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Makes the hops between groups that an engine's configuration asks for, and reports what they do."""

from collections.abc import Callable

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import log_dist
from torch.distributed import ProcessGroup

from deepspeed_ext.comm.backends import MakeGather, MakeReduce, make_reduce
from deepspeed_ext.comm.hops import GatherHop, ReduceHop
from deepspeed_ext.config.settings import EXACT, LocoSettings, UpdateSettings, of_outer_steps
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.loco.hop import COMPRESS_TIMER, DECOMPRESS_TIMER, LocoHop
from deepspeed_ext.loco.kernels import require_kernels
from deepspeed_ext.loco.sampling import Sampling
from deepspeed_ext.loco.sums import QuantizedSums
from deepspeed_ext.loco.updates import HalfDifferences, LosslessDifferences, QuantizedDifferences
from deepspeed_ext.strategy import Placement, Strategy

EVENTS, UPDATE_EVENTS = "Train/LoCo", "Train/Updates"
_DENSE = "inter"  # name of the hop between groups for dense parameters; experts have others, with a prefix


def _events(kind: str, name: str) -> str:
    """Return the label of a hop's events; hops of experts have their own."""
    return kind if name == _DENSE else f"{kind}/{name.removesuffix(f'_{_DENSE}')}"


def inter_hop(engine: Engine, strategy: Strategy) -> MakeReduce:
    """Return a function that makes the reduce hop between groups: a LocoHop if configured, else a plain one.

    If the optimizer's states are not sharded over all ranks, sums of gradients come back; ``paro_quantized_updates``
    makes them come back in few bits.
    """
    config = engine._config.zero_config
    make = make_reduce if config.zeropp_loco_param is None else _loco_hop(engine)
    if config.paro_quantized_updates is None or strategy.os == Placement.G:
        return make
    settings = UpdateSettings.parse(config.paro_quantized_updates)

    def make_both(group: ProcessGroup | None, name: str, reduce_scatter: bool = True) -> ReduceHop:
        hop = make(group, name, reduce_scatter)
        require_kernels(get_accelerator().device_name(), hop.collectives.group, UpdateSettings.key)
        hop.sums = sums = QuantizedSums(settings.sums, *_where_errors_are(engine))
        sums.errors.on_step = _reporter(engine, sums.sent, _events(UPDATE_EVENTS, name))
        if name == _DENSE:
            what, then = "sums of gradients come back", "what they lack is forgotten"
            announce_updates(settings, settings.sums.block_size, hop.size, what, then)
        return hop

    return make_both


def _loco_hop(engine: Engine) -> MakeReduce:
    settings = LocoSettings.parse(engine._config.zero_config.zeropp_loco_param)

    def make(group: ProcessGroup | None, name: str, reduce_scatter: bool = True) -> ReduceHop:
        hop = LocoHop(group, name, settings, *_where_errors_are(engine))
        if name == _DENSE:
            announce(settings, hop.size)
        _report_to(engine, hop, _events(EVENTS, name))
        return hop

    return make


def _where_errors_are(engine: Engine) -> tuple[str | None, bool]:
    """Return the device of the error feedback, None for that of gradients; and whether it is in pinned memory."""
    offload = engine._config.zero_config.offload_optimizer
    if offload is None or offload.device == "none":
        return None, False
    return "cpu", offload.pin_memory


def gather_hop(engine: Engine, strategy: Strategy) -> MakeGather:
    """Return a function that makes the gather hop between groups: differences if configured, else a plain one."""
    section = engine._config.zero_config.paro_quantized_updates
    if section is None or strategy.os != Placement.G:
        return GatherHop
    settings = UpdateSettings.parse(section)

    def make(group: ProcessGroup | None, name: str) -> GatherHop:
        plain = GatherHop(group, name)
        if name == _DENSE:
            what, then = "updated parameters cross as differences", "they cross as they are"
            announce_updates(settings, settings.difference_block, plain.size, what, then)
        if plain.size == 1:
            return plain
        kind = LosslessDifferences if settings.bits == EXACT else QuantizedDifferences
        differences = kind(plain.collectives, settings)
        differences.on_step = _reporter(engine, differences.sent, _events(UPDATE_EVENTS, name))
        return GatherHop(group, name, differences)

    return make


def outer_hops(engine: Engine, bits: int) -> tuple[MakeReduce, MakeGather]:
    """Return what makes the hops of an outer optimizer, in so many bits: 32 and 16 need no kernels."""
    if bits in (32, 16):
        halves = {"differences": HalfDifferences()} if bits == 16 else {}
        return make_reduce, lambda group, name: GatherHop(group, name, **halves)
    settings, of_updates = of_outer_steps(bits)

    def reduce(group: ProcessGroup | None, name: str, reduce_scatter: bool = True) -> ReduceHop:
        return LocoHop(group, name, settings, *_where_errors_are(engine))

    def gather(group: ProcessGroup | None, name: str) -> GatherHop:
        return GatherHop(group, name, QuantizedDifferences(GatherHop(group, name).collectives, of_updates))

    return reduce, gather


def announce_updates(settings: UpdateSettings, block_size: int, groups: int, what: str, then: str) -> None:
    """Log on rank 0 what crosses between groups in few bits, and what happens every ``resync_T`` steps."""
    how = f"in {settings.bits} bits, blocks of {block_size}"
    if settings.bits == EXACT:
        how = "in as few bits as lose nothing"
    said = f"{what} between {groups} groups {how}; every {settings.resync_T} steps {then}"
    if groups == 1:
        said = (
            "there is one group, so nothing crosses between groups. Set zero_optimization.paro_group_size to make "
            "more groups."
        )
    log_dist(f"deepspeed_ext: {UpdateSettings.key}: {said}", ranks=[0])


def announce(settings: LocoSettings, groups: int) -> None:
    """Log LoCo's settings on rank 0."""
    if groups == 1:
        log_dist(
            f"deepspeed_ext: {LocoSettings.key}: there is one group, so nothing crosses between groups, and nothing "
            f"is compressed. Set zero_optimization.paro_group_size to make more groups.",
            ranks=[0],
        )
        return
    feedback = "without error feedback"
    if settings.error_feedback:
        feedback = (
            f"with error feedback in {settings.error_bits} bits (err_beta {settings.err_beta}, reset_T "
            f"{settings.reset_T})"
        )
    log_dist(
        f"deepspeed_ext: LoCo: gradients cross between {groups} groups in {settings.bits} bits, blocks of "
        f"{settings.block_size}{', rotated' if settings.hadamard else ''}, {feedback}",
        ranks=[0],
    )


def _reporter(engine: Engine, sent: Sampling, events: str) -> Callable[[], None]:
    """Return a function that writes a step's sample to the engine's monitor, which writes on rank 0 only."""
    monitored = engine.monitor.enabled and dist.get_rank() == 0
    sent.begin(monitored)

    def report() -> None:
        if monitored and sent.wire:
            engine.monitor.write_events(
                [
                    (f"{events}/relative_error", sent.relative_error, engine.global_samples),
                    (f"{events}/compression", sent.compression, engine.global_samples),
                ]
            )
        sent.begin(monitored)

    return report


def _report_to(engine: Engine, hop: LocoHop, events: str) -> None:
    """Report a hop to the engine's monitor and timers at the end of each step."""
    hop.timers = engine.timers if engine.wall_clock_breakdown() else hop.timers
    report = _reporter(engine, hop.sent, events)

    def report_all() -> None:
        report()
        every = engine.steps_per_print()  # None by default
        if engine.wall_clock_breakdown() and every and engine.global_steps % every == 0:
            engine.timers.log([COMPRESS_TIMER, DECOMPRESS_TIMER])

    hop.errors.on_step = report_all
