# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""How fast hops and copies are: computed from the links' figures, or fitted to measurements. Pure.

Note [Rates]
    A *rate* says how long a hop takes when all ranks run it at once: latency + bytes / bandwidth, where bytes are what
    one rank receives. So, unlike the figures of links, a rate accounts for ranks of a node sharing the node's link.

    Rates from figures: If a group spans several nodes, one flow of its flat ring enters each node. Of the rings
    between groups, there is one for each number (a rank's position in its group), so as many enter a node as it has
    numbers, at most the ranks of a node. A flow that shares a node's link of B bytes/s with f-1 others has B/f. If
    different groups span the two borders of a node, two rings enter it.

Note [Latency of a hop]
    A ring over R ranks of N nodes takes R - 1 steps, N - 1 of them over the network. Where each rank is on a node of
    its own, as between groups that are nodes, NCCL has PAT (parallel aggregated trees, since 2.23), with steps that
    grow as log R, and a part that grows as R but less than a ring's. In us, for large messages (protocol Simple):

        ring  8.4 + 3.4 (R - N) + 14 (N - 1),    PAT  8 + (14/3.5) floor(log2 R) + 2.8 R    (only if R = N)

    NCCL takes the quicker one; at R = 128, these are 1,786 and 394 us. Source: NCCL 2.28, ``src/graph/tuning.cc``:
    baseLatencies and hwLatencies (NVLink 3.4, network 14), ``ncclTopoTuneModel``, ``ncclPatEnable``. gloo has rings.
    Plain stages are predicted with the latencies of these hops, which favors them: their collectives are over all
    ranks, for which NCCL has no PAT if nodes have several ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from deepspeed_ext.strategy import Direction, GroupSizes, Volume

BITS = 8
GIGA = 1e9
MICRO = 1e-6
NETWORK_STEP = 14 * MICRO  # seconds of a step of NCCL's ring; the following too: see Note [Latency of a hop]
_RING_BASE, _NVLINK_STEP, _PAT_BASE, _PAT_RANK = 8.4 * MICRO, 3.4 * MICRO, 8 * MICRO, 2.8 * MICRO
_PAT_STEPS = 3.5  # that overlap


def bytes_per_second(gigabytes: float | None) -> float:
    """Return the rate of so many GB/s; infinite where none is given, which leaves out what it would time."""
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
        """Return the seconds for these bytes in so many messages; 0 for no bytes."""
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
        ranks: of the group.
        nodes: that they are on.
        step: seconds of a step over the network.
        backend: "nccl", or "gloo", which has rings alone, and of whose steps within a node nothing is counted.
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
    """Seconds of a message within a group, and between groups."""

    intra: float = 0.0
    inter: float = 0.0

    @classmethod
    def of(
        cls, sizes: GroupSizes, ranks_per_node: int, step: float = NETWORK_STEP, backend: str = "nccl"
    ) -> "Latencies":
        """Return the latencies of groups of consecutive ranks; see ``hop_latency``."""
        nodes = -(-sizes.ranks // ranks_per_node)
        return cls(
            hop_latency(sizes.group_size, -(-sizes.group_size // ranks_per_node), step, backend),
            hop_latency(sizes.groups, min(sizes.groups, nodes), step, backend),
        )


NONE = Latencies()


@dataclass(frozen=True)
class Rates:
    """The rates of all hops, of the memory that optimizers work in, and of copies from and to the host.

    Attributes:
        gather: all-gathers.
        reduce: reduce-scatters.
        memory: bytes per second that a rank reads and writes while all ranks of its node do; infinite leaves the
            optimizer's step out.
        host: bytes per second that a rank copies from host memory to its device, and back, while all ranks of its node
            do; infinite leaves these copies out.
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
        latency: Latencies = NONE,
        memory: float = float("inf"),
        host: float = float("inf"),
    ) -> "Rates":
        """Return the rates for the links' figures.

        Args:
            sizes: groups of any size, of consecutive ranks.
            ranks_per_node: number of ranks of a node, which are consecutive, too.
            intra_gbps: Gbit/s that one rank receives from ranks of its node.
            inter_gbps: Gbit/s that one node receives from others, in each direction; its ranks share it.
            latency: of messages.
            memory, host: see the class.

        Raises:
            ValueError: a figure is not positive.
        """
        for name, value in (
            ("intra_gbps", intra_gbps),
            ("inter_gbps", inter_gbps),
            ("ranks_per_node", ranks_per_node),
            ("host", host),
        ):
            if not value > 0:
                raise ValueError(f"{name} must be above 0, got {value!r}.")
        own, node = intra_gbps * GIGA / BITS, inter_gbps * GIGA / BITS
        m, one_node = sizes.group_size, sizes.ranks <= ranks_per_node
        within_node = one_node or (m <= ranks_per_node and not ranks_per_node % m)
        flows, rings = min(m, ranks_per_node), _rings(sizes, ranks_per_node)
        hops = HopRates(
            intra=Rate(latency.intra, own if within_node else min(own, node / rings)),
            inter=Rate(latency.inter, own if one_node else min(own, node / flows)),
        )
        return cls(hops, hops, memory, host)

    def of(self, kind: Direction) -> HopRates:
        """Return the rates of redistributions in that direction."""
        return self.gather if kind == Direction.GATHER else self.reduce

    def as_dict(self) -> dict[str, Any]:
        """Return plain values; None for infinity, which JSON does not have."""
        hops = {kind: asdict(getattr(self, kind)) for kind in ("gather", "reduce")}
        for rate in (rate for kind in hops.values() for rate in kind.values()):
            rate["bandwidth"] = _finite(rate["bandwidth"])
        return {**hops, "memory": _finite(self.memory), "host": _finite(self.host)}


def _rings(sizes: GroupSizes, ranks_per_node: int) -> int:
    """Return the most groups on one node that span several nodes; at least 1."""
    m, most = sizes.group_size, 1
    for first in range(0, sizes.ranks, ranks_per_node):
        borders = (first, min(first + ranks_per_node, sizes.ranks))
        most = max(most, len({border // m for border in borders if border % m}))
    return most


def _finite(value: float) -> float | None:
    return None if value == float("inf") else value


def fit(samples: Sequence[tuple[float, float]]) -> Rate:
    """Fit a rate to messages of several sizes.

    The bandwidth is from the slope between the two largest sizes, since bytes that a link lets pass at once (the burst
    of a traffic shaper, the buffers of a socket) cancel there. The slope is at least the one over all sizes. For
    latency + bytes / bandwidth both are the same, and a burst only makes the latter smaller. So the slope cannot
    vanish because a larger message was lucky or a smaller one was disturbed. The latency is the time of the smallest
    message beyond that of its bytes.

    Args:
        samples: (bytes, seconds), once for each size.

    Raises:
        ValueError: fewer than two sizes.
    """
    ordered = sorted(samples)
    if len({nbytes for nbytes, _ in ordered}) < 2:
        raise ValueError(f"a rate is fitted to messages of at least 2 sizes, got {list(samples)}.")
    (small, quickest), (less, sooner), (most, latest) = ordered[0], ordered[-2], ordered[-1]
    slope = max((latest - sooner) / (most - less), (latest - quickest) / (most - small))
    if slope <= 0:  # the largest message took less time than the smallest: its own rate is all that is known
        slope = latest / most
    return Rate(max(0.0, quickest - small * slope), 1 / slope)
