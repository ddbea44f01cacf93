# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Process groups within and between the groups of a data-parallel group.

Data-parallel rank r = j*m + i is number i of group j. Its *intra* group is the m ranks of group j; its *inter* group
is the k ranks of number i, one in each group. Groups are formed from the ranks of the data-parallel group that
DeepSpeed uses for ZeRO, so tensor, sequence and pipeline parallelism keep their own ranks apart.
"""

import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed_ext.placement import Cluster, Placement

# Launchers tell a rank how many processes share its node: torchrun and Slurm wrappers, the DeepSpeed launcher.
_LOCAL_SIZE_VARIABLES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")


def ranks_per_node(environment: Mapping[str, str] = os.environ) -> int | None:
    """Processes per node as the launcher tells it, or None where it does not."""
    for name in _LOCAL_SIZE_VARIABLES:
        if environment.get(name, "").isdigit() and int(environment[name]) > 0:
            return int(environment[name])
    return None


def default_group_size(ranks: Sequence[int], local_size: int | None) -> int:
    """Data-parallel ranks per node: the group size when none is configured.

    Args:
        ranks: global ranks of the data-parallel group, ascending; ranks of a node are consecutive.
        local_size: processes per node, of all kinds of parallelism.

    Raises:
        ValueError: the launcher tells no node size, or nodes hold different numbers of these ranks.
    """
    if len(ranks) == 1:
        return 1
    if local_size is None:
        raise ValueError(
            f"paro_strategy needs the number of ranks per node, but none of the environment variables "
            f"{', '.join(_LOCAL_SIZE_VARIABLES)} is set. Set zero_optimization.paro_group_size (it must divide the "
            f"data-parallel size {len(ranks)})."
        )
    counts: dict[int, int] = {}
    for rank in ranks:
        counts[rank // local_size] = counts.get(rank // local_size, 0) + 1
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"paro_strategy groups the data-parallel ranks of a node, but nodes of {local_size} processes hold "
            f"different numbers of the {len(ranks)} data-parallel ranks: {list(counts.values())}. Set "
            f"zero_optimization.paro_group_size to a divisor of {len(ranks)}."
        )
    return counts[ranks[0] // local_size]


def intra_ranks(ranks: Sequence[int], group_size: int, rank: int) -> list[int]:
    """Global ranks of the group that ``rank`` (position in ``ranks``) belongs to."""
    first = rank - rank % group_size
    return list(ranks[first : first + group_size])


def inter_ranks(ranks: Sequence[int], group_size: int, rank: int) -> list[int]:
    """Global ranks that have the same number in every group as ``rank`` (position in ``ranks``)."""
    return list(ranks[rank % group_size :: group_size])


@dataclass(frozen=True)
class Topology:
    """The process groups of this rank.

    Attributes:
        cluster: sizes.
        rank: this rank's position in the data-parallel group.
        world: the data-parallel group itself.
        intra: this rank's group.
        inter: the ranks of its number in all groups.
        alone: this rank only; what a state that is not cut is "sharded" over.
    """

    cluster: Cluster
    rank: int
    world: Any
    intra: Any
    inter: Any
    alone: Any

    def shard_group(self, placement: Placement) -> Any:
        """The process group over which a state in this placement is cut."""
        return {Placement.N: self.alone, Placement.I: self.intra, Placement.G: self.world}[placement]


def _new_group(ranks: list[int]) -> Any:
    """A process group made by its members only.

    ``deepspeed.comm.new_group`` is collective over the whole world: every rank would have to make every group of
    every data-parallel group, k + m + n of them each, and know all of their ranks.
    """
    import torch.distributed

    return torch.distributed.new_group(ranks, use_local_synchronization=True)


# Two engines over one data-parallel group share its groups. Weak keys: destroyed groups take their entry along.
_topologies: "weakref.WeakKeyDictionary[Any, dict[int, Topology]]" = weakref.WeakKeyDictionary()


def data_parallel_ranks(group: Any) -> list[int]:
    """Global ranks of a process group (None: all ranks), in group order."""
    from deepspeed import comm as dist

    return [dist.get_global_rank(group, i) for i in range(dist.get_world_size(group=group))]


def get_topology(group: Any, group_size: int | None = None) -> Topology:
    """The topology of a data-parallel group, made at the first call and shared afterwards.

    Collective over ``group``. ``group_size`` None means the data-parallel ranks per node.

    Raises:
        ValueError: no such group size; see ``Cluster`` and ``default_group_size``.
    """
    from deepspeed import comm as dist

    group = dist.get_world_group() if group is None else group
    ranks = data_parallel_ranks(group)
    m = default_group_size(ranks, ranks_per_node()) if group_size is None else group_size
    cluster = Cluster(len(ranks), m)
    known = _topologies.setdefault(group, {})
    if m not in known:
        rank = dist.get_rank(group=group)
        known[m] = Topology(
            cluster,
            rank,
            group,
            intra=_new_group(intra_ranks(ranks, m, rank)),
            inter=_new_group(inter_ranks(ranks, m, rank)),
            alone=_new_group([ranks[rank]]),
        )
    return known[m]
