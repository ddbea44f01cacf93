# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Whether a pipeline's stages get our optimizers, and what must hold before they do."""

import json
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed.runtime.pipe.engine
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from deepspeed_ext.comm.agreement import gathered_texts
from deepspeed_ext.comm.process_groups import Topology, data_parallel_ranks
from deepspeed_ext.config.check import use_strategy_of_stage
from deepspeed_ext.config.keys import FASTEST, GROUP_SIZE, LOCO, SECTION, STRATEGY
from deepspeed_ext.config.refused import Unsupported, refuse_unsupported
from deepspeed_ext.config.section import active_strategy, undecided
from deepspeed_ext.strategy import Placement, Strategy
from deepspeed_ext.zero.optimizer import ParoOptimizer

NOTHING_TO_TRAIN = "nothing_to_train"  # a parameter of stages that have no other
_PROBLEM_LENGTH = 1000

# What cannot work with the schedule, of the engine and the PipelineModule.
UNSUPPORTED: tuple[Unsupported, ...] = (
    Unsupported(
        lambda engine, module: type(engine) is not PipelineEngine and type(engine).__name__,
        "{} runs another schedule than 1F1B",
    ),
    Unsupported(
        lambda engine, module: any(hasattr(param, "ds_id") for param in module.parameters()),
        "the PipelineModule has parameters that are cut already; build it outside of deepspeed.zero.Init",
    ),
)


def initialize(
    init: Callable[..., None], require: Callable[[], None], engine: PipelineEngine, *args: Any, **kwargs: Any
) -> None:
    """Initialize a ``PipelineEngine``, which becomes ours with a strategy, or with ZeRO-2 or 3, which mean one.

    Collective over all ranks, those without a strategy included: a stage may have been configured otherwise.

    Args:
        init: DeepSpeed's.
        require: raises if this DeepSpeed is not one that we know.
        engine: to initialize. The others are DeepSpeed's.

    Raises:
        ValueError: on all ranks, if stages are configured differently; or what only the model can tell.
    """
    config, module = kwargs.get("config_class"), kwargs.get("model")
    strategy = None
    if config is not None and dist.is_initialized():
        problem = ""
        try:
            strategy = _strategy(config, module, require)
        except (ValueError, RuntimeError) as error:
            problem = str(error)
        _require_agreement(module, _settings(config, strategy), problem)
    if strategy is None:
        init(engine, *args, **kwargs)
        return
    from deepspeed_ext.pipeline.engine import ShardedPipelineEngine

    refuse_unsupported(UNSUPPORTED, strategy, engine, module)
    engine.__class__ = ShardedPipelineEngine
    _fill_groups(module, kwargs)
    # The parent's only refusal of ZeRO-2 and 3, an assertion that looks nothing else up under this name.
    no_limit = SimpleNamespace(gradients=float("inf"))
    with mock.patch.object(deepspeed.runtime.pipe.engine, "ZeroStageEnum", no_limit):
        init(engine, *args, **kwargs)
    engine.connect()


def _strategy(config: DeepSpeedConfig, module: PipelineModule, require: Callable[[], None]) -> Strategy | None:
    if undecided(config):
        raise ValueError(
            f"{SECTION}.{STRATEGY} {FASTEST} does not know pipelines, whose stages have different models. Set one of "
            f"the strategies; `python -m deepspeed_ext plan` compares them."
        )
    if active_strategy(config) is None and config.zero_config.stage > 1:
        require()
        use_strategy_of_stage(config, module.mpu())
    return active_strategy(config)


def refuse_zero_init() -> None:
    """Refuse to build a PipelineModule whose parameters would be sharded as they are made.

    Raises:
        ValueError: it is built under ``deepspeed.zero.Init``, which shards them over all ranks, those of other stages
            included, and waits for these.
    """
    from deepspeed.runtime.zero import partition_parameters

    if partition_parameters.zero_init_context:
        raise ValueError(
            "A PipelineModule cannot be built under deepspeed.zero.Init, which cuts parameters over all ranks, while "
            "each stage has its own. Build it outside: stages hold their own layers only, and cut them afterwards."
        )


def _fill_groups(module: PipelineModule, arguments: dict[str, Any]) -> None:
    """Give each of the optimizer's parameter groups that has nothing to train on this stage a parameter that stays 0.

    Args:
        module: the pipeline.
        arguments: the engine's, of which optimizer and model_parameters are looked at and changed.
    """
    optimizer = arguments.get("optimizer")
    if isinstance(optimizer, torch.optim.Optimizer):
        groups: list[dict[str, Any]] = optimizer.param_groups
    else:
        listed = arguments.get("model_parameters")
        listed = list(module.parameters() if listed is None else listed)
        if listed and isinstance(listed[0], dict):
            groups = [{**group, "params": list(group["params"])} for group in listed]
        else:
            groups = [{"params": listed}]
        arguments["model_parameters"] = groups if listed and isinstance(listed[0], dict) else groups[0]["params"]
    for number, group in enumerate(groups):
        if not any(param.requires_grad for param in group["params"]):
            filler = nn.Parameter(torch.zeros(1, device=_device(module)))
            setattr(filler, PIPE_REPLICATED, False)
            module.register_parameter(f"{NOTHING_TO_TRAIN}_{number}", filler)
            group["params"].append(filler)


