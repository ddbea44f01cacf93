# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What runs at the same time on compute, on the link inside groups and on the link between them. Pure.

A task occupies one resource for some seconds, after the tasks that it needs. A resource serves one task at a time, in
the order in which they became ready. While compute waits, some link is busy: so the seconds of a timeline are what
compute takes, and what of each link is *exposed*, that is, runs while compute waits.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Resource(Enum):
    """What a task occupies."""

    COMPUTE = "compute"
    WITHIN = "within"
    BETWEEN = "between"


@dataclass(frozen=True)
class Usage:
    """What a timeline takes, by part. Parts are the labels of what runs on compute, and the names of the links.

    Attributes:
        exposed: seconds of each part that nothing hides; they add up to the whole.
        busy: seconds that tasks of each part take.
    """

    exposed: dict[str, float]
    busy: dict[str, float]

    def further(self, before: "Usage", times: int) -> "Usage":
        """Return the usage after ``times`` more of what came on top of ``before``."""

        def extended(now: dict[str, float], then: dict[str, float]) -> dict[str, float]:
            return {part: now[part] + times * (now[part] - then[part]) for part in now}

        return Usage(extended(self.exposed, before.exposed), extended(self.busy, before.busy))


class Timeline:
    """Tasks, and when they run.

    Args:
        parts: all labels, in the order in which usages list them.
    """

    def __init__(self, parts: Iterable[str]) -> None:
        self._parts = tuple(parts)
        self._tasks: list[tuple[Resource, str, float, bool]] = []
        self._needs: list[int] = []  # how many
        self._then: list[list[int]] = []

    def add(
        self,
        resource: Resource,
        seconds: float,
        after: Iterable[int] = (),
        part: str | None = None,
        yields: bool = False,
    ) -> int:
        """Add a task, and return its number.

        Args:
            resource: what it occupies.
            seconds: how long.
            after: numbers of tasks that end before it begins.
            part: what it counts as; by default the name of the resource.
            yields: whether others that became ready at the same time go first.
        """
        number, needs = len(self._tasks), set(after)
        self._tasks.append((resource, part or resource.value, seconds, yields))
        self._needs.append(len(needs))
        self._then.append([])
        for earlier in needs:
            self._then[earlier].append(number)
        return number

    def usage(self) -> Usage:
        """Run all tasks."""
        waits, ready = list(self._needs), [0.0] * len(self._tasks)
        free = dict.fromkeys(Resource, 0.0)
        spans: dict[Resource, list[tuple[float, float]]] = {resource: [] for resource in Resource}
        busy, exposed = dict.fromkeys(self._parts, 0.0), dict.fromkeys(self._parts, 0.0)
        # What a task makes ready is not ready before the task was: so tasks leave in the order of their readiness.
        queue = [(0.0, self._tasks[number][-1], number) for number, count in enumerate(waits) if not count]
        heapq.heapify(queue)
        while queue:
            since, _, number = heapq.heappop(queue)
            resource, part, seconds, _ = self._tasks[number]
            begin = max(since, free[resource])
            end = free[resource] = begin + seconds
            busy[part] += seconds
            if resource == Resource.COMPUTE:
                exposed[part] += seconds
            if seconds:
                spans[resource].append((begin, end))
            for later in self._then[number]:
                ready[later] = max(ready[later], end)
                waits[later] -= 1
                if not waits[later]:
                    heapq.heappush(queue, (ready[later], self._tasks[later][-1], later))
        gaps = _gaps(spans[Resource.COMPUTE], max(free.values()))
        waited = sum(end - begin for begin, end in gaps)
        between = _common(gaps, spans[Resource.BETWEEN])
        exposed[Resource.BETWEEN.value] += between
        exposed[Resource.WITHIN.value] += waited - between
        return Usage(exposed, busy)


def _gaps(spans: list[tuple[float, float]], end: float) -> list[tuple[float, float]]:
    """Return what lies between spans in order, from 0 to the end."""
    edges = [0.0, *(edge for span in spans for edge in span), end]
    return [(begin, stop) for begin, stop in zip(edges[::2], edges[1::2], strict=True) if stop > begin]


def _common(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """Return how long spans of both lists, each in order, lie over one another."""
    total, first = 0.0, 0
    for begin, end in some:
        while first < len(others) and others[first][1] <= begin:
            first += 1
        at = first
        while at < len(others) and others[at][0] < end:
            total += min(end, others[at][1]) - max(begin, others[at][0])
            at += 1
    return total
