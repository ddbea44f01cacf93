# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""When optimizer steps end, without a wait in between."""

import time
from typing import Any

from deepspeed.accelerator import get_accelerator


class Clock:
    """Notes the ends of steps.

    On a device with streams an end is an event in the stream of the computation, which nobody waits for until the last
    one: what runs under the next forward does so as in training.
    """

    def __init__(self) -> None:
        device = get_accelerator()
        self._event = None if device.is_synchronized_device() else device.Event
        self._ends: list[Any] = []

    def note(self) -> None:
        """Note that a step has ended, as far as the host knows."""
        if self._event is None:
            get_accelerator().synchronize()
            self._ends.append(time.perf_counter())
            return
        end = self._event(enable_timing=True)
        end.record()
        self._ends.append(end)

    def seconds(self) -> list[float]:
        """Wait for the device, and return the seconds from each end to the next one."""
        get_accelerator().synchronize()
        pairs = zip(self._ends, self._ends[1:], strict=False)
        if self._event is None:
            return [end - begin for begin, end in pairs]
        return [begin.elapsed_time(end) / 1000 for begin, end in pairs]
