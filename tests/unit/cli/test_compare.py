# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``python -m deepspeed_ext compare``: its launches, output and errors."""

import json
import math
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext import __main__
from deepspeed_ext.tools.compare import cli as command
from scripts.emulation.launching import environment, free_port
from tests.harness.tiers import with_cases

SCRIPT = """
import argparse, json
import deepspeed, torch
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
parser = argparse.ArgumentParser()
parser.add_argument("--config")
parser.add_argument("--local_rank")  # DeepSpeed's launcher passes that
path = parser.parse_args().config
torch.manual_seed(json.load(open(path))["seed"])
model = torch.nn.Linear(64, 64)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=path)
data = torch.Generator().manual_seed(engine.global_rank)
while True:
    batch = torch.randn(8, 64, generator=data)
    loss = (engine(batch) - batch).square().mean()
    engine.backward(loss)
    engine.step()
"""
# Ranks that share one import of DeepSpeed, which takes most of the time of a turn; their ends do not visit it.
LAUNCHER = """
import gc, os, runpy, sys
import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer
gc.freeze()
ranks = []
for rank in range(2):
    ranks.append(os.fork())
    if not ranks[-1]:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks))
"""
PLAIN: dict[str, Any] = {
    "seed": 0,
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}
NIG = {"zero_optimization": {"paro_strategy": "NIG", "paro_group_size": 1}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to be in, with configurations and a script; the command sets no handlers of signals."""
    for name, more in {"a": {}, "nig": NIG}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({**PLAIN, **more}))
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "exit_on_signals", lambda: None)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path


@pytest.fixture
def compare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """A function that runs the command in a folder with configurations, and returns its exit status."""

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["deepspeed_ext", "compare", *words])
        try:
            __main__.main()
        except SystemExit as ended:
            assert isinstance(ended.code, int)
            return ended.code
        return 0

    return run


def test_a_script_under_two_configurations(
    compare: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "launch.py").write_text(LAUNCHER)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    options = ["--rounds", "1", "--steps", "2", "--warm-up", "1", "--launch", f"{sys.executable} launch.py"]
    options += ["--json", "all.json", "--", "train.py", "--config", "{config}"]
    assert compare("a.json", "nig.json", *options) == 0
    output = capfd.readouterr()
    head, _, titles, a, b, _, of_b = output.out.splitlines()
    assert head.startswith("2 rank(s) of cpu, float32, DeepSpeed ") and "s per step" in titles
    assert [row.split()[:3] for row in (a, b)] == [["A", "a.json", "ZeRO-2"], ["B", "nig.json", "N-I-G"]]
    assert "losses agree (largest difference " in of_b
    written = json.loads((folder / "all.json").read_text())
    assert [entry["problem"] for entry in written["comparisons"]] == [""] and written["losses_agree"]
    assert written["comparisons"][0]["loss_difference"] < 1e-6
    assert [len(turn["seconds"]) for entry in written["configs"] for turn in entry["turns"]] == [2, 2]
    files = {path.name for path in (folder / "deepspeed_compare").iterdir()}
    assert files == {f"1-{letter}{kind}" for letter in "AB" for kind in (".json", f"-{platform.node()}.log")}
    assert output.err == ""  # no bar where stderr is no terminal


@pytest.mark.deep
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_stock_launchers(compare: Any, capfd: pytest.CaptureFixture[str], launcher: str) -> None:
    options = ["--rounds", "1", "--steps", "2", "--warm-up", "1", "--launcher", launcher, "--ranks", "2"]
    assert compare("a.json", "nig.json", *options, "--", "train.py", "--config", "{config}") == 0
    assert "losses agree (largest difference " in capfd.readouterr().out


@pytest.mark.quick
@with_cases(
    ("script", "expected"),
    ("print('Good' + 'bye'); raise SystemExit(3)", "Goodbye\n\nexit status 3"),
    ("print('Good' + 'bye')", "Goodbye\n\nthe script ended without a report in "),
    (
        "import json, os, base64\n"
        "turn = json.loads(base64.urlsafe_b64decode(os.environ['DEEPSPEED_EXT_COMPARE']))\n"
        "open(turn['report'], 'w').write('{\"unfinished\": 5}')",
        "the script ended after 5 optimizer steps, expected --warm-up + --steps = 13.",
    ),
)
def test_a_script_that_fails(compare: Any, folder: Path, capsys: Any, script: str, expected: str) -> None:
    (folder / "fails.py").write_text(script)
    assert compare("a.json", "nig.json", "--launch", sys.executable, "--", "fails.py") == 1
    output = capsys.readouterr().err
    assert expected in output and output.endswith("A (a.json) failed in round 1.\n")


@pytest.mark.quick
def test_turns_replaced_keys_and_orders(compare: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of each launch, without launching."""
    loss = 1.0
    turns: list[tuple[str, dict[str, Any] | None]] = []

    def taken(launch: list[str], env: dict[str, str], log: Path, seconds: float) -> None:
        turn = command.RunSpec.decode(env[command.VARIABLE])
        turns.append((log.stem, turn.config))
        report = {"strategy": "ZeRO-2", "ranks": 2, "device": "cpu", "dtype": "float32", "samples": 8}
        memory = dict.fromkeys(("peak_bytes", "parameter_bytes", "optimizer_bytes"), 1)
        rest = {"seconds": [1.0] * turn.steps, "losses": [loss] * 13, "versions": {"deepspeed": "0"}, **memory}
        Path(turn.report).write_text(json.dumps({**report, **rest}))

    monkeypatch.setattr(command, "run", taken)
    assert compare("a.json", "nig.json", "--rounds", "2", "--", "train.py") == 0
    assert [name for name, _ in turns] == ["1-A", "1-B", "2-A", "2-B"]
    assert [config for _, config in turns[:2]] == [PLAIN, {**PLAIN, **NIG}]
    turns.clear()
    shuffled = ["a.json", "nig.json", "--rounds", "9", "--order", "random", "--", "train.py", "{config}"]
    assert compare(*shuffled) == 0
    first, names = [name for name, _ in turns], {name for name, _ in turns}
    assert {config for _, config in turns} == {None}
    assert names == {f"{number}-{letter}" for number in range(1, 10) for letter in "AB"}
    assert [name[0] for name in first] == sorted(name[0] for name in names)  # within rounds
    assert {name[2] for name in first[::2]} == {"A", "B"}
    turns.clear()
    assert compare(*shuffled) == 0
    assert [name for name, _ in turns] == first  # the same on all nodes
    loss = math.nan
    assert compare("a.json", "nig.json", "--json", "all.json", "--", "train.py") == 1
    written = json.loads((folder / "all.json").read_text(), parse_constant=pytest.fail)
    assert written["configs"][0]["turns"][0]["losses"] == [None] * 13
    assert compare("a.json", "nig.json", "--ignore-losses", "--", "train.py") == 0
    turns.clear()
    assert compare("a.json", "nig.json", "--rounds", "1", "--launch", "srun", "--", "train.py") == 1
    assert [name for name, _ in turns] == [f"1-{letter}-{platform.node()}" for letter in "AB"]


@pytest.mark.quick
@with_cases(
    ("words", "expected"),
    ("a.json -- train.py", "expected two configurations or more, got 1"),
    ("a.json nig.json", "expected the script after --, such as -- train.py"),
    ("a.json nig.json -- -m", "expected the script after --"),
    ("a.json nig.json -- none.py", "there is no script none.py"),
    ("a.json none.json -- train.py", "the configuration none.json cannot be read: No such file"),
    ("a.json train.py -- train.py", "the configuration train.py is not valid JSON: "),
    ("a.json list.json -- train.py", "list.json must be a dictionary, got list"),
    ("a.json auto.json -- train.py", 'auto.json has a value "auto", which a framework replaces'),
    ("a.json early.json -- train.py", "early.json has tensor_parallel, which DeepSpeed reads before"),
    ("a.json nig.json --hostfile none -- train.py", "there is no --hostfile none"),
    ("a.json nig.json --launch srun --ranks 2 -- train.py", "--launch replaces the launcher; remove --ranks."),
    ("a.json nig.json --launcher torchrun --hostfile a.json -- train.py", "with torchrun use --launch on each"),
    ("a.json nig.json --steps 0 -- train.py", "must be above 0, got 0"),
    ("a.json nig.json --folder a.json -- train.py", "cannot be created"),
)
def test_what_cannot_run_is_refused(
    compare: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, words: str, expected: str
) -> None:
    (folder / "list.json").write_text("[]")
    (folder / "auto.json").write_text('{"optimizer": {"type": "auto"}}')
    (folder / "early.json").write_text('{"tensor_parallel": {"autotp_size": 2}}')
    monkeypatch.setattr(command, "run", None)  # nothing is launched
    assert compare(*words.split()) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.quick
def test_what_follows_the_dashes_is_the_scripts(compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(command, "run_command", lambda arguments, script: commands.append(list(script)) or 0)
    compare("a.json", "nig.json", "--steps", "4", "--", "train.py", "--steps", "9", "--", "--json", "x")
    assert commands == [["train.py", "--steps", "9", "--", "--json", "x"]]
