# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A script with HF Trainer and asynchronous saves, on one rank, that may be killed while a save is being written.

Its arguments are the folder of the checkpoints, and the step whose save is never completed, or 0. It resumes if the
folder is there. What it prints at the end is JSON.
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed_ext.checkpoint.files as checkpoint_files
from tests.harness.frameworks import configurations, tiny, trainers

SECONDS = 0.5  # that the writer waits before each file: training is far ahead of it
LAST = 8


def delay_writes(step: int) -> None:
    """Delay the files of all saves, those of one step forever."""
    write = checkpoint_files.CheckpointFiles._write

    def delayed(self: Any, state: object, path: str) -> None:
        time.sleep(1e6 if f"checkpoint-{step}/" in path else SECONDS)
        write(self, state, path)

    checkpoint_files.CheckpointFiles._write = delayed  # type: ignore[method-assign]


def main(folder: str, killed_at: int) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

    class Kill(TrainerCallback):  # type: ignore[misc]
        begun = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.begun = state.global_step

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)

    resume = Path(folder).is_dir()
    zero = configurations.placed("NIG", paro_group_size=1)
    more: dict[str, Any] = {"max_steps": LAST, "save_total_limit": 1, "eval_strategy": "steps", "eval_steps": 2}
    more |= {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    config = {**configurations.for_trainer(zero), "checkpoint": {"async_save": True}}
    arguments = trainers.arguments(TrainingArguments, zero, folder, **more, deepspeed=config)
    delay_writes(killed_at)
    data = {"train_dataset": tiny.sequences(64), "eval_dataset": tiny.sequences(8)}
    kill = Kill()
    trainer = Trainer(
        model=tiny.make_model(), args=arguments, data_collator=default_data_collator, callbacks=[kill], **data
    )
    trainer.train(resume_from_checkpoint=resume)
    every = sorted(path.name for path in Path(folder).iterdir())
    complete = [name for name in every if Path(folder, name, "latest").is_file()]
    weights = b"".join(param.detach().numpy().tobytes() for param in trainer.model.parameters())
    found = {"begun": kill.begun, "checkpoints": every, "complete": complete}
    print(json.dumps({**found, "weights": hashlib.sha256(weights).hexdigest()}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
