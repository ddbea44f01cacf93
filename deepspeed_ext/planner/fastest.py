# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``"paro_strategy": "fastest"``: measures the links and chooses a strategy once, identically on all ranks.

The decision and its inputs are written to a file. A run with the same inputs reads the decision from the file, so a
resumed run has the strategy of its checkpoint.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups
from torch import nn

from deepspeed_ext.comm.agreement import broadcast_from_first, broadcast_text
from deepspeed_ext.comm.process_groups import Topology, get_topology, ranks_per_node
from deepspeed_ext.config.check import possible_strategies, with_strategy
from deepspeed_ext.config.decisions import Decisions
from deepspeed_ext.config.implied import imply_stage
from deepspeed_ext.config.keys import (
    CACHE_BYTES,
    FASTEST,
    LOCO,
    MEMORY,
    MICRO_STEP,
    QUANTIZED_UPDATES,
    REDUCE,
    SECTION,
    STRATEGY,
)
from deepspeed_ext.config.unsupported import deepspeed_moe_layers
from deepspeed_ext.console import warn_on_rank_0
from deepspeed_ext.deepspeed_types import Config, Engine, is_partitioned
from deepspeed_ext.planner import probe
from deepspeed_ext.planner.choice import Plan, plan
from deepspeed_ext.planner.engine_model import (
    configured_compression,
    describe_engine,
    max_over_ranks,
    measure_rates,
    reduce_integers,
)
from deepspeed_ext.planner.memory import Model, Part
from deepspeed_ext.planner.models import micro_step_flops, orthogonalizing_flops
from deepspeed_ext.strategy import STRATEGIES, Placement, Strategy, hyphenate

STATES_SHARE = 0.7  # of the device's free memory; the rest is for activations and buffers


def choose_strategy(engine: Engine, model: nn.Module) -> None:
    """Set an engine's configuration to the fastest strategy for this model. Collective over all ranks.

    Args:
        engine: a DeepSpeedEngine with its process groups, before it moves its model to a device.
        model: the model that it will train.

    Raises:
        ValueError: on all ranks, if no strategy is possible, or none fits.
    """
    config = engine._config
    if engine.mpu is not None:
        groups.mpu = engine.mpu  # the engine sets this later, but the process groups are needed now
    topology = get_topology(groups._get_sequence_data_parallel_group(), config.zero_config.paro_group_size)
    strategies = _allowed_strategies(engine, model)
    description = max_over_ranks(describe_engine(engine, model))
    flops = _max_micro_step_flops(config, model)
    # Without measured rates, which differ from run to run: a resumed run must find its decision.
    inputs = _inputs(config, topology, description, strategies) | {"micro_step_flops": flops}
    file = Decisions(Path(config.zero_config.paro_decision_file))
    # Rank 0 alone reads the file, and all ranks must use its answer: different strategies would hang.
    name = broadcast_from_first(lambda: _find_strategy(file, inputs), f"{file.path} cannot be read", ValueError)
    new_plan, compute = None, ""
    if not name:
        dtype, _ = engine.get_data_types()
        description, compute = _with_compute(description, config, flops, dtype)
        if description.all_matrices:
            description = replace(description, orthogonalizing=_orthogonalize_seconds(config, model))
        new_plan = _measured_plan(config, topology, description, strategies, _memory_budget(config, model))
        name = broadcast_text(new_plan.choice.strategy if new_plan.choice else "", 0)
    if not name:
        assert new_plan is not None
        raise ValueError(
            f"{SECTION}.{STRATEGY} {FASTEST}: {new_plan.reason} Raise {MEMORY}, or allow more strategies than "
            f"{', '.join(map(str, strategies))}."
        )
    engine._config = with_strategy(config, STRATEGIES[name])
    # Frameworks read the stage from the raw section.
    imply_stage(config._param_dict[SECTION], STRATEGIES[name].stage)
    if new_plan is not None and dist.get_rank() == 0:
        warn_on_rank_0(f'{SECTION}.{STRATEGY} "{FASTEST}" is {new_plan.reason}; {compute}')
        file.keep(name, inputs, new_plan.as_dict())


def _allowed_strategies(engine: Engine, model: nn.Module) -> list[Strategy]:
    """Return the strategies that the configuration, the engine and the model allow."""
    possible = possible_strategies(engine._config)
    reasons = []
    if any(is_partitioned(parameter) for parameter in model.parameters()):
        reasons.append("the model was built under zero.Init, which shards parameters")
    if engine.client_optimizer is None and not engine.optimizer_name():
        reasons.append("there is no optimizer, and the other strategies shard only its states")
    if deepspeed_moe_layers(model):  # p = I saves no memory for an expert that a single rank of the group has
        replicated = [row for row in possible if row.p == Placement.N]
        if reasons or not replicated:
            raise ValueError(
                f"{SECTION} allows {STRATEGY} {FASTEST} only {', '.join(map(str, possible))}; "
                f"with DeepSpeed's MoE layers it can use only strategies with p = N, that is without stage 3"
                f"{', but ' if reasons else ''}{' and '.join(reasons)}."
            )
        return replicated
    sharded = [row for row in possible if row.p != Placement.N]
    if reasons and not sharded:
        raise ValueError(
            f"{SECTION} allows {STRATEGY} {FASTEST} only {', '.join(map(str, possible))}, which do "
            f"not shard parameters, but {' and '.join(reasons)}. Set stage 3."
        )
    return sharded if reasons else possible


