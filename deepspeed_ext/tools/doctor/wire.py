# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Messages between two ranks, timed. Both ranks call the same function with one another's number."""

import time

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, distributed

_PINGS = 12
_WARM = 2  # of them, which open connections


def ping(partner: int) -> float:
    """Return the seconds of a message that carries nothing: half of a round trip, the best of some."""
    note = _note([0])
    found = []
    for _ in range(_PINGS):
        begin = time.perf_counter()
        _round_trip(note, partner)
        found.append((time.perf_counter() - begin) / 2)
    return max(min(found[_WARM:]), 1e-9)


def exchange(partner: int, payload: Tensor, landing: Tensor) -> float:
    """Send and receive as many bytes at the same time; return the seconds of the slower of the two ranks."""
    _round_trip(_note([0]), partner)  # both are here
    begin = time.perf_counter()
    _send_and_receive(payload, landing, partner)
    mine = time.perf_counter() - begin
    theirs = _note([0])
    _send_and_receive(_note([round(mine * 1e9)]), theirs, partner)
    return max(mine, int(theirs.item()) / 1e9, 1e-9)


def offset(partner: int, asks: bool) -> float:
    """Return how many seconds the partner's clock is ahead, as NTP finds it; 0 on the rank that is asked.

    Of several round trips the quickest one counts: a message took at most its time.
    """
    best = (float("inf"), 0.0)
    for _ in range(_PINGS):
        if not asks:
            distributed.recv(_note([0]), partner)
            distributed.send(_note([time.time_ns()]), partner)
            continue
        said, begin = _note([0]), time.time_ns()
        distributed.send(_note([0]), partner)
        distributed.recv(said, partner)
        there, end = int(said.item()), time.time_ns()
        best = min(best, ((end - begin) / 1e9, (there - (begin + end) // 2) / 1e9))
    return best[1]


def buffer(nbytes: int) -> Tensor:
    """Return bytes on the device."""
    return torch.zeros(nbytes, dtype=torch.uint8, device=get_accelerator().current_device_name())


def _note(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=get_accelerator().current_device_name())


def _round_trip(note: Tensor, partner: int) -> None:
    """Ping-pong: a message each way, one after the other."""
    if distributed.get_rank() < partner:
        distributed.send(note, partner)
        distributed.recv(note, partner)
    else:
        distributed.recv(note, partner)
        distributed.send(note, partner)
    get_accelerator().synchronize()


def _send_and_receive(sent: Tensor, received: Tensor, partner: int) -> None:
    operations = [
        distributed.P2POp(distributed.irecv, received, partner),
        distributed.P2POp(distributed.isend, sent, partner),
    ]
    for work in distributed.batch_isend_irecv(operations):
        work.wait()
    get_accelerator().synchronize()
