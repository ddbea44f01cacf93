# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Report in a browser: all sections with data, within the window, without an error; keys and pointer."""

from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext.tools.report.page import render
from tests.harness import browser, reports

pytestmark = pytest.mark.skipif(browser.CHROMIUM is None, reason="needs Chromium: apt install chromium")

NARROW, WIDE = 400, 1280
SECTIONS = {"step", "findings", "timelines", "hops", "operations", "modules", "choices", "memory", "ranks"}

LOOK = Path(__file__).with_name("page_drawn.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[str]]:
    """One start of the browser for all tests."""
    reports_by_page = {
        ("NIG", WIDE): reports.report(),
        ("IIG", WIDE): reports.report("IIG"),
        ("IIG", NARROW): reports.report("IIG"),
        ("large", WIDE): reports.large(),
        ("sparse", WIDE): reports.sparse(),
        ("empty", WIDE): reports.empty(),
        ("hostile", WIDE): reports.hostile(),
        ("hostile", NARROW): reports.hostile(),
    }
    pages = {f"{name}-{width}": (render(one), width) for (name, width), one in reports_by_page.items()}
    return browser.look_at(pages, LOOK, tmp_path_factory.mktemp("browser"))


def test_every_page_is_drawn_within_its_window(looked: tuple[dict[str, Any], list[str]]) -> None:
    """Without an error; and names of a report run nothing."""
    drawn_pages, logged = looked
    assert not logged
    for name, one in drawn_pages.items():
        drawn = {"large": "4", "empty": "0"}.get(name.split("-")[0], "2")
        assert "error" not in one and (one["drawn"], one["overflow"]) == (drawn, 0), (name, one)
    page = drawn_pages["hostile-1280"]
    assert page["title"].startswith("Time of a step: </script>")
    assert page["images"] == 0 and page["scripts"] == 2


def test_sections_are_those_with_data(looked: tuple[dict[str, Any], list[str]]) -> None:
    assert {name.removesuffix("-1280"): set(one["sections"]) for name, one in looked[0].items() if "1280" in name} == {
        "NIG": SECTIONS - {"modules"},  # its waits are for no module's parameters
        "IIG": SECTIONS,
        "large": SECTIONS,
        "sparse": SECTIONS - {"modules", "choices"},
        "empty": set(),
        "hostile": SECTIONS,
    }


def test_figures_are_drawn_at_their_size(looked: tuple[dict[str, Any], list[str]]) -> None:
    page, report = looked[0]["IIG-1280"], reports.report("IIG")
    measured, predicted = page["parts"]
    seconds = [row["seconds"] for row in report["parts"]]
    expected = [one / sum(seconds) for one in seconds]
    assert [width / sum(measured) for width in measured] == pytest.approx(expected, abs=0.005)
    assert sum(predicted) < sum(measured)
    assert page["spans"] == [sum(len(lane["spans"]) for lane in one["lanes"]) for one in report["timelines"]]
    assert all(colors > 8 for colors in page["colors"])
    assert page["now"] == "I-I-G"
    assert page["setting"] == '{"zero_optimization": {"stage": 2, "paro_strategy": "NIG"}}'
    assert page["findings"] == report["findings"][1:]  # the verdict has the first one
    assert looked[0]["NIG-1280"]["setting"] is None  # nothing without loss is faster
    # Of thousands of ranks the slowest are listed.
    large, small = looked[0]["large-1280"], looked[0]["NIG-1280"]
    assert min(large["spans"]) >= 20_000
    assert len(large["ranks"]) == 10 and large["ranks"][0] == "0" and len(small["ranks"]) == 4


def test_timelines_zoom_move_and_tell(looked: tuple[dict[str, Any], list[str]]) -> None:
    page = looked[0]["NIG-1280"]
    full_range, key, reset, button, dragged = page["range"]
    assert full_range == reset == "0.000 to 0.500 s"
    assert key == "0.083 to 0.417 s"  # 1.5 times around the middle
    assert button == "0.125 to 0.375 s"
    begin, end = (float(number) for number in dragged.split()[::2])  # to the left by 100 pixels: later
    assert 0.125 < begin < 0.2 and end - begin == pytest.approx(0.25, abs=0.002)
    pointed, loco = page["said"]
    assert pointed.startswith("forward") and "blocks.0" in pointed
    assert loco == '{"zero_optimization": {"stage": 2, "paro_strategy": "NIG", "zeropp_loco_param": {}}}'
