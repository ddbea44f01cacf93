# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Checks of experiment T12: steps that are recorded by a GPU's clock, and the doctor."""

import argparse
import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

from deepspeed_ext.__main__ import patch_problems
from deepspeed_ext.tools.clocks import DeviceClock, make_clock
from deepspeed_ext.tools.doctor.cli import CHECKS, add_arguments, run
from scripts.emulation.launching import free_port
from scripts.examples.gpt import ByteGPT
from tests.campaigns.gpu.one_by_one import Case, run_cases
from tests.campaigns.gpu.order import pause
from tests.campaigns.gpu.ranks import GROUP, as_on_nccl, without_short_cuts
from tests.harness.recorded_trainings import (
    NOTHING_WHOLE,
    SECTIONS,
    TRAINED,
    faults_of,
    links_given,
    training_of,
    unsound,
)
from tests.harness.snapshots import shared_folder

SLEPT = 0.05  # seconds between two moments
_STREAMS = 4
COST_BOUND = 0.25  # of a step: what recording may add to a short one
LOCO: dict[str, Any] = {"paro_strategy": "NIG", "paro_group_size": 2, "zeropp_loco_param": {}}
BETWEEN_PAIRS = ("nodes and links", "clocks")  # which need messages, and gloo has these for tensors of the host alone
KERNELS = "LoCo's kernels"  # T0 tests them; to build them may take a minute
_SECTIONS = ("versions", "environment", "groups", "memory and disks", "pinned memory", "compiler")  # of any doctor


def all_checks(setup: Any) -> None:
    """T12: see that a report changes nothing and is sound, and that the doctor accepts a sound GPU."""
    names = ["IIG"] if setup.small else list(SECTIONS)
    shared = [
        Case("clock", _clock),
        *(Case(f"report, {name}", partial(_reported, name=name)) for name in names),
        *([] if setup.small else [Case("report with measured links", _measured)]),
        Case("doctor, ranks that share the GPU", _doctor, 120),
        *([] if setup.small else [Case("report, NIG in four bits", _in_four_bits, 150)]),
    ]
    run_cases(setup, shared)
    strategies = ("GGG",) if setup.small else ("NIG", "III", "IGG")
    alone = [Case(f"report over NCCL, {name}", partial(_reported_alone, name=name)) for name in strategies]
    alone += [Case("what recording costs", _cost), Case("the doctor's command", _command)]
    if setup.cuda and not setup.small:
        alone.append(Case("the doctor's kernels", _kernels, 120))
    run_cases(setup, alone, alone=True)


def _clock(setup: Any) -> None:
    """See that moments are of the device that trains, and of the stream that they are marked on."""
    clock = make_clock()
    setup.report.check("it is the device's", isinstance(clock, DeviceClock) == setup.cuda)
    setup.report.check("the current stream trains", clock.on_training_lane())
    if not setup.cuda:
        return
    # Made before, since the first one takes long; several, since two streams may share a queue of the hardware.
    other_ranks = [get_accelerator().Stream() for _ in range(_STREAMS)]
    begin = clock.mark()
    pause(setup, SLEPT * 1e3)
    end = clock.mark()
    early = []
    for other in other_ranks:  # beside the stream that sleeps
        with get_accelerator().stream(other):
            early.append(clock.mark())
            setup.report.check("another stream does not train", not clock.on_training_lane())
    clock.settle()
    slept = clock.seconds(end) - clock.seconds(begin)
    setup.report.figure("seconds of a sleep", slept)
    setup.report.check("a sleep takes its time", 0.5 * SLEPT < slept < 100 * SLEPT)
    setup.report.check("streams have moments of their own", min(map(clock.seconds, early)) < clock.seconds(end))


def _reported(setup: Any, name: str) -> None:
    with shared_folder() as folder:
        _tell(setup, [*training_of(folder, SECTIONS[name], TRAINED), *_faults(folder, name)])
        if dist.get_rank() == 0:
            _look_at(setup, folder)


def _measured(setup: Any) -> None:
    with shared_folder() as folder:
        _tell(setup, [*training_of(folder, SECTIONS["NIG"], TRAINED, links=None), *_faults(folder, "NIG")])
        if dist.get_rank() == 0:
            rates = [row["probed_rate"] for row in _report_in(folder)["hops"]]
            setup.report.figure("rates of hops", rates)
            setup.report.check("hops have rates", len(rates) == 2 and all(rate and rate > 0 for rate in rates))


def _faults(folder: str, name: str) -> list[str]:
    return faults_of(folder, name) if dist.get_rank() == 0 else []


def _in_four_bits(setup: Any) -> None:
    with shared_folder() as folder:
        _tell(setup, [*training_of(folder, LOCO, TRAINED), *(unsound(folder) if dist.get_rank() == 0 else [])])


def _reported_alone(setup: Any, name: str) -> None:
    """Record handles of NCCL's, of which the only rank takes no short cut."""
    section = {"paro_strategy": name, "paro_group_size": 1}
    with shared_folder() as folder, without_short_cuts(), as_on_nccl():
        _tell(setup, [*training_of(folder, section, TRAINED), *unsound(folder)])
        kinds = {row["name"] for row in _report_in(folder)["operations"]}
        setup.report.figure("operations", sorted(kinds))
        setup.report.check("what communicates is recorded", any("reduce" in kind for kind in kinds))


