# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Streams, events and handles of a simulated device, and which accesses to the same bytes of memory lack an order.
Each stream has a vector clock; see Note [How order is checked] in ``stream_order.py``. A call that is left out
(``Order.left_out``) orders nothing, but data arrive all the same."""

import functools
import sys
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

Clock = dict[int, int]  # number of a stream: how many of its operations are known to be over
Span = tuple[int, int]  # bytes of a storage, from and to

_MOST_SPANS = 256  # of one tensor; more are taken as one that holds them all
_FRAMES = 3  # of a place that is named
_SIMULATION = ("calls", "stream_order", "streams", "device_on_host/accelerator", "device_on_host/backend")
_SIMULATION = tuple(f"/harness/{name}.py" for name in _SIMULATION)


class Access(NamedTuple):
    """The accesses of an operation to a storage."""

    stream: Any  # a ``Stream``
    number: int  # of the operation, in its stream
    writes: bool
    spans: tuple[Span, ...]
    operation: str
    where: str

    def __str__(self) -> str:
        did = "wrote" if self.writes else "read"
        return f"{self.operation} {did} on {self.stream.name} at {self.where}"


@dataclass
class Memory:
    """A storage."""

    home: Any  # the stream that it was allocated on
    accesses: list[Access] = field(default_factory=list)
    last: dict[int, Access] = field(default_factory=dict)  # by number of the stream
    recorded: set[Any] = field(default_factory=set)  # when it is freed, it waits for what is on them
    known: Clock = field(default_factory=dict)  # what was on these
    freed: str = ""  # where

    def add(self, access: Access) -> tuple[int, list[Access]]:
        """Note an access; how many before it, on other streams, it must not run beside, and those that it may."""
        others = [other for other in self.accesses if access.stream is not other.stream]
        others = [other for other in others if access.writes or other.writes]
        conflicting = [other for other in others if _overlap(access.spans, other.spans)]
        self.accesses = [other for other in self.accesses if not _replaces(access, other)]
        self.accesses.append(access)
        self.last[access.stream.number] = access
        return len(conflicting), [other for other in conflicting if not access.stream.has_seen(other)]

    def in_use(self) -> list[Access]:
        """Return accesses that may run concurrently with the next owner of the memory."""
        return [
            access
            for number, access in self.last.items()
            if not self.home.has_seen(access) and self.known.get(number, 0) < access.number
        ]


def byte_spans(tensor: Tensor) -> tuple[Span, ...]:
    if not tensor.numel():
        return ()
    size, width = tensor.element_size(), 1
    rest = []  # dimensions that are not one stretch with those inside of them
    for count, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda dim: dim[1]):
        if stride == width and not rest:
            width *= count
        elif count > 1 and stride:
            rest.append((count, stride))
    starts = [tensor.storage_offset()]
    for count, stride in rest:
        if len(starts) * count > _MOST_SPANS:
            last = starts[-1] + sum((n - 1) * s for n, s in rest) + width
            return ((tensor.storage_offset() * size, last * size),)
        starts = [start + number * stride for start in starts for number in range(count)]
    return tuple((start * size, (start + width) * size) for start in starts)


def _overlap(some: tuple[Span, ...], others: tuple[Span, ...]) -> bool:
    return any(a < d and c < b for a, b in some for c, d in others)


def _replaces(access: Access, other: Access) -> bool:
    """Return whether later accesses need not be compared with another access before this one."""
    if access.spans != other.spans or not access.stream.has_seen(other):
        return False
    return access.writes or (not other.writes and access.stream is other.stream)


def merge(clock: Clock, other: Clock) -> None:
    for stream, number in tuple(other.items()):  # a copy: threads of autograd and of saves change it
        if clock.get(stream, 0) < number:
            clock[stream] = number


@functools.cache
def _named(path: str) -> str:
    package = next((item for item in ("/deepspeed_ext/", "/deepspeed/", "/tests/") if item in path), "")
    return path.rpartition(package)[2] if package and not path.endswith(_SIMULATION) else ""


def place_of_call() -> str:
    """Return the innermost places of a call, in DeepSpeed, in ours and in tests."""
    places: list[str] = []
    frame: Any = sys._getframe(2)
    while frame is not None and len(places) < _FRAMES:
        if path := _named(frame.f_code.co_filename):
            places.append(f"{path}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(places)


class Stream:
    """One of a simulated device. Its methods are those of ``torch.cuda.Stream``."""

    def __init__(self, order: Any, name: str) -> None:  # an ``Order``
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
        """Order the following operations after all of these."""
        merge(self.clock, clock)

    def has_seen(self, access: Access) -> bool:
        """Return whether the next operation is ordered after the access."""
        return self.clock.get(access.stream.number, 0) >= access.number

    def wait_stream(self, stream: "Stream") -> None:
        if not self.order.left_out():
            self.see(stream.clock)

    def wait_event(self, event: "Event") -> None:
        if not self.order.left_out():
            self.see(event.clock)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event(self.order)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.order.synchronize("stream", self.clock)

    def query(self) -> bool:
        """Whether all is over: nothing runs late here, but the host knows of nothing that it has not waited for."""
        return False


class Event:
    """A point in a stream. Its methods are those of ``torch.cuda.Event``."""

    def __init__(self, order: Any, **_: Any) -> None:
        self.order = order
        self.clock: Clock = {}
        self.at = 0.0  # seconds of the host, which runs everything here

    def record(self, stream: Stream | None = None) -> None:
        self.at = time.perf_counter()
        stream = stream or self.order.current
        stream.see(self.order.host)
        self.clock = {} if self.order.left_out() else dict(stream.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.order.current).wait_event(self)

    def synchronize(self) -> None:
        self.order.synchronize("event", self.clock)

    def elapsed_time(self, later: "Event") -> float:
        return 1e3 * (later.at - self.at)

    def query(self) -> bool:
        return False


class Work:
    """A collective on its way."""

    def __init__(self, order: Any, work: Any, clock: Clock, tensors: list[Tensor]) -> None:
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
