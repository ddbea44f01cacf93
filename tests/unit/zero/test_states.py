# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Where model states are held, and that DeepSpeed's own tools still find them."""

from typing import Any

import pytest

from tests.harness.tiers import deep
from tests.harness.training import PARTITIONED, REPLICATED, SEVERAL_BUCKETS

BOTH = pytest.mark.parametrize("names", [REPLICATED, PARTITIONED], ids=["p=N", "p=I,G"])


@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_is_in_flight_when_a_backward_has_returned(ranks: Any, overlap: bool) -> None:
    assert ranks(4).run(in_flight_case, overlap) == [[0] * 3 * len(REPLICATED)] * 4


def in_flight_case(overlap: bool) -> list[int]:
    """Open transfers after each of three micro-steps; the last one is the boundary."""
    from tests.harness import training

    zero = {"overlap_comm": overlap, "reduce_bucket_size": 300}
    job = training.Job(accumulation=3)
    counts = []
    for name in REPLICATED:
        engine, _ = training.make_engine(job, {"paro_strategy": name, "paro_group_size": 2, **zero})
        data = training.batches(job)
        for number in range(3):
            training.micro_step(engine, job, number, *next(data))
            counts.append(len(engine.optimizer.gradients["dense"]._queue._open))
            engine.step()
        engine.destroy()
    return counts


def test_a_weight_of_another_size_is_refused_as_with_stock(ranks: Any) -> None:
    for stock, ours in ranks(4).run(another_size_case):
        assert stock and ours == stock


def another_size_case() -> list[str]:
    """What safe_set_full_fp32_param says of too few elements, with stock stage 3 and with a strategy."""
    import torch
    from deepspeed.utils import safe_set_full_fp32_param

    from tests.harness import training
    from tests.harness.snapshots import error_of

    messages = []
    for zero in ({"stage": 3}, training.placed("IIG")):
        engine, model = training.make_engine(training.Job(), zero)
        messages.append(error_of(safe_set_full_fp32_param, model.layers[0].weight, torch.zeros(3)))
        engine.destroy()
    return messages


@pytest.mark.quick
@BOTH
def test_stock_accessors_see_whole_states(ranks: Any, names: tuple[str, ...]) -> None:
    for rows in ranks(4).run(accessors_case, names):
        for name, weights, gradients, momenta in rows:
            assert max(weights, gradients, momenta) <= 1e-6, (name, weights, gradients, momenta)


def accessors_case(names: tuple[str, ...]) -> list[tuple[str, float, float, float]]:
    """Largest differences to stock of what safe_get_full_* returns after the backward of a second step."""
    import torch
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state

    from tests.harness import training

    job = training.Job(accumulation=2, zero=SEVERAL_BUCKETS)

    def look(zero: dict[str, Any]) -> list[list[torch.Tensor]]:
        engine, model = training.make_engine(job, zero)
        data = training.batches(job)
        for number in range(4):
            training.micro_step(engine, job, number, *next(data))
            if number < 3:
                engine.step()
        used = [p for layer in model.layers for p in layer.parameters()]
        seen = [
            [safe_get_full_fp32_param(p) for p in used],
            [safe_get_full_grad(p) for p in used],
            [safe_get_full_optimizer_state(p, "momentum_buffer") for p in used],
        ]
        engine.destroy()
        return seen

    stock = look({"stage": 2})
    rows = []
    for name in names:
        ours = look({"paro_strategy": name, "paro_group_size": 2})
        a, b, c = (
            max((x - y).abs().max().item() for x, y in zip(mine, theirs, strict=True))
            for mine, theirs in zip(ours, stock, strict=True)
        )
        rows.append((name, a, b, c))
    return rows


@pytest.mark.parametrize("name", ["NIG", "NNG"])
def test_states_may_be_offloaded_between_micro_steps(ranks: Any, name: str) -> None:
    assert ranks(4).run(offload_states_case, name) == [(0.0, 0)] * 4


