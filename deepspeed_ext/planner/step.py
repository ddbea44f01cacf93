# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The timeline of a step: what each move waits for, and what runs beside it. Pure.

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

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_ext.planner.timeline import Resource, Timeline, Usage
from deepspeed_ext.strategy import Direction

LAYERS = 32  # most layers of a timeline: larger models are divided into this many parts
FORWARD = 1 / 3  # of a micro-step's compute
COMPUTE, UPDATE, HOST = Resource.COMPUTE.value, "update", "host"
PARTS = (COMPUTE, Resource.WITHIN.value, Resource.BETWEEN.value, UPDATE, HOST)
_SIMULATED = 4  # micro-steps that are run: if there are more, those in the middle are alike


@dataclass(frozen=True)
class Move:
    """A move of a whole state.

    Attributes:
        direction: which hop comes first.
        within, between: seconds over each hop.
        units: the number of its buckets.
        up, down: seconds of the copies to the device, and back to the host.
    """

    direction: Direction
    within: float
    between: float
    units: int
    up: float = 0.0
    down: float = 0.0


@dataclass(frozen=True)
class Moves:
    """The moves of a step, as ``Strategy.phases`` has them.

    Attributes:
        use: gather parameters for forward and backward.
        reduce: reduce gradients in a micro-step.
        cross, back: reduce gradients at the boundary, and gather their sums.
        updates: gather updated parameters.
        exchange: send matrices to their owners, and back; see ``Strategy.exchange``.
    """

    use: Move
    reduce: Move
    cross: Move
    back: Move
    updates: Move
    exchange: Move = Move(Direction.GATHER, 0.0, 0.0, 1)


@dataclass(frozen=True)
class Overlap:
    """What runs under compute; see Note [Timeline of a step].

    Attributes:
        gradients: whether reductions do.
        updates: whether gathers of updated parameters do.
        within: whether hops inside groups do; if not, the cores that compute run them.
        at_once: whether both hops of a message run at the same time, as in a collective over all ranks.
        copies: whether copies between host and device do.
    """

    gradients: bool = True
    updates: bool = True
    within: bool = True
    at_once: bool = False
    copies: bool = True


@dataclass(frozen=True)
class Step:
    """What is known of a step before its timeline is run.

    Attributes:
        moves: what is moved.
        layers: number of layers of the model.
        gathers: how often parameters are gathered in a micro-step: twice, or once if they are kept for the backward.
        accumulation: number of micro-steps.
        compute: seconds of a micro-step.
        update: seconds of the optimizer's step.
        overlap: what runs under compute.
        orthogonalize: seconds for which a rank orthogonalizes its matrices.
    """

    moves: Moves
    layers: int
    gathers: int
    accumulation: int
    compute: float
    update: float
    overlap: Overlap
    orthogonalize: float = 0.0

    def usage(self) -> Usage:
        """Run the timeline, and return the seconds that each part adds to the step."""
        found = _Tasks(self, min(self.accumulation, _SIMULATED)).usage()
        if self.accumulation <= _SIMULATED:
            return found
        return found.further(_Tasks(self, _SIMULATED - 1).usage(), self.accumulation - _SIMULATED)


class _Tasks:
    """The tasks of a step with a number of micro-steps.

    Methods return numbers of tasks that whatever comes next must wait for, and take such numbers as ``after``.
    """

    def __init__(self, step: Step, micro_steps: int) -> None:
        self._step, self._moves, self._overlap = step, step.moves, step.overlap
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
        move, ends = self._moves.exchange, list(before)
        if not (move.within or move.between or self._step.orthogonalize):
            return before
        for _ in range(move.units):
            there = self._round(before)
            done = [self._line.add(Resource.COMPUTE, self._step.orthogonalize / move.units, there, UPDATE)]
            ends += self._round(done)
        return ends

    def _round(self, after: list[int]) -> list[int]:
        """Add one direction of a round, to ranks inside the group and to others at the same time."""
        move, ends = self._moves.exchange, []
        hops = ((self._within, Resource.WITHIN, move.within), (Resource.BETWEEN, Resource.BETWEEN, move.between))
        for resource, part, seconds in hops:
            if seconds:
                ends.append(self._line.add(resource, seconds / (2 * move.units), after, part.value))
        return ends or after

    def _updates(self) -> list[list[int]]:
        """Add gathers of updated parameters; return, for each layer, the tasks after which it has its own."""
        move, layers = self._moves.updates, self._layers
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
                ends = self._unit(self._moves.reduce, before)
                if overlap.gradients:
                    reduced += self._cross(ends) if last else ends
                else:
                    before = ends
        if last and not overlap.gradients:
            for _ in range(self._moves.reduce.units):
                before = self._cross(before)
        return [*before, *reduced]

    def _due(self, layers: int) -> int:
        """Return how many buckets may leave after the backward of so many layers."""
        return layers * self._moves.reduce.units // self._layers

    def _cross(self, after: list[int]) -> list[int]:
        """Add what a bucket sends at the boundary, and the sums that come back."""
        return self._unit(self._moves.back, self._unit(self._moves.cross, after))

    def _gather(self, place: int, after: list[int]) -> list[int]:
        """Add a gather of a layer's parameters; ``place`` counts layers in forward order, then in backward order."""
        move = self._moves.use
        needed = (move.within or move.between or move.up) and place < self._step.gathers * self._layers
        return self._unit(move, after) if needed else []

    def _unit(self, move: Move, after: list[int]) -> list[int]:
        """Add the hops and the copies of one bucket of a move; return the tasks after which it has arrived."""
        hops = [(self._within, Resource.WITHIN, move.within), (Resource.BETWEEN, Resource.BETWEEN, move.between)]
        if move.direction == Direction.GATHER:
            hops.reverse()
        after = self._copy(Resource.TO_DEVICE, move.up / move.units, after)
        ends = [] if self._overlap.at_once else after
        yields = move.direction == Direction.REDUCE  # reductions yield to gathers that a layer waits for
        for resource, part, seconds in hops:
            if not seconds:
                continue
            if self._overlap.at_once:
                ends.append(self._line.add(resource, seconds / move.units, after, part.value, yields))
            else:
                ends = [self._line.add(resource, seconds / move.units, ends, part.value, yields)]
        return self._copy(Resource.TO_HOST, move.down / move.units, ends or after)

    def _copy(self, direction: Resource, seconds: float, after: list[int]) -> list[int]:
        """Add a copy between host and device; return the tasks after which it has been made."""
        engine = direction if self._overlap.copies else Resource.COMPUTE
        return [self._line.add(engine, seconds, after, HOST)] if seconds else after
