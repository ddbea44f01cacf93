# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""LoRA with peft on a model of transformers: what the strategies for few trainable parameters are made for."""

from typing import Any, NamedTuple

import pytest

from deepspeed_ext.strategy import STRATEGIES, GroupSizes, Placement
from tests.harness.frameworks.comparison import needs
from tests.harness.tiers import by_strategies, deep

pytestmark = needs("transformers", "peft")

SHARDED = tuple(name for name, strategy in STRATEGIES.items() if strategy.p)
GROUP = 2
CLUSTER = GroupSizes(4, GROUP)
ON_HOST = {"paro_strategy": "ING", "paro_group_size": GROUP, "offload_param": {"device": "cpu", "pin_memory": True}}


class Row(NamedTuple):
    """What fine-tuning with one strategy shows on one rank."""

    strategy: str
    weights: float  # largest difference of the adapters' weights to stock ZeRO-3's, relative to the largest
    losses: float
    base_unchanged: bool
    with_gradients: set[str]  # names of the parameters that have gradients after a backward ...
    with_states: set[str]  # ... and optimizer states
    gradients: int  # elements of the optimizer's gradient shard
    states: int  # elements of master weights and Adam's states
    base_bytes: int  # of all storages that hold frozen parameters
    base_gathered: int  # elements of frozen parameters that are gathered between steps


class Answer(NamedTuple):
    """What a rank returns: the rows, and the sizes of the model's parameters."""

    rows: list[Row]
    adapters: dict[str, int]
    base: dict[str, int]
    moved: float  # how far stock training moves the adapters, relative to the largest weight


@pytest.mark.parametrize("names", [("NIG", "IGG"), *deep((SHARDED,))], ids=by_strategies)
def test_fine_tuning_with_lora(frameworks: Any, names: tuple[str, ...]) -> None:
    for answer in frameworks(4).run(lora_case, names):
        assert answer.adapters and answer.moved > 0.01, answer.moved
        assert [row.strategy for row in answer.rows] == [*names, "ING"]
        for row in answer.rows:
            strategy = STRATEGIES[row.strategy]
            assert row.weights <= 1e-5 and row.losses <= 1e-5, row
            assert row.base_unchanged, row
            assert row.with_gradients == row.with_states == set(answer.adapters), row
            total = sum(answer.adapters.values())
            if not strategy.p:  # one buffer; DeepSpeed gives each rank an even number of its elements
                shards = 2 * CLUSTER.shards(strategy.os)
                assert (row.states, row.base_bytes) == (3 * 2 * -(-total // shards), 4 * row.base_gathered), row
                continue
            assert row.states == 3 * held(answer.adapters, strategy.os, strategy.os), row
            # With g = N gradients are kept whole, and at the boundary where the optimizer needs them.
            assert row.gradients == held(answer.adapters, strategy.g or strategy.os, strategy.os), row
            assert row.base_bytes == 4 * held(answer.base, strategy.p, strategy.os), row
            assert row.base_gathered == 0, row


def held(numels: dict[str, int], placement: Placement, os: Placement) -> int:
    """Elements that a rank holds of a state of parameters, each cut by itself into chunks as the optimizer needs."""
    chunks = CLUSTER.shards(os) // CLUSTER.shards(placement)
    return sum(chunks * -(-numel // CLUSTER.shards(os)) for numel in numels.values())


def lora_case(names: tuple[str, ...]) -> Answer:
    """Fine-tune the same model with stock ZeRO-3 and with each strategy."""
    stock, model_sizes, moved = fine_tune({"stage": 3})
    rows = [compared(one, stock, fine_tune({"paro_strategy": one, "paro_group_size": GROUP})[0]) for one in names]
    rows.append(compared("ING", stock, fine_tune(ON_HOST, checkpointing=True)[0]))
    return Answer(rows, *model_sizes, moved)


def make_model() -> Any:
    """A small Llama with LoRA adapters; no file is read and nothing is downloaded."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    shape = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 1, "vocab_size": 53}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, use_cache=False, tie_word_embeddings=False))
    return get_peft_model(model, LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"]))


def fine_tune(
    zero: dict[str, Any], checkpointing: bool = False
) -> tuple[dict[str, Any], tuple[dict[str, int], dict[str, int]], float]:
    """Train for some steps; what was seen, elements of adapters and of the base, and how far the adapters moved."""
    import deepspeed
    import torch
    from deepspeed import comm as dist

    from tests.harness import training

    model = make_model()
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": True})
    initial = training.whole_weights(model)
    names = [(name, p.numel(), p.requires_grad) for name, p in model.named_parameters()]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        # A large eps: Adam would blow rounding of near-zero gradients up to the size of a step.
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-2, "eps": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage3_param_persistence_threshold": 0, **zero},
    }
    trainable = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=config)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    losses, seen = [], {}
    for number in range(4):
        tokens = torch.randint(53, (2, 9), generator=generator)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        losses.append(loss.item())
        if number == 3 and "paro_strategy" in zero:
            seen = look(engine, model)
        engine.step()
    if "paro_strategy" in zero:
        seen |= look_between_steps(engine, model)
    final = training.whole_weights(model)
    adapters = torch.cat([torch.full((numel,), grad) for _, numel, grad in names])
    moved = ((final - initial)[adapters].abs().max() / initial[adapters].abs().max()).item()
    seen |= {
        "losses": losses,
        "adapters": final[adapters],
        "base_unchanged": torch.equal(final[~adapters], initial[~adapters]),
    }
    engine.destroy()
    sizes = ({name: n for name, n, grad in names if grad}, {name: n for name, n, grad in names if not grad})
    return seen, sizes, moved


def look(engine: Any, model: Any) -> dict[str, Any]:
    """Gradients and optimizer states after a backward at the boundary."""
    from deepspeed.utils import safe_get_full_grad, safe_get_full_optimizer_state

    optimizer = engine.optimizer
    named = [(name, p) for name, p in model.named_parameters()]
    kept = getattr(getattr(optimizer, "gradients", {}).get("dense"), "held", None)
    return {
        "with_gradients": {name for name, p in named if p.grad is not None or safe_get_full_grad(p) is not None},
        "with_states": {n for n, p in named if safe_get_full_optimizer_state(p, "exp_avg") is not None},
        "gradients": 0 if kept is None else kept.numel(),
    }


def look_between_steps(engine: Any, model: Any) -> dict[str, Any]:
    """Elements of all optimizer states, and what is held of frozen parameters."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "slices"):
        masters = optimizer.fp32_partitioned_groups_flat
    else:
        masters = optimizer.single_partition_of_fp32_groups
    states = [v for state in optimizer.optimizer.state.values() for v in state.values() if getattr(v, "dim", int)()]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    pieces = [t for p in frozen for t in (optimizer.slices["dense"].held(p) if hasattr(p, "ds_id") else [p])]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in pieces}
    return {
        "states": sum(t.numel() for t in (*masters, *states)),
        "base_bytes": sum(storages.values()),
        "base_gathered": sum(p.numel() for p in frozen),
    }


def compared(name: str, stock: dict[str, Any], ours: dict[str, Any]) -> Row:
    """One row."""
    apart = (ours.pop("adapters") - stock["adapters"]).abs().max() / stock["adapters"].abs().max()
    losses = max(abs(a - b) for a, b in zip(ours.pop("losses"), stock["losses"], strict=True))
    return Row(name, apart.item(), losses, **ours)
