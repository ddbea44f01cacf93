# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are cut otherwise, and those of ZeRO-3 whose sub-groups have other sizes.

A rank of ZeRO-3 saves its chunks of the parameters of a parameter group one after the other, cut into sub-groups where
``sub_group_size`` or, for some strategies, ``allgather_bucket_size`` says. The order is the same whatever the sizes,
so the states of a parameter group need only be cut elsewhere.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, OPTIMIZER_STATE_DICT
from torch import Tensor

from deepspeed_ext.placement import Strategy
from deepspeed_ext.topology import Topology


def cut_otherwise(strategy: Strategy, topology: Topology, saved: str, wanted: str) -> ValueError:
    """The error for optimizer states that are cut otherwise: how they were ``saved``, what the strategy does."""
    return ValueError(
        f"The optimizer states of the checkpoint are {saved}, but paro_strategy {strategy.name} in groups of "
        f"{topology.cluster.group_size} {wanted}. Load it with the strategy and group size that saved it, or load "
        f"module weights only."
    )


def regroup(state: Mapping[str, Any], numels: Sequence[Sequence[int]]) -> dict[str, Any]:
    """A rank's state dict of ZeRO-3's optimizer, with its sub-groups cut as wanted.

    Args:
        state: as ``state_dict()`` of ZeRO-3's optimizer gives it.
        numels: for each parameter group the elements of the wanted sub-groups.

    Raises:
        ValueError: a parameter group of the checkpoint has another number of elements, or its sub-groups differ in a
            state that has no element for each parameter (a step count).
    """
    flats: list[Tensor] = list(state[FP32_FLAT_GROUPS])
    optimizer = state[OPTIMIZER_STATE_DICT]
    saved_groups = [group["params"] for group in optimizer["param_groups"]]
    saved = [[flats[index].numel() for index in group] for group in saved_groups]
    if saved == [list(group) for group in numels]:
        return dict(state)
    if [sum(group) for group in saved] != [sum(group) for group in numels]:
        raise ValueError(
            f"The optimizer states of the checkpoint are for parameter groups of {[sum(group) for group in saved]} "
            f"elements on this rank, expected {[sum(group) for group in numels]}. Load it into the model, with the "
            f"parameter groups, that saved it."
        )
    new_flats: list[Tensor] = []
    new_states: dict[int, dict[str, Any]] = {}
    new_groups = []
    for group, indices, wanted in zip(optimizer["param_groups"], saved_groups, numels, strict=True):
        first = len(new_flats)
        new_flats += _recut([flats[index] for index in indices], wanted)
        for key in optimizer["state"].get(indices[0], {}) if indices else ():
            values = [optimizer["state"][index][key] for index in indices]
            for number, value in enumerate(_recut_state(key, values, [flats[i] for i in indices], wanted)):
                new_states.setdefault(first + number, {})[key] = value
        new_groups.append({**group, "params": list(range(first, len(new_flats)))})
    cut = {**optimizer, "state": new_states, "param_groups": new_groups}
    return {**state, FP32_FLAT_GROUPS: new_flats, OPTIMIZER_STATE_DICT: cut}


def _recut(parts: Sequence[Tensor], numels: Sequence[int]) -> list[Tensor]:
    return list(torch.cat([part.detach().flatten() for part in parts]).split(list(numels))) if parts else []


def _recut_state(key: str, values: Sequence[Any], flats: Sequence[Tensor], numels: Sequence[int]) -> list[Any]:
    if all(isinstance(value, Tensor) and value.shape == flat.shape for value, flat in zip(values, flats, strict=True)):
        return _recut(values, numels)
    if any(torch.as_tensor(value).tolist() != torch.as_tensor(values[0]).tolist() for value in values):
        raise ValueError(
            f"The sub-groups of the checkpoint differ in the optimizer's {key!r}, so they cannot be cut into others. "
            f"Load it with the sub_group_size and allgather_bucket_size that saved it."
        )
    return [values[0].clone() if isinstance(values[0], Tensor) else values[0] for _ in numels]
