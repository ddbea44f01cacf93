# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Simulates a step of ``planner.closed_form`` task by task: the oracle of its closed form. Pure.

A task occupies one resource for some seconds, after the tasks that it needs. A resource serves one task at a time, in
the order in which they became ready. So the time of a timeline is the time of compute, plus the time for which compute
waits for tasks of the links. The part of these tasks that falls into a wait is *exposed*.

Note [Timeline of a step]
    A step begins when parameters have been updated, and ends with the next update. Nothing is on the wire at that
    time: an update waits for all reductions, since it needs their norm, and the forward before it has waited for all
    parameters of the previous update. So steps do not overlap, and the time of one step is the period.

    Layers have the same size and take the same time. Forward is a third of a micro-step's compute, backward the rest.

    - Updated parameters come in the order of the forward. Either each layer waits for its own, or the first layer
      waits for all of them; in the latter case, if gradients do not overlap either, the two hops run one after the
      other.
    - Sharded parameters are gathered a layer ahead. A layer's gather starts when the previous layer could begin if its
      own parameters were there; on a host, which waits for these first, when the previous layer does begin.
    - Gradients are reduced by bucket, starting with the model's end. A bucket leaves when the backward of its layers
      is over. In each micro-step (g = I, G), the next micro-step waits for them. What crosses at the boundary
      (g = I, N) leaves during the last backward, after its bucket has been reduced in that micro-step. Sums that come
      back follow the reduction of their bucket.
    - If gradients do not overlap, compute waits while a bucket is reduced, over one hop after the other. What crosses
      at the boundary does so after the backward.
    - Matrices that the step needs whole (Muon's) go to their owners in rounds after all reductions. A round is
      orthogonalized when it has arrived, and its updates go back while the next round is orthogonalized.
    - In a gather, the hop between groups comes first; in a reduction, the hop within the group.
    - What is in host memory is copied to the device before its hops, and what has arrived is copied to the host after
      them: each direction by an engine of its own, or, from pageable memory, by the cores that compute.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from deepspeed_ext.planner.closed_form import FORWARD, HOST, PARTS, UPDATE, Move, Step

SIMULATED = 4  # micro-steps that are run: if there are more, those in the middle are alike


def simulated(step: Step, most: int = SIMULATED) -> "Usage":
    """Run the timeline of a step, and return the seconds that each part adds to it."""
    found = _Tasks(step, min(step.accumulation, most)).usage()
    if step.accumulation <= most:
        return found
    return found.further(_Tasks(step, most - 1).usage(), step.accumulation - most)


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


class _Tasks:
    """The tasks of a step with a number of micro-steps.

    Methods return numbers of tasks that whatever comes next must wait for, and take such numbers as ``after``.
    """

    def __init__(self, step: Step, micro_steps: int) -> None:
        self._step, self._overlap = step, step.overlap
        self._micro_steps = micro_steps
        self._line = Timeline(PARTS)
        self._within = Resource.WITHIN if step.overlap.within else Resource.COMPUTE
        self._layers = step.layers

    def usage(self) -> Usage:
        arrived = self._updates()
        before: list[int] = []
        for number in range(self._micro_steps):
            last = number + 1 == self._micro_steps
            before = self._micro_step(before, arrived, last)
            arrived = [[] for _ in range(self._layers)]
        self._line.add(Resource.COMPUTE, self._step.update, self._exchange(before), UPDATE)
        return self._line.usage()

    def _exchange(self, before: list[int]) -> list[int]:
        """Add the rounds of Muon's matrices; return the tasks after which all updates are back."""
        move, ends = self._step.exchange, list(before)
        if not (move.within or move.between or self._step.orthogonalize):
            return before
        for _ in range(move.units):
            there = self._round(before)
            done = [self._line.add(Resource.COMPUTE, self._step.orthogonalize / move.units, there, UPDATE)]
            ends += self._round(done)
        return ends

    def _round(self, after: list[int]) -> list[int]:
        """Add one direction of a round, to ranks inside the group and to others at the same time."""
        move, ends = self._step.exchange, []
        hops = ((self._within, Resource.WITHIN, move.within), (Resource.BETWEEN, Resource.BETWEEN, move.between))
        for resource, part, seconds in hops:
            if seconds:
                ends.append(self._line.add(resource, seconds / (2 * move.units), after, part.value))
        return ends or after

    def _updates(self) -> list[list[int]]:
        """Add gathers of updated parameters; return, for each layer, the tasks after which it has its own."""
        move, layers = self._step.updates, self._layers
        one_by_one = not (self._overlap.updates or self._overlap.gradients)
        ends: list[list[int]] = []
        for _ in range(move.units):
            ends.append(self._unit(move, ends[-1] if one_by_one and ends else []))
        if not self._overlap.updates:
            return [[task for end in ends for task in end]] * layers
        return [ends[math.ceil((layer + 1) * move.units / layers) - 1] for layer in range(layers)]

    def _micro_step(self, before: list[int], arrived: Sequence[list[int]], last: bool) -> list[int]:
        layers, overlap = self._layers, self._overlap
        reduced: list[int] = []
        gathered = self._gather(0, [*before, *arrived[0]])
        for place, layer in enumerate([*range(layers), *reversed(range(layers))]):
            forward = place < layers
            begins = [*before, *gathered, *(arrived[layer] if forward else ())]
            ahead = arrived[layer + 1] if place + 1 < layers else []
            gathered = self._gather(place + 1, [*(before if overlap.within else begins), *ahead])
            share = FORWARD if forward else 1 - FORWARD
            before = [self._line.add(Resource.COMPUTE, share * self._step.compute / layers, begins)]
            leaving = 0 if forward else self._due(place + 1 - layers) - self._due(place - layers)
            for _ in range(leaving):
                ends = self._unit(self._step.reduce, before, reduces=True)
                if overlap.gradients:
                    reduced += self._cross(ends) if last else ends
                else:
                    before = ends
        if last and not overlap.gradients:
            for _ in range(self._step.reduce.units):
                before = self._cross(before)
        return [*before, *reduced]

    def _due(self, layers: int) -> int:
        """Return how many buckets may leave after the backward of so many layers."""
        return layers * self._step.reduce.units // self._layers

    def _cross(self, after: list[int]) -> list[int]:
        """Add what a bucket sends at the boundary, and the sums that come back."""
        return self._unit(self._step.back, self._unit(self._step.cross, after, reduces=True))

    def _gather(self, place: int, after: list[int]) -> list[int]:
        """Add a gather of a layer's parameters; ``place`` counts layers in forward order, then in backward order."""
        move = self._step.use
        needed = (move.within or move.between or move.up) and place < self._step.gathers * self._layers
        return self._unit(move, after) if needed else []

    def _unit(self, move: Move, after: list[int], reduces: bool = False) -> list[int]:
        """Add the hops and the copies of one bucket of a move; return the tasks after which it has arrived."""
        hops = [(self._within, Resource.WITHIN, move.within), (Resource.BETWEEN, Resource.BETWEEN, move.between)]
        if not reduces:
            hops.reverse()
        after = self._copy(Resource.TO_DEVICE, move.up / move.units, after)
        ends = [] if self._overlap.at_once else after
        for resource, part, seconds in hops:
            if not seconds:
                continue
            # Reductions yield to gathers that a layer waits for.
            if self._overlap.at_once:
                ends.append(self._line.add(resource, seconds / move.units, after, part.value, reduces))
            else:
                ends = [self._line.add(resource, seconds / move.units, ends, part.value, reduces)]
        return self._copy(Resource.TO_HOST, move.down / move.units, ends or after)

    def _copy(self, direction: Resource, seconds: float, after: list[int]) -> list[int]:
        """Add a copy between host and device; return the tasks after which it has been made."""
        engine = direction if self._overlap.copies else Resource.COMPUTE
        return [self._line.add(engine, seconds, after, HOST)] if seconds else after
