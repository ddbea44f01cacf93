# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Accelerate: its plugin for DeepSpeed, its checkpoints, its launcher."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from table import Row, check, needs

pytestmark = needs("transformers", "accelerate")


def case(strategy: str, folder: str, without: tuple[str, ...] = ()) -> Row:
    """Stock DeepSpeed and a strategy, by the plugin."""
    import accelerated
    import tiny

    zero = {key: value for key, value in tiny.placed(strategy).items() if key not in without}
    return accelerated.compare(lambda: accelerated.by_plugin(zero), strategy, folder)


@pytest.mark.parametrize("strategy", ["NNG", "III"])
def test_plugin(frameworks: Any, tmp_path: Path, strategy: str) -> None:
    rows = frameworks(4).run(case, strategy, str(tmp_path))
    check(rows, strategy, "accelerate", "DeepSpeedPlugin, save_state, load_state, get_state_dict", resumed=True)


@pytest.mark.parametrize("strategy", ["NIG", "IIG"])
def test_plugin_without_a_stage(frameworks: Any, tmp_path: Path, strategy: str) -> None:
    rows = frameworks(4).run(case, strategy, str(tmp_path), ("stage",))
    check(rows, strategy, "accelerate", "DeepSpeedPlugin, `stage` left out", resumed=True)


def test_launcher(tmp_path: Path) -> None:
    """A launch reads the strategy from a file; stock is trained beside it by a plugin."""
    strategy = "IIG"
    section = {"stage": 3, "paro_strategy": strategy, "paro_group_size": 2, "reduce_bucket_size": 2000}
    section |= {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    script = Path(__file__).with_name("accelerated.py")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({}))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed", "--num_processes", "4"]
    command += ["--num_machines", "1", "--deepspeed_config_file", str(config), str(script), strategy, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-3000:]
    rows = [Row(*json.loads((tmp_path / f"row{rank}.json").read_text())) for rank in range(4)]
    check(rows, strategy, "accelerate", "accelerate launch", resumed=True)
