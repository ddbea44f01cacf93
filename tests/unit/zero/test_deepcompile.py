# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""DeepCompile's passes that do not reduce gradients: training with them, compared with stock and its passes.

The compiler runs without Inductor, which needs a minute on a CPU: graphs run as the passes have rewritten them.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest

from tests.harness.tiers import deep


class Run(NamedTuple):
    name: str
    active: bool  # whether DeepSpeed's pass is the backend
    operators: set[str]  # of the pass, in the compiled graphs
    losses: list[float]
    apart: float  # weights, from those of stock, relative


CASES = [("autotp", ("NIG",)), *deep(("autosp", ("NNI",)), ("autotp", ("NGG",)), ("autosp", ("NNG",)))]


@pytest.mark.parametrize("compiled, names", CASES)
def test_passes_that_reduce_no_gradients_match_stock(ranks: Any, compiled: str, names: tuple[str, ...]) -> None:
    needed = {"autotp": {"autotp.copy_to_tp_region", "autotp.reduce_from_tp_region"}, "autosp": {"autosp.all_to_all"}}
    try:
        by_rank = ranks(4).run(compiled_case, compiled, names)
    finally:
        ranks.close()  # it changes torch's compiler permanently, so a later compilation would fail
    for stock, *ours in by_rank:
        assert stock.active and stock.operators == needed[compiled] and len(set(stock.losses)) > 1, stock
        for run in ours:
            assert run.active and run.operators == stock.operators, run
            assert run.losses == pytest.approx(stock.losses, abs=1e-6) and run.apart < 1e-5, (run, stock)


def compiled_case(compiled: str, names: tuple[str, ...]) -> list[Run]:
    """Train stock's stage 1 and strategies with this pass."""
    from deepspeed.compile import init_sp
    from deepspeed.compile.custom_ops import sp_dp_registry

    from tests.harness import training

    sp_dp_registry.GROUP_REGISTRY.clear()  # from an earlier case
    runs, weights = [], []
    for name in ("1", *names):
        # It changes Inductor's code, which is possible only once in a process.
        with mock.patch.object(init_sp, "register_long_context_checkpointing"):
            run, own_weights = train(name, compiled, training.placed(name, 2 if compiled == "autosp" else 1))
        weights.append(own_weights)
        runs.append(run._replace(apart=float((own_weights - weights[0]).abs().max() / weights[0].abs().max())))
    return runs


def train(name: str, compiled: str, zero: dict[str, Any]) -> tuple[Run, Any]:
    """Train two steps of two micro-steps; return the run and the weights."""
    import deepspeed
    import torch

    from tests.harness import training

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        "compile": {"deepcompile": True, "passes": [compiled]},
    }
    if compiled == "autotp":
        specs = {"up": "column", "down": "row", "query": "skip", "embedding": "skip"}
        layers = [{"patterns": [rf".*{key}\.weight$"], "partition_type": kind} for key, kind in specs.items()]
        plan = {"use_default_specs": False, "layer_specs": layers}
        config["tensor_parallel"] = {"autotp_size": 2, "partition_config": plan}
    else:
        config["sequence_parallel_size"] = 2
    torch.manual_seed(7)
    torch._dynamo.reset()
    model = make_model()
    engine, *_ = deepspeed.initialize(model=model, config=config)
    graphs: list[Any] = []
    losses = []
    with mock.patch("torch._inductor.compile", lambda graph, inputs: graphs.append(graph) or graph):
        engine.compile(backend="eager")
        for tokens, labels in batches(compiled):
            loss = engine(tokens, labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    active, weights = engine.is_deepcompile_active(), training.whole_weights(model)
    engine.destroy()
    called = {str(node.target).removesuffix(".default") for graph in graphs for node in graph.graph.nodes}
    return Run(name, active, {op for op in called if op.startswith(compiled)}, losses, 0.0), weights


def make_model() -> Any:
    """Return a model of attention and a perceptron, whose output is the loss."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 12)
            self.query = nn.Linear(12, 36)
            self.up = nn.Linear(12, 24)
            self.down = nn.Linear(24, 12)

        def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            q, k, v = (p.view(p.shape[0], p.shape[1], 2, 6).transpose(1, 2) for p in self.query(x).chunk(3, -1))
            attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = attended + self.down(torch.tanh(self.up(attended)))
            return ((x - self.embedding(labels)) ** 2).mean()

    return Model()


def batches(compiled: str) -> Iterator[tuple[Any, Any]]:
    """Yield batches, the same on ranks that share a sequence or a model."""
    import torch
    from deepspeed import comm as dist
    from deepspeed.compile.passes.sp_compile import prepare_autosp_inputs

    generator = torch.Generator().manual_seed(dist.get_rank() // 2)
    for _ in range(4):
        tokens, labels = (torch.randint(11, (2, 8), generator=generator) for _ in range(2))
        if compiled == "autosp":
            tokens, labels, *_ = prepare_autosp_inputs(tokens, labels)
        yield tokens, labels
