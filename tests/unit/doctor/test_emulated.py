# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The command on an emulated cluster with planted faults: it names each of them, and its status says so."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.emulation.launching import environment

SLOW, MBIT, SLOW_MBIT = 2, 400, 40  # rank, and so node, whose link is slow; Mbit/s of others and of that

FAULTY = f"""
import os, sys
from scripts.emulation.network import Link

if os.environ["RANK"] == "{SLOW}":
    Link().limit({SLOW_MBIT})
if os.environ["RANK"] == "1":
    os.environ["CXX"] = "no-such-compiler"
os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
sys.argv[0] = "deepspeed_ext"
from deepspeed_ext.__main__ import main
main()
"""


def test_planted_faults_are_named(emulation: None, tmp_path: Path) -> None:
    script, report = tmp_path / "faulty.py", tmp_path / "report.json"
    script.write_text(FAULTY)
    cluster = [sys.executable, "-m", "scripts.emulation.cluster", "--nodes", "4", "--ranks-per-node", "1"]
    cluster += ["--rate", str(MBIT), "--launcher", "none", str(script)]
    doctor = ["doctor", "--json", str(report), "--params", "70B"]
    for skipped in ("LoCo's kernels", "links", "versions", "pinned memory", "clocks"):
        doctor += ["--skip", skipped]
    env = environment() | {"NO_COLOR": "1"}
    done = subprocess.run([*cluster, *doctor], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1, done.stderr
    document = json.loads(report.read_text())
    rows = [row for section in document["sections"] for row in section["findings"]]
    findings = {row["subject"]: (row["level"], row["found"]) for row in rows}
    assert document["status"] == 1 and document["ranks"] == 4
    level, text = findings[f"rank {SLOW}"]
    assert level == "wrong" and text.startswith("slow with all others"), done.stdout
    slow = float(text.split(": ")[1].split(" ")[0])
    assert slow == pytest.approx(SLOW_MBIT / 8, rel=0.3) and "3 of 3 round(s)" in findings["measured"][1]
    assert findings["c++"][0] == "look" and "not found on rank 1" in findings["c++"][1]
    assert findings["CUDA_LAUNCH_BLOCKING"][1].startswith("1 on ranks 0-3: every kernel launch waits")
    assert findings["for model states"][0] == "wrong" and "N-I-G of 70 B parameters" in findings["for model states"][1]
    wrong = {subject for subject, (level, _) in findings.items() if level == "wrong"}
    assert wrong == {f"rank {SLOW}", "for model states"}
    assert f"wrong  rank {SLOW}" in done.stdout and done.stdout.count("deepspeed_ext 0") == 1, done.stdout
    assert not [path for path in os.listdir(tmp_path) if path not in ("faulty.py", "report.json")]
