# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""LoRA with activation checkpointing: the base model is sharded inside a node, and only adapters have gradients.

pip install transformers peft
deepspeed --num_accelerators 4 scripts/examples/lora.py
"""

import deepspeed
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

shape = {"vocab_size": 256, "n_layer": 2, "n_head": 2, "n_embd": 64, "bos_token_id": 0, "eos_token_id": 0}
base = GPT2LMHeadModel(GPT2Config(**shape))  # your model
base.gradient_checkpointing_enable({"use_reentrant": False})
model = get_peft_model(base, LoraConfig(r=16, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True))
adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = {"type": "AdamW", "params": {"lr": 2e-2, "torch_adam": True}}
zero = {
    "stage": 3,
    "paro_strategy": "ING",
}  # the only line that is not plain DeepSpeed; GNG if a node does not hold the model
config = {"train_micro_batch_size_per_gpu": 8, "optimizer": optimizer, "zero_optimization": zero}
engine, *_ = deepspeed.initialize(model=model, model_parameters=adapters, config=config)
for _ in range(20):
    start = torch.randint(256, (8, 1), device=engine.device)
    batch = (start + torch.arange(16, device=engine.device)) % 16  # your data
    loss = engine(input_ids=batch, labels=batch).loss
    engine.backward(loss)
    engine.step()
print(f"rank {engine.global_rank}: last loss {loss.item():.3f}")
torch.distributed.destroy_process_group()
