# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts on an emulated cluster, unchanged or with experts sharded over the ranks of a node by
AutoEP.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from torch import Tensor, nn

from deepspeed_ext.planner.costs import predict
from deepspeed_ext.planner.memory import Model
from deepspeed_ext.planner.models import describe
from deepspeed_ext.planner.rates import Rates
from tests.harness import experts
from tests.perf.lib import settings
from tests.perf.lib.measurements import Measurement
from tests.perf.lib.peers import PEERS, WHOLE, Engine, Method, Ours, Workload, gathered
from tests.perf.lib.records import Row
from tests.perf.lib.settings import BOTH

HIDDEN, INNER, LAYERS, EXPERTS, TOP, TOKENS = 256, 512, 2, 8, 2, 8  # TOKENS of a row, of 8 rows in a micro-batch
SIZE = 2  # expert-parallel
AUTO_EP = "AutoEP, "


class Mixture(nn.Module):
    """Layers of Mixtral that return their own loss: the distance of their output to target outputs."""

    def __init__(self) -> None:
        from transformers import MixtralConfig, MixtralModel

        experts.mend_registry()
        super().__init__()
        shape = {"vocab_size": 2, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
        shape |= {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP, "num_attention_heads": 4}
        self.config = MixtralConfig(
            **shape, num_key_value_heads=2, attn_implementation="eager", initializer_range=0.05
        )
        self.model = MixtralModel(self.config)
        self.model.embed_tokens = None  # tokens come as vectors

    @property
    def blocks(self) -> nn.ModuleList:
        """The modules that are gathered as one."""
        layers: nn.ModuleList = self.model.layers
        return layers

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        tokens = inputs.view(-1, TOKENS, HIDDEN).requires_grad_()
        out = self.model(inputs_embeds=tokens, use_cache=False).last_hidden_state
        return (out - targets.view_as(out)).square().mean()


def make_mixture() -> Mixture:
    """Return the same model on every call and every rank."""
    torch.manual_seed(0)
    return Mixture()


@torch.no_grad()
def whole_mixture(model: nn.Module) -> Tensor:
    """Return all full parameters, 1D, in the same order with and without AutoEP. Collective."""
    parts: list[Tensor] = []
    for name, module in model.named_modules():
        if isinstance(module, AutoEPMoELayer):
            parts += _of_all_ranks(module)
        elif ".mlp." not in name:
            parts += gathered(module, recurse=name.endswith(".mlp"))
    return torch.cat([part.flatten() for part in parts])


def _of_all_ranks(layer: Any) -> list[Tensor]:
    """Return a layer's router, and of all experts the fused gate and up projections, and the down projections."""
    modules = (layer.router.gate, layer.experts)
    names = [name for module in modules for name, _ in module.named_parameters()]
    parts_by_name = dict(zip(names, (tensor for module in modules for tensor in gathered(module)), strict=True))
    all_experts = []
    for name in ("w1", "w3", "w2"):
        expert_parts = [torch.empty_like(parts_by_name[name]) for _ in range(layer.ep_group.size())]
        dist.all_gather(expert_parts, parts_by_name[name], layer.ep_group)
        all_experts.append(torch.cat(expert_parts))
    return [parts_by_name["weight"], torch.cat(all_experts[:2], 1), all_experts[2]]


class MixtureMeasurement(Measurement):
    """Layers of Mixtral: tokens stay inside nodes, and two ranks, one per node, train each expert."""

    file = "mixture_cluster.csv"
    settings = settings.MIXTURE
    methods = (
        *("DDP", "HSDP", "ZeRO-2", "ZeRO-3", AUTO_EP + "ZeRO-2", AUTO_EP + "ZeRO-3", "NIG", "IIG"),
        *(AUTO_EP + name for name in ("NIG", "IIG", "NIG" + BOTH, "IIG" + BOTH)),
    )
    least: ClassVar = {"2x2-100": {AUTO_EP + "NIG": 5.0}}

    def make_workload(self) -> Workload:
        return Workload(self.setting.accumulation, self.setting.ranks_per_node, make_mixture, whole=whole_mixture)

    def make_methods(self) -> Iterator[Method]:
        spread = replace(self.workload, config=experts.autoep(SIZE))
        for name in self.names:
            base = name.removeprefix(AUTO_EP)
            workload = self.workload if base == name else spread
            if name in PEERS:
                yield PEERS[name](workload)
            elif base.startswith("ZeRO"):
                stage = int(base[-1])
                yield Engine(workload, name, {"stage": stage, **(WHOLE if stage < 3 else {})})
            else:
                yield Ours(workload, {"paro_group_size": workload.group_size, **self._keys(name)}, name)

    def _keys(self, name: str) -> Mapping[str, Any]:
        keys: dict[str, Any] = {"paro_strategy": name.removeprefix(AUTO_EP)[:3]}
        if name.startswith(AUTO_EP + "IIG"):
            # No layer is a unit: a layer's own parameters and its experts are gathered by other ranks.
            keys["leaf_module"] = {"classes": []}
        return keys | ({"zeropp_loco_param": {}, "paro_quantized_updates": {}} if name.endswith(BOTH) else {})

    @property
    def width(self) -> int:
        return TOKENS * HIDDEN

    def describe(self, method: Ours) -> Model:
        return describe(method.engine.module, accumulation=self.setting.accumulation)

    def complete(self, row: Row, rates: Rates | None) -> None:
        super().complete(row, rates)
        method, sizes = self.made[row.method], self.turns.topology.sizes
        row.more["formula_expert_bytes"] = None
        if isinstance(method, Ours):
            any_rates = Rates.of_links(sizes, sizes.group_size, 1.0, 1.0)
            prediction = predict(method.strategy, sizes, self.describe(method), any_rates, method.sent)
            row.more["formula_expert_bytes"] = round(prediction.of_experts.inter * sizes.group_size)
