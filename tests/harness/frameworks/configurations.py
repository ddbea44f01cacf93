# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Configurations of stock DeepSpeed and of strategies, as the frameworks take them; torch is not imported here."""

from typing import Any

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
