# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Modules fetched as one unit train like unmodified ZeRO-3. On two ranks, results are equal bit for bit, because a sum
over two ranks has one order. But leaf modules, including DeepSpeed's own, add fewer nodes to autograd's graph: if a
tensor has three or more consumers, its gradients may be summed in another order. Such networks are compared bit for
bit with stock ZeRO-3 that has the same leaf modules, set by hand."""

from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import deepspeed
import pytest
import torch
from torch import nn

from deepspeed_ext.leaf.gradients import DelayedGradients, _Leaf
from deepspeed_ext.leaf.units import UNIT, linear
from deepspeed_ext.zero.sharded.reduction import GradientReduction
from tests.harness import calls, mixtures, training
from tests.harness.mixtures import AUTO, CHUNKS, SMALL, job_of
from tests.harness.tiers import deep, with_cases
from tests.harness.training import PARTITIONED, check


@pytest.mark.quick
def test_a_parameter_that_fills_a_bucket_is_sent_with_it() -> None:
    sent, bucket = list[int](), mock.Mock(elements=0, process_group=None)

    def send(dtype: Any) -> None:
        sent.append(bucket.elements)
        bucket.elements = 0

    inner = mock.MagicMock(_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads=send)
    inner.ipg_buckets.__getitem__.return_value = bucket
    reduction = mock.Mock(_optimizer=inner, **{"_context.reduce_bucket": 10})
    for numel in (4, 6, 5, 6):
        GradientReduction._fill_bucket(reduction, mock.Mock(ds_numel=numel, ds_process_group=None))
    assert sent == [10, 5]


BLOCKS = {"stage3_leaf_bytes": 22_000}  # blocks of experts fit, and layers do not


def exact(rows: list[Any]) -> None:
    for row in rows:
        assert (row.weights, row.losses, row.norms) == (0.0, 0.0, 0.0), row
        assert row.replicas_equal and row.same_decisions, row


IN_CHUNKS = ["Tied", "TwoOutputs", "Nested", "Lent", "Collecting"]
IN_LAYERS = ["ByKeyword", "FrozenStem", "Looped", "Late", "PartCalled", "EachCheckpointed"]
IN_TURNS = [*((name, True) for name in IN_CHUNKS), *((name, False) for name in IN_LAYERS)]
OTHERWISE = [*((name, not chunks) for name, chunks in IN_TURNS), ("Mixtures", True), ("Mixtures", False)]
BY_HAND = {"stage": 3, "leaf_module": {"classes": ["Layer"]}}


def test_only_unit_weights_use_the_fast_linear() -> None:
    def detour(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        calls.append(weight)
        return torch.ops.aten.linear(input, weight, bias)

    calls: list[torch.Tensor] = []
    alone, inside = (torch.nn.Parameter(torch.eye(3)) for _ in range(2))
    setattr(inside, UNIT, None)
    for weight in (alone, inside):
        assert linear(detour, torch.ones(1, 3), weight).tolist() == [[1.0] * 3]
    assert len(calls) == 1 and calls[0] is alone
    torch.func.vmap(lambda row: linear(detour, row, inside))(torch.ones(1, 3))
    assert len(calls) == 2 and calls[1] is inside
    torch.compile(lambda row: linear(detour, row, inside), backend="eager", fullgraph=True)(torch.ones(1, 3))
    assert len(calls) == 3, "torch.compile cannot trace UnitLinear"


def test_delayed_gradients_are_reduced_once() -> None:
    reduced: list[Any] = []
    optimizer: Any = SimpleNamespace(leaf_parameters={}, _leaf_module_hooks=[], ipg_buckets={})
    optimizer.reduce_ready_partitions_and_remove_grads = reduced.append
    late, param = DelayedGradients(optimizer), SimpleNamespace(ds_id=0, grad=torch.ones(1))
    late._delayed[torch.nn.Identity()] = [param]
    late.end_of_backward()
    late.end_of_backward()
    assert reduced == [param]


@with_cases("name, chunks", *IN_TURNS[::4], *deep(*(one for at, one in enumerate(IN_TURNS) if at % 4), *OTHERWISE))
def test_every_network_on_two_ranks(ranks: Any, name: str, chunks: bool) -> None:
    job = job_of(getattr(mixtures, name))
    keys = CHUNKS if chunks else BLOCKS if name in ("ByKeyword", "FrozenStem") else AUTO
    rows = ranks(2).run(training.against, job, [{"stage": 3, **keys}], {"stage": 3})[0]
    exact(rows) if name == "Nested" else check(rows, losses=1e-5)  # of losses of about 10


@pytest.mark.parametrize("name", ["Routed", *deep("Mixtures", "Tied")])
def test_units_chosen_by_hand(ranks: Any, name: str) -> None:
    job = job_of(getattr(mixtures, name), accumulation=2, steps=1)
    exact(ranks(2).run(training.against, job, [{"stage": 3, **AUTO}], BY_HAND)[0])


@pytest.mark.quick
@with_cases(
    "layers, chunks", (("III",), ("GNG",)), *deep((PARTITIONED[::2], PARTITIONED[1::2]), (PARTITIONED[1::2], ()))
)
def test_every_strategy(ranks: Any, layers: tuple[str, ...], chunks: tuple[str, ...]) -> None:
    job = job_of(mixtures.Mixtures, accumulation=2, steps=2)
    variants = [training.placed(name, **keys) for names, keys in ((layers, AUTO), (chunks, CHUNKS)) for name in names]
    check(ranks(4).run(training.against, job, variants, {"stage": 3})[0])


def test_thresholds(ranks: Any) -> None:
    job = job_of(mixtures.Mixtures)
    variants = [{"paro_strategy": "GGG", "stage3_module_granularity_threshold": n} for n in (1, 60)]
    rows = ranks(2).run(training.against, job, variants, {"stage": 3})[0]
    check(rows)
    exact(rows[:1])  # makes no units


@pytest.mark.parametrize("world", [1, 2])
def test_units_with_one_missing_parameter(ranks: Any, world: int) -> None:
    assert ranks(world).run(one_missing_case) == [True] * world


def one_missing_case() -> bool:
    """Return whether a model gives the same output if one of two parameters of a unit is gathered by hand."""
    job = job_of(mixtures.Mixtures, zero={**SMALL, "stage3_param_persistence_threshold": 20})
    engine, model = training.make_engine(job, training.placed("GGG", group_size=1, **AUTO))
    x, _ = next(training.batches(job))
    units = [getattr(param, UNIT) for param in model.parameters() if hasattr(param, UNIT)]
    gathered_param = next(unit.params[0] for unit in units if len(unit.params) == 2)
    with torch.no_grad():
        expected = engine(x)
        with deepspeed.zero.GatheredParameters([gathered_param]):
            output = engine(x)
        for module in (module for module in model.modules() if getattr(module, "_z3_leaf", False)):
            module.register_forward_pre_hook(_read_parameters)
        return torch.equal(output, expected) and torch.equal(engine(x), expected)


def _read_parameters(module: nn.Module, _: Any) -> None:
    params = [param for param in module.parameters() if hasattr(param, UNIT)]
    with deepspeed.zero.GatheredParameters(params):
        assert all(param.numel() == param.ds_numel for param in params)


@pytest.mark.quick
def test_outputs_of_units_have_tensors_that_are_found() -> None:
    module, leaf = nn.Identity(), cast(Any, _Leaf.__new__(_Leaf))
    leaf._calls = SimpleNamespace(latest_has_node=True)
    leaf._after(module, (), {}, SimpleNamespace())
    module.__dict__["paro_leaf"] = True
    leaf._after(module, (), {}, (torch.ones(1),))
    with pytest.raises(TypeError, match=r"Identity is fetched as one unit, .*returned a SimpleNamespace"):
        leaf._after(module, (), {}, SimpleNamespace())


def test_full_buckets_do_not_wait_for_the_next_module(ranks: Any) -> None:
    assert ranks(2).run(full_case) == [{False}] * 2


def full_case() -> set[bool]:
    """Return whether a bucket that a unit's gradients have filled is still open after they have been reduced."""
    size, open_buckets = 5, set[bool]()  # less than any parameter has

    def look(_: None, reduction: Any, *__: Any) -> None:
        open_buckets.add(any(bucket.elements > size for bucket in reduction._optimizer.ipg_buckets.values()))

    with calls.after(GradientReduction, "reduce_leaf", look):
        job = job_of(mixtures.Mixtures, zero={**SMALL, "reduce_bucket_size": size}, steps=1)
        training.train(job, training.placed("IGG", **AUTO))
    return open_buckets


