# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The key ``paro_report``: with a strategy and without, its values, and the variable in its place."""

from typing import Any

import pytest

from deepspeed_ext.config.implied_stage import imply_stage_of_raw
from deepspeed_ext.config.report import AROUND, VARIABLE, ReportSettings
from deepspeed_ext.config.section import ParoZeroConfig, parse_section

pytestmark = pytest.mark.quick


def test_a_plain_stage_may_be_reported_on_and_stays_plain() -> None:
    section = {"stage": 3, "paro_report": {"steps": 2}}
    parsed = parse_section(section)
    assert not isinstance(parsed, ParoZeroConfig)
    assert ReportSettings.asked_for(parsed) == ReportSettings(steps=2)
    imply_stage_of_raw(without := {"paro_report": {}})
    assert without == {"paro_report": {}}  # it implies no stage


def test_beside_a_strategy_it_changes_nothing_else() -> None:
    parsed = parse_section({"paro_strategy": "NIG", "paro_report": {}})
    assert isinstance(parsed, ParoZeroConfig) and parsed.stage == 2
    assert ReportSettings.asked_for(parsed) == ReportSettings()
    assert ReportSettings.asked_for(parse_section({"paro_strategy": "NIG"})) is None


def test_steps_are_counted_from_the_warm_up_on() -> None:
    settings = ReportSettings(after=4, steps=2)
    assert (settings.first, settings.last) == (4 + AROUND, 4 + AROUND + 2 + AROUND - 1)


@pytest.mark.parametrize(
    "given, said",
    [
        (True, "zero_optimization.paro_report must be a dictionary of folder, after, steps, probe"),
        ({"step": 3}, r"has no key 'step': its keys are folder, after, steps, probe. Did you mean 'steps'\?"),
        ({"steps": 0}, r"zero_optimization.paro_report.steps must be an integer of at least 1 \(optimizer steps\)"),
        ({"after": 1}, "zero_optimization.paro_report.after must be an integer of at least 2"),
        ({"probe": 1}, "zero_optimization.paro_report.probe must be true or false, got 1"),
        ({"folder": ""}, "zero_optimization.paro_report.folder must be the path of a folder"),
    ],
)
def test_what_is_wrong_is_refused(given: Any, said: str) -> None:
    for section in ({"stage": 2}, {"paro_strategy": "NIG"}):
        with pytest.raises(ValueError, match=said):
            parse_section({**section, "paro_report": given})


def test_a_key_of_strategies_still_needs_one_beside_a_report() -> None:
    with pytest.raises(ValueError, match=r"paro_group_size is set \(2\) without zero_optimization.paro_strategy"):
        parse_section({"stage": 2, "paro_report": {}, "paro_group_size": 2})


def test_the_variable_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ReportSettings("elsewhere", 3, 1, False)
    monkeypatch.setenv(VARIABLE, settings.as_variable())
    assert ReportSettings.asked_for(object()) == settings
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(ValueError, match=f"{VARIABLE} must be a dictionary in JSON"):
        ReportSettings.asked_for(object())
    monkeypatch.setenv(VARIABLE, '{"steps": -1}')
    with pytest.raises(ValueError, match=f"{VARIABLE}.steps must be an integer"):
        ReportSettings.asked_for(object())
