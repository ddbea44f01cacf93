# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""How fast the hops of a redistribution are: from the links' figures, or fitted to what was measured. Pure.

Note [Rates]
    A *rate* says how long a hop takes when all ranks run it at once: latency + bytes / bandwidth, where bytes are what
    one rank receives. So it has in it that ranks of a node share the node's link, which the links' figures have not.

    By figures: of a flat ring over a group that reaches over several nodes one flow enters each node; of the rings
    between groups as many as the node has numbers (the position of a rank in its group), at most the ranks of a node.
    A flow that shares a node's link of B bytes/s with f-1 others has B/f. Where a group reaches over each border of a
    node, and not the same one, two rings enter it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deepspeed_ext.strategy import Direction, GroupSizes, Volume

BITS = 8
GIGA = 1e9


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
        """Return the seconds for that many bytes, in that many messages; 0 for no bytes."""
        return messages * self.latency + nbytes / self.bandwidth if nbytes else 0.0


@dataclass(frozen=True)
class HopRates:
    """The rates of both hops of a redistribution in one direction: within the group, and between groups."""

    intra: Rate
    inter: Rate

    def seconds(self, volume: Volume, messages: int = 1) -> float:
        """Return the seconds of one after the other."""
        return self.intra.seconds(volume.intra, messages) + self.inter.seconds(volume.inter, messages)


@dataclass(frozen=True)
class Rates:
    """The rates of all hops, and of the memory that optimizers work in.

    Attributes:
        gather: all-gathers.
        reduce: reduce-scatters.
        memory: bytes per second that a rank reads and writes while all ranks of its node do; infinite leaves the
            optimizer's step out.
    """

    gather: HopRates
    reduce: HopRates
    memory: float = float("inf")

    @classmethod
    def of_links(
        cls,
        sizes: GroupSizes,
        ranks_per_node: int,
        intra_gbps: float,
        inter_gbps: float,
        latency: float = 0.0,
        memory: float = float("inf"),
    ) -> "Rates":
        """Return the rates by the links' figures.

        Args:
            sizes: groups of any size, of consecutive ranks.
            ranks_per_node: consecutive, too.
            intra_gbps: Gbit/s that one rank receives from ranks of its node.
            inter_gbps: Gbit/s that one node receives from others, in each direction; its ranks share it.
            latency: seconds of a message between groups; one within is free.
            memory: see the class.

        Raises:
            ValueError: a figure that is not positive.
        """
        for name, value in (
            ("intra_gbps", intra_gbps),
            ("inter_gbps", inter_gbps),
            ("ranks_per_node", ranks_per_node),
        ):
            if not value > 0:
                raise ValueError(f"{name} must be above 0, got {value!r}.")
        own, node = intra_gbps * GIGA / BITS, inter_gbps * GIGA / BITS
        m, one_node = sizes.group_size, sizes.ranks <= ranks_per_node
        within_node = one_node or (m <= ranks_per_node and not ranks_per_node % m)
        flows, rings = min(m, ranks_per_node), _rings(sizes, ranks_per_node)
        hops = HopRates(
            intra=Rate(0.0, own if within_node else min(own, node / rings)),
            inter=Rate(latency, own if one_node else min(own, node / flows)),
        )
        return cls(hops, hops, memory)

    def of(self, kind: Direction) -> HopRates:
        """Return the rates of redistributions in that direction."""
        return self.gather if kind == Direction.GATHER else self.reduce

    def as_dict(self) -> dict[str, Any]:
        """Return plain values; None for what is infinite, which JSON does not know."""
        hops = {kind: asdict(getattr(self, kind)) for kind in ("gather", "reduce")}
        for rate in (rate for kind in hops.values() for rate in kind.values()):
            rate["bandwidth"] = _finite(rate["bandwidth"])
        return {**hops, "memory": _finite(self.memory)}


def _rings(sizes: GroupSizes, ranks_per_node: int) -> int:
    """Return how many groups that reach over several nodes the node with the most of these has; at least 1."""
    m, most = sizes.group_size, 1
    for first in range(0, sizes.ranks, ranks_per_node):
        borders = (first, min(first + ranks_per_node, sizes.ranks))
        most = max(most, len({border // m for border in borders if border % m}))
    return most


def _finite(value: float) -> float | None:
    return None if value == float("inf") else value


def fit(samples: Sequence[tuple[float, float]]) -> Rate:
    """Fit a rate to messages of several sizes.

    The bandwidth is the slope between the two largest sizes: there what a link lets pass at once (the burst of a
    traffic shaper, the buffers of a socket) cancels. It is no flatter than the one over all sizes, which is the same
    for latency + bytes / bandwidth, and less for a burst: so it does not vanish where the larger message is lucky, or
    the smaller one was disturbed. The latency is what the smallest takes beyond its bytes.

    Args:
        samples: (bytes, seconds), each size once.

    Raises:
        ValueError: fewer than two sizes.
    """
    ordered = sorted(samples)
    if len({nbytes for nbytes, _ in ordered}) < 2:
        raise ValueError(f"a rate is fitted to messages of at least 2 sizes, got {list(samples)}.")
    (small, quickest), (less, sooner), (most, latest) = ordered[0], ordered[-2], ordered[-1]
    slope = max((latest - sooner) / (most - less), (latest - quickest) / (most - small))
    if slope <= 0:  # the largest took less than the smallest: then what it took says all that is known
        slope = latest / most
    return Rate(max(0.0, quickest - small * slope), 1 / slope)
