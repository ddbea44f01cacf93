# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The smallest script that trains under a strategy: its configuration names one, and all else is plain DeepSpeed.

deepspeed --num_accelerators 4 scripts/examples/own_script.py
"""

import deepspeed
import torch

model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))  # your model
optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
zero = {"stage": 2, "paro_strategy": "NIG"}  # the only line that is not plain DeepSpeed
config = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4}
config |= {"optimizer": optimizer, "zero_optimization": zero}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(40):
    batch = torch.randn(8, 64, device=engine.device)  # your data
    loss = (engine(batch) - batch).square().mean()
    engine.backward(loss)
    engine.step()
print(f"rank {engine.global_rank}: last loss {loss.item():.3f}")
torch.distributed.destroy_process_group()
