# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What the planner is told of an engine: its model, what crosses in few bits, and the links as measured."""

from dataclasses import astuple, replace

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from deepspeed_ext.comm.agreement import all_reduced
from deepspeed_ext.comm.process_groups import Topology
from deepspeed_ext.config.keys import CACHE_BYTES, LOCO, OVERLAP_UPDATES, QUANTIZED_UPDATES, as_given
from deepspeed_ext.config.section import offloads
from deepspeed_ext.deepspeed_types import Config, Engine
from deepspeed_ext.leaf.modules import numel_of
from deepspeed_ext.model_bytes import dense, experts_of_sizes, on_device
from deepspeed_ext.planner import probe
from deepspeed_ext.planner.compression import Compression
from deepspeed_ext.planner.memory import HostParameters, Model
from deepspeed_ext.planner.models import describe
from deepspeed_ext.planner.rates import Rates
from deepspeed_ext.strategy import ModelStates


def describe_engine(engine: Engine, model: nn.Module) -> Model:
    """Return the planner's description of the model: its bytes as they are moved, and as the device holds them."""
    config = engine._config
    zero = config.zero_config
    model_dtype, _ = engine.get_data_types()
    wire = engine.communication_data_type.itemsize
    width = 2 if model_dtype.itemsize == 2 else None
    accumulation = config.gradient_accumulation_steps
    found = describe(model, width, wire, accumulation, bucket=int(zero.reduce_bucket_size))
    elements = sum(map(numel_of, model.parameters()))
    kept = elements <= min(zero.max_reuse_distance, zero.max_live_parameters)
    return replace(
        found,
        held=on_device(engine, dense(model)),
        experts=tuple(
            replace(one, held=on_device(engine, some))
            for one, some in zip(found.experts, experts_of_sizes(model).values(), strict=True)
        ),
        regathered=not kept,
        streams=not get_accelerator().is_synchronized_device(),
        overlap=as_given(config._param_dict, "overlap_comm"),
        overlap_updates=getattr(zero, OVERLAP_UPDATES, False),
        host=_host_parameters(config),
    )


def _host_parameters(config: Config) -> HostParameters | None:
    """Return how parameters are in host memory; None if they are not."""
    zero = config.zero_config
    if zero.offload_param is None or not offloads(zero.offload_param):
        return None
    return HostParameters(zero.offload_param.pin_memory, float(getattr(zero, CACHE_BYTES, 0)))


def same_everywhere(model: Model) -> Model:
    """Return the maximum over all ranks, since with tensor parallelism they may hold different models."""
    pairs = [(model.states, model.held), *((one.states, one.held) for one in model.experts)]
    held = [states for pair in pairs for states in pair if states is not None]
    numbers = [model.largest_layer, model.fetches, model.regathered, model.matrices]
    numbers += [one.matrices for one in model.experts]
    found = reduced([*numbers, *(number for states in held for number in astuple(states))], dist.ReduceOp.MAX)
    largest, fetches, regathered, matrices, *rest = found
    of_experts, rest = rest[: len(model.experts)], rest[len(model.experts) :]
    alike = [ModelStates(*rest[start : start + 4]) for start in range(0, len(rest), 4)]
    return replace(
        model,
        states=alike[0],
        held=alike[1],
        largest_layer=largest,
        fetches=int(fetches),
        regathered=bool(regathered),
        matrices=matrices,
        experts=tuple(
            replace(one, states=alike[2 * number], held=alike[2 * number + 1], matrices=of_experts[number - 1])
            for number, one in enumerate(model.experts, 1)
        ),
    )


def reduced(numbers: list[float], op: dist.ReduceOp) -> list[float]:
    """Reduce integers over all ranks, and return the result."""
    found = all_reduced(torch.tensor([int(number) for number in numbers]), op)
    return [float(number) for number in found.tolist()]


def compression_of(config: Config) -> Compression:
    """Return what crosses in few bits, by a parsed configuration."""
    return Compression.parse(*(getattr(config.zero_config, key, None) for key in (LOCO, QUANTIZED_UPDATES)))


def measured_rates(config: Config, topology: Topology, model: Model) -> Rates:
    """Measure the links with what they will carry of a model. Collective; takes some seconds."""
    pinned = None if model.host is None else model.host.pinned
    return probe.measure(topology, dtype_of(model), config.zero_config.reduce_scatter, pinned)


def dtype_of(model: Model) -> torch.dtype:
    """Return a dtype with as many bytes as a gradient."""
    return {2: torch.bfloat16}.get(model.gradient_bytes, torch.float32)
