# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A callback for HF Trainer: the end of a training waits for its last save.

See Note [Checkpoints of frameworks] in ``frameworks.py``.
"""

from typing import Any

from transformers import TrainerCallback

from deepspeed_ext.checkpoint.files import CheckpointFiles


class FinishSaves(TrainerCallback):
    """Waits for a save before Trainer loads its best checkpoint, deletes others, and returns.

    Args:
        files: of the engine that trains.
    """

    def __init__(self, files: CheckpointFiles) -> None:
        self._files = files

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by Trainer on each rank. If it is about to end, wait.

        Raises:
            SaveFailed: on all ranks; the save has failed.
        """
        if control.should_training_stop:
            self._files.finish()

    on_evaluate = on_save = on_epoch_end
