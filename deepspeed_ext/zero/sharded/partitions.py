# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""This rank's flat partitions of optimizer states with p = I or G: their elements, offloading, and checkpoints.

Note [Sub-groups in checkpoints]
    A rank of ZeRO-3 saves its chunks of a parameter group's parameters one after the other, divided into
    sub-groups by ``sub_group_size`` or, for some strategies, by ``allgather_bucket_size``. The order is the same with
    all sizes, so loading only divides a parameter group's states at other elements.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, OPTIMIZER_STATE_DICT, PARTITION_COUNT, ZERO_STAGE
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.utils import get_norm_dtype
from torch import Tensor

from deepspeed_ext.comm.layout import Stripe
from deepspeed_ext.comm.spans import Span
from deepspeed_ext.deepspeed_types import ZeroParameter
from deepspeed_ext.zero.context import Context
from deepspeed_ext.zero.families import name_in_all
from deepspeed_ext.zero.muon import MOMENTUM, uses_muon
from deepspeed_ext.zero.saved_states import (
    MOMENTUM_SCALE,
    saved_scale,
    sharding_mismatch,
    unscaled_momentum,
    with_momentum,
)
from deepspeed_ext.zero.sharded.parameter_chunks import owned_span
from deepspeed_ext.zero.sharded.parameters import ShardedParameters
from deepspeed_ext.zero.sharded.reduction import GradientReduction
from deepspeed_ext.zero.sharded.stage3_view import Stage3View
from deepspeed_ext.zero.shards import FlatShard, InterGroupSpan, Member

PLACEMENT = "ds_zero_partition_groups"  # in a state dict with AutoEP: ranks that share each sub-group


