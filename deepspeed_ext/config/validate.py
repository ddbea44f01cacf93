# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Our keys of a raw section, one by one and beside the stage: every value that is refused, with what to write."""

from collections.abc import Callable, Mapping
from typing import Any

from deepspeed_ext.config.keys import (
    CACHE_BYTES,
    DECISION,
    FASTEST,
    GROUP_SIZE,
    LOCO,
    MEMORY,
    MICRO_STEP,
    OF_FASTEST,
    OURS,
    OVERLAP_UPDATES,
    REMOVED,
    SECTION,
    STRATEGY,
    is_count,
    keys_of_strategies,
    our_keys,
)
from deepspeed_ext.config.normalize import STRATEGY_OF_STAGE
from deepspeed_ext.config.outer import check_outer
from deepspeed_ext.strategy import STRATEGIES, Strategy, parse_strategy
from deepspeed_ext.values import must_be, no_key


def check_top_level(config: Mapping[str, Any]) -> None:
    """Refuse our keys outside their section, where DeepSpeed would ignore them.

    Raises:
        ValueError: one is there.
    """
    for key in our_keys(config):
        raise ValueError(f"{key!r} is at the top level of the configuration; it belongs into {SECTION}.")


def check_section(section: Mapping[str, Any]) -> Strategy | None:
    """Validate our keys of a normalized ``zero_optimization`` and return the strategy; None if it is the fastest.

    Raises:
        ValueError: unknown, missing, mistyped or contradicting values; one paragraph with what was expected, what
            was given and the key to change.
    """
    _check_names(section)
    strategy = _parse_strategy(section)
    if GROUP_SIZE in section and not is_count(section[GROUP_SIZE]):
        expected, hint = (
            "an integer of at least 1 (ranks in a group)",
            "Leave it out for the number of ranks per node.",
        )
        raise must_be(f"{SECTION}.{GROUP_SIZE}", expected, section[GROUP_SIZE], hint)
    if not isinstance(section.get(OVERLAP_UPDATES, False), bool):
        raise must_be(f"{SECTION}.{OVERLAP_UPDATES}", "true or false", section[OVERLAP_UPDATES])
    cache = section.get(CACHE_BYTES, 0)
    if not is_count(cache, least=0):
        raise must_be(f"{SECTION}.{CACHE_BYTES}", "an integer of at least 0 (bytes on each device)", cache)
    check_outer(section, strategy)
    stage = section.get("stage")
    if strategy is None:
        if isinstance(stage, bool) or stage not in (None, 0, *STRATEGY_OF_STAGE):
            raise ValueError(f"{SECTION}.stage must be 1, 2 or 3 (or absent) with {STRATEGY} fastest, got {stage!r}.")
    elif stage not in (None, 0, strategy.stage):
        raise ValueError(
            f"{SECTION}.stage contradicts {SECTION}.{STRATEGY}: {strategy.name} places p = {strategy.p.name}, "
            f"g = {strategy.g.name}, which is stage {strategy.stage}, got stage {stage!r}. "
            f"Set {SECTION}.stage to {strategy.stage}."
        )
    return strategy


def _check_names(section: Mapping[str, Any]) -> None:
    for key in our_keys(section):
        if key not in (*OURS, LOCO):
            raise no_key(SECTION, key, (*OURS, *REMOVED), "the keys of deepspeed_ext")
    if STRATEGY not in section:
        alone = keys_of_strategies(section)[0]
        raise ValueError(
            f"{SECTION}.{alone} is set ({section[alone]!r}) without {SECTION}.{STRATEGY}: "
            f"add a strategy, one of {', '.join(STRATEGIES)}, or remove {alone}."
        )


def _parse_strategy(section: Mapping[str, Any]) -> Strategy | None:
    """Return the strategy of a section that has one; None for the fastest, whose own keys are validated then."""
    if section[STRATEGY] != FASTEST:
        for key in OF_FASTEST:
            if key in section:
                raise ValueError(
                    f"{SECTION}.{key} is for {STRATEGY} {FASTEST}, got {STRATEGY} {section[STRATEGY]!r}. Remove {key}."
                )
        return parse_strategy(section[STRATEGY], f", or {FASTEST}")
    memory, file, seconds = section.get(MEMORY), section.get(DECISION), section.get(MICRO_STEP)
    if MEMORY in section and not _is_number(memory, lambda number: number > 0):
        hint = "Leave it out for a part of the device's free memory."
        raise must_be(f"{SECTION}.{MEMORY}", "a number above 0 (GB of each rank for model states)", memory, hint)
    if DECISION in section and not (isinstance(file, str) and file):
        raise must_be(f"{SECTION}.{DECISION}", "the path of a file", file)
    if MICRO_STEP in section and not _is_number(seconds, lambda number: number >= 0):
        hint = "Leave it out for an estimate."
        raise must_be(
            f"{SECTION}.{MICRO_STEP}", "a number of at least 0 (seconds of forward and backward)", seconds, hint
        )
    return None


def _is_number(value: Any, allowed: Callable[[float], bool]) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and allowed(value)
