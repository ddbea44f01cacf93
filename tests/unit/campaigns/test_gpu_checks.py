# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The script of experiments for a GPU: what it runs, its time limits, what it writes, and that experiments run at all,
as far as a CPU can show."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts import ROOT
from tests.campaigns.gpu import __main__ as gpu
from tests.campaigns.gpu import child, claims, waits
from tests.campaigns.gpu import runs as gpu_runs
from tests.campaigns.gpu.runs import Experiment, Outcome

PLACE = {"PYTHONPATH": str(ROOT)}
GOOD = 'r.check("holds", True); r.figure("bytes", {"a": 1.5}); r.done()'
BODIES = {
    "GOOD": GOOD,
    "BAD": 'r.check("holds", True); r.check("does not", False); r.done()',
    "RAISES": 'r.check("holds", True); raise ValueError("a text")',
    "DIES": "import os; r.done(); os.kill(os.getpid(), 9)",
    "ENDS": 'r.check("holds", True)',
    "EMPTY": "r.done()",
    "SKIPS": 'r.skip("needs more"); r.done()',
    "HANGS": """r.check("begun", True)
import subprocess, time
child = subprocess.Popen(["sleep", "1000"]); r.figure("child", child.pid)
print("here", flush=True); time.sleep(1000)""",
    "LAST": GOOD,
}
WANTED = {
    "GOOD": gpu_runs.PASSED,
    "BAD": gpu_runs.FAILED,
    "RAISES": gpu_runs.CRASHED,
    "DIES": gpu_runs.CRASHED,
    "ENDS": gpu_runs.CRASHED,
    "EMPTY": gpu_runs.FAILED,
    "SKIPS": gpu_runs.NOT_RUN,
    "HANGS": gpu_runs.HUNG,
    "LAST": gpu_runs.PASSED,
}


def made(name: str, limit: float = 60.0) -> Experiment:
    """An experiment that does what ``BODIES`` says."""
    begin = "from tests.campaigns.gpu.runs import Report; from pathlib import Path\n"

    def command(report: Path) -> Sequence[str]:
        return [sys.executable, "-c", f"{begin}r = Report(Path({str(report)!r}))\n{BODIES[name]}"]

    return Experiment(name, f"title of {name}", limit, command)


def test_one_that_crashes_or_hangs_does_not_end_the_others(tmp_path: Path) -> None:
    experiments = [made(name, limit=3.0 if name == "HANGS" else 60.0) for name in BODIES]
    noted: list[int] = []
    outcomes = gpu_runs.run_all(experiments, 600, tmp_path, lambda found: noted.append(len(found)), PLACE)
    assert {one.name: one.kind for one in outcomes} == WANTED
    assert noted == list(range(1, len(BODIES) + 1))
    found = {one.name: one for one in outcomes}
    assert found["GOOD"].checks == {"holds": True} and found["GOOD"].figures == {"bytes": {"a": 1.5}}
    assert found["BAD"].text == "did not hold: does not"
    assert "ValueError: a text" in found["RAISES"].text and found["RAISES"].checks == {"holds": True}
    assert "-9" in found["DIES"].text and found["SKIPS"].text == "needs more"
    hung = found["HANGS"]
    assert hung.checks == {"begun": True} and "here" in hung.text and 2.9 < hung.seconds < 30
    assert not running(hung.figures["child"]), "what it has started must end with it"
    assert gpu_runs.status_of(outcomes) == 1 and gpu_runs.status_of([found["GOOD"], found["LAST"]]) == 0


def test_several_run_at_once_but_those_that_measure_time(tmp_path: Path) -> None:
    """Three wait for one another; what measures time finds none of them."""
    meet = f"""import os, time
os.mkdir({str(tmp_path)!r} + "/here" + str(os.getpid()))
while len([name for name in os.listdir({str(tmp_path)!r}) if name.startswith("here")]) < 3:
    time.sleep(0.05)
r.check("met", True); r.done()"""
    look = f"import os; r.check('alone', not [x for x in os.listdir({str(tmp_path)!r}) if x[:4] == 'here']); r.done()"
    experiments = [*(made(name, 40) for name in ("GOOD", "BAD", "LAST")), replace(made("ENDS"), alone=True)]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GOOD", "BAD", "LAST"):
            patch.setitem(BODIES, name, meet)
        patch.setitem(BODIES, "ENDS", look)
        outcomes = gpu_runs.run_all(experiments, 600, tmp_path, lambda found: None, PLACE, at_once=3)
    assert [one.name for one in outcomes] == ["GOOD", "BAD", "LAST", "ENDS"], "told in their order"
    assert {one.kind for one in outcomes} == {gpu_runs.PASSED}


