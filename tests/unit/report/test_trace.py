# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The trace of a report: events as Perfetto and chrome://tracing read them."""

import json
from collections import defaultdict
from typing import Any

import pytest

from deepspeed_ext.report.trace import chrome_trace
from tests.harness import reports

pytestmark = pytest.mark.quick


def complete(trace: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Return complete events by process and thread."""
    found = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


def names(trace: dict[str, Any], kind: str) -> dict[tuple[int, int], str]:
    """Return names of threads or processes."""
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == kind}


@pytest.mark.parametrize("strategy", ["NIG", "IIG", "ZeRO-3"])
def test_each_span_is_an_event_with_its_figures(strategy: str) -> None:
    report = reports.report(strategy)
    trace = json.loads(json.dumps(chrome_trace(report)))
    processes, threads = names(trace, "process_name"), names(trace, "thread_name")
    assert len(processes) == len(report["timelines"])
    assert processes[1, 0] == "rank 0 on node0, slowest, step 12"
    events = complete(trace)
    for pid, timeline in enumerate(report["timelines"], 1):
        for lane in timeline["lanes"]:
            title = {"within": "within groups", "between": "between groups"}.get(lane["lane"], lane["lane"])
            tids = [tid for (of, tid), name in threads.items() if of == pid and name.split(" (")[0] == title]
            found = [
                (e["name"], e["cat"], e["args"].get("bytes"), e["args"].get("module"), e["ts"], e["ts"] + e["dur"])
                for tid in tids
                for e in events[pid, tid]
            ]
            expected = [(*span[2:], span[0] * 1e6, span[1] * 1e6) for span in lane["spans"]]
            assert sorted(found, key=repr) == [
                (*one[:4], pytest.approx(one[4], abs=2e-3), pytest.approx(one[5], abs=2e-3))
                for one in sorted(expected, key=repr)
            ]


def test_events_of_a_thread_nest_and_those_of_a_link_do_not_overlap() -> None:
    trace = chrome_trace(reports.report("IIG"))
    threads = names(trace, "thread_name")
    assert "within groups (2)" in threads.values()  # else nothing has been distributed
    assert "training (2)" not in threads.values()  # what nests stays on one thread
    for place, events in complete(trace).items():
        ends: list[int] = []
        assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
        for event in events:
            begin, end = round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3)
            while ends and ends[-1] <= begin:
                ends.pop()
            assert not ends or (threads[place] == "training" and end <= ends[-1]), (place, event)
            ends.append(end)


def test_spans_that_overlap_without_nesting_get_another_thread() -> None:
    """Also on the training lane, where clocks of a device may be a little apart."""
    report = reports.report()
    spans = [[0.0, 2.0, "a", "forward", None, None], [1.0, 3.0, "b", "wait", None, None]]
    report["timelines"] = [report["timelines"][0] | {"lanes": [{"lane": "training", "spans": spans}]}]
    trace = chrome_trace(report)
    assert {place: [e["name"] for e in events] for place, events in complete(trace).items()} == {
        (1, 1): ["a"],
        (1, 2): ["b"],
    }
    assert list(names(trace, "thread_name").values()) == ["training", "training (2)"]


def test_without_timelines_the_trace_is_empty() -> None:
    assert chrome_trace(reports.empty())["traceEvents"] == []