@pytest.mark.parametrize("reentrant", [True, *deep(False)])
def test_activation_checkpointing(ranks: Any, reentrant: bool) -> None:
    job = job_of(mixtures.Routed, checkpointing=reentrant, accumulation=2, steps=2)
    variants = [training.placed("GGG", **AUTO), training.placed("IIG", **CHUNKS)]
    check(ranks(2).run(training.against, job, variants, BY_HAND)[0])


@pytest.mark.parametrize("world", [2, *deep(4)])
@with_cases(
    "more",
    {"boundary": "coalesce", "zero": {**SMALL, "contiguous_gradients": False, "allgather_sequential": True}},
    {
        "backward": "loss",
        "groups": 2,
        "zero": {**SMALL, "stage3_prefetch_bucket_size": 300, "stage3_max_reuse_distance": 300},
    },
    *deep(
        {"boundary": "step", "zero": {**SMALL, "reduce_bucket_size": 10_000, "overlap_comm": True}},
        {"zero_init": "config", "zero": SMALL | {"stage3_param_persistence_threshold": 50, "reduce_scatter": False}},
    ),
    ids=lambda more: str(more).replace("'", "")[:70],
)
def test_other_options(ranks: Any, world: int, more: dict[str, Any]) -> None:
    job = job_of(mixtures.Mixtures, accumulation=2, steps=2, **more)
    variants = [training.placed("IIG", **AUTO), training.placed("GGG", **CHUNKS)]
    # Stock ZeRO-3 counts the gradients of coalesced micro-steps in another way; stage 2 does not.
    stock = {"stage": 2 if more.get("boundary") == "coalesce" else 3}
    check(ranks(world).run(training.against, job, variants, stock)[0])


