# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""LoRA with peft on a model of transformers, the use of strategies for few trainable parameters."""

from typing import Any

import pytest

from deepspeed_ext.strategy import STRATEGIES
from tests.harness.frameworks.comparison import Row, check, needs, placed, plain, stock
from tests.harness.tiers import deep

pytestmark = needs("transformers", "accelerate", "peft")
ON_HOST = {"offload_param": {"device": "cpu", "pin_memory": True}}
SHARDED = [(name, {}) for name, strategy in STRATEGIES.items() if strategy.p]


def case(ours: dict[str, Any], stock: dict[str, Any], checkpointing: bool) -> tuple[Row, bool, bool]:
    """Fine-tune adapters; whether the base stays as it is, and whether adapters alone have optimizer states."""
    import torch
    from deepspeed.utils import safe_get_full_optimizer_state
    from peft import LoraConfig, get_peft_model

    from tests.harness.frameworks import loops, tiny

    trained: set[str] = set()

    def look(engine: Any) -> None:
        named = engine.module.named_parameters()
        trained.update(name for name, p in named if safe_get_full_optimizer_state(p, "exp_avg") is not None)

    def make() -> dict[str, Any]:
        lora = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"])
        model = get_peft_model(tiny.make_model(), lora)
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": True})
        sizes.update({name: (p.numel(), p.requires_grad) for name, p in model.named_parameters()})
        return {"model": model, "model_parameters": [p for p in model.parameters() if p.requires_grad]}

    sizes: dict[str, tuple[int, bool]] = {}
    expected, start = loops.train(plain(stock), make)
    losses, _ = loops.train(plain(ours), make, finish=look)
    base = torch.cat([torch.full((numel,), not trains) for numel, trains in sizes.values()])
    adapters = {name for name, (_, trains) in sizes.items() if trains}
    return (
        tiny.compare_runs(start, expected, losses),
        torch.equal(losses.weights[base], start[base]),
        trained == adapters,
    )


@pytest.mark.parametrize("strategy, more", [("ING", ON_HOST), *deep(("NIG", {}), *SHARDED)])
def test_fine_tuning_with_lora(group: Any, strategy: str, more: dict[str, Any]) -> None:
    """How much ranks hold of frozen parameters is in ``zero/test_memory.py``."""
    answers = group.run(case, placed(strategy, **more), stock(strategy), checkpointing=bool(more))
    check([row for row, *_ in answers], strategy)
    assert all(unchanged and alone for _, unchanged, alone in answers), answers


def four_bit_case(ours: dict[str, Any], stock: dict[str, Any]) -> tuple[Row, bool]:
    """Fine-tune adapters of a base that bitsandbytes has packed into 4 bits; whether the base keeps its bits."""
    import bitsandbytes
    import torch
    from peft import LoraConfig, get_peft_model

    from tests.harness.frameworks import loops, tiny

    trained: list[torch.Tensor] = []

    def make() -> dict[str, Any]:
        model = tiny.make_model(hidden_size=64, intermediate_size=128)
        for layer in [module for name, module in model.named_modules() if name.endswith(("self_attn", "mlp"))]:
            for name, linear in layer.named_children():
                if isinstance(linear, torch.nn.Linear):
                    # Stored in the dtype of the other parameters, as peft's documentation asks of ZeRO-3.
                    storage = {"quant_type": "nf4", "quant_storage": torch.float32}
                    sizes = linear.in_features, linear.out_features
                    packed = bitsandbytes.nn.Linear4bit(*sizes, False, compute_dtype=torch.float32, **storage)
                    packed.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, **storage)
                    setattr(layer, name, packed.to("cpu"))  # packs
        model = get_peft_model(model, LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"]))
        trained[:] = [torch.full((p.numel(),), p.requires_grad) for p in model.parameters()]
        return {"model": model, "model_parameters": [p for p in model.parameters() if p.requires_grad]}

    expected, start = loops.train(plain(stock), make)
    found, _ = loops.train(plain(ours), make)
    adapters = torch.cat(trained)
    base = [weights[~adapters].view(torch.int32) for weights in (start, found.weights)]  # some bits are NaN in fp32
    runs = [run._replace(weights=run.weights[adapters]) for run in (expected, found)]
    return tiny.compare_runs(start[adapters], *runs), torch.equal(*base)


@pytest.mark.deep
@needs("bitsandbytes")
@pytest.mark.parametrize("strategy", ["ING", "NIG", "IIG", "GNG"])
def test_fine_tuning_with_qlora(group: Any, strategy: str) -> None:
    answers = group.run(four_bit_case, placed(strategy), stock(strategy))
    check([row for row, _ in answers], strategy)
    assert all(unchanged for _, unchanged in answers), answers
