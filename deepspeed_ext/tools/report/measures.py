# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What recorded steps of a rank say: parts of a step, hops, operations, modules. Pure.

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

from deepspeed_ext.tools.report.recording import (
    BACKWARD,
    BETWEEN,
    FORWARD,
    HANDLING,
    HOPS,
    UPDATE,
    WITHIN,
    Communication,
    Interval,
    Step,
    Wait,
    common,
    length,
    union,
    without,
)

COMPUTE, OTHER = "compute", "other"
PARTS = (COMPUTE, WITHIN, BETWEEN, UPDATE, OTHER)
_MODULES = 50  # that are listed


@dataclass
class Exposed:
    """The waits of a step, in seconds, by what is charged with them."""

    by_hop: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    by_operation: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))  # name and hop
    by_module: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def charge(self, one: Communication, seconds: float, module: str) -> None:
        """Charge a communication with seconds of a wait."""
        self.by_hop[one.hop] += seconds
        self.by_operation[one.name, one.hop] += seconds
        if module:
            self.by_module[module] += seconds


def exposed(step: Step) -> Exposed:
    """Return what the waits of a step are charged to; see Note [Exposed seconds]."""
    found = Exposed()
    training = [one for one in step.waits if one.trains]
    known = [one for one in training if one.communication is not None]
    for wait in known:
        assert wait.communication is not None
        found.charge(wait.communication, wait.end - wait.begin, wait.module)
    told = union((one.begin, one.end) for one in known)
    beside = [(one.communication, one.begin, one.end) for one in step.waits if not one.trains and one.communication]
    wire = [(one, one.begin, one.end) for one in sorted(step.communications, key=lambda one: one.hop != BETWEEN)]
    for wait in (one for one in training if one.communication is None):
        left = without(union([(wait.begin, wait.end)]), told)
        for communication, begin, end in [*beside, *wire]:
            if communication.hop and begin < wait.end and end > wait.begin:
                shared = common(left, [(begin, end)])
                if shared:
                    found.charge(communication, length(shared), wait.module)
                    left = without(left, shared)
    return found


def parts(step: Step, waits: Exposed | None = None) -> dict[str, float]:
    """Return the seconds of each of ``PARTS``; their sum is the step's."""
    charged = exposed(step) if waits is None else waits
    elsewhere = union([*_waits(step), *step.of_kinds(HANDLING)])
    compute = length(without(step.of_kinds(FORWARD, BACKWARD), elsewhere))
    update = length(without(step.of_kinds(UPDATE), elsewhere))
    found = {COMPUTE: compute, UPDATE: update, **{hop: charged.by_hop[hop] for hop in HOPS}}
    return {part: found.get(part, step.seconds - sum(found.values())) for part in PARTS}


def waiting(step: Step) -> float:
    """Return the seconds for which the training lane waits."""
    return length(_waits(step))


def _waits(step: Step) -> list[Interval]:
    return union((one.begin, one.end) for one in step.waits if one.trains)


def summary(steps: Sequence[Step]) -> dict[str, Any]:
    """Return what recorded steps say, in the mean, as plain values: see ``report.json`` in the README."""
    charged = [exposed(step) for step in steps]
    by_part = [parts(step, one) for step, one in zip(steps, charged, strict=True)]
    return {
        "seconds": [step.seconds for step in steps],
        "waiting": fmean(map(waiting, steps)),
        "parts": {part: fmean(one[part] for one in by_part) for part in PARTS},
        "hops": [_hop(hop, steps, charged) for hop in HOPS if any(one.hop == hop for one in _all(steps))],
        "operations": _operations(steps, charged),
        "modules": _modules(charged),
    }


def _all(steps: Iterable[Step]) -> Iterable[Communication]:
    return (one for step in steps for one in step.communications)


def _busy(steps: Sequence[Step], wanted: Callable[[Communication], bool]) -> float:
    """Return for how long a communication of these is on the wire, in a step."""
    return length(union((one.begin, one.end) for one in _all(steps) if wanted(one))) / len(steps)


def _hop(hop: str, steps: Sequence[Step], charged: Sequence[Exposed]) -> dict[str, Any]:
    nbytes = sum(one.nbytes for one in _all(steps) if one.hop == hop) / len(steps)
    busy = _busy(steps, lambda one: one.hop == hop)
    exposures = fmean(one.by_hop[hop] for one in charged)
    return {"hop": hop, "bytes": nbytes, "busy": busy, "exposed": exposures, "rate": nbytes / busy if busy else None}


def _is(name: str, hop: str, one: Communication) -> bool:
    return (one.name, one.hop) == (name, hop)


def _operations(steps: Sequence[Step], charged: Sequence[Exposed]) -> list[dict[str, Any]]:
    names = sorted({(one.name, one.hop) for one in _all(steps)})
    rows: list[dict[str, Any]] = []
    for name, hop in names:
        some = [one for one in _all(steps) if (one.name, one.hop) == (name, hop)]
        rows.append(
            {
                "name": name,
                "hop": hop,
                "count": len(some) / len(steps),
                "bytes": sum(one.nbytes for one in some) / len(steps),
                "busy": _busy(steps, partial(_is, name, hop)),
                "exposed": fmean(one.by_operation[name, hop] for one in charged),
            }
        )
    return sorted(rows, key=lambda row: (float(row["exposed"]), float(row["busy"])), reverse=True)


def _modules(charged: Sequence[Exposed]) -> list[dict[str, Any]]:
    names = {name for one in charged for name in one.by_module}
    rows = [{"module": name, "exposed": fmean(one.by_module[name] for one in charged)} for name in sorted(names)]
    return sorted(rows, key=lambda row: float(str(row["exposed"])), reverse=True)[:_MODULES]


def middle(steps: Sequence[Step]) -> Step:
    """Return the step that takes the median time, or is next to it."""
    return sorted(steps, key=lambda step: step.seconds)[len(steps) // 2]


# The timeline #####################################################################################

_SHORT = 1e-6  # seconds: a wait that is over at once is not drawn
_LINKS = {"gather": "gather", "reduce": "reduce", "send": "copy", "recv": "copy", "broadcast": "gather"}


def timeline(step: Step) -> list[dict[str, Any]]:
    """Return the lanes of a step as ``report.json`` has them, in seconds from its begin."""

    def row(begin: float, end: float, *rest: Any) -> list[Any]:
        return [round(begin - step.begin, 7), round(end - step.begin, 7), *rest]

    training = [row(one.begin, one.end, one.kind, one.kind, None, one.module or None) for one in step.phases]
    training += [_waited(row, one) for one in step.waits if one.trains and one.end - one.begin > _SHORT]
    lanes = [{"lane": "training", "spans": sorted(training, key=lambda span: (span[0], -span[1]))}]
    for hop in HOPS:
        spans = [
            row(one.begin, one.end, one.name, _kind(one.name), one.nbytes, None)
            for one in step.communications
            if one.hop == hop
        ]
        if spans:
            lanes.append({"lane": hop, "spans": spans})
    return lanes


def _waited(row: Callable[..., list[Any]], one: Wait) -> list[Any]:
    name = "wait" if one.communication is None else f"wait for {one.communication.name}"
    return row(one.begin, one.end, name, "wait", None, one.module or None)


def _kind(name: str) -> str:
    return next((kind for part, kind in _LINKS.items() if part in name), "reduce")
