# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts for benchmarks, and the methods that train it: as it is, or spread over ranks by AutoEP."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from torch import Tensor, nn

from tests.harness import experts
from tests.perf.lib.mixture_rows import EXPERTS, HIDDEN, INNER, LAYERS, METHODS, SIZE, TOKENS, TOP
from tests.perf.lib.peers import PEERS, WHOLE, Engine, Method, Ours, Workload, gathered


class Mixture(nn.Module):
    """Layers of Mixtral's that return their own loss: how far what they make of tokens is from given ones."""

    def __init__(self) -> None:
        from transformers import MixtralConfig, MixtralModel

        experts.mend_registry()
        super().__init__()
        self.config = MixtralConfig(
            vocab_size=2,
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=EXPERTS,
            num_experts_per_tok=TOP,
            attn_implementation="eager",
            initializer_range=0.05,
        )
        self.model = MixtralModel(self.config)
        self.model.embed_tokens = None  # tokens come as vectors

    @property
    def blocks(self) -> nn.ModuleList:
        """What is gathered as one."""
        layers: nn.ModuleList = self.model.layers
        return layers

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of rows of tokens."""
        tokens = inputs.view(-1, TOKENS, HIDDEN).requires_grad_()
        out = self.model(inputs_embeds=tokens, use_cache=False).last_hidden_state
        return (out - targets.view_as(out)).square().mean()


def make_mixture() -> Mixture:
    """Return the same model on every call and every rank."""
    torch.manual_seed(0)
    return Mixture()


@torch.no_grad()
def whole_mixture(model: nn.Module) -> Tensor:
    """Return all parameters, whole, 1D; in the same order, whether AutoEP has spread them or not. Collective."""
    parts: list[Tensor] = []
    for name, module in model.named_modules():
        if isinstance(module, AutoEPMoELayer):
            parts += _of_all_ranks(module)
        elif ".mlp." not in name:
            parts += gathered(module, recurse=name.endswith(".mlp"))
    return torch.cat([part.flatten() for part in parts])


def _of_all_ranks(layer: Any) -> list[Tensor]:
    """Return a layer's router, and of all experts gate and up projection as one, and down projection."""
    whole = {name: part for module in (layer.router.gate, layer.experts) for name, part in named(module)}
    everybody = {}
    for name in ("w1", "w3", "w2"):
        found = [torch.empty_like(whole[name]) for _ in range(layer.ep_group.size())]
        dist.all_gather(found, whole[name], layer.ep_group)
        everybody[name] = torch.cat(found)
    return [whole["weight"], torch.cat([everybody["w1"], everybody["w3"]], 1), everybody["w2"]]


def named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return a module's own parameters, whole, by name. Collective."""
    return zip((name for name, _ in module.named_parameters()), gathered(module), strict=True)


def mixture_methods(names: Sequence[str], workload: Workload) -> Iterator[Method]:
    """Yield what is asked for, in a fixed order."""
    spread = replace(workload, config=experts.autoep(SIZE))
    for name in METHODS:
        if name not in names:
            continue
        known = METHODS[name]
        if name in PEERS:
            yield PEERS[name](workload)
        elif known.zero.get("stage"):
            yield Engine(spread, name, {**known.zero, **WHOLE} if known.zero["stage"] < 3 else dict(known.zero))
        else:
            zero = {"paro_group_size": workload.group_size, **known.zero}
            yield Ours(spread if known.spread else workload, zero, name)
