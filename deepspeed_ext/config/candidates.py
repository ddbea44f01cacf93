# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The strategies that a configuration leaves to choose from where it asks for the fastest."""

import copy
from typing import TYPE_CHECKING

from deepspeed_ext.config.implied_stage import as_written
from deepspeed_ext.config.keys import FASTEST, OF_FASTEST, SECTION, STRATEGY
from deepspeed_ext.config.refused import refuse_beside
from deepspeed_ext.config.section import parse_section
from deepspeed_ext.strategy import STRATEGIES, Strategy

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig


def possible_strategies(config: "DeepSpeedConfig") -> list[Strategy]:
    """Return the strategies from which a parsed configuration leaves to choose.

    Raises:
        ValueError: there is none; with the reason for each.
    """
    found: list[Strategy] = []
    reasons: dict[str, list[str]] = {}
    for name, strategy in STRATEGIES.items():
        try:
            decided(config, strategy)
            found.append(strategy)
        except (ValueError, AssertionError) as error:
            reasons.setdefault(str(error).replace(name, "it"), []).append(name)
    if not found:
        why = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
        raise ValueError(f"{SECTION}.{STRATEGY} {FASTEST} leaves no strategy to choose from. {why}")
    return found


def decided(config: "DeepSpeedConfig", strategy: Strategy) -> "DeepSpeedConfig":
    """Return a parsed configuration that asks for the fastest, with this strategy instead.

    Raises:
        ValueError: what is configured beside it contradicts it.
        AssertionError: DeepSpeed's own checks find such a thing.
    """
    written = as_written(config._param_dict[SECTION])
    section = {key: value for key, value in written.items() if key not in OF_FASTEST} | {STRATEGY: strategy.name}
    # Not parsed as a whole: batch sizes were settled with the number of ranks that was known then.
    found = copy.copy(config)
    found._param_dict = {**config._param_dict, SECTION: section}
    found.zero_config = parse_section(section)
    found.zero_optimization_stage = found.zero_config.stage
    found.zero_enabled = True
    found.strategy_was_chosen = True
    refuse_beside(found, strategy)
    found._do_error_check()
    return found
