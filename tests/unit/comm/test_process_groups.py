# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Process groups inside groups and between them, only within the data-parallel group."""

import os
import re
import socket
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext.comm import disjoint_groups, process_groups
from deepspeed_ext.comm.process_groups import (
    data_parallel_ranks,
    default_group_size,
    get_topology,
    inter_ranks,
    intra_ranks,
    nodes_of_ranks,
    placement_warning,
    ranks_per_node,
)
from deepspeed_ext.strategy import Placement
from tests.harness.logs import logged
from tests.harness.tiers import with_cases


def test_launcher_variables() -> None:
    assert ranks_per_node({}) is None
    assert ranks_per_node({"LOCAL_SIZE": "4"}) == 4
    assert ranks_per_node({"LOCAL_SIZE": "4", "LOCAL_WORLD_SIZE": "8"}) == 8
    assert ranks_per_node({"LOCAL_WORLD_SIZE": "", "LOCAL_SIZE": "0"}) is None


def test_default_group_is_data_parallel_ranks_of_a_node() -> None:
    nodes = nodes_of_ranks([4] * 12)
    assert default_group_size(range(8), nodes) == 4
    assert default_group_size(range(0, 12, 2), nodes) == 2  # two-way tensor parallelism on nodes of four
    assert default_group_size([1, 5, 9], nodes) == 1
    assert default_group_size(range(6), nodes_of_ranks([4, 4, 4, 4, 2, 2])) == 2
    assert default_group_size(range(20), nodes_of_ranks([12] * 12 + [8] * 8)) == 4


def test_default_refuses_unknown_nodes() -> None:
    for sizes in ([0] * 6, [4, 4, 4, 2, 2, 2], [4, 4, 4, 4, 0, 0]):
        with pytest.raises(ValueError, match=r"LOCAL_WORLD_SIZE, LOCAL_SIZE have it.*Set .*paro_group_size"):
            nodes_of_ranks(sizes)


def test_ranks_of_groups() -> None:
    ranks = [10, 11, 12, 13, 14, 15]
    assert [intra_ranks(ranks, 2, r) for r in (0, 1, 5)] == [[10, 11], [10, 11], [14, 15]]
    assert [inter_ranks(ranks, 2, r) for r in (0, 3)] == [[10, 12, 14], [11, 13, 15]]


@with_cases(
    "hosts, size, spread",
    ("aabb", 2, ""),
    ("abab", 2, "2 of 2 groups of 2 ranks span more hosts than the 1 "),
    ("aaabbb", 1, ""),
    ("aabbba", 2, ""),  # hosts of three ranks hold no groups of two
    ("aaabbabb", 4, "2 of 2 groups of 4 ranks span more hosts than the 1 "),
    ("aaaabb", 2, ""),
    ("aaabab", 2, "2 of 3 groups of 2 ranks"),
    ("aabbccdd", 4, ""),  # larger than a host, as configured
    ("abcdabcd", 4, "2 of 2 groups of 4 ranks span more hosts than the 2 "),
    ("abcdabcd", 8, ""),
    ("abcd", 2, ""),  # a container for each rank
    ("abcdeabcde", 2, "5 of 5 groups"),
)
def test_warning_if_groups_span_too_many_hosts(hosts: str, size: int, spread: str) -> None:
    text = placement_warning(range(10, 10 + 2 * len(hosts), 2), size, [ord(host) for host in hosts])
    assert spread in text and bool(spread) == bool(text), text
    if hosts == "abab":
        assert "ranks [10, 12] are a group, and the 2 hosts have the ranks [10, 14], [12, 16]. Start" in text


def test_cyclic_rank_placement_is_warned_about_once(ranks: Any) -> None:
    for rank, (block, cyclic) in enumerate(ranks(4).run(placement_case)):
        assert not block
        assert len(cyclic) == (1 if rank == 0 else 0), cyclic
        assert all("[0, 1] are a group, and the 2 hosts have the ranks [0, 2], [1, 3]" in line for line in cyclic)


def placement_case() -> tuple[list[str], list[str]]:
    warnings = []
    for hosts in ("aabb", "abab"):
        with mock.patch.object(socket, "gethostname", lambda hosts=hosts: hosts[dist.get_rank()]), logged() as lines:
            for _ in range(2):
                get_topology(dist.new_group(list(range(4))), 2)
        warnings.append([text for level, text in lines if level == "WARNING" and "hosts" in text])
    return warnings[0], warnings[1]


def test_groups_are_created_once_per_data_parallel_group(ranks: Any) -> None:
    for rank, ((first, split), replicas) in enumerate(ranks(4).run(topology_case)):
        j = rank // 2
        assert replicas == {"N": [0, 1, 2, 3], "I": [rank % 2, rank % 2 + 2], "G": None}
        assert first == ([2 * j, 2 * j + 1], [rank % 2, rank % 2 + 2], [rank], True)
        # Two data-parallel groups {0, 2} and {1, 3}, as under tensor parallelism: groups of one rank each.
        assert split == ([rank], [rank % 2, rank % 2 + 2], [rank], True)


