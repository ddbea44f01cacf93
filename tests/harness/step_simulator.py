# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Simulates a step of ``planner.closed_form`` task by task: the oracle of its closed form. Pure.

A task occupies one resource for some seconds, after the tasks that it needs. A resource serves one task at a time, in
the order in which they became ready. So the time of a timeline is the time of compute, plus the time for which compute
waits for tasks of the links. The part of these tasks that falls into a wait is *exposed*.

Note [Timeline of a step]
    A step begins when parameters have been updated, and ends with the next update, which waits for all reductions. So
    steps do not overlap, and the time of one step is the period. Layers are equal.

    - Updated parameters come in the order of the forward. Either each layer waits for its own, or the first layer
      waits for all of them; in the latter case, if gradients do not overlap either, one hop runs after the other.
    - Sharded parameters are gathered a layer ahead. A layer's gather starts when the previous layer could begin if its
      own parameters were there; on a host, which waits for these first, when the previous layer does begin.
    - A bucket of gradients is reduced when the backward of its layers is over, from the model's end. In each
      micro-step (g = I, G), the next micro-step waits for them. What is reduced at the boundary (g = I, N) follows in
      the last backward, and then sums that come back. If gradients do not overlap, compute waits for each bucket, over
      one hop after the other, and the reduction at the boundary comes after the backward.
    - Matrices that the step needs whole (Muon's) go to their owners in rounds after all reductions. A round is
      orthogonalized when it has arrived, and its updates go back while the next round is orthogonalized.
    - In a gather, the hop between groups comes first; in a reduction, the hop within the group. Copies from the host
      come before the hops, and those to the host after them: each direction by an engine of its own, or, from pageable
      memory, by the cores that compute.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from deepspeed_ext.planner.closed_form import BETWEEN, COMPUTE, FORWARD, HOST, PARTS, UPDATE, WITHIN, Move, Step

SIMULATED = 4  # micro-steps that are run: if there are more, those in the middle are alike
TO_DEVICE, TO_HOST = "to the device", "to the host"  # resources beside compute and the links


class Usage(NamedTuple):
    """The seconds of a timeline, by part: those that nothing hides, whose sum is its time; and those of tasks."""

    exposed: dict[str, float]
    busy: dict[str, float]


def simulate_step(step: Step, most: int = SIMULATED) -> Usage:
    """Run the timeline of a step, and return the seconds that each part adds to it."""
    usage, further = _Tasks(step, min(step.accumulation, most)).usage(), step.accumulation - most
    if further <= 0:
        return usage
    pairs = zip(usage, _Tasks(step, most - 1).usage(), strict=True)
    return Usage(*({part: now[part] + further * (now[part] - before[part]) for part in now} for now, before in pairs))


@dataclass
class Task:
    """A task of a timeline: its resource and kind; the number of tasks that it needs, and the last of them to end;
    those that need it; when it is ready, and ends; the task that it waited for last."""

    number: int
    resource: str
    part: str
    seconds: float
    yields: bool
    needs: int
    last: "Task | None" = None
    then: list["Task"] = field(default_factory=list)
    ready: float = 0.0
    end: float = 0.0
    cause: "Task | None" = None

    @property
    def turn(self) -> tuple[float, bool, int]:
        """Its place in the queue of a resource."""
        return self.ready, self.yields, self.number


class Timeline:
    """Tasks, and when they run."""

    def __init__(self) -> None:
        self._tasks: list[Task] = []

    def add(
        self, resource: str, seconds: float, after: Iterable[int] = (), part: str | None = None, yields: bool = False
    ) -> int:
        """Add a task that begins after tasks with these numbers, and return its number. It counts as a ``part``, by
        default as its resource; with ``yields``, tasks that become ready at the same time go first."""
        needs = [self._tasks[number] for number in set(after)]
        task = Task(len(self._tasks), resource, part or resource, seconds, yields, len(needs))
        self._tasks.append(task)
        for earlier in needs:
            earlier.then.append(task)
        return task.number

    def usage(self) -> Usage:
        """Run all tasks, once, and return the seconds of each part."""
        served: dict[str, Task] = {}
        busy, exposed = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)
        # A task is never ready before the tasks that it needs were, so tasks are taken in the order of readiness.
        queue = [task.turn for task in self._tasks if not task.needs]
        heapq.heapify(queue)
        while queue:
            task = self._tasks[heapq.heappop(queue)[-1]]
            before = served.get(task.resource)
            free = before.end if before else 0.0
            task.cause = task.last if task.ready >= free else before
            task.end = max(task.ready, free) + task.seconds
            served[task.resource] = task
            busy[task.part] += task.seconds
            if task.resource == COMPUTE:
                exposed[task.part] += task.seconds
                cause = task.cause  # its wait is charged to the tasks that it waited for, going back in time
                while cause and cause.end > free:
                    exposed[cause.part] += min(cause.seconds, cause.end - free)
                    cause = cause.cause
            for later in task.then:
                if task.end >= later.ready:
                    later.ready, later.last = task.end, task
                later.needs -= 1
                if not later.needs:
                    heapq.heappush(queue, later.turn)
        return Usage(exposed, busy)


