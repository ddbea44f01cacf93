# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A timeline of compute, of links, and of copies from and to the host, which work at the same time. Pure.

A task occupies one resource for some seconds, after the tasks that it needs. A resource serves one task at a time, in
the order in which they became ready. So the time of a timeline is the time of compute, plus the time for which compute
waits for tasks of the links. The part of these tasks that falls into a wait is *exposed*.
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
    TO_DEVICE = "to the device"
    TO_HOST = "to the host"


@dataclass(frozen=True)
class Usage:
    """The seconds of a timeline, by part. Parts are the labels of tasks on compute, and the names of the links.

    Attributes:
        exposed: seconds of each part that nothing hides; their sum is the time of the timeline.
        busy: seconds that tasks of each part take.
    """

    exposed: dict[str, float]
    busy: dict[str, float]

    def further(self, before: "Usage", times: int) -> "Usage":
        """Return this usage plus ``times`` times its difference to ``before``."""

        def extended(now: dict[str, float], then: dict[str, float]) -> dict[str, float]:
            return {part: now[part] + times * (now[part] - then[part]) for part in now}

        return Usage(extended(self.exposed, before.exposed), extended(self.busy, before.busy))


class Timeline:
    """Tasks, and when they run.

    Args:
        parts: all parts, in the order in which usages list them.
    """

    def __init__(self, parts: Iterable[str]) -> None:
        self._parts = tuple(parts)
        self._tasks: list[tuple[Resource, str, float, bool]] = []
        self._needs: list[int] = []  # number of tasks that each one needs
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
            resource: the resource that it occupies.
            seconds: its duration.
            after: numbers of tasks that must end before it begins.
            part: the part that it counts as; by default, the name of the resource.
            yields: whether tasks that become ready at the same time go first.
        """
        number, needs = len(self._tasks), set(after)
        self._tasks.append((resource, part or resource.value, seconds, yields))
        self._needs.append(len(needs))
        self._then.append([])
        for earlier in needs:
            self._then[earlier].append(number)
        return number

    def usage(self) -> Usage:
        """Run all tasks, and return the seconds of each part."""
        count = len(self._tasks)
        waits, ready, last = list(self._needs), [0.0] * count, [-1] * count  # last: the task that made each one ready
        ends, causes = [0.0] * count, [-1] * count  # causes: the last task that each one waited for
        served: dict[Resource, int] = dict.fromkeys(Resource, -1)
        busy, exposed = dict.fromkeys(self._parts, 0.0), dict.fromkeys(self._parts, 0.0)
        # A task is never ready before the tasks that it needs were, so tasks are taken in the order of readiness.
        queue = [(0.0, self._tasks[number][-1], number) for number in range(count) if not waits[number]]
        heapq.heapify(queue)
        while queue:
            since, _, number = heapq.heappop(queue)
            resource, part, seconds, _ = self._tasks[number]
            before = served[resource]
            free = ends[before] if before >= 0 else 0.0
            causes[number] = last[number] if since >= free else before
            ends[number] = max(since, free) + seconds
            served[resource] = number
            busy[part] += seconds
            if resource == Resource.COMPUTE:
                exposed[part] += seconds
                self._expose(exposed, causes, ends, number, free)
            for later in self._then[number]:
                if ends[number] >= ready[later]:
                    ready[later], last[later] = ends[number], number
                waits[later] -= 1
                if not waits[later]:
                    heapq.heappush(queue, (ready[later], self._tasks[later][-1], later))
        return Usage(exposed, busy)

    def _expose(
        self, exposed: dict[str, float], causes: list[int], ends: list[float], waiting: int, since: float
    ) -> None:
        """Charge the seconds that a task of compute waited to the tasks that it waited for, going back in time."""
        number = causes[waiting]
        while number >= 0 and ends[number] > since:
            _, part, seconds, _ = self._tasks[number]
            exposed[part] += min(seconds, ends[number] - since)
            number = causes[number]
