# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Streams, events and handles of a simulated device; see Note [How order is checked] in ``stream_order.py``.

A call of theirs that is left out (``Order.left_out``) orders nothing, but data arrive all the same.
"""

import abc
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.harness.memory_accesses import Access, Clock, merge


class Device(abc.ABC):
    """A simulated device, as far as its streams need to know it.

    Attributes:
        streams: all of them.
        default, current: of them.
        host: what the host has waited for.
        left_out: whether the call that is made now, of what orders, is to be left out.
        on_their_way: collectives.
    """

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.host: Clock = {}
        self.default = Stream(self, "compute")
        self.current = self.default
        self.left_out: Callable[[], bool] = lambda: False
        self.on_their_way: set[Work] = set()

    @abc.abstractmethod
    def synchronize(self, what: str = "device", *clocks: Clock) -> None:
        """Make the host wait for all streams, or up to these clocks; ``what``: what it waits for."""


class Stream:
    """One of a simulated device. Its methods are those of ``torch.cuda.Stream``."""

    def __init__(self, order: Device, name: str) -> None:
        self.order, self.name = order, name
        self.number = len(order.streams)
        self.clock: Clock = {}
        order.streams.append(self)

    def begin(self) -> int:
        """An operation is put on it; its number."""
        self.see(self.order.host)
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.clock[self.number]

    def see(self, clock: Clock) -> None:
        """What comes now comes after all that."""
        merge(self.clock, clock)

    def has_seen(self, access: Access) -> bool:
        """Whether what comes now comes after the access."""
        return self.clock.get(access.stream.number, 0) >= access.number

    def wait_stream(self, stream: "Stream") -> None:
        """Wait for everything that is on the other stream now."""
        if not self.order.left_out():
            self.see(stream.clock)

    def wait_event(self, event: "Event") -> None:
        """Wait for an event."""
        if not self.order.left_out():
            self.see(event.clock)

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Return an event after everything that is on this stream now."""
        event = event or Event(self.order)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Make the host wait."""
        self.order.synchronize("stream", self.clock)

    def query(self) -> bool:
        """Whether all is over: nothing runs late here, but the host knows of nothing that it has not waited for."""
        return False


class Event:
    """A point in a stream. Its methods are those of ``torch.cuda.Event``."""

    def __init__(self, order: Device, **_: Any) -> None:
        self.order = order
        self.clock: Clock = {}
        self.at = 0.0  # seconds of the host, which runs everything here

    def record(self, stream: Stream | None = None) -> None:
        """Move the event after everything that is on the stream now."""
        self.at = time.perf_counter()
        stream = stream or self.order.current
        stream.see(self.order.host)
        self.clock = {} if self.order.left_out() else dict(stream.clock)

    def wait(self, stream: Stream | None = None) -> None:
        """Make a stream wait for the event."""
        (stream or self.order.current).wait_event(self)

    def synchronize(self) -> None:
        """Make the host wait."""
        self.order.synchronize("event", self.clock)

    def elapsed_time(self, later: "Event") -> float:
        """Return the milliseconds from this event to a later one."""
        return 1e3 * (later.at - self.at)

    def query(self) -> bool:
        """See ``Stream.query``."""
        return False


class Work:
    """A collective on its way."""

    def __init__(self, order: Device, work: Any, clock: Clock, tensors: list[Tensor]) -> None:
        self._order, self._work, self._clock = order, work, clock
        self._tensors = tensors
        order.on_their_way.add(self)

    def wait(self, *args: Any) -> bool:
        """Order the current stream after it, each time; then its tensors may be freed."""
        with _disable_current_modes():
            done: bool = self._work.wait(*args)
        if not self._order.left_out():
            self._order.current.see(self._clock)
            self._order.on_their_way.discard(self)
            self._tensors.clear()
        return done

    def __getattr__(self, name: str) -> Any:
        if name == "block_current_stream":
            raise AttributeError(name)
        return getattr(self._work, name)
