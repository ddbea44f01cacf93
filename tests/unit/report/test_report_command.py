# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Requests for a report: the command, which runs a script unchanged, the key, and the environment variable."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deepspeed_ext.config.implied import imply_stage_in_section
from deepspeed_ext.config.section import ParoZeroConfig, parse_section
from deepspeed_ext.config.settings import REPORT_VARIABLE, ReportSettings
from deepspeed_ext.tools.main import main
from tests.harness.tiers import with_cases

SCRIPT = """
import json, os, sys
import beside
print(json.dumps([sys.argv, __name__, os.environ["DEEPSPEED_EXT_REPORT"], beside.VALUE]))
"""
pytestmark = pytest.mark.quick


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """A function that runs words of the command in an empty folder, with the options before it that it is given."""
    monkeypatch.setenv(REPORT_VARIABLE, "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)

    def run(*words: str, before: tuple[str, ...] = ()) -> None:
        monkeypatch.setattr(sys, "argv", ["deepspeed_ext", *before, "report", *words])
        main()

    return run


def test_a_script_gets_its_arguments_and_the_variable(
    report: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It also imports modules from its own folder."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    report("--steps", "2", "--no-probe", "--", "script.py", "--steps", "5", before=("--local_rank=1",))
    assert capsys.readouterr().out.splitlines()[-1] == (
        '[["script.py", "--local_rank=1", "--steps", "5"], "__main__", '
        '"{\\"folder\\": \\"paro_report\\", \\"after\\": 10, \\"steps\\": 2, \\"probe\\": false}", 7]'
    )
    # Its errors are its own, even of the class with which the command refuses arguments.
    (tmp_path / "script.py").write_text("raise ValueError('a bad batch')\n")
    with pytest.raises(ValueError, match="a bad batch"):
        report("--", "script.py")


@with_cases(
    "arguments, said",
    ((), "report runs a script, as in: torchrun ... -m deepspeed_ext report -- script.py --its-arguments; got"),
    (("--", "none.py"), "got 'none.py', which is not a file."),
    (("--after", "1", "--", __file__), "report.after must be an integer of at least 2 (optimizer steps), got 1"),
)
def test_what_cannot_run_is_refused(
    report: Callable[..., None], arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        report(*arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_the_key_changes_nothing_else() -> None:
    parsed = parse_section({"stage": 3, "paro_report": {"steps": 2}})
    assert isinstance(parsed, ParoZeroConfig) and parsed.named_strategy is None  # a plain stage stays plain
    assert ReportSettings.from_environment_or_config(parsed) == ReportSettings(steps=2)
    imply_stage_in_section(without := {"paro_report": {}})
    assert without == {"paro_report": {}}  # it implies no stage
    parsed = parse_section({"paro_strategy": "NIG", "paro_report": {}})
    assert isinstance(parsed, ParoZeroConfig) and parsed.stage == 2
    assert ReportSettings.from_environment_or_config(parsed) == ReportSettings()
    assert ReportSettings.from_environment_or_config(parse_section({"paro_strategy": "NIG"})) is None
    with pytest.raises(ValueError, match=r"paro_group_size is set \(2\) without zero_optimization.paro_strategy"):
        parse_section({"stage": 2, "paro_report": {}, "paro_group_size": 2})


def test_the_variable_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ReportSettings(folder="elsewhere", after=3, steps=1, probe=False)
    monkeypatch.setenv(REPORT_VARIABLE, settings.as_variable())
    assert ReportSettings.from_environment_or_config(object()) == settings
    monkeypatch.setenv(REPORT_VARIABLE, "yes")
    with pytest.raises(ValueError, match=f"{REPORT_VARIABLE} must be a dictionary in JSON"):
        ReportSettings.from_environment_or_config(object())
