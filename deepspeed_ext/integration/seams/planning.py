# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Decides on a strategy when an engine gets its model, and calls plugins."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from deepspeed_ext.deepspeed_types import Engine


def decide_on_a_strategy(configure: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(configure)
    def _configure_distributed_model(self: "Engine", model: "nn.Module") -> None:
        from deepspeed_ext.config.section import undecided
        from deepspeed_ext.integration import plugins

        if undecided(self._config):
            from deepspeed_ext.planner.fastest import decide_for

            decide_for(self, model)
        configure(self, model)
        plugins.engine_ready(self)

    return _configure_distributed_model
