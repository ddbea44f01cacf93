# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A raw section in which keys that imply a strategy have one: MiCS's, LoCo's, quantized updates, the budget of leaf
modules."""

from collections.abc import Mapping
from typing import Any

from deepspeed_ext.config.keys import (
    GROUP_SIZE,
    KEYS,
    LEAF_BYTES,
    LOCO,
    MICS_HIERARCHICAL,
    MICS_KEYS,
    MICS_SIZE,
    MOST_LIVE,
    OUTER,
    QUANTIZED,
    QUANTIZED_UPDATES,
    SECTION,
    STRATEGY,
    THRESHOLD,
    is_count,
    our_keys,
)
from deepspeed_ext.loco.settings import LocoSettings, UpdateSettings
from deepspeed_ext.strategy import STRATEGIES, Placement
from deepspeed_ext.values import must_be

STRATEGY_OF_STAGE = {1: "NNG", 2: "NGG", 3: "GGG"}  # the strategy that is a stage of DeepSpeed's


def normalized(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a raw section with a strategy in the place of keys that imply one.

    Args:
        section: as its user wrote it, without a stage of ours.

    Raises:
        ValueError: a key of MiCS, LoCo, quantized updates or leaf modules is not valid.
    """
    revived = revive_mics(section)
    return with_quantized_updates(with_loco(with_leaf_bytes(revived))) if our_keys(revived) else revived


def revive_mics(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a raw section with the keys of MiCS replaced by ours: III, with that group size.

    Raises:
        ValueError: no such size, or our own keys beside it.
    """
    revived = {key: value for key, value in section.items() if key not in MICS_KEYS}
    size, hierarchical = section.get(MICS_SIZE, -1), section.get(MICS_HIERARCHICAL, False)
    if not is_count(size) and (size != -1 or not isinstance(size, int)):
        expected = "an integer of at least 1 (ranks over which model states are sharded), or -1 for off"
        raise must_be(f"{SECTION}.{MICS_SIZE}", expected, size)
    if size == -1:
        if hierarchical:
            raise ValueError(f"{SECTION}.{MICS_HIERARCHICAL} needs {SECTION}.{MICS_SIZE}; got only the first.")
        return revived
    # III's sums may be quantized, and III may have an outer optimizer.
    given = [key for key in KEYS if key in section and key not in (QUANTIZED_UPDATES, OUTER)]
    if given:
        raise ValueError(
            f"{SECTION}.{MICS_SIZE} {size} means {STRATEGY} III with {GROUP_SIZE} {size}, but {', '.join(given)} is "
            f"set as well ({', '.join(repr(section[key]) for key in given)}). Keep one of the two."
        )
    if section.get("stage", 3) not in (0, 3):
        raise ValueError(f"{SECTION}.{MICS_SIZE} needs {SECTION}.stage 3, got {section['stage']!r}.")
    if hierarchical:
        from deepspeed.utils import log_dist

        log_dist(
            f"deepspeed_ext: {SECTION}.{MICS_HIERARCHICAL} is implied: parameters are gathered inside groups only",
            ranks=[0],
        )
    return {**revived, STRATEGY: "III", GROUP_SIZE: size}


def with_leaf_bytes(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a raw section in which a budget of leaf modules other than 0 has a strategy: if none is given GGG.

    Raises:
        ValueError: the budget is no number of bytes, parameters are not sharded, or the threshold is given as well.
    """
    section = dict(section)
    if LEAF_BYTES not in section:
        return section
    budget = section[LEAF_BYTES]
    if not isinstance(budget, int) or budget < 0:
        expected = f"a number of bytes (an integer of at least 0, 0 for off), or true for the budget that {MOST_LIVE}"
        raise must_be(f"{SECTION}.{LEAF_BYTES}", f"{expected} gives", budget)
    if not budget:
        del section[LEAF_BYTES]
        return section
    threshold = section.get(THRESHOLD, 0)
    if threshold:
        raise ValueError(
            f"{SECTION}.{LEAF_BYTES} ({budget!r}) and {SECTION}.{THRESHOLD} ({threshold!r}) both choose leaf modules. "
            f"Remove one of the two."
        )
    if STRATEGY in section:
        given = section[STRATEGY]
        if not (isinstance(given, str) and given[:1].upper() == Placement.N.name):
            return section
        raise ValueError(
            f"{SECTION}.{LEAF_BYTES} needs sharded parameters, but {STRATEGY} is {given!r}. Use a strategy with "
            f"p = I or G, or remove {LEAF_BYTES}."
        )
    stage = section.get("stage")
    if stage != 3:
        raise ValueError(
            f"{SECTION}.{LEAF_BYTES} needs {SECTION}.stage 3, or a {STRATEGY} with p = I or G, got stage {stage!r}."
        )
    return {**section, STRATEGY: STRATEGY_OF_STAGE[3]}


def with_loco(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a raw section in which LoCo's key says all about it, and with a strategy: if none is given the stage's.

    Raises:
        ValueError: the key's value is wrong, contradicts ``zero_quantized_gradients``, or nothing says what is
            sharded.
    """
    section = dict(section)
    quantized = section.pop(QUANTIZED, None)
    if LOCO not in section:
        return {**section, LOCO: {"error_feedback": False}} if quantized else section
    LocoSettings.parse(section[LOCO])
    if quantized is False:
        raise ValueError(
            f"{SECTION}.{LOCO} implies {SECTION}.{QUANTIZED}, which is set to false. Remove one of the two."
        )
    if STRATEGY in section:
        return section
    stage = section.get("stage")
    if isinstance(stage, bool) or stage not in (0, *STRATEGY_OF_STAGE):
        raise ValueError(
            f"{SECTION}.{LOCO} needs {SECTION}.stage 1, 2 or 3, or {SECTION}.{STRATEGY}, got stage {stage!r}."
        )
    return {**section, STRATEGY: STRATEGY_OF_STAGE.get(stage, "NNG")}


def with_quantized_updates(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a raw section in which the key of quantized updates has a strategy: if none is given the stage's.

    Raises:
        ValueError: the key's value is wrong, or it is alone with a stage that has nothing to which updates could be
            sent as differences, or that says nothing.
    """
    section = dict(section)
    if QUANTIZED_UPDATES not in section:
        return section
    UpdateSettings.parse(section[QUANTIZED_UPDATES])
    if STRATEGY in section:
        return section
    stage = section.get("stage")
    possible = [stage for stage, name in STRATEGY_OF_STAGE.items() if STRATEGIES[name].p != Placement.G]
    if isinstance(stage, bool) or stage not in (0, *possible):
        raise ValueError(
            f"{SECTION}.{QUANTIZED_UPDATES} needs {SECTION}.stage {' or '.join(map(str, possible))}, or a "
            f"{SECTION}.{STRATEGY} with p = N or I, got stage {stage!r}."
        )
    return {**section, STRATEGY: STRATEGY_OF_STAGE.get(stage, "NNG")}
