# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What the planner must know of a model, counted."""

from collections.abc import Iterator

import torch
from torch import nn

from deepspeed_ext.placement import ModelStates
from deepspeed_ext.planner.cost import BUCKET, Model

ADAM_BYTES = 12  # of a parameter: master copy and two moments in fp32


def describe(
    model: nn.Module,
    parameter_bytes: int | None = None,
    gradient_bytes: int | None = None,
    accumulation: int = 1,
    compute: float = 0.0,
    bucket: int = BUCKET,
) -> Model:
    """Count a model, on any device, meta included, and cut by ``zero.Init`` or not.

    Args:
        model: what is trained.
        parameter_bytes: of a parameter in forward and backward; by default those it has.
        gradient_bytes: of a gradient; by default as the parameter.
        accumulation: micro-steps of a step.
        compute: seconds of forward and backward of a micro-step.
        bucket: elements that are reduced at once.

    Raises:
        ValueError: the model has no parameters.
    """
    parameters = list({id(p): p for p in model.parameters()}.values())
    if not parameters:
        raise ValueError(f"expected a model with parameters, got a {type(model).__name__} without.")
    trained = [p for p in parameters if p.requires_grad]

    def nbytes(some: list[nn.Parameter]) -> float:
        return float(sum(_numel(p) * (parameter_bytes or p.element_size()) for p in some))

    width = gradient_bytes or parameter_bytes or (trained or parameters)[0].element_size()
    count = sum(map(_numel, trained))
    layers = list(_layers(model))
    return Model(
        ModelStates(nbytes(parameters), float(count * width), nbytes(trained), float(count * ADAM_BYTES)),
        width,
        accumulation,
        compute,
        fetches=len(layers),
        largest_layer=max(map(nbytes, layers)),
        bucket=bucket,
    )


def _numel(parameter: torch.Tensor) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _layers(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Parameters of each module that has any by itself: what ZeRO-3 gathers for it."""
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own:
            yield own
