# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The page of a report: one file of valid HTML, which carries the report, loads nothing, and trusts no name."""

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest

from deepspeed_ext.report.page import render
from tests.harness import reports

pytestmark = pytest.mark.quick

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
    loads = [value for _, one in parsed.tags for name, value in one.items() if name in LOADS]
    assert loads == ["data:,"]  # the icon, which browsers ask a server for otherwise
    assert not re.search(r"https?://|@import|url\(", style + script)
    policy = next(one["content"] or "" for _, one in parsed.tags if "http-equiv" in one)
    assert "default-src 'none'" in policy
    for kind, text in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}';" in policy
    assert not [name for _, one in parsed.tags for name in one if name == "style" or name.startswith("on")]


def test_names_do_not_become_markup() -> None:
    tags = {name: [tag for tag, _ in Parsed(render(MADE[name]())).tags] for name in ("NIG", "hostile")}
    assert tags["NIG"] == tags["hostile"]


def test_what_json_has_not_is_left_out_or_refused() -> None:
    report = reports.report()
    report["parts"][0]["seconds"], report["hops"][0]["rate"] = math.nan, math.inf
    data = json.loads(Parsed(render(report)).texts["script"][0])
    assert data["parts"][0]["seconds"] is None and data["hops"][0]["rate"] is None
    with pytest.raises(TypeError, match="set"):
        render(report | {"findings": {"a set"}})
