# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Name of the training device, and clocks for operations on the device or on the host.

A device executes operations later than the host launches them. A moment of a device is therefore an event on the
current stream, and its time is known once the device has reached it.
"""

import threading
import time
from abc import ABC, abstractmethod
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator


def device_name() -> str:
    """Return the name of the training device, such as a GPU's model; torch alone may return another device's."""
    kind = get_accelerator().current_device_name().partition(":")[0]
    return str(getattr(torch.get_device_module(kind), "get_device_name", lambda: kind)())


class Clock(ABC):
    """Marks moments. Must be created by the training thread, on the training stream.

    Attributes:
        on_host: whether the timed operations run on the host.
    """

    on_host: bool

    @abstractmethod
    def mark(self) -> Any:
        """Return the current moment of this thread or of the current stream."""

    @abstractmethod
    def on_training_lane(self) -> bool:
        """Whether this is the training thread, or the current stream is the training stream."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until all moments are in the past."""

    @abstractmethod
    def seconds(self, moment: Any) -> float:
        """Return the seconds from the creation of the clock to a moment; call ``settle`` before."""


class HostClock(Clock):
    """The host's clock."""

    on_host = True

    def __init__(self) -> None:
        self._thread, self._zero = threading.get_ident(), time.perf_counter()

    def mark(self) -> float:
        return time.perf_counter()

    def on_training_lane(self) -> bool:
        return threading.get_ident() == self._thread

    def settle(self) -> None:
        """Do nothing: the host's moments are always past."""

    def seconds(self, moment: float) -> float:
        return moment - self._zero


class DeviceClock(Clock):
    """A device's clock: events on its streams. A backward may run on another thread, but uses the same stream."""

    on_host = False

    def __init__(self) -> None:
        self._stream, self._zero = get_accelerator().current_stream(), self.mark()

    def mark(self) -> Any:
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return event

    def on_training_lane(self) -> bool:
        return bool(get_accelerator().current_stream() == self._stream)

    def settle(self) -> None:
        get_accelerator().synchronize()  # elapsed_time needs completed events

    def seconds(self, moment: Any) -> float:
        return float(self._zero.elapsed_time(moment)) / 1e3  # elapsed_time is in milliseconds


def make_clock() -> Clock:
    """Return the clock of the training device."""
    return HostClock() if get_accelerator().is_synchronized_device() else DeviceClock()
