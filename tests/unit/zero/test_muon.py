# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Parity of Muon with stock DeepSpeed under every strategy."""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime.zero.muon import original_muon
from torch._dynamo.utils import counters

from deepspeed_ext.zero.matrices import matrices_of, newton_schulz_flops
from deepspeed_ext.zero.muon import Muon
from tests.harness import calls, networks, training
from tests.harness.snapshots import error_of
from tests.harness.tiers import deep, with_cases, with_some
from tests.harness.training import PARTITIONED, REPLICATED, SMALL, Difference, Job, check, placed

# Iterations amplify rounding errors in directions in which gradients are small.
BOUNDS = {"weights": 1e-4, "losses": 1e-5}
STOCK = {"1": {"stage": 1}, "2": {"stage": 2}, "3": {"stage": 3, "reduce_scatter": False}}
ALL = (*REPLICATED, *PARTITIONED)
SOME, OTHERS = ("NIG", "IIG"), ("NNN", "GNG")
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def muon(**details: Any) -> Job:
    return Job(**{"optimizer": "Muon", "steps": 3, "empty": False, "zero": SMALL, **details})


def run(ranks: Any, job: Job, names: Sequence[str], world: int = 4, stage: str = "2", **bounds: float) -> None:
    rows = ranks(world).run(training.against, job, [placed(name) for name in names], STOCK[stage])[0]
    check(rows, **(bounds or BOUNDS))


STANDARD_STEP = {"ns_method": "standard", "momentum": 0.8, "weight_decay": 0.1, "torch_adam": True}
STANDARD = {"optimizer": {"params": STANDARD_STEP}}
RESTING = {"skipped": ((1, 0), (1, 1), (2, 2), (4, 1)), "zero": {**SMALL, "overlap_comm": True}}
ROWS: dict[str, tuple[int, str, dict[str, Any], dict[str, float]]] = {  # ranks, stage, what is trained, bounds
    "groups, frozen, clipped": (4, "1", {"groups": 2, "frozen": (1,), "clipping": 0.1}, BOUNDS),
    "overlap, layers that rest": (4, "2", {"accumulation": 3, "clipping": 0.0, **RESTING}, BOUNDS),
    # The standard iteration is in bf16: an ulp of its input may be many ulps of its output.
    "standard": (6, "2", {"accumulation": 3, "config": STANDARD}, {"weights": 2e-2, "losses": 1e-2}),
}


@with_cases("row, names", *with_some(ROWS, SOME, ALL))
def test_parity_at_every_cluster_shape_and_option(ranks: Any, row: str, names: tuple[str, ...]) -> None:
    world, stage, details, bounds = ROWS[row]
    run(ranks, muon(**details), names, world, stage, **bounds)


@with_cases("dtype, names", ("bf16", SOME), ("fp16", OTHERS), *deep(("bf16", ALL), ("fp16", ALL)))
def test_parity_in_16_bits_and_with_overflow(ranks: Any, dtype: str, names: tuple[str, ...]) -> None:
    # Parts are sent in bf16, so orthogonalized updates are as inexact as gradients.
    job = muon(dtype=dtype, accumulation=2, overflow=((3, 1),) if dtype == "fp16" else ())
    run(ranks, job, names, weights=3e-2, losses=5e-2, norms=3e-2)


def test_parity_with_optimizer_offload(ranks: Any) -> None:
    zero = {**SMALL, **OFFLOAD}
    run(ranks, muon(zero=zero), ("NII", "III"))
    job = muon(dtype="fp16", overflow=((1, 2),), zero=zero)
    run(ranks, job, ("NIG", "GNG"), weights=3e-2, losses=5e-2, norms=3e-2)