def running(pid: int) -> bool:
    """Whether a process is alive; it may take a moment to go."""
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state == "Z":
            return False
        time.sleep(0.1)
    return True


def test_what_the_budget_leaves_no_time_for_is_not_run(tmp_path: Path) -> None:
    outcomes = gpu_runs.run_all([made("GOOD"), made("LAST")], 5, tmp_path, lambda found: None, PLACE)
    assert [(one.kind, "of 5 s were left" in one.text) for one in outcomes] == [(gpu_runs.NOT_RUN, True)] * 2
    assert gpu_runs.status_of(outcomes) == 1


def test_selection() -> None:
    experiments = gpu.experiments("cuda", small=False)
    assert [one.name for one in gpu_runs.select(experiments, [""])] == [row[0] for row in gpu.TABLE]
    assert [one.name for one in gpu_runs.select(experiments, ["t5", " T1"])] == ["T1", "T5"]
    with pytest.raises(ValueError, match="got T99"):
        gpu_runs.select(experiments, ["T1", "T99"])
    assert next(one for one in experiments if one.name == "T3").environment == {"TORCH_CUDA_SANITIZER": "1"}
    assert not any(one.environment for one in gpu.experiments("cpu", small=False))
    assert child.FUNCTIONS.keys() == {one.name for one in experiments}


def test_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "experiments", lambda device, small: [made("GOOD"), made("BAD")])
    monkeypatch.setattr(gpu, "circumstances", lambda device: {"date": "today", "device": device})
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    arguments = ["--device", "cpu", "--results", str(tmp_path)]
    assert gpu.main([*arguments, "--only", "good"]) == 0
    written = {file.suffix: file for file in tmp_path.iterdir()}
    assert set(written) == {".json", ".txt"}
    record = json.loads(written[".json"].read_text())
    assert record["date"] == "today" and record["device"] == "cpu"
    [one] = record["experiments"]
    assert Outcome(**one).checks == {"holds": True} and one["kind"] == "passed" and one["seconds"] > 0
    text = written[".txt"].read_text()
    assert "GOOD passed" in text and "1/1 checks" in text and "bytes: a 1.5" in text
    assert text in capsys.readouterr().out
    assert gpu.main(arguments) == 1
    with pytest.raises(SystemExit) as refused:
        gpu.main([*arguments, "--only", "T99"])
    assert refused.value.code == 2


CAME = {"T1": gpu_runs.FAILED, "T3": gpu_runs.CRASHED, "T5": gpu_runs.HUNG, "T7": gpu_runs.NOT_RUN}
MEASURE = {"T8B", "T9"}  # and settle no claim


def came(**kinds: str) -> list[Outcome]:
    """Outcomes of all experiments: passed, where nothing else is given."""
    return [Outcome(row[0], row[1], kinds.get(row[0], gpu_runs.PASSED), checks={"holds": True}) for row in gpu.TABLE]


def test_each_claim_has_a_verdict() -> None:
    outcomes = came(**CAME)
    found = claims.verdicts(outcomes)
    wanted = {("T1", "T2", "T3", "T3B"): claims.FAILS, ("T5",): claims.OPEN, ("T7",): claims.OPEN}
    assert [one.kind for one in found] == [wanted.get(names, claims.HOLDS) for _, names in claims.CLAIMS]
    assert found[1].experiments == "T1 failed, T2 passed, T3 crashed, T3B passed"
    assert {one.kind for one in claims.verdicts(outcomes[:1])} == {claims.OPEN}
    assert {name for _, names in claims.CLAIMS for name in names} == {row[0] for row in gpu.TABLE} - MEASURE


def test_an_experiment_without_checks_settles_no_claim() -> None:
    outcomes = came()
    assert {one.kind for one in claims.verdicts(outcomes)} == {claims.HOLDS}
    for one in outcomes:
        one.checks, one.figures = {}, {"bytes": 1}
    found = claims.verdicts(outcomes)
    assert {one.kind for one in found} == {claims.OPEN}
    assert found[0].experiments == "T0 checked nothing, T8A checked nothing"


