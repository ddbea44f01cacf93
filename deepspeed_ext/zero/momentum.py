# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon's momentum in checkpoints: conversion from DeepSpeed's stages to a rank's elements.

Note [Momentum of DeepSpeed's stages]
    Our momentum has the elements whose weights a rank has, as every state, in fp32, of gradients without the loss
    scale. The same holds for DeepSpeed with optimizer offload. DeepSpeed's stage 3 differs only in loss scales. Its
    stages 1 and 2 without offload have, on each rank, the momentum of all elements of each parameter that is partly on
    the rank, one after the other, without padding. Without offload, DeepSpeed's momentum is of gradients with the loss
    scale, so momentum that its stage 3 may load is saved with a scale.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed.checkpoint.constants import LOSS_SCALER
from torch import Tensor

from deepspeed_ext.zero.muon import MOMENTUM
from deepspeed_ext.zero.shards import Member

MOMENTUM_SCALE = "paro_momentum_scale"  # in a rank's state dict: factor of momentum


def partition_momentum(momentum: Tensor, members: Sequence[Member], chunk: int) -> Tensor:
    """Return a partition's part (1D) of the momentum (1D) of all elements of its parameters."""
    own, offset = momentum.new_zeros(chunk), 0
    for member in members:
        member.in_shard.of(own).copy_(member.span.shifted(offset).of(momentum))
        offset += member.param.numel()
    return own


def saved_scale(loss_scale: float) -> float:
    """Return the largest power of two up to a loss scale: multiplication and division by it are exact."""
    return 2.0 ** (math.frexp(loss_scale)[1] - 1)


def unscaled_momentum(state: Mapping[str, Any], momentum: Tensor, offloaded: bool) -> Tensor:
    """Return momentum of gradients without the loss scale.

    Args:
        state: the rank's state dict with the momentum.
        offloaded: whether optimizer offload was used, if DeepSpeed has saved it.
    """
    scale = state.get(MOMENTUM_SCALE)
    if scale is None:
        scale = 1.0 if offloaded else getattr(state.get(LOSS_SCALER), "cur_scale", 1.0)
    return momentum if scale == 1 else momentum.float() / float(scale)


def with_momentum(states: Mapping[int, Mapping[str, Any]], momenta: Mapping[int, Tensor]) -> dict[int, dict[str, Any]]:
    """Return an optimizer's states with other momentum, by number of the parameter."""
    new_states = {number: dict(state) for number, state in states.items()}
    for number, momentum in momenta.items():
        new_states.setdefault(number, {})[MOMENTUM] = momentum
    return new_states


def sharding_mismatch(saved: str, expected: str) -> ValueError:
    """Return the error for optimizer states that are sharded differently: as ``saved``, not as ``expected``."""
    return ValueError(f"The checkpoint has optimizer states {saved}, but this run expects {expected}.")
