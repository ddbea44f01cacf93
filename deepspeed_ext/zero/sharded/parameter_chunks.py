# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3's chunks of a parameter: the ranks that share it, this rank's elements, and padding.

Note [Modifier ranks]
    DeepSpeed's ``GatheredParameters`` broadcasts the changes of one rank over the process group that shards a
    parameter. With os = I every group holds all parameters, so that process group is one of several:
    ``modifier_rank=0`` would be the first rank of each group, and parameters would differ between groups.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed_ext.comm.spans import Span
from deepspeed_ext.deepspeed_types import ZeroParameter, is_partitioned

OWNER = "paro_parameters"  # attribute of a parameter: the ``Gathers`` that gathers it
REPLICAS = "paro_replicas"  # attribute of a parameter that every group holds: the data-parallel group


def as_list(params: object) -> object:
    """Return the argument of GatheredParameters, iterable more than once."""
    return list(params) if isinstance(params, Iterable) and not isinstance(params, torch.Tensor) else params


def replicated_params(params: object) -> list[ZeroParameter]:
    """Return the parameters that every group holds, in order."""
    candidates: list[Any] = params if isinstance(params, list) else [params]
    unique = {param.ds_id: param for param in candidates if hasattr(param, REPLICAS)}
    return [unique[ds_id] for ds_id in sorted(unique)]


@contextmanager
def use_global_modifier_ranks(params: Sequence[ZeroParameter]) -> Iterator[None]:
    """Make modifier ranks refer to all groups: DeepSpeed looks them up in the parameters' group."""
    groups = [param.ds_process_group for param in params]
    for param in params:
        param.ds_process_group = getattr(param, REPLICAS)
    try:
        yield
    finally:
        for param, group in zip(params, groups, strict=True):
            param.ds_process_group = group


def broadcast_to_replicas(params: Sequence[ZeroParameter], source_ranks: dict[int, int]) -> None:
    """Broadcast gathered parameters over all data-parallel ranks, before DeepSpeed does so inside each group.

    Args:
        params: gathered parameters, from ``replicated_params``.
        source_ranks: global rank that has modified them, by the id of the data-parallel group. An entry is added for
            each intra group, whose first rank then has the values.
    """
    device = torch.device(get_accelerator().current_device_name())
    for param in params:
        world, group = getattr(param, REPLICAS), param.ds_process_group
        source_ranks[id(group)] = dist.get_global_rank(group, 0)
        if param.data.device == device:  # otherwise DeepSpeed raises next
            dist.broadcast(param.data.view(torch.uint8), source_ranks[id(world)], group=world)


def partition_by_owner(
    partition: Callable[..., None], params: Sequence[ZeroParameter], has_been_updated: bool
) -> None:
    """Partition parameters of several engines; each engine's method writes back its own."""
    by_owner: dict[int, list[ZeroParameter]] = {}
    for param in params:
        by_owner.setdefault(id(getattr(param, OWNER, None)), []).append(param)
    for members in by_owner.values():
        partition(members, has_been_updated)


def owned_span(param: ZeroParameter) -> Span:
    """Return the elements of a parameter that are in this rank's chunk, without padding."""
    chunk = param.ds_tensor.ds_numel
    start = min(dist.get_rank(group=param.ds_process_group) * chunk, param.ds_numel)
    return Span.between(start, min(start + chunk, param.ds_numel))


def with_padding(value: Tensor, param: ZeroParameter) -> Tensor:
    """Return a value of a full parameter, 1D, with zeros up to the end of the last rank's chunk.

    Raises:
        ValueError: the value has another number of elements.
    """
    if value.numel() != param.ds_numel:
        raise ValueError(f"expected a value of {param.ds_numel} elements, got {value.numel()}: {param.ds_summary()}")
    padded = param.ds_tensor.ds_numel * dist.get_world_size(group=param.ds_process_group)
    return torch.nn.functional.pad(value.flatten(), (0, padded - value.numel()))


def without_padding(value: Tensor, param: ZeroParameter) -> Tensor:
    """Return a value of this rank's chunk of a parameter, 1D, with zeros in the padding."""
    chunk = value.numel()
    elements = value.flatten()[: max(0, param.ds_numel - chunk * dist.get_rank(group=param.ds_process_group))]
    return torch.nn.functional.pad(elements, (0, chunk - elements.numel()))


def repartition(param: ZeroParameter, group: ProcessGroup | None) -> None:
    """Partition a ZeRO parameter, with DeepSpeed's own methods, over another process group. Collective over both."""
    param.all_gather()
    param.ds_process_group = group
    param.ds_zero_partition_rank = dist.get_rank(group=group)
    param.ds_zero_partition_world_size = dist.get_world_size(group=group)
    param.ds_tensor = None  # type: ignore[assignment] # as DeepSpeed marks a full parameter
    param.partition()


def repartition_for_stock(module: nn.Module) -> None:
    """Shard parameters that are sharded inside groups over all ranks again, for DeepSpeed's own ZeRO-3.

    It reduces each gradient over the group that shards the parameter. That must be the group from before this
    package's engine, not the one that DeepSpeed's engine names, which with a mesh is a part of it.
    """
    for param in filter(is_partitioned, module.parameters()):
        if hasattr(param, REPLICAS):
            repartition(param, getattr(param, REPLICAS))
            delattr(param, REPLICAS)
