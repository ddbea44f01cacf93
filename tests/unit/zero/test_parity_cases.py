# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Parity with stock DeepSpeed beyond the options of ``harness/parity_table.py``."""

from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from tests.harness import networks, parity_table, training
from tests.harness.parity_table import GRADIENT_PATHS, PARTITIONED, REPLICATED
from tests.harness.tiers import deep, with_cases
from tests.harness.training import BF16, SMALL, Difference, Job, check, placed

FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
ALL = (*REPLICATED, *PARTITIONED)


@with_cases("overlap, names", (True, ("ING", "IIG", "GGG")), *deep((True, PARTITIONED), (False, PARTITIONED)))
def test_parity_of_a_step_without_gradients(ranks: Any, overlap: bool, names: tuple[str, ...]) -> None:
    # Layer 1 in the first micro-batch of each step only, 2 in the last only, 3 in the first step only; the second step
    # uses nothing.
    skipped = {(n, 1) for n in range(9) if n % 3} | {(n, 2) for n in range(9) if n % 3 < 2}
    skipped |= {(n, 3) for n in range(3, 9)} | {(n, layer) for n in range(3, 6) for layer in range(4)}
    zero = {**SMALL, "overlap_comm": overlap}
    job = Job(sizes=networks.SQUARE, accumulation=3, steps=3, skipped=sorted(skipped), zero=zero)
    # Stages 1 and 2 fail without gradients; stage 3 applies the last gradient of an unused parameter again.
    check(ranks(4).run(training.compare, job, 2, names, stage=0)[0])


@pytest.mark.parametrize("group, names", [(1, ("NIG", "INI", "IGG")), *deep((1, ALL), (2, ALL))])
def test_parity_of_groups_inside_the_data_parallel_group(ranks: Any, group: int, names: tuple[str, ...]) -> None:
    job = Job(accumulation=2, steps=2, tensor_parallel=2, zero=SMALL)
    # Tensor-parallel ranks train different data, so only data-parallel ranks are equal.
    for row in ranks(4).rows(training.compare, job, group, names):
        assert row.weights <= 1e-5 and row.losses <= 1e-6 and row.same_decisions, row


def test_offload_of_masters_in_bf16_sums_in_fp32(ranks: Any) -> None:
    for differences in ranks(4).run(low_precision_case):
        check(differences, **BF16)


def low_precision_case() -> list[Difference]:
    """Compare with stock; DeepSpeed requires its CPU Adam for this, whose build needs minutes."""
    job = Job(
        accumulation=3,
        dtype="bf16",
        config={
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
            "data_types": {"grad_accum_dtype": "fp32"},
        },
        zero={"offload_optimizer": {"device": "cpu"}, **SMALL},
    )
    with mock.patch.object(stage_1_and_2, "DeepSpeedCPUAdam", torch.optim.SGD):
        oracle = training.train(job, {"stage": 2})
        return [training.beside(oracle, name, job, placed(name)) for name in ("NIG", "NGG")]


@with_cases(
    "names, dtype, overlap",
    (("NGG",), "fp32", False),
    (("III",), "bf16", True),
    *deep((REPLICATED, "bf16", True), (REPLICATED, "fp32", False)),
    *deep((GRADIENT_PATHS, "bf16", True), (GRADIENT_PATHS, "fp32", False)),
)
def test_two_backwards_at_one_boundary_add_up(ranks: Any, names: tuple[str, ...], dtype: str, overlap: bool) -> None:
    # Stock stage 2 loses the first one in fp32.
    zero = {**SMALL, "overlap_comm": overlap}
    job = Job(accumulation=1 if names[0][0] == "N" else 2, dtype=dtype, config=FP32_SUMS, zero=zero, steps=2)
    for name, difference in ranks(4).each(two_backwards_case, names, job):
        assert difference <= {"fp32": 1e-5, "bf16": 4e-3}[dtype], (name, difference)


def two_backwards_case(name: str, job: Job) -> float:
    """Compare two losses in each micro-step, with a backward for each, with a backward of their sum."""
    weights = []
    for summed in (False, True):
        engine, model, data = training.begin(job, placed(name))
        for _ in range(job.steps * job.accumulation):
            batches = next(data), next(data)
            if summed:
                engine.backward(sum(((engine(x) - y) ** 2).float().mean() for x, y in batches))
            else:
                for x, y in batches:
                    engine.backward(((engine(x) - y) ** 2).float().mean())
            engine.step()
        weights.append(training.whole_weights(model))
        engine.destroy()
    return ((weights[0] - weights[1]).abs().max() / weights[1].abs().max()).item()