def _max_micro_step_flops(config: Config, model: nn.Module) -> float:
    """Return the largest number of FLOPs of a micro-step on any rank."""
    samples = micro_step_flops(model, config.train_micro_batch_size_per_gpu)
    (most,) = reduce_integers([samples / groups._get_sequence_parallel_world_size()], dist.ReduceOp.MAX)
    return most


def _with_compute(model: Model, config: Config, flops: float, dtype: torch.dtype) -> tuple[Model, str]:
    """Return the model with the seconds of a micro-step, and their source: the user's value, or an estimate.

    No data is available before training starts, so the estimate uses this device's rate of matrix products.
    """
    seconds = config.zero_config.paro_micro_step_seconds
    if seconds is not None:
        return replace(model, compute=seconds), f"compute of a micro-step: {seconds:.3g} s, from {MICRO_STEP}"
    rate = probe.measure_flops(dtype)
    source = f"compute of a micro-step: {flops / rate:.3g} s, estimated from {flops:.3g} FLOPs at {rate:.3g} a second"
    return replace(model, compute=flops / rate), f"{source} (set {MICRO_STEP} if you have measured it)"


def _orthogonalize_seconds(config: Config, model: nn.Module) -> float:
    """Estimate in the same way the seconds in which one rank would orthogonalize all of Muon's matrices."""
    # Imported only with Muon, since the import compiles kernels.
    from deepspeed.runtime.zero.muon.original_muon import ns_compute_dtype

    method = (config.optimizer_params or {}).get("ns_method", "gram")
    return orthogonalizing_flops(model, method) / probe.measure_flops(ns_compute_dtype(method))


def _measured_plan(config: Config, topology: Topology, model: Model, allowed: list[Strategy], budget: float) -> Plan:
    rates = measure_rates(config, topology, model)
    names = {row.name for row in allowed}
    return plan(
        topology.sizes,
        model,
        rates,
        budget,
        compressions=[configured_compression(config)],
        allowed=lambda row: row.name in names,
    )


def _memory_budget(config: Config, model: nn.Module) -> float:
    """Return the bytes for model states on the rank with the least memory."""
    memory_gb = config.zero_config.paro_memory_gb
    if memory_gb is not None:
        return float(memory_gb) * 1e9
    accelerator = get_accelerator()
    free, kind = accelerator.available_memory(), accelerator.device_name().partition(":")[0]
    if kind == "cpu":
        free /= ranks_per_node() or 1
    # Parameters that are on the device already count as free memory, because they are model states.
    tensors = [getattr(p, "ds_tensor", p) for p in model.parameters()]
    free += sum(p.nbytes for p in tensors if p.device.type == kind)
    (least,) = reduce_integers([STATES_SHARE * free], dist.ReduceOp.MIN)
    return least


def _experts_input(experts: Part) -> dict[str, Any]:
    """Return the fields of experts as inputs; older decisions do not have ``matrices``."""
    return {key: value for key, value in asdict(experts).items() if key != "matrices" or value}


def _inputs(config: Config, topology: Topology, model: Model, allowed: list[Strategy]) -> dict[str, Any]:
    """Return the inputs of a decision. If any value changes, the strategy is chosen again."""
    assert model.held is not None
    zero = config.zero_config
    return {
        "ranks": topology.sizes.ranks,
        "group_size": topology.sizes.group_size,
        "moved": asdict(model.states),
        "held": asdict(model.held),
        "accumulation": model.accumulation,
        "regathered": model.regathered,
        "strategies": [row.name for row in allowed],
        MEMORY: zero.paro_memory_gb,
        LOCO: zero.zeropp_loco_param and zero.zeropp_loco_param.as_dict(only_set=True),
        QUANTIZED_UPDATES: zero.paro_quantized_updates and zero.paro_quantized_updates.as_dict(only_set=True),
        "reduce_scatter": zero.reduce_scatter,
        "reduce_bucket_size": model.bucket,
        "overlap_comm": model.overlap,
        "paro_overlap_updates": model.overlap_updates,
        MICRO_STEP: zero.paro_micro_step_seconds,
        **({REDUCE: zero.paro_reduce} if model.ordered else {}),  # older decisions do not have this key
        **({"matrices": model.matrices} if model.matrices else {}),  # older decisions do not have this key
        **({CACHE_BYTES: zero.paro_parameter_cache_bytes} if zero.paro_parameter_cache_bytes else {}),
        **({"experts": [_experts_input(family) for family in model.experts]} if model.experts else {}),
    }


def _find_strategy(file: Decisions, inputs: dict[str, Any]) -> str:
    """Return the strategy that was chosen for the same inputs; empty without such a decision."""
    entry = file.find(inputs)
    if entry is None:
        return ""
    name, decided = str(entry["strategy"]), f"as decided on {entry['date']} ({file.path})"
    warn_on_rank_0(f'{SECTION}.{STRATEGY} "{FASTEST}" stays {hyphenate(name)}, {decided}')
    return name
