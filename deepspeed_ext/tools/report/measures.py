# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Recorded steps of a rank: phases, waits and communications in seconds, and measures derived from them. Pure.

The *training lane* is the thread, or on a device the stream, that computes. Other threads and streams complete
transfers concurrently.

Note [Exposed seconds]
    A step consists of the training lane's compute (forward and backward), update, handling of communication, and
    waits. Communication that it waits for is *exposed*; the rest is hidden by compute.

    A wait for a communication's handle is charged to its hop. A wait for another thread or stream is charged to the
    communication for which that thread waits at the time, or else to communication on the wire at the time: between
    groups before within, since a transfer with both hops on the wire waits for the slower link. The rest of a wait
    belongs to no hop: other ranks are late, or the other thread computes.

    So the parts of a step are compute, exposed within, exposed between, the update, and the rest: handling, such
    waits, the data loader, and the script.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

WITHIN, BETWEEN = "within", "between"
HOPS = (WITHIN, BETWEEN)
FORWARD, BACKWARD, UPDATE, HANDLING = "forward", "backward", "update", "other"
COMPUTE, OTHER = "compute", "other"
PARTS = (COMPUTE, WITHIN, BETWEEN, UPDATE, OTHER)
_MODULES = 50  # maximum number of listed modules
_MIN_DRAWN_WAIT = 1e-6  # seconds: a shorter wait is not drawn
_DRAWN_AS = {"gather": "gather", "reduce": "reduce", "send": "copy", "recv": "copy", "broadcast": "gather"}

Interval = tuple[float, float]
Moment = Any  # a moment of a clock while steps are recorded, then seconds
Charges = Mapping[tuple[str, str, str], float]  # seconds by operation, hop, and module


