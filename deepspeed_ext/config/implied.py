# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What Accelerate, HF Trainer, TRL and Lightning read of a configuration themselves: the stage.

Plain DeepSpeed does not need it beside a strategy, which implies it. Frameworks look it up in the dictionary that
they keep: Accelerate before the model is made, to decide on ``zero.Init``, and again when it saves. So where a user
leaves it out, we write it there: for Accelerate, and all that is built on it, before it looks; for others when
DeepSpeed reads it. (Lightning decides on ``zero.Init`` before that.)
"""

import logging
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from deepspeed_ext.config.keys import FASTEST, SECTION, STRATEGY, keys_of_strategies, our_keys
from deepspeed_ext.config.model import ParoConfig
from deepspeed_ext.strategy import Placement, Strategy

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig
    from torch import nn

# By id: sections into which we have written the stage that was left out, and what it was. They are kept, so that no
# other dictionary gets the id. The stage itself is a plain number, for it is saved with checkpoints.
_implied: dict[int, tuple[Mapping[str, Any], int]] = {}


def is_implied(section: Mapping[str, Any]) -> bool:
    """Whether the stage of a raw section was written by us."""
    known, stage = _implied.get(id(section), (None, None))
    return known is section and section.get("stage") == stage


def as_written(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a raw section as its user has written it."""
    return {key: value for key, value in section.items() if key != "stage" or not is_implied(section)}


def imply_stage(section: Any, stage: int) -> None:
    """Write a stage into a raw section that leaves it out, such that the next reader may imply another one."""
    if isinstance(section, dict) and (section.get("stage") is None or is_implied(section)):
        section["stage"] = stage
        _implied[id(section)] = (section, stage)


def imply_stage_of_raw(section: Any) -> None:
    """Write the stage that follows from our keys into a raw section that leaves it out, before DeepSpeed parses it.

    Raises:
        ValueError: the section is not valid, or asks for the fastest strategy, whose stage is not known yet.
    """
    if not isinstance(section, dict) or not keys_of_strategies(section):
        return
    if section.get("stage") is not None and (not is_implied(section) or section.get(STRATEGY) == FASTEST):
        return  # it is its user's, or was decided
    ours = ParoConfig.of(as_written(section))
    if ours.paro_strategy is None:
        return
    if ours.named_strategy is None:
        raise ValueError(_without_stage("which decide before the model is known"))
    imply_stage(section, ours.named_strategy.stage)


def read_with_stage(read: Callable[[Any], None], reader: Any) -> None:
    """Write the stage that is implied into the section of Accelerate's ``reader``, then make it ``read`` that."""
    imply_stage_of_raw(reader.config.get(SECTION))
    read(reader)


def forget_stage(section: Any) -> None:
    """Take the stage out of a section whose user has removed our keys from it since it was written."""
    if isinstance(section, dict) and is_implied(section) and not our_keys(section):
        del section["stage"]


def refuse_unread_stage(config: "DeepSpeedConfig") -> None:
    """Refuse a stage that nobody has written, where Accelerate has decided already, and for another stage.

    Where our seam in Accelerate is in place, Accelerate has read what we have written. A DeepSpeed that has these
    features built in has no such seam, nor has an Accelerate that has changed.

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


def warn_without_zero_init(config: "DeepSpeedConfig", strategy: Strategy, model: "nn.Module") -> None:
    """Warn on rank 0 where parameters are to be sharded, the stage was left out, and the model was made whole.

    A framework that reads the stage by itself, before DeepSpeed does, has then not used ``zero.Init``.
    """
    whole = not any(hasattr(param, "ds_id") for param in model.parameters())
    if strategy.p != Placement.N and whole and is_implied(config._param_dict[SECTION]):
        from deepspeed.utils import log_dist

        log_dist(
            f"deepspeed_ext: {SECTION}.{STRATEGY} {strategy.name} shards parameters, but the model was not made under "
            f"deepspeed.zero.Init, so each rank has held all of it. {SECTION}.stage is not set: a framework that "
            f"reads it before DeepSpeed does decides against zero.Init. Set {SECTION}.stage to {strategy.stage}.",
            ranks=[0],
            level=logging.WARNING,
        )


def _without_stage(why: str, stage: int | None = None) -> str:
    given = f"{SECTION}.{STRATEGY}" if stage else f'{SECTION}.{STRATEGY} "{FASTEST}"'
    value = f"{stage}" if stage else "1, 2 or 3: the fastest strategy of that stage is chosen"
    return f"{given} needs {SECTION}.stage with Accelerate, HF Trainer and TRL, {why}. Set {SECTION}.stage to {value}."