class FlatPartitions:
    """This rank's elements of the optimizer states: one flat partition for each sub-group."""

    def __init__(self, context: Context, *, optimizer: Stage3View, reduction: GradientReduction) -> None:
        self._context, self._optimizer, self._reduction = context, optimizer, reduction

    def flat_shards(self) -> list[FlatShard]:
        """Return the parameters of each partition, with their positions."""
        shards = []
        for number, params in enumerate(self._optimizer.fp16_groups):
            members, offset = [], 0
            for param in params:
                stripe = Stripe(Span(0, param.ds_numel), 0, param.ds_tensor.ds_numel)
                members.append(Member(param, tuple(param.ds_shape), stripe, owned_span(param), offset))
                offset += stripe.width
            shards.append(FlatShard(number, self._optimizer.sub_group_to_group_id[number], tuple(members)))
        return shards

    def members_of(self, param: ZeroParameter) -> Iterator[tuple[int, Span]]:
        """Yield the number of each partition with elements of a parameter, and their span in it."""
        for shard in self.flat_shards():
            for member in shard.members:
                if member.param is param:
                    yield shard.number, member.in_shard

    def inter_group_spans(self) -> Iterator[InterGroupSpan]:
        """Yield each trained parameter's spans of gradients that are reduced between groups."""
        for group in self._optimizer.fp16_groups:
            for param in group:
                name = name_in_all(param, self._optimizer.param_names[param])
                yield from self._reduction.gradients_of(param).inter_group_spans(param, name)

    def gradient(self, number: int) -> Tensor:
        """Return the gradient of a partition, 1D; may be written."""
        if self._context.offload:
            gradient: Tensor = self._optimizer.fp32_partitioned_groups_flat[number].grad
            return gradient
        params = self._optimizer.fp16_groups[number]
        return self._reduction.gradients_of(params[0]).shard_of(params)

    def set_norms(self, shards: Iterable[FlatShard]) -> None:
        """Update DeepSpeed's norms of replaced gradients, if the optimizer is offloaded."""
        for shard in shards if self._context.offload else ():
            update = self.gradient(shard.number)
            for member in shard.members:
                norm = member.in_shard.of(update).to(get_norm_dtype()).norm(2)
                self._optimizer.norm_for_param_grads[self._optimizer.get_param_id(member.param)] = norm

    def set_weights(self, value: Tensor, param: ZeroParameter, state: str | None) -> None:
        """Set this rank's elements of a trained parameter's weights, or of a ``state``, from a full value."""
        shard, _ = self._optimizer._get_fp32_opt_state_partition(
            param, release_swap_buffers=False, optim_state_key=state
        )
        start = shard.numel() * self._optimizer._get_param_partition_rank(param)
        elements = value.flatten()[start : start + shard.numel()]
        shard.data[: elements.numel()].copy_(elements)

    # Checkpoints ######################################################################################

    def numels(self) -> list[list[int]]:
        """Return for each parameter group the number of elements of each of its partitions."""
        numels: list[list[int]] = [[] for _ in self._optimizer.optimizer.param_groups]
        for sub_group, flat in enumerate(self._optimizer.fp32_partitioned_groups_flat):
            numels[self._optimizer.sub_group_to_group_id[sub_group]].append(flat.numel())
        return numels

    def check(self, state: Mapping[str, Any]) -> None:
        """Reject a rank's state dict with other sharding, except for the sizes of sub-groups.

        Raises:
            ValueError: it has another stage, number of ranks, or other parameter groups.
        """
        stage, count, ranks = int(state[ZERO_STAGE]), state[PARTITION_COUNT], self._optimizer.partition_count
        if (stage, count) != (3, ranks):
            raise sharding_mismatch(
                f"of stage {stage}, sharded over {count} ranks", f"stage 3, sharded over {ranks} ranks"
            )
        saved_placement = state.get(PLACEMENT)
        if saved_placement is not None and saved_placement != self._optimizer._zero3_partition_group_metadata():
            raise sharding_mismatch(
                f"of {len(saved_placement)} sub-groups of experts and others, over the ranks "
                f"{[group['partition_ranks'] for group in saved_placement]}",
                "others, which DeepSpeed refuses with AutoEP: keep sub_group_size, allgather_bucket_size, "
                "expert_parallel.autoep_size, and modules with I in paro_modules unchanged",
            )
        _check_groups(state, self.numels())

    def adapt(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a rank's state dict with the sub-groups and the scale of momentum of this optimizer.

        DeepSpeed does not save whether the optimizer was offloaded: the setting of this run is assumed.

        Raises:
            ValueError: see ``check``.
        """
        self.check(state)
        regrouped, offload = _regroup(state, self.numels()), self._context.offload
        return _map_momentum(regrouped, lambda momentum: unscaled_momentum(regrouped, momentum, offload))

    def with_saved_momentum(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return DeepSpeed's state dict with momentum in the format of its stage 3; see Note [Momentum of DeepSpeed's
        stages]."""
        if not uses_muon(self._optimizer.optimizer):
            return dict(state)
        scale = 1.0 if self._context.offload else saved_scale(float(self._optimizer.loss_scale))
        state = {**state, MOMENTUM_SCALE: scale}
        return state if scale == 1 else _map_momentum(state, lambda momentum: (momentum * scale).cpu())


class OffloadedStates:
    """Moves states to the host and back that DeepSpeed does not move: this package's parameters and gradients, and,
    with Muon, weights and optimizer states.
    """

    def __init__(self, *, optimizer: Stage3View, parameters: ShardedParameters, reduction: GradientReduction) -> None:
        self._optimizer, self._parameters, self._reduction = optimizer, parameters, reduction
        self.kinds = {OffloadStateTypeEnum.lp_params, OffloadStateTypeEnum.lp_grads}
        if uses_muon(optimizer.optimizer):
            self.kinds |= {OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.optim_states}

    def offload(self, states: set[OffloadStateTypeEnum], device: str, pin_memory: bool) -> None:
        """Move states of these kinds to a host device, and release views of their memory."""

        def move(tensor: Tensor) -> Tensor:
            moved = tensor.to(device)
            return get_accelerator().pin_memory(moved) if pin_memory else moved

        if OffloadStateTypeEnum.lp_params in states:
            self._parameters.whole.release()
        self._move(states, move)
        if OffloadStateTypeEnum.lp_params in states:
            self._optimizer.fp16_partitioned_groups_flat.clear()
            self._parameters.drop_blocks()
        if OffloadStateTypeEnum.lp_grads in states:
            self._optimizer.averaged_gradients = {}

    def reload(self, states: set[OffloadStateTypeEnum]) -> None:
        """Move states back to the device."""
        device = get_accelerator().current_device_name()
        self._move(states, lambda tensor: tensor.to(device))
        if OffloadStateTypeEnum.lp_params in states:
            self._optimizer._set_fp16_partitioned_groups_flat()
            self._parameters.whole.gather()
        if OffloadStateTypeEnum.lp_grads in states:
            self._reduction.shards.expose_to_step()

    def _move(self, states: set[OffloadStateTypeEnum], move: Callable[[Tensor], Tensor]) -> None:
        optimizer = self._optimizer
        if OffloadStateTypeEnum.lp_params in states:
            optimizer.lp_param_buffer = move(optimizer.lp_param_buffer)
            self._parameters.make_views(optimizer.lp_param_buffer, optimizer.fp16_groups)
        if OffloadStateTypeEnum.lp_grads in states:
            self._reduction.shards.set_accumulator(move(self._reduction.shards.accumulator))
        if OffloadStateTypeEnum.hp_params in states:
            for weights in optimizer.fp32_partitioned_groups_flat:
                weights.data = move(weights.data)
        if OffloadStateTypeEnum.optim_states in states:
            for values in optimizer.optimizer.state.values():
                # Step counts stay on the host, where they are read.
                elements = {key: value for key, value in values.items() if isinstance(value, Tensor) and value.dim()}
                values.update({key: move(value) for key, value in elements.items()})


def _check_groups(state: Mapping[str, Any], numels: Sequence[Sequence[int]]) -> None:
    """Check that ``_regroup`` can divide the sub-groups.

    Raises:
        ValueError: a parameter group of the checkpoint has another number of elements, or its sub-groups differ in a
            state that has no element for each parameter (a step count).
    """
    flats, groups = _flats_by_group(state)
    saved = [[flats[index].numel() for index in group] for group in groups]
    if [sum(group) for group in saved] != [sum(group) for group in numels]:
        raise sharding_mismatch(
            f"of {[sum(group) for group in saved]} elements in the parameter groups on this rank",
            f"{[sum(group) for group in numels]}: the model or its parameter groups differ",
        )
    states = state[OPTIMIZER_STATE_DICT]["state"]
    for group, sizes, expected in zip(groups, saved, numels, strict=True):
        for key in states.get(group[0], {}) if group and sizes != list(expected) else ():
            values = [states[index][key] for index in group]
            if not _has_elements(values, [flats[index] for index in group]) and _differ(values):
                raise ValueError(
                    f"The optimizer state {key!r} differs between the checkpoint's sub-groups, so they cannot be "
                    f"divided into others. Load it with the sub_group_size and allgather_bucket_size that saved it."
                )


def _regroup(state: Mapping[str, Any], numels: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return a rank's state dict of ZeRO-3's optimizer, with sub-groups of other sizes.

    Args:
        state: a state dict that ``_check_groups`` accepts.
        numels: for each parameter group the numbers of elements of the new sub-groups.
    """
    flats, saved_groups = _flats_by_group(state)
    if [[flats[index].numel() for index in group] for group in saved_groups] == [list(group) for group in numels]:
        return dict(state)
    optimizer = state[OPTIMIZER_STATE_DICT]
    new_flats: list[Tensor] = []
    new_states: dict[int, dict[str, Any]] = {}
    new_groups = []
    for group, indices, expected in zip(optimizer["param_groups"], saved_groups, numels, strict=True):
        first, old_flats = len(new_flats), [flats[index] for index in indices]
        new_flats += _resplit(old_flats, expected)
        for key in optimizer["state"].get(indices[0], {}) if indices else ():
            values = [optimizer["state"][index][key] for index in indices]
            parts = (
                _resplit(values, expected) if _has_elements(values, old_flats) else _repeat(values[0], len(expected))
            )
            for number, value in enumerate(parts):
                new_states.setdefault(first + number, {})[key] = value
        new_groups.append({**group, "params": list(range(first, len(new_flats)))})
    optimizer = {**optimizer, "state": new_states, "param_groups": new_groups}
    return {**state, FP32_FLAT_GROUPS: new_flats, OPTIMIZER_STATE_DICT: optimizer}


def _map_momentum(state: Mapping[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return a rank's state dict with each sub-group's momentum replaced by the result of ``change``."""
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


def _resplit(parts: Sequence[Tensor], numels: Sequence[int]) -> list[Tensor]:
    return list(torch.cat([part.detach().flatten() for part in parts]).split(list(numels))) if parts else []
