# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Packed experts in windows train what unmodified ZeRO-3 trains, with two windows gathered at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

SMALL = {
    "vocab_size": 61,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 32,
    "output_router_logits": False,
}
FIVE = {"num_local_experts": 5, "num_experts_per_tok": 2}
QWEN = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": SMALL | FIVE,
    "Qwen3Moe": SMALL | QWEN,
    "DeepseekV3": {key: value for key, value in SMALL.items() if key != "head_dim"}
    | {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    | {"n_routed_experts": 6, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    | {"moe_intermediate_size": 8, "n_shared_experts": 1},
    "Olmoe": SMALL | {"num_experts": 5, "num_experts_per_tok": 2},
    "GptOss": SMALL | FIVE | {"sliding_window": 8},
}
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
NONE_PERSISTS = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 500, "sub_group_size": 700}


def make_model(name: str, implementation: str = "eager", dtype: Any = None, **more: Any) -> Any:
    """A causal language model, of random weights."""
    import torch
    import transformers

    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(**(MODELS[name] | more))
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=implementation)
    return model if dtype is None else model.to(dtype)


def two_experts(name: str, **more: Any) -> int:
    """The budget of two of a model's experts."""
    from deepspeed_ext.leaf.modules import expert_bytes

    return 2 * max(expert_bytes(module) for module in make_model(name, **more).modules())


def train(
    name: str,
    zero: dict[str, Any],
    steps: int = 3,
    accumulation: int = 1,
    config: dict[str, Any] | None = None,
    implementation: str = "eager",
    prepare: Callable[[Any], None] = lambda model: None,
    look: Callable[[Any], Any] = lambda engine: None,
    before: Callable[[Any], None] = lambda engine: None,
) -> tuple[list[float], Any, Any]:
    """Train: losses of micro-steps, whole weights, and what ``look`` sees at the end. Ranks have their own tokens."""
    import deepspeed
    import torch
    from deepspeed import comm as dist

    from tests.harness import training

    model = make_model(name, implementation)
    prepare(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    leaves = [] if "stage3_leaf_bytes" in zero else [f"{name}Experts"]  # else stock finds that ranks differ
    section = {**NONE_PERSISTS, "leaf_module": {"classes": leaves}, **zero}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulation,
            "zero_optimization": section,
            "zero_allow_untested_optimizer": True,
            **(config or {}),
        },
    )
    before(engine)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps * accumulation):
        ids = torch.randint(MODELS[name]["vocab_size"], (1, 2 + 3 * dist.get_rank()), generator=generator)
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    seen = look(engine)
    weights = training.whole_weights(model)
    engine.destroy()
    return losses, weights, seen


def off(found: tuple[list[float], Any, Any], expected: tuple[list[float], Any, Any]) -> tuple[float, float]:
    """How far losses are off, and weights, relative to the largest."""
    losses = max(abs(a - b) for a, b in zip(found[0], expected[0], strict=True))
    return losses, ((found[1] - expected[1]).abs().max() / expected[1].abs().max()).item()


def windows_in(engine: Any) -> list[list[tuple[int, ...]]]:
    """The windows of each module that has some."""
    from deepspeed_ext.leaf.windows import windowed_modules

    return [one.windows for one in windowed_modules(engine.module)]


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_and_implementation(ranks: Any, name: str) -> None:
    for implementation, losses, weights, windows in ranks(2).run(architecture_case, name)[0]:
        assert losses <= 2e-5 and weights <= 1e-5, (implementation, losses, weights)
        assert windows and all(len(some) >= 3 for some in windows), (implementation, windows)


def architecture_case(name: str) -> list[tuple[str, float, float, Any]]:
    """With a budget of two experts: how far from stock, and the windows."""
    stock = train(name, {"stage": 3})
    rows = []
    for implementation in IMPLEMENTATIONS:
        keys = {"stage": 3, "stage3_leaf_bytes": max(two_experts(name), least(name))}
        found = train(name, keys, implementation=implementation, look=windows_in)
        rows.append((implementation, *off(found, stock), found[2]))
    return rows


