# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Commands of launchers, the environment of their ranks, and that no rank is left running."""

import importlib
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from deepspeed_ext.tools.compare import launching
from deepspeed_ext.tools.compare.launching import Launcher, RunFailed, environment, run
from deepspeed_ext.tools.compare.run_spec import VARIABLE, RunSpec
from tests.harness.tiers import with_cases

TURN = RunSpec(10, 3, "/folder/1-A.json", {"zero_optimization": {"stage": 3}})
CONFIG = Path("/configs/a.json")
SCRIPT = ["train.py", "--deepspeed_config={config}", "--epochs", "1"]
MODULE = ["-m", "package.train", "--config", "{config}"]


def parsed(launcher: Launcher, script: list[str]) -> dict[str, Any]:
    python, minus_m, module, *words = launcher.command(script, CONFIG)
    assert (python, minus_m) == (sys.executable, "-m")
    assert module in ("torch.distributed.run", "deepspeed.launcher.runner")
    return vars(importlib.import_module(module).parse_args(words))


def test_stock_launchers_read_our_commands() -> None:
    launchers = [Launcher("deepspeed", 2), Launcher("deepspeed", None, "hosts"), Launcher("torchrun", 2)]
    rows = [parsed(each_launcher, script) for each_launcher in launchers for script in (SCRIPT, MODULE)]
    for number, row in enumerate(rows):
        module = number % 2 == 1
        script, *arguments = [word.replace("{config}", str(CONFIG)) for word in (MODULE[1:] if module else SCRIPT)]
        assert row.get("user_script", row.get("training_script")) == script
        assert row.get("user_args", row.get("training_script_args")) == arguments
        assert row["module"] is module
    local, hosts, torchrun = rows[::2]
    assert local["num_gpus"] == 2 and local["master_port"] != 29500
    assert hosts["hostfile"] == "hosts" and hosts["num_gpus"] == -1
    assert torchrun["nproc_per_node"] == "2" and torchrun["standalone"]
    command = Launcher(prefix='srun --export="ALL" python').command(SCRIPT, CONFIG)
    assert command == ["srun", "--export=ALL", "python", "train.py", "--deepspeed_config=/configs/a.json", *SCRIPT[2:]]


@pytest.mark.quick
def test_variables_reach_other_nodes_beside_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / ".deepspeed_env").write_text("NCCL_DEBUG=INFO\n\n")
    (tmp_path / "here" / ".deepspeed_env").write_text("LD_PRELOAD=/lib/a=b.so")
    with environment(TURN) as env:
        file = Path(env["DS_ENV_FILE"])
        lines = dict(line.split("=", 1) for line in file.read_text().splitlines())  # as DeepSpeed's runner reads it
        assert file.stat().st_mode & 0o777 == 0o600  # the lines may be secrets
    assert not file.exists()
    assert lines == {"NCCL_DEBUG": "INFO", "LD_PRELOAD": "/lib/a=b.so", VARIABLE: TURN.encode()}
    assert RunSpec.decode(env[VARIABLE]) == TURN and env["PATH"] == os.environ["PATH"]
    assert file.is_absolute()  # so that the runner finds it in any folder
    assert not re.search(r"[^\w@%+=:,./-]", lines[VARIABLE])  # which it would quote


def is_running(process: int) -> bool:
    """Return whether a process has not been killed yet; a zombie has been killed, but its status was not read."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.quick
@with_cases(
    "shell, seconds, why",
    ("setsid sh -c 'trap : TERM; {child}' & {wait}", 2, "not finished after 2 s"),
    ("setsid sh -c '{child}' & sleep 1; exit 7", 60, "exit status 7"),
    ids=["time-out", "failure"],
)
def test_a_launch_that_does_not_end_well_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str, seconds: float, why: str
) -> None:
    """Not even in a session of its own that ignores SIGTERM, as torchrun's ranks are while they handle it."""
    monkeypatch.setattr(launching, "_GRACE", 0.5)
    log = tmp_path / "log"
    command = shell.format(child="echo child $$; while :; do sleep 1; done", wait="echo last words; sleep 600")
    with pytest.raises(RunFailed, match=rf"\n\n{why}\ncommand: sh -c (.|\n)*\nwhole log: "):
        run(["sh", "-c", command], os.environ, log, seconds)
    assert not is_running(int(log.read_text().partition("child ")[2].split()[0]))


@pytest.mark.quick
def test_a_launch_that_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(RunFailed) as failed:
        run(["sh", "-c", "seq -f 'line %g' 0 99; exit 7"], os.environ, tmp_path / "log", 60)
    assert "line 99\n\nexit status 7" in str(failed.value) and "\nline 59\n" not in str(failed.value)
    with pytest.raises(RunFailed, match="no_such_launcher cannot be run"):
        run(shlex.split("no_such_launcher x"), os.environ, tmp_path / "log", 60)
