# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Trainings that are reported on: the same losses, the bytes of the formula, and an engine that is as it was."""

import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext.planner.rates import HopRates, Rate, Rates

LINKS = Rates(*[HopRates(Rate(0.0, 1e9), Rate(0.0, 1e8))] * 2)  # to measure them would take seconds
AFTER, STEPS = 2, 1
TRAINED: dict[str, Any] = {
    "steps": 10,
    "accumulation": 2,
    "sizes": (64, 96, 80, 48),
    "empty": False,
    "optimizer": "Adam",
}


def trainings(folder: str, sections: dict[str, dict[str, Any]], job: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each section whether losses and weights are those of an engine that nobody records, and the report."""
    from unittest import mock

    import torch

    from deepspeed_ext.comm import watching
    from deepspeed_ext.planner import probe
    from tests.harness.training import Job, train

    found = []
    for name, section in sections.items():
        settings = {"folder": f"{folder}/{name}", "after": AFTER, "steps": STEPS}
        wrapped: dict[str, bool] = {}

        def look(engine: Any, wrapped: dict[str, bool] = wrapped) -> None:
            wrapped["left"] = bool({"step", "forward", "backward", "_take_model_step"} & set(vars(engine)))
            wrapped["watched"] = watching._watcher is not None

        usual = train(Job(**job), section)
        with mock.patch.object(probe, "measure", lambda *_: LINKS):
            reported = train(Job(**job), {**section, "paro_report": settings}, look)
        train(Job(**{**job, "steps": AFTER + 3}), {**section, "paro_report": settings})
        wrapped["recorded on"] = watching._watcher is not None
        same = usual.losses == reported.losses and torch.equal(usual.weights, reported.weights)
        found.append({"name": name, "same": same, **wrapped})
    return found


def test_a_report_says_what_was_trained_and_changes_nothing(ranks: Any, tmp_path: Path) -> None:
    nothing_whole = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    sections: dict[str, dict[str, Any]] = {
        "NIG": {"paro_strategy": "NIG", "paro_group_size": 2},
        "IIG": {"paro_strategy": "IIG", "paro_group_size": 2, **nothing_whole},
        "ZeRO-2": {"stage": 2},
        "ZeRO-3": {"stage": 3, **nothing_whole},
    }
    found = ranks(4).run(trainings, str(tmp_path), sections, TRAINED)
    for rank in found:
        for one in rank:
            assert one["same"], f"{one['name']}: recording has changed the training"
            assert not one["left"] and not one["watched"], f"{one['name']}: the engine is not as it was"
            assert not one["recorded on"], f"{one['name']}: an engine that is destroyed is still recorded"
    for name in sections:
        report = json.loads((tmp_path / name / "report.json").read_text())
        check(report, name)
        assert "<html" in (tmp_path / name / "report.html").read_text()
        assert json.loads((tmp_path / name / "trace.json").read_text())["traceEvents"]


def check(report: dict[str, Any], name: str) -> None:
    """Compare a report with what it must say."""
    plain = name.startswith("ZeRO")
    assert report["training"]["called"].startswith(name)
    assert report["training"]["strategy"] == (None if plain else name)
    assert (report["training"]["ranks"], report["training"]["accumulation"]) == (4, 2)
    assert report["steps"]["first"] == AFTER + 3 + 1 and len(report["steps"]["seconds"]) == STEPS
    parts = {row["part"]: row["seconds"] for row in report["parts"]}
    assert sum(parts.values()) == pytest.approx(report["steps"]["seconds"][0])
    assert parts["compute"] > 0 and parts["update"] > 0 and min(parts.values()) >= 0
    assert [row["rank"] for row in report["ranks"]] == [0, 1, 2, 3]
    training = next(lane for lane in report["timelines"][0]["lanes"] if lane["lane"] == "training")
    kinds = [span[3] for span in training["spans"]]
    assert kinds.count("forward") == kinds.count("backward") == 2 and kinds.count("update") == 1
    if not plain:
        for row in report["hops"]:
            share = row["bytes"] / row["formula_bytes"]  # norms and overflows are some bytes more
            # With p = I the last layers of a forward, here most of them, are kept for its backward, and a thread may
            # begin what it sends of a step when the next one has begun.
            least, most = (0.5, 1.6) if name == "IIG" else (0.99, 1.05)
            assert least < share < most, f"{name}: {row['hop']}"
        memory = {row["state"]: (row["bytes"], row["formula"]) for row in report["memory"]}
        for state, (nbytes, formula) in memory.items():
            assert nbytes == pytest.approx(formula, rel=0.05), f"{name}: {state}"
    if name in ("IIG", "ZeRO-3"):
        assert any(row["module"].startswith("layers") for row in report["modules"]), f"{name}: no module waits"
    now = [row["strategy"] for row in report["choices"] if row["now"]]
    assert now == [name]


def pipeline(folder: str, name: str) -> list[str]:
    """Losses of two pipelines that train the same, of which the second is reported on."""
    from unittest import mock

    from deepspeed_ext.planner import probe
    from tests.harness import pipelines
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
