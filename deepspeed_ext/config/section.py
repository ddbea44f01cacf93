# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The parsed section: DeepSpeed's class with our keys as fields.

DeepSpeed parses a section without ``our_keys`` with its own class.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import ConfigDict, PrivateAttr

from deepspeed_ext.config.implied import imply_stage, without_implied_stage
from deepspeed_ext.config.keys import FASTEST, MICS_HIERARCHICAL, QUANTIZED, SECTION, STRATEGY, strategy_key
from deepspeed_ext.config.model import STRATEGY_OF_STAGE, ParoConfig
from deepspeed_ext.config.settings import SaveSettings
from deepspeed_ext.console import log_on_rank_0
from deepspeed_ext.strategy import Strategy, hyphenate

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig

_REMOVED_SAVE_KEY = "zero_order"  # of ``checkpoint``


class ParoZeroConfig(ParoConfig, DeepSpeedZeroConfig):
    """``zero_optimization`` with PaRO, or of an engine whose steps are recorded."""

    model_config = ConfigDict(strict=False)  # DeepSpeed's fields accept the same values as in its own class

    _has_optimizer: bool = PrivateAttr(default=False)


def parse_and_imply(section: dict[str, Any]) -> DeepSpeedZeroConfig:
    """Parse a raw section that has one of our keys, and write the implied stage into it for frameworks.

    Args:
        section: the caller's own dictionary.

    Raises:
        ValueError: see ``parse_section``.
    """
    parsed = parse_section(section)
    if isinstance(parsed, ParoZeroConfig) and parsed.named_strategy and parsed.stage != 0:
        imply_stage(section, parsed.named_strategy.stage)
    return parsed


def parse_section(section: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """Validate and parse a raw ``zero_optimization`` section that has one of our keys.

    Raises:
        ValueError: see ``ParoConfig.from_section``; for DeepSpeed's own keys, pydantic's error.
    """
    written = without_implied_stage(section)
    our_fields = ParoConfig.from_section(written)
    their_keys = {key: value for key, value in written.items() if key not in ParoConfig.model_fields}
    our_values = {key: getattr(our_fields, key) for key in our_fields.model_fields_set}
    if our_fields.paro_strategy is None:
        return (
            DeepSpeedZeroConfig(**their_keys)
            if our_fields.paro_report is None
            else ParoZeroConfig(**our_values, **their_keys)
        )
    if written.get(MICS_HIERARCHICAL):
        log_on_rank_0(f"{SECTION}.{MICS_HIERARCHICAL} is implied: parameters are gathered inside groups only")
    if their_keys.get("stage") == 0:
        log_on_rank_0(f"{SECTION}.{strategy_key(section)} has no effect at stage 0")
    their_keys.pop(QUANTIZED, None)  # replaced by LoCo's settings
    strategy = our_fields.named_strategy
    # The stage of the fastest strategy is not known yet: use a placeholder other than 0.
    stage = strategy.stage if strategy else 1
    # The user's own stage, in ``their_keys``, has precedence.
    return ParoZeroConfig(**{"stage": stage, **our_values, **their_keys})


def active_strategy(config: "DeepSpeedConfig") -> Strategy | None:
    """Return the strategy of a parsed configuration; None without our keys, at stage 0, or while undecided."""
    zero = config.zero_config
    return zero.named_strategy if isinstance(zero, ParoZeroConfig) and zero.stage != 0 else None


def record_optimizer(config: "DeepSpeedConfig") -> None:
    """Record in its parsed configuration that an engine has an optimizer for its strategy."""
    config.zero_config._has_optimizer = True


def require_optimizer(config: "DeepSpeedConfig") -> None:
    """Check that an engine has an optimizer for its strategy.

    Raises:
        RuntimeError: it has DeepSpeed's own, because other code has replaced the function that builds ours.
    """
    strategy = active_strategy(config)
    if strategy and not config.zero_config._has_optimizer:
        raise RuntimeError(
            f"{SECTION}.{STRATEGY} {strategy} has no effect: the engine's optimizer is DeepSpeed's own, "
            f"because other code has replaced or overridden DeepSpeedEngine._configure_zero_optimizer after "
            f"deepspeed_ext. Remove that code, or make its function call the function that it replaces."
        )


def wants_fastest(config: "DeepSpeedConfig") -> bool:
    """Whether a parsed configuration asks for the fastest strategy."""
    zero = config.zero_config
    return isinstance(zero, ParoZeroConfig) and zero.paro_strategy == FASTEST and zero.stage != 0


def offloads(section: Any) -> bool:
    """Whether a parsed ``offload_param`` or ``offload_optimizer`` section moves states off the device."""
    return getattr(section, "device", "none") != "none"


def save_settings(config: "DeepSpeedConfig") -> SaveSettings:
    """Return our keys in the section ``checkpoint`` of a configuration.

    Raises:
        ValueError: a value has another type, another writer is configured together with ``async_save``, or a removed
            key is set.
    """
    section = _save_keys(config)
    if _REMOVED_SAVE_KEY in (config._param_dict.get(SaveSettings.key) or {}):
        raise ValueError(
            f"{SaveSettings.key}.{_REMOVED_SAVE_KEY} has been removed, since all files have ZeRO's order now. Remove "
            f"the key."
        )
    settings = SaveSettings.parse(section)
    writer = (config._param_dict.get(SaveSettings.key) or {}).get("writer")
    if settings.async_save and (writer is not None or config.datastates_config.enabled):
        other = "datastates_ckpt" if writer is None else f"{SaveSettings.key}.writer"
        raise ValueError(
            f"{SaveSettings.key}.async_save cannot be combined with {other}, which writes checkpoints itself. "
            f"Remove one of the two."
        )
    return settings


def refuse_saves_without_strategy(config: "DeepSpeedConfig") -> None:
    """Refuse our keys of saves in an engine without a strategy, in which they would do nothing.

    Raises:
        ValueError: one of the keys is set.
    """
    for key in _save_keys(config):
        stages = ", ".join(f"{hyphenate(name)} is stage {stage}" for stage, name in STRATEGY_OF_STAGE.items())
        raise ValueError(
            f"{SaveSettings.key}.{key} needs a strategy: set {SECTION}.{STRATEGY} ({stages}), or remove the key."
        )


def _save_keys(config: "DeepSpeedConfig") -> dict[str, Any]:
    # The section may be null.
    section = config._param_dict.get(SaveSettings.key) or {}
    return {key: value for key, value in section.items() if key in SaveSettings.model_fields}
