# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Model states between steps: read and set by DeepSpeed's tools, offloaded and reloaded, and incomplete."""

import itertools
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist
from deepspeed import utils
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed_ext.strategy import hyphenate
from deepspeed_ext.zero.muon import MOMENTUM
from deepspeed_ext.zero.saved_states import keep_state_dtypes
from tests.harness import training
from tests.harness.parity_table import PARAMETER_PATHS
from tests.harness.snapshots import error_of
from tests.harness.tiers import deep, with_cases
from tests.harness.training import PARTITIONED, REPLICATED, SEVERAL_BUCKETS, placed


def test_a_weight_of_another_size_is_refused_as_with_stock(ranks: Any) -> None:
    (error,) = {error for _, error in ranks(4).each(another_size_case, ("3", "IIG"))}
    assert error


def another_size_case(name: str) -> str:
    _, model = training.make_engine(training.Job(), placed(name))
    return error_of(utils.safe_set_full_fp32_param, model.layers[0].weight, torch.zeros(3))


@with_cases(
    "dtype, optimizer, names",
    ("fp32", "SGD", ("NIG", "GNG")),
    ("bf16", "Muon", ("IIG",)),
    *deep(("fp32", "SGD", ("NNG", *PARAMETER_PATHS)), ("bf16", "SGD", PARTITIONED), ("bf16", "Muon", PARTITIONED)),
)
def test_states_may_be_offloaded_between_micro_steps(ranks: Any, dtype: str, optimizer: str, names: Any) -> None:
    for name, results in ranks(4).each(offload_states_case, names, dtype, optimizer):
        assert results == (0.0, True), (name, results)


def offload_states_case(name: str, dtype: str, optimizer: str) -> tuple[float, bool]:
    """Return the difference that offloading and reloading after each backward makes; with p = I or G whether memory is
    freed meanwhile and other memory is used afterwards, and with p = N whether destroy keeps no gradients."""
    # Other optimizers need DeepSpeed's FusedAdam, or Muon.
    states = None if optimizer == "Muon" else [State.lp_params, State.lp_grads, State.contiguous_grad_buffer]
    details = {"accumulation": 2, "steps": 2, "dtype": dtype, "frozen": (1,), "empty": False, "optimizer": optimizer}

    def move(engine: Any) -> bool:
        """Offload and reload; return whether the old memory is unused, although all memory is host memory here."""
        optimizer = engine.optimizer
        before = [optimizer.lp_param_buffer.clone(), optimizer.gradients["dense"].accumulator.clone()]
        buffers = (optimizer.lp_param_buffer, optimizer.gradients["dense"].accumulator)
        storages = [StorageWeakRef(buffer.untyped_storage()) for buffer in buffers]
        del buffers
        old = optimizer_tensors(optimizer) if states is None else []
        with mock.patch.object(get_accelerator(), "pin_memory", torch.clone):  # a copy, in other memory
            engine.offload_states(states)
        freed = all(storage.expired() for storage in storages)
        for tensor in old:  # not what has been offloaded
            tensor.fill_(torch.nan)
        optimizer.lp_param_buffer, old_buffer = optimizer.lp_param_buffer.clone(), optimizer.lp_param_buffer
        engine.reload_states()
        old_buffer.fill_(torch.nan)
        after = [optimizer.lp_param_buffer, optimizer.gradients["dense"].accumulator]
        return freed and all(map(torch.equal, before, after))

    whole = {"paro_modules": {"layers.[12]": "N"}} if optimizer == "Muon" else {}
    job = training.Job(zero={**SEVERAL_BUCKETS, **placed(name, **whole)}, **details)
    weights, right = [], True
    for offload in (False, True):
        engine, model, data = training.begin(job, {})
        for number in range(4):
            training.micro_step(engine, job, number, *next(data))
            if offload and name in PARTITIONED:
                right &= move(engine)
            elif offload:
                engine.offload_states(pin_memory=False)
                engine.reload_states()
            engine.step()
        weights.append(training.whole_weights(model))
        training.micro_step(engine, job, 0, *next(data))
        gradients = engine.optimizer.gradients["dense"]
        engine.destroy()
        right &= not getattr(gradients, "slices", ())
    return (weights[0] - weights[1]).abs().max().item(), right


