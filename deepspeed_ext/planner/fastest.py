# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``"paro_strategy": "fastest"``: measure the links, and decide; once, and the same on all ranks.

What was decided is kept in a file, with what it was decided for. A run that finds it there, for the same, keeps to it:
so a run that is resumed has the strategy that its checkpoint was saved under.
"""

import datetime
import json
import logging
import os
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups, log_dist
from torch import nn

import deepspeed_ext
from deepspeed_ext.config import DECISION, FASTEST, LOCO, MEMORY, SECTION, STRATEGY, decide, possible_strategies
from deepspeed_ext.loco.settings import LocoSettings
from deepspeed_ext.placement import STRATEGIES, ModelStates, Placement, Strategy
from deepspeed_ext.planner import probe
from deepspeed_ext.planner.choice import Plan, plan
from deepspeed_ext.planner.cost import Model
from deepspeed_ext.planner.models import describe
from deepspeed_ext.topology import Topology, get_topology, ranks_per_node

STATES_SHARE = 0.7  # of the device's free memory; the rest is for activations and buffers
_NAMES = tuple(STRATEGIES)


def decide_for(engine: Any, model: nn.Module) -> None:
    """Give an engine the configuration of the strategy that is the fastest for this model.

    Collective over all ranks.

    Args:
        engine: a DeepSpeedEngine whose groups are known, and whose model is not placed yet.
        model: what it will train.

    Raises:
        ValueError: on all ranks, if no strategy is possible, or none fits.
    """
    config = engine._config
    if engine.mpu is not None:
        groups.mpu = engine.mpu  # as the engine does a moment later
    topology = get_topology(groups._get_sequence_data_parallel_group(), config.zero_config.paro_group_size)
    allowed = _allowed(config, model)
    described = _same_everywhere(_described(config, model))
    inputs = _inputs(config, topology, described, allowed)
    name = _broadcast(_kept(config, inputs))
    if name is None:
        made = _measured_plan(config, topology, described, allowed)
        name = _broadcast(made.choice.strategy if made.choice else None)
        if name is None:
            raise ValueError(
                f"{SECTION}.{STRATEGY} {FASTEST}: {made.reason} Raise {MEMORY}, or let it choose from more than "
                f"{', '.join(row.name for row in allowed)}."
            )
        _keep(config, inputs, made)
    engine._config = type(config)(decide(config, STRATEGIES[name]), engine.mpu, mesh_device=engine.mesh_device)


def _allowed(config: Any, model: nn.Module) -> list[Strategy]:
    """What the configuration and the model leave."""
    possible = possible_strategies(config)
    if not any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return possible
    cut = [row for row in possible if row.p != Placement.N]
    if not cut:
        raise ValueError(
            f"the model was built under zero.Init, which cuts parameters, but {SECTION} leaves {STRATEGY} {FASTEST} "
            f"only {', '.join(row.name for row in possible)}, which do not. Set stage 3, or build the model outside."
        )
    return cut


def _described(config: Any, model: nn.Module) -> Model:
    width = 2 if config.float16_config.enabled or config.bfloat16_config.enabled else None
    accumulated = {"fp32": 4, "fp16": 2, "bf16": 2}.get(config.grad_accum_dtype)
    return describe(
        model,
        parameter_bytes=width,
        gradient_bytes=accumulated or width,
        accumulation=config.gradient_accumulation_steps,
        bucket=int(config.zero_config.reduce_bucket_size),
    )


def _same_everywhere(model: Model) -> Model:
    """The most of all ranks: with tensor parallelism they may hold different models."""
    fetches, largest, *states = _reduced(
        [model.fetches, model.largest_layer, *astuple(model.states)], dist.ReduceOp.MAX
    )
    return replace(model, states=ModelStates(*states), fetches=int(fetches), largest_layer=largest)


def _reduced(numbers: list[float], op: Any) -> list[float]:
    """Whole numbers, over all ranks."""
    found = torch.tensor([int(number) for number in numbers], device=get_accelerator().current_device_name())
    dist.all_reduce(found, op=op)
    return [float(number) for number in found.tolist()]


def _measured_plan(config: Any, topology: Topology, model: Model, allowed: list[Strategy]) -> Plan:
    dtype = {2: torch.bfloat16, 4: torch.float32}[model.gradient_bytes]
    rates = probe.measure(topology, dtype, config.zero_config.reduce_scatter)
    loco = getattr(config.zero_config, LOCO, None)
    settings = None if loco is None else LocoSettings.parse(loco)
    names = {row.name for row in allowed}
    return plan(topology.cluster, model, rates, _budget(config), [settings], lambda row: row.name in names)


def _budget(config: Any) -> float:
    """Bytes that the rank with the least memory has for model states."""
    given = config.zero_config.paro_memory_gb
    if given is not None:
        return float(given) * 1e9
    free = get_accelerator().available_memory()
    if get_accelerator().device_name() == "cpu":
        free /= ranks_per_node() or 1
    (least,) = _reduced([STATES_SHARE * free], dist.ReduceOp.MIN)
    return least


def _inputs(config: Any, topology: Topology, model: Model, allowed: list[Strategy]) -> dict[str, Any]:
    """What a decision is for: with other values it is made anew."""
    section = config._param_dict[SECTION]
    return {
        "ranks": topology.cluster.ranks,
        "group_size": topology.cluster.group_size,
        "parameter_bytes": model.states.parameters,
        "gradient_bytes": model.states.gradients,
        "accumulation": model.accumulation,
        "strategies": [row.name for row in allowed],
        MEMORY: section.get(MEMORY),
        LOCO: section.get(LOCO),
    }


def _kept(config: Any, inputs: dict[str, Any]) -> str | None:
    """What the file says, on rank 0; None if it says nothing that is for this run."""
    if dist.get_rank() != 0:
        return None
    path = Path(config.zero_config.paro_decision_file)
    try:
        found = json.loads(path.read_text())
        name = found["strategy"] if found["inputs"] == inputs and found["strategy"] in inputs["strategies"] else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _say(f"{path} cannot be read ({type(error).__name__}: {error}): deciding anew")
        return None
    if name is None:
        _say(f"{path} was decided for another run: deciding anew")
        return None
    _say(f'{SECTION}.{STRATEGY} "{FASTEST}" stays {name}, as decided on {found["date"]} ({path})')
    return str(name)


def _keep(config: Any, inputs: dict[str, Any], made: Plan) -> None:
    """Say it, and write it. A folder that cannot be written to costs the file, not the run."""
    _say(f'{SECTION}.{STRATEGY} "{FASTEST}" is {made.reason}')
    if dist.get_rank() != 0:
        return
    assert made.choice is not None
    path = Path(config.zero_config.paro_decision_file)
    written = {
        "strategy": made.choice.strategy,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "version": deepspeed_ext.__version__,
        "inputs": inputs,
        "plan": made.as_dict(),
    }
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(written, indent=2) + "\n")
        aside.replace(path)
    except OSError as error:
        _say(f"the decision is not kept, {path} cannot be written ({error}). Set {SECTION}.{DECISION} to another path")


def _say(message: str) -> None:
    """At level WARNING, which DeepSpeed shows: a strategy was chosen on the user's behalf."""
    log_dist(f"deepspeed_ext: {message}", ranks=[0], level=logging.WARNING)


def _broadcast(name: str | None) -> str | None:
    """What rank 0 says."""
    number = -1 if name is None else _NAMES.index(name)
    said = torch.tensor([number], device=get_accelerator().current_device_name())
    dist.broadcast(said, 0)
    return _NAMES[said.item()] if said.item() >= 0 else None
