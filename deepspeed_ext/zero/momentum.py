# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon's momentum in checkpoints: what DeepSpeed's stages save of it, and what of that is a rank's.

Note [Momentum of DeepSpeed's stages]
    Ours is of the elements whose weights a rank has, like any state, in fp32, and of gradients without the loss scale.
    So is that of DeepSpeed with optimizer offload, and DeepSpeed's stage 3 differs only in what loss scales do. Its
    stages 1 and 2 without offload have, on each rank, the momentum of all elements of each parameter of which the rank
    has some; one after the other, without padding. Without offload, DeepSpeed's is of gradients with the loss scale;
    so what its stage 3 may load is saved with a scale.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed.checkpoint.constants import LOSS_SCALER
from torch import Tensor

from deepspeed_ext.zero.muon import MOMENTUM
from deepspeed_ext.zero.shards import Member

MOMENTUM_SCALE = "paro_momentum_scale"  # in a rank's state dict: by what momentum is multiplied


def of_partition(momentum: Tensor, members: Sequence[Member], chunk: int) -> Tensor:
    """Return a partition's part (1D) of the momentum (1D) of all elements of the parameters that it has some of."""
    own, offset = momentum.new_zeros(chunk), 0
    for member in members:
        member.in_shard.of(own).copy_(member.span.shifted(offset).of(momentum))
        offset += member.param.numel()
    return own


def saved_scale(loss_scale: float) -> float:
    """Return the largest power of two up to a loss scale: multiplying by it and dividing again changes no bit."""
    return 2.0 ** (math.frexp(loss_scale)[1] - 1)


def unscaled(state: Mapping[str, Any], momentum: Tensor, offloaded: bool) -> Tensor:
    """Return momentum of gradients without the loss scale.

    Args:
        state: the rank's state dict that it is from.
        offloaded: whether it is that of DeepSpeed with optimizer offload, if DeepSpeed has saved it.
    """
    scale = state.get(MOMENTUM_SCALE)
    if scale is None:
        scale = 1.0 if offloaded else getattr(state.get(LOSS_SCALER), "cur_scale", 1.0)
    return momentum if scale == 1 else momentum.float() / float(scale)


def with_momentum(states: Mapping[int, Mapping[str, Any]], momenta: Mapping[int, Tensor]) -> dict[int, dict[str, Any]]:
    """Return an optimizer's states with other momentum, by number of the parameter."""
    found = {number: dict(state) for number, state in states.items()}
    for number, momentum in momenta.items():
        found.setdefault(number, {})[MOMENTUM] = momentum
    return found


def sharded_otherwise(saved: str, wanted: str) -> ValueError:
    """Return the error for optimizer states that are sharded otherwise: as ``saved``, not as ``wanted``."""
    return ValueError(f"The optimizer states of the checkpoint are {saved}, but those of this run {wanted}.")
