# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Keys of small configurations of language models of transformers. Imports nothing."""

from typing import Any

SMALL: dict[str, Any] = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
WITHOUT_HEADS = {key: value for key, value in SMALL.items() if key != "head_dim"}  # latent attention has its own
