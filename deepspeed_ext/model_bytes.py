# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Count the bytes of a model's states."""

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from deepspeed_ext.config.section import offloads
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.leaf.modules import numel_of
from deepspeed_ext.strategy import ModelStates

ADAM_BYTES = 12  # for each parameter: master copy and two moments in fp32
MUON_BYTES = 8  # for each parameter that Muon trains: master copy and momentum in fp32


def experts_of_sizes(model: nn.Module) -> dict[int, list[nn.Parameter]]:
    """Return this rank's parameters that DeepSpeed has marked as experts, by their expert-parallel size."""
    found: dict[int, list[nn.Parameter]] = {}
    for param in model.parameters():
        if not getattr(param, "allreduce", True) and hasattr(param, "group_name"):
            found.setdefault(int(str(param.group_name).rpartition("_")[2]), []).append(param)
    return found


def dense(model: nn.Module) -> list[nn.Parameter]:
    """Return all other parameters, which every data-parallel rank has."""
    experts = {id(param) for some in experts_of_sizes(model).values() for param in some}
    return [param for param in model.parameters() if id(param) not in experts]


def count(
    parameters: Iterable[nn.Parameter], parameter_bytes: int | None = None, gradient_bytes: int = 2
) -> ModelStates:
    """Return the bytes of parameters, of their gradients, and of the states of Adam, or of Muon for marked ones.

    Parameters may be on any device, even meta, and may be sharded by ``zero.Init``. DeepSpeed marks parameters for
    Muon (``use_muon``).

    Args:
        parameters: the parameters to count.
        parameter_bytes: bytes of an element in forward and backward; by default those that it has.
        gradient_bytes: bytes of a gradient's element.
    """
    parameters = list({id(p): p for p in parameters}.values())
    trained = [p for p in parameters if p.requires_grad]
    elements = sum(map(numel_of, trained))
    saved = (ADAM_BYTES - MUON_BYTES) * sum(map(numel_of, matrices(trained)))
    return ModelStates(
        parameters=nbytes(parameters, parameter_bytes),
        gradients=float(elements * gradient_bytes),
        updated=nbytes(trained, parameter_bytes),
        optimizer=float(elements * ADAM_BYTES - saved),
    )


def matrices(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the trained parameters that DeepSpeed has marked for Muon."""
    return [p for p in parameters if p.requires_grad and getattr(p, "use_muon", False)]


def on_device(engine: Engine, parameters: Iterable[nn.Parameter]) -> ModelStates:
    """Return the bytes that a DeepSpeedEngine keeps of parameters on the device; what is offloaded takes none."""
    config = engine._config.zero_config
    dtype, sums = engine.get_data_types()
    states = count(parameters, 2 if dtype.itemsize == 2 else None, sums.itemsize)
    return replace(
        states,
        parameters=0.0 if offloads(config.offload_param) else states.parameters,
        optimizer=0.0 if offloads(config.offload_optimizer) else states.optimizer,
    )


def nbytes(parameters: list[nn.Parameter], each: int | None = None) -> float:
    """Return the bytes of parameters if an element has ``each`` bytes; by default, as many as it has."""
    return float(sum(numel_of(p) * (each or p.element_size()) for p in parameters))
