# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What a step takes at least when communication between groups hides under compute. Pure.

Note [The bound of a step]
    A step has s micro-batches, each with f seconds of forward and b of backward, through L blocks. What crosses
    between groups occupies a node's link for some seconds, at the link's rate:

        once a step         r: gradients, before the update, both ways where optimizer states are replicated
                            a: updated parameters, after it
        in a micro-batch    d: gradients, with g = G
                            q: parameters, with p = G, for forward and for backward together

    What is reduced hides under backward from its first block on, in which no gradient is complete. What is gathered
    after an update hides under the next forward but its last block, before which all must be there. Neither passes
    the update. So without q and d

        s (f + b)  +  max(0, r - b (1 - 1/L))  +  max(0, a - f (1 - 1/L))

    With d each reduction may also hide under all that comes after it in the step, so s d takes r's place, and
    (s - 1)(f + b) + b (1 - 1/L) that of its compute (NGG, IGG). With q no block is without any need of the link, and
    a schedule is conceivable that never lets it rest: max(s (f + b), r + a + s (d + q)) (G*). That is a bound, but no
    promise: parameters of a block that are gathered early have to be held.

    Hops inside groups, and all that the host does, are taken to cost nothing.
"""

from dataclasses import dataclass

from deepspeed_ext.strategy import Direction, GroupSizes, ModelStates, Strategy

REDUCE_LAST = ("DDP", "HSDP", "HSDP kept")  # peers that cross in the last backward, and only there


@dataclass(frozen=True)
class Compute:
    """Seconds of a micro-batch's forward and backward, number of blocks, and of micro-batches in a step."""

    forward: float
    backward: float
    blocks: int
    accumulation: int

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.accumulation * (self.forward + self.backward)


@dataclass(frozen=True)
class LinkSeconds:
    """Seconds that a node's link is occupied: d and q of a micro-batch, r and a of a step.

    See Note [The bound of a step].
    """

    parameters: float = 0.0
    gradients: float = 0.0
    reduced: float = 0.0
    updates: float = 0.0

    def total(self, accumulation: int) -> float:
        """Return those of a step."""
        return accumulation * (self.parameters + self.gradients) + self.reduced + self.updates


def of_strategy(strategy: Strategy, sizes: GroupSizes, states: ModelStates, mbit: float) -> LinkSeconds:
    """Return what the formula says; all ranks of a node use its link."""
    found = dict.fromkeys(("parameters", "gradients", "reduced", "updates"), 0.0)
    for phase in strategy.phases(sizes, states):
        seconds = phase.volume.inter * sizes.group_size * 8 / (mbit * 1e6)
        if phase.each_micro_step:
            found["parameters" if phase.kind == Direction.GATHER else "gradients"] += phase.each_micro_step * seconds
        else:
            found["updates" if phase.name == "gather updates" else "reduced"] += seconds
    return LinkSeconds(**found)


def of_peer(name: str, measured: float, accumulation: int) -> LinkSeconds:
    """Return those of a peer, of whose step only the sum is known.

    Where it is not known either when a peer may use the link, it may always, as with p = G.
    """
    return LinkSeconds(reduced=measured) if name in REDUCE_LAST else LinkSeconds(parameters=measured / accumulation)


def bound(compute: Compute, link: LinkSeconds, alone: float | None = None) -> float:
    """Return the seconds of a step; see Note [The bound of a step].

    Args:
        compute: of the model.
        link: of the method.
        alone: a measured time of a step without communication, in place of s (f + b).
    """
    s, rest = compute.accumulation, 1 - 1 / compute.blocks
    alone = compute.seconds if alone is None else alone
    if link.parameters:
        return max(alone, link.total(s))
    under = compute.backward * rest
    if link.gradients:
        under += (s - 1) * (compute.forward + compute.backward)
    exposed = max(0.0, link.reduced + s * link.gradients - under)
    return alone + exposed + max(0.0, link.updates - compute.forward * rest)
