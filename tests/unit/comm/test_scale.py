# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""One rank of many, on torch's fake process group: what must not grow with their number."""

import json
import subprocess
import sys
from typing import Any

import pytest

from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates, Volume
from scripts import ROOT
from scripts.emulation.launching import environment

GROUP, NUMEL = 8, 26_361_600  # ranks in a group; parameters of the model that growth.py trains
METHODS = ("NIG", "III")
# DeepSpeed would compile an all-reduce for hosts, which takes a minute; nothing is sent here.
WITHOUT_ITS_ALL_REDUCE = """
import runpy
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
runpy.run_module("tests.perf.growth", run_name="__main__", alter_sys=True)
"""


def grown(*worlds: int) -> list[dict[str, Any]]:
    """What ``tests.perf.growth`` counts with so many ranks, by method: of each number of ranks, at the same time."""
    options = f"--json --no-memory --rounds 1 --methods {' '.join(METHODS)} --worlds".split()
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WITHOUT_ITS_ALL_REDUCE, *options, str(ranks)],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for ranks in worlds
    ]
    found = []
    for process in started:
        out, err = process.communicate(timeout=280)
        assert not process.returncode, err[-2000:]
        found.append({row["method"]: row for row in json.loads(out.splitlines()[-1])})
    return found


def test_messages_do_not_grow_and_bytes_match_the_formulas() -> None:
    few, many = grown(64, 256)
    states = ModelStates.of(NUMEL)
    for name in METHODS:
        for kind in ("intra", "inter"):
            assert few[name][f"messages_{kind}"] == many[name][f"messages_{kind}"] > 0, (name, kind)
        volume = STRATEGIES[name].volume(GroupSizes(64, GROUP), states)
        if name == "III":  # which has kept for the backward what the forward gathered
            volume += Volume(intra=-states.parameters * (1 - 1 / GROUP))
        assert few[name]["bytes_intra"] == pytest.approx(volume.intra, rel=0.05), name
        assert few[name]["bytes_inter"] == pytest.approx(volume.inter, rel=0.05), name
        assert few[name]["groups"] == 1 + 64 // GROUP + GROUP  # DeepSpeed's, and a call for each list