def optimizer_tensors(optimizer: Any) -> list[Any]:
    """Return the tensors with weights and states that the optimizer steps with, without step counts."""
    states = [tensor for state in optimizer.optimizer.state.values() for tensor in state.values()]
    weights = [tensor.data for tensor in optimizer.fp32_partitioned_groups_flat]
    return weights + [tensor for tensor in states if tensor.dim()]


def test_stock_accessors_see_reloaded_states(ranks: Any) -> None:
    for name, results in ranks(4).each(reloaded_case, ("NNG", "NIG")):
        assert results == [(True, True)] * 2, (name, results)


def reloaded_case(name: str) -> list[tuple[bool, bool]]:
    """Return, after all states or only optimizer states return from the host, whether accessors read the optimizer's
    own states, and whether they set them."""

    def moved(optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        """Create new tensors of states, as on a device that is not the host."""
        for state in optimizer.state.values():
            state.update({key: value.clone() for key, value in state.items() if torch.is_tensor(value)})

    job = training.Job(groups=2, zero=SEVERAL_BUCKETS)
    results = []
    engine, model = training.make_trained(job, name)
    used = [p for layer in model.layers for p in layer.parameters()]
    for include in (None, ["optim_states"]):
        with mock.patch.multiple(stage_1_and_2, offload_optimizer_states=moved, reload_optimizer_states=moved):
            engine.offload_states(include, pin_memory=False)
            engine.reload_states()
        states = [state["momentum_buffer"] for state in engine.optimizer.optimizer.state.values()]
        for state in states:
            state.fill_(3.0)
        read = all(bool((utils.safe_get_full_optimizer_state(p, "momentum_buffer") == 3.0).all()) for p in used)
        for param in used:
            utils.safe_set_full_optimizer_state(param, torch.full_like(param, 5.0), "momentum_buffer")
        results.append((read, all(bool((state == 5.0).any()) for state in states)))
    return results


def test_an_optimizer_without_states_raises_as_stock(ranks: Any) -> None:
    for name, errors in ranks(2).each(stateless_case, ("2", "NIG")):
        assert set(errors) == {"ValueError: momentum_buffer not found in optimizer state fragment"}, (name, errors)


def stateless_case(name: str) -> list[str]:
    """Return the errors if states of SGD without momentum are read after a step; ours raises before a step, too."""
    # Each rank has a part of the weight: a rank without one would wait for ranks that raise.
    job = training.Job(sizes=(13, 37), config={"optimizer": {"params": {"lr": 0.1}}})
    engine, model = training.make_engine(job, placed(name, group_size=1))
    ask = partial(error_of, utils.safe_get_full_optimizer_state, model.layers[0].weight, "momentum_buffer")
    early = [ask()] if name != "2" else []
    training.step(engine, job)
    return [*early, ask()]


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


@with_cases(
    "names, dtype, zero",
    pytest.param(("NNG", "NIG", "ING", "GGG"), "fp32", {}, marks=pytest.mark.quick),
    *deep(*itertools.product((REPLICATED, PARTITIONED), ("fp32", "bf16"), ({}, OFFLOAD))),
)
def test_accessors_and_steps_read_the_values_that_were_set(ranks: Any, names: Any, dtype: str, zero: Any) -> None:
    assert ranks(4).each(every_accessor_case, names, dtype, zero) == [(name, []) for name in names] * 4


def every_accessor_case(name: str, dtype: str, zero: Any) -> list[str]:
    """Return functions that return or set other values than were set: multiples of 1/8, which SGD does not round."""

    class OfAllSizes(training.Network):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.one, self.two = (torch.nn.Parameter(torch.ones(size)) for size in (1, 2))

        def forward(self, x: torch.Tensor, skipped: Any = ()) -> torch.Tensor:
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
    engine, model, data = training.begin(job, placed(name))
    for number in range(2):
        training.micro_step(engine, job, number, *next(data))
        if number == 0:
            engine.step()
    return wrong_accessors(engine, [*model.layers.parameters(), model.one, model.two])


def wrong_accessors(engine: Any, params: list[Any]) -> list[str]:
    """After a boundary's backward, return functions that do not return set values, and wrong values in the step."""
    generator, wrong = torch.Generator().manual_seed(3), list[str]()
    of_parts = all(hasattr(param, "ds_id") for param in params)
    shapes = [getattr(param, "ds_shape", param.shape) for param in params]

    def draw() -> list[torch.Tensor]:
        """Return values of all parameters, the same on all ranks."""
        return [torch.randint(-8, 9, shape, generator=generator) / 8.0 for shape in shapes]

    def chunk(value: torch.Tensor, param: Any, padding: float = 0.0) -> torch.Tensor:
        rank, size = dist.get_rank(param.ds_process_group), param.ds_tensor.ds_numel
        own = value.flatten()[rank * size : (rank + 1) * size]
        return torch.nn.functional.pad(own, (0, size - own.numel()), value=padding)

    def check(accessor: str, key: tuple[str, ...], values: list[torch.Tensor]) -> None:
        full = [getattr(utils, f"safe_get_full_{accessor}")(param, *key) for param in params]
        if not all(torch.equal(read.float(), value) for read, value in zip(full, values, strict=True)):
            wrong.append(f"full {accessor}")
        for param, value in zip(params, values, strict=True) if of_parts else ():
            local = getattr(utils, f"safe_get_local_{accessor}")(param, *key)
            if not torch.equal(local.flatten().float(), chunk(value, param)):
                wrong.append(f"local {accessor}")

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


def test_incomplete_gradients_cannot_be_read(ranks: Any) -> None:
    for name, (early, late) in ranks(4).each(unfinished_case, ("INI", "IIG", "IGG")):
        if name == "IGG":  # g = os
            assert early == "", (name, early)
        else:
            assert early.startswith("RuntimeError") and f"paro_strategy {hyphenate(name)}" in early
            assert "only at the accumulation boundary" in early
        assert late == "", (name, late)


def unfinished_case(name: str) -> list[str]:
    job = training.Job(accumulation=2)
    engine, model, data = training.begin(job, placed(name))
    errors = []
    for number in range(2):
        training.micro_step(engine, job, number, *next(data))
        errors.append(error_of(utils.safe_get_full_grad, model.layers[0].weight))
        engine.step()
    return errors


def _optimizer(**states: torch.Tensor) -> tuple[torch.optim.Optimizer, torch.Tensor]:
    """Return an optimizer of bf16 weights with these states, and a second tensor of weights for Muon."""
    weights = [torch.zeros(3, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    groups = [{"params": [weights[0]]}, {"params": [weights[1]], "use_muon": True}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    optimizer.state[weights[0]].update(states)
    return optimizer, weights[1]


@pytest.mark.parametrize("kept", [False, True])
def test_states_in_fp32_of_weights_in_bf16_are_not_rounded(kept: bool) -> None:
    third = torch.full((3,), 1 / 3)  # bf16 cannot represent it
    saving, matrix = _optimizer(exact=third.clone(), rounded=third.bfloat16(), count=3, step=torch.tensor(7.0))
    saving.state[matrix][MOMENTUM] = third.clone()
    zeros = torch.zeros(3)
    loading, fresh = _optimizer(exact=zeros.clone(), rounded=zeros.bfloat16(), count=0, step=torch.tensor(0.0))
    with keep_state_dtypes(loading) if kept else nullcontext():
        loading.load_state_dict(saving.state_dict())
    states = loading.state[loading.param_groups[0]["params"][0]]
    assert torch.equal(states["exact"].float(), third) == kept
    assert torch.equal(loading.state[fresh][MOMENTUM].float(), third) == kept
    assert states["rounded"].dtype == torch.bfloat16 and (states["count"], states["step"].item()) == (3, 7.0)
    loading.load_state_dict(saving.state_dict())  # as torch does again
    assert loading.state[fresh][MOMENTUM].dtype == torch.bfloat16
