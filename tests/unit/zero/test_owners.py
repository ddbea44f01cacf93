# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Parameters of several engines, of none, and of engines that are gone; what one rank modifies reaches all groups."""

from typing import Any

import pytest


@pytest.mark.parametrize("first, second", [("IIG", "IIG"), ("III", "IIG"), ("stock", "IIG"), ("stock", "III")])
@pytest.mark.parametrize("modifier", [1, 3])
def test_one_context_over_parameters_of_two_engines(ranks: Any, first: str, second: str, modifier: int) -> None:
    for wrong in ranks(4).run(two_engines_case, first, second, modifier):
        assert wrong == [0, 0]


def two_engines_case(first: str, second: str, modifier: int) -> list[int]:
    """Modify parameters of two engines in one context; how many elements of each are wrong afterwards."""
    import deepspeed
    import torch
    from deepspeed import comm as dist

    from tests.harness import training

    job = training.Job(empty=False)
    pairs = []
    for name in (first, second):
        zero = {"stage": 3} if name == "stock" else {"paro_strategy": name, "paro_group_size": 2}
        pairs.append(training.make_engine(job, zero))
    params = [list(model.parameters()) for _, model in pairs]
    with deepspeed.zero.GatheredParameters(params[0] + params[1], modifier_rank=modifier):
        for param in params[0] + params[1]:
            param.data.fill_(100 + dist.get_rank())
    wrong = []
    for some in params:
        with deepspeed.zero.GatheredParameters(some):
            wrong.append(sum(int((p.data != 100 + modifier).sum()) for p in some))
    for engine, _ in pairs:
        engine.destroy()
    assert torch.is_grad_enabled()
    return wrong


def test_a_parameter_made_later_in_one_context_with_ours(ranks: Any) -> None:
    assert ranks(4).run(later_case) == [[(name, 0) for name in ("III", "IIG", "GGG")]] * 4


def later_case() -> list[tuple[str, int]]:
    """A layer under zero.Init that no engine has, modified together with ours: elements that are wrong afterwards."""
    import deepspeed
    import torch

    from tests.harness import training

    rows = []
    for name in ("III", "IIG", "GGG"):
        engine, model = training.make_engine(training.Job(), {"paro_strategy": name, "paro_group_size": 2})
        with deepspeed.zero.Init():
            later = torch.nn.Linear(5, 7)
        params = [*later.parameters(), model.layers[0].weight]
        with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
            for param in params:
                param.data.fill_(3)
        with deepspeed.zero.GatheredParameters(params[::-1]):
            rows.append((name, sum(int((p.data != 3).sum()) for p in params)))
        engine.destroy()
    return rows


@pytest.mark.parametrize("names", [("III", "stock"), ("IIG", "stock"), ("INI", "GGG", "III"), ("ING", "III", "stock")])
def test_a_model_may_go_from_engine_to_engine(ranks: Any, names: tuple[str, ...]) -> None:
    for difference, replicas_equal in ranks(4).run(engine_to_engine_case, names):
        assert difference <= 1e-5 and replicas_equal


def engine_to_engine_case(names: tuple[str, ...]) -> tuple[float, bool]:
    """Train a model under one engine after the other: the difference to stock ZeRO-3 all the way."""
    import deepspeed
    import torch

    from tests.harness import training

    job = training.Job(empty=False, frozen=(1,))

    def run(kinds: tuple[str, ...]) -> torch.Tensor:
        torch.manual_seed(7)
        model = training.Network(job.sizes, empty=False)
        data = training.batches(job)
        for kind in kinds:
            zero = {"stage": 3} if kind == "stock" else {"paro_strategy": kind, "paro_group_size": 2}
            engine, *_ = deepspeed.initialize(
                model=model,
                model_parameters=training.parameter_groups(model, job),
                config=training.configuration(job, zero),
            )
            for _ in range(2):
                training.micro_step(engine, job, 0, *next(data))
                engine.step()
            weights = training.whole_weights(model)
            engine.destroy()
        return weights

    stock, ours = run(("stock",) * len(names)), run(names)
    return ((ours - stock).abs().max() / stock.abs().max()).item(), training.replicas_equal(ours)
