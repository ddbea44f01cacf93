# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""One of many ranks on torch's fake process group: numbers that must not grow with the number of ranks."""

import json
import sys
from typing import Any

import pytest
import torch

from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates, Volume
from tests.harness.fork_runner import run_in_forks
from tests.harness.tiers import deep

GROUP, NUMEL = 8, 7_352_576  # ranks in a group; parameters of a model of 8 layers
METHODS = ("NIG", "III")
HOST_WORK = {"NIG": (1_649, 10_218), "III": (2_480, 108_023)}  # operators, and Python and C calls, of a step
MEASURED_WITH = ("2.13.", (3, 11))  # torch and Python
# DeepSpeed would compile an all-reduce for hosts, which takes a minute; nothing is sent here.
FIRST = """
import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer
from tests.perf import growth
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
growth.LAYERS = 8
"""
OPTIONS = f"--json --no-memory --rounds 1 --methods {' '.join(METHODS)} --worlds".split()


def grown(*worlds: int) -> list[dict[str, Any]]:
    """Return the counts of ``tests.perf.growth`` by method, for each number of ranks."""
    options = {str(ranks): ["growth", *OPTIONS, str(ranks)] for ranks in worlds}
    pieces = {
        name: f"import sys\nsys.argv = {words}\nfrom tests.perf import growth\ngrowth.main()"
        for name, words in options.items()
    }
    outputs = run_in_forks(FIRST, pieces)
    return [{row["method"]: row for row in json.loads(outputs[name].splitlines()[-1])} for name in options]


@pytest.mark.parametrize("world", [128, *deep(256)])
def test_counts_of_messages_bytes_and_host_work(world: int) -> None:
    few, many = grown(64, world)
    states = ModelStates.of(NUMEL)
    for name in METHODS:
        for kind in ("intra", "inter"):
            assert few[name][f"messages_{kind}"] == many[name][f"messages_{kind}"] > 0, (name, kind)
        volume = STRATEGIES[name].volume(GroupSizes(64, GROUP), states)
        if name == "III":  # which has kept for the backward what the forward gathered
            volume += Volume(intra=-states.parameters * (1 - 1 / GROUP))
        assert few[name]["bytes_intra"] == pytest.approx(volume.intra, rel=0.05), name
        assert few[name]["bytes_inter"] == pytest.approx(volume.inter, rel=0.05), name
        if torch.__version__.startswith(MEASURED_WITH[0]) and sys.version_info[:2] == MEASURED_WITH[1]:
            # One more view for each parameter is at least 3 % more operators.
            assert (few[name]["operators"], few[name]["calls"]) == pytest.approx(HOST_WORK[name], rel=0.02), name
        assert few[name]["groups"] == 1 + 64 // GROUP + GROUP  # DeepSpeed's, and a call for each list
