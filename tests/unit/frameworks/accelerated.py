# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A training loop of Accelerate; runs inside rank processes, and is the script of ``accelerate launch``."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
import torch
import training
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.utils import DummyOptim
from table import Row
from torch import Tensor

STEPS = 4
ACCUMULATION = 2


def configuration(zero: dict[str, Any]) -> dict[str, Any]:
    """A configuration that leaves to Accelerate what it can fill in."""
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu")
    adam = {**tiny.ADAM, "params": {**tiny.ADAM["params"], "lr": "auto", "weight_decay": "auto"}}
    return {
        **dict.fromkeys(batch, "auto"),
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.5,
        "optimizer": adam,
        "zero_optimization": {**zero, "stage3_gather_16bit_weights_on_model_save": True},
    }


def by_plugin(zero: dict[str, Any]) -> Accelerator:
    """An Accelerator with a DeepSpeedPlugin.

    The state comes first: ``Accelerator(cpu=True, deepspeed_plugin=...)`` would train without DeepSpeed.
    """
    PartialState(cpu=True)
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=configuration(zero)))


def train(accelerator: Accelerator, folder: str, resume: bool = False) -> tuple[tiny.Run, Tensor, bool]:
    """Train, with a checkpoint after half of the steps, or on from it.

    Returns:
        What the run has left, the weights before it, and whether the state dict for saving has the weights at the end.
    """
    model = tiny.make_model()
    start = training.whole_weights(model)
    rows = [{key: torch.tensor(value) for key, value in row.items()} for row in tiny.sequences(64)]
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    engine, _, loader = accelerator.prepare(model, DummyOptim(model.parameters(), lr=tiny.LR), loader)
    if resume:
        accelerator.load_state(folder)
    losses = []
    for step, batch in enumerate(loader):
        if resume and step < STEPS // 2 * ACCUMULATION:
            continue
        with accelerator.accumulate(engine):
            loss = engine(**batch).loss
            accelerator.backward(loss)
        losses.append(loss.item())
        if not resume and step + 1 == STEPS // 2 * ACCUMULATION:
            accelerator.save_state(folder)
    saved = accelerator.get_state_dict(engine)
    run = tiny.ended(engine, losses)
    whole = saved and torch.cat([saved[name].float().flatten() for name, _ in model.named_parameters()])
    return run, start, not saved or torch.equal(whole, run.weights)


def compare(make: Callable[[], Accelerator], strategy: str, folder: str) -> Row:
    """Train with stock DeepSpeed, with a strategy (``make`` makes its Accelerator), and on from the latter's checkpoint.

    Raises:
        ValueError: the state dict for saving differs from the weights.
    """
    runs = []
    for number, accelerator in enumerate((lambda: by_plugin(tiny.stock(strategy)), make, make)):
        tiny.forget()
        run, start, saved = train(accelerator(), f"{folder}/{min(number, 1)}", resume=number == 2)
        if not saved:
            raise ValueError(f"the state dict of run {number} differs from its weights")
        runs.append(run)
    return tiny.compared(start, *runs)


if __name__ == "__main__":
    strategy, folder = sys.argv[1:]
    row = compare(Accelerator, strategy, folder)
    Path(folder, f"row{os.environ['RANK']}.json").write_text(json.dumps(row))
