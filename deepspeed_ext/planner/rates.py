# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Rates of hops and copies, computed from the links' specifications or fitted to measurements. Pure.

Note [Rates]
    A *rate* gives the time of a hop that all ranks run at once: latency + bytes / bandwidth, where bytes are those
    that one rank receives. Unlike a link's specification, a rate accounts for ranks that share their node's link.

    Rates from specifications: If a group spans several nodes, one flow of its flat ring enters each node. Between
    groups, there is one ring for each number (a rank's position in its group). A node therefore receives as many flows
    as it has numbers, at most its number of ranks. A flow that shares a node's link of B bytes/s with f-1 others has
    B/f. If different groups span the two borders of a node, two rings enter it.

Note [Latency of a hop]
    A ring over R ranks of N nodes takes R - 1 steps, N - 1 of them over the network. If each rank is on its own node,
    as between groups that are nodes, NCCL has PAT (parallel aggregated trees, since 2.23). Its steps grow as log R,
    and another part grows as R, but more slowly than a ring. In us, for large messages (protocol Simple):

        ring  8.4 + 3.4 (R - N) + 14 (N - 1),    PAT  8 + (14/3.5) floor(log2 R) + 2.8 R    (only if R = N)

    NCCL uses the faster algorithm; at R = 128, these are 1,786 and 394 us. Source: NCCL 2.28, ``src/graph/tuning.cc``:
    baseLatencies and hwLatencies (NVLink 3.4, network 14), ``ncclTopoTuneModel``, ``ncclPatEnable``. gloo has rings.
    Plain stages are predicted with the latencies of these hops. This favors plain stages: their collectives are over
    all ranks, for which NCCL has no PAT if nodes have several ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from deepspeed_ext.strategy import Direction, GroupSizes, Volume

BITS = 8
GIGA = 1e9
MICRO = 1e-6
NETWORK_STEP = 14 * MICRO  # seconds of a step of NCCL's ring; for this and the next line, see Note [Latency of a hop]
_RING_BASE, _NVLINK_STEP, _PAT_BASE, _PAT_RANK = 8.4 * MICRO, 3.4 * MICRO, 8 * MICRO, 2.8 * MICRO
_PAT_STEPS = 3.5  # steps that overlap


def bytes_per_second(gigabytes: float | None) -> float:
    """Return bytes per second for a rate in GB/s; infinite for None, so that its transfers take no time."""
    return float("inf") if gigabytes is None else gigabytes * GIGA


@dataclass(frozen=True)
class Rate:
    """The rate of a hop, see Note [Rates].

    Attributes:
        latency: seconds.
        bandwidth: bytes per second that a rank receives.

    Raises:
        ValueError: negative latency, or a bandwidth that is not positive.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.bandwidth > 0):
            raise ValueError(
                f"a rate needs a latency of at least 0 s and a bandwidth above 0 bytes/s, got {self.latency:g} s and "
                f"{self.bandwidth:g} bytes/s."
            )

    def seconds(self, nbytes: float, messages: int = 1) -> float:
        """Return the seconds for this many bytes and messages; 0 for no bytes."""
        return messages * self.latency + nbytes / self.bandwidth if nbytes else 0.0


@dataclass(frozen=True)
class HopRates:
    """The rates of the two hops of a redistribution in one direction: within the group, and between groups."""

    intra: Rate
    inter: Rate

    def seconds(self, volume: Volume, messages: int = 1) -> float:
        """Return the seconds of both hops, one after the other."""
        return self.intra.seconds(volume.intra, messages) + self.inter.seconds(volume.inter, messages)


def hop_latency(ranks: int, nodes: int, step: float = NETWORK_STEP, backend: str = "nccl") -> float:
    """Return the latency of a collective in seconds; see Note [Latency of a hop].

    Args:
        ranks: number of ranks in the group.
        nodes: number of their nodes.
        step: seconds of a step over the network.
        backend: "nccl", or "gloo", which only has rings; its steps within a node are not counted.
    """
    if ranks == 1:
        return 0.0
    if backend == "gloo":
        return (nodes - 1) * step
    ring = _RING_BASE + (ranks - nodes) * _NVLINK_STEP + (nodes - 1) * step
    if ranks != nodes:
        return ring
    return min(ring, _PAT_BASE + math.floor(math.log2(ranks)) * step / _PAT_STEPS + ranks * _PAT_RANK)


class Latencies(NamedTuple):
    """Latency in seconds of a message within a group, and between groups."""

    intra: float = 0.0
    inter: float = 0.0

    @classmethod
    def for_groups(
        cls, sizes: GroupSizes, ranks_per_node: int, step: float = NETWORK_STEP, backend: str = "nccl"
    ) -> "Latencies":
        """Return the latencies of groups of consecutive ranks; see ``hop_latency``."""
        nodes = -(-sizes.ranks // ranks_per_node)
        return cls(
            hop_latency(sizes.group_size, -(-sizes.group_size // ranks_per_node), step, backend),
            hop_latency(sizes.groups, min(sizes.groups, nodes), step, backend),
        )


NO_LATENCY = Latencies()


@dataclass(frozen=True)
class Rates:
    """The rates of all hops, of the memory that optimizers use, and of copies from and to the host.

    Attributes:
        gather: all-gathers.
        reduce: reduce-scatters.
        memory: bytes per second that a rank reads and writes while all ranks of its node do; infinite ignores the
            optimizer's step.
        host: bytes per second that a rank copies between host memory and its device while all ranks of its node do;
            infinite ignores these copies.
    """

    gather: HopRates
    reduce: HopRates
    memory: float = float("inf")
    host: float = float("inf")

    @classmethod
    def of_links(
        cls,
        sizes: GroupSizes,
        ranks_per_node: int,
        intra_gbps: float,
        inter_gbps: float,
        latency: Latencies = NO_LATENCY,
        memory: float = float("inf"),
        host: float = float("inf"),
    ) -> "Rates":
        """Return the rates for the links' specifications.

        Args:
            sizes: groups of any size, with consecutive ranks.
            ranks_per_node: number of ranks on a node, also consecutive.
            intra_gbps: Gbit/s that one rank receives from ranks of its node.
            inter_gbps: Gbit/s that one node receives from others, in each direction; its ranks share it.
            latency: latencies of messages.
            memory, host: see the class.

        Raises:
            ValueError: a value is not positive.
        """
        for name, value in (
            ("intra_gbps", intra_gbps),
            ("inter_gbps", inter_gbps),
            ("ranks_per_node", ranks_per_node),
            ("host", host),
        ):
            if not value > 0:
                raise ValueError(f"{name} must be above 0, got {value!r}.")
        rank_bandwidth, node_bandwidth = intra_gbps * GIGA / BITS, inter_gbps * GIGA / BITS
        m, one_node = sizes.group_size, sizes.ranks <= ranks_per_node
        # If m divides the ranks of a node, no group spans two nodes.
        within_node = one_node or (m <= ranks_per_node and not ranks_per_node % m)
        # Hops between groups: one flow for each rank of a node, but at most one for each rank of a group.
        flows, rings = min(m, ranks_per_node), _max_rings(sizes, ranks_per_node)
        hops = HopRates(
            intra=Rate(latency.intra, rank_bandwidth if within_node else min(rank_bandwidth, node_bandwidth / rings)),
            inter=Rate(latency.inter, rank_bandwidth if one_node else min(rank_bandwidth, node_bandwidth / flows)),
        )
        return cls(hops, hops, memory, host)

    def for_direction(self, kind: Direction) -> HopRates:
        """Return the rates of redistributions in one direction."""
        return self.gather if kind == Direction.GATHER else self.reduce

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, with None for infinity, which JSON lacks."""
        hops = {kind: asdict(getattr(self, kind)) for kind in ("gather", "reduce")}
        for rate in (rate for kind in hops.values() for rate in kind.values()):
            rate["bandwidth"] = _finite(rate["bandwidth"])
        return {**hops, "memory": _finite(self.memory), "host": _finite(self.host)}


def _max_rings(sizes: GroupSizes, ranks_per_node: int) -> int:
    """Return the largest number of groups on one node that span several nodes; at least 1."""
    m, most = sizes.group_size, 1
    for first in range(0, sizes.ranks, ranks_per_node):
        # A border inside a group means that the group spans this node and a neighbor.
        borders = (first, min(first + ranks_per_node, sizes.ranks))
        most = max(most, len({border // m for border in borders if border % m}))
    return most


def _finite(value: float) -> float | None:
    return None if value == float("inf") else value


def fit(samples: Sequence[tuple[float, float]]) -> Rate:
    """Fit a rate to messages of several sizes.

    The bandwidth is from the slope between the two largest sizes, since bytes that a link passes at once (the burst of
    a traffic shaper, the buffers of a socket) cancel there. The slope is at least the slope over all sizes. For
    latency + bytes / bandwidth both are equal, and a burst only reduces the slope over all sizes. The slope therefore
    cannot vanish because a larger message was lucky or a smaller one was disturbed. The latency is the time of the
    smallest message beyond that of its bytes.

    Args:
        samples: (bytes, seconds), one pair for each size.

    Raises:
        ValueError: fewer than two sizes.
    """
    ordered = sorted(samples)
    if len({nbytes for nbytes, _ in ordered}) < 2:
        raise ValueError(f"a rate is fitted to messages of at least 2 sizes, got {list(samples)}.")
    (small, small_seconds), (second, second_seconds), (largest, largest_seconds) = ordered[0], ordered[-2], ordered[-1]
    slope = max(
        (largest_seconds - second_seconds) / (largest - second), (largest_seconds - small_seconds) / (largest - small)
    )
    if slope <= 0:  # the largest message took no longer than the smallest: only its own rate is known
        slope = largest_seconds / largest
    return Rate(max(0.0, small_seconds - small * slope), 1 / slope)
