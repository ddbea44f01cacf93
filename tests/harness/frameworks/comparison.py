# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Compares a run under a framework with stock DeepSpeed's; configurations of both, as the frameworks take them.

This module imports neither torch nor a framework: it serves the process that runs pytest, too.
"""

import importlib.util
from typing import Any, NamedTuple

import pytest

from deepspeed_ext.strategy import STRATEGIES

# A large eps: Adam would blow rounding of near-zero gradients up to the size of a step.
LR, EPS = 3e-2, 1e-3
ADAM = {"type": "AdamW", "params": {"lr": LR, "eps": EPS, "torch_adam": True}}
ACCUMULATION = 2


def stock(strategy: str) -> dict[str, Any]:
    """``zero_optimization`` of the stock run for comparison: several buckets, and nothing stays gathered."""
    small = {"reduce_bucket_size": 2000, "stage3_param_persistence_threshold": 0}
    return {"stage": STRATEGIES[strategy].stage, **small, "stage3_gather_16bit_weights_on_model_save": True}


def placed(strategy: str, **more: Any) -> dict[str, Any]:
    """The same with the strategy, in groups of 2, and further keys; None takes one away."""
    section = {**stock(strategy), "paro_strategy": strategy, "paro_group_size": 2, **more}
    return {key: value for key, value in section.items() if value is not None}


def plain(zero: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A configuration with every value in it."""
    batch = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": ACCUMULATION}
    return {**batch, "gradient_clipping": 0.5, "optimizer": ADAM, "zero_optimization": zero, **more}


def for_trainer(zero: dict[str, Any]) -> dict[str, Any]:
    """A configuration in which transformers' Trainer fills in all values that it can."""
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    adam = {**dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"), "torch_adam": True}
    return {
        **dict.fromkeys(batch, "auto"),
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": {"stage3_prefetch_bucket_size": "auto", **zero, "reduce_bucket_size": "auto"},
    }


def for_accelerate(zero: dict[str, Any]) -> dict[str, Any]:
    """A configuration in which Accelerate fills in all values that it can."""
    batch = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
    adam = {"type": "AdamW", "params": {**ADAM["params"], "lr": "auto", "weight_decay": "auto"}}
    return plain(zero, **batch, optimizer=adam)


class Row(NamedTuple):
    """The distance of a run under a framework from stock DeepSpeed's under the same framework."""

    strategy: str  # that ran
    losses: float  # largest difference, relative to stock's largest loss
    weights: float  # relative to stock's largest weight
    moved: float  # how far stock training moved the weights, relative as well
    replicas_equal: bool
    resumed: bool | None = None  # whether a resumed run ended with the same bits; None if there was none


def needs(*names: str) -> pytest.MarkDecorator:
    """Skip the tests of a module where one of these packages is not installed. None is imported."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed")


def check(
    rows: list[Row], strategy: str, losses: float = 1e-6, weights: float = 1e-5, resumed: bool | None = None
) -> None:
    """Check that all ranks ran the strategy and ended where stock did.

    The bounds are far above fp32 rounding, and far below the effect of an error in any gradient.
    """
    for row in rows:
        assert row.strategy == strategy and row.resumed is resumed, row
        assert row.moved > 0.01, row
        assert row.losses <= losses and row.weights <= weights, row
        assert row.replicas_equal, row
