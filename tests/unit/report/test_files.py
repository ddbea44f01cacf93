# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Files of a report: written as a whole, a page of valid HTML that loads nothing, and events that Perfetto reads."""

import base64
import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.utils import logger

from deepspeed_ext.tools import clocks
from deepspeed_ext.tools.report.contents import _origin, write_report
from deepspeed_ext.tools.report.page import chrome_trace, render
from tests.harness import reports

pytestmark = pytest.mark.quick


def complete(trace: dict[str, Any]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Return complete events by process and name of their thread, in order."""
    threads, spans = names(trace, "thread_name"), defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            spans[event["pid"], threads[event["pid"], event["tid"]]].append(event)
    return spans


def names(trace: dict[str, Any], kind: str) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == kind}


def test_each_span_is_an_event_with_its_figures() -> None:
    report = reports.report("IIG")
    trace = json.loads(json.dumps(chrome_trace(report)))
    assert names(trace, "process_name") == {
        (1, 0): "rank 0 on node0, slowest, step 12",
        (2, 0): "rank 3 on node1, fastest, step 12",
    }
    spans, expected = [], []
    for (pid, thread), events in complete(trace).items():
        lane = thread.split(" (")[0].removesuffix(" groups")
        for e in events:
            times = (round(time, 2) for time in (e["ts"], e["ts"] + e["dur"]))
            spans.append((pid, lane, *times, e["name"], e["cat"], e["args"].get("bytes"), e["args"].get("module")))
    for pid, timeline in enumerate(report["timelines"], 1):
        for lane in timeline["lanes"]:
            for begin, end, *rest in lane["spans"]:
                expected.append((pid, lane["lane"], round(begin * 1e6, 2), round(end * 1e6, 2), *rest))
    assert sorted(spans, key=repr) == sorted(expected, key=repr)


def test_events_of_a_thread_nest_and_of_a_link_do_not_overlap() -> None:
    threads = complete(chrome_trace(reports.report("IIG")))
    assert (1, "within groups (2)") in threads  # else nothing has been distributed
    assert (1, "training (2)") not in threads  # what nests stays on one thread
    for (_, thread), events in threads.items():
        ends: list[int] = []
        assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
        for event in events:
            begin, end = round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3)
            while ends and ends[-1] <= begin:
                ends.pop()
            assert not ends or (thread == "training" and end <= ends[-1]), (thread, event)
            ends.append(end)


def test_spans_that_overlap_without_nesting_get_another_thread() -> None:
    """Also on the training lane, where clocks of a device may be a little apart."""
    report = reports.report()
    spans = [[0.0, 2.0, "a", "forward", None, None], [1.0, 3.0, "b", "wait", None, None]]
    report["timelines"] = [report["timelines"][0] | {"lanes": [{"lane": "training", "spans": spans}]}]
    spans = {thread: [e["name"] for e in events] for (_, thread), events in complete(chrome_trace(report)).items()}
    assert spans == {"training": ["a"], "training (2)": ["b"]}
    assert chrome_trace(reports.empty())["traceEvents"] == []


def test_a_report_that_cannot_be_written_leaves_the_last_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_report(reports.report(), tmp_path)
    before = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert before.keys() == {"report.html", "report.json", "trace.json"}
    (tmp_path / ".trace.json.part").mkdir()  # which is written after the figures
    with mock.patch.object(logger, "propagate", True):
        write_report(reports.report("IIG"), tmp_path)
    (tmp_path / ".trace.json.part").rmdir()
    assert {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()} == before
    assert "the report could not be written" in caplog.text


def test_ranks_on_processors_beside_gpus_are_said_to_be_there() -> None:
    of_kind, gpu = torch.get_device_module, mock.Mock(get_device_name=lambda: "a GPU")
    with (
        mock.patch.object(torch, "get_device_module", lambda kind=None: of_kind(kind) if kind else gpu),
        mock.patch.object(clocks, "get_accelerator", lambda: mock.Mock(current_device_name=lambda: "cpu")),
    ):
        assert _origin([])["device"] == "cpu"


VOID = {"meta", "link"}
LOADS = {"src", "srcset", "href", "action", "data", "poster"}  # attributes
MADE: dict[str, Callable[[], dict[str, Any]]] = {
    "NIG": reports.report,
    "IIG": lambda: reports.report("IIG"),
    "sparse": reports.sparse,
    "empty": reports.empty,
    "hostile": reports.hostile,
}


class Parsed(HTMLParser):
    """A page taken apart; it fails on a tag that is not closed, or closed twice."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open[-1]][-1] += data


@pytest.mark.parametrize("name", MADE)
def test_the_page_carries_the_report_and_loads_nothing(name: str) -> None:
    """Its own style and script are allowed by their hashes: markup that came in with a name would not run."""
    report = MADE[name]()
    parsed = Parsed(render(report))
    data, script = parsed.texts["script"]
    (style,) = parsed.texts["style"]
    assert json.loads(data) == json.loads(json.dumps(report))
    assert not set(data) & set("<>&")  # whatever a parser would make of them
    assert parsed.texts["h1"] == [report["training"]["called"]]
    assert report["paragraph"] in parsed.texts["p"]
    loads = [value for _, given in parsed.tags for name, value in given.items() if name in LOADS]
    assert loads == ["data:,"]  # the icon, which browsers ask a server for otherwise
    assert not re.search(r"https?://|@import|url\(", style + script)
    policy = next(given["content"] or "" for _, given in parsed.tags if "http-equiv" in given)
    assert "default-src 'none'" in policy
    for kind, text in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}';" in policy
    attributes = {name for _, given in parsed.tags for name in given}
    assert not [name for name in attributes if name == "style" or name.startswith("on")]


def test_names_are_no_markup_and_infinities_are_left_out() -> None:
    tags = {name: [tag for tag, _ in Parsed(render(MADE[name]())).tags] for name in ("NIG", "hostile")}
    assert tags["NIG"] == tags["hostile"]
    report = reports.report()
    report["parts"][0]["seconds"], report["hops"][0]["rate"] = math.nan, math.inf
    data = json.loads(Parsed(render(report)).texts["script"][0])
    assert data["parts"][0]["seconds"] is None and data["hops"][0]["rate"] is None
    with pytest.raises(TypeError, match="set"):
        render(report | {"findings": {"a set"}})
