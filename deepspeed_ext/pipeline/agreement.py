# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Checks that the stages of a pipeline have the same settings."""

import json
from collections.abc import Iterable
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe.module import PipelineModule

from deepspeed_ext.comm.agreement import all_gather_texts
from deepspeed_ext.config.keys import GROUP_SIZE, LOCO, SECTION, STRATEGY
from deepspeed_ext.config.unsupported import deepspeed_moe_layers
from deepspeed_ext.strategy import Placement, Strategy
from deepspeed_ext.zero.optimizer import ParoOptimizer

_PROBLEM_LENGTH = 1000


def device_of(module: PipelineModule) -> str:
    """Return this rank's device; DeepSpeed makes it the current one later."""
    return str(get_accelerator().device_name(module.local_rank))


def settings_of(config: DeepSpeedConfig, strategy: Strategy | None, module: PipelineModule) -> dict[str, Any]:
    """Return the settings that must be the same on all stages, by key.

    Expert-parallel sizes are among them, because all ranks create process groups of experts together: if some stages
    have no MoE layers, DeepSpeed's own pipelines hang.
    """
    zero = config.zero_config
    return {
        f"{SECTION}.{STRATEGY}": str(strategy) if strategy else None,
        f"{SECTION}.stage": int(zero.stage),
        f"{SECTION}.{GROUP_SIZE}": getattr(zero, GROUP_SIZE, None),
        f"{SECTION}.{LOCO}": getattr(zero, LOCO, None),
        f"{SECTION}.offload_optimizer": str(getattr(zero.offload_optimizer, "device", None)),
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "train_micro_batch_size_per_gpu": config.train_micro_batch_size_per_gpu,
        "gradient_clipping": config.gradient_clipping,
        "fp16.enabled": config.float16_config.enabled,
        "bf16.enabled": config.bfloat16_config.enabled,
        "expert-parallel sizes of MoE layers": sorted(
            {layer.ep_size for layer in deepspeed_moe_layers(module).values()}
        ),
    }


def require_same_settings(module: PipelineModule, settings: dict[str, Any], problem: str) -> None:
    """Raise on all ranks if one has a problem, or if a strategy is used and settings differ. Collective.

    Raises:
        ValueError: with the settings that differ, or the problem of the first rank that has one.
    """
    gathered = _gather(module, json.dumps([problem[:_PROBLEM_LENGTH], settings], default=str))
    for rank, (other_problem, _) in enumerate(gathered):
        if other_problem:
            raise ValueError(problem or f"rank {rank}: {other_problem}")
    if not any(other[f"{SECTION}.{STRATEGY}"] for _, other in gathered):
        return  # without a strategy, differences are left to DeepSpeed
    mismatched = {
        key: values for key in settings if len(set(map(str, values := [other[key] for _, other in gathered]))) > 1
    }
    if mismatched:
        texts = "; ".join(f"{key}: {_by_rank(values)}" for key, values in mismatched.items())
        raise ValueError(f"All stages of a pipeline must have the same configuration, but they have {texts}.")


def _by_rank(values: Iterable[Any]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(repr(value), []).append(rank)
    return ", ".join(f"{value} on ranks {numbers}" for value, numbers in ranks.items())


def require_same_groups(module: PipelineModule, optimizer: ParoOptimizer, tied: bool) -> None:
    """Refuse groups of different sizes if stages with shared weights exchange shards of a group. Collective.

    Raises:
        ValueError: the launcher's node size gives groups of different sizes on different stages.
    """
    # Every rank gathers before any rank raises: the gather is collective.
    sizes = _gather(module, json.dumps(optimizer.topology.sizes.group_size))
    if tied and optimizer.strategy.os == Placement.I and len(set(sizes)) > 1:
        raise ValueError(
            f"Stages that share weights need groups of one size with {STRATEGY} {optimizer.strategy}, but the "
            f"ranks on each node give the sizes {_by_rank(sizes)}. Set {SECTION}.{GROUP_SIZE}."
        )


def _gather(module: PipelineModule, text: str) -> list[Any]:
    """All-gather a JSON text from each rank, and return the parsed values. Collective."""
    return [json.loads(gathered) for gathered in all_gather_texts(text, device_of(module))]