def least(name: str) -> int:
    """The least budget of a model."""
    from deepspeed_ext.leaf.setup import _least_bytes

    return max(_least_bytes(module) for module in make_model(name).modules())


# An expert of ``mixtures.Packed`` has 273 parameters, which take 3,276 bytes as a unit.
WINDOWS = {"stage3_leaf_bytes": 2 * 3276}
BY_HAND = {"stage": 3, "leaf_module": {"classes": ["PackedMixture"]}}
OVERLAP = {"overlap_comm": True, "reduce_bucket_size": 10_000}


def job_of(network: str = "Packed", **more: Any) -> Any:
    """A job with Adam: it would show a missing or doubled gradient of any parameter."""
    from tests.harness import mixtures
    from tests.harness.training import Job

    defaults = {"optimizer": "Adam", "empty": False, "zero": NONE_PERSISTS, "steps": 2, "accumulation": 2}
    return Job(**{"network": getattr(mixtures, network), **defaults, **more})


def strategies_case(
    names: Sequence[str], network: str, more: dict[str, Any], size: int = 2, zero: dict[str, Any] | None = None
) -> list[Any]:
    """Strategies against stock with the mixture as a leaf module."""
    from tests.harness import training

    variants = [training.placed(name, size, **WINDOWS, **(zero or {})) for name in names]
    return training.against(job_of(network, **more), variants, BY_HAND)


@pytest.mark.quick
@pytest.mark.parametrize(
    "world, size, names",
    [
        (4, 2, ("INI", "ING", "III", "IIG", "IGG", "GNG", "GIG", "GGG")),
        (3, 3, ("IIG", "GGG")),
        (4, 1, ("IIG", "GGG", "GNG")),
    ],
    ids=["2x2", "1x3", "4x1"],
)
def test_every_strategy(ranks: Any, world: int, size: int, names: Sequence[str]) -> None:
    from tests.harness.training import check

    check(ranks(world).run(strategies_case, names, "Packed", {}, size)[0])


@pytest.mark.parametrize(
    "network, more, zero",
    [
        ("Packed", {"clipping": 0.05, "steps": 3}, {}),
        ("Packed", {"zero": {**NONE_PERSISTS, **OVERLAP}}, {}),
        ("Packed", {"zero": {**NONE_PERSISTS, "reduce_scatter": False}}, {}),
        ("Packed", {"zero": {**NONE_PERSISTS, "stage3_param_persistence_threshold": 200}}, {}),
        ("Packed", {"boundary": "step"}, {}),
        ("Packed", {"zero_init": "config"}, {}),
        ("Packed", {"checkpointing": True}, {}),
        ("Packed", {"checkpointing": False}, {}),
        ("PackedLooped", {}, {}),
        ("PackedFrozen", {}, {}),
    ],
    ids=lambda more: str(more).replace("'", "")[:50],
)
def test_with_what_else_may_be_set(ranks: Any, network: str, more: dict[str, Any], zero: dict[str, Any]) -> None:
    from tests.harness.training import check

    check(ranks(4).run(strategies_case, ("IIG", "GGG"), network, more, 2, zero)[0], losses=1e-5)  # of about 10


@pytest.mark.parametrize("dtype, digits", [("bf16", 8), ("fp16", 11)])
def test_16_bits_and_overflow(ranks: Any, dtype: str, digits: int) -> None:
    more = {"dtype": dtype, "optimizer": "SGD", "overflow": [(3, 1)] if dtype == "fp16" else [], "steps": 3}
    for row in ranks(4).run(strategies_case, ("IIG", "GGG"), "Packed", more)[0]:
        # Windows are summed in another order: a token's two experts, and what goes back to the router.
        assert row.weights <= 2.0 ** (1 - digits) and row.losses <= 10 * 2.0 ** (1 - digits), row
        assert row.replicas_equal and row.same_decisions, row
