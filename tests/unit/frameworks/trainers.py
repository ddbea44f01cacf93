# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs of transformers' Trainer and its subclasses; everything here runs inside rank processes."""

from collections.abc import Callable
from typing import Any

import tiny
import training
from table import Row
from torch import Tensor

MakeTrainer = Callable[[dict[str, Any]], Any]  # from a ``zero_optimization`` section
STEPS = 4


def recording(trainer_class: type) -> type:
    """A subclass that keeps the loss of each micro-step."""

    class Recording(trainer_class):  # type: ignore[misc]
        micro_losses: list[float]

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = super().training_step(*args, **kwargs)
            self.micro_losses = [*getattr(self, "micro_losses", []), loss.item()]
            return loss

    return Recording


def configuration(zero: dict[str, Any]) -> dict[str, Any]:
    """A configuration that leaves to the Trainer what it can fill in."""
    adam = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    buckets = ("reduce_bucket_size", "stage3_prefetch_bucket_size")
    return {
        **dict.fromkeys(batch, "auto"),
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {**adam, "torch_adam": True}},
        "zero_optimization": {**zero, **dict.fromkeys(buckets, "auto")},
    }


def arguments(arguments_class: type, config: dict[str, Any], folder: str, **more: Any) -> Any:
    """Arguments of a Trainer on the CPU: 4 steps of 2 micro-batches each, a checkpoint after the second."""
    batch = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": STEPS}
    adam = {"learning_rate": tiny.LR, "adam_epsilon": tiny.EPS, "lr_scheduler_type": "constant"}
    saving = {"output_dir": folder, "save_steps": STEPS // 2}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True}
    return arguments_class(deepspeed=config, **{**batch, **adam, **saving, **quiet, **more})


def train(make: MakeTrainer, zero: dict[str, Any], checkpoint: str | None = None) -> tuple[tiny.Run, Tensor]:
    """Train, from a checkpoint if one is given; what the run has left, and the weights before it."""
    tiny.forget()
    trainer = make(zero)
    start = training.whole_weights(trainer.model)
    trainer.train(resume_from_checkpoint=checkpoint)
    return tiny.ended(trainer.deepspeed, trainer.micro_losses), start


def compare(make: MakeTrainer, strategy: str, folder: str, resume: bool = False, **zero: Any) -> Row:
    """Train with stock DeepSpeed and with a strategy, and on from the latter's checkpoint in ``folder``.

    Args:
        make: makes the trainer.
        strategy: what the stage of stock DeepSpeed goes by.
        folder: where the trainer saves.
        resume: whether to resume.
        zero: further keys of the strategy's section; None takes one away.
    """
    keys = {key: value for key, value in {**tiny.placed(strategy), **zero}.items() if value is not None}
    stock, start = train(make, tiny.stock(strategy))
    ours, _ = train(make, keys)
    resumed = train(make, keys, f"{folder}/checkpoint-{STEPS // 2}")[0] if resume else None
    return tiny.compared(start, stock, ours, resumed)
