# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3's linear function, without its overhead per call.

DeepSpeed replaces ``torch.nn.functional.linear`` with an autograd function. It saves the weight itself for the
backward, not a transposed view, which would keep the gathered data alive. Because that function has a
``setup_context``, torch inspects signatures in every call. This takes 0.1 to 0.25 ms on the host, more than the
product of a small expert. The function here takes its context in ``forward``, so torch inspects nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3
from torch import Tensor
from torch.autograd.function import FunctionCtx

from deepspeed_ext.leaf.units import UNIT


class UnitLinear(torch.autograd.Function):
    """DeepSpeed's function, for weights in units."""

    @staticmethod
    def forward(ctx: FunctionCtx, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output: Tensor = LinearFunctionForZeroStage3.forward(input, weight, bias)
        LinearFunctionForZeroStage3.setup_context(ctx, (input, weight, bias), output)
        return output

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> Any:
        return LinearFunctionForZeroStage3.backward(ctx, *gradients)


def linear(wrapped: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Call ``torch.nn.functional.linear``.

    Args:
        wrapped: DeepSpeed's replacement, for weights that are in no unit, and under torch.func, which needs it.
        input, weight, bias: as there.
    """
    if hasattr(weight, UNIT) and not torch._C._are_functorch_transforms_active():
        product: Tensor = UnitLinear.apply(input, weight, bias)
        return product
    return wrapped(input, weight, bias)
