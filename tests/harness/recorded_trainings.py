# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Recorded trainings, compared with the same ones without a recorder; runs inside rank processes."""

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.comm import observers
from deepspeed_ext.planner import probe
from deepspeed_ext.planner.rates import HopRates, Rate, Rates
from deepspeed_ext.strategy import hyphenate
from deepspeed_ext.tools.plan.recorded_training import FlatRates, RecordedTraining
from deepspeed_ext.tools.plan.what_if import WhatIf
from deepspeed_ext.tools.report import flat_collectives
from deepspeed_ext.tools.report.contents import group_rows
from tests.harness.training import Job, train

LINKS = Rates(*[HopRates(Rate(0.0, 1e9), Rate(0.0, 1e8))] * 2)  # to measure them would take seconds
AFTER, STEPS = 2, 1
NOTHING_WHOLE = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
SECTIONS: dict[str, dict[str, Any]] = {
    "NIG": {"paro_strategy": "NIG", "paro_group_size": 2},
    "IIG": {"paro_strategy": "IIG", "paro_group_size": 2, **NOTHING_WHOLE},
    "ZeRO-2": {"stage": 2},
    "ZeRO-3": {"stage": 3, **NOTHING_WHOLE},
}
TRAINED: dict[str, Any] = {"steps": 10, "accumulation": 2, "sizes": (64, 96, 80, 48)}
TRAINED |= {"empty": False, "optimizer": "Adam"}


def training_of(folder: str, section: dict[str, Any], job: dict[str, Any], links: Rates | None = LINKS) -> list[str]:
    """Train with keys of zero_optimization, without and with a report in a folder; return the problems on this rank.
    Rates of hops are measured if ``links`` is None."""
    reporting = {**section, "paro_report": {"folder": folder, "after": AFTER, "steps": STEPS}}
    wrong: list[str] = []

    def look(engine: Any) -> None:
        if {"step", "forward", "backward", "_take_model_step"} & set(vars(engine)) or observers._observer is not None:
            wrong.append("the engine is not as it was")

    usual = train(Job(**job), section)
    with links_given(links):
        reported = train(Job(**job), reporting, look)
    train(Job(**{**job, "steps": AFTER + 3}), reporting)
    if observers._observer is not None:
        wrong.append("an engine that is destroyed is still recorded")
    if usual.losses != reported.losses or not torch.equal(usual.weights, reported.weights):
        wrong.append("recording has changed the training")
    return wrong


def links_given(links: Rates | None = LINKS) -> Any:
    """Return a context in which links need not be measured; None: they are."""
    installed = ExitStack()
    if links is not None:
        installed.enter_context(mock.patch.object(probe, "measure", lambda *_: links))
        plain = FlatRates(*[Rate(0.0, 5e7)] * 3)
        installed.enter_context(mock.patch.object(flat_collectives, "measure", lambda *_: plain))
    return installed


def faults_of(folder: str | Path, name: str) -> list[str]:
    """Return the problems of a report in a folder: of ``TRAINED`` by four ranks, with one of ``SECTIONS``."""
    return [*unsound(folder), *_untrue(json.loads(Path(folder, "report.json").read_text()), name)]


def unsound(folder: str | Path) -> Iterator[str]:
    """Yield the problems of a report of any training: a step is the sum of its parts, and files are there."""
    report = json.loads(Path(folder, "report.json").read_text())
    seconds, parts = report["steps"]["seconds"], {row["part"]: row["seconds"] for row in report["parts"]}
    if report["steps"]["first"] != AFTER + 3 + 1 or len(seconds) != STEPS:
        yield f"other steps: {report['steps']}"
    if not math.isclose(sum(parts.values()), seconds[0], rel_tol=1e-6):
        yield f"the parts are not the step: {parts}, {seconds}"
    exposed = [row["exposed"] for key in ("hops", "operations", "modules") for row in report[key]]
    if not (parts["compute"] > 0 and parts["update"] > 0 and min(*parts.values(), *exposed, 0.0) >= -_TICK):
        yield f"parts, or exposed seconds: {parts}, {exposed}"
    if "<html" not in Path(folder, "report.html").read_text():
        yield "there is no page"
    if not json.loads(Path(folder, "trace.json").read_text())["traceEvents"]:
        yield "there is no trace"


_TICK = 2e-5  # seconds: what a device's clock may be wrong by


def _untrue(report: dict[str, Any], name: str) -> Iterator[str]:
    trained, plain = report["training"], name.startswith("ZeRO")
    expected = {"strategy": None if plain else name, "ranks": 4, "accumulation": 2}
    if not (trained["called"].startswith(hyphenate(name)) and expected.items() <= trained.items()):
        yield f"another training: {trained}"
    if [row["rank"] for row in report["ranks"]] != [0, 1, 2, 3]:
        yield f"other ranks: {report['ranks']}"
    training = next(lane for lane in report["timelines"][0]["lanes"] if lane["lane"] == "training")
    kinds = [span[3] for span in training["spans"]]
    if [kinds.count(kind) for kind in ("forward", "backward", "update")] != [2, 2, 1]:
        yield f"other phases: {kinds}"
    groups = [] if plain else group_rows([2, 2], [row["pace"] for row in report["groups"]])
    if report["groups"] != groups or not all(row["pace"] > 0 for row in groups):
        yield f"other waits of groups: {report['groups']}"
    if not plain:
        yield from _other_amounts(report, name)
    recorded = RecordedTraining.from_report(report)
    again = WhatIf(recorded, recorded.planner_input.cluster, recorded.planner_input.model).now
    (now,) = (row for row in report["choices"] if row["now"])
    is_same = plain or math.isclose(again.prediction.busy["between"], now["between"])
    if recorded.planner_input.name != name or not is_same:
        yield f"another prediction from the report: {again}"
    # Where gloo carries what is on a device, the host waits, and the stream that trains only seems to compute.
    on_host = get_accelerator().is_synchronized_device()
    waits = any(row["module"].startswith("layers") for row in report["modules"])
    if on_host and name in ("IIG", "ZeRO-3") and not waits:
        yield "no module waits"
    if [row["strategy"] for row in report["choices"] if row["now"]] != [name]:
        yield f"other choices: {report['choices']}"


def _other_amounts(report: dict[str, Any], name: str) -> Iterator[str]:
    # Norms and overflows are some bytes more. With p = I the last layers of a forward, here most of them, are kept for
    # its backward, and a thread may begin what it sends of a step when the next one has begun.
    least, most = (0.5, 1.6) if name == "IIG" else (0.99, 1.05)
    for row in report["hops"]:
        if not least < row["bytes"] / row["formula_bytes"] < most:
            yield f"other bytes {row['hop']}: {row}"
    for row in report["memory"]:
        if not math.isclose(row["bytes"], row["formula"], rel_tol=0.05):
            yield f"another amount of memory: {row}"