def test_more_waits_than_are_recorded_do_not_hold(tmp_path: Path) -> None:
    report, most = tmp_path / "report.json", waits.WAITS["IIG"]
    place = child.Place("cuda", True, gpu_runs.Report(report))
    for events, others in ((0, 0), (1, 0), (0, 1), (-1, 1)):
        counts = {
            "event at stage3.py:1": most.events + events,
            "stage3.py:2": most.others + most.copies + others,
            "elsewhere": 12,
        }
        waits.check(place, "IIG", counts)
        held = json.loads(report.read_text())["checks"]
        assert list(held.values()) == [events <= 0, others <= 0], "fewer of one kind do not excuse more of another"


def test_the_budget_has_room_for_all() -> None:
    assert sum(row[2] for row in gpu.TABLE) <= gpu.BUDGET <= 4200
    assert [row[0] for row in gpu.TABLE][:2] == ["T0", "T8A"], "the kernels come first"
    job = (ROOT / ".github" / "workflows" / "ci.yml").read_text().split("\n  gpu:\n")[1]
    minutes = re.search(r"timeout-minutes: (\d+)", job)
    assert minutes and int(minutes[1]) * 60 >= gpu.BUDGET + 1200, "an environment is made first"


def test_verdicts_are_written(tmp_path: Path) -> None:
    (tmp_path / claims.TABLE).parent.mkdir(parents=True)
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    found = claims.verdicts(came())
    about = {
        "date": "2027-01-02T03:04:05Z",
        "device": "a GPU, 80 GiB",
        "versions": "torch 3",
        "commit": "abc",
        "x": "y",
    }
    for times in (1, 2):
        claims.write(tmp_path, about, found)
        rows = (tmp_path / claims.TABLE).read_text().splitlines()
        assert rows[0] == ",".join(claims.COLUMNS) and len(rows) == 1 + times * len(claims.CLAIMS)
    assert (
        rows[1] == f'2027-01-02T03:04:05Z,"a GPU, 80 GiB",torch 3,abc,{found[0].claim},holds,"T0 passed, T8A passed"'
    )
    parts = (tmp_path / "README.md").read_text().split("\n\n")
    [status] = [part for part in parts if part.startswith("**Status:**")]
    count = len(found)
    page = claims.TABLE.parent / "README.md"
    wanted = f"; on a GPU (a GPU, 80 GiB, 2027-01-02) {count} of {count} claims hold, [as found]({page})."
    assert status.endswith(wanted) and "nothing has run" not in status
    (tmp_path / "README.md").write_text("no status")
    with pytest.raises(ValueError, match="expected one line of the status"):
        claims.write(tmp_path, about, found)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where verdicts were written, by runs that pass at once, as on a GPU and in a clean working tree."""
    roots: list[Path] = []
    monkeypatch.setattr(gpu, "has_gpu", lambda: True)
    monkeypatch.setattr(gpu, "changes", lambda: "")
    monkeypatch.setattr(gpu, "circumstances", lambda device: {"date": "2027-01-02T03:04:05Z", "device": "a GPU"})
    monkeypatch.setattr(gpu, "run_all", lambda *_: came())
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(claims, "write", lambda root, about, found: roots.append(root))
    return roots


SENTENCE = f"on a GPU (a GPU, 2027-01-02) {len(claims.CLAIMS)} of {len(claims.CLAIMS)} claims hold"


@pytest.mark.parametrize(
    "arguments, begins",
    [((), "not written (without --write-status): "), (("--only", "T1"), ""), (("--small",), "")],
)
def test_nothing_is_written_unasked(
    tmp_path: Path, written: list[Path], capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], begins: str
) -> None:
    assert gpu.main(["--results", str(tmp_path), *arguments]) == 0
    said = capsys.readouterr().out
    assert (begins + SENTENCE in said) if begins else (SENTENCE not in said)
    assert not written


def test_a_whole_run_is_written_where_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--results", str(tmp_path), "--write-status"]
    assert gpu.main(arguments) == 0 and written == [ROOT]
    assert f"written to {claims.TABLE} and README.md: {SENTENCE}" in capsys.readouterr().out
    monkeypatch.setattr(gpu, "run_all", lambda *_: came(T4=gpu_runs.NOT_RUN, T9=gpu_runs.NOT_RUN))
    assert gpu.main(arguments) == 1 and written == [ROOT]
    assert "\nnot written (T4, T9 did not run): on a GPU (" in capsys.readouterr().out


def of_before(tmp_path: Path, **changed: Any) -> Path:
    """The result of a run on a copy of the working tree, elsewhere."""
    about = {"date": "2027-01-02T03:04:05Z", "device": "a GPU", "commit": "abc1234", "command": "python"}
    file = tmp_path / "2027-01-02.json"
    gpu_runs.write_results(file.with_suffix(""), about | changed, came(T4=gpu_runs.FAILED, T5=gpu_runs.HUNG))
    return file


def test_an_earlier_run_is_written_where_asked(
    tmp_path: Path, written: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(of_before(tmp_path))
    assert gpu.main(["--verdicts-of", file]) == 1 and not written
    assert gpu.main(["--verdicts-of", file, "--write-status"]) == 1 and written == [ROOT]
    assert "(a GPU, 2027-01-02) 7 of 9 claims hold, 1 does not, 1 not settled, [as" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changed, got",
    [
        ({"command": "python --small"}, "a whole run on a GPU, got 'python --small' on a GPU"),
        ({"device": "the CPU"}, "a whole run on a GPU, got 'python' on the CPU"),
        ({"commit": "unknown"}, "a run of a commit, got 'unknown'"),
        ({"commit": "abc1234-dirty"}, "a run of a commit, got 'abc1234-dirty'"),
    ],
    ids=str,
)
def test_an_earlier_run_that_may_not_be_written_is_refused(
    tmp_path: Path, written: list[Path], capsys: pytest.CaptureFixture[str], changed: dict[str, str], got: str
) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--verdicts-of", str(of_before(tmp_path, **changed)), "--write-status"])
    assert got in capsys.readouterr().err and not written


@pytest.mark.parametrize(
    "arguments, changed, got",
    [
        (("--only", "T1"), "", "a whole run on a GPU, got --only"),
        (("--small", "--device", "cpu"), "", "a whole run on a GPU, got --small, --device cpu"),
        ((), " M README.md", "a clean working tree, got changes of it:\n M README.md"),
    ],
)
def test_what_may_not_be_written_is_refused_before_it_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    written: list[Path],
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    changed: str,
    got: str,
) -> None:
    monkeypatch.setattr(gpu, "changes", lambda: changed)
    with pytest.raises(SystemExit) as refused:
        gpu.main(["--results", str(tmp_path / "results"), "--write-status", *arguments])
    assert refused.value.code == 2 and f"--write-status: expected {got}" in capsys.readouterr().err
    assert not written and not (tmp_path / "results").exists()


def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "has_gpu", lambda: False)
    assert gpu.main(["--results", str(tmp_path / "results")]) == gpu.NO_GPU == 3
    assert capsys.readouterr().err.splitlines() == ["No GPU: nothing was run. torch sees none of NVIDIA's."]
    assert not (tmp_path / "results").exists()


def experiment_case(name: str, report: str) -> None:
    """Run an experiment on the CPU, in small."""
    child.run(name, child.Place("cpu", True, gpu_runs.Report(Path(report))))


@pytest.mark.parametrize("name", ["T0", "T1", "T3", "T4", "T5", "T7", "T9"])
def test_experiments_run(ranks: Any, kernels: bool, tmp_path: Path, name: str) -> None:
    """T2 is ``zero/test_fake_wire.py`` on a CPU."""
    ranks(1).run(experiment_case, name, str(tmp_path / "report.json"))
    found = json.loads((tmp_path / "report.json").read_text())
    assert all(found["checks"].values()), found
    assert found["checks"] or len(found["figures"]) > 4


def test_a_check_of_several_ranks_holds_if_it_does_on_all(ranks: Any) -> None:
    checks, figures, why = ranks(1).run(followed_case)[0]
    assert checks == {"a case: here": True, "a case: there": False} and figures == {"a case: bytes": 7}
    assert why == {
        "good": "",
        "raises": "rank 1: ValueError: a text",
        "ends": "the process of rank 1 has ended",
        "hangs": "ranks [1] did not end within 0 s",
        "checks nothing": "it checked nothing",
    }


def followed_case() -> tuple[dict[str, bool], dict[str, Any], dict[str, str]]:
    """Checks and figures of a case on two ranks; and why cases have failed whose second rank does something else."""
    from multiprocessing import Pipe

    from tests.campaigns.gpu.one_by_one import Case, followed

    class Taken:
        checks: dict[str, bool]
        figures: dict[str, Any]

        def check(self, name: str, held: bool) -> None:
            self.checks[name] = held

        def figure(self, name: str, value: Any) -> None:
            self.figures[name] = value

    over = ("over", "", "")
    found = ("check", "here", True), ("check", "there", False), ("figure", "bytes", 7), over
    told: dict[str, list[tuple[str, str, Any]]] = {
        "checks nothing": [over],
        "raises": [("over", "", "ValueError: a text")],
        "ends": [],
        "hangs": [],
        "good": [("figure", "bytes", 8), ("check", "here", True), ("check", "there", True), over],
    }
    taken, why = Taken(), {}
    for what, second in told.items():
        taken.checks, taken.figures = {}, {}
        pipes = [Pipe(duplex=False) for _ in range(2)]
        for (_, theirs), messages in zip(pipes, ([over] if what == "checks nothing" else found, second), strict=True):
            for message in messages:
                theirs.send(message)
        if what == "ends":
            pipes[1][1].close()
        why[what] = followed(taken, Case("a case", print), [ours for ours, _ in pipes], 0.3)
    return taken.checks, taken.figures, why


@pytest.mark.deep
def test_a_case_that_fails_ends_no_other(tmp_path: Path) -> None:
    report = str(tmp_path / "report.json")
    script = f"from tests.unit.campaigns.test_gpu_checks import failing_case\nfailing_case({report!r})"
    subprocess.run([sys.executable, "-c", script], env=gpu.environment("cpu"), check=True, timeout=200)
    found = json.loads(Path(report).read_text())
    checks = {"raises: ran to its end": False, "good: alone": True, "good: ran to its end": True}
    assert found["checks"] == {**checks, "ranks that ran good ended well": True}
    assert "rank 0: ValueError: a text" in found["figures"]["raises: why"]


def failing_case(report: str) -> None:
    """Run two cases, of which the first raises."""
    from tests.campaigns.gpu.one_by_one import Case, run_cases

    place = child.Place("cpu", True, gpu_runs.Report(Path(report)))
    run_cases(place, [Case("raises", raising), Case("good", checking)], alone=True)


def raising(place: Any) -> None:
    raise ValueError("a text")


def checking(place: Any) -> None:
    from deepspeed import comm as dist

    place.report.check("alone", dist.get_world_size() == 1)


@pytest.mark.deep
@pytest.mark.parametrize("name", ["T11", "T12", "T13"])
def test_experiments_of_several_cases_run(tmp_path: Path, name: str) -> None:
    assert gpu.main(["--device", "cpu", "--small", "--only", name, "--results", str(tmp_path)]) == 0


def test_synchronizations_of_a_gpu_are_counted(ranks: Any) -> None:
    modes, counts = ranks(1).run(counting_case)[0]
    assert modes == ["warn", "default"]
    assert counts == {"elsewhere": 2, "event at elsewhere": 1}, (
        "a warning of torch, a wait for the device, and one for an event"
    )


def counting_case() -> tuple[list[str], dict[str, int]]:
    """What is counted where torch's part is played; and the modes that torch was set to."""
    import warnings
    from unittest import mock

    import torch

    from tests.campaigns.gpu.timeline import _counted_on_gpu

    modes: list[str] = []
    with (
        mock.patch.object(torch.cuda, "set_sync_debug_mode", modes.append),
        mock.patch.object(torch.cuda, "synchronize", lambda: None),
        mock.patch.object(torch.cuda.Event, "synchronize", lambda event: None),
    ):
        with _counted_on_gpu() as counts:
            warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)
            warnings.warn("another", UserWarning, stacklevel=1)
            torch.cuda.synchronize()
            torch.cuda.Event.synchronize(None)
        torch.cuda.synchronize()
    return modes, dict(counts)
