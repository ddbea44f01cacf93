# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Measures the rates of a redistribution's hops over its process groups.

All ranks run the same hop at the same time, as in training. A rate thus accounts for links that the ranks of a node
share, and for the backend's implementation of a collective. Every time is that of the slowest rank, so all ranks get
the same rates.
"""

import statistics
import time
from collections.abc import Callable, Collection
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.comm.agreement import all_reduce_max
from deepspeed_ext.comm.backends import make_reduce
from deepspeed_ext.comm.hops import GatherHop, Hop, ReduceHop
from deepspeed_ext.comm.process_groups import Topology
from deepspeed_ext.comm.transfer_queue import ActiveTransfer
from deepspeed_ext.console import track_progress
from deepspeed_ext.loco.ops import load_kernels
from deepspeed_ext.planner.rates import HopRates, Rate, Rates, fit

MIB = 2**20
SIZES = (MIB // 16, MIB, 4 * MIB, 16 * MIB, 64 * MIB)  # bytes that a rank receives
LAST_SIZE_SECONDS = 0.25  # seconds; after a message that takes longer, no larger message is sent
REPEATS = 3
RUNS_PER_SAMPLE = 10  # runs in one sample: training also queues hops without waiting for each
SINGLE_RUN_SECONDS = 0.02  # if a run takes longer, the overheads of launches and waits are negligible: one is enough
NO_COST = Rate(0.0, float("inf"))  # the rate of a hop over one rank
MEMORY_BYTES = 64 * MIB  # size of the buffer that is read and written
MATRIX = 512  # rows and columns of the multiplied matrices
DEVICE_MATRIX = 4096  # on a device, where smaller products would take less time than their launch
DEVICE_MEMORY_BYTES = 1024 * MIB  # on a device with enough memory, since its caches may hold 64 MiB


def measure(
    topology: Topology,
    dtype: torch.dtype = torch.float32,
    reduce_scatter: bool = True,
    pinned: bool | None = None,
    ordered: Collection[str] = (),
) -> Rates:
    """Measure the rates of this topology's hops. Collective over all ranks.

    Takes a few seconds; at 100 Mbit/s between groups, about ten.

    Args:
        topology: the groups.
        dtype: dtype of gradients and parameters.
        reduce_scatter: DeepSpeed's key of that name.
        ordered: hops with ordered sums, of "intra" and "inter".
        pinned: whether parameters in host memory are pinned; None if there are none, so that no copies are measured.
    """
    if ordered:
        load_kernels()  # as the engine does; plain PyTorch sums more slowly
    groups = {"intra": topology.intra, "inter": topology.inter}
    gathers = [GatherHop(group, level) for level, group in groups.items()]
    reductions = [make_reduce(group, level, reduce_scatter, level in ordered) for level, group in groups.items()]
    rates = [_hop_rate(hop, dtype) for hop in track_progress([*gathers, *reductions], "measuring links", "hop")]
    of_gathers, of_reductions = (
        dict(zip(groups, rates_by_level, strict=True)) for rates_by_level in (rates[:2], rates[2:])
    )
    return Rates(HopRates(**of_gathers), HopRates(**of_reductions), _memory_rate(), _host_copy_rate(pinned))


def measure_flops(dtype: torch.dtype) -> float:
    """Measure the FLOPs per second of a matrix product on the slowest rank. Collective over all ranks."""
    device = get_accelerator()
    size = MATRIX if device.is_synchronized_device() else DEVICE_MATRIX
    matrix = torch.ones(size, size, dtype=dtype, device=device.current_device_name())
    run = lambda: matrix @ matrix  # noqa: E731
    run()
    return 2 * size**3 / _seconds(run)


def sample_hop(hop: Hop, dtype: torch.dtype) -> list[tuple[float, float]]:
    """Measure one hop with messages of growing size until one takes long enough. Collective over all ranks.

    Returns:
        (bytes that a rank receives, seconds), the same on all ranks; empty for a hop over one rank.
    """
    return [] if hop.size == 1 else sample_collective(hop.size, dtype, lambda share: _runner(hop, share, dtype))


def sample_collective(
    ranks: int, dtype: torch.dtype, runner: Callable[[int], Callable[[], Any]]
) -> list[tuple[float, float]]:
    """Measure like ``sample_hop``. ``runner(share)`` returns a call that receives ``share`` elements of each rank."""
    times: list[tuple[float, float]] = []
    for size in SIZES:
        # At least one element: an empty message would have no rate.
        share = max(1, round(size / (ranks - 1) / dtype.itemsize))
        run = runner(share)
        run()  # opens connections
        seconds = _seconds(run)
        times.append((float(share * (ranks - 1) * dtype.itemsize), seconds))
        if seconds > LAST_SIZE_SECONDS and len(times) > 2:  # equal on all ranks, so all stop after the same size
            break
    return times


def _hop_rate(hop: Hop, dtype: torch.dtype) -> Rate:
    return fit(sample_hop(hop, dtype)) if hop.size > 1 else NO_COST


def _runner(hop: Hop, share: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Return a function that runs a hop with ``share`` elements from each other rank."""
    device = get_accelerator().current_device_name()
    if isinstance(hop, GatherHop):
        shard = torch.zeros(share, dtype=dtype, device=device)
        return lambda: ActiveTransfer(hop.all_gather(shard)).finish()
    assert isinstance(hop, ReduceHop)
    # Allocated here, because allocation is not part of a hop's time.
    flat = torch.zeros(share * hop.size, dtype=dtype, device=device)
    return lambda: ActiveTransfer(hop.reduce_scatter(flat, [share] * hop.size)).finish()


