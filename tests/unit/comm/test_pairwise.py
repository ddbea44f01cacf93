# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Pairwise messages, which replace gloo's collectives: of any length, and several in flight."""

import gc
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.comm.comm import comms_logger

from deepspeed_ext.comm import collectives
from deepspeed_ext.comm.hops import GatherHop
from deepspeed_ext.comm.transfer_queue import ActiveTransfer, TransferQueue

pytestmark = pytest.mark.quick


def parts(sender: int, size: int, number: int) -> list[Any]:
    """Return this rank's parts of an all-to-all: a different length for each rank, some empty."""
    return [torch.full((sender * other + number,), float(100 * number + 10 * sender + other)) for other in range(size)]


def swap_case(late: int, dropped: bool) -> list[bool]:
    """Return whether each all-to-all delivered its parts. All are started before the first wait, and one rank starts
    late. One handle may be dropped meanwhile; its result is not checked."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    if rank == late:
        time.sleep(0.3)
    started = []
    for number in range(4):
        due = [parts(sender, size, number)[rank] for sender in range(size)]
        received = [torch.empty_like(part) for part in due]
        handle = collectives.pairwise_all_to_all(group, received, parts(rank, size, number), "exchange")
        started.append((handle, received, due))
    if dropped:
        del started[1]
        gc.collect()
    right = []
    for handle, received, due in started:
        handle.wait()
        handle.wait()  # again, as one may who does not know
        right.append(all(torch.equal(part, expected) for part, expected in zip(received, due, strict=True)))
    dist.barrier()
    return [*right, len(collectives._in_flight.get(group, ())) == int(dropped)]


@pytest.mark.parametrize("late, dropped", [(0, False), (2, False), (1, True)])
def test_all_to_all_delivers_all_parts(ranks: Any, late: int, dropped: bool) -> None:
    assert all(all(results) for results in ranks(3).run(swap_case, late, dropped))


def background_case() -> list[list[float]]:
    """Run two queues over one group, which ranks start in different orders, while the main thread sends messages."""
    comms_logger.enabled = comms_logger.prof_all = True  # it times what threads start
    rank, hop = dist.get_rank(), GatherHop(dist.group.WORLD)
    sums_by_thread: list[list[float]] = [[], [], []]
    queues = [TransferQueue(overlap=True, on_thread=True) for _ in range(2)]

    def submit(number: int) -> None:
        for at in range(20):
            shard = torch.full((1,), 100.0 * number + 10 * rank + at)
            queues[number].submit(hop.all_gather(shard), lambda sums: sums_by_thread[number].append(sums.sum().item()))

    for number in (0, 1) if rank else (1, 0):
        submit(number)
        time.sleep(0.05)
    for at in range(20):
        sums_by_thread[2].append(ActiveTransfer(hop.all_gather(torch.full((1,), 1000.0 + at))).finish().sum().item())
    for queue in queues:
        queue.drain()
    return sums_by_thread


def test_messages_of_different_queues_do_not_mix(ranks: Any) -> None:
    for sums_by_thread in ranks(3).run(background_case):
        firsts = ((0, 30), (100, 30), (1000, 0))
        assert sums_by_thread == [[3 * (first + at) + more for at in range(20)] for first, more in firsts]