def _cost(setup: Any) -> None:
    """Note how much longer recorded steps of a GPT of 10.9 million parameters take than those before."""
    after, steps = 20, 5
    section = {"paro_strategy": "IIG", "paro_group_size": 1, **NOTHING_WHOLE}
    with shared_folder() as folder, without_short_cuts(), as_on_nccl(), links_given():
        model = ByteGPT(dim=384, layers=6, heads=6, sequence_length=128)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {**section, "paro_report": {"folder": folder, "after": after, "steps": steps}},
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        text = torch.randint(256, (4, 129), device=engine.device)
        for _ in range(after + steps + 10):
            engine.backward(engine(text[:, :-1], text[:, 1:]))
            engine.step()
        engine.destroy()
        results = _report_in(folder)["steps"]
    setup.report.figure("seconds of a step before", results["undisturbed"])
    setup.report.figure("seconds of recorded steps", results["seconds"])
    setup.report.check("recorded steps take about as long", results["overhead"] < COST_BOUND)


def _tell(setup: Any, faults: list[str]) -> None:
    if faults:
        setup.report.figure(f"faults on rank {dist.get_rank()}", faults)
    setup.report.check("it changes nothing, and is sound", not faults)


def _look_at(setup: Any, folder: str) -> None:
    """Check the values that differ between a device and a host, and record the parts of a step's time."""
    report = _report_in(folder)
    training = next(lane for lane in report["timelines"][0]["lanes"] if lane["lane"] == "training")
    kinds = {span[3] for span in training["spans"]}
    if setup.cuda:  # which handles what communicates beside what the host does
        setup.report.check("it does not handle what communicates", "other" not in kinds)
        setup.report.check("it is named", report["made"]["device"] == torch.cuda.get_device_name())
    setup.report.figure("parts, in ms", {row["part"]: round(row["seconds"] * 1e3, 3) for row in report["parts"]})
    setup.report.figure("cost of recording", report["steps"]["overhead"])


def _report_in(folder: str) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(Path(folder, "report.json").read_text())
    return results


def _doctor(setup: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_port()))
    skipped = (KERNELS, *(BETWEEN_PAIRS if setup.cuda else ()), *(("links", BETWEEN_PAIRS[0]) if setup.small else ()))
    level = logger.level
    with shared_folder() as folder:
        document = Path(folder, "doctor.json")
        add_arguments(parser := argparse.ArgumentParser())
        words = [f"--group-size={GROUP}", f"--json={document}", *(f"--skip={title}" for title in skipped)]
        status = run(parser.parse_args(words), patch_problems)
        logger.setLevel(level if level else logging.WARNING)
        setup.report.check("nothing is wrong", status == 0)
        if dist.get_rank() == 0:
            _judge(setup, json.loads(document.read_text()), [*_SECTIONS, "process groups"])


def _command(setup: Any) -> None:
    results = _said_by_command(setup, [KERNELS])
    if results is None:
        return
    _judge(setup, results, [*_SECTIONS, "process groups", "links", *BETWEEN_PAIRS])
    backend = next(item for item in results["sections"] if item["title"] == "process groups")["findings"][0]["subject"]
    setup.report.check("through the device's backend", backend == ("nccl" if setup.cuda else "gloo"))


def _kernels(setup: Any) -> None:
    """Have the doctor compare the kernels with their reference; it builds them, unless that was done before."""
    results = _said_by_command(setup, [title for title in CHECKS if title != KERNELS])
    if results is None:
        return
    _judge(setup, results, [KERNELS])
    measured = next(item for item in results["sections"] if item["title"] == KERNELS)["measured"]["0"]
    setup.report.check("there are kernels for the GPU", measured["kernels"] and measured["device"].startswith("cuda"))


def _said_by_command(setup: Any, skipped: Sequence[str]) -> dict[str, Any] | None:
    with shared_folder() as folder:
        document = Path(folder, "doctor.json")
        command = [sys.executable, "-m", "deepspeed_ext", "doctor", "--json", str(document)]
        command += [argument for title in skipped for argument in ("--skip", title)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=110)
        setup.report.check("nothing is wrong", done.returncode == 0)
        if not document.exists():
            setup.report.figure("it says", (done.stdout + done.stderr)[-2000:])
            return None
        results: dict[str, Any] = json.loads(document.read_text())
        return results


def _judge(setup: Any, found: dict[str, Any], titles: list[str]) -> None:
    """Check that all checks were made, and that none has found a problem; record the warnings."""
    setup.report.check("all checks were made", set(titles) <= {item["title"] for item in found["sections"]})
    for section in found["sections"]:
        answer = [f"{item['subject']}: {item['found']}" for item in section["findings"] if item["level"] != "ok"]
        if answer:
            setup.report.figure(f"{section['title']} says", answer)
        bad = [item for item in section["findings"] if item["level"] == "wrong" or item["subject"] == "left out"]
        setup.report.check(f"nothing wrong: {section['title']}", not bad)


def _port() -> int:
    """Return a port that is free, the same on all ranks."""
    shared = [free_port()]
    dist.broadcast_object_list(shared, src=0)
    return int(shared[0])
