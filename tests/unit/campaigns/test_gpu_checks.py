# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The experiments for a GPU: they run on a CPU, failures of any kind are reported, and no verdict is too good."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts import ROOT
from tests.campaigns.gpu import __main__ as gpu
from tests.campaigns.gpu import claims
from tests.campaigns.gpu import runs as gpu_runs
from tests.campaigns.gpu.runs import EXPERIMENTS, Experiment, Outcome
from tests.harness.tiers import deep

PROGRAMS = {  # what each does, and what is reported
    "GOOD": ('r.check("holds", True); r.done()', gpu_runs.PASSED),
    "BAD": ('r.check("holds", True); r.check("does not", False); r.done()', gpu_runs.FAILED),
    "RAISES": ('r.check("holds", True); raise ValueError("a text")', gpu_runs.CRASHED),
    "DIES": ("import os; r.done(); os.kill(os.getpid(), 9)", gpu_runs.CRASHED),
    "ENDS": ('r.check("holds", True)', gpu_runs.CRASHED),
    "EMPTY": ("r.done()", gpu_runs.FAILED),
    "SKIPS": ('r.skip("needs more"); r.done()', gpu_runs.NOT_RUN),
    "HANGS": (
        'import subprocess, time; r.figure("child", subprocess.Popen(["sleep", "1000"]).pid); time.sleep(1000)',
        gpu_runs.HUNG,
    ),
    "LAST": ('r.check("holds", True); r.done()', gpu_runs.PASSED),
}


def command(experiment: Experiment, report: Path) -> Sequence[str]:
    begin = "from tests.campaigns.gpu.runs import Report; from pathlib import Path\n"
    return [sys.executable, "-c", f"{begin}r = Report(Path({str(report)!r}))\n{PROGRAMS[experiment.name][0]}"]


@pytest.mark.deep
def test_failing_experiments_do_not_end_the_others(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(ROOT)}
    experiments = [Experiment(name, "", 3.0 if name == "HANGS" else 60.0, "") for name in PROGRAMS]
    outcomes = gpu_runs.run_all(experiments, command, 600, tmp_path, lambda found: None, environment)
    found = {one.name: one for one in outcomes}
    assert {name: one.kind for name, one in found.items()} == {name: kind for name, (_, kind) in PROGRAMS.items()}
    assert "ValueError: a text" in found["RAISES"].text and found["RAISES"].checks == {"holds": True}
    child_of_hung = Path(f"/proc/{found['HANGS'].figures['child']}/stat")
    until = time.monotonic() + 5
    while child_of_hung.exists() and child_of_hung.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until, "what it has started must end with it"
        time.sleep(0.1)


def outcomes_of_all(**kinds: str) -> list[Outcome]:
    """Outcomes of all experiments: passed, where nothing else is given."""
    named = {one.name: kinds.get(one.name, gpu_runs.PASSED) for one in EXPERIMENTS}
    return [Outcome(name, "", kind, checks={"holds": True}) for name, kind in named.items()]


def test_a_claim_holds_if_all_its_experiments_checked_it() -> None:
    outcomes = outcomes_of_all(T1=gpu_runs.FAILED, T3=gpu_runs.CRASHED, T5=gpu_runs.HUNG, T7=gpu_runs.NOT_RUN)
    wanted = {("T1", "T2", "T3", "T3B"): claims.FAILS, ("T5",): claims.OPEN, ("T7",): claims.OPEN}
    found = claims.verdicts(outcomes)
    assert [one.kind for one in found] == [wanted.get(names, claims.HOLDS) for _, names in claims.CLAIMS]
    assert {name for _, names in claims.CLAIMS for name in names} == {one.name for one in EXPERIMENTS} - {"T8B", "T9"}
    for one in outcomes:
        one.kind, one.checks = gpu_runs.PASSED, {}
    assert {one.kind for one in claims.verdicts(outcomes)} == {claims.OPEN}


@pytest.mark.parametrize("changed", [{"command": "--small"}, {"device": "the CPU"}, {"commit": "abc-dirty"}, {}])
def test_only_a_whole_run_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str]) -> None:
    (tmp_path / claims.TABLE).parent.mkdir(parents=True)
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    about = {"date": "2027-01-02T03:04:05Z", "device": "a GPU", "versions": "3", "commit": "abc", "command": "python"}
    gpu_runs.write_results(tmp_path / "result", about | changed, outcomes_of_all(T4=gpu_runs.FAILED))
    assert gpu.main(["--verdicts-of", str(tmp_path / "result.json"), "--write-status"]) == 1
    assert (tmp_path / claims.TABLE).exists() == (not changed)
    if not changed:
        assert len((tmp_path / claims.TABLE).read_text().splitlines()) == 1 + len(claims.CLAIMS)
        readme = (tmp_path / "README.md").read_text()
        assert "; on a GPU (a GPU, 2027-01-02) 9 of 10 claims were confirmed, 1 failed," in readme


def experiment_case(name: str, report: str) -> None:
    gpu_runs.run_here(name, gpu_runs.Setup("cpu", True, gpu_runs.Report(Path(report))))


@pytest.mark.parametrize("name", ["T1", *deep("T0", "T3", "T4", "T5", "T7", "T9")])
def test_experiments_run(ranks: Any, kernels: bool, tmp_path: Path, name: str) -> None:
    """T2 is ``zero/test_fake_wire.py`` on a CPU."""
    ranks(1).run(experiment_case, name, str(tmp_path / "report.json"))
    found = json.loads((tmp_path / "report.json").read_text())
    assert all(found["checks"].values()), found
    assert found["checks"] or len(found["figures"]) > 4


@pytest.mark.deep
@pytest.mark.parametrize("name", ["T11", "T12", "T13", "T14"])
def test_experiments_of_several_cases_run(tmp_path: Path, name: str) -> None:
    assert gpu.main(["--device", "cpu", "--small", "--only", name, "--results", str(tmp_path)]) == 0
