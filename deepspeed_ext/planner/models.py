# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Counts what the planner must know of a model."""

from collections.abc import Iterator

from torch import nn

from deepspeed_ext.model_bytes import count, nbytes
from deepspeed_ext.planner.cost import BUCKET, Model


def describe(
    model: nn.Module,
    parameter_bytes: int | None = None,
    gradient_bytes: int | None = None,
    accumulation: int = 1,
    compute: float = 0.0,
    bucket: int = BUCKET,
) -> Model:
    """Count a model, on any device, meta included, and sharded by ``zero.Init`` or not.

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
    first = next((p for p in model.parameters() if p.requires_grad), next(model.parameters(), None))
    if first is None:
        raise ValueError(f"expected a model with parameters, got a {type(model).__name__} without.")
    width = gradient_bytes or parameter_bytes or first.element_size()
    layers = list(_layers(model))
    return Model(
        count(model, parameter_bytes, width),
        width,
        accumulation,
        compute,
        fetches=len(layers),
        largest_layer=max(nbytes(layer, parameter_bytes) for layer in layers),
        bucket=bucket,
    )


def _layers(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Return the parameters of each module that has any by itself: what ZeRO-3 gathers for it."""
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own:
            yield own
