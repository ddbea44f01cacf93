# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon under a strategy: its momentum stays sharded, and each matrix is whole for a moment on one rank.

TORCH_COMPILE_DISABLE=1 deepspeed --num_accelerators 4 scripts/examples/muon.py

DeepSpeed compiles Muon's iterations. On a CPU this takes minutes; the variable avoids it.
"""

import deepspeed
import torch

model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))  # your model
optimizer = {"type": "Muon", "params": {"lr": 0.1, "adam_lr": 1e-2, "torch_adam": True}}  # Adam is for biases
zero = {"stage": 2, "paro_strategy": "NIG"}  # the only line that is not plain DeepSpeed; any strategy will do
config = {"train_micro_batch_size_per_gpu": 8, "optimizer": optimizer, "zero_optimization": zero}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(40):
    batch = torch.randn(8, 64, device=engine.device)  # your data
    loss = (engine(batch) - batch).square().mean()
    engine.backward(loss)
    engine.step()
print(f"rank {engine.global_rank}: last loss {loss.item():.3f}")
torch.distributed.destroy_process_group()