class _Tasks:
    """The tasks of a step with a number of micro-steps. Methods return numbers of tasks that whatever comes next must
    wait for, and take such numbers as ``after``."""

    def __init__(self, step: Step, micro_steps: int) -> None:
        self._step, self._overlap = step, step.overlap
        self._micro_steps = micro_steps
        self._line = Timeline()
        self._within = WITHIN if step.overlap.within else COMPUTE
        self._layers = step.layers

    def usage(self) -> Usage:
        arrived = self._updates()
        before: list[int] = []
        for number in range(self._micro_steps):
            before = self._micro_step(before, arrived, last=number + 1 == self._micro_steps)
            arrived = [[] for _ in range(self._layers)]
        self._line.add(COMPUTE, self._step.update, self._exchange(before), UPDATE)
        return self._line.usage()

    def _exchange(self, before: list[int]) -> list[int]:
        """Add the rounds of Muon's matrices; return the tasks after which all updates are back."""
        move, ends = self._step.exchange, list(before)
        if not (move.within or move.between or self._step.orthogonalize):
            return before
        for _ in range(move.units):
            node = self._round(before)
            ends += self._round([self._line.add(COMPUTE, self._step.orthogonalize / move.units, node, UPDATE)])
        return ends

    def _round(self, after: list[int]) -> list[int]:
        """Add one direction of a round, to ranks inside the group and to others at the same time."""
        move, ends = self._step.exchange, []
        for resource, part, seconds in ((self._within, WITHIN, move.within), (BETWEEN, BETWEEN, move.between)):
            if seconds:
                ends.append(self._line.add(resource, seconds / (2 * move.units), after, part))
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
        for location, layer in enumerate([*range(layers), *reversed(range(layers))]):
            forward = location < layers
            begins = [*before, *gathered, *(arrived[layer] if forward else ())]
            ahead = arrived[layer + 1] if location + 1 < layers else []
            gathered = self._gather(location + 1, [*(before if overlap.within else begins), *ahead])
            share = FORWARD if forward else 1 - FORWARD
            before = [self._line.add(COMPUTE, share * self._step.compute / layers, begins)]
            leaving = 0 if forward else self._due(location + 1 - layers) - self._due(location - layers)
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
        """Return the number of buckets that are ready after the backward of this number of layers."""
        return layers * self._step.reduce.units // self._layers

    def _cross(self, after: list[int]) -> list[int]:
        """Add the transfers of a bucket at the boundary, and those of the returned sums."""
        return self._unit(self._step.back, self._unit(self._step.cross, after, reduces=True))

    def _gather(self, place: int, after: list[int]) -> list[int]:
        """Add a gather of a layer's parameters; ``place`` counts layers in forward order, then in backward order."""
        move = self._step.use
        needed = (move.within or move.between or move.up) and place < self._step.gathers * self._layers
        return self._unit(move, after) if needed else []

    def _unit(self, move: Move, after: list[int], reduces: bool = False) -> list[int]:
        """Add the hops and the copies of one bucket of a move; return the tasks after which it has arrived."""
        hops = [(self._within, WITHIN, move.within), (BETWEEN, BETWEEN, move.between)]
        if not reduces:
            hops.reverse()
        after = self._copy(TO_DEVICE, move.up / move.units, after)
        ends = [] if self._overlap.at_once else after
        for resource, part, seconds in hops:
            if not seconds:
                continue
            # Reductions yield to gathers that a layer waits for.
            if self._overlap.at_once:
                ends.append(self._line.add(resource, seconds / move.units, after, part, reduces))
            else:
                ends = [self._line.add(resource, seconds / move.units, ends, part, reduces)]
        return self._copy(TO_HOST, move.down / move.units, ends or after)

    def _copy(self, direction: str, seconds: float, after: list[int]) -> list[int]:
        """Add a copy between host and device; return the tasks after which it has been made."""
        engine = direction if self._overlap.copies else COMPUTE
        return [self._line.add(engine, seconds, after, HOST)] if seconds else after
