# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The model states of an engine: bytes that a rank holds of each, and all weights."""

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_ext.report.memory import held, storage_bytes


def whole_weights(model: nn.Module) -> Tensor:
    """Return all parameters, gathered, as one 1D tensor."""
    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return torch.cat([parameter.detach().flatten() for parameter in parameters])


def largest(value: float) -> float:
    """Return the largest value of all ranks."""
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


__all__ = ["held", "largest", "storage_bytes", "whole_weights"]
