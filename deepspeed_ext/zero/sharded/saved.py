# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are sharded otherwise, and those of ZeRO-3 whose sub-groups have other sizes.

A rank of ZeRO-3 saves its chunks of the parameters of a parameter group one after the other, divided into sub-groups
where ``sub_group_size`` or, for some strategies, ``allgather_bucket_size`` says. The order is the same whatever the
sizes, so the states of a parameter group need only be divided elsewhere.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, OPTIMIZER_STATE_DICT, PARTITION_COUNT, ZERO_STAGE
from torch import Tensor

from deepspeed_ext.zero.momentum import MOMENTUM_SCALE, saved_scale, sharded_otherwise, unscaled, with_momentum
from deepspeed_ext.zero.muon import MOMENTUM

PLACEMENT = "ds_zero_partition_groups"  # in a state dict with AutoEP: who shares each sub-group


def check(state: Mapping[str, Any], partition_count: int, placement: Any, numels: Sequence[Sequence[int]]) -> None:
    """Refuse a rank's state dict that is sharded otherwise, except for sub-groups, which are divided anew.

    Args:
        state: of a checkpoint.
        partition_count: over how many ranks states are sharded here.
        placement: who shares each sub-group here, as DeepSpeed notes it with AutoEP.
        numels: as of ``regroup``.

    Raises:
        ValueError: it is of another stage, sharded over another number of ranks, or of other parameter groups.
    """
    stage, count = int(state[ZERO_STAGE]), state[PARTITION_COUNT]
    if (stage, count) != (3, partition_count):
        raise sharded_otherwise(
            f"of stage {stage} and sharded over {count} ranks",
            f"are of stage 3 and sharded over {partition_count}",
        )
    placed = state.get(PLACEMENT)
    if placed is not None and placed != placement:
        raise sharded_otherwise(
            f"of {len(placed)} sub-groups of experts and others, over the ranks "
            f"{[group['partition_ranks'] for group in placed]}",
            "are of others, which DeepSpeed refuses with AutoEP (sub_group_size, allgather_bucket_size and "
            "expert_parallel.autoep_size must be as they were)",
        )
    check_groups(state, numels)


def check_groups(state: Mapping[str, Any], numels: Sequence[Sequence[int]]) -> None:
    """Whether ``regroup`` can divide the sub-groups as wanted. Arguments as there.

    Raises:
        ValueError: a parameter group of the checkpoint has another number of elements, or its sub-groups differ in a
            state that has no element for each parameter (a step count).
    """
    flats, groups = _flats_by_group(state)
    saved = [[flats[index].numel() for index in group] for group in groups]
    if [sum(group) for group in saved] != [sum(group) for group in numels]:
        raise sharded_otherwise(
            f"for parameter groups of {[sum(group) for group in saved]} elements on this rank",
            f"for groups of {[sum(group) for group in numels]}: it has another model or other parameter groups",
        )
    states = state[OPTIMIZER_STATE_DICT]["state"]
    for group, sizes, wanted in zip(groups, saved, numels, strict=True):
        for key in states.get(group[0], {}) if group and sizes != list(wanted) else ():
            values = [states[index][key] for index in group]
            if not _has_elements(values, [flats[index] for index in group]) and _differ(values):
                raise ValueError(
                    f"The sub-groups of the checkpoint differ in the optimizer's {key!r}, so they cannot be divided "
                    f"into others. Load it with the sub_group_size and allgather_bucket_size that saved it."
                )


