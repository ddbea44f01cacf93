# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Process groups within and between the groups of a data-parallel group.

Data-parallel rank r = j*m + i is number i of group j. Its *intra* group is the m ranks of group j; its *inter* group
is the k ranks of number i, one in each group. Groups consist of ranks of the data-parallel group that DeepSpeed uses
for ZeRO, so the groups of tensor, sequence, and pipeline parallelism are unaffected.
"""

import contextlib
import functools
import hashlib
import logging
import math
import os
import socket
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from deepspeed_ext.strategy import GroupSizes, Placement

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Number of processes on the node: set by torchrun and Slurm wrappers, and by the DeepSpeed launcher.
LOCAL_SIZE_VARIABLES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")
_LISTED_HOSTS = 4  # hosts listed in a warning


def ranks_per_node(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the processes per node from the launcher's environment; None if it is not set."""
    for name in LOCAL_SIZE_VARIABLES:
        if environment.get(name, "").isdigit() and int(environment[name]) > 0:
            return int(environment[name])
    return None


def nodes_of_ranks(local_sizes: Sequence[int]) -> list[int]:
    """Return the number of each rank's node.

    Args:
        local_sizes: processes on the node of each rank, by rank; 0 if a launcher does not say. Ranks of a node are
            consecutive.

    Raises:
        ValueError: a rank does not know the number, or ranks that would share a node know different ones.
    """
    nodes: list[int] = []
    while len(nodes) < len(local_sizes):
        first, size = len(nodes), local_sizes[len(nodes)]
        found = set(local_sizes[first : first + size]) or {size}
        if found != {size} or not size:
            raise ValueError(
                f"paro_strategy needs the number of ranks on each node. The environment variables "
                f"{', '.join(LOCAL_SIZE_VARIABLES)} have it, but from rank {first} on they are "
                f"{', '.join(str(n or 'not set') for n in sorted(found))}. Set zero_optimization.paro_group_size."
            )
        nodes += [nodes[-1] + 1 if nodes else 0] * min(size, len(local_sizes) - first)
    return nodes


def default_group_size(ranks: Sequence[int], nodes: Sequence[int]) -> int:
    """Return the group size when none is configured: the data-parallel ranks per node or, if nodes have different
    numbers, their greatest common divisor, with which no group spans two nodes.

    Args:
        ranks: global ranks of the data-parallel group.
        nodes: number of the node of each global rank.
    """
    return math.gcd(*Counter(nodes[rank] for rank in ranks).values())


def uneven_nodes_warning(counts: Collection[int], group_size: int) -> str:
    """Return what groups of this size cost on nodes with these numbers of ranks; empty if the numbers are equal."""
    if len(set(counts)) == 1:
        return ""
    numbers, alone = ", ".join(map(str, dict.fromkeys(counts))), ", so I means N" if group_size == 1 else ""
    return (
        f"nodes have {numbers} data-parallel ranks, so groups have {group_size}, their greatest common divisor"
        f"{alone}. States in I take {max(counts) / group_size:g} times the memory of groups of {max(counts)}, and "
        f"nodes with several groups also send messages between them"
    )


def placement_warning(ranks: Sequence[int], group_size: int, hosts: Sequence[int]) -> str:
    """Return a warning about groups that span more hosts than necessary; empty if there are none.

    Groups assume that the ranks of a host are consecutive. Groups larger than a host are valid, and may span as many
    hosts as they fill.

    Args:
        ranks: global ranks of the data-parallel group, ascending.
        group_size: m.
        hosts: for each of these ranks, a number that identifies its host.
    """
    counts = Counter(hosts)
    if all(count % group_size == 0 for count in counts.values()):
        needed = 1
    elif len(set(counts.values())) == 1 and group_size % counts[hosts[0]] == 0:
        needed = group_size // counts[hosts[0]]
    else:
        return ""  # no placement of ranks avoids groups that span hosts
    first_ranks = range(0, len(ranks), group_size)
    spread = [first for first in first_ranks if len(set(hosts[first : first + group_size])) > needed]
    if not spread:
        return ""
    ranks_by_host = [
        [rank for rank, host in zip(ranks, hosts, strict=True) if host == name]
        for name in list(counts)[:_LISTED_HOSTS]
    ]
    return (
        f"deepspeed_ext: {len(spread)} of {len(first_ranks)} groups of {group_size} ranks span more hosts than the "
        f"{needed} that they need, so traffic inside groups crosses the network: ranks "
        f"{intra_ranks(ranks, group_size, spread[0])} are a group, and the {len(counts)} hosts have the ranks "
        f"{', '.join(map(str, ranks_by_host))}{', ...' if len(counts) > _LISTED_HOSTS else ''}. Start ranks so "
        f"that they fill one host after the other (srun --distribution=block, mpirun --map-by slot)."
    )


