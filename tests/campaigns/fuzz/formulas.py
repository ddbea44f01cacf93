# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What a step moves and what a rank holds, by the paper's formulas, written anew; plain numbers.

A state of X bytes moves towards N inside a group of m of n ranks with (m - 1) / m X, and between the k groups with
(k - 1) / n X. The package has these as ``deepspeed_ext.strategy``; what is here knows only letters.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from deepspeed_ext.strategy import STRATEGIES
from tests.campaigns.fuzz.cases import Case
from tests.campaigns.fuzz.runs import Trained

SHORT, LONG, MESSAGE = 0.9, 1.10, 128  # of the formula; bytes of each message, for what fills it up


@dataclass(frozen=True)
class Layout:
    """n ranks in groups of m."""

    n: int
    m: int

    def shards(self, letter: str) -> int:
        """How many parts a state is in."""
        return {"N": 1, "I": self.m, "G": self.n}[letter]

    def moved(self, one: str, other: str, nbytes: float) -> tuple[float, float]:
        """Bytes that a rank receives inside its group and from others when a state goes from one to the other."""
        letters = one + other
        within = (self.m - 1) / self.m * nbytes if "N" in letters and set(letters) != {"N"} else 0.0
        between = (self.n // self.m - 1) / self.n * nbytes if "G" in letters and set(letters) != {"G"} else 0.0
        return within, between


class Moved(NamedTuple):
    """One of the moves of a step: bytes within a group and between groups, each time, and how often."""

    within: float
    between: float
    times: int


def moves(
    name: str, layout: Layout, parameters: float, trained: float, accumulation: int, gathers: int
) -> list[Moved]:
    """The five moves of a step: parameters, gradients, twice at the boundary, and what was changed.

    Args:
        name: three letters.
        layout: of ranks.
        parameters, trained: bytes of the whole, and of those with gradients.
        accumulation: micro-steps.
        gathers: how often parameters are gathered in each.
    """
    p, g, os = name
    ways = ((p, "N"), ("N", g), (g, "G"), ("G", os), (os, p))
    nbytes, times = (parameters, *[trained] * 4), (gathers * accumulation, accumulation, 1, 1, 1)
    return [Moved(*layout.moved(*way, size), often) for way, size, often in zip(ways, nbytes, times, strict=True)]


def received(found: list[Moved]) -> tuple[float, float]:
    """Bytes of a whole step, within and between."""
    return sum(one.within * one.times for one in found), sum(one.between * one.times for one in found)


def bytes_apart(case: Case, ours: Trained) -> Iterator[str]:
    """Yield which bytes of the last step differ from the formula, which holds for models that use all parameters."""
    size = case.zero.get("paro_group_size")
    others = any(event.name in ("universal", "elsewhere") for event in case.events())  # the last step has other keys
    plain = not (
        others
        or set(case.config) - {"optimizer"}
        or case.network
        or case.tensor_parallel > 1
        or case.optimizer == "Muon"
        or case.steps[-1].twice  # each backward at the boundary is reduced
    )
    if not plain or not size or case.zero.get("paro_strategy") not in STRATEGIES or case.boundary == "coalesce":
        return
    width = 4 if case.dtype == "fp32" else 2
    count = case.steps[-1].micro_steps or case.accumulation
    layout = Layout(case.world, size)
    most, least = (
        received(moves(case.strategy, layout, width * ours.elements, width * ours.trained, count, gathers))
        for gathers in (2, 0)
    )
    got = ours.received[-1]
    counted = (got.intra, got.inter)
    told = f"{got.intra:.0f} within groups and {got.inter:.0f} between in {got.messages} messages"
    if any(found > LONG * due + MESSAGE * got.messages for found, due in zip(counted, most, strict=True)):
        yield f"bytes: {told}, at most {most} by the formula"
    if _all_is_used(case, ours) and any(found < SHORT * due for found, due in zip(counted, least, strict=True)):
        yield f"bytes: {told}, at least {least} by the formula"


def _all_is_used(case: Case, ours: Trained) -> bool:
    """Whether the last step has a gradient of each parameter that is trained, and nothing else has moved before it."""
    rests = case.unused or case.steps[-1].skipped or any(block.kind == "experts" for block in case.blocks)
    later = (
        case.strategy[0] == "I" or "paro_overlap_updates" in case.zero
    )  # updates come while the next step is awaited
    return not (rests or later or case.events() or case.lossy or case.exact) and all(ours.applied)
