# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Process groups of disjoint lists of ranks, made by one call of each rank where that can be.

Note [Making groups]
    DeepSpeed binds the world's NCCL communicator to its device. From then on each ``new_group`` is an
    ``ncclCommSplit`` of the world, in which ranks outside take part, too: 4,096 ranks in groups of 8 would split it
    520 times. Lists that have no rank in common need one split, ``split_group``, as torch's DeviceMesh makes one for
    each of its dimensions. It tells lists apart by hashes of 31 bits, two of which are the same once in a thousand
    times with 2,048 lists: then ranks of both are in one communicator. So the ranks of each are counted, by one
    all-reduce, and if a count is wrong groups are made list by list.

    Other backends make a group among its members. There ``new_group`` is called for every list, in one order, since
    the names under which members find each other are numbers; for lists of others it does little more than count.

    Whatever makes a group, its timeout is that of the group whose ranks it divides. By itself ``new_group`` takes the
    backend's, whatever ``init_distributed(timeout=...)`` was told.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import distributed
from torch.distributed import ProcessGroup

from deepspeed_ext.comm.agreement import all_reduced, any_rank


def make_groups(lists: Sequence[Sequence[int]], parent: ProcessGroup | None) -> ProcessGroup | None:
    """Make a process group of each list of global ranks; see Note [Making groups].

    Collective over all ranks, whether they are in one of the lists or not.

    Args:
        lists: without any rank in common, the same on all ranks.
        parent: a group that all these ranks are in, whose timeout theirs will be; None for all ranks.

    Returns:
        The group of the list that this rank is in; None if it is in none.
    """
    timeout = timeout_of(parent)
    if _splits():
        group = distributed.split_group(split_ranks=[list(ranks) for ranks in lists], timeout=timeout)
        mine = next((ranks for ranks in lists if dist.get_rank() in ranks), ())
        if not any_rank(group is not None and _count(group) != len(mine)):
            return group
    groups = [distributed.new_group(list(ranks), timeout=timeout) for ranks in lists]
    return next((group for ranks, group in zip(lists, groups, strict=True) if dist.get_rank() in ranks), None)


def make_group_of_one(within: ProcessGroup) -> ProcessGroup:
    """Return a process group of this rank alone.

    Collective over ``within``, some ranks of which one is this: splitting all at once would need a hash for each.
    """
    timeout = timeout_of(within)
    if dist.get_world_size(group=within) == 1:
        return within
    if _splits():
        ranks = [[number] for number in range(dist.get_world_size(group=within))]
        group = distributed.split_group(within, ranks, timeout=timeout)
        assert group is not None  # each rank is in one of them
        return group
    # Nobody else needs to know of it.
    return distributed.new_group([dist.get_rank()], timeout=timeout, use_local_synchronization=True)


def timeout_of(group: ProcessGroup | None) -> timedelta | None:
    """Return after what a group's collectives fail; None where its backend does not say."""
    group = dist.get_world_group() if group is None else group
    options = getattr(group._get_backend(_device()), "options", None)
    return getattr(options, "_timeout", None)


def _splits() -> bool:
    """Whether groups are made by splitting the world's communicator, and one call may make several."""
    world = dist.get_world_group()
    return world.bound_device_id is not None and bool(world._get_backend(_device()).supports_splitting)


def _device() -> torch.device:
    return torch.device(get_accelerator().current_device_name())


def _count(group: ProcessGroup) -> int:
    return int(all_reduced(torch.ones(1), dist.ReduceOp.SUM, group).item())