def hop_of(ranks: Sequence[int], group_size: int) -> str:
    """Return the hop of a process group: within if all its ranks are in one group; empty for a single rank."""
    if len(ranks) == 1:
        return ""
    return WITHIN if len({rank // group_size for rank in ranks}) == 1 else BETWEEN


@dataclass
class Communication:
    """One communication, from its start until the first completed wait for it.

    Attributes:
        name: name of the operation.
        hop: "within" a group, "between" groups; empty for a single rank.
        nbytes: bytes that this rank receives.
        begin, end: start and first wait; the communication may have ended before ``end``.
    """

    name: str
    hop: str
    nbytes: float
    begin: Moment
    end: Moment


@dataclass
class Wait:
    """An interval in which a thread or a stream waited.

    Attributes:
        begin, end: bounds of the interval.
        on_training_lane: whether the training lane waited; otherwise a thread or stream that completes transfers.
        communication: the awaited communication; None for a wait for another thread or stream.
        module: module whose parameters were awaited; empty if unknown.
    """

    begin: Moment
    end: Moment
    on_training_lane: bool
    communication: Communication | None = None
    module: str = ""


@dataclass
class Phase:
    """An interval of the training lane: forward, backward, the update; or, inside one of these, handling of
    communication."""

    kind: str
    begin: Moment
    end: Moment
    module: str = ""


@dataclass(frozen=True)
class Step:
    """An optimizer step, from the end of the previous one to its own.

    Attributes:
        number: number of the step, counted from 1 as in DeepSpeed.
        begin, end: seconds.
    """

    number: int
    begin: float
    end: float
    phases: Sequence[Phase] = ()
    waits: Sequence[Wait] = ()
    communications: Sequence[Communication] = ()

    @property
    def seconds(self) -> float:
        """The duration."""
        return self.end - self.begin

    @property
    def waiting(self) -> list[Interval]:
        """Intervals in which the training lane waits."""
        return union((wait.begin, wait.end) for wait in self.waits if wait.on_training_lane)

    def phase_intervals(self, *kinds: str) -> list[Interval]:
        """Return the intervals in which the training lane was in phases of these kinds."""
        return union((phase.begin, phase.end) for phase in self.phases if phase.kind in kinds)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as sorted, non-empty intervals that do not touch."""
    united: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if united and begin <= united[-1][1]:
            united[-1] = (united[-1][0], max(end, united[-1][1]))
        else:
            united.append((begin, end))
    return united


def length(intervals: Iterable[Interval]) -> float:
    """Return the seconds of intervals that do not overlap each other."""
    return sum(end - begin for begin, end in intervals)


def subtract(intervals: Iterable[Interval], removed: Sequence[Interval]) -> list[Interval]:
    """Return the parts of ``intervals`` outside ``removed``; each argument must be a ``union``."""
    remaining: list[Interval] = []
    for begin, end in intervals:
        for other_begin, other_end in removed:
            if other_end <= begin or other_begin >= end:
                continue
            if other_begin > begin:
                remaining.append((begin, other_begin))
            begin = max(begin, other_end)
        if begin < end:
            remaining.append((begin, end))
    return remaining


# Measures #########################################################################################


def charge_waits(step: Step) -> Charges:
    """Return the waits of a step in seconds, by operation, hop and module; see Note [Exposed seconds]."""
    charges: dict[tuple[str, str, str], float] = defaultdict(float)
    for_handles = [wait for wait in step.waits if wait.on_training_lane and wait.communication is not None]
    for wait in for_handles:
        assert wait.communication is not None
        charges[wait.communication.name, wait.communication.hop, wait.module] += wait.end - wait.begin
    charged = union((wait.begin, wait.end) for wait in for_handles)
    other_lanes = [(wait.communication, wait.begin, wait.end) for wait in step.waits if not wait.on_training_lane]
    wire = [(sent, sent.begin, sent.end) for sent in sorted(step.communications, key=lambda sent: sent.hop != BETWEEN)]
    for wait in (wait for wait in step.waits if wait.on_training_lane and wait.communication is None):
        # Seconds that are charged to a handle must not be charged again.
        uncharged = subtract(union([(wait.begin, wait.end)]), charged)
        for sent, begin, end in [*other_lanes, *wire]:
            if sent is None or not sent.hop or begin >= wait.end or end <= wait.begin:
                continue
            remaining = subtract(uncharged, [(begin, end)])
            if remaining != uncharged:
                charges[sent.name, sent.hop, wait.module] += length(uncharged) - length(remaining)
                uncharged = remaining
    return charges


def _sum_charges(charges: Charges, *conditions: tuple[int, str]) -> float:
    """Return the seconds of charges whose keys match all (position, name) pairs."""
    return sum(seconds for key, seconds in charges.items() if all(key[index] == name for index, name in conditions))


def step_parts(step: Step, charges: Charges | None = None) -> dict[str, float]:
    """Return the seconds of each of ``PARTS``, which add up to the step's."""
    charges = charge_waits(step) if charges is None else charges
    # Waits and handling interrupt forward, backward and update, and would be counted twice.
    elsewhere = union([*step.waiting, *step.phase_intervals(HANDLING)])
    seconds_of = {
        COMPUTE: length(subtract(step.phase_intervals(FORWARD, BACKWARD), elsewhere)),
        UPDATE: length(subtract(step.phase_intervals(UPDATE), elsewhere)),
        **{hop: _sum_charges(charges, (1, hop)) for hop in HOPS},
    }
    return {part: seconds_of.get(part, step.seconds - sum(seconds_of.values())) for part in PARTS}


def pace(step: Step, micro_batches: int) -> float | None:
    """Return the seconds per micro-batch before the last, without communication between groups; None if unknown.

    See Note [Pace] in ``zero/pace.py``.
    """
    ends = sorted(phase.end for phase in step.phases if phase.kind == BACKWARD)
    if not len(ends) == micro_batches >= 2:
        return None
    end = ends[-2]
    waits = [wait for wait in step.waits if wait.begin < end or not wait.on_training_lane]
    between = _sum_charges(charge_waits(replace(step, waits=waits)), (1, BETWEEN))
    return (end - step.begin - between) / (micro_batches - 1)


def summary(steps: Sequence[Step]) -> dict[str, Any]:
    """Return the means of recorded steps as plain values: see ``report.json`` in the README."""
    charged = [charge_waits(step) for step in steps]
    by_part = [step_parts(step, charges) for step, charges in zip(steps, charged, strict=True)]
    means: dict[tuple[str, str, str], float] = defaultdict(float)
    for charges in charged:
        for key, seconds in charges.items():
            means[key] += seconds / len(steps)
    sent: dict[tuple[str, str], list[Communication]] = defaultdict(list)
    for step in steps:
        for communication in step.communications:
            sent[communication.name, communication.hop].append(communication)
    return {
        "seconds": [step.seconds for step in steps],
        "waiting": fmean(length(step.waiting) for step in steps),
        "parts": {part: fmean(of_step[part] for of_step in by_part) for part in PARTS},
        "hops": _hops(sent, means, len(steps)),
        "operations": _operations(sent, means, len(steps)),
        "modules": _modules(means),
    }


Sent = Mapping[tuple[str, str], Sequence[Communication]]  # by operation and hop


def _busy(sent: Iterable[Communication], steps: int) -> float:
    """Return the seconds per step in which at least one of these communications is on the wire."""
    return length(union((communication.begin, communication.end) for communication in sent)) / steps


def _hops(sent: Sent, means: Charges, steps: int) -> list[dict[str, Any]]:
    rows = []
    for hop in HOPS:
        communications = [communication for (_, of), group in sent.items() if of == hop for communication in group]
        if communications:
            nbytes, busy = (
                sum(communication.nbytes for communication in communications) / steps,
                _busy(communications, steps),
            )
            rate = nbytes / busy if busy else None
            rows.append(
                {"hop": hop, "bytes": nbytes, "busy": busy, "exposed": _sum_charges(means, (1, hop)), "rate": rate}
            )
    return rows


def _operations(sent: Sent, means: Charges, steps: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "hop": hop,
            "count": len(communications) / steps,
            "bytes": sum(communication.nbytes for communication in communications) / steps,
            "busy": _busy(communications, steps),
            "exposed": _sum_charges(means, (0, name), (1, hop)),
        }
        for (name, hop), communications in sorted(sent.items())
    ]
    return sorted(rows, key=lambda row: (row["exposed"], row["busy"]), reverse=True)


def _modules(means: Charges) -> list[dict[str, Any]]:
    names = sorted({module for _, _, module in means if module})
    rows: list[dict[str, Any]] = [{"module": name, "exposed": _sum_charges(means, (2, name))} for name in names]
    return sorted(rows, key=lambda row: float(row["exposed"]), reverse=True)[:_MODULES]


def median_step(steps: Sequence[Step]) -> Step:
    """Return the step with the median duration; of two middle steps, the longer."""
    return sorted(steps, key=lambda step: step.seconds)[len(steps) // 2]


def timeline(step: Step) -> list[dict[str, Any]]:
    """Return the lanes of a step in the format of ``report.json``, in seconds from its begin."""

    def span(of: Phase | Wait | Communication, name: str, kind: str, *rest: Any) -> list[Any]:
        return [round(of.begin - step.begin, 7), round(of.end - step.begin, 7), name, kind, *rest]

    training = [span(phase, phase.kind, phase.kind, None, phase.module or None) for phase in step.phases]
    for wait in step.waits:
        if wait.on_training_lane and wait.end - wait.begin > _MIN_DRAWN_WAIT:
            name = "wait" if wait.communication is None else f"wait for {wait.communication.name}"
            training.append(span(wait, name, "wait", None, wait.module or None))
    lanes = [{"lane": "training", "spans": sorted(training, key=lambda row: (row[0], -row[1]))}]
    for hop in HOPS:
        spans = []
        for sent in (sent for sent in step.communications if sent.hop == hop):
            kind = next((kind for part, kind in _DRAWN_AS.items() if part in sent.name), "reduce")
            spans.append(span(sent, sent.name, kind, sent.nbytes, None))
        if spans:
            lanes.append({"lane": hop, "spans": spans})
    return lanes
