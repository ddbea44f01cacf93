# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes of a model's states: in total, and those on one rank."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from deepspeed_ext.config.section import offloads
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.leaf.modules import numel_of
from deepspeed_ext.strategy import ModelStates, StateBytes

ADAM_BYTES = 12  # for each parameter: master copy and two moments in fp32
MUON_BYTES = 8  # for each parameter that Muon trains: master copy and momentum in fp32


def experts_by_size(model: nn.Module) -> dict[int, list[nn.Parameter]]:
    """Return this rank's parameters that DeepSpeed has marked as experts, by their expert-parallel size."""
    params_by_size: dict[int, list[nn.Parameter]] = {}
    for param in model.parameters():
        if not getattr(param, "allreduce", True) and hasattr(param, "group_name"):
            params_by_size.setdefault(int(str(param.group_name).rpartition("_")[2]), []).append(param)
    return params_by_size


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return all other parameters, which are on every data-parallel rank."""
    experts = {id(param) for params in experts_by_size(model).values() for param in params}
    return [param for param in model.parameters() if id(param) not in experts]


def count_states(
    parameters: Iterable[nn.Parameter], parameter_bytes: int | None = None, gradient_bytes: int = 2
) -> ModelStates:
    """Return the bytes of parameters, of their gradients, and of the states of Adam, or of Muon for marked ones.

    Parameters may be on any device, even meta, and may be sharded by ``zero.Init``. DeepSpeed marks parameters for
    Muon (``use_muon``).

    Args:
        parameter_bytes: bytes of an element in forward and backward; by default its current size.
        gradient_bytes: bytes of a gradient's element.
    """
    parameters = list({id(p): p for p in parameters}.values())
    trained = [p for p in parameters if p.requires_grad]
    elements = sum(map(numel_of, trained))
    saved = (ADAM_BYTES - MUON_BYTES) * sum(map(numel_of, muon_parameters(trained)))
    return ModelStates(
        parameters=parameter_nbytes(parameters, parameter_bytes),
        gradients=float(elements * gradient_bytes),
        updated=parameter_nbytes(trained, parameter_bytes),
        optimizer=float(elements * ADAM_BYTES - saved),
    )


def muon_parameters(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the trained parameters that DeepSpeed has marked for Muon."""
    return [p for p in parameters if p.requires_grad and getattr(p, "use_muon", False)]


def states_on_device(engine: Engine, parameters: Iterable[nn.Parameter]) -> ModelStates:
    """Return the bytes of the states of parameters on a DeepSpeedEngine's device; offloaded states take none."""
    config = engine._config.zero_config
    dtype, sums = engine.get_data_types()
    states = count_states(parameters, 2 if dtype.itemsize == 2 else None, sums.itemsize)
    return replace(
        states,
        parameters=0.0 if offloads(config.offload_param) else states.parameters,
        optimizer=0.0 if offloads(config.offload_optimizer) else states.optimizer,
    )


def whole_bytes(engine: Engine, parameters: Iterable[nn.Parameter]) -> float:
    """Return the bytes of parameters that stay whole on an engine's device, without their shards."""
    dtype, _ = engine.get_data_types()
    return parameter_nbytes(list(parameters), 2 if dtype.itemsize == 2 else None)


def parameter_nbytes(parameters: list[nn.Parameter], each: int | None = None) -> float:
    """Return the bytes of parameters with ``each`` bytes per element; by default their current size."""
    return float(sum(numel_of(p) * (each or p.element_size()) for p in parameters))


# States of an engine ##############################################################################


def measure_state_bytes(engine: Engine) -> StateBytes:
    """Return the bytes of an engine's model states on this rank, with any optimizer, DeepSpeed's or ours.

    Each storage counts once and completely; if it holds two states, it counts as the first. Buckets and gathered
    layers are not included.
    """
    optimizer, seen = engine.optimizer, set[tuple[str, int]]()
    parameters = list(engine.module.parameters())
    wrapped = getattr(optimizer, "optimizer", optimizer)
    masters = [param for group in wrapped.param_groups for param in group["params"]]
    masters += getattr(optimizer, "fp32_partitioned_groups_flat", [])  # ZeRO-3's optimizer has one sub-group at a time
    moments = [value for state in wrapped.state.values() for value in state.values()]
    sharded = [getattr(param, name, None) for param in parameters for name in ("ds_tensor", "ds_secondary_tensor")]
    return StateBytes(
        storage_bytes([*(param.data for param in parameters), *sharded], seen),
        storage_bytes(_gradients(optimizer, [*parameters, *masters]), seen),
        storage_bytes([*masters, *moments], seen),
    )


def _gradients(optimizer: Any, of: Iterable[Any]) -> Iterator[Any]:
    for param in of:
        yield from (getattr(param, name, None) for name in ("grad", "grad_accum"))
    for name in ("averaged_gradients", "all_grad_tensors"):
        yield from _flattened((getattr(optimizer, name, None) or {}).values())
    yield getattr(optimizer, "grad_partitions_flat_buffer", None)
    for family in (getattr(optimizer, "gradients", None) or {}).values():  # ours
        yield from family.tensors()


def _flattened(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flattened(value)
        else:
            yield getattr(value, "flat_partition", value)


def storage_bytes(values: Iterable[Any], seen: set[tuple[str, int]]) -> int:
    """Return the bytes of the storages of tensors that are not in ``seen``, and add them."""
    total = 0
    for storage in (value.untyped_storage() for value in values if isinstance(value, Tensor)):
        key = str(storage.device), storage.data_ptr()
        if key not in seen:
            seen.add(key)
            total += storage.nbytes()
    return total