def _seconds(run: Callable[[], Any]) -> float:
    """Return the seconds of one run, or the mean of several in a row; the same on all ranks."""
    # ``_median_of_slowest`` is the same on all ranks, so all take the same branch. Otherwise they would hang:
    # ``_time_runs`` is collective.
    once = _median_of_slowest([_time_runs(run)])
    if once > SINGLE_RUN_SECONDS:
        return _median_of_slowest([once, *(_time_runs(run) for _ in range(REPEATS - 1))])
    return _median_of_slowest([_time_runs(run, RUNS_PER_SAMPLE) for _ in range(REPEATS)])


def _time_runs(run: Callable[[], Any], times: int = 1) -> float:
    dist.barrier()  # a rate is for a hop that all ranks run at once
    begin = time.perf_counter()
    for _ in range(times):
        run()
    get_accelerator().synchronize()  # otherwise only launches would be timed
    return (time.perf_counter() - begin) / times


def _median_of_slowest(seconds: list[float]) -> float:
    """Return the median over runs of the slowest rank's seconds; the same on all ranks."""
    return statistics.median(all_reduce_max(torch.tensor(seconds, dtype=torch.float32)).tolist())


def _host_copy_rate(pinned: bool | None) -> float:
    """Return the bytes per second that a rank copies to its device while all other ranks do the same."""
    device = get_accelerator()
    if pinned is None or device.is_synchronized_device():
        return float("inf")
    source = torch.ones(MEMORY_BYTES // 4)
    source = device.pin_memory(source) if pinned else source
    target = torch.empty_like(source, device=device.current_device_name())
    run = lambda: target.copy_(source, non_blocking=pinned)  # noqa: E731
    run()
    return source.nbytes / _median_of_slowest([_seconds(run)])


def _memory_rate() -> float:
    """Return the bytes per second that a rank reads and writes in its memory while all other ranks do the same."""
    device, nbytes = get_accelerator(), MEMORY_BYTES
    if not device.is_synchronized_device():
        # More than the caches hold, but a small part of the free memory, since the model is built already.
        nbytes = max(nbytes, min(DEVICE_MEMORY_BYTES, device.available_memory() // 8))
    buffer = torch.ones(nbytes // 4, device=device.current_device_name())
    run = lambda: buffer.mul_(1.0)  # noqa: E731
    run()
    return 1 / _median_of_slowest([_seconds(run) / (2 * nbytes)])  # ranks may have buffers of different sizes