def intra_ranks(ranks: Sequence[int], group_size: int, rank: int) -> list[int]:
    """Return the global ranks of the group that ``rank`` (position in ``ranks``) belongs to."""
    first = rank - rank % group_size
    return list(ranks[first : first + group_size])


def inter_ranks(ranks: Sequence[int], group_size: int, rank: int) -> list[int]:
    """Return the global ranks that have the same number in every group as ``rank`` (position in ``ranks``)."""
    return list(ranks[rank % group_size :: group_size])


@dataclass(frozen=True)
class Topology:
    """The process groups of this rank.

    Attributes:
        sizes: n and m.
        rank: this rank's position in the data-parallel group.
        world: the data-parallel group itself.
        intra: this rank's group.
        inter: the ranks of its number in all groups.
        alone: a group of this rank only, over which replicated states are "sharded"; None unless requested.
        parent: the topology of all groups, if this is the topology of one group as a world; see ``intra_topology``.
    """

    sizes: GroupSizes
    rank: int
    world: "ProcessGroup"
    intra: "ProcessGroup"
    inter: "ProcessGroup"
    alone: "ProcessGroup | None" = None
    parent: "Topology | None" = None

    @property
    def all_groups(self) -> "Topology":
        """Return the topology of all groups, also from that of one group."""
        return self.parent or self

    def intra_topology(self) -> "Topology":
        """Return the topology of this rank's group as a separate world; requires ``alone``."""
        m = self.sizes.group_size
        assert self.alone is not None
        return replace(
            self, sizes=GroupSizes(m, m), rank=self.rank % m, world=self.intra, inter=self.alone, parent=self
        )

    def shard_group(self, placement: Placement) -> "ProcessGroup | None":
        """Return the process group over which a state in this placement is sharded."""
        return {Placement.N: self.alone, Placement.I: self.intra, Placement.G: self.world}[placement]

    def replica_group(self, placement: Placement) -> "ProcessGroup | None":
        """Return the group of the ranks that have the same shard of a state in this placement; None if only one."""
        return {Placement.N: self.world, Placement.I: self.inter, Placement.G: None}[placement]


def data_parallel_ranks(group: "ProcessGroup | None") -> list[int]:
    """Return the global ranks of a process group (None: all ranks), in group order."""
    from torch.distributed import get_process_group_ranks

    return list(get_process_group_ranks(group))


# Two engines over one data-parallel group share its groups. Weak keys: destroying a group removes its entry, and with
# it the threads and sockets of the groups inside. So an entry must not reference its key, as a Topology does.
_CachedGroups = dict[tuple[int | None, bool], tuple[GroupSizes, "ProcessGroup", "ProcessGroup"]]
_cached_groups: "weakref.WeakKeyDictionary[ProcessGroup, _CachedGroups]" = weakref.WeakKeyDictionary()
_self_groups: "weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup]" = weakref.WeakKeyDictionary()


def get_topology(
    group: "ProcessGroup | None", group_size: int | None = None, alone: bool = False, separate: bool = False
) -> Topology:
    """Return the topology of a data-parallel group; its process groups are created once, and shared.

    Collective over all ranks, including those of other data-parallel groups.

    Args:
        group: a process group, or None for all ranks.
        group_size: m; None means ``default_group_size``.
        alone: whether to create a group of this rank alone, too.
        separate: whether to return separate groups of the same ranks, for communications whose order relative to those
            of the first groups differs between ranks.

    Raises:
        ValueError: invalid group size, on this rank or another; see ``GroupSizes`` and ``nodes_of_ranks``.
    """
    from deepspeed import comm as dist

    from deepspeed_ext.comm.disjoint_groups import make_group_of_one, make_groups

    group = dist.get_world_group() if group is None else group
    cached = _cached_groups.setdefault(group, {})
    key = group_size, separate
    if key not in cached:
        ranks_and_sizes = _gather_group_sizes(data_parallel_ranks(group), group_size)
        sizes = GroupSizes(*next((len(ranks), m) for ranks, m in ranks_and_sizes if dist.get_rank() in ranks))
        intra = [intra_ranks(ranks, m, first) for ranks, m in ranks_and_sizes for first in range(0, len(ranks), m)]
        inter = [inter_ranks(ranks, m, first) for ranks, m in ranks_and_sizes for first in range(m)]
        groups = [make_groups(lists, group) for lists in (intra, inter)]  # they cover all ranks
        cached[key] = (sizes, cast("ProcessGroup", groups[0]), cast("ProcessGroup", groups[1]))
    sizes, intra_group, inter_group = cached[key]
    if alone and group not in _self_groups:
        _self_groups[group] = make_group_of_one(intra_group)
    alone_group = _self_groups[group] if alone else None
    return Topology(sizes, dist.get_rank(group=group), group, intra=intra_group, inter=inter_group, alone=alone_group)


