# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Recorded steps of a rank: phases, waits and communications in seconds, and the measures taken of them. Pure.

The *training lane* is the thread, or on a device the stream, that computes. Other threads and streams complete
transfers beside it.

Note [Exposed seconds]
    A step is what the training lane does: compute (forward and backward), the update, handling what communicates, and
    waits. What it waits for is *exposed*; the rest of a communication is hidden under compute.

    A wait for a communication's handle is charged to its hop. A wait for another thread, or another stream, is charged
    to what that one waits for meanwhile, or else to what is on the wire meanwhile: between groups before within, since
    a transfer that has both hops on the wire waits for the slower link. What is left of a wait is neither hop's: other
    ranks are late, or the other thread computes.

    So the parts of a step are compute, exposed within, exposed between, the update, and all that is left: handling,
    such waits, the data loader, and the script.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

WITHIN, BETWEEN = "within", "between"
HOPS = (WITHIN, BETWEEN)
FORWARD, BACKWARD, UPDATE, HANDLING = "forward", "backward", "update", "other"
COMPUTE, OTHER = "compute", "other"
PARTS = (COMPUTE, WITHIN, BETWEEN, UPDATE, OTHER)
_MODULES = 50  # listed at most
_SHORT = 1e-6  # seconds: a shorter wait is not drawn
_DRAWN_AS = {"gather": "gather", "reduce": "reduce", "send": "copy", "recv": "copy", "broadcast": "gather"}

Interval = tuple[float, float]
Moment = Any  # seconds; while steps are recorded, a moment of a clock
Charges = Mapping[tuple[str, str, str], float]  # seconds by operation, hop, and module


