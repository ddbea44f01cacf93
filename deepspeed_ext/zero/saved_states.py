# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Optimizer states in state dicts: the order of parameters, dtypes after a load, and Muon's momentum.

Note [Momentum of DeepSpeed's stages]
    Our momentum has the elements whose weights a rank has, as every state, in fp32, of gradients without the loss
    scale. The same holds for DeepSpeed with optimizer offload. DeepSpeed's stage 3 differs only in loss scales. Its
    stages 1 and 2 without offload have, on each rank, the momentum of all elements of each parameter that is partly on
    the rank, one after the other, without padding. Without offload, DeepSpeed's momentum is of gradients with the loss
    scale, so momentum that its stage 3 may load is saved with a scale.
"""

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.checkpoint.constants import LOSS_SCALER
from torch import Tensor

from deepspeed_ext.zero.muon import MOMENTUM
from deepspeed_ext.zero.shards import Member

Named = Sequence[tuple[str, object]]
MOMENTUM_SCALE = "paro_momentum_scale"  # in a rank's state dict: factor of momentum


def first_difference(saved: Named, own: Named, names: Container[str]) -> str:
    """Describe the first position at which a checkpoint and a model have different parameters; empty if none.

    A name that the model does not have belongs to a renamed parameter, which only its position identifies. Any other
    name must be at the position where the model has it, since another parameter would get its states.

    Args:
        saved, own: name, and shape or position, of each parameter in the states of the checkpoint and of the model.
        names: names of all parameters of the model, with or without states.
    """
    for number, ((name, layout), (own_name, own_layout)) in enumerate(zip(saved, own, strict=False)):
        if layout != own_layout or (name != own_name and name in names):
            return f"parameter {number} is {name!r} {layout}, expected {own_name!r} {own_layout}"
    return "" if len(saved) == len(own) else f"there are {len(saved)} parameters, expected {len(own)}"


@contextmanager
def keep_state_dtypes(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Load states in the dtypes in which the optimizer computes them, in this context.

    ``torch.optim.Optimizer.load_state_dict`` casts all states to the dtype of the weights. With bf16 master weights
    that would round fp32 states: Muon's momentum, and the moments of DeepSpeed's CPU Adam.
    """
    saved: dict[str, Any] = {}
    dtypes: list[dict[str, torch.dtype]] = []

    def record(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        saved.update(state)
        dtypes.extend(
            _dtypes(optimizer, group, weights) for group in optimizer.param_groups for weights in group["params"]
        )

    def restore(_: torch.optim.Optimizer) -> None:
        tensors = (weights for group in optimizer.param_groups for weights in group["params"])
        numbers = (number for group in saved["param_groups"] for number in group["params"])
        for weights, number, expected in zip(tensors, numbers, dtypes, strict=True):
            state, loaded = optimizer.state.get(weights, {}), saved["state"].get(number, {})
            for name in expected.keys() & loaded.keys():
                if isinstance(loaded[name], Tensor) and state[name].dtype != expected[name]:
                    state[name] = loaded[name].to(device=state[name].device, dtype=expected[name])

    hooks = (
        optimizer.register_load_state_dict_pre_hook(record),
        optimizer.register_load_state_dict_post_hook(restore),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _dtypes(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], weights: Tensor) -> dict[str, torch.dtype]:
    """Return the dtypes of the states of a tensor of weights, by their names."""
    state = optimizer.state.get(weights, {})
    dtypes = {name: value.dtype for name, value in state.items() if isinstance(value, Tensor) and name != "step"}
    # A new optimizer has no momentum yet; see Note [Precision of Muon's messages] in ``muon.py``.
    return {**dtypes, MOMENTUM: torch.float32} if group.get("use_muon", False) else dtypes


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
