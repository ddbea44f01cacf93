# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A fork does what the extension does: the same keys, the same bits; and the extension stands down beside it."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import deepspeed_ext
from scripts import ROOT

DIGESTS = ("-m", "tests.harness.digests")
VERSION = f"{metadata.version('deepspeed')}+ext.{deepspeed_ext.__version__}"

pytestmark = pytest.mark.timeout(1500)  # the first test builds the fork, and its ranks their operators


def run(python: Path | str, inside: dict[str, str] | None, *arguments: str) -> str:
    """What a process prints."""
    done = subprocess.run(
        [str(python), *arguments], cwd=ROOT, env=inside, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def both(fork: Path, inside: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the extension and the fork print; the fork continues what the extension has saved."""
    folder = str(tmp_path_factory.mktemp("saved"))
    runs = ((sys.executable, None, "save"), (fork, inside, "resume"))
    return [
        json.loads(run(python, variables, *DIGESTS, kind, folder).splitlines()[-1]) for python, variables, kind in runs
    ]


def test_weights_are_equal_to_the_bit(both: list[dict[str, Any]]) -> None:
    ours, theirs = (found["features"] for found in both)
    for rank, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for name, value in one.items():
            expected = value
            if name.startswith("module of"):
                expected = value.replace("deepspeed_ext", "deepspeed.runtime.paro")
                assert (value != expected) != name.endswith("stock ZeRO-2"), name
            assert other[name] == expected, (rank, name)
        assert len(set(one.values())) > 10  # digests of different things


def test_a_fork_resumes_what_the_extension_has_saved(both: list[dict[str, Any]]) -> None:
    """LoCo's errors included, which are in files of ours."""
    ours, theirs = (found["ends"] for found in both)
    assert ours == theirs and len(set(ours)) == 1


ONCE = """
import sys
import {first}
import torch, deepspeed, deepspeed_ext
from deepspeed_ext.integration import patcher
from deepspeed_ext.leaf import units
import deepspeed_ext.planner.estimate
from deepspeed.runtime.paro import strategy
from deepspeed.runtime.paro.leaf import units as theirs
assert units is theirs and sys.modules["deepspeed_ext.leaf"] is sys.modules["deepspeed.runtime.paro.leaf"]
assert units.__spec__.name == units.__name__ == "deepspeed.runtime.paro.leaf.units"
assert deepspeed_ext.STRATEGIES is strategy.STRATEGIES and deepspeed_ext.Placement is strategy.Placement
deepspeed_ext.activate(); deepspeed_ext.activate()
patcher.import_all()
assert not any(state == "applied" for _, state in patcher.status())
print(deepspeed.__version__)
"""


# A fork where the extension is not installed.
ALONE = """
import runpy, sys
sys.modules["deepspeed_ext"] = None
import deepspeed, deepspeed.runtime.pipe.engine, deepspeed.runtime.zero.stage3
from deepspeed.runtime.config import DeepSpeedConfig
section = {"paro_strategy": "NIG", "paro_group_size": 1}
DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": section})
runpy.run_module("deepspeed.runtime.paro", run_name="__main__")
"""


@pytest.mark.parametrize(
    "first",
    ["torch", "deepspeed_ext", "deepspeed_ext.strategy", "deepspeed.runtime.paro"],
)
def test_the_extension_stands_down(fork: Path, inside: dict[str, str], first: str) -> None:
    out = run(fork, inside, "-W", "ignore", "-c", ONCE.format(first=first))
    assert out.splitlines()[-1] == VERSION


def test_the_command_says_so(fork: Path, inside: dict[str, str]) -> None:
    out = run(fork, inside, "-W", "ignore", "-m", "deepspeed_ext", "--ranks", "4", "--group-size", "2")
    assert f"deepspeed     {VERSION}\n" in out
    assert "this DeepSpeed has these features built in (deepspeed.runtime.paro): nothing is patched" in out
    plan = [
        "plan",
        "--params",
        "4M",
        "--nodes",
        "2",
        "--ranks-per-node",
        "2",
        "--inter-gbps",
        "0.1",
        "--intra-gbps",
        "10",
    ]
    ours = run(sys.executable, None, "-W", "ignore", "-m", "deepspeed_ext", *plan)
    assert "<-- choice" in ours
    alone = inside | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert ours == run(fork, alone, "-W", "ignore", "-c", ALONE, *plan)
