# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Initializes pipeline engines with our optimizers, and checks their requirements beforehand."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import deepspeed.runtime.pipe.engine
import torch
from deepspeed import comm as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from deepspeed_ext.config.check import use_strategy_of_stage
from deepspeed_ext.config.keys import FASTEST, QUANTIZED_UPDATES, SECTION, STRATEGY
from deepspeed_ext.config.section import active_strategy, wants_fastest
from deepspeed_ext.config.unsupported import Unsupported, refuse_unsupported
from deepspeed_ext.overrides import replace_attributes
from deepspeed_ext.pipeline.agreement import device_of, require_same_settings, settings_of
from deepspeed_ext.pipeline.engine import NOTHING_TO_TRAIN, ShardedPipelineEngine
from deepspeed_ext.pipeline.tied import tied_stages
from deepspeed_ext.strategy import Placement, Strategy

# Engines and PipelineModules that cannot work with the pipeline's schedule.
UNSUPPORTED: tuple[Unsupported, ...] = (
    Unsupported(
        lambda engine, module: type(engine) is not PipelineEngine and type(engine).__name__,
        "{} does not run the 1F1B schedule",
    ),
    Unsupported(
        lambda engine, module: any(hasattr(param, "ds_id") for param in module.parameters()),
        "the PipelineModule has sharded parameters; build it outside deepspeed.zero.Init",
    ),
)


def initialize(
    init: Callable[..., None],
    engine: PipelineEngine,
    *args: Any,
    require: Callable[[], None] = lambda: None,
    **kwargs: Any,
) -> None:
    """Initialize a ``PipelineEngine``. With a strategy, or with ZeRO-2 or 3, it becomes a ``ShardedPipelineEngine``.

    Collective over all ranks, including those without a strategy, because stages may be configured differently.

    Args:
        init: DeepSpeed's initializer.
        engine: the engine to initialize. All other arguments are DeepSpeed's.
        require: raises if this version of DeepSpeed is unknown. Plain ZeRO-2 and ZeRO-3 use no key of this package,
            but a pipeline needs our code for them, too.

    Raises:
        ValueError: on all ranks, if stages are configured differently; also if the model cannot be trained this way.
    """
    config, module = kwargs.get("config_class"), kwargs.get("model")
    strategy = None
    if config is not None and dist.is_initialized():
        problem = ""
        try:
            strategy = _strategy(config, module, require)
        except (ValueError, RuntimeError) as error:
            problem = str(error)  # raised on all ranks below; raised here, it would hang the other ranks' gather
        require_same_settings(module, settings_of(config, strategy, module), problem)
    if strategy is None:
        init(engine, *args, **kwargs)
        return
    refuse_unsupported(UNSUPPORTED, strategy, engine, module)
    _reject_quantized_tied_updates(config, strategy, module)
    engine.__class__ = ShardedPipelineEngine  # before initialization, which already calls its methods
    _fill_empty_groups(module, kwargs)
    # The parent refuses ZeRO-2 and 3 in one assertion, its only use of this name.
    allows_all_stages = SimpleNamespace(gradients=float("inf"))
    with replace_attributes(deepspeed.runtime.pipe.engine, ZeroStageEnum=allows_all_stages):
        init(engine, *args, **kwargs)
    engine.attach_optimizer()


def _reject_quantized_tied_updates(config: DeepSpeedConfig, strategy: Strategy, module: PipelineModule) -> None:
    """Refuse quantized updates of tied weights: stages divide a weight into different blocks, so copies would differ.

    Raises:
        ValueError: updates are configured as differences, and stages share weights.
    """
    tied = [key for keys in tied_stages(module).values() for key in keys]
    if tied and strategy.os == Placement.G and config.zero_config.paro_quantized_updates is not None:
        raise ValueError(
            f"{SECTION}.{QUANTIZED_UPDATES} cannot be combined with tied layers ({', '.join(tied)}) in a pipeline "
            f"with {STRATEGY} {strategy}: the copies of their weights on different stages would differ by the "
            f"quantization errors. Remove {QUANTIZED_UPDATES}, or use a strategy with os = I or N."
        )


def _strategy(config: DeepSpeedConfig, module: PipelineModule, require: Callable[[], None]) -> Strategy | None:
    if wants_fastest(config):
        raise ValueError(
            f"{SECTION}.{STRATEGY} {FASTEST} does not support pipelines, because their stages have different models. "
            f"Set a strategy; `python -m deepspeed_ext plan` compares them."
        )
    if active_strategy(config) is None and config.zero_config.stage > 1:
        require()
        use_strategy_of_stage(config, module.mpu())
    return active_strategy(config)


def partition_layers(partition: Callable[..., None], module: PipelineModule, *args: Any, **kwargs: Any) -> None:
    """Assign each stage its layers with DeepSpeed's ``partition``, unless it is called under ``deepspeed.zero.Init``.

    Raises:
        ValueError: the module is built there. ``zero.Init`` shards parameters over the ranks of all stages, and would
            wait for the other stages.
    """
    from deepspeed.runtime.zero import partition_parameters

    if partition_parameters.zero_init_context:
        raise ValueError(
            "A PipelineModule cannot be built under deepspeed.zero.Init, which shards parameters over the ranks of "
            "all stages. Build it outside: each stage builds only its own layers, and shards them afterwards."
        )
    partition(module, *args, **kwargs)


def _fill_empty_groups(module: PipelineModule, arguments: dict[str, Any]) -> None:
    """Add a parameter that stays 0 to each of the optimizer's parameter groups with nothing to train on this stage.

    Args:
        arguments: the engine's arguments; ``optimizer`` or ``model_parameters`` are changed.
    """
    optimizer = arguments.get("optimizer")
    if isinstance(optimizer, torch.optim.Optimizer):
        groups: list[dict[str, Any]] = optimizer.param_groups
    else:
        params = arguments.get("model_parameters")
        params = list(module.parameters() if params is None else params)
        if params and isinstance(params[0], dict):
            groups = [{**group, "params": list(group["params"])} for group in params]
        else:
            groups = [{"params": params}]
        arguments["model_parameters"] = groups if params and isinstance(params[0], dict) else groups[0]["params"]
    for number, group in enumerate(groups):
        if not any(param.requires_grad for param in group["params"]):
            filler = nn.Parameter(torch.zeros(1, device=device_of(module)))
            setattr(filler, PIPE_REPLICATED, False)
            module.register_parameter(f"{NOTHING_TO_TRAIN}_{number}", filler)
            group["params"].append(filler)
