# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Accelerate: its plugin for DeepSpeed, its checkpoints, its launcher; a stage that it cannot infer is refused."""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.harness.frameworks.comparison import Row, check, for_accelerate, needs, placed, stock
from tests.harness.tiers import deep, with_cases

pytestmark = needs("transformers", "accelerate")


def case(ours: dict[str, Any], stock: dict[str, Any], folder: str) -> Row:
    from tests.harness.frameworks import accelerated

    return accelerated.compare(stock, ours, folder)


LEFT_OUT = {"stage": None}


@pytest.mark.parametrize("strategy, more", [("IIG", LEFT_OUT), *deep(("III", {}), ("NIG", LEFT_OUT), ("NNG", {}))])
def test_plugin(frameworks: Any, tmp_path: Path, strategy: str, more: dict[str, None]) -> None:
    check(frameworks(4).run(case, placed(strategy, **more), stock(strategy), str(tmp_path)), strategy, resumed=True)


def test_groups_have_their_own_numbers_of_micro_batches(frameworks: Any) -> None:
    for apart, steps in frameworks(4).run(numbers_case, placed("NIG", paro_micro_batches=[2, 1])):
        assert apart < 1e-6 and steps == 4


def numbers_case(zero: dict[str, Any]) -> tuple[float, int]:
    """Train with each rank's own number, by a loader that Accelerate does not know."""
    import torch.distributed as dist
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState
    from accelerate.utils import DummyOptim

    from tests.harness import sampled, training
    from tests.harness.frameworks import tiny

    number = zero["paro_micro_batches"][dist.get_rank() // 2]
    config = training.configuration(replace(sampled.JOB, accumulation=number), zero)
    PartialState(cpu=True)
    accelerator, model = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config)), sampled.make_model()
    engine, _ = accelerator.prepare(model, DummyOptim(model.parameters(), lr=0.1))

    def micro_step(x: Any, y: Any) -> None:
        with accelerator.accumulate(engine):
            accelerator.backward(((engine(x) - y) ** 2).mean())

    try:
        return sampled.train(engine, model, micro_step)
    finally:
        tiny.forget()


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
    check([Row(*json.loads((tmp_path / f"row{rank}.json").read_text())) for rank in range(2)], strategy, resumed=True)


@with_cases(
    "strategy, seam, message",
    (
        "fastest",
        True,
        'zero_optimization.paro_strategy "fastest" needs zero_optimization.stage with Accelerate, HF Trainer and '
        "TRL, which read it before the model is built. Set zero_optimization.stage to 1, 2 or 3: the fastest "
        "strategy of that stage is chosen.",
    ),
    (
        "IIG",
        False,
        "zero_optimization.paro_strategy needs zero_optimization.stage with Accelerate, HF Trainer and TRL, which "
        "already use stage 2. Set zero_optimization.stage to 3.",
    ),
)
def test_a_stage_that_accelerate_cannot_know(frameworks: Any, strategy: str, seam: bool, message: str) -> None:
    section = {**placed("IIG", stage=None), "paro_strategy": strategy}
    for error in frameworks(2).run_expect_error(prepared_case, section, seam):
        assert (error.type, error.message) == ("ValueError", message)


def test_stages_1_and_2_need_no_seam(frameworks: Any) -> None:
    """Accelerate takes both for 2, and looks the stage up when it saves."""
    for strategy, stage in (("NNG", 1), ("NIG", 2)):
        assert frameworks(2).run(prepared_case, placed(strategy, stage=None), False) == [stage] * 2


def prepared_case(section: dict[str, Any], seam: bool) -> int:
    """The stage in the configuration that Accelerate keeps, where our seam in it is in place or not."""
    from unittest import mock

    from accelerate.utils import DummyOptim
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    from tests.harness.frameworks import accelerated, tiny

    read = HfDeepSpeedConfig.set_stage_and_offload
    try:
        with mock.patch.object(HfDeepSpeedConfig, "set_stage_and_offload", read if seam else read.__wrapped__):
            accelerator = accelerated.make_accelerator(section)
        accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
        model = tiny.make_model()
        accelerator.prepare(model, DummyOptim(model.parameters(), lr=0.1))
        return int(accelerator.deepspeed_config["zero_optimization"]["stage"])
    finally:
        tiny.forget()