def offload_states_case(name: str) -> tuple[float, int]:
    """Difference that offloading and reloading all states after each backward makes, and what destroy leaves."""
    import torch

    from tests.harness import training

    job = training.Job(accumulation=2, steps=2, zero={"paro_strategy": name, "paro_group_size": 2})
    weights = []
    for offload in (False, True):
        engine, model = training.make_engine(job, {})
        data = training.batches(job)
        for number in range(4):
            training.micro_step(engine, job, number, *next(data))
            if offload:
                engine.offload_states(pin_memory=False)
                engine.reload_states()
            engine.step()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        training.micro_step(engine, job, 0, *next(data))
        optimizer = engine.optimizer
        engine.destroy()
    return (weights[0] - weights[1]).abs().max().item(), len(optimizer.gradients["dense"].slices)


@pytest.mark.parametrize("include", [None, ["optim_states"]], ids=["everything", "states only"])
def test_stock_accessors_see_states_that_are_back_from_the_host(ranks: Any, include: list[str] | None) -> None:
    assert ranks(4).run(reloaded_case, include) == [dict.fromkeys(REPLICATED, (True, True))] * 4


def reloaded_case(include: list[str] | None) -> dict[str, tuple[bool, bool]]:
    """For each strategy, after states return from the host: whether accessors read the optimizer's own states, and
    whether they set them."""
    from unittest import mock

    import torch
    from deepspeed.runtime.zero import stage_1_and_2
    from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state

    from tests.harness import training

    def moved(optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        """Make new tensors of states, as on a device that is not the host."""
        for state in optimizer.state.values():
            state.update({key: value.clone() for key, value in state.items() if torch.is_tensor(value)})

    job = training.Job(groups=2, zero=SEVERAL_BUCKETS)
    found = {}
    for name in REPLICATED:
        engine, model = training.make_engine(job, training.placed(name))
        training.micro_step(engine, job, 0, *next(training.batches(job)))
        engine.step()
        with (
            mock.patch.object(stage_1_and_2, "offload_optimizer_states", moved),
            mock.patch.object(stage_1_and_2, "reload_optimizer_states", moved),
        ):
            engine.offload_states(include, pin_memory=False)
            engine.reload_states()
        states = [state["momentum_buffer"] for state in engine.optimizer.optimizer.state.values()]
        used = [p for layer in model.layers for p in layer.parameters()]
        for state in states:
            state.fill_(3.0)
        read = all(bool((safe_get_full_optimizer_state(p, "momentum_buffer") == 3.0).all()) for p in used)
        for param in used:
            safe_set_full_optimizer_state(param, torch.full_like(param, 5.0), "momentum_buffer")
        found[name] = read, all(bool((state == 5.0).any()) for state in states)
        engine.destroy()
    return found


def test_an_optimizer_without_states_says_so_as_with_stock(ranks: Any) -> None:
    (told,) = {tuple(told) for told in ranks(2).run(stateless_case)}
    assert set(told) == {"momentum_buffer not found in optimizer state fragment"}


def stateless_case() -> list[str]:
    """What DeepSpeed raises if SGD without momentum is asked for it after a step; ours raises before a step, too."""
    from deepspeed.utils import safe_get_full_optimizer_state

    from tests.harness import training

    # Each rank has a part of the weight: one without would wait for those that raise.
    job = training.Job(sizes=(13, 37), config={"optimizer": {"params": {"lr": 0.1}}})
    told = []

    def ask(model: Any) -> None:
        with pytest.raises(ValueError, match="not found") as raised:
            safe_get_full_optimizer_state(model.layers[0].weight, "momentum_buffer")
        told.append(str(raised.value))

    for name in ("2", "NIG"):
        engine, model = training.make_engine(job, training.placed(name, group_size=1))
        if name != "2":
            ask(model)
        training.micro_step(engine, job, 0, *next(training.batches(job)))
        engine.step()
        ask(model)
        engine.destroy()
    return told


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    "names, dtype, zero",
    [
        (("NIG", "IIG", "GGG"), "fp32", {}),
        *deep(
            *(
                (names, dtype, zero)
                for names in (REPLICATED, PARTITIONED)
                for dtype in ("fp32", "bf16")
                for zero in ({}, OFFLOAD)
            )
        ),
    ],
)
def test_what_accessors_set_is_what_they_get_and_the_step_uses(
    ranks: Any, names: tuple[str, ...], dtype: str, zero: Any
) -> None:
    for rows in ranks(4).run(every_accessor_case, names, dtype, zero):
        assert rows == [(name, []) for name in names]


