# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Has an engine's optimizer reduce gradients between groups by LoCo, and report about it."""

from deepspeed import comm as dist
from deepspeed.utils import log_dist
from torch.distributed import ProcessGroup

from deepspeed_ext.comm.backends import MakeReduce, make_reduce
from deepspeed_ext.comm.hops import ReduceHop
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.loco.hop import COMPRESS_TIMER, DECOMPRESS_TIMER, LocoHop, Sent
from deepspeed_ext.loco.settings import KEY, LocoSettings

EVENTS = "Train/LoCo"


def inter_hop(engine: Engine) -> MakeReduce:
    """Return what makes the hop between groups: a LocoHop where the configuration asks for it, else a plain one."""
    config = engine._config.zero_config
    if config.zeropp_loco_param is None:
        return make_reduce
    settings = LocoSettings.parse(config.zeropp_loco_param)
    offload = config.offload_optimizer
    offloaded = offload is not None and offload.device != "none"
    pinned = offload is not None and offloaded and offload.pin_memory

    def make(group: ProcessGroup | None, name: str, reduce_scatter: bool = True) -> ReduceHop:
        hop = LocoHop(group, name, settings, device="cpu" if offloaded else None, pinned=pinned)
        announce(settings, hop.size)
        _report_to(engine, hop)
        return hop

    return make


def announce(settings: LocoSettings, groups: int) -> None:
    """Log one line on rank 0."""
    if groups == 1:
        log_dist(
            f"deepspeed_ext: {KEY}: there is one group, so nothing crosses between groups, and nothing is "
            f"compressed. Set zero_optimization.paro_group_size to make more groups.",
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


def _report_to(engine: Engine, hop: LocoHop) -> None:
    """Report at the end of each step to the engine's monitor, whose writers are on rank 0, and to its timers."""
    hop.timers = engine.timers if engine.wall_clock_breakdown() else hop.timers
    monitored = hop.look = engine.monitor.enabled and dist.get_rank() == 0

    def report() -> None:
        sent, hop.sent, hop.look = hop.sent, Sent(), monitored
        if monitored and sent.wire:
            engine.monitor.write_events(
                [
                    (f"{EVENTS}/relative_error", sent.relative_error, engine.global_samples),
                    (f"{EVENTS}/compression", sent.compression, engine.global_samples),
                ]
            )
        if engine.wall_clock_breakdown() and engine.global_steps % engine.steps_per_print() == 0:
            engine.timers.log([COMPRESS_TIMER, DECOMPRESS_TIMER])

    hop.errors.on_step = report
