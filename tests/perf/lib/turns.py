# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A turn of a method on an emulated cluster, as a rank sees it: its seconds, and what its node sends meanwhile.

A turn from which the host of a virtual machine has taken the CPU away (/proc/stat) is repeated unless it is long.
"""

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from deepspeed_ext.comm.process_groups import get_topology
from scripts.emulation.network import Link
from tests.perf.lib.cluster_rows import MethodRow
from tests.perf.lib.peers import Batch, Method

LONG = 8.0  # seconds of a turn that is not repeated
STOLEN, TRIES = 0.05, 4  # a turn that lost more of the CPU to the host than this share is repeated, as often as this
CALIBRATION = 1_000_000  # elements of fp32


class Turn(NamedTuple):
    """Some steps: the share of the CPU that was stolen from them, seconds of each, bytes that a node sent in each."""

    stolen: float
    seconds: list[float]
    sent: float

    def count_in(self, row: MethodRow) -> None:
        """Add this to what a row has of such turns."""
        row.seconds.extend(self.seconds)
        row.stolen.extend([self.stolen] * len(self.seconds))
        row.link_bytes += (self.sent - row.link_bytes) * len(self.seconds) / len(row.seconds)


def cpu_times() -> tuple[int, int]:
    """Return CPU ticks of this machine since its start: stolen by its host, and in all. See proc(5)."""
    _, *ticks = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    return int(ticks[7]), sum(map(int, ticks[:8]))


class Turns(ABC):
    """A rank's link, and how it times what methods do.

    Args:
        group_size: ranks in a node.
    """

    def __init__(self, group_size: int) -> None:
        self.link = Link()
        self.topology = get_topology(None, group_size)
        self.link.limit(None)
        dist.barrier()

    @abstractmethod
    def _batches(self, method: Method) -> list[Batch]:
        """Make the batches of a method's next step: those that every other method has in that step."""

    def a_step(self, method: Method) -> Turn:
        """Time one step, and what it leaves under way."""

        def run() -> list[float]:
            batches = self._batches(method)
            dist.barrier()
            begin = time.perf_counter()
            method.step(batches)
            method.finish()
            dist.barrier()
            return over_ranks([time.perf_counter() - begin], dist.ReduceOp.MAX)

        return self._undisturbed(run, 1)

    def _undisturbed(self, run: Callable[[], list[float]], steps: int) -> Turn:
        """Take a turn from which the host of this machine has taken little: the best of some, none of them long."""
        tried: list[Turn] = []
        while len(tried) < TRIES:
            tried.append(self._turn(run, steps))
            if tried[-1].stolen <= STOLEN or sum(tried[-1].seconds) > LONG:
                break
        return min(tried)

    def _turn(self, run: Callable[[], list[float]], steps: int) -> Turn:
        dist.barrier()
        before = self.link.sent()
        stolen, total = cpu_times()
        dist.barrier()
        seconds = run()
        dist.barrier()
        (sent,) = over_ranks([self.link.sent() - before], dist.ReduceOp.SUM)
        later, total_later = cpu_times()
        (share,) = over_ranks([(later - stolen) / max(1, total_later - total)], dist.ReduceOp.MAX)
        return Turn(share, seconds, sent / self.topology.sizes.groups / steps)

    def headers(self) -> float:
        """Return the bytes that the interfaces count for each of a known transfer."""
        groups, shard = self.topology.sizes.groups, torch.zeros(CALIBRATION)
        gathered = shard.new_empty(shard.numel() * groups)
        dist.barrier()
        before = self.link.sent()
        dist.barrier()
        dist.all_gather_into_tensor(gathered, shard, group=self.topology.inter)
        dist.barrier()
        (sent,) = over_ranks([self.link.sent() - before], dist.ReduceOp.SUM)
        return sent / (4 * CALIBRATION * (groups - 1) * dist.get_world_size())


def give_back_memory() -> None:
    """Make the C library return free memory, so that one method's is not held during the many others."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
    if trim is not None:
        trim(0)


def over_ranks(values: list[float], op: Any) -> list[float]:
    """Return values of all ranks, combined. Collective."""
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, op=op)
    return found.tolist()
