# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Measurements of a comparison inside the ranks of an unchanged script."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch

from deepspeed_ext.config.section import active_strategy
from deepspeed_ext.tools import clocks
from deepspeed_ext.tools.compare import measuring
from deepspeed_ext.tools.compare.run_spec import UNFINISHED, VARIABLE, RunSpec, current_run_spec
from tests.harness import calls, training
from tests.harness.pipelines import Pipe, train_pipeline
from tests.harness.tiers import deep, with_cases
from tests.harness.training import Job, configuration, make_engine

STEPS, WARM_UP = 3, 2


@contextlib.contextmanager
def launched(turn: RunSpec) -> Iterator[None]:
    """Act as a process that the command has launched and that ends within this context; run its atexit functions."""
    with (
        mock.patch.dict(os.environ, {VARIABLE: turn.encode()}),
        mock.patch.object(measuring, "_measurement", None),
        mock.patch.object(measuring.atexit, "register") as register,
    ):
        try:
            yield
        finally:
            for call in register.call_args_list:
                call.args[0]()


def train_case(report: str, zero: dict[str, Any], steps: int = 10, **job: Any) -> tuple[list[float], Any]:
    """Return the losses of this rank's micro-batches, and the status with which the script was ended."""
    losses: list[float] = []
    noted = calls.after(training, "micro_step", lambda loss, *_: losses.append(loss))
    with launched(RunSpec(STEPS, WARM_UP, report)), noted:
        try:
            training.train(Job(steps=steps, **job), zero)
        except SystemExit as ended:
            return losses, ended.code
    return losses, None


def pipeline_case(report: str) -> Any:
    with launched(RunSpec(STEPS, WARM_UP, report)), pytest.raises(SystemExit) as ended:
        train_pipeline(Pipe(steps=10), {"stage": 1})
    return ended.value.code


