# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A small Mixtral for AutoEP, which is called like ``training.Network``."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.harness.tiers import skip_before

WIDTH, TOKENS, EXPERTS = 16, 5, 4  # grouped products want rows of whole 16 bytes


def autoep(size: int) -> dict[str, Any]:
    """Keys of a configuration that spread the experts over ``size`` ranks."""
    return {"expert_parallel": {"enabled": True, "autoep_size": size, "preset_model": "mixtral"}}


def folded(size: int) -> dict[str, Any]:
    """Keys that spread the experts over ``size`` ranks, and cut attention over two, of ``PairedMixtral``."""
    kinds = {"[qkv]_proj": "column", "o_proj": "row"}
    layers = [{"patterns": [rf".*self_attn\.{key}\.weight$"], "partition_type": kind} for key, kind in kinds.items()]
    rest = {"patterns": [r".*layers\.\d+\.weight$", r".*embed_tokens.*", r".*mlp.*"], "partition_type": "skip"}
    plan = {"use_default_specs": False, "layer_specs": [*layers, rest]}
    return {**autoep(size), "tensor_parallel": {"autotp_size": 2, "partition_config": plan}}


class SmallMixtral(nn.Module):
    """Two layers of Mixtral's, of four experts each, between linear ones; subclasses have other widths."""

    width, inner, key_heads = WIDTH, 24, 1

    def __init__(self, sizes: Sequence[int], *_: Any, **__: Any) -> None:
        from transformers import MixtralConfig, MixtralModel

        skip_before(transformers="5.0")  # whose mixtures DeepSpeed's AutoEP knows; it refuses those before
        mend_registry()
        super().__init__()
        shape = {"vocab_size": 3, "hidden_size": self.width, "intermediate_size": self.inner, "num_hidden_layers": 2}
        shape |= {"num_attention_heads": 2, "num_key_value_heads": self.key_heads, "num_experts_per_tok": 2}
        self.config = MixtralConfig(**shape, num_local_experts=EXPERTS, attn_implementation="eager")
        wide = TOKENS * self.width
        self.layers = nn.ModuleList([nn.Linear(sizes[0], wide), nn.Linear(wide, sizes[-1])])
        self.model = MixtralModel(self.config)
        self.model.embed_tokens.requires_grad_(False)

    def forward(self, x: Tensor, skipped: Sequence[int] = ()) -> Tensor:
        """Make tokens of each row, and a row of them again."""
        tokens = torch.tanh(self.layers[0](x)).view(-1, TOKENS, self.width)
        out = self.model(inputs_embeds=tokens, use_cache=False).last_hidden_state
        return torch.tanh(self.layers[1](out.flatten(1)))


class PairedMixtral(SmallMixtral):
    """The same with a head of keys for each of two tensor-parallel ranks."""

    key_heads = 2

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        with torch.no_grad():  # experts whose gradients are a good part of the norm
            for name, param in self.named_parameters():
                if ".experts." in name or ".gate." in name:
                    param.mul_(20.0)


def mend_registry() -> None:
    """Let transformers' registry of outputs take names of classes and a default, as the dictionary that it was did:
    DeepSpeed 0.19.8's AutoEP gives it both, and transformers 5.23 keys it on models."""
    try:
        from transformers.utils import output_capturing
    except ImportError:
        return

    registry: Any = getattr(output_capturing, "_CanRecordRegistry", None)
    if registry is None:
        return

    def name(model: Any) -> str:
        return model if isinstance(model, str) else str(model.__class__)

    def get(self: Any, model: Any, default: Any = None) -> Any:
        return dict.get(self, name(model)) or ({} if default is None else default)

    registry.get = get
    registry.__setitem__ = lambda self, model, value: dict.__setitem__(self, name(model), value)
