# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""GatheredParameters with a modifier rank, where every group holds all of the parameters (os = I).

DeepSpeed broadcasts what one rank has modified over the process group that a parameter is sharded over. With groups
that is one of several: ``modifier_rank=0`` would be the first rank of each group, and groups would drift apart.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.deepspeed_types import ZeroParameter

OWNER = "paro_parameters"  # attribute of a parameter: the ``Gathers`` that gathers it
REPLICAS = "paro_replicas"  # attribute of a parameter that every group holds: the data-parallel group


def listed(params: object) -> object:
    """Return what GatheredParameters is given, iterable more than once."""
    return list(params) if isinstance(params, Iterable) and not isinstance(params, torch.Tensor) else params


def replicated(params: object) -> list[ZeroParameter]:
    """Return those of the parameters that every group holds, in order."""
    some: list[Any] = params if isinstance(params, list) else [params]
    unique = {param.ds_id: param for param in some if hasattr(param, REPLICAS)}
    return [unique[ds_id] for ds_id in sorted(unique)]


@contextmanager
def sharded_over_all(params: Sequence[ZeroParameter]) -> Iterator[None]:
    """Meanwhile a modifier rank is a rank of all groups, as DeepSpeed finds it through the parameters' group."""
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
        params: from ``replicated``, gathered.
        source_ranks: global rank that has modified them, by the id of the data-parallel group. Gets an entry for each
            group inside, whose first rank has the values by then.
    """
    device = torch.device(get_accelerator().current_device_name())
    for param in params:
        world, group = getattr(param, REPLICAS), param.ds_process_group
        source_ranks[id(group)] = dist.get_global_rank(group, 0)
        if param.data.device == device:  # else DeepSpeed refuses, next
            dist.broadcast(param.data.view(torch.uint8), source_ranks[id(world)], group=world)


def partition_by_owner(
    partition: Callable[..., None], params: Sequence[ZeroParameter], has_been_updated: bool
) -> None:
    """Partition parameters that several engines may hold; each knows how to write back its own."""
    by_owner: dict[int, list[ZeroParameter]] = {}
    for param in params:
        by_owner.setdefault(id(getattr(param, OWNER, None)), []).append(param)
    for some in by_owner.values():
        partition(some, has_been_updated)
