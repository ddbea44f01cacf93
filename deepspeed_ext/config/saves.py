# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Our keys in the section ``checkpoint``, validated."""

import os
from typing import TYPE_CHECKING, Any

from deepspeed_ext.config.keys import SECTION, STRATEGY, is_count
from deepspeed_ext.config.normalize import STRATEGY_OF_STAGE
from deepspeed_ext.values import must_be

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig

CHECKPOINT = "checkpoint"
ASYNC_SAVE = "async_save"
MEMORY_FOLDER = "memory_folder"
MEMORY_COPIES = "memory_copies"
_SHARED_MEMORY = "/dev/shm"


def saves_aside(config: "DeepSpeedConfig") -> bool:
    """Return whether saves go on beside the training.

    Raises:
        ValueError: the key is neither true nor false, or another writer is configured.
    """
    if not _flag(config, ASYNC_SAVE, False):
        return False
    checkpoint = config._param_dict[CHECKPOINT]
    if checkpoint.get("writer") is not None or config.datastates_config.enabled:
        given = "datastates_ckpt" if checkpoint.get("writer") is None else f"{CHECKPOINT}.writer"
        raise ValueError(
            f"{CHECKPOINT}.{ASYNC_SAVE} cannot be combined with {given}, which writes checkpoints its own way. Remove "
            f"one of the two."
        )
    return True


def memory_folder(config: "DeepSpeedConfig") -> str:
    """Return where saves in memory are, of all jobs.

    Raises:
        ValueError: the key is no path.
    """
    found = _section(config).get(MEMORY_FOLDER, _SHARED_MEMORY)
    if not isinstance(found, str) or not os.path.isabs(found):
        raise must_be(f"{CHECKPOINT}.{MEMORY_FOLDER}", "an absolute path", found)
    return found


def memory_copies(config: "DeepSpeedConfig") -> int:
    """Return in how many other groups each file of a save in memory is copied.

    Raises:
        ValueError: the key is no count.
    """
    found = _section(config).get(MEMORY_COPIES, 1)
    if not is_count(found, least=0):
        raise must_be(f"{CHECKPOINT}.{MEMORY_COPIES}", "an integer of at least 0", found)
    return int(found)


def check_saves(config: "DeepSpeedConfig") -> None:
    """Refuse bad values of our keys, beside a strategy.

    Raises:
        ValueError: one is of another type, or cannot be combined with another key.
    """
    saves_aside(config)
    memory_folder(config)
    memory_copies(config)


def refuse_without_strategy(config: "DeepSpeedConfig") -> None:
    """Refuse our keys in an engine that has no strategy, where they would do nothing.

    Raises:
        ValueError: one is there.
    """
    asked = [key for key in (ASYNC_SAVE, MEMORY_FOLDER, MEMORY_COPIES) if key in _section(config)]
    if asked:
        stages = ", ".join(f"{name} is stage {stage}" for stage, name in STRATEGY_OF_STAGE.items() if stage)
        raise ValueError(
            f"{CHECKPOINT}.{asked[0]} needs a strategy: set {SECTION}.{STRATEGY} ({stages}), or remove the key."
        )


def _section(config: "DeepSpeedConfig") -> dict[str, Any]:
    return config._param_dict.get(CHECKPOINT) or {}


def _flag(config: "DeepSpeedConfig", key: str, default: bool) -> bool:
    found = _section(config).get(key, default)
    if not isinstance(found, bool):
        raise must_be(f"{CHECKPOINT}.{key}", "true or false", found)
    return found
