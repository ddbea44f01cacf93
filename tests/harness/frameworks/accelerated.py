# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A training loop of Accelerate; runs inside rank processes, and is the script of ``accelerate launch``."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.utils import DummyOptim
from torch import Tensor

from tests.harness import training
from tests.harness.frameworks import comparison, tiny

STEPS = 2
HALF = STEPS // 2 * comparison.ACCUMULATION  # micro-steps until the checkpoint


def make_accelerator(zero: dict[str, Any] | None = None) -> Accelerator:
    """An Accelerator with a DeepSpeedPlugin of this section, or with that of ``accelerate launch``.

    The state comes first: without it, Accelerate finds no accelerator and one process, and with
    ``Accelerator(cpu=True, deepspeed_plugin=...)`` it trains without DeepSpeed.
    """
    PartialState(cpu=True)
    return Accelerator(deepspeed_plugin=zero and DeepSpeedPlugin(hf_ds_config=comparison.for_accelerate(zero)))


def train(accelerator: Accelerator, folder: str, resume: bool = False) -> tuple[tiny.Run, Tensor, bool]:
    """Train, with a checkpoint after half of the steps, or on from it; return the final state, the weights before, and
    whether the state dict for saving has the weights at the end."""
    model = tiny.make_model()
    start = training.whole_weights(model)
    data = tiny.sequences(2 * STEPS * comparison.ACCUMULATION * accelerator.num_processes)
    rows = [{key: torch.tensor(value) for key, value in row.items()} for row in data]
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    engine, _, loader = accelerator.prepare(model, DummyOptim(model.parameters(), lr=comparison.LR), loader)
    if resume:
        accelerator.load_state(folder)
    losses = []
    for step, batch in enumerate(loader):
        if resume and step < HALF:
            continue
        with accelerator.accumulate(engine):
            loss = engine(**batch).loss
            accelerator.backward(loss)
        losses.append(loss.item())
        if not resume and step + 1 == HALF:
            accelerator.save_state(folder)
    saved = accelerator.get_state_dict(engine)
    run = tiny.final_state(engine, losses)
    full = saved and torch.cat([saved[name].float().flatten() for name, _ in model.named_parameters()])
    return run, start, not saved or torch.equal(full, run.weights)


def compare(stock: dict[str, Any], ours: dict[str, Any] | None, folder: str) -> comparison.Row:
    """Train with stock DeepSpeed, with our section (None: of the launch), and from the latter's checkpoint."""
    runs = []
    for number, zero in enumerate((stock, ours, ours)):
        run, start, saved = train(make_accelerator(zero), f"{folder}/{min(number, 1)}", resume=number == 2)
        if not saved:
            raise ValueError(f"the state dict of run {number} differs from its weights")
        runs.append(run)
    return tiny.compare_runs(start, *runs)


if __name__ == "__main__":
    # A shared-memory all-reduce for inference, which takes long to compile; without it DeepSpeed uses gloo.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    strategy, folder = sys.argv[1:]
    row = compare(comparison.stock(strategy), None, folder)
    Path(folder, f"row{os.environ['RANK']}.json").write_text(json.dumps(row))
    # gloo's threads must not outlive the interpreter: they end with an abort now and then.
    torch.distributed.destroy_process_group()
