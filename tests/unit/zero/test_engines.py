# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Engines with p = I or G: how they shard and store parameters, together with other engines and after them."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import deepspeed
import pytest
import torch

from tests.harness import training
from tests.harness.tiers import deep
from tests.harness.training import PARTITIONED, SMALL, Job, check, placed


@pytest.mark.parametrize(
    "zero_init, names",
    [("plain", ("GGG",)), ("config", ("III",)), *deep(("plain", PARTITIONED), ("config", PARTITIONED))],
)
def test_models_built_under_zero_init_match_stock(ranks: Any, zero_init: str, names: tuple[str, ...]) -> None:
    optimizer, bounds = ("Muon", {"weights": 1e-4, "losses": 1e-5}) if zero_init == "config" else ("SGD", {})
    check(ranks(4).run(zero_init_case, zero_init, names, optimizer)[0], **bounds)


def zero_init_case(zero_init: str, names: tuple[str, ...], optimizer: str) -> list[training.Difference]:
    """Compare models that zero.Init shards while they are built with stock on a model that was built unsharded."""
    job = Job(optimizer=optimizer, groups=2, frozen=(1,), steps=2, empty=False, zero=SMALL)
    stock, sharded = training.train(job, {"stage": 2}), replace(job, zero_init=zero_init)
    return [training.beside(stock, name, sharded, placed(name)) for name in names]


@pytest.mark.parametrize("name", ["NIG", "IGG", "GGG"])
def test_a_destroyed_engine_frees_everything(ranks: Any, name: str) -> None:
    assert ranks(2).run(destroyed_case, name) == [[]] * 2


def destroyed_case(name: str) -> list[str]:
    """Return what remains of an engine that is destroyed within an accumulation, while another one continues."""
    job = Job(empty=False, optimizer="Adam", accumulation=2, zero=SMALL)
    destroyed, other = (training.make_engine(job, placed(name))[0] for _ in range(2))
    data = training.batches(job)
    for number, engine in enumerate((destroyed, other) * 3):
        training.step(engine, job, number, data)
    references = {
        kind: weakref.ref(of)
        for kind, of in {"engine": destroyed, "model": destroyed.module, "os": destroyed.optimizer}.items()
    }
    gradients = destroyed.optimizer.gradients["dense"]
    begun = getattr(gradients, "has_gradients", True)  # p = N has no such flag
    destroyed.destroy()
    alive = ["gradients"] if getattr(gradients, "has_gradients", False) or not begun else []
    del destroyed, engine, gradients
    gc.collect()
    training.step(other, job, 6, data)
    return alive + [kind for kind, of in references.items() if of() is not None]


def test_strategies_train_one_model_in_turn(ranks: Any) -> None:
    for name, lost, difference, equal in ranks(4).rows(strategies_in_turn_case):
        assert lost == 0.0, f"{name} got other weights than the last one left"
        assert difference <= 1e-5 and equal, (name, difference, equal)


def strategies_in_turn_case() -> list[tuple[str, float, float, bool]]:
    """Train one model with every strategy in turn and with stock stage 3; return for each the change of weights by
    initialization, their distance from stock stage 2 afterwards, and whether all ranks have the same weights."""
    torch.manual_seed(7)
    job = Job(empty=False, frozen=(1,), accumulation=2, zero=SMALL)
    model, oracle = (training.Network(job.sizes, empty=False) for _ in range(2))
    data = training.batches(job)
    rows = []
    for number, name in enumerate(("III", 3, 3, "GGG", "IIG")):
        section = placed(str(name), **({"paro_modules": {"layers.0": "N"}} if number in (0, 3) else {}))
        section["stage3_param_persistence_threshold"] = number % 2 * 10**6  # none or all stay gathered
        before = training.whole_weights(model)
        torch.nn.utils.vector_to_parameters(before, oracle.parameters())
        batches = [next(data) for _ in range(4)]
        weights = []
        for module, keys in ((model, section), (oracle, {"stage": 2})):
            engine, *_ = deepspeed.initialize(
                model=module,
                model_parameters=training.parameter_groups(module, job),
                config=training.configuration(job, keys),
            )
            if module is model:
                lost = (training.whole_weights(model) - before).abs().max().item()
            for index, (x, y) in enumerate(batches):
                training.micro_step(engine, job, index, x, y)
                engine.step()
            engine.destroy()
            weights.append(training.whole_weights(module))
        gap = ((weights[0] - weights[1]).abs().max() / weights[1].abs().max()).item()
        rows.append((str(name), lost, gap, training.replicas_equal(weights[0])))
    return rows
