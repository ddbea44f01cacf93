# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's MoE layers: two ranks together have all experts, and experts have groups of their own.

deepspeed --num_accelerators 4 scripts/examples/moe_layers.py
"""

import deepspeed
import torch
from deepspeed.moe.layer import MoE


class Model(torch.nn.Module):  # your model
    def __init__(self) -> None:
        super().__init__()
        expert = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
        self.first, self.experts = torch.nn.Linear(64, 64), MoE(64, expert, num_experts=4, ep_size=2, k=2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x)
        out, balance, _ = self.experts(hidden)
        return hidden + out, balance


model = Model()
groups = [{"params": list(model.parameters()), "name": "all"}]  # DeepSpeed adds groups of experts to it
optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
zero = {"stage": 2, "paro_strategy": "NIG"}  # the only line that is not plain DeepSpeed; any strategy with p = N
config = {"train_micro_batch_size_per_gpu": 8, "optimizer": optimizer, "zero_optimization": zero}
engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
for _ in range(40):
    batch = torch.randn(8, 64, device=engine.device)  # your data
    out, balance = engine(batch)
    loss = (out - batch).square().mean()
    engine.backward(loss + 0.01 * balance)
    engine.step()
print(f"rank {engine.global_rank}: last loss {loss.item():.3f}")
torch.distributed.destroy_process_group()
