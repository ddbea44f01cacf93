# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What was recorded of a rank's steps, in seconds. Pure.

The *training lane* is the thread, or on a device the stream, that computes. Other threads and streams complete
transfers beside it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WITHIN, BETWEEN = "within", "between"
HOPS = (WITHIN, BETWEEN)
FORWARD, BACKWARD, UPDATE, HANDLING = "forward", "backward", "update", "other"

Interval = tuple[float, float]


def hop_of(ranks: Sequence[int], group_size: int) -> str:
    """Return which hop the ranks of a process group are: within if all are in one group; neither if there is one."""
    if len(ranks) == 1:
        return ""
    return WITHIN if len({rank // group_size for rank in ranks}) == 1 else BETWEEN


@dataclass(frozen=True)
class Communication:
    """One communication, from its start until something has waited for it.

    Attributes:
        name: of the operation.
        hop: "within" a group, "between" groups; empty where it has one rank.
        nbytes: that this rank receives.
        begin, end: seconds. It may have ended before ``end``, if nothing waited for it until then.
    """

    name: str
    hop: str
    nbytes: float
    begin: float
    end: float


@dataclass(frozen=True)
class Wait:
    """A time in which a thread or a stream waited.

    Attributes:
        begin, end: seconds.
        trains: whether it was the training lane; else it completes transfers.
        communication: for which it waited; None for whatever another thread or stream had to do.
        module: whose parameters were waited for; empty if that is not known.
    """

    begin: float
    end: float
    trains: bool
    communication: Communication | None = None
    module: str = ""


@dataclass(frozen=True)
class Phase:
    """A time in which the training lane did something: forward, backward, the update; or handled what communicates
    (other), inside one of these."""

    kind: str
    begin: float
    end: float
    module: str = ""


@dataclass(frozen=True)
class Step:
    """An optimizer step, from the end of the one before to its own.

    Attributes:
        number: of the step, counted from 1 as DeepSpeed does.
        begin, end: seconds.
    """

    number: int
    begin: float
    end: float
    phases: tuple[Phase, ...] = ()
    waits: tuple[Wait, ...] = ()
    communications: tuple[Communication, ...] = ()

    @property
    def seconds(self) -> float:
        """Return how long it took."""
        return self.end - self.begin

    def of_kinds(self, *kinds: str) -> list[Interval]:
        """Return the intervals in which the training lane was in phases of these kinds."""
        return union((one.begin, one.end) for one in self.phases if one.kind in kinds)


# Intervals ########################################################################################


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same times as intervals that are sorted, not empty, and do not touch."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Return the seconds of intervals that do not overlap one another."""
    return sum(end - begin for begin, end in intervals)


def common(some: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """Return the times that are in both; each is a union."""
    first, second = list(some), list(others)
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            found.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(some: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """Return the times of the first that are not in the second; each is a union."""
    found: list[Interval] = []
    gone = list(others)
    for begin, end in some:
        for other_begin, other_end in gone:
            if other_end <= begin or other_begin >= end:
                continue
            if other_begin > begin:
                found.append((begin, other_begin))
            begin = max(begin, other_end)
        if begin < end:
            found.append((begin, end))
    return found
