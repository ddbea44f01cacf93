# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What streams have done to a memory: which accesses to the same bytes lack an order.

Each stream has a vector clock; see Note [How order is checked] in ``stream_order.py``.
"""

import sys
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

Clock = dict[int, int]  # number of a stream: how many of its operations are known to be over
Span = tuple[int, int]  # bytes of a storage, from and to

_MOST_SPANS = 256  # of one tensor; more are taken as one that holds them all
_FRAMES = 3  # of a place that is named
_SIMULATION = tuple(
    f"/harness/{name}.py"
    for name in (
        "stream_order",
        "streams",
        "memory_accesses",
        "device_on_host/accelerator",
        "device_on_host/backend",
    )
)


class Access(NamedTuple):
    """What an operation has done to a storage."""

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
        conflicting = [
            other
            for other in self.accesses
            if access.stream is not other.stream
            and (access.writes or other.writes)
            and _overlap(access.spans, other.spans)
        ]
        self.accesses = [other for other in self.accesses if not _replaces(access, other)]
        self.accesses.append(access)
        self.last[access.stream.number] = access
        return len(conflicting), [other for other in conflicting if not access.stream.has_seen(other)]

    def in_use(self) -> list[Access]:
        """Accesses that may run beside what gets the memory next."""
        return [
            access
            for number, access in self.last.items()
            if not self.home.has_seen(access) and self.known.get(number, 0) < access.number
        ]


def byte_spans(tensor: Tensor) -> tuple[Span, ...]:
    """The bytes of a tensor in its storage."""
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
    """Whether what comes after an access need not look at another one before it."""
    if access.spans != other.spans or not access.stream.has_seen(other):
        return False
    return access.writes or (not other.writes and access.stream is other.stream)


def merge(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


def place_of_call() -> str:
    """Return the innermost places of a call, in DeepSpeed, in ours and in tests."""
    places: list[str] = []
    frame: Any = sys._getframe(2)
    while frame is not None and len(places) < _FRAMES:
        path = frame.f_code.co_filename
        for package in ("/deepspeed_ext/", "/deepspeed/", "/tests/"):
            if package in path and not path.endswith(_SIMULATION):
                places.append(f"{path.rpartition(package)[2]}:{frame.f_lineno}")
                break
        frame = frame.f_back
    return " < ".join(places)