def topology_case() -> tuple[list[tuple[list[int], list[int], list[int], bool]], dict[str, list[int] | None]]:
    """Return this rank's groups, whether a second call returns the same, and ranks with one shard by placement."""
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    answers = []
    for group, size in ((None, 2), (halves[dist.get_rank() % 2], 1)):
        without = get_topology(group, size)
        assert without.alone is None
        topology = get_topology(group, size, alone=True)
        assert (topology.intra, topology.inter) == (without.intra, without.inter)
        groups = [data_parallel_ranks(g) for g in (topology.intra, topology.inter, topology.alone)]
        answers.append((*groups, get_topology(group, size, alone=True) == topology))
    replicas = {placement.name: get_topology(None, 2).replica_group(placement) for placement in Placement}
    return answers, {name: group and data_parallel_ranks(group) for name, group in replicas.items()}


@pytest.mark.parametrize("collides", [False, True])
def test_one_split_creates_all_disjoint_groups(ranks: Any, collides: bool) -> None:
    for rank, (group_ranks, splits) in enumerate(ranks(4).run(splitting_case, collides)):
        j = rank // 2
        assert group_ranks == [[2 * j, 2 * j + 1], [rank % 2, rank % 2 + 2], [rank]]
        assert splits == [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0], [1]]]


def splitting_case(collides: bool) -> tuple[list[list[int]], list[Any]]:
    """Return the ranks of groups that a backend creates by splits, and the arguments of the splits. ``collides``: the
    first two lists of the first split have the same hash."""
    splits: list[Any] = []

    def split(parent: Any = None, split_ranks: Any = (), timeout: Any = None) -> Any:
        members = data_parallel_ranks(parent)
        splits.append(split_ranks)
        lists = [[members[number] for number in numbers] for numbers in split_ranks]
        if collides and len(splits) == 1:
            lists = [sorted(lists[0] + lists[1])]
        own_ranks = next(members for members in lists if dist.get_rank() in members)
        return torch.distributed.new_group(own_ranks, timeout=timeout, use_local_synchronization=True)

    world = dist.new_group(list(range(4)))
    with (
        mock.patch.object(torch.distributed, "split_group", split),
        mock.patch.object(disjoint_groups, "_splits", lambda: True),
    ):
        topology = get_topology(world, 2, alone=True)
    assert topology.alone is not None
    return [data_parallel_ranks(group) for group in (topology.intra, topology.inter, topology.alone)], splits


def test_groups_inherit_the_timeout_of_their_parent(ranks: Any) -> None:
    assert ranks(4).run(timeout_case) == [[77.0] * 4] * 4


def timeout_case() -> list[float]:
    topology = get_topology(torch.distributed.new_group(list(range(4)), timeout=timedelta(seconds=77)), 2, alone=True)
    groups = (topology.world, topology.intra, topology.inter, topology.alone)
    return [disjoint_groups.timeout_of(group).total_seconds() for group in groups]  # type: ignore[union-attr]


@with_cases("sizes, found", ("2122", "1, 2"), ("    ", "not set"))
def test_contradicting_node_sizes_are_refused(ranks: Any, sizes: str, found: str) -> None:
    for error in ranks(4).run_expect_error(nodes_case, sizes):
        assert error.type == "ValueError" and re.search(rf"{found}\. Set .*paro_group_size", error.message), error


@with_cases("sizes, group_size, cost", ("1122", 1, "so I means N"), ("221", 1, "2, 1"), ("444422", 2, "2 times the"))
def test_uneven_nodes_have_the_greatest_common_divisor(ranks: Any, sizes: str, group_size: int, cost: str) -> None:
    (found, lines), *others = ranks(len(sizes)).run(nodes_case, sizes)
    assert found == group_size and all(other == (found, []) for other in others)
    assert len(lines) == 1 and "greatest common divisor" in lines[0] and cost in lines[0]


def nodes_case(sizes: str) -> tuple[int, list[str]]:
    """Give each rank another node size, as on nodes that differ; return group sizes, and what is logged."""
    os.environ["LOCAL_WORLD_SIZE"], os.environ["LOCAL_SIZE"] = sizes[dist.get_rank()], ""
    with logged() as lines, mock.patch.object(process_groups, "_host", lambda: ord(sizes[dist.get_rank()])):
        size = get_topology(None).sizes.group_size
    return size, [line for _, line in lines]


def test_groups_are_destroyed_with_their_parent(ranks: Any) -> None:
    """Each case has its own process group; the threads that serve its subgroups must end with it."""
    pool = ranks(4)
    pool.run(topology_case)
    before = pool.run(threads_case)
    for _ in range(2):
        pool.run(topology_case)
    assert pool.run(threads_case) == before


def threads_case() -> int:
    return len(os.listdir("/proc/self/task"))
