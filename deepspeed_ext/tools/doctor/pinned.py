# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Pinned host memory: whether it can be had, and how fast it is copied to and from the device."""

import statistics
import time
from collections.abc import Callable
from typing import Any

from deepspeed_ext.tools.doctor.check import Answers, Check
from deepspeed_ext.tools.doctor.findings import Finding, Level, ranks_text, rate_text
from deepspeed_ext.tools.doctor.place import Place

_BYTES = 256 * 2**20
_REPEATS = 5
_SLOW = 0.7  # of the median rate


def examine(place: Place) -> dict[str, float] | None:
    """Return bytes per second to the device and back, while the other ranks copy as well; None without a device."""
    import torch
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator()
    if device.is_synchronized_device():
        return None
    host = device.pin_memory(torch.ones(_BYTES // 4))
    there = torch.empty_like(host, device=device.current_device_name())
    return {
        "to the device": _BYTES / _best(lambda: there.copy_(host, non_blocking=True), device),
        "from the device": _BYTES / _best(lambda: host.copy_(there, non_blocking=True), device),
    }


def judge(answers: Answers, place: Place) -> list[Finding]:
    """Return the rates, and ranks that are slower than the others."""
    there = {rank: answer for rank, answer in answers.items() if answer is not None}
    if not there:
        return [Finding("copies", Level.OK, "ranks compute on the host: nothing is copied")]
    return [_rates(way, {rank: answer[way] for rank, answer in there.items()}) for way in next(iter(there.values()))]


def _rates(way: str, rates: dict[int, float]) -> Finding:
    median = statistics.median(rates.values())
    slow = [rank for rank, rate in rates.items() if rate < _SLOW * median]
    if not slow:
        return Finding(way, Level.OK, f"{rate_text(median)} in the median of all ranks")
    said = (
        f"{ranks_text(slow)} copy at {rate_text(min(rates[rank] for rank in slow))}, the median is {rate_text(median)}"
    )
    advice = (
        "Look at the PCIe link of these devices (nvidia-smi -q: link width), and whether ranks run near them (NUMA)."
    )
    return Finding(way, Level.LOOK, said, advice)


def _best(copy: Callable[[], Any], device: Any) -> float:
    found = []
    for _ in range(_REPEATS):
        device.synchronize()
        begin = time.perf_counter()
        copy()
        device.synchronize()
        found.append(time.perf_counter() - begin)
    return min(found)


CHECK = Check("pinned memory", examine, judge)
