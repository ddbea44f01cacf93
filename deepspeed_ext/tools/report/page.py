# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Renders a report in words, as one HTML page, and as a trace. Pure; each takes the contents of ``report.json``.

The page needs no network or server. It consists of ``assets``: a template, a style sheet, and scripts, which draw the
report from JSON in the page. The title and the verdict are plain HTML, for readers without scripts.
"""

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from deepspeed_ext.planner.choice import best
from deepspeed_ext.strategy import hyphenate
from deepspeed_ext.tools.html_page import fill_template, read_asset
from deepspeed_ext.tools.report.measures import BETWEEN, COMPUTE, OTHER, UPDATE, WITHIN

_SCRIPTS = ("dom.js", "bars.js", "spans.js", "view.js", "timeline.js", "tables.js", "ranks.js", "main.js")  # in order
_HOPS = {WITHIN: "within groups", BETWEEN: "between groups"}
_PARTS = {COMPUTE: "compute", **{hop: f"exposed {name}" for hop, name in _HOPS.items()}, UPDATE: "the update"}
# Thresholds of findings.
_MIN_GAIN = 0.05  # share of a step
_SLOW_RATIO = 2.0  # ratio of a hop's probed rate to its reached rate
_EXCESS_COMPUTE = 0.1  # share of the median of compute
_EXCESS_MEMORY = 0.1  # share of the bytes of model states
_EXCESS_RECEIVED = 0.2  # share of the received bytes
_OVERHEAD = 0.02  # share of a step
_LISTED_GROUPS = 16

_NESTED = "training"  # the lane with nested spans

Report = Mapping[str, Any]
Event = dict[str, Any]
Span = Sequence[Any]


# In words #########################################################################################


def paragraph(report: Report) -> str:
    """Return the seconds of a step, its parts, their prediction, and the first findings."""
    training, parts = report["training"], _parts(report)
    named = [f"{seconds:.3g} s {_PARTS[part]}" for part, seconds in parts.items() if part in _PARTS]
    text = (
        f"A step of {training['called']} takes {_step(report):.3g} s on {training['ranks']} ranks in "
        f"{training['groups']} group(s) of {training['group_size']}: {', '.join(named)}, and {parts[OTHER]:.3g} s "
        f"other"
    )
    predicted = [row["predicted"] for row in report["parts"] if row["predicted"] is not None]
    if predicted:
        text += f". The planner predicts {sum(predicted):.3g} s"
    return f"{text}. {' '.join(report['findings'][:2])}".strip()


def findings(report: Report) -> list[str]:
    """Return findings as sentences, the most important first."""
    return [
        *_faster_strategies(report),
        *_slow_hops(report),
        *_uneven_groups(report),
        *_step_findings(report),
        *_excess_findings(report),
    ]


def _step(report: Report) -> float:
    return float(median(report["steps"]["seconds"]))


def _parts(report: Report) -> dict[str, float]:
    return {row["part"]: row["seconds"] for row in report["parts"]}


def _faster_strategies(report: Report) -> Iterator[str]:
    fitting = [row for row in report["choices"] if row["fits"] is not False]
    now = next((row for row in report["choices"] if row["now"]), None)
    if now is None:
        return
    exact = _best([row for row in fitting if " + " not in row["strategy"]] or [now])
    lossy = _best([*fitting, now])
    if exact["step"] < (1 - _MIN_GAIN) * now["step"]:
        yield _gain_sentence(exact, now, "is predicted to be faster")
    # 4 bits change the training slightly, so they are reported separately for the user to decide.
    if lossy["step"] < (1 - 2 * _MIN_GAIN) * min(exact["step"], now["step"]):
        yield _gain_sentence(lossy, now, "would be faster still, with gradients or updates in 4 bits")
    elif exact["step"] >= (1 - _MIN_GAIN) * now["step"]:
        yield f"No strategy is predicted to be faster by more than {_MIN_GAIN:.0%}."


def _best(rows: Sequence[Report]) -> Report:
    return best(rows, lambda row: float(row["step"]), lambda row: float(row["gb"]))


def _gain_sentence(row: Report, now: Report, how: str) -> str:
    memory = f"{row['gb']:.3g} GB of model states on each rank, now {now['gb']:.3g}"
    return f"{hyphenate(row['strategy'])} {how}: {row['step']:.3g} s instead of {now['step']:.3g} ({memory})."


def _slow_hops(report: Report) -> Iterator[str]:
    for hop in report["hops"]:
        share = hop["exposed"] / _step(report)
        if share < _MIN_GAIN:
            continue
        reached, probed = hop["rate"], hop["probed_rate"]
        if reached and probed and probed > _SLOW_RATIO * reached:
            yield (
                f"Transfers {_HOPS[hop['hop']]} reach {reached / 1e6:.3g} MB/s per rank, but the probe measured "
                f"{probed / 1e6:.3g}: messages are small, ranks are late, or compute uses the cores that send them."
            )
        else:
            yield f"The step waits for transfers {_HOPS[hop['hop']]} for {share:.0%} of its time."


def _uneven_groups(report: Report) -> Iterator[str]:
    rows = report.get("groups", [])
    if max((row["waiting"] for row in rows), default=0.0) < _MIN_GAIN * _step(report):
        return
    waits = ", ".join(f"{row['waiting']:.3g}" for row in rows[:_LISTED_GROUPS])
    more = ", ..." if len(rows) > _LISTED_GROUPS else ""
    now, balanced = ([row[key] for row in rows] for key in ("micro_batches", "balanced"))
    advice = "their numbers of micro-batches are balanced already"
    if now != balanced:
        advice = f'paro_micro_batches "measured", or {balanced} instead of {now}, would balance them'
    yield f"Groups wait for the slowest {waits}{more} s per step: {advice}."


def _step_findings(report: Report) -> Iterator[str]:
    share = _parts(report)[OTHER] / _step(report)
    if share > 2 * _MIN_GAIN:
        yield (
            f"{share:.0%} of the step is unaccounted for; likely causes: bucket copies, the data loader, user code, "
            f"or waiting for other ranks."
        )
    usual = median([row["compute"] for row in report["ranks"]] or [0.0])
    worst = max(report["ranks"], key=lambda row: float(row["compute"]), default={"compute": 0.0})
    if usual and worst["compute"] > (1 + _EXCESS_COMPUTE) * usual:  # never true for one rank
        yield (
            f"Rank {worst['rank']} on {worst['host']} computes {worst['compute'] / usual:.2g} times as long as the "
            f"median rank, and the others wait for it."
        )


def _excess_findings(report: Report) -> Iterator[str]:
    for row in report["memory"]:
        if row["formula"] and row["bytes"] > (1 + _EXCESS_MEMORY) * row["formula"]:
            yield (
                f"This rank holds {row['bytes'] / 1e9:.3g} GB of {row['state']}; the strategy needs "
                f"{row['formula'] / 1e9:.3g}."
            )
    for hop in report["hops"]:
        formula = hop["formula_bytes"]
        # Fewer bytes are normal: modules may be kept, and a thread's transfer may count for the next step.
        if formula and hop["bytes"] > (1 + _EXCESS_RECEIVED) * formula:
            source = "its group" if hop["hop"] == WITHIN else "other groups"
            yield (
                f"A rank receives {hop['bytes'] / 1e6:.3g} MB from {source} in a step; the formula predicts "
                f"{formula / 1e6:.3g}."
            )
    share = report["steps"]["overhead"]
    if share is not None and share > _OVERHEAD:
        yield f"Recorded steps took {share:.1%} longer than other steps, so the seconds of their parts are too high."


# As a page ########################################################################################


def render(report: Report) -> str:
    """Return a page that shows the report. Numbers that are None or not finite are left out.

    Raises:
        TypeError: the report has a value that JSON does not support.
    """
    training = report.get("training") or {}
    called = html.escape(str(training.get("called") or "training"))
    return fill_template(
        read_asset("page.html"),
        f"Time of a step: {called}",
        read_asset("page.css"),
        "\n".join(map(read_asset, _SCRIPTS)),
        report,
        called=called,
        verdict=html.escape(str(report.get("paragraph") or "")),
    )


# As a trace #######################################################################################


def chrome_trace(report: Report) -> dict[str, Any]:
    """Return the timelines of a report in the Chrome Trace Event format, for Perfetto and chrome://tracing.

    A timeline is a process, and a lane is one or more threads: complete events of one thread must nest, but transfers
    of a link overlap. Times are in microseconds from the begin of the step. Without timelines, the trace is empty.
    """
    events = [
        event for pid, timeline in enumerate(report.get("timelines") or (), 1) for event in _process(pid, timeline)
    ]
    training = report.get("training") or {}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"training": str(training.get("called", ""))}}


def _process(pid: int, timeline: Mapping[str, Any]) -> Iterator[Event]:
    """Yield the events of a timeline. ``pid`` is not the rank, since two timelines may have the same rank."""
    rank, host, role, step = (timeline[key] for key in ("rank", "host", "which", "step"))
    yield _metadata("process_name", pid, 0, name=f"rank {rank} on {host}, {role}, step {step}")
    yield _metadata("process_sort_index", pid, 0, sort_index=pid)
    tid = 0
    for lane in timeline["lanes"]:
        title = _HOPS.get(lane["lane"], lane["lane"])
        for number, row in enumerate(_rows(lane["spans"], nested=lane["lane"] == _NESTED), 1):
            tid += 1
            yield _metadata("thread_name", pid, tid, name=title if number == 1 else f"{title} ({number})")
            yield _metadata("thread_sort_index", pid, tid, sort_index=tid)
            yield from (_complete(pid, tid, span) for span in row)


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> Event:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _complete(pid: int, tid: int, span: Span) -> Event:
    begin, end, name, kind, nbytes, module = span
    args = {key: value for key, value in (("bytes", nbytes), ("module", module)) if value is not None}
    first, last = _nanoseconds(begin), _nanoseconds(end)
    event = {"name": name, "cat": kind, "ph": "X", "ts": first / 1e3, "dur": (last - first) / 1e3}
    return {**event, "pid": pid, "tid": tid, "args": args}


def _nanoseconds(seconds: float) -> int:
    """Return integer nanoseconds, so that rounding never makes a span end after its enclosing span."""
    return round(seconds * 1e9)


def _rows(spans: Iterable[Span], nested: bool) -> list[list[Span]]:
    """Return spans in rows, ordered by begin: the spans of a row do not overlap, or (``nested``) may be nested."""
    rows: list[list[Span]] = []
    open_ends: list[list[int]] = []  # for each row: ends of the spans that enclose the last span, and its own end
    for span in sorted(spans, key=lambda span: (span[0], -span[1])):
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