def test_optimizer_replicas_take_the_same_decision(ranks: Any) -> None:
    for name, answers in ranks(4).each(replicas_case_of_replicated, ("NNN", "NNI", "NII")):
        assert answers == (4.0, True, float("inf")), (name, answers)
    for name, answers in ranks(4).each(replicas_case_of_partitioned, ("INI", "III")):
        assert answers == ([4.0], True), (name, answers)


def replicas_case_of_replicated(name: str) -> tuple[float, bool, float]:
    rank, group = dist.get_rank(), dist.get_rank() // 2
    engine, _ = training.make_engine(Job(), placed(name))
    optimizer = engine.optimizer
    # Ranks of a group get equal results; NNN has no groups for its optimizer, so results may differ by rank.
    local_norm = float(1 + rank) if name == "NNN" else 2.0 * (1 + group)

    def answer(norm: float, overflow: bool, optimizer: Any = optimizer) -> tuple[float, bool]:
        parent = {
            "scaled_global_norm": lambda self, norm_type=2: torch.tensor(norm),
            "has_overflow_partitioned_grads_serial": lambda self: torch.tensor([overflow]),
        }
        with mock.patch.multiple(stage_1_and_2.DeepSpeedZeroOptimizer, **parent):
            return optimizer.scaled_global_norm().item(), optimizer.has_overflow()

    valid, overflow = answer(local_norm, group == 1)
    invalid, _ = answer(-1.0 if group == 0 else 5.0, False)
    return valid, overflow, invalid


def replicas_case_of_partitioned(name: str) -> tuple[list[float], bool]:
    group = dist.get_rank() // 2
    norms_of_group = {"_get_norm_groups": lambda self: [torch.tensor(2.0 * (1 + group))]}
    engine, _ = training.make_engine(Job(), placed(name))
    with mock.patch.multiple(DeepSpeedZeroOptimizer_Stage3, **norms_of_group):
        norms = [float(norm) for norm in engine.optimizer._get_norm_groups()]
    engine.optimizer.inf_or_nan_tracker.fill_(group == 1)
    return norms, engine.optimizer.has_overflow()


def test_an_invalid_norm_is_reported_as_by_stock(ranks: Any) -> None:
    for norms in ranks(2).run(invalid_norm_case):
        assert norms["2"] == [float("inf")] and set(map(tuple, norms.values())) == {(float("inf"),)}, norms


def invalid_norm_case() -> dict[str, list[float]]:
    """Return the norms of a step whose gradients are not finite, without an earlier overflow check."""
    config = {"bf16": {"check_grad_overflow": False}}
    job = Job(steps=1, dtype="bf16", empty=False, overflow=[(0, 0)], config=config)
    names = ("2", "NIG", "NNN", "3", "IIG", "III", "GGG")
    return {name: training.train(job, placed(name, group_size=1)).norms for name in names}


WANDERING = {"network": networks.Wandering, "steps": 4}
REORDERING = {"network": networks.ReorderingMixtures, "steps": 4}
RETURNING = {"network": networks.Returning, "steps": 3}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


@with_cases(
    "names, details, zero",
    (("ING",), WANDERING, {}),
    # IGG reduces buckets between groups in each micro-step: they must have the same contents in all groups.
    (("IGG",), {**REORDERING, "steps": 6}, {"reduce_bucket_size": 300, "overlap_comm": True}),  # below a parameter
    # A bucket is sent again with a later gradient; with overlap, only in the first step.
    *deep((("IGG",), {**RETURNING, "accumulation": 4}, {"overlap_comm": True})),
    *deep((("IGG",), RETURNING, {"overlap_comm": False})),
    # Two dtypes are sent.
    *deep((("IGG",), {**REORDERING, "config": AUTOCAST}, {"reduce_bucket_size": 300, "overlap_comm": False})),
    *deep(
        (("IGG",), {**REORDERING, "groups": 2, "checkpointing": 1}, {"reduce_bucket_size": 1000, "overlap_comm": True})
    ),
    *deep((("INI", "III", "IIG", "IGG"), WANDERING, {}), (("IGG",), REORDERING, {"reduce_bucket_size": 2000})),
)
def test_groups_may_use_modules_in_different_orders(
    ranks: Any, names: tuple[str, ...], details: dict[str, Any], zero: dict[str, Any]
) -> None:
    job = Job(**{"sizes": networks.SQUARE, "accumulation": 2, "empty": False, "zero": {**SMALL, **zero}, **details})
    bounds = BF16 if job.config else parity_table.EXACT
    # Stage 0: stages 1 to 3 reduce gradients in each rank's own order, and would hang.
    for rows in ranks(4).run(training.compare, job, 2, names, stage=0):
        check(rows, **bounds)


HOST = {"offload_param": {"device": "cpu"}}
CACHED = {**HOST, "paro_parameter_cache_bytes": 3000}
OPTIMIZER = {"offload_optimizer": {"device": "cpu"}}


