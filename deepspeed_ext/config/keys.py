# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Names of keys in ``zero_optimization``, and functions that find our keys in a raw section.

Each of our keys is a field of ``model.ParoConfig``.
"""

from collections.abc import Mapping
from typing import Any

SECTION = "zero_optimization"
STRATEGY = "paro_strategy"
FASTEST = "fastest"  # value of STRATEGY: choose when the model is known
GROUP_SIZE = "paro_group_size"
OVERLAP_UPDATES = "paro_overlap_updates"
QUANTIZED_UPDATES = "paro_quantized_updates"
OUTER = "paro_outer_optimizer"
REDUCE = "paro_reduce"
MODULES = "paro_modules"
FILL = "fill"  # value of MODULES: as many as fit in MEMORY
MICRO_BATCHES = "paro_micro_batches"
MEASURED = "measured"  # value of MICRO_BATCHES: from the pace of each group
WEIGHTS = "paro_weights"
CACHE_BYTES = "paro_parameter_cache_bytes"
MEMORY = "paro_memory_gb"
DECISION = "paro_decision_file"
MICRO_STEP = "paro_micro_step_seconds"
FASTEST_KEYS = (MEMORY, DECISION, MICRO_STEP)
LEAF_BYTES = "stage3_leaf_bytes"
REPORT = "paro_report"  # the only one of our keys that also works with plain stages

# DeepSpeed's own until 0.19.6 (MiCS) and 0.19.7 (LoCo). Since then it refuses them, and they are ours.
MICS_SIZE = "mics_shard_size"
MICS_HIERARCHICAL = "mics_hierarchical_params_gather"
LOCO = "zeropp_loco_param"
REMOVED_KEYS = (MICS_SIZE, MICS_HIERARCHICAL, LOCO)

# DeepSpeed's keys.
STAGE = "stage"
THRESHOLD = "stage3_module_granularity_threshold"
MAX_LIVE = "stage3_max_live_parameters"
QUANTIZED = "zero_quantized_gradients"  # DeepSpeed's for stage 3; ours with a strategy

_PREFIXES = ("paro", "stage3_leaf")


def our_keys(section: Any) -> list[str]:
    """Return our keys in a raw section, including misspelled ones."""
    if not isinstance(section, Mapping):
        return []
    return [key for key in section if str(key).lower().startswith(_PREFIXES) or key in REMOVED_KEYS]


def keys_of_strategies(section: Any) -> list[str]:
    """Return the ``our_keys`` that need or imply a strategy."""
    return [key for key in our_keys(section) if key != REPORT]


def strategy_key(section: Mapping[str, Any]) -> str:
    """Return the key by which a user has selected a strategy: ours, or the stage."""
    if {STRATEGY, MICS_SIZE} & set(section):
        return STRATEGY
    return next((key for key in (LOCO, LEAF_BYTES, QUANTIZED_UPDATES) if key in section), STAGE)


def configured_value(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key of ``zero_optimization`` in a raw configuration; None if it is not set."""
    section = config.get(SECTION)
    return section.get(key) if isinstance(section, Mapping) else None  # the section may be true, for stage 1


def drop_removed_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration without the keys of MiCS and LoCo, which DeepSpeed would refuse."""
    section = config.get(SECTION)
    if not isinstance(section, Mapping) or not set(REMOVED_KEYS) & set(section):
        return config
    return {**config, SECTION: {key: value for key, value in section.items() if key not in REMOVED_KEYS}}


def check_top_level(config: Mapping[str, Any]) -> None:
    """Refuse our keys at the top level, at which DeepSpeed would ignore them.

    Raises:
        ValueError: one of our keys is there.
    """
    for key in our_keys(config):
        raise ValueError(f"{key!r} is at the top level of the configuration; move it into {SECTION}.")
