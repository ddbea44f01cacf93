# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What Accelerate, HF Trainer, TRL and Lightning read of a configuration themselves: the stage.

Plain DeepSpeed does not need it beside a strategy, which implies it. Frameworks look it up in the dictionary that
they keep: Accelerate before the model is made, to decide on ``zero.Init``, and again when it saves. So where a user
leaves it out, we write it there; for Accelerate, and all that is built on it, before it looks.
"""

import sys
from typing import TYPE_CHECKING, Any

from deepspeed_ext.config import FASTEST, SECTION, STRATEGY, ImpliedStage, check_section, our_keys, resolved

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
    if not isinstance(section.get("stage", ImpliedStage()), ImpliedStage):
        return
    if stage is None:
        ours = resolved(section)
        if not our_keys(ours):
            return
        strategy = check_section(ours)
        if strategy is None:
            raise ValueError(_without_stage("which decide before the model is known"))
        stage = strategy.stage
    section["stage"] = ImpliedStage(stage)


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
    stage = section.get("stage", ImpliedStage())
    if isinstance(stage, ImpliedStage) and plugin.zero_stage != stage and 3 in (plugin.zero_stage, stage or 3):
        raise ValueError(_without_stage(f"which have decided for stage {plugin.zero_stage} already", stage))


def _without_stage(why: str, stage: int = 0) -> str:
    given = f"{SECTION}.{STRATEGY}" if stage else f'{SECTION}.{STRATEGY} "{FASTEST}"'
    value = f"{int(stage)}" if stage else "1, 2 or 3: the fastest strategy of that stage is chosen"
    return f"{given} needs {SECTION}.stage with Accelerate, HF Trainer and TRL, {why}. Set {SECTION}.stage to {value}."