def test_parity_with_quantized_gradients_and_updates(ranks: Any, kernels: bool) -> None:
    # Muon ignores the size of a gradient, so 4 bits rotate its small directions; replicas stay equal.
    loco, few = {"zeropp_loco_param": {}}, {"paro_quantized_updates": {}}
    ahead = {"paro_overlap_updates": True}
    variants = [
        *(placed(name, **loco, **few) for name in ("NII", "IIG")),
        placed("NNN", **loco, **few, **ahead),
        placed("NIG", **ahead),
        placed("GNG", **loco),
    ]
    rows = ranks(4).run(training.against, muon(accumulation=2), variants, STOCK["2"])[0]
    for row in rows:
        assert row.replicas_equal and row.same_decisions and row.losses < 0.05, row
    assert rows[-2].weights < BOUNDS["weights"]  # only later


def test_an_unknown_ns_method_raises_one_message(ranks: Any) -> None:
    """The message does not depend on the order of DeepSpeed's set on a rank."""
    expected = "ValueError: optimizer.params.ns_method must be one of gram, standard, got 'gramm'."
    for order, message in ranks(1).each(unknown_case, (["gram", "standard"], ["standard", "gram"])):
        assert message == expected, order


def unknown_case(order: list[str]) -> str:
    job = muon(config={"optimizer": {"params": {"ns_method": "gramm"}}})
    with mock.patch.object(original_muon, "NS_METHODS", order):
        return error_of(training.make_engine, job, placed("NIG", 1))


@with_cases("names", ("III",), *deep((ALL,)))
def test_parity_of_packed_experts_heads_and_kernels(ranks: Any, names: tuple[str, ...]) -> None:
    check(ranks(6).run(matrices_case, names)[0], **BOUNDS)


def matrices_case(names: tuple[str, ...]) -> list[Difference]:
    """Return differences from stage 3, which treats the kernel as a matrix."""
    details = {"sizes": networks.SQUARE, "clipping": 0.0, "accumulation": 2}
    stock = training.train(muon(network=networks.FlatKernel, **details), STOCK["3"])
    job = muon(network=networks.Matrices, **details)
    return [training.beside(stock, name, job, placed(name, 3)) for name in names]


def test_parity_with_a_momentum_for_each_group(ranks: Any) -> None:
    check(ranks(4).run(groups_case)[0], **BOUNDS)


def groups_case() -> list[Difference]:
    """Compare strategies with stage 2, because DeepSpeed's stage 3 rejects this."""
    groups, job = training.parameter_groups, muon(groups=2)

    def differing(*args: Any) -> list[dict[str, Any]]:
        return [{**group, "momentum": 0.95 - number / 5} for number, group in enumerate(groups(*args))]

    with mock.patch.object(training, "parameter_groups", differing):
        oracle = training.train(job, STOCK["2"])
        return [training.beside(oracle, name, job, placed(name)) for name in ("NIG", "IIG")]


def momenta_of(engine: Any) -> list[Any]:
    states = engine.optimizer.optimizer.state.values()
    return [state["momentum_buffer"].clone() for state in states if "momentum_buffer" in state]


@contextmanager
def fails_in_a_later_round() -> Iterator[None]:
    """Make the second round raise during orthogonalization, on all ranks, with or without a matrix."""
    rounds = itertools.count()

    def fail(*_: Any) -> None:
        if next(rounds):
            raise ZeroDivisionError

    with calls.before(Muon, "_orthogonalize", fail), calls.before(Muon, "_orthogonalize_own", fail):
        yield


@with_cases("names", SOME, *deep((ALL,)))
def test_a_step_that_is_not_applied_keeps_the_momentum(ranks: Any, names: tuple[str, ...]) -> None:
    for name, (unchanged, raised, weights) in ranks(4).each(lost_case, names):
        assert unchanged and raised, (name, unchanged, raised)
        assert weights == 0.0, (name, weights)  # bitwise equal to training without these two steps


