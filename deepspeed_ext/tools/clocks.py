# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The device that trains: its name, and when something happened there or on the host.

A device does things later than the host asks for them. So there a moment is an event on the current stream, and its
time is known once the device has got there.
"""

import threading
import time
from abc import ABC, abstractmethod
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator


def device_name() -> str:
    """Return the name of the device that trains, such as a GPU's model; torch alone would say what the machine has."""
    kind = get_accelerator().current_device_name().partition(":")[0]
    return str(getattr(torch.get_device_module(kind), "get_device_name", lambda: kind)())


class Clock(ABC):
    """Marks moments. Made by the thread, and on the stream, that train.

    Attributes:
        on_host: whether what it times are operations of the host.
    """

    on_host: bool

    @abstractmethod
    def mark(self) -> Any:
        """Return this moment, of this thread or of the current stream."""

    @abstractmethod
    def trains(self) -> bool:
        """Whether this thread, or the current stream, is the one that trains."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until all moments are in the past."""

    @abstractmethod
    def seconds(self, moment: Any) -> float:
        """Return the seconds from the making of the clock to a moment, after ``settle``."""


class HostClock(Clock):
    """The host's."""

    on_host = True

    def __init__(self) -> None:
        self._thread, self._zero = threading.get_ident(), time.perf_counter()

    def mark(self) -> float:
        return time.perf_counter()

    def trains(self) -> bool:
        return threading.get_ident() == self._thread

    def settle(self) -> None:
        """There is nothing to wait for."""

    def seconds(self, moment: float) -> float:
        return moment - self._zero


class DeviceClock(Clock):
    """A device's: events on its streams. A backward may run on another thread, but is on the same stream."""

    on_host = False

    def __init__(self) -> None:
        self._stream, self._zero = get_accelerator().current_stream(), self.mark()

    def mark(self) -> Any:
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return event

    def trains(self) -> bool:
        return bool(get_accelerator().current_stream() == self._stream)

    def settle(self) -> None:
        get_accelerator().synchronize()

    def seconds(self, moment: Any) -> float:
        return float(self._zero.elapsed_time(moment)) / 1e3


def make_clock() -> Clock:
    """Return the clock of the device that trains."""
    return HostClock() if get_accelerator().is_synchronized_device() else DeviceClock()
