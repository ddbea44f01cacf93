# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The planner's inputs from an engine: its model, its compression, and measured link rates."""

from dataclasses import astuple, replace

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups
from torch import nn

from deepspeed_ext.comm.agreement import all_reduce
from deepspeed_ext.comm.process_groups import Topology
from deepspeed_ext.config.keys import CACHE_BYTES, LOCO, OVERLAP_UPDATES, QUANTIZED_UPDATES, REDUCE, configured_value
from deepspeed_ext.config.section import offloads
from deepspeed_ext.config.settings import BACKEND, ORDERED_LEVELS
from deepspeed_ext.deepspeed_types import Config, Engine
from deepspeed_ext.leaf.modules import numel_of
from deepspeed_ext.leaf.setup import settings_and_live
from deepspeed_ext.model_bytes import dense_parameters, experts_by_size, states_on_device
from deepspeed_ext.planner import probe
from deepspeed_ext.planner.compression import Compression
from deepspeed_ext.planner.memory import HostParameters, Model
from deepspeed_ext.planner.models import describe
from deepspeed_ext.planner.rates import Rates
from deepspeed_ext.strategy import ModelStates
from deepspeed_ext.zero.module_placements import placed_parameters


def describe_engine(engine: Engine, model: nn.Module) -> Model:
    """Return the planner's description of the model: its bytes as communicated, and as held on the device."""
    config = engine._config
    zero = config.zero_config
    model_dtype, _ = engine.get_data_types()
    wire = _sent_dtype(engine).itemsize
    # With None, each parameter counts with its own dtype.
    width = 2 if model_dtype.itemsize == 2 else None
    accumulation = config.gradient_accumulation_steps
    units, _ = settings_and_live(zero, model)
    description = describe(model, width, wire, accumulation, bucket=int(zero.reduce_bucket_size), units=units)
    elements = sum(map(numel_of, model.parameters()))
    # ZeRO-3 then keeps all parameters from forward to backward.
    keeps_gathered = elements <= min(zero.max_reuse_distance, zero.max_live_parameters)
    return replace(
        description,
        held=states_on_device(engine, dense_parameters(model)),
        experts=tuple(
            replace(family, held=states_on_device(engine, params))
            for family, params in zip(description.experts, experts_by_size(model).values(), strict=True)
        ),
        placed={
            placement: replace(part, held=states_on_device(engine, placed_parameters(model, placement)))
            for placement, part in description.placed.items()
        },
        regathered=not keeps_gathered,
        streams=not get_accelerator().is_synchronized_device(),
        overlap=configured_value(config._param_dict, "overlap_comm"),
        overlap_updates=getattr(zero, OVERLAP_UPDATES, False),
        host=_host_parameters(config),
        ordered=ORDERED_LEVELS[getattr(zero, REDUCE, BACKEND)],
    )


def _sent_dtype(engine: Engine) -> torch.dtype:
    """Return the dtype in which gradients are sent. With sequence parallelism the engine sets it late, to this one."""
    if groups._get_sequence_parallel_world_size() > 1:
        return engine._config.seq_parallel_communication_data_type or engine.get_data_types()[0]
    return engine.communication_data_type


def _host_parameters(config: Config) -> HostParameters | None:
    """Return the settings of parameters in host memory; None if they are on the device."""
    zero = config.zero_config
    if zero.offload_param is None or not offloads(zero.offload_param):
        return None
    return HostParameters(zero.offload_param.pin_memory, float(getattr(zero, CACHE_BYTES, 0)))


def max_over_ranks(model: Model) -> Model:
    """Return the maximum over all ranks, which may hold different models with tensor parallelism."""
    parts = [*model.experts, *model.placed.values()]
    pairs = [(model.states, model.held), *((part.states, part.held) for part in parts)]
    all_states = [states for pair in pairs for states in pair if states is not None]
    plain = model.without_units or (model.fetches, model.largest_layer)
    numbers = [model.largest_layer, model.shared, model.fetches, *plain, model.regathered, model.matrices]
    numbers += [part.matrices for part in parts]
    maxima = reduce_integers(
        [*numbers, *(number for states in all_states for number in astuple(states))], dist.ReduceOp.MAX
    )
    largest, shared, fetches, plain_fetches, plain_largest, regathered, matrices, *state_values = maxima
    part_matrices, state_values = state_values[: len(parts)], state_values[len(parts) :]
    max_states = [ModelStates(*state_values[start : start + 4]) for start in range(0, len(state_values), 4)]
    parts = [
        replace(
            part, states=max_states[2 * number], held=max_states[2 * number + 1], matrices=part_matrices[number - 1]
        )
        for number, part in enumerate(parts, 1)
    ]
    return replace(
        model,
        states=max_states[0],
        held=max_states[1],
        largest_layer=largest,
        shared=shared,
        fetches=int(fetches),
        without_units=(int(plain_fetches), plain_largest),
        regathered=bool(regathered),
        matrices=matrices,
        experts=tuple(parts[: len(model.experts)]),
        placed=dict(zip(model.placed, parts[len(model.experts) :], strict=True)),
    )


def reduce_integers(numbers: list[float], op: dist.ReduceOp) -> list[float]:
    """Reduce integers over all ranks, and return the result."""
    # Integers are exact; float32 would round byte counts, and ranks could choose differently.
    result = all_reduce(torch.tensor([int(number) for number in numbers]), op)
    return [float(number) for number in result.tolist()]


def configured_compression(config: Config) -> Compression:
    """Return the compression that a parsed configuration sets."""
    loco, updates = (getattr(config.zero_config, key, None) for key in (LOCO, QUANTIZED_UPDATES))
    return Compression(loco, updates)


def measure_rates(config: Config, topology: Topology, model: Model) -> Rates:
    """Measure the links with a model's dtype and collectives. Collective over all ranks; takes some seconds."""
    pinned = None if model.host is None else model.host.pinned
    reduce_scatter = config.zero_config.reduce_scatter
    return probe.measure(topology, gradient_dtype(model), reduce_scatter, pinned, model.ordered)


def gradient_dtype(model: Model) -> torch.dtype:
    """Return a dtype of a gradient's size."""
    return {2: torch.bfloat16}.get(model.gradient_bytes, torch.float32)