def lost_case(name: str) -> tuple[bool, bool, float]:
    """Whether steps that overflow, or raise in the update, keep the momentum; differences of later steps."""
    # With a constant loss scale, later steps must be equal to a run without the lost steps. There are more matrices
    # than ranks, so Muon runs in rounds.
    config = {"fp16": {"enabled": True, "loss_scale": 256}}
    job = muon(sizes=(13, 37, 29, 31, 23, 27, 7), dtype="fp16", overflow=((1, 1),), config=config)
    weights, unchanged = [], []
    for lost in (False, True):
        engine, model, data = training.begin(job, placed(name))
        batches = [next(data) for _ in range(2)]
        training.micro_step(engine, job, 0, *batches[0])
        engine.step()
        if lost:
            before = momenta_of(engine)
            training.micro_step(engine, job, 1, *batches[1])
            engine.step()
            after = momenta_of(engine)
            kept = len(before) > 0 and all(map(torch.equal, before, after))
            unchanged.append(kept and not engine.was_step_applied())
            training.micro_step(engine, job, 2, *batches[1])
            with fails_in_a_later_round(), pytest.raises(ZeroDivisionError):
                engine.step()
            engine.optimizer.zero_grad()
            if name in REPLICATED:  # as a step that is skipped does
                engine.optimizer.averaged_gradients.update(dict.fromkeys(engine.optimizer.averaged_gradients))
            unchanged.append(all(map(torch.equal, before, momenta_of(engine))))
        training.micro_step(engine, job, 3, *batches[1])
        engine.step()
        assert engine.was_step_applied()
        weights.append(training.whole_weights(model))
        engine.destroy()
    return *unchanged, (weights[0] - weights[1]).abs().max().item()


def test_a_step_compiles_nothing(ranks: Any) -> None:
    assert ranks(1).run(compiling_case) == [(0, True)]


def compiling_case() -> tuple[int, bool]:
    job = muon(sizes=(5, 3, 4))
    engine, model = training.make_engine(job, placed("NII", 1))
    before = training.whole_weights(model)
    torch._dynamo.config.disable = False  # ``make_engine`` disables the compiler
    counters.clear()
    training.step(engine, job)
    return counters["frames"]["total"], not torch.equal(before, training.whole_weights(model))


@with_cases(
    "shape, heads, expected",
    ((6, 4), None, [(0, (6, 4), None)]),
    ((6, 3, 2, 2), None, [(0, (6, 12), None)]),  # a kernel is one matrix
    ((5, 6, 4), None, [(0, (2, 6, 4), None), (48, (2, 6, 4), None), (96, (1, 6, 4), None)]),  # packed experts
    ((12, 4), 3, [(0, (8, 4), 2), (32, (4, 4), 1)]),
)
def test_a_parameter_is_divided_between_matrices(
    shape: tuple[int, ...], heads: int | None, expected: list[tuple[int, tuple[int, ...], int | None]]
) -> None:
    each = newton_schulz_flops(shape[0] // heads if heads else shape[-2], shape[-1], "gram")
    parts = list(matrices_of(shape, heads, "gram", 2.5 * each))
    assert [(part.start, part.shape, part.heads) for part in parts] == expected
    assert sum(part.span.numel for part in parts) == math.prod(shape)
    (together,) = matrices_of(shape, heads, "gram", math.inf)
    assert together.flops == pytest.approx(sum(part.flops for part in parts))


def test_flops_count_the_matrix_products() -> None:
    assert newton_schulz_flops(10, 30, "standard") == 5 * (4 * 100 * 30 + 2 * 1000)
    assert newton_schulz_flops(30, 10, "gram") == 8 * 100 * 30 + 28 * 1000
    assert newton_schulz_flops(10, 10, "gram") == newton_schulz_flops(10, 10, "standard")


@pytest.mark.parametrize("shape, heads", [((13, 8), 3), ((12, 4, 8), 3), ((12, 4), 0)])
def test_heads_that_do_not_divide_a_matrix_are_refused(shape: tuple[int, ...], heads: int) -> None:
    with pytest.raises(ValueError, match=rf"muon_num_heads is {heads} for a parameter of"):
        list(matrices_of(shape, heads, "gram", math.inf))
    assert not list(matrices_of((0, 4), None, "gram", math.inf))