def configured_case(report: str, config: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    script_config = configuration(Job(), {"stage": 3})
    with (
        launched(RunSpec(STEPS, WARM_UP, report, config)),
        mock.patch(f"{make_engine.__module__}.configuration") as configured,
    ):
        configured.return_value = script_config
        engine, _ = make_engine(Job(), {})
    active = active_strategy(engine._config)
    engine.destroy()
    assert deepspeed.comm.get_world_size() == 2
    given = {key: script_config[key] for key in ("zero_optimization", "train_micro_batch_size_per_gpu")}
    return given, active and active.name


def two_engines_case(report: str) -> int:
    with launched(RunSpec(STEPS, WARM_UP, report)), contextlib.suppress(SystemExit):
        first, other = (make_engine(Job(), {"stage": 1})[0] for _ in range(2))
        data = training.batches(Job())
        for _ in range(2):
            training.micro_step(other, Job(), 0, *next(data))  # of the one that steps later
        while True:
            for engine in (first, other):
                training.step(engine, Job(), 0, data)
    return int(other.global_steps)


@with_cases(("zero", "name"), ({"paro_strategy": "NIG", "paro_group_size": 1}, "NIG"), *deep(({"stage": 3}, "ZeRO-3")))
def test_steps_losses_and_memory_of_a_script(ranks: Any, tmp_path: Path, zero: dict[str, Any], name: str) -> None:
    path = tmp_path / "report.json"
    (first, status), (second, other_status) = ranks(2).run(train_case, str(path), zero, accumulation=2, empty=False)
    assert (status, other_status) == (0, 0)  # of exit, on all ranks
    assert len(first) == len(second) == 2 * (STEPS + WARM_UP)  # nothing after the last step
    report = json.loads(path.read_text())
    assert (report["strategy"], report["ranks"], report["micro_batches"]) == (name, 2, 2)
    assert len(report["seconds"]) == STEPS and min(report["seconds"]) > 0
    pairs = [(first[at : at + 2], second[at : at + 2]) for at in range(0, len(first), 2)]
    assert report["losses"] == pytest.approx([sum(a + b) / 4 for a, b in pairs], rel=1e-12)
    assert report["losses_of_rank_0"] == pytest.approx([sum(a) / 2 for a, _ in pairs], rel=1e-12)
    assert report["dtype"] == "float32" and report["optimizer_bytes"] > 0 and report["parameter_bytes"] > 0
    assert report["peak_bytes_of_run"] >= report["peak_bytes"] > 1e6
    assert list(tmp_path.iterdir()) == [path]


def test_a_pipeline(ranks: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert ranks(2).run(pipeline_case, str(path)) == [0, 0]
    report = json.loads(path.read_text())
    assert len(report["seconds"]) == STEPS and len(report["losses"]) == STEPS + WARM_UP
    assert report["losses"] == report["losses_of_rank_0"] and None not in report["losses"]


def test_a_script_that_ends_too_early_or_gives_no_losses(ranks: Any, tmp_path: Path) -> None:
    """A node without the folder of the report writes nothing."""
    path, elsewhere = tmp_path / "report.json", tmp_path / "elsewhere" / "report.json"
    assert ranks(2).run(train_case, str(path), {"stage": 2}, steps=4)[0][1] is None
    assert json.loads(path.read_text()) == {UNFINISHED: 4}
    ranks(2).run(train_case, str(path), {"stage": 2}, backward="loss")
    report = json.loads(path.read_text())
    assert report["losses"] == report["losses_of_rank_0"] == [None] * (STEPS + WARM_UP)
    assert ranks(1).run(train_case, str(elsewhere), {"stage": 2})[0][1] == 0
    assert list(tmp_path.iterdir()) == [path]


def test_a_configuration_in_code_is_replaced_key_by_key(ranks: Any, tmp_path: Path) -> None:
    config = {"zero_optimization": {"paro_strategy": "NIG", "paro_group_size": 1}, "train_batch_size": "auto"}
    active, strategy = ranks(2).run(configured_case, str(tmp_path / "report.json"), config)[0]
    assert strategy == "NIG" and active["zero_optimization"]["paro_strategy"] == "NIG"
    assert active["zero_optimization"].get("stage") != 3 and isinstance(active["train_micro_batch_size_per_gpu"], int)


def test_the_first_engine_that_ends_a_step_is_measured(ranks: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert ranks(2).run(two_engines_case, str(path)) == [STEPS + WARM_UP - 1] * 2
    assert len(json.loads(path.read_text())["losses"]) == STEPS + WARM_UP


@pytest.mark.quick
def test_a_turn_survives_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = RunSpec(10, 3, "/some where/1-A.json", {"zero_optimization": {"stage": 3}, "x": 'ü"$('})
    assert RunSpec.decode(turn.encode()) == turn
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(ValueError, match=f"{VARIABLE} is set by python -m deepspeed_ext compare .* Unset it"):
        current_run_spec()
    monkeypatch.delenv(VARIABLE)
    assert current_run_spec() is None


@pytest.mark.quick
def test_the_first_rank_of_a_node_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for local in "10":
        monkeypatch.setenv("LOCAL_RANK", local)
        measuring.Measurement(RunSpec(STEPS, WARM_UP, str(tmp_path / local))).write_unfinished()
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


class Event:
    """An event of a device on which a step takes 50 ms, whatever the host does."""

    recorded = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.recorded += 1
        self.milliseconds = 50.0 * Event.recorded

    def elapsed_time(self, end: "Event") -> float:
        return end.milliseconds - self.milliseconds


@pytest.mark.quick
def test_on_a_device_nothing_waits_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    device = mock.Mock(Event=Event)
    device.is_synchronized_device.return_value = False
    engine = mock.Mock(pipeline_parallelism=True, train_batch=lambda: torch.zeros(()))
    monkeypatch.setattr(clocks, "get_accelerator", lambda: device)
    monkeypatch.setattr(measuring.Measurement, "_finish", lambda *_: None)
    measurement = measuring.Measurement(RunSpec(steps=3, warm_up=1, report=""))
    measurement.watch(engine)
    assert not Event.recorded, "a device is used before the script has chosen its own"
    for _ in range(4):
        engine.train_batch()
    assert not device.synchronize.called
    assert measurement._seconds() == pytest.approx([0.05] * 3) and device.synchronize.called
