# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Direct uses of the engine: engine.compile(), 8-bit Adam, generation during training."""

from itertools import product
from typing import Any

import pytest

from tests.harness.frameworks.comparison import Row, check, needs, placed, plain, stock
from tests.harness.tiers import deep

pytestmark = needs("transformers", "accelerate")
OPTIMIZERS = ("Adam8bit", "Adafactor")
LOCO: dict[str, Any] = {"zeropp_loco_param": {}}
ON_HOST = {"offload_param": {"device": "cpu"}}


def compile_case(ours: dict[str, Any], stock: dict[str, Any]) -> Row:
    """Train through ``engine.compile()``, traced by Dynamo and run by the backend eager."""
    import torch

    from tests.harness.frameworks import loops, tiny

    frames: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        frames.append(len(graph.graph.nodes))
        return graph.forward

    def prepare(engine: Any) -> None:
        torch._dynamo.reset()
        frames.clear()
        engine.compile(backend=backend)

    # Of few modules: at stage 3 each of them is traced by itself.
    row = loops.compare(
        plain(stock),
        plain(ours),
        lambda: {"model": tiny.make_network()},
        prepare=prepare,
        loss_of=lambda engine, batch: tiny.network_loss(engine, batch["input_ids"]),
    )
    if not frames:
        raise ValueError("nothing was compiled")
    return row


def optimizer_case(ours: dict[str, Any], stock: dict[str, Any], name: str) -> Row:
    """Train with an optimizer of the script: Adafactor of torch, or Adam of bitsandbytes with states of 8 bits."""
    import bitsandbytes
    import torch

    from tests.harness.frameworks import loops, tiny

    dtypes: list[set[str]] = []

    def make() -> dict[str, Any]:
        model = tiny.make_model(hidden_size=64, intermediate_size=128)
        kind, keys = {  # large eps, as in ``comparison``
            "Adafactor": (torch.optim.Adafactor, {"lr": 0.3, "eps": (1e-6, 1e-3)}),
            "Adam8bit": (bitsandbytes.optim.Adam8bit, {"lr": 1e-2, "eps": 1e-3, "min_8bit_size": 1}),
        }[name]
        return {"model": model, "optimizer": kind(model.parameters(), **keys)}

    def look(engine: Any) -> None:
        states = engine.optimizer.optimizer.state.values()
        dtypes.append({str(value.dtype) for state in states for key, value in state.items() if key != "step"})

    configs = [plain(zero, zero_allow_untested_optimizer=True) for zero in (stock, ours)]
    for config in configs:
        del config["optimizer"]
    row = loops.compare(*configs, make, finish=look)
    if name == "Adam8bit" and ["torch.uint8" in some for some in dtypes] != [True] * 2:
        raise ValueError(f"expected states of 8 bits, got {dtypes}")
    return row


def generate_case(ours: dict[str, Any], stock: dict[str, Any]) -> tuple[Row, list[list[int]], list[list[int]]]:
    """Train, and generate on each rank another number of tokens; the tokens under stock DeepSpeed and under ours."""
    import torch
    import torch.distributed as dist

    from tests.harness.frameworks import loops

    written: list[list[int]] = []

    def generate(engine: Any) -> None:
        prompt = torch.arange(2, 6 + dist.get_rank())[None]
        options = {"do_sample": False, "use_cache": True, "synced_gpus": True}
        tokens = engine.module.generate(prompt, max_new_tokens=3 + 2 * dist.get_rank(), eos_token_id=None, **options)
        written.append(tokens[0].tolist())

    return loops.compare(plain(stock), plain(ours), finish=generate), *written


@pytest.mark.parametrize("strategy", ["NIG", *deep("IIG")])
def test_compile(frameworks: Any, strategy: str) -> None:
    check(frameworks(2).run(compile_case, placed(strategy), stock(strategy)), strategy)


@needs("bitsandbytes")
@pytest.mark.parametrize(
    "name, strategy, more",
    [("Adam8bit", "NIG", {}), ("Adafactor", "NIG", {}), *deep(*product(OPTIMIZERS, ("NIG", "IIG"), ({}, LOCO)))],
)
def test_optimizers_of_the_script(group: Any, name: str, strategy: str, more: dict[str, Any]) -> None:
    rows = group.run(optimizer_case, placed(strategy, **more), stock(strategy), name)
    # What rounding moves over an edge of the 8 bits is another value. LoCo changes signs of small gradients.
    bounds = {"losses": 5e-2, "weights": 0.2} if more else {"weights": 1e-3}
    check(rows, strategy, **bounds)


@pytest.mark.parametrize("strategy, more", [("ING", ON_HOST), *deep(("GNG", {}), ("IIG", {}))])
def test_generate(group: Any, strategy: str, more: dict[str, Any]) -> None:
    answers = group.run(generate_case, placed(strategy, **more), stock(strategy))
    check([row for row, *_ in answers], strategy)
    for rank, (_, expected, ours) in enumerate(answers):
        assert ours == expected and len(ours) == 7 + 3 * rank, (rank, ours, expected)
