# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``python -m deepspeed_ext report -- script.py``: a script runs as it would without, with the variable set."""

import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_ext.cli.main import main
from deepspeed_ext.config.report import VARIABLE

SCRIPT = """
import json, os, sys
import beside
print(json.dumps([sys.argv, __name__, os.environ["DEEPSPEED_EXT_REPORT"], beside.VALUE]))
"""


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deepspeed_ext", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.quick
def test_a_script_gets_its_arguments_its_neighbors_and_the_variable(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    command = ("--local_rank=1", "report", "--steps", "2", "--no-probe", "--", "script.py", "--steps", "5")
    found = run(*command, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == (
        '[["script.py", "--local_rank=1", "--steps", "5"], "__main__", '
        '"{\\"folder\\": \\"paro_report\\", \\"after\\": 10, \\"steps\\": 2, \\"probe\\": false}", 7]'
    )


@pytest.mark.quick
@pytest.mark.parametrize(
    "arguments, said",
    [
        ((), "report runs a script, as in: torchrun ... -m deepspeed_ext report -- script.py --its-arguments; got"),
        (("--", "none.py"), "got 'none.py', which is no file."),
        (("--after", "1", "--", __file__), "report.after must be an integer of at least 2 (optimizer steps), got 1"),
    ],
)
def test_what_cannot_run_is_refused(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["deepspeed_ext", "report", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.quick
def test_an_error_of_the_script_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one of the kind with which we refuse: nobody but Python tells of it, with a traceback."""
    script = tmp_path / "script.py"
    script.write_text("raise ValueError('a bad batch')\n")
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["deepspeed_ext", "report", "--", str(script)])
    with pytest.raises(ValueError, match="a bad batch"):
        main()
