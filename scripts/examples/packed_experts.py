# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Packed experts in windows: only as many of a layer's experts are gathered at a time as fit a budget of bytes.

pip install "transformers>=5"
deepspeed --num_accelerators 4 scripts/examples/packed_experts.py
"""

import deepspeed
import torch
from transformers import MixtralConfig, MixtralForCausalLM

shape = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
model = MixtralForCausalLM(MixtralConfig(**shape))  # your model
optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
# The only line that is not plain DeepSpeed. With its gradient, an expert takes 221 kB here, so a window has two.
zero = {"stage": 3, "paro_strategy": "IIG", "stage3_leaf_bytes": 500_000}
config = {"train_micro_batch_size_per_gpu": 8, "optimizer": optimizer, "zero_optimization": zero}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(20):
    start = torch.randint(256, (8, 1), device=engine.device)
    batch = (start + torch.arange(16, device=engine.device)) % 16  # your data
    loss = engine(input_ids=batch, labels=batch).loss
    engine.backward(loss)
    engine.step()
print(f"rank {engine.global_rank}: last loss {loss.item():.3f}")
torch.distributed.destroy_process_group()
