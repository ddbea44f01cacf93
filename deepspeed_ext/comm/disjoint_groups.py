# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Creates process groups of disjoint lists of ranks, by one call of each rank if possible.

Note [Making groups]
    DeepSpeed binds the world's NCCL communicator to its device. From then on each ``new_group`` is an
    ``ncclCommSplit`` of the world, in which ranks outside the group participate, too: 4,096 ranks in groups of 8 would
    split it 520 times. Disjoint lists need one split, ``split_group``, as torch's DeviceMesh uses for each of its
    dimensions. It distinguishes lists by 31-bit hashes, which collide once in a thousand times with 2,048 lists: then
    ranks of both lists are in one communicator. So one all-reduce counts the ranks of each group, and if a count is
    wrong, groups are created list by list.

    Other backends create a group among its members. There, every rank calls ``new_group`` for every list, in one
    order, because members find each other by sequence numbers; for lists of other ranks it does little more than
    count.

    In any case, the timeout of a new group is that of the group whose ranks it divides. By default ``new_group`` takes
    the backend's timeout and ignores ``init_distributed(timeout=...)``.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import distributed
from torch.distributed import ProcessGroup

from deepspeed_ext.comm.agreement import all_reduce, any_rank


def make_groups(lists: Sequence[Sequence[int]], parent: ProcessGroup | None) -> ProcessGroup | None:
    """Create a process group of each list of global ranks; see Note [Making groups].

    Collective over all ranks, including those in none of the lists.

    Args:
        lists: disjoint lists, the same on all ranks.
        parent: a group that contains all these ranks and gives the timeout; None for all ranks.

    Returns:
        The group of this rank's list; None if it is in none.
    """
    timeout = timeout_of(parent)
    if _splits():
        group = distributed.split_group(split_ranks=[list(ranks) for ranks in lists], timeout=timeout)
        own_ranks = next((ranks for ranks in lists if dist.get_rank() in ranks), ())
        # A collision of hashes would otherwise reduce over ranks of two lists.
        if not any_rank(group is not None and _count(group) != len(own_ranks)):
            return group
    # Every rank calls this for every list, in one order; otherwise members would not find each other.
    groups = [distributed.new_group(list(ranks), timeout=timeout) for ranks in lists]
    return next((group for ranks, group in zip(lists, groups, strict=True) if dist.get_rank() in ranks), None)


def make_group_of_one(parent: ProcessGroup) -> ProcessGroup:
    """Create a process group of this rank alone.

    Collective over ``parent``, a group with this rank: splitting all ranks at once would need a hash for each.
    """
    timeout = timeout_of(parent)
    if dist.get_world_size(group=parent) == 1:
        return parent
    if _splits():
        ranks = [[number] for number in range(dist.get_world_size(group=parent))]
        group = distributed.split_group(parent, ranks, timeout=timeout)
        assert group is not None  # each rank is in one of them
        return group
    # Only this rank participates.
    return distributed.new_group([dist.get_rank()], timeout=timeout, use_local_synchronization=True)


def timeout_of(group: ProcessGroup | None) -> timedelta | None:
    """Return the timeout of a group's collectives; None if its backend has no such option."""
    group = dist.get_world_group() if group is None else group
    options = getattr(group._get_backend(_device()), "options", None)
    return getattr(options, "_timeout", None)


def _splits() -> bool:
    """Return whether groups are created by splitting the world's communicator, several by one call."""
    world = dist.get_world_group()
    return world.bound_device_id is not None and bool(world._get_backend(_device()).supports_splitting)


def _device() -> torch.device:
    return torch.device(get_accelerator().current_device_name())


def _count(group: ProcessGroup) -> int:
    return int(all_reduce(torch.ones(1), dist.ReduceOp.SUM, group).item())
