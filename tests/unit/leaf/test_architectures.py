# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Models of transformers, made from their configurations: what the default budget takes, and that it trains."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.architectures import EXPERTS, LATENT, SMALL, WITHOUT_HEADS
from tests.harness.installed import since
from tests.harness.tiers import deep

# Name: small configuration; and of the configuration's defaults, which are a published model's, what becomes units.
ARCHITECTURES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "Mixtral": (SMALL | {"num_local_experts": 4}, ["MixtralAttention"]),
    "Qwen3Moe": (SMALL | EXPERTS | {"decoder_sparse_step": 1}, ["Qwen3MoeDecoderLayer"]),
    "DeepseekV3": (
        WITHOUT_HEADS
        | LATENT
        | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
        | {"moe_intermediate_size": 12},
        ["DeepseekV3Attention", "DeepseekV3DecoderLayer", "DeepseekV3MLP"],
    ),
    "Olmoe": (SMALL | EXPERTS, ["OlmoeDecoderLayer"]),
    "GptOss": (SMALL | {"num_local_experts": 4, "sliding_window": 8}, ["GptOssAttention"]),
    # Its experts are one batched product, which has no windows.
    "Llama4": (
        SMALL | {"num_local_experts": 4, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 24},
        ["Llama4TextAttention", "Llama4TextMLP"],
    ),
    "KimiLinear": (
        WITHOUT_HEADS
        | LATENT
        | EXPERTS
        | {"num_expert_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
        | {"linear_head_dim": 8, "linear_num_heads": 2, "layer_types": ["linear_attention", "full_attention"]}
        | {"pad_token_id": None},
        ["KimiLinearAttention", "KimiLinearDecoderLayer", "KimiLinearDeltaAttention", "KimiLinearMLP"],
    ),
    "Llama": (SMALL, ["LlamaDecoderLayer"]),
}


def configuration_of(name: str) -> Any:
    """The class of a language model's configuration."""
    import transformers

    return getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")


def make_model(name: str, keys: dict[str, Any]) -> Any:
    """A causal language model."""
    import transformers

    config = configuration_of(name)(**keys)
    return transformers.AutoModelForCausalLM.from_config(config)


LATE = (
    "Olmoe",
    "Llama4",
    "KimiLinear",
)  # what they have is in the others, too; ``tests.campaigns.mixtures`` has more of it


@pytest.mark.parametrize("name", [*(name for name in ARCHITECTURES if name not in LATE), *deep(*LATE)])
def test_it_trains_what_zero3_trains(ranks: Any, name: str) -> None:
    for row in ranks(2).run(train_case, name, ARCHITECTURES[name][0])[0]:
        units, hooks, losses, weights = row
        assert units and hooks[1] < 0.75 * hooks[0], row
        assert losses <= 1e-5 and weights <= 1e-5, row


def train_case(name: str, keys: dict[str, Any]) -> list[tuple[list[str], list[int], float, float]]:
    """With the default budget, once with a small one: classes of units, hooks without and with, how far from stock."""
    import deepspeed
    import torch
    from deepspeed import comm as dist
    from deepspeed.utils import get_z3_leaf_modules

    from tests.harness import training

    def train(zero: dict[str, Any]) -> tuple[list[str], int, list[float], torch.Tensor]:
        torch.manual_seed(5)
        model = make_model(name, keys)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        section = {"stage": 3, "stage3_param_persistence_threshold": 0, "leaf_module": {"classes": []}, **zero}
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": section}
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config | {"zero_allow_untested_optimizer": True}
        )
        generator = torch.Generator().manual_seed(dist.get_rank())
        losses = []
        for _ in range(3):
            ids = torch.randint(keys["vocab_size"], (2, 12), generator=generator)
            loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        offload = engine.optimizer.parameter_offload
        hooks = len(offload.forward_hooks) + len(offload.backward_hooks)
        units = sorted({type(module).__name__ for module in get_z3_leaf_modules(model)})
        weights = training.whole_weights(model)
        engine.destroy()
        return units, hooks, losses, weights

    _, before, expected, stock = train({})
    rows = []
    for budget in (True, 60_000) if name == "Mixtral" else (True,):
        units, after, losses, weights = train({"stage3_leaf_bytes": budget})
        off = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        rows.append((units, [before, after], off, ((weights - stock).abs().max() / stock.abs().max()).item()))
    return rows


@since(transformers="5.23")  # classes are those of a release
def test_what_the_default_budget_takes_of_published_models(tmp_path: Path) -> None:
    (tmp_path / "published.py").write_text(
        "import torch, transformers\n"
        "def make(name):\n"
        "    config = getattr(transformers, name + 'TextConfig', None) or getattr(transformers, name + 'Config')\n"
        "    with torch.device('meta'):\n"
        "        return transformers.AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)\n"
        "from deepspeed_ext.leaf.modules import Settings, choose, default_budget\n"
        f"for name in {list(ARCHITECTURES)!r}:\n"
        "    model = make(name)\n"
        "    found = choose(model, Settings(default_budget(model, 10**9), 0, 10**9))\n"
        "    print(name, *sorted({type(one.module).__name__ for one in found if one.kind.value == 'coarse'}))\n"
    )
    out = subprocess.run(
        [sys.executable, "published.py"], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=True
    )
    taken = {line.split()[0]: line.split()[1:] for line in out.stdout.splitlines() if line.split()[0] in ARCHITECTURES}
    assert taken == {name: units for name, (_, units) in ARCHITECTURES.items()}
