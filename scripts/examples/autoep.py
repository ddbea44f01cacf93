# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""AutoEP: DeepSpeed distributes the experts of a transformers model over the ranks of a node.

pip install "transformers>=5.23"
deepspeed --num_accelerators 4 scripts/examples/autoep.py
"""

import deepspeed
import torch
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.utils import output_capturing

# DeepSpeed 0.19.8 passes names and a default here, which transformers 5.23 takes for models; others do not need this.
registry = output_capturing._CanRecordRegistry
registry.get = lambda self, key, other=None: (
    dict.get(self, key if isinstance(key, str) else str(type(key))) or other or {}
)
shape = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
model = MixtralForCausalLM(MixtralConfig(**shape))  # your model
experts = {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}  # each of two ranks has two experts
optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
zero = {"stage": 2, "paro_strategy": "NIG"}  # the only line that is not plain DeepSpeed; any strategy will do
config = {"train_micro_batch_size_per_gpu": 8, "expert_parallel": experts}
config |= {"optimizer": optimizer, "zero_optimization": zero}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(20):
    start = torch.randint(256, (8, 1), device=engine.device)
    batch = (start + torch.arange(16, device=engine.device)) % 16  # your data
    loss = engine(input_ids=batch, labels=batch).loss
    engine.backward(loss)
    engine.step()
print(f"rank {engine.global_rank}: last loss {loss.item():.3f}")
torch.distributed.destroy_process_group()