def regroup(state: Mapping[str, Any], numels: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return a rank's state dict of ZeRO-3's optimizer, with its sub-groups divided as wanted.

    Args:
        state: as ``state_dict()`` of ZeRO-3's optimizer gives it, and ``check_groups`` accepts it.
        numels: for each parameter group the elements of the wanted sub-groups.
    """
    flats, saved_groups = _flats_by_group(state)
    if [[flats[index].numel() for index in group] for group in saved_groups] == [list(group) for group in numels]:
        return dict(state)
    optimizer = state[OPTIMIZER_STATE_DICT]
    new_flats: list[Tensor] = []
    new_states: dict[int, dict[str, Any]] = {}
    new_groups = []
    for group, indices, wanted in zip(optimizer["param_groups"], saved_groups, numels, strict=True):
        first, old_flats = len(new_flats), [flats[index] for index in indices]
        new_flats += _recut(old_flats, wanted)
        for key in optimizer["state"].get(indices[0], {}) if indices else ():
            values = [optimizer["state"][index][key] for index in indices]
            cut = _recut(values, wanted) if _has_elements(values, old_flats) else _repeat(values[0], len(wanted))
            for number, value in enumerate(cut):
                new_states.setdefault(first + number, {})[key] = value
        new_groups.append({**group, "params": list(range(first, len(new_flats)))})
    optimizer = {**optimizer, "state": new_states, "param_groups": new_groups}
    return {**state, FP32_FLAT_GROUPS: new_flats, OPTIMIZER_STATE_DICT: optimizer}


def with_saved_momentum(state: Mapping[str, Any], loss_scale: float, on_host: bool) -> dict[str, Any]:
    """Return a state dict of this optimizer with momentum as DeepSpeed's stage 3 has it; see Note [Momentum of
    DeepSpeed's stages].

    Args:
        state: as DeepSpeed returns it.
        loss_scale: of this step.
        on_host: whether the optimizer is offloaded.
    """
    scale = 1.0 if on_host else saved_scale(loss_scale)
    saved = {**state, MOMENTUM_SCALE: scale}
    return saved if scale == 1 else _with_momentum_of(saved, lambda momentum: (momentum * scale).cpu())


def with_own_momentum(state: Mapping[str, Any], on_host: bool) -> dict[str, Any]:
    """Return a rank's state dict with momentum as this optimizer has it.

    DeepSpeed does not save whether it has offloaded the optimizer: it is taken to have done as this run does.
    """
    return _with_momentum_of(state, lambda momentum: unscaled(state, momentum, on_host))


def _with_momentum_of(state: Mapping[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return a rank's state dict with momentum that ``change`` returns for that of each sub-group."""
    optimizer = state[OPTIMIZER_STATE_DICT]
    muon = [group["params"] for group in optimizer["param_groups"] if group.get("use_muon", False)]
    momenta = {
        number: change(optimizer["state"][number][MOMENTUM])
        for numbers in muon
        for number in numbers
        if MOMENTUM in optimizer["state"].get(number, {})
    }
    return {**state, OPTIMIZER_STATE_DICT: {**optimizer, "state": with_momentum(optimizer["state"], momenta)}}


def _flats_by_group(state: Mapping[str, Any]) -> tuple[list[Tensor], list[list[int]]]:
    """Return the flat tensors of all sub-groups, and for each parameter group the numbers of its sub-groups."""
    groups = [group["params"] for group in state[OPTIMIZER_STATE_DICT]["param_groups"]]
    return list(state[FP32_FLAT_GROUPS]), groups


def _has_elements(values: Sequence[Any], flats: Sequence[Tensor]) -> bool:
    """Whether a state has an element for each element of the sub-groups."""
    return all(
        isinstance(value, Tensor) and value.shape == flat.shape for value, flat in zip(values, flats, strict=True)
    )


def _differ(values: Sequence[Any]) -> bool:
    return any(torch.as_tensor(value).tolist() != torch.as_tensor(values[0]).tolist() for value in values)


def _repeat(value: Any, times: int) -> list[Any]:
    return [value.clone() if isinstance(value, Tensor) else value for _ in range(times)]


def _recut(parts: Sequence[Tensor], numels: Sequence[int]) -> list[Tensor]:
    return list(torch.cat([part.detach().flatten() for part in parts]).split(list(numels))) if parts else []
