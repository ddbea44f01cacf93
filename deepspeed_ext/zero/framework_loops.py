# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Checks of Accelerate's and HF Trainer's loops if groups run different numbers of micro-batches.

This file imports neither DeepSpeed nor the frameworks, because its functions also run without a strategy.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from deepspeed_ext.config.keys import MICRO_BATCHES, SECTION

_counts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # micro-batches of the running step, by engine


def backward(run: Callable[..., None], accelerator: Any, loss: Any, **kwargs: Any) -> None:
    """Run Accelerate's backward of a micro-batch.

    Raises:
        ValueError: groups have different numbers of micro-batches, and this step would not have this rank's number of
            them, or Accelerate divides the batches of the loader equally among ranks.
    """
    engine = getattr(accelerator.__dict__.get("deepspeed_engine_wrapped"), "engine", None)
    if numbers := _different_numbers(engine):
        _check_micro_batch(accelerator, engine, f"{SECTION}.{MICRO_BATCHES} {numbers}")
    run(accelerator, loss, **kwargs)


def training_step(
    run: Callable[..., Any], trainer: Any, model: Any, inputs: Any, num_items_in_batch: Any = None
) -> Any:
    """Run a training step of Trainer.

    Raises:
        ValueError: groups have different numbers of micro-batches, but losses are divided by the tokens of all ranks.
    """
    averages = num_items_in_batch is not None and getattr(trainer.args, "average_tokens_across_devices", False)
    if averages and (numbers := _different_numbers(getattr(trainer, "deepspeed", None))):
        raise ValueError(
            f"{SECTION}.{MICRO_BATCHES} {numbers} weighs the losses of groups, so Trainer must divide them by the "
            f"tokens of its own rank, but average_tokens_across_devices is true, so it divides by those of all ranks. "
            f"Set average_tokens_across_devices of TrainingArguments to false."
        )
    return run(trainer, model, inputs, num_items_in_batch)


def _different_numbers(engine: Any) -> list[int] | None:
    """Return the numbers of micro-batches of groups; None if they are equal."""
    numbers = getattr(getattr(getattr(engine, "_config", None), "zero_config", None), "paro_micro_batches", None)
    return numbers if isinstance(numbers, list) and len(set(numbers)) > 1 else None


def _check_micro_batch(accelerator: Any, engine: Any, key: str) -> None:
    loader = accelerator.gradient_state.active_dataloader
    # Only at first: a loader whose iteration the script has ended early stays active. A resume makes SkipDataLoader of
    # a loader that is not prepared.
    if engine not in _counts and loader is not None and type(loader).__name__ != "SkipDataLoader":
        raise ValueError(
            f"{key} needs a loader of the rank's own samples, but Accelerate has prepared this one, which divides its "
            f"batches equally among ranks. Do not pass it to accelerator.prepare; with Trainer, override "
            f"get_train_dataloader. An evaluation before the first step must reach the end of its loader."
        )
    ends, count, number = accelerator.sync_gradients, _counts.get(engine, 0) + 1, engine.gradient_accumulation_steps()
    if ends != (count == number):
        raise ValueError(
            f"{key} needs {number} micro-batches in each step of this rank, but Accelerate "
            f"{'ends' if ends else 'continues'} a step after {count}. Set gradient_accumulation_steps to {number}, "
            f"use accelerator.accumulate, and leave out the last batches of the loader if they are no complete step."
        )
    _counts[engine] = 0 if ends else count
