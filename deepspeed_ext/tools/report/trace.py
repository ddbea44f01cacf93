# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The timelines of a report in the Chrome Trace Event format, which Perfetto and chrome://tracing open. Pure.

A timeline is a process, and a lane is a thread. Complete events of one thread must nest, and transfers of a link
overlap, so a lane has as many threads as it needs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_NAMES = {"within": "within groups", "between": "between groups"}
_NESTED = "training"  # the lane of which spans lie inside one another

Event = dict[str, Any]


def chrome_trace(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the timelines of a report as trace events. Times are in microseconds from the begin of the step.

    Args:
        report: the contents of ``report.json``; without timelines, the trace is empty.
    """
    events = [event for pid, one in enumerate(report.get("timelines") or (), 1) for event in _process(pid, one)]
    training = report.get("training") or {}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"training": str(training.get("called", ""))}}


def _process(pid: int, timeline: Mapping[str, Any]) -> Iterator[Event]:
    """Yield the events of a timeline. Its number is not the rank's, since two timelines may be of one rank."""
    rank, host, which, step = (timeline[key] for key in ("rank", "host", "which", "step"))
    yield _metadata("process_name", pid, 0, name=f"rank {rank} on {host}, {which}, step {step}")
    yield _metadata("process_sort_index", pid, 0, sort_index=pid)
    tid = 0
    for lane in timeline["lanes"]:
        title = _NAMES.get(lane["lane"], lane["lane"])
        for number, row in enumerate(_rows(lane["spans"], nested=lane["lane"] == _NESTED), 1):
            tid += 1
            yield _metadata("thread_name", pid, tid, name=title if number == 1 else f"{title} ({number})")
            yield _metadata("thread_sort_index", pid, tid, sort_index=tid)
            yield from (_complete(pid, tid, span) for span in row)


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> Event:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _complete(pid: int, tid: int, span: Sequence[Any]) -> Event:
    begin, end, name, kind, nbytes, module = span
    args = {key: value for key, value in (("bytes", nbytes), ("module", module)) if value is not None}
    first, last = _nanoseconds(begin), _nanoseconds(end)
    return {
        "name": name,
        "cat": kind,
        "ph": "X",
        "ts": first / 1e3,
        "dur": (last - first) / 1e3,
        "pid": pid,
        "tid": tid,
        "args": args,
    }


def _nanoseconds(seconds: float) -> int:
    """Return whole nanoseconds, so that no rounding makes a span end after the one that it lies in."""
    return round(seconds * 1e9)


def _rows(spans: Iterable[Sequence[Any]], nested: bool) -> list[list[Sequence[Any]]]:
    """Return spans in rows, ordered by begin: those of a row do not overlap, or (``nested``) one lies in the other."""
    rows: list[list[Sequence[Any]]] = []
    open_ends: list[list[int]] = []  # of each row: ends of the spans that the last one lies in, and its own
    for span in sorted(spans, key=lambda one: (one[0], -one[1])):
        begin, end = _nanoseconds(span[0]), _nanoseconds(span[1])
        for row, ends in zip(rows, open_ends, strict=True):
            while ends and ends[-1] <= begin:
                ends.pop()
            if not ends or (nested and end <= ends[-1]):
                row.append(span)
                ends.append(end)
                break
        else:
            rows.append([span])
            open_ends.append([end])
    return rows
