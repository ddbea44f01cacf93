# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Trainings that are reported on: the same losses, the bytes of the formula, and an engine that is as it was."""

import json
from pathlib import Path
from typing import Any


def trainings(folder: str) -> dict[str, list[str]]:
    """Of each section, what is wrong on this rank, and on rank 0 with the report."""
    from deepspeed import comm as dist

    from tests.harness import reported

    wrong = {}
    for name, section in reported.SECTIONS.items():
        wrong[name] = reported.training_of(f"{folder}/{name}", section, reported.TRAINED)
        if dist.get_rank() == 0:
            wrong[name] += reported.faults_of(f"{folder}/{name}", name)
    return wrong


def test_a_report_says_what_was_trained_and_changes_nothing(ranks: Any, tmp_path: Path) -> None:
    for found in ranks(4).run(trainings, str(tmp_path)):
        assert found == {"NIG": [], "IIG": [], "ZeRO-2": [], "ZeRO-3": []}


def pipeline(folder: str, name: str) -> list[str]:
    """Losses of two pipelines that train the same, of which the second is reported on."""
    from unittest import mock

    from deepspeed_ext.planner import probe
    from tests.harness import pipelines
    from tests.harness.reported import AFTER, LINKS, STEPS
    from tests.harness.training import placed

    losses = []
    for more in ({}, {"paro_report": {"folder": folder, "after": AFTER, "steps": STEPS}}):
        engine = pipelines.make_pipeline(pipelines.Pipe(), placed(name, 1, **more))
        data = pipelines.batches(engine.grid.get_data_parallel_rank())
        with mock.patch.object(probe, "measure", lambda *_: LINKS):
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