def destroy_topologies(group: "ProcessGroup") -> None:
    """Destroy the process groups that ``get_topology`` has created from a data-parallel group.

    Called when the only engine that uses the group is destroyed; no communication may use them from then on.
    """
    subgroups = [subgroup for _, *groups in _cached_groups.pop(group, {}).values() for subgroup in groups]
    alone = _self_groups.pop(group, None)
    destroy_groups([*subgroups, *([] if alone is None else [alone])])


def destroy_groups(groups: "Iterable[ProcessGroup]") -> None:
    """Destroy process groups, unless ``destroy_process_group()`` has destroyed all."""
    from torch import distributed

    for group in groups:
        with contextlib.suppress(ValueError):
            distributed.destroy_process_group(group)


def get_subtopology(group: "ProcessGroup", parent: Topology, alone: bool = False) -> Topology:
    """Return the topology of a subset of a data-parallel group's ranks: each of its groups is part of a group there.

    An example is the ranks that have the same experts: a node of 8 ranks has 8 / (expert-parallel size) of them.

    Collective over all ranks.

    Args:
        group: a process group; it and others like it divide the ranks of ``parent``.
        parent: the topology of all of these ranks.
        alone: as for ``get_topology``.

    Raises:
        ValueError: on all ranks, unless all of these groups have the same number of ranks in groups of ``parent``.
    """
    from deepspeed_ext.comm.agreement import bounds

    ranks, all_ranks = data_parallel_ranks(group), data_parallel_ranks(parent.world)
    n, size = len(all_ranks), parent.sizes.group_size
    counts = list(Counter(all_ranks.index(rank) // size for rank in ranks).values())
    ((least, most),) = bounds([counts[0] if len(set(counts)) == 1 else 0])
    if not 0 < least == most:
        raise ValueError(
            f"paro_strategy divides {n} data-parallel ranks into groups of {size}, over which ranks with the same "
            f"experts are spread unevenly: groups have {counts} of the ranks {ranks}. Set "
            f"zero_optimization.paro_group_size to a multiple or a divisor of the expert-parallel size, "
            f"{n // len(ranks)}, if its ranks are neighbors; 1 and {n} are always valid."
        )
    return get_topology(group, most, alone)


def _gather_group_sizes(ranks: list[int], group_size: int | None) -> list[tuple[list[int], int]]:
    """Return the ranks and the group size of every data-parallel group, ascending; the same on all ranks.

    Raises:
        ValueError: on all ranks, if a group size is invalid or unknown, or differs between the ranks of a group.
    """
    from deepspeed_ext.comm.agreement import all_gather_ints

    # The first rank of a data-parallel group identifies it. A launcher gives each rank the size of its own node only.
    rows = all_gather_ints([ranks[0], group_size or 0, ranks_per_node() or 0, _host()])
    members: dict[int, list[int]] = {}
    for rank, (first, *_) in enumerate(rows):
        members.setdefault(first, []).append(rank)
    ranks_and_sizes = []
    for _, group_ranks in sorted(members.items()):
        configured = {rows[rank][1] for rank in group_ranks}
        if len(configured) > 1:
            raise ValueError(
                f"zero_optimization.paro_group_size differs between the ranks {group_ranks}: {sorted(configured)} "
                f"(0: absent). Give it the same value on all ranks."
            )
        m = configured.pop() or (1 if len(group_ranks) == 1 else _default_group_size(members.values(), rows))
        GroupSizes(len(group_ranks), m)
        ranks_and_sizes.append((group_ranks, m))
    warnings = [
        placement_warning(group_ranks, size, [rows[rank][-1] for rank in group_ranks])
        for group_ranks, size in ranks_and_sizes
    ]
    _warn_once(next(filter(None, warnings), ""))  # only the first: placement is the same for all groups
    return ranks_and_sizes


def _default_group_size(data_parallel: Iterable[Sequence[int]], rows: Sequence[Sequence[int]]) -> int:
    """Return the default group size of all data-parallel groups, because stages of a pipeline share weights and need
    the same hops. Log if nodes have different numbers of their ranks."""
    nodes = nodes_of_ranks([size for *_, size, _ in rows])
    counts = [count for ranks in data_parallel for count in Counter(nodes[rank] for rank in ranks).values()]
    warning = uneven_nodes_warning(counts, m := math.gcd(*counts))
    _warn_once(warning and f"deepspeed_ext: {warning} (zero_optimization.paro_group_size).")
    return m


def _host() -> int:
    """Return a hash of this rank's host name, used for comparison only."""
    return int.from_bytes(hashlib.blake2b(socket.gethostname().encode(), digest_size=7).digest(), "big")


@functools.cache
def _warn_once(text: str) -> None:
    from deepspeed.utils import log_dist

    if text:
        log_dist(text, ranks=[0], level=logging.WARNING)
