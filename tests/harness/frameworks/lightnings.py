# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A run of Lightning's Trainer; everything here runs inside rank processes."""

from typing import Any
from unittest import mock

import lightning.pytorch.strategies.deepspeed as strategies
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops import utilities
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn

from tests.harness import training
from tests.harness.frameworks import comparison, tiny

HALF = 1  # of the optimizer steps


class Module(LightningModule):
    """A small model, made where Lightning wants it to be: under zero.Init at stage 3."""

    def __init__(self) -> None:
        super().__init__()
        self.model: nn.Module | None = None
        self.losses: list[float] = []
        self.cut = False  # whether parameters were cut when the model had been made

    def configure_model(self) -> None:
        if self.model is None:
            self.model = tiny.make_network()
            self.cut = all(hasattr(p, "ds_id") for p in self.model.parameters())
            self.start = training.whole_weights(self.model)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=comparison.LR, eps=comparison.EPS)

    def training_step(self, batch: Any) -> Tensor:
        loss = tiny.network_loss(self.model, batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any) -> None:
        assert torch.is_inference_mode_enabled()
        self.losses.append(tiny.network_loss(self.model, batch).item())


def numbered(devices: int) -> list[torch.device]:
    """Devices of the ranks of a node, as DeepSpeed's strategy numbers them."""
    return [torch.device("cpu", index) for index in range(devices)]


def train(zero: dict[str, Any], folder: str, resume: bool = False) -> tuple[tiny.Run, Tensor]:
    """Train, from the checkpoint after half of the steps if requested; return its final state, and the weights before.

    Lightning validates before the first micro-batch, and after each: in inference mode, as ``Trainer.validate`` does
    on backends other than gloo. The two lines that make ``fit`` do so are the tests' own.

    Lightning's strategy wants CUDA: its check is taken out, and devices have numbers.

    Raises:
        ValueError: zero.Init was active at another stage than 3.
    """
    config = comparison.plain(zero)
    del config["gradient_accumulation_steps"], config["optimizer"]  # Lightning wants to be told itself
    ranks = torch.distributed.get_world_size()
    rows = [torch.tensor(row["input_ids"]) for row in tiny.sequences(4 * HALF * ranks)]  # an epoch of HALF
    checkpoint = f"{folder}/step={HALF}.ckpt" if resume else None
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=HALF, save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    module = Module()
    with (
        mock.patch.object(strategies, "CUDAAccelerator", CPUAccelerator),
        mock.patch.object(CPUAccelerator, "get_parallel_devices", numbered),
        mock.patch.object(utilities, "_distributed_is_initialized", lambda: False),
    ):
        trainer = Trainer(
            accelerator="cpu",
            devices=ranks,
            max_steps=2 * HALF,
            accumulate_grad_batches=comparison.ACCUMULATION,
            val_check_interval=1,
            limit_val_batches=1,
            strategy=strategies.DeepSpeedStrategy(config=config),
            plugins=[TorchElasticEnvironment()],
            callbacks=[saving],
            **quiet,
        )
        trainer.fit_loop.epoch_loop.val_loop.inference_mode = True
        batches = torch.utils.data.DataLoader(rows, batch_size=2)
        trainer.fit(module, batches, batches, ckpt_path=checkpoint)
    if module.cut != (zero["stage"] == 3):
        raise ValueError(f"expected zero.Init at stage 3 only, got {module.cut} at stage {zero['stage']}")
    return tiny.final_state(trainer.strategy.model, module.losses), module.start
