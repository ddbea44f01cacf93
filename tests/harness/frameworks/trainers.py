# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs of transformers' Trainer and its subclasses; everything here runs inside rank processes."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tests.harness import training
from tests.harness.frameworks import comparison, tiny
from tests.harness.frameworks.comparison import Row

MakeTrainer = Callable[[dict[str, Any]], Any]  # from a ``zero_optimization`` section
STEPS = 2
CHECKPOINT = f"checkpoint-{STEPS // 2}"


def recording(trainer_class: type) -> type:
    """A subclass that keeps the loss of each micro-step."""

    class Recording(trainer_class):  # type: ignore[misc]
        micro_losses: list[float]

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = super().training_step(*args, **kwargs)
            self.micro_losses = [*getattr(self, "micro_losses", []), loss.item()]
            return loss

    return Recording


def arguments(arguments_class: type, zero: dict[str, Any], folder: str, **more: Any) -> Any:
    """Arguments of a Trainer on the CPU: few steps, and a checkpoint after half of them."""
    batch = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": comparison.ACCUMULATION}
    adam = {"learning_rate": comparison.LR, "adam_epsilon": comparison.EPS, "lr_scheduler_type": "constant"}
    saving = {"output_dir": folder, "max_steps": STEPS, "save_steps": STEPS // 2}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True}
    config = {"deepspeed": comparison.for_trainer(zero)}
    return arguments_class(**{**config, **batch, **adam, **saving, **quiet, **more})


def train(make: MakeTrainer, zero: dict[str, Any], checkpoint: str | None = None) -> tuple[tiny.Run, Tensor]:
    """Train, from a checkpoint if one is given; return the final state of the run, and the weights before it."""
    trainer = make(zero)
    start = training.whole_weights(trainer.model)
    trainer.train(resume_from_checkpoint=checkpoint)
    return tiny.final_state(trainer.deepspeed, trainer.micro_losses), start


def compare(make: MakeTrainer, stock: dict[str, Any], ours: dict[str, Any], checkpoint: str | None = None) -> Row:
    """Train with a section of stock DeepSpeed's and with ours, and from a checkpoint that the latter has left."""
    expected, start = train(make, stock)
    run, _ = train(make, ours)
    return tiny.compare_runs(start, expected, run, train(make, ours, checkpoint)[0] if checkpoint else None)
