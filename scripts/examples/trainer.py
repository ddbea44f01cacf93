# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The smallest script that trains under a strategy with the Trainer of transformers.

deepspeed --num_accelerators 4 scripts/examples/trainer.py
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

ds_config = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 3, "paro_strategy": "IIG"},  # the only line that is not plain DeepSpeed
}
arguments = TrainingArguments(output_dir="build/trainer", deepspeed=ds_config, max_steps=10, report_to=[])
shape = {"vocab_size": 256, "n_layer": 2, "n_head": 2, "n_embd": 64, "bos_token_id": 0, "eos_token_id": 0}
model = GPT2LMHeadModel(GPT2Config(**shape))  # your model
rows = torch.randint(256, (320, 32))  # your data
data = [{"input_ids": row, "labels": row} for row in rows]
Trainer(model=model, args=arguments, train_dataset=data).train()
