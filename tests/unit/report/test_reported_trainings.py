# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Trainings that are reported on: the same losses, the bytes of the formula, and an engine that is as it was."""

import json
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from deepspeed_ext.config.settings import REPORT_VARIABLE, ReportSettings
from deepspeed_ext.tools.report.reporter import report_on
from tests.harness import calls, pipelines, stream_cases
from tests.harness.recorded_trainings import AFTER, STEPS, links_given
from tests.harness.tiers import deep
from tests.harness.training import Job, placed, train


def training(folder: str, name: str) -> list[str]:
    """Return the errors of a recorded training on this rank, and on rank 0 those of the report."""
    from tests.harness import recorded_trainings

    wrong = recorded_trainings.training_of(folder, recorded_trainings.SECTIONS[name], recorded_trainings.TRAINED)
    return wrong + (recorded_trainings.faults_of(folder, name) if dist.get_rank() == 0 else [])


@pytest.mark.parametrize("name", ["NIG", "ZeRO-3", *deep("IIG", "ZeRO-2")])
def test_a_report_says_what_was_trained_and_changes_nothing(ranks: Any, tmp_path: Path, name: str) -> None:
    assert ranks(4).run(training, str(tmp_path), name) == [[]] * 4


@pytest.mark.quick
def test_what_others_put_on_the_engine_stays_there() -> None:
    class Engine:
        pipeline_parallelism, global_steps = False, 0

        def step(self) -> None:
            self.global_steps += 1

        def destroy(self) -> None: ...

    def wrapped(engine: Any) -> Any:
        method = engine.step
        return lambda: method()

    engine: Any = Engine()
    before = engine.step = wrapped(engine)
    for since in (False, True):
        report_on(engine, ReportSettings(after=2, steps=1))
        if since:
            after = engine.step = wrapped(engine)
        engine.destroy()
        assert vars(engine)["step"] is (after if since else before) and "destroy" not in vars(engine)
        for _ in range(10):
            engine.step()  # which would look at the engine if steps were still counted
    assert engine.global_steps == 20


def without_section(case: tuple[str, dict[str, bool]], folder: str) -> None:
    """Train with these keys at the top level, and leave a report."""
    name, section = case
    settings = ReportSettings(folder=f"{folder}/{name}", after=AFTER, steps=STEPS)
    model = torch.nn.Linear(4, 4)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, **section}
    with mock.patch.dict(os.environ, {REPORT_VARIABLE: settings.as_variable()}), links_given():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        for _ in range(settings.last + 1):
            engine.backward(engine(torch.ones(1, 4)).mean())
            engine.step()


def test_a_training_without_a_section_is_reported_on(ranks: Any, tmp_path: Path) -> None:
    ranks(2).each(without_section, {"none": {}, "true": {"zero_optimization": True}}.items(), str(tmp_path))
    reports_by_probe = {name: json.loads((tmp_path / name / "report.json").read_text()) for name in ("none", "true")}
    called = {name: report["training"]["called"] for name, report in reports_by_probe.items()}
    assert called == {"none": "training without ZeRO", "true": "ZeRO-1"}
    assert all(report["choices"] for report in reports_by_probe.values())


def with_slow_hooks(folder: str) -> float:
    """Train with ZeRO-3 whose hooks sleep where they neither fetch nor release; return how long, in a step."""
    slept, steps = [], AFTER + STEPS + 6
    section = {"stage": 3, "paro_report": {"folder": folder, "after": AFTER, "steps": STEPS, "probe": False}}

    def sleep(*_: Any, **__: Any) -> None:
        slept.append(0.01)
        time.sleep(0.01)

    with (
        calls.before(PartitionedParameterCoordinator, "trace_prologue", sleep),
        calls.before(parameter_offload, "apply_to_tensors_only", sleep),
    ):
        train(Job(steps=steps, empty=False), section)
    return sum(slept) / steps


def test_hooks_of_modules_are_not_compute(ranks: Any, tmp_path: Path) -> None:
    (slept,) = ranks(1).run(with_slow_hooks, str(tmp_path))
    report = json.loads((tmp_path / "report.json").read_text())
    reports_by_probe = {row["part"]: row["seconds"] for row in report["parts"]}
    assert reports_by_probe["other"] > slept > 0.1 and reports_by_probe["compute"] < slept / 2


def apart(folder: str) -> None:
    """Train groups that an outer optimizer brings together, and leave a report."""
    report = {"folder": folder, "after": AFTER, "steps": STEPS}
    with links_given():
        train(Job(steps=9), placed("NII", 2, paro_outer_optimizer={"steps": 2}, paro_report=report))


def test_groups_that_train_apart_are_reported_on_together(ranks: Any, tmp_path: Path) -> None:
    ranks(4).run(apart, str(tmp_path))
    report = json.loads((tmp_path / "report.json").read_text())
    assert [report["training"][key] for key in ("ranks", "groups", "group_size")] == [4, 2, 2]
    assert any(choice["bytes_between"] for choice in report["choices"])
    assert {row["hop"]: bool(row["bytes"]) for row in report["hops"]} == {"within": True, "between": True}


def pipeline(folder: str, name: str) -> list[str]:
    """Losses of two pipelines that train the same, of which the second is reported on."""
    losses = []
    for more in ({}, {"paro_report": {"folder": folder, "after": AFTER, "steps": STEPS}}):
        engine, data = pipelines.start(pipelines.Pipe(), placed(name, 1, **more))
        with links_given():
            losses.append(str([engine.train_batch(data).item() for _ in range(10)]))
        assert "train_batch" not in vars(engine) and "_INSTRUCTION_MAP" not in vars(engine)
        engine.destroy()
    return losses


def test_a_pipeline_is_reported_on(ranks: Any, tmp_path: Path) -> None:
    for usual, reported in ranks(4).run(pipeline, str(tmp_path), "NIG"):
        assert usual == reported
    report = json.loads((tmp_path / "report.json").read_text())
    training = next(lane for lane in report["timelines"][0]["lanes"] if lane["lane"] == "training")
    kinds = [span[3] for span in training["spans"]]
    assert kinds.count("forward") == kinds.count("backward") == report["training"]["accumulation"] > 1
    assert kinds.count("update") == 1
    assert report["choices"]


@pytest.mark.parametrize("name", ["IIG", *deep("NIG")])
def test_a_device_with_streams_is_reported_on(ranks: Any, tmp_path: Path, name: str) -> None:
    """All waits are recorded, including waits of streams."""
    for findings, _, pairs in ranks(4).run(stream_cases.watch_case, name, "reported", str(tmp_path)):
        assert not findings and pairs
    report = json.loads((tmp_path / name / "report.json").read_text())
    assert {row["hop"] for row in report["hops"]} == {"within", "between"}
    training = next(lane for lane in report["timelines"][0]["lanes"] if lane["lane"] == "training")
    kinds = {span[3] for span in training["spans"]}
    assert {"forward", "backward", "update", "wait"} <= kinds
    assert "other" not in kinds  # a device does that beside what the host does
    assert all(row["busy"] > 0 for row in report["operations"])
