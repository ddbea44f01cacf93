# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Writes the implied stage into a configuration, for Accelerate, HF Trainer, TRL and Lightning, which read it.

A strategy implies the stage, so DeepSpeed itself does not need it. Frameworks look it up in their own dictionary:
Accelerate before the model is built, to decide on ``zero.Init``, and again when it saves. If a user omits the stage,
we write it there: for Accelerate and frameworks based on it, before Accelerate reads it; for others, when DeepSpeed
parses it. (Lightning decides on ``zero.Init`` before that.)
"""

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from deepspeed_ext.config.keys import FASTEST, SECTION, STRATEGY, keys_of_strategies, our_keys
from deepspeed_ext.config.model import ParoConfig
from deepspeed_ext.console import warn_on_rank_0
from deepspeed_ext.strategy import Placement, Strategy

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig
    from torch import nn

# Maps the id of a section to the section and the stage that we wrote into it. The reference keeps the section alive:
# otherwise another dictionary could get its id. The stage is a plain number, because it is saved with checkpoints.
_implied: dict[int, tuple[Mapping[str, Any], int]] = {}


def is_implied(section: Mapping[str, Any]) -> bool:
    """Whether the stage of a raw section was written by us."""
    registered, stage = _implied.get(id(section), (None, None))
    return registered is section and section.get("stage") == stage


def without_implied_stage(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a raw section without a stage of ours."""
    return {key: value for key, value in section.items() if key != "stage" or not is_implied(section)}


def imply_stage(section: Any, stage: int) -> None:
    """Write a stage into a raw section whose user omits it; a later call may replace it."""
    if isinstance(section, dict) and (section.get("stage") is None or is_implied(section)):
        section["stage"] = stage
        _implied[id(section)] = (section, stage)


def imply_stage_in_section(section: Any) -> None:
    """Write the stage that our keys imply into a raw section that omits it, before DeepSpeed parses the section.

    Raises:
        ValueError: the section is not valid, or asks for the fastest strategy, whose stage is not known yet.
    """
    if not isinstance(section, dict) or not keys_of_strategies(section):
        return
    if section.get("stage") is not None and (not is_implied(section) or section.get(STRATEGY) == FASTEST):
        return  # the user has set the stage, or the fastest strategy has been chosen
    keys = ParoConfig.from_section(without_implied_stage(section))
    if keys.paro_strategy is None:
        return
    if keys.named_strategy is None:
        raise ValueError(_missing_stage_message("which read it before the model is built"))
    imply_stage(section, keys.named_strategy.stage)


def read_with_stage(read: Callable[[Any], None], reader: Any) -> None:
    """Write the implied stage into the section of Accelerate's ``reader``, then call ``read``."""
    imply_stage_in_section(reader.config.get(SECTION))
    read(reader)


def forget_stage(section: Any) -> None:
    """Remove our stage from a section whose user has since removed our keys."""
    if isinstance(section, dict) and is_implied(section) and not our_keys(section):
        del section["stage"]


def refuse_unread_stage(config: "DeepSpeedConfig") -> None:
    """Refuse an omitted stage if Accelerate has already decided for another stage.

    With our seam in Accelerate, it has read the stage that we wrote. The seam is missing in a DeepSpeed with these
    features built in, and in an Accelerate that has changed.

    Args:
        config: parsed configuration.

    Raises:
        ValueError: Accelerate would treat sharded parameters as unsharded.
    """
    state = sys.modules.get("accelerate.state")
    if state is None or not state.is_initialized():
        return
    plugin = state.AcceleratorState().deepspeed_plugin
    section = config._param_dict[SECTION]
    if plugin is None or getattr(plugin, "deepspeed_config", None) is not config._param_dict:
        return
    stage = section.get("stage")
    if stage is not None and not is_implied(section):
        return
    if plugin.zero_stage != stage and 3 in (plugin.zero_stage, stage or 3):
        raise ValueError(_missing_stage_message(f"which already use stage {plugin.zero_stage}", stage))


def warn_without_zero_init(config: "DeepSpeedConfig", strategy: Strategy, model: "nn.Module") -> None:
    """Warn on rank 0 if the strategy shards parameters, the stage was omitted, and the model was built unsharded.

    A framework that reads the stage before DeepSpeed does has then not used ``zero.Init``.
    """
    is_unsharded = not any(hasattr(param, "ds_id") for param in model.parameters())
    if strategy.p != Placement.N and is_unsharded and is_implied(config._param_dict[SECTION]):
        warn_on_rank_0(
            f"{SECTION}.{STRATEGY} {strategy} shards parameters, but the model was built without "
            f"deepspeed.zero.Init, so each rank held the full model. {SECTION}.stage is not set, so a framework that "
            f"reads it before DeepSpeed does not use zero.Init. Set {SECTION}.stage to {strategy.stage}."
        )


def _missing_stage_message(why: str, stage: int | None = None) -> str:
    key = f"{SECTION}.{STRATEGY}" if stage else f'{SECTION}.{STRATEGY} "{FASTEST}"'
    value = f"{stage}" if stage else "1, 2 or 3: the fastest strategy of that stage is chosen"
    return f"{key} needs {SECTION}.stage with Accelerate, HF Trainer and TRL, {why}. Set {SECTION}.stage to {value}."