def hop_of(ranks: Sequence[int], group_size: int) -> str:
    """Return the hop of a process group: within if all its ranks are in one group; empty if it has one rank."""
    if len(ranks) == 1:
        return ""
    return WITHIN if len({rank // group_size for rank in ranks}) == 1 else BETWEEN


@dataclass
class Communication:
    """One communication, from its start until something has waited for it.

    Attributes:
        name: of the operation.
        hop: "within" a group, "between" groups; empty where it has one rank.
        nbytes: received by this rank.
        begin, end: it may have ended before ``end``, if nothing waited for it until then.
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
        begin, end: of the interval.
        trains: whether it was the training lane; else it completes transfers.
        communication: for which it waited; None for whatever another thread or stream had to do.
        module: whose parameters were waited for; empty if that is not known.
    """

    begin: Moment
    end: Moment
    trains: bool
    communication: Communication | None = None
    module: str = ""


@dataclass
class Phase:
    """An interval of the training lane: forward, backward, the update; or, inside one of these, handling what
    communicates."""

    kind: str
    begin: Moment
    end: Moment
    module: str = ""


@dataclass(frozen=True)
class Step:
    """An optimizer step, from the end of the previous one to its own.

    Attributes:
        number: of the step, counted from 1 as DeepSpeed does.
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
        return union((wait.begin, wait.end) for wait in self.waits if wait.trains)

    def of_kinds(self, *kinds: str) -> list[Interval]:
        """Return the intervals in which the training lane was in phases of these kinds."""
        return union((phase.begin, phase.end) for phase in self.phases if phase.kind in kinds)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same times as intervals that are sorted, not empty, and do not touch."""
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
    """Return the seconds of intervals that do not overlap one another."""
    return sum(end - begin for begin, end in intervals)


def without(intervals: Iterable[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the times of the first that are not in the second; each is a union."""
    rest: list[Interval] = []
    for begin, end in intervals:
        for other_begin, other_end in others:
            if other_end <= begin or other_begin >= end:
                continue
            if other_begin > begin:
                rest.append((begin, other_begin))
            begin = max(begin, other_end)
        if begin < end:
            rest.append((begin, end))
    return rest


# Measures #########################################################################################


def exposed(step: Step) -> Charges:
    """Return the waits of a step in seconds, by operation, hop and module; see Note [Exposed seconds]."""
    charges: dict[tuple[str, str, str], float] = defaultdict(float)
    for_handles = [wait for wait in step.waits if wait.trains and wait.communication is not None]
    for wait in for_handles:
        assert wait.communication is not None
        charges[wait.communication.name, wait.communication.hop, wait.module] += wait.end - wait.begin
    charged = union((wait.begin, wait.end) for wait in for_handles)
    aside = [(wait.communication, wait.begin, wait.end) for wait in step.waits if not wait.trains]
    wire = [(sent, sent.begin, sent.end) for sent in sorted(step.communications, key=lambda sent: sent.hop != BETWEEN)]
    for wait in (wait for wait in step.waits if wait.trains and wait.communication is None):
        left = without(union([(wait.begin, wait.end)]), charged)
        for sent, begin, end in [*aside, *wire]:
            if sent is None or not sent.hop or begin >= wait.end or end <= wait.begin:
                continue
            rest = without(left, [(begin, end)])
            if rest != left:
                charges[sent.name, sent.hop, wait.module] += length(left) - length(rest)
                left = rest
    return charges


def _total(charges: Charges, *wanted: tuple[int, str]) -> float:
    """Return the seconds of charges that have, at these places of their keys, these names."""
    return sum(seconds for key, seconds in charges.items() if all(key[place] == name for place, name in wanted))


def parts(step: Step, charges: Charges | None = None) -> dict[str, float]:
    """Return the seconds of each of ``PARTS``; their sum is the step's."""
    charges = exposed(step) if charges is None else charges
    elsewhere = union([*step.waiting, *step.of_kinds(HANDLING)])
    known = {
        COMPUTE: length(without(step.of_kinds(FORWARD, BACKWARD), elsewhere)),
        UPDATE: length(without(step.of_kinds(UPDATE), elsewhere)),
        **{hop: _total(charges, (1, hop)) for hop in HOPS},
    }
    return {part: known.get(part, step.seconds - sum(known.values())) for part in PARTS}


def summary(steps: Sequence[Step]) -> dict[str, Any]:
    """Return the means of recorded steps as plain values: see ``report.json`` in the README."""
    charged = [exposed(step) for step in steps]
    by_part = [parts(step, charges) for step, charges in zip(steps, charged, strict=True)]
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
    """Return the seconds of a step in which one of these is on the wire."""
    return length(union((communication.begin, communication.end) for communication in sent)) / steps


def _hops(sent: Sent, means: Charges, steps: int) -> list[dict[str, Any]]:
    rows = []
    for hop in HOPS:
        some = [communication for (_, of), group in sent.items() if of == hop for communication in group]
        if some:
            nbytes, busy = sum(communication.nbytes for communication in some) / steps, _busy(some, steps)
            rate = nbytes / busy if busy else None
            rows.append({"hop": hop, "bytes": nbytes, "busy": busy, "exposed": _total(means, (1, hop)), "rate": rate})
    return rows


def _operations(sent: Sent, means: Charges, steps: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "hop": hop,
            "count": len(some) / steps,
            "bytes": sum(communication.nbytes for communication in some) / steps,
            "busy": _busy(some, steps),
            "exposed": _total(means, (0, name), (1, hop)),
        }
        for (name, hop), some in sorted(sent.items())
    ]
    return sorted(rows, key=lambda row: (row["exposed"], row["busy"]), reverse=True)


def _modules(means: Charges) -> list[dict[str, Any]]:
    names = sorted({module for _, _, module in means if module})
    rows: list[dict[str, Any]] = [{"module": name, "exposed": _total(means, (2, name))} for name in names]
    return sorted(rows, key=lambda row: float(row["exposed"]), reverse=True)[:_MODULES]


def middle(steps: Sequence[Step]) -> Step:
    """Return the step with the median duration, or next to it."""
    return sorted(steps, key=lambda step: step.seconds)[len(steps) // 2]


def timeline(step: Step) -> list[dict[str, Any]]:
    """Return the lanes of a step as ``report.json`` has them, in seconds from its begin."""

    def span(of: Phase | Wait | Communication, name: str, kind: str, *rest: Any) -> list[Any]:
        return [round(of.begin - step.begin, 7), round(of.end - step.begin, 7), name, kind, *rest]

    training = [span(phase, phase.kind, phase.kind, None, phase.module or None) for phase in step.phases]
    for wait in step.waits:
        if wait.trains and wait.end - wait.begin > _SHORT:
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