def _device(module: PipelineModule) -> str:
    """Return this rank's device; DeepSpeed makes it the current one later."""
    return str(get_accelerator().device_name(module.local_rank))


def layout_hint(engine: PipelineEngine, strategy: Strategy, topology: Topology) -> str:
    """Explain the layout where nobody has chosen a group size, and a node has one rank of each stage: I means N then.

    Args:
        engine: of a pipeline, whose optimizer is about to be made.
        strategy, topology: the optimizer's.

    Returns:
        A clause that follows what the strategy comes down to; empty elsewhere.
    """
    sizes, axes = topology.sizes, engine.module.topology()
    chosen = engine._config.zero_config.paro_group_size is not None
    if chosen or sizes.group_size > 1 or sizes.ranks == 1 or Placement.I not in _placements(strategy):
        return ""
    lengths = ", ".join(f"{axis} {axes.get_dim(axis)}" for axis in axes.get_axis_names())
    return (
        f": each node has one data-parallel rank of a stage (those of the first are the ranks "
        f"{data_parallel_ranks(topology.world)}; axes, outermost first: {lengths}). For groups inside of nodes make "
        f"pipe the outermost axis, as PipeDataParallelTopology and PipeModelDataParallelTopology do, and cut tensors "
        f"over fewer ranks than a node has; stages then send their activations between nodes"
    )


def _placements(strategy: Strategy) -> tuple[Placement, ...]:
    return strategy.p, strategy.g, strategy.os


# Agreement ########################################################################################


def _settings(config: DeepSpeedConfig, strategy: Strategy | None) -> dict[str, Any]:
    """Return what all stages must have alike, by the key to change."""
    zero = config.zero_config
    return {
        f"{SECTION}.{STRATEGY}": strategy.name if strategy else None,
        f"{SECTION}.stage": int(zero.stage),
        f"{SECTION}.{GROUP_SIZE}": getattr(zero, GROUP_SIZE, None),
        f"{SECTION}.{LOCO}": getattr(zero, LOCO, None),
        f"{SECTION}.offload_optimizer": str(getattr(zero.offload_optimizer, "device", None)),
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "train_micro_batch_size_per_gpu": config.train_micro_batch_size_per_gpu,
        "gradient_clipping": config.gradient_clipping,
        "fp16.enabled": config.float16_config.enabled,
        "bf16.enabled": config.bfloat16_config.enabled,
    }


def _require_agreement(module: PipelineModule, settings: dict[str, Any], problem: str) -> None:
    """Raise on all ranks where one has a problem, or a strategy is used and stages differ. Collective.

    Raises:
        ValueError: with the settings that differ, or the problem of the first rank that has one.
    """
    everybody = _gather(module, json.dumps([problem[:_PROBLEM_LENGTH], settings], default=str))
    for rank, (found, _) in enumerate(everybody):
        if found:
            raise ValueError(problem or f"rank {rank}: {found}")
    if not any(other[f"{SECTION}.{STRATEGY}"] for _, other in everybody):
        return  # DeepSpeed's affair
    different = {
        key: values for key in settings if len(set(map(str, values := [other[key] for _, other in everybody]))) > 1
    }
    if different:
        listed = "; ".join(f"{key}: {_by_rank(values)}" for key, values in different.items())
        raise ValueError(f"All stages of a pipeline must have the same configuration, but they have {listed}.")


def _by_rank(values: Iterable[Any]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(repr(value), []).append(rank)
    return ", ".join(f"{value} on ranks {found}" for value, found in ranks.items())


def require_same_groups(module: PipelineModule, optimizer: ParoOptimizer, tied: bool) -> None:
    """Refuse groups of different sizes where stages exchange what ranks of a group hold. Collective over all ranks.

    Raises:
        ValueError: the launcher's node size makes groups of different sizes on different stages.
    """
    sizes = _gather(module, json.dumps(optimizer.topology.sizes.group_size))
    if tied and optimizer.strategy.os == Placement.I and len(set(sizes)) > 1:
        raise ValueError(
            f"Stages that share weights need groups of one size with {STRATEGY} {optimizer.strategy.name}, but by the "
            f"ranks on each node they are {_by_rank(sizes)}. Set {SECTION}.{GROUP_SIZE}."
        )


def _gather(module: PipelineModule, text: str) -> list[Any]:
    """Return what each rank has said, in JSON."""
    return [json.loads(said) for said in gathered_texts(text, _device(module))]
