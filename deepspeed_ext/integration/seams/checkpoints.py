# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""How a checkpoint is written, checked and read."""

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed_ext.deepspeed_types import Engine


def write_files_safely(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def create_checkpoint_engine(config_params: Any, *args: Any, **kwargs: Any) -> Any:
        from deepspeed_ext.config.saves import refuse_without_strategy, saves_aside
        from deepspeed_ext.config.section import active_strategy, require_optimizer

        if active_strategy(config_params) is None:
            refuse_without_strategy(config_params)
            return create(config_params, *args, **kwargs)
        require_optimizer(config_params)  # the engine has made it: of what comes later, this alone is called by all
        from deepspeed_ext.checkpoint.asynchronous import AsyncSaves
        from deepspeed_ext.checkpoint.files import wrap

        return wrap(create(config_params, *args, **kwargs), AsyncSaves if saves_aside(config_params) else None)

    return create_checkpoint_engine


def save_as_a_whole(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_checkpoint(self: "Engine", save_dir: str | None, *args: Any, **kwargs: Any) -> Any:
        if not save_dir or not _has_our_files(self):
            return save(self, save_dir, *args, **kwargs)
        from deepspeed_ext.checkpoint import saving

        return saving.save_checkpoint(save, self, save_dir, *args, **kwargs)

    return save_checkpoint


def load_what_was_checked(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_checkpoint(self: "Engine", load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        ours = _has_our_files(self)
        if not ours and not (self.load_universal_checkpoint() and self.zero_optimization()):
            return load(self, load_dir, tag, *args, **kwargs)
        from deepspeed_ext.checkpoint import loading

        by_us = loading.load_checkpoint if ours else loading.load_into_stock
        return by_us(load, self, load_dir, tag, *args, **kwargs)

    return load_checkpoint


def _has_our_files(engine: "Engine") -> bool:
    """Whether the engine has an optimizer of ours, and writes its files through us."""
    module = sys.modules.get("deepspeed_ext.zero.optimizer")  # whoever has made one has imported it
    if module is None or not isinstance(engine.optimizer, module.ParoOptimizer):
        return False
    from deepspeed_ext.checkpoint.files import CheckpointFiles

    return isinstance(engine.checkpoint_engine, CheckpointFiles)
