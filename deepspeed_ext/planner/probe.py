# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Measures the rates of the hops that moves will use, over the process groups that they will use.

All ranks run the same hop at the same time, as they do in training, so that a rate has in it what ranks of a node
share, and what the backend makes of a collective. Every time is that of the slowest rank: all get the same rates.
"""

import statistics
import time
from collections.abc import Callable

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.hops import Hop, Started, make_hop
from deepspeed_ext.placement import Kind
from deepspeed_ext.planner.rates import HopRates, Rate, Rates, fit
from deepspeed_ext.topology import Topology

MIB = 2**20
SIZES = (MIB // 16, MIB, 4 * MIB, 16 * MIB, 64 * MIB)  # bytes that a rank receives
LONG = 0.25  # seconds of a message, after which no larger one is sent
REPEATS = 3
FREE = Rate(0.0, float("inf"))  # of a hop over one rank
MEMORY_BYTES = 64 * MIB


def measure(topology: Topology, dtype: torch.dtype = torch.float32, reduce_scatter: bool = True) -> Rates:
    """The rates of this topology's hops. Collective over all ranks.

    Takes some seconds: at 100 Mbit/s between groups about ten.

    Args:
        topology: the groups.
        dtype: of gradients and parameters.
        reduce_scatter: DeepSpeed's key of that name.
    """
    groups = {"intra": topology.intra, "inter": topology.inter}
    hops = {level: make_hop(group, level, reduce_scatter) for level, group in groups.items()}
    rates = {kind: HopRates(**{level: _rate(hop, kind, dtype) for level, hop in hops.items()}) for kind in Kind}
    return Rates(rates[Kind.GATHER], rates[Kind.REDUCE], _memory())


def _rate(hop: Hop, kind: Kind, dtype: torch.dtype) -> Rate:
    """Of one hop; messages grow until they take long enough."""
    if hop.size == 1:
        return FREE
    samples: list[tuple[float, float]] = []
    for size in SIZES:
        share = max(1, round(size / (hop.size - 1) / dtype.itemsize))
        run = _runner(hop, kind, share, dtype)
        run()  # opens connections
        seconds = _slowest([_timed(run) for _ in range(REPEATS)])
        samples.append((float(share * (hop.size - 1) * dtype.itemsize), seconds))
        if seconds > LONG and len(samples) > 2:
            break
    return fit(samples)


def _runner(hop: Hop, kind: Kind, share: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    """A hop of which this rank receives ``share`` elements from each other rank of the group."""
    device = get_accelerator().current_device_name()
    if kind == Kind.GATHER:
        shard = torch.zeros(share, dtype=dtype, device=device)
        return lambda: Started(hop.all_gather(shard)).finish()
    flat = torch.zeros(share * hop.size, dtype=dtype, device=device)
    return lambda: Started(hop.reduce_scatter(flat, [share] * hop.size)).finish()


def _timed(run: Callable[[], Tensor]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    run()
    get_accelerator().synchronize()
    return time.perf_counter() - begin


def _slowest(seconds: list[float]) -> float:
    """The median of what the slowest rank took each time; the same on all ranks."""
    found = torch.tensor(seconds, dtype=torch.float32, device=get_accelerator().current_device_name())
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return statistics.median(found.tolist())


def _memory() -> float:
    """Bytes that a rank reads and writes per second in its memory while all others do."""
    buffer = torch.ones(MEMORY_BYTES // 4, device=get_accelerator().current_device_name())
    run = lambda: buffer.mul_(1.0)  # noqa: E731
    run()
    seconds = _slowest([_timed(run) for _ in range(REPEATS)])
    return 2 * MEMORY_BYTES / seconds