@pytest.mark.parametrize("dtype", ["fp16", *deep("bf16")])
def test_16_bits_and_overflow(ranks: Any, dtype: str) -> None:
    job = job_of(mixtures.Mixtures, dtype=dtype, overflow=[(0, 1)] if dtype == "fp16" else [])
    exact(ranks(2).run(training.against, job, [{"stage": 3, **AUTO}], BY_HAND)[0])
    as_chunks = {"stage": 3, "leaf_module": {"classes": ["Mixer", "Expert"]}}
    half = {"stage3_leaf_bytes": CHUNKS["stage3_leaf_bytes"] // 2}
    exact(ranks(2).run(training.against, job, [{"stage": 3, **half}], as_chunks)[0])


@pytest.mark.parametrize("device", ["offload_param", *deep("offload_optimizer")])
def test_offload(ranks: Any, device: str) -> None:
    offload = {device: {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    job = job_of(mixtures.Mixtures, accumulation=2, steps=2, zero={**SMALL, **offload})
    variants = [training.placed("GGG", **keys) for keys in (AUTO, CHUNKS)]
    check(ranks(2).run(training.against, job, variants, {"stage": 3})[0])


@pytest.mark.parametrize("name", ["FrozenStem", *deep("ByKeyword", "Mixtures", "Looped")])
def test_stage_3_trains_leaf_modules_after_frozen_inputs(ranks: Any, name: str) -> None:
    job = job_of(getattr(mixtures, name))
    variants = [{"stage": 3, "stage3_module_granularity_threshold": 84}, BY_HAND]
    rows = ranks(2).run(training.against, job, variants, {"stage": 3})[0]
    check(rows, losses=1e-5, optimizer="DeepSpeedZeroOptimizer_Stage3")
