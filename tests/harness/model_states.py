# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The model states of an engine: bytes that a rank holds of each, and all weights."""

from collections.abc import Iterable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_ext.strategy import StateBytes
from deepspeed_ext.zero.stage3 import Stage3Optimizer


def held(engine: Any) -> StateBytes:
    """Return the bytes that this rank holds of each model state.

    Buckets and gathered layers that are in use are not included. Storages count whole and once. What serves as two
    states counts as the first of them.
    """
    optimizer, parameters = engine.optimizer, list(engine.module.parameters())
    masters = optimizer.optimizer.state  # of each its moments
    families = optimizer.gradients.values()
    if isinstance(optimizer, Stage3Optimizer):
        gradients = [part for family in families for part in (family.held, *family._whole.values())]
    else:
        shards = [shard.flat_partition for shard in optimizer.averaged_gradients.values() if shard is not None]
        gradients = [*(part for family in families for part in family.slices.values()), *shards]
    gradients += [getattr(p, name, None) for p in [*parameters, *masters] for name in ("grad", "grad_accum")]
    moments = [value for state in masters.values() for value in state.values()]
    seen: set[int] = set()
    return StateBytes(
        storage_bytes([t for p in parameters for t in (p.data, getattr(p, "ds_tensor", None))], seen),
        storage_bytes(gradients, seen),
        storage_bytes([*masters, *moments], seen),
    )


def storage_bytes(values: Iterable[Any], seen: set[int]) -> int:
    """Return the bytes of those storages of tensors that have not been seen yet."""
    total = 0
    for storage in (value.untyped_storage() for value in values if isinstance(value, Tensor)):
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


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