@with_cases(
    "details, zero",
    ({"frozen": (1,), "accumulation": 2, "zero_init": "config"}, HOST),
    ({"skipped": ((1, 1), (2, 1)), "accumulation": 2}, CACHED),
    *deep(({"optimizer": "Adam"}, {**CACHED, **OPTIMIZER})),
    *deep(({"optimizer": "Adam"}, {"offload_param": {"device": "cpu", "pin_memory": False}, **OPTIMIZER})),
    ids=str,
)
def test_parity_of_slices_on_the_host(ranks: Any, details: dict[str, Any], zero: dict[str, Any]) -> None:
    """With os = G and ``offload_param``, slices of p = I are on the host."""
    job = Job(zero=SMALL, empty=False, groups=2, **details)
    stock = {"stage": 2 if job.skipped else 3}  # stage 3 steps with old gradients of layers that are not used
    stock |= {key: value for key, value in zero.items() if key in OPTIMIZER}
    variants = [placed(name, **zero) for name in ("ING", "IIG", "IGG")]
    check(ranks(4).run(training.against, job, variants, stock)[0], weights=2e-6)


def test_parity_on_a_single_rank(ranks: Any) -> None:
    check(ranks(1).run(training.compare, Job(accumulation=2, zero=SMALL), 1, ALL)[0])


def test_parity_of_a_boundary_declared_after_backward(ranks: Any) -> None:
    for name, difference in ranks(4).each(late_boundary_case, ("III", "IGG", "GGG")):
        assert difference <= 1e-6, (name, difference)


def late_boundary_case(name: str) -> float:
    """Return the difference of weights if the boundary is declared before the last backward or before the step."""
    job = Job(accumulation=2)
    weights = []
    for late in (False, True):
        engine, model, data = training.begin(job, placed(name))
        for number in range(4):
            engine.set_gradient_accumulation_boundary(number % 2 == 1 and not late)
            training.micro_step(engine, job, number, *next(data))
            if number % 2:
                engine.set_gradient_accumulation_boundary(True)
                engine.step()
        weights.append(training.whole_weights(model))
        engine.destroy()
    return (weights[0] - weights[1]).abs().max().item()


LAYERS, PARTS = {"layers.[12]*": "I"}, {"layers.1": "I", "*.first": "I"}  # of these parts, blocks have two units
OVERLAP = {**SMALL, "overlap_comm": True}
PERSISTENT = {**OVERLAP, "stage3_param_persistence_threshold": 100}
ON_HOST = {**OVERLAP, **HOST, "offload_optimizer": {"device": "cpu"}}
WITH_I: dict[str, Job] = {
    "tangled": Job(networks.SQUARE, False, network=networks.Tangled, frozen=(1,), steps=3, zero=PERSISTENT),
    "units": Job(networks.SQUARE, False, network=networks.Blocks, accumulation=3, groups=2, zero=OVERLAP),
    "host": Job(empty=False, steps=3, zero=ON_HOST, config={"zero_force_ds_cpu_optimizer": False}),
}


@with_cases(
    "kind, world, group, names",
    ("tangled", 6, 3, ("GIG", "GGG")),
    ("units", 4, 2, ("GNG", "GGG")),
    ("host", 4, 2, ("GIG",)),
    *deep(*((kind, n, m, ("GNG", "GIG", "GGG")) for kind in WITH_I for n, m in ((4, 2), (4, 1), (4, 4), (6, 2)))),
)
def test_parity_of_modules_with_i_next_to_g(ranks: Any, kind: str, world: int, group: int, names: Any) -> None:
    variants = [placed(name, group, paro_modules=PARTS if kind == "units" else LAYERS) for name in names]
    check(ranks(world).run(training.against, WITH_I[kind], variants, {"stage": 3})[0])


@pytest.mark.parametrize("name, keys", [("GNG", {}), ("GGG", {"zeropp_loco_param": {"block_size": 32}})])
def test_modules_with_i_change_no_bit(ranks: Any, name: str, keys: dict[str, Any]) -> None:
    job = Job(networks.SQUARE, network=networks.Blocks, accumulation=2, clipping=0.0, frozen=(1,), zero=SMALL)
    plain = ranks(4).run(training.train, job, placed(name, **keys))
    grouped = ranks(4).run(training.train, job, placed(name, **keys, paro_modules=PARTS), check_units)
    for one, other in zip(plain, grouped, strict=True):
        assert one.weights.equal(other.weights) and one.losses == other.losses and other.replicas_equal


def check_units(engine: Any) -> None:
    entries = engine.module.layers[2].__dict__["paro_entries"]
    assert [type(entry).__name__ for entry in entries] == ["Unit", "Unit"]  # one for each placement
