# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Where a check runs: what was asked for, this rank, and all ranks' hosts. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from deepspeed_ext.comm.process_groups import ranks_per_node
from deepspeed_ext.tools.doctor.findings import ranks_text


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        group_size: paro_group_size; None for the ranks per node.
        timeout: seconds after which the doctor waits no longer for a rank.
        params: parameters of the model that shall fit; None to compare memory with nothing.
        strategy: the three letters under which it shall fit.
        dtype_bytes: bytes of a parameter and of a gradient.
        offload_optimizer: whether optimizer states are in host memory.
        skip: titles of checks that are left out.
    """

    group_size: int | None = None
    timeout: float = 60.0
    params: int | None = None
    strategy: str = "NIG"
    dtype_bytes: int = 2
    offload_optimizer: bool = False
    skip: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """One rank among all.

    Attributes:
        rank, local_rank: this rank's numbers, among all and on its host.
        hosts: name of each rank's host, by rank.
        options: what was asked for.
        environment: variables of this rank, as they were when it started.
        patch_problems: returns what of the patches of DeepSpeed is not as expected; imports DeepSpeed.
    """

    rank: int
    local_rank: int
    hosts: Sequence[str]
    options: Options = field(default_factory=Options)
    environment: Mapping[str, str] = field(default_factory=dict)
    patch_problems: Callable[[], list[str]] = list

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return len(self.hosts)

    def ranks_of_hosts(self) -> dict[str, list[int]]:
        """Return the ranks of each host, in the order of their first ranks."""
        found: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            found.setdefault(host, []).append(rank)
        return found

    def teams(self) -> list[list[int]]:
        """Return the ranks that are close to one another: those of each host, or of each group if all share one host.

        The size of groups is the same on all ranks here, though a launcher may tell each host another number: it is
        only used if there is one host.
        """
        hosts = list(self.ranks_of_hosts().values())
        if len(hosts) > 1:
            return hosts
        size = self.options.group_size or ranks_per_node(self.environment) or self.world
        return [list(range(first, min(first + size, self.world))) for first in range(0, self.world, size)]

    def named(self, ranks: Sequence[int]) -> str:
        """Return a team as ``node1 (ranks 8-15)``; hosts have names of their own only if there are several."""
        text = ranks_text(ranks)
        return f"{self.hosts[ranks[0]]} ({text})" if len(set(self.hosts)) > 1 else text
