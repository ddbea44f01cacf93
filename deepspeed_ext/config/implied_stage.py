# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What Accelerate, HF Trainer, TRL and Lightning read of a configuration themselves: the stage.

Plain DeepSpeed does not need it beside a strategy, which implies it. Frameworks look it up in the dictionary that
they keep: Accelerate before the model is made, to decide on ``zero.Init``, and again when it saves. So where a user
leaves it out, we write it there: for Accelerate, and all that is built on it, before it looks; for others when
DeepSpeed reads it. (Lightning decides on ``zero.Init`` before that.)
"""

import sys
from typing import TYPE_CHECKING, Any

from deepspeed_ext.config.section import (
    FASTEST,
    SECTION,
    STRATEGY,
    check_section,
    imply,
    is_implied,
    our_keys,
    resolved,
)

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig


def imply_stage(section: Any, stage: int | None = None) -> None:
    """Write the stage into a section of ours that leaves it out.

    Args:
        section: raw, as the caller keeps it; changed in place.
        stage: what it is, if that is known; else it follows from the section.

    Raises:
        ValueError: the section is not valid, or asks for the fastest strategy, whose stage is not known yet.
    """
    if not isinstance(section, dict) or not our_keys(section):
        return
    if section.get("stage") is not None and not is_implied(section):
        return
    if stage is None:
        if is_implied(section) and section.get(STRATEGY) == FASTEST:
            return  # it was decided
        ours = resolved(section)
        if not our_keys(ours):
            return
        strategy = check_section(ours)
        if strategy is None:
            raise ValueError(_without_stage("which decide before the model is known"))
        stage = strategy.stage
    imply(section, stage)


def forget_stage(section: Any) -> None:
    """Take the stage out of a section whose user has removed our keys from it since it was written."""
    if isinstance(section, dict) and is_implied(section) and not our_keys(section):
        del section["stage"]


def refuse_unread_stage(config: "DeepSpeedConfig") -> None:
    """Refuse a stage that nobody has written, where Accelerate has decided already, and otherwise.

    Where our seam in Accelerate is in place it has read what we have written. It is not in a DeepSpeed that has these
    features built in, nor if Accelerate has changed.

    Args:
        config: parsed.

    Raises:
        ValueError: Accelerate would take sharded parameters for whole ones.
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
        raise ValueError(_without_stage(f"which have decided for stage {plugin.zero_stage} already", stage))


def _without_stage(why: str, stage: int | None = None) -> str:
    given = f"{SECTION}.{STRATEGY}" if stage else f'{SECTION}.{STRATEGY} "{FASTEST}"'
    value = f"{stage}" if stage else "1, 2 or 3: the fastest strategy of that stage is chosen"
    return f"{given} needs {SECTION}.stage with Accelerate, HF Trainer and TRL, {why}. Set {SECTION}.stage to {value}."
