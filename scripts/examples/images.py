# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""LLaVA with images on some ranks only: a frozen vision tower, a trained projector and head, and LoRA.

pip install transformers peft
deepspeed --num_accelerators 4 scripts/examples/images.py
"""

import deepspeed
import torch
from peft import LoraConfig, get_peft_model
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
vision, text = CLIPVisionConfig(**sizes, image_size=8, patch_size=4), LlamaConfig(**sizes, vocab_size=256)
config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=0)
base = LlavaForConditionalGeneration(config)  # your model
lora = LoraConfig(target_modules=".*language_model.*_proj", modules_to_save=["multi_modal_projector", "lm_head"])
model = get_peft_model(base, lora)
whole = {"*.vision_tower.*": "N", "*.multi_modal_projector.*": "N"}  # what some ranks do not run
zero = {"stage": 3, "paro_strategy": "ING", "paro_modules": whole}
adam = {"type": "AdamW", "params": {"lr": 2e-2, "torch_adam": True}}
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": adam, "zero_optimization": zero}
engine, *_ = deepspeed.initialize(model=model, config=config)
for step in range(20):
    tokens = (torch.randint(1, 9, (2, 1)) + torch.arange(16)).to(engine.device)  # your data
    images = {}
    if (step + engine.global_rank) % 3 == 0:  # a batch with images, four tokens for each
        tokens[:, :4], images = 0, {"pixel_values": torch.randn(2, 3, 8, 8, device=engine.device)}
    loss = engine(input_ids=tokens, labels=tokens.masked_fill(tokens == 0, -100), **images).loss
    engine.backward(loss)
    engine.step()
print(f"rank {engine.global_rank}: last loss {loss.item():.3f}")
torch.distributed.destroy_process_group()
