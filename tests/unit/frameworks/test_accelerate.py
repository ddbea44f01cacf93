# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Accelerate: its plugin for DeepSpeed, its checkpoints, its launcher."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.frameworks.comparison import Row, check, needs
from tests.harness.frameworks.configurations import for_accelerate, placed, stock
from tests.harness.tiers import deep

pytestmark = needs("transformers", "accelerate")


def case(ours: dict[str, Any], stock: dict[str, Any], folder: str) -> Row:
    """Stock DeepSpeed and a strategy, by the plugin."""
    from tests.harness.frameworks import accelerated

    return accelerated.compare(stock, ours, folder)


LEFT_OUT = {"stage": None}


@pytest.mark.parametrize("strategy, more", [("IIG", LEFT_OUT), *deep(("III", {}), ("NIG", LEFT_OUT), ("NNG", {}))])
def test_plugin(frameworks: Any, tmp_path: Path, strategy: str, more: dict[str, None]) -> None:
    rows = frameworks(4).run(case, placed(strategy, **more), stock(strategy), str(tmp_path))
    check(rows, strategy, resumed=True)


@pytest.mark.deep
def test_launcher(tmp_path: Path) -> None:
    """A launch reads the strategy from a file; stock is trained with a plugin. One group of two ranks."""
    strategy = "IIG"
    config = tmp_path / "config.json"
    config.write_text(json.dumps(for_accelerate(placed(strategy))))
    options = {"--num_processes": "2", "--num_machines": "1", "--mixed_precision": "no", "--dynamo_backend": "no"}
    options |= {"--deepspeed_config_file": str(config), "--main_process_port": "0"}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed", "--module"]
    command += itertools.chain(*options.items())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = ["tests.harness.frameworks.accelerated", strategy, str(tmp_path)]
    run = subprocess.run(command + arguments, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-3000:]
    rows = [Row(*json.loads((tmp_path / f"row{rank}.json").read_text())) for rank in range(2)]
    check(rows, strategy, resumed=True)