def every_accessor_case(names: tuple[str, ...], dtype: str, zero: Any) -> list[tuple[str, list[str]]]:
    """Of each strategy: which functions have returned something else than was set, or have set something else.

    Values are multiples of 1/8, so a step of SGD has no rounding.
    """
    import torch

    from tests.harness import training

    class OfAllSizes(training.Network):
        """With parameters of 1, 2, 23 and 529 elements."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.one, self.two = (torch.nn.Parameter(torch.ones(size)) for size in (1, 2))

        def forward(self, x: torch.Tensor, skipped: Any = ()) -> torch.Tensor:
            """Use all of them."""
            return super().forward(x, skipped) * self.one + self.two.sum()

    job = training.Job(
        (23, 23),
        False,
        dtype=dtype,
        clipping=0.0,
        network=OfAllSizes,
        zero={**SEVERAL_BUCKETS, **zero},
        config={"optimizer": {"params": {"momentum": 0.5}}, "zero_force_ds_cpu_optimizer": False},
    )
    rows = []
    for name in names:
        engine, model = training.make_engine(job, training.placed(name))
        data = training.batches(job)
        for number in range(2):
            training.micro_step(engine, job, number, *next(data))
            if number == 0:
                engine.step()
        rows.append((name, wrong_accessors(engine, [*model.layers.parameters(), model.one, model.two])))
        engine.destroy()
    return rows


def wrong_accessors(engine: Any, params: list[Any]) -> list[str]:
    """After a backward at the boundary: which functions do not return what was set, or what a step gets wrong."""
    import torch
    from deepspeed import comm as dist
    from deepspeed import utils

    generator, wrong = torch.Generator().manual_seed(3), list[str]()
    of_parts = all(hasattr(param, "ds_id") for param in params)
    shapes = [getattr(param, "ds_shape", param.shape) for param in params]

    def draw() -> list[torch.Tensor]:
        """Return values of all parameters, the same on all ranks."""
        return [torch.randint(-8, 9, shape, generator=generator) / 8.0 for shape in shapes]

    def chunk(whole: torch.Tensor, param: Any, padding: float = 0.0) -> torch.Tensor:
        """Return what this rank has of a value."""
        rank, size = dist.get_rank(param.ds_process_group), param.ds_tensor.ds_numel
        own = whole.flatten()[rank * size : (rank + 1) * size]
        return torch.nn.functional.pad(own, (0, size - own.numel()), value=padding)

    def check(what: str, key: tuple[str, ...], values: list[torch.Tensor]) -> None:
        full = [getattr(utils, f"safe_get_full_{what}")(param, *key) for param in params]
        if not all(torch.equal(found.float(), value) for found, value in zip(full, values, strict=True)):
            wrong.append(f"full {what}")
        for param, value in zip(params, values, strict=True) if of_parts else ():
            local = getattr(utils, f"safe_get_local_{what}")(param, *key)
            if not torch.equal(local.flatten().float(), chunk(value, param)):
                wrong.append(f"local {what}")

    last = []
    for what, *key in (("fp32_param",), ("optimizer_state", "momentum_buffer"), ("grad",)):
        for set_all in (True, False):
            values = draw()
            for param, value in zip(params, values, strict=True):
                if set_all or not of_parts:
                    getattr(utils, f"safe_set_full_{what}")(param, value, *key)
                else:
                    getattr(utils, f"safe_set_local_{what}")(param, chunk(value, param, padding=7.0), *key)
            check(what, tuple(key), values)
        last.append(values)
    weights, momenta, _ = last
    gradients = draw()
    by_param = dict(zip(map(id, params), gradients, strict=True))
    utils.safe_update_full_grad_vectorized(params, lambda gradient, param: by_param[id(param)])
    check("grad", (), gradients)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.5
    engine.step()
    for param, weight, momentum, gradient in zip(params, weights, momenta, gradients, strict=True):
        if not torch.equal(utils.safe_get_full_fp32_param(param), weight - 0.5 * (0.5 * momentum + gradient)):
            wrong.append(f"step of {weight.numel()} elements")
    return wrong
