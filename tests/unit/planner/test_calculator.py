# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The calculator in a browser: its figures are those of ``plan``, the address keeps its inputs, and it is drawn."""

import argparse
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext.planner.choice import Plan, plan
from deepspeed_ext.strategy import GroupSizes
from deepspeed_ext.tools.plan import cli, page
from tests.harness import browser

pytestmark = pytest.mark.skipif(browser.CHROMIUM is None, reason="needs Chromium: apt install chromium")

CASES = 500
WIDTHS = {"wide": 1280, "narrow": 390}
LOOK = Path(__file__).with_name("calculator_drawn.js").read_text(encoding="utf-8")
SETTING = tuple[dict[str, Any], Plan]


@pytest.fixture(scope="module")
def settings() -> list[SETTING]:
    """Random clusters and models: inputs of the page, and the command's plan for them."""
    draw, drawn_settings, parser = random.Random(70), [], argparse.ArgumentParser()
    cli.add_arguments(parser)
    for _ in range(CASES):
        params = draw.choice([int(10 ** draw.uniform(5, 12.5)), draw.randrange(1, 60) * 250_000_000])
        drawn_settings.append(
            {
                "nodes": draw.choice([1, 2, 3, 4, 16, 64, 500]),
                "ranks_per_node": draw.choice([1, 2, 4, 8, 16, 72]),
                "intra_gbps": 10 ** draw.uniform(1, 4),
                "inter_gbps": 10 ** draw.uniform(-1, 4),
                "params": params,
                "trainable": draw.choice([params, params, params // 2, params // 100]),
                "accumulation": draw.choice([1, 2, 4, 32]),
                "tokens": draw.randrange(1, 60_000),
                "tflops": 10 ** draw.uniform(0, 3),
                "budget": draw.choice([None, 10.0 ** draw.randrange(9, 13)]),
            }
        )
    return [(row, planned(row, parser)) for row in drawn_settings]


def planned(setting: dict[str, Any], parser: argparse.ArgumentParser) -> Plan:
    options = [f"--{key.replace('_', '-')}={value!r}" for key, value in setting.items() if key != "budget"]
    arguments = parser.parse_args(options)
    sizes = GroupSizes(setting["nodes"] * setting["ranks_per_node"], setting["ranks_per_node"])
    rates = cli._rates(arguments, sizes, setting["ranks_per_node"], launched=False)
    return plan(sizes, cli._model(arguments), rates, setting["budget"])


@pytest.fixture(scope="module")
def looked(settings: Sequence[SETTING], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One start of the browser for all tests, without an error."""
    look = LOOK.replace("CASES", f'(window.name === "wide" ? {json.dumps([row for row, _ in settings])} : [])')
    pages = {name: (page.render(), width) for name, width in WIDTHS.items()}
    drawn, logged = browser.look_at(pages, look, tmp_path_factory.mktemp("browser"))
    assert not logged and not [row["error"] for row in drawn.values() if "error" in row]
    return drawn


def test_figures_are_those_of_the_command(looked: dict[str, Any], settings: Sequence[SETTING]) -> None:
    for drawn, (setting, expected) in zip(looked["wide"]["found"], settings, strict=True):
        rows = {row.name: figures(row) for row in (*expected.predictions, *expected.plain)}
        assert drawn["rows"].keys() == rows.keys()
        assert all(same(drawn["rows"][name], row) for name, row in rows.items()), setting
        # Not its name: several strategies may have the same figures.
        choice = expected.choice and figures(expected.choice)
        assert drawn["choice"] == choice is None or same(drawn["choice"], choice), setting
        nothing = "no strategy is needed" in expected.reason or "faster: plain" in expected.reason
        assert drawn["words"].startswith("You gain nothing here") == nothing, (setting, expected.reason)
    words = [drawn["words"] for drawn in looked["wide"]["found"]]
    for part in ("nothing here: plain ", "you gain a factor of ", " less memory on each GPU", "No strategy fits: "):
        assert sum(part in row for row in words) >= 10, part


def same(drawn: Sequence[float], expected: Sequence[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=5e-5) for a, b in zip(drawn, expected, strict=True))


def figures(row: Any) -> list[float]:
    return [row.total_seconds, row.busy["compute"], row.total_memory, row.volume.intra, row.volume.inter]


@pytest.mark.parametrize("name", WIDTHS)
def test_it_is_drawn_in_both_schemes_within_its_window(looked: dict[str, Any], name: str) -> None:
    first, typed, address, wrong = looked[name]["states"]
    assert all(state["overflow"] == 0 for state in (first, typed, address, wrong))
    assert (first["rows"], first["lines"], address["rows"]) == (18, 6, 18)
    for surface, ink, line in looked[name]["schemes"]:
        assert surface not in (ink, line)
    assert not set(looked[name]["schemes"][0]) & set(looked[name]["schemes"][1][:2])
    assert first["keys"] == '{"zero_optimization": {"stage": 3, "paro_strategy": "IIG"}}'
    assert "--params 70B" in typed["command"] and typed["command"].endswith(" --trainable 7000000000")
    assert address["words"].startswith("You gain nothing here") and "paro_strategy" not in address["keys"]
    assert not wrong["shown"] and wrong["words"] == "“Tokens per GPU and micro-batch” needs a number above 0."
    # The address keeps the inputs.
    assert first["hash"] == "" and "params=70B&trained=10&" in typed["hash"]
    assert "--nodes 1 " in address["command"] and "--params 1e9 " in address["command"]
    assert "--trainable" not in address["command"]  # absent from the fragment, so as at first
