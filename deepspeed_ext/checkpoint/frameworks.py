# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of HF Trainer and Accelerate whose DeepSpeed files are incomplete.

Note [Framework checkpoints]
    Trainer and Accelerate treat a checkpoint as complete when ``engine.save_checkpoint`` returns. An asynchronous save
    is complete later, when its file ``latest`` exists. If the job is killed in between, the newest folder cannot be
    loaded. So with a strategy:

    - A resume loads the newest complete checkpoint.
    - Trainer's ``save_total_limit`` counts complete checkpoints, so the last of them is never deleted.
    - The end of training waits for the last save. Accelerate waits for a save before it deletes older checkpoints.

    Otherwise, training does not wait for saves.

This file imports neither DeepSpeed nor the frameworks, because its functions also run without a strategy.
"""

import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deepspeed_ext.config.keys import SECTION, keys_of_strategies

_logger = logging.getLogger("DeepSpeed")  # ``deepspeed.utils.logger``
_LATEST = "latest"  # as in ``folder.py``, which imports DeepSpeed
_TRAINER_STATE = "trainer_state.json"
_RANDOM_STATES = "rng_state*.pth"  # written by Trainer, except with ``save_only_model``


# HF Trainer ###############################################################################################


def last_checkpoint(get_last: Callable[[str], str | None], folder: str) -> str | None:
    """Return Trainer's newest complete checkpoint; None if there is none."""
    if not _trainer_has_strategy():
        return get_last(folder)
    numbered = _numbered_folders(Path(folder), r"checkpoint-(\d+)")
    return _choose_newest([path for path in numbered if not _is_incomplete(path)], numbered)


def rotate_checkpoints(
    rotate: Callable[..., None],
    output_dir: str,
    save_total_limit: int | None = None,
    best_model_checkpoint: str | None = None,
    use_mtime: bool = False,
    checkpoint_prefix: str = "checkpoint",
) -> None:
    """Delete old checkpoints as transformers 5 does, but count only complete ones."""
    limit = _adjusted_limit(save_total_limit, best_model_checkpoint, output_dir)
    rotate(output_dir, limit, best_model_checkpoint, use_mtime, checkpoint_prefix)


def rotate_checkpoints_of(
    rotate: Callable[..., None], trainer: Any, use_mtime: bool = False, output_dir: str | None = None
) -> None:
    """Delete old checkpoints as transformers 4 does, but count only complete ones."""
    arguments = trainer.args
    limit = arguments.save_total_limit
    folder = arguments.output_dir if output_dir is None else output_dir
    arguments.save_total_limit = _adjusted_limit(limit, trainer.state.best_model_checkpoint, folder)
    try:
        rotate(trainer, use_mtime, output_dir)
    finally:
        arguments.save_total_limit = limit


def save_checkpoint(save: Callable[..., None], trainer: Any, model: Any, trial: Any) -> None:
    """Save a checkpoint of Trainer; if the save is asynchronous, the end of training waits for it."""
    save(trainer, model, trial)
    files: Any = getattr(trainer.deepspeed, "checkpoint_engine", None)
    if getattr(files, "async_saves", None) is not None:
        trainer.remove_callback(finish_saves())  # of a previous engine
        trainer.add_callback(finish_saves()(files))


@functools.cache
def finish_saves() -> type:
    """Return the class of a Trainer callback that waits for a save at the end of training: before Trainer loads its
    best checkpoint, deletes others, and returns."""
    from transformers import TrainerCallback

    class FinishSaves(TrainerCallback):
        def __init__(self, files: Any) -> None:
            self._files = files

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if control.should_training_stop:
                self._files.finish()  # raises SaveFailed on all ranks

        on_evaluate = on_save = on_epoch_end

    return FinishSaves


def _trainer_has_strategy() -> bool:
    """Return whether the DeepSpeed configuration in Trainer's arguments has keys of strategies."""
    integration = sys.modules.get("transformers.integrations.deepspeed")
    config = None if integration is None else integration.deepspeed_config()
    return bool(keys_of_strategies((config or {}).get(SECTION)))


def _is_incomplete(checkpoint: Path) -> bool:
    """Return whether Trainer cannot resume a checkpoint because its save was killed or is still running."""
    if not (checkpoint / _TRAINER_STATE).is_file():
        return True
    return not (checkpoint / _LATEST).is_file() and any(checkpoint.glob(_RANDOM_STATES))


def _adjusted_limit(limit: int | None, best: str | None, folder: str) -> int | None:
    """Return how many checkpoints Trainer may keep, so that the limit counts only complete ones."""
    if limit is None or limit <= 0 or not _trainer_has_strategy():
        return limit
    incomplete = sum(_is_incomplete(path) for path in _numbered_folders(Path(folder), r"checkpoint-(\d+)"))
    return max(limit, 2 if best else 1) + incomplete if incomplete else limit


# Accelerate ###############################################################################################


def save_state(save: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """Save a state of Accelerate, which first deletes older ones: the previous save must be complete by then."""
    for files in _checkpoint_files(accelerator):
        files.finish()
    return save(accelerator, *args, **kwargs)


def load_state(
    load: Callable[..., Any], accelerator: Any, input_dir: str | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Load a state of Accelerate: without a folder, the newest complete one with an automatic name."""
    all_files = list(_checkpoint_files(accelerator))
    for files in all_files:
        files.finish()
    if input_dir is None and all_files and accelerator.project_configuration.automatic_checkpoint_naming:
        numbered = _numbered_folders(Path(accelerator.project_dir, "checkpoints"), r"checkpoint_(\d+)")
        input_dir = _choose_newest([path for path in numbered if (path / _LATEST).is_file()], numbered)
    return load(accelerator, input_dir, *args, **kwargs)


def _checkpoint_files(accelerator: Any) -> Iterator[Any]:
    """Yield the ``CheckpointFiles`` of each engine with a strategy."""
    for model in accelerator._models:
        files = getattr(model, "checkpoint_engine", None)
        if hasattr(files, "async_saves"):
            yield files


# Both #####################################################################################################


def _numbered_folders(folder: Path, pattern: str) -> list[Path]:
    """Return the subfolders whose names match a pattern with a number, in the order of the numbers."""
    matches = [(match, path) for path in folder.iterdir() if (match := re.fullmatch(pattern, path.name))]
    return [path for _, path in sorted((int(match[1]), path) for match, path in matches if path.is_dir())]


def _choose_newest(complete: list[Path], all_files: list[Path]) -> str | None:
    """Return the newest complete checkpoint, with a warning if there are newer ones; None if there is none."""
    skipped = all_files[all_files.index(complete[-1]) + 1 :] if complete else all_files
    if skipped and os.environ.get("RANK", "0") == "0":  # there may be no process group yet
        resumed = f"resuming from {complete[-1]}" if complete else "there is no complete checkpoint"
        names = ", ".join(path.name for path in skipped)
        _logger.warning(f"deepspeed_ext: the saves {names} in {skipped[0].parent} are incomplete: {resumed}.")
    return str(complete[-1]) if complete else None
