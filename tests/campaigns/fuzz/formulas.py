# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What a step moves, by the paper's formulas, written anew.

A state of X bytes moves towards N inside a group of m of n ranks with (m - 1) / m X, and between the k groups with
(k - 1) / n X. The package has these as ``deepspeed_ext.strategy``; what is here knows only letters.
"""

from collections.abc import Iterator

from deepspeed_ext.strategy import STRATEGIES
from tests.campaigns.fuzz.cases import Case
from tests.campaigns.fuzz.runs import Trained

SHORT, LONG, MESSAGE = 0.9, 1.10, 128  # of the formula; bytes of each message, for what fills it up


def received(case: Case, parameters: float, trained: float, gathers: int) -> tuple[float, float]:
    """Return the bytes that a rank receives in the last step, inside its group and from others.

    Args:
        case: with a strategy by its name.
        parameters, trained: bytes of the whole, and of those with gradients.
        gathers: how often parameters are gathered in each micro-step.
    """
    (p, g, os), n, m = case.strategy, case.world, case.zero["paro_group_size"]
    count = case.steps[-1].micro_steps or case.accumulation
    moves = [(p, "N", parameters, gathers * count), ("N", g, trained, count)]
    moves += [(g, "G", trained, 1), ("G", os, trained, 1), (os, p, trained, 1)]
    within = between = 0.0
    for one, other, size, times in moves:
        if one != other and "N" in one + other:
            within += (m - 1) / m * size * times
        if one != other and "G" in one + other:
            between += (n // m - 1) / n * size * times
    return within, between


def bytes_apart(case: Case, ours: Trained) -> Iterator[str]:
    """Yield which bytes of the last step differ from the formula, which holds for models that use all parameters."""
    plain = not (
        any(event.name in ("universal", "elsewhere") for event in case.events())  # the last step has other keys
        or set(case.config) - {"optimizer"}
        or case.network
        or case.tensor_parallel > 1
        or case.optimizer == "Muon"
        or case.boundary == "coalesce"
        or case.steps[-1].twice  # each backward at the boundary is reduced
    )
    if not plain or "paro_group_size" not in case.zero or case.zero.get("paro_strategy") not in STRATEGIES:
        return
    width, got = 4 if case.dtype == "fp32" else 2, ours.received[-1]
    most, least = (received(case, width * ours.elements, width * ours.trained, gathers) for gathers in (2, 0))
    counted = (got.intra, got.inter)
    told = f"{got.intra:.0f} within groups and {got.inter:.0f} between in {got.messages} messages"
    if any(found > LONG * due + MESSAGE * got.messages for found, due in zip(counted, most, strict=True)):
        yield f"bytes: {told}, at most {most} by the formula"
    if _all_is_used(case, ours) and any(found < SHORT * due for found, due in zip(counted, least, strict=True)):
        yield f"bytes: {told}, at least {least} by the formula"


def _all_is_used(case: Case, ours: Trained) -> bool:
    """Whether the last step has a gradient of each parameter that is trained, and nothing else has moved before it."""
    rests = case.unused or case.steps[-1].skipped or any(block.kind == "experts" for block in case.blocks)
    # Updates come while the next step is awaited.
    later = case.strategy[0] == "I" or "paro_overlap_updates" in case.zero
    return not (rests or later or case.events() or case.lossy or case.exact) and all(ours.applied)
