# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A callback for the Trainer of transformers that exports weights every few steps, while training continues.

``trainer.add_callback(ExportWeights(trainer, "exports", steps=500))`` before ``trainer.train()``.
"""

from transformers import TrainerCallback

import deepspeed_ext


class ExportWeights(TrainerCallback):
    def __init__(self, trainer, folder, steps):
        self.trainer, self.folder, self.steps = trainer, folder, steps

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step % self.steps == 0:
            folder = f"{self.folder}/{state.global_step}"
            if state.is_world_process_zero:
                model.config.save_pretrained(folder)  # it stays beside the weights
            self.last = deepspeed_ext.export_weights(self.trainer.deepspeed, folder, asynchronous=True)

    def on_train_end(self, args, state, control, **kwargs):
        self.last.wait()  # those before have been waited for by the next one
