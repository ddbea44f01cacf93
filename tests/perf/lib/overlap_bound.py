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

from deepspeed_ext.strategy import STRATEGIES, Direction, GroupSizes, ModelStates, Strategy
from tests.perf.lib.records import Row
from tests.perf.lib.settings import OVERLAP, SIZES, Setting

BLOCKS, BLOCK = SIZES["narrow"][0], 2 * SIZES["narrow"][1] * SIZES["narrow"][2]  # elements of a block
BACKWARD = 2.0  # seconds of backward for each of forward
RATIOS = (0.5, 1.0, 2.0)
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


# Of the rows of overlap.csv #######################################################################


def wire_of(setting: Setting) -> float:
    """Return W: seconds that a link is occupied by two hops between groups of the whole model."""
    return of_strategy(STRATEGIES["NIG"], setting.sizes, setting.states, _rate(setting)).total(setting.accumulation)


def compute_of(setting: Setting, ratio: float) -> Compute:
    """Return the compute with which W is ``ratio`` times that of a micro-batch."""
    forward = wire_of(setting) / ratio / (1 + BACKWARD)
    return Compute(forward, BACKWARD * forward, BLOCKS, setting.accumulation)


def link_of(row: Row, mbit: float | None = None) -> LinkSeconds:
    """Return those of a strategy by the formula, at this rate or the setting's; of a peer by its bytes."""
    setting = OVERLAP[row.setting]
    mbit = mbit or _rate(setting)
    if row.method in STRATEGIES:
        return of_strategy(STRATEGIES[row.method], setting.sizes, setting.states, mbit)
    return of_peer(row.method, row.bytes_between * 8 / (mbit * 1e6), setting.accumulation)


def bound_of(row: Row, measured: bool = False, payload: bool = False) -> float:
    """Return the bound of a row: of the emulated compute, or of the compute that was measured; at the link's rate, or
    at the rate at which it carries payload by the planner's probe."""
    compute = compute_of(OVERLAP[row.setting], row.more["wire_of_compute"])
    link = link_of(row, row.more["payload_mbit"] if payload else None)
    return bound(compute, link, row.compute if measured else None)


def formula_bytes(row: Row) -> float:
    """Return the formula's bytes but for the block that ZeRO-3 keeps, with p = G, from a forward to its backward."""
    setting = OVERLAP[row.setting]
    kept = setting.accumulation * link_of(row).parameters * _rate(setting) * 1e6 / 8 / (2 * BLOCKS)
    return (row.formula_bytes or 0.0) - kept


def _rate(setting: Setting) -> float:
    (mbit,) = setting.mbit
    assert mbit is not None
    return mbit
