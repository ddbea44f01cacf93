# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Experiments of tests.campaigns.gpu: the kernels, which have tests and a benchmark of their own; and memory."""

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import torch

from deepspeed_ext.loco import ops
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates
from scripts import ROOT
from tests.campaigns.gpu.order import JOB
from tests.harness.fake_wire import Wire, enter_virtual_world, train_over
from tests.harness.training import placed

RANKS, GROUP = 6, 3


def drawn(setup: Any) -> None:
    """T0: compare the kernels with the reference and with those for the CPU, in drawn cases, bit by bit."""
    command = [sys.executable, "-m", "tests.campaigns.kernels", "--device", setup.device]
    command += ["--amount", "0.002" if setup.small else "0.5"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    for section, cases in re.findall(rf"^{setup.device} (\w+): (\d+) cases$", done.stdout, re.MULTILINE):
        setup.report.figure(f"cases of {section}", int(cases))
        setup.report.check(f"{section} has cases", int(cases) > 0)
    setup.report.check("all bits are equal", done.returncode == 0 and done.stdout.endswith("all bits equal\n"))


def bits(setup: Any) -> None:
    """T8A: run the tests of the CUDA kernels: streams, graphs, sizes beyond 32 bits."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        tests = str(ROOT / "tests" / "unit" / "loco" / "test_cuda_kernels.py")
        options = ["-m", "gpu", "-n", "4", "-p", "no:cacheprovider", f"--junitxml={results}"]  # -n: one may crash
        status = subprocess.run([sys.executable, "-m", "pytest", *options, tests], cwd=ROOT, check=False).returncode
        counts, broken = outcomes_of(results)
    setup.report.figure("tests", counts)
    if broken:
        setup.report.figure("broken", broken)
    if not setup.cuda:
        setup.report.skip("needs a GPU")
        return
    setup.report.check("pytest ended well", status == 0)
    setup.report.check("tests have passed", counts["passed"] > 0)


def outcomes_of(results: Path) -> tuple[dict[str, int], dict[str, str]]:
    """Return how many tests passed, failed and were skipped, and the messages of failures, by pytest's JUnit file."""
    cases, failed = list(ElementTree.parse(results).iter("testcase")), dict[str, str]()
    for case in cases:
        for broken in (*case.findall("failure"), *case.findall("error")):
            text = f"{broken.get('message', '')[:500]} {(broken.text or '')[-1500:]}"
            failed[f"{case.get('classname')} {case.get('name')}"] = text
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"passed": len(cases) - skipped - len(failed), "failed": len(failed), "skipped": skipped}, failed


def bandwidth(setup: Any) -> None:
    """T8B: measure how close the kernels come to a copy of as many bytes."""
    if setup.cuda:
        ops.load_kernels()
        setup.report.check("there are CUDA kernels", ops.has_kernels("CUDA"))
    size = ["--mib", "1", "--repetitions", "1"] if setup.small else ["--mib", "64", "256"]
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        options = ["--device", setup.device, "--json", str(rows)]
        subprocess.run([sys.executable, "-m", "tests.perf.loco_kernels", *options, *size], cwd=ROOT, check=True)
        for row in json.loads(rows.read_text()):
            figures = {name: round(row[name], 3) for name in ("gb_per_s", "copy_gb_per_s", "of_copy_bandwidth")}
            setup.report.figure(f"{row['case']}, {row['mib']} MiB", figures)


def memory(setup: Any) -> None:
    """T9: measure the most memory that training takes with default buckets, and compare with the states' formula."""
    enter_virtual_world(RANKS)
    width = 64 if setup.small else 4096
    job = dataclasses.replace(
        JOB, sizes=(width,) * 9, network=None, dtype="bf16", optimizer="SGD", zero={}, steps=2, accumulation=2
    )
    monitored = {"csv_monitor": {"enabled": True, "output_path": tempfile.mkdtemp(), "job_name": "checks"}}
    cases: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
        ("NIG", "NIG", {"overlap_comm": False}, {}),
        ("NIG, overlap_comm", "NIG", {"overlap_comm": True}, {}),
        ("IIG", "IIG", {}, {}),
        ("IIG in four bits", "IIG", {"zeropp_loco_param": {}}, {}),
        ("IIG in four bits, monitored", "IIG", {"zeropp_loco_param": {}}, monitored),
    ]
    for title, name, more, config in cases:
        expected = dataclasses.replace(job, config={**JOB.config, **config})
        setup.report.figure(title, memory_of(setup, expected, name, more))


def memory_of(setup: Any, job: Any, name: str, more: dict[str, Any]) -> dict[str, float]:
    """Return GB: the formula of the model states, and the most that was allocated and reserved."""
    numel = sum(a * b + b * (i % 2 == 0) for i, (a, b) in enumerate(zip(job.sizes, job.sizes[1:], strict=False))) + 11
    states = ModelStates.of(numel, optimizer_bytes=8)  # SGD: master weights and momentum
    figures = {"formula": STRATEGIES[name].memory(GroupSizes(RANKS, GROUP), states).total / 1e9}
    if setup.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    train_over(Wire(setup.device, delay=(0.0, 0.1)), job, placed(name, GROUP, **more))
    if setup.cuda:
        figures["allocated"] = torch.cuda.max_memory_allocated() / 1e9
        figures["reserved"] = torch.cuda.max_memory_reserved() / 1e9
        figures["retries"] = float(torch.cuda.memory_stats().get("num_alloc_retries", 0) - before)
    return figures
