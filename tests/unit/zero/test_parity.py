# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Every strategy trains what stock DeepSpeed trains: the oracle runs in the same processes.

``harness/parity_table.py`` has the options that are combined. What is no comparison under them has its own test.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from tests.harness import networks, parity_cases, parity_table, training
from tests.harness.networks import SQUARE
from tests.harness.parity_table import GRADIENT_PATHS, PARTITIONED, REPLICATED, STRATEGIES, TABLES
from tests.harness.tiers import deep
from tests.harness.training import BF16, SMALL, Difference, Job, placed

OPTIMIZERS = {"N": "Stage12Optimizer", "I, G": "Stage3Optimizer"}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
EACH_KIND = pytest.mark.parametrize("kind", ["N", "I, G"])


def check(rows: list[Difference], kind: str, **bounds: float) -> None:
    """Check bounds, and that the kind's optimizer was there."""
    training.check(rows, optimizer=OPTIMIZERS[kind], **bounds)


def rows(tier: str) -> Iterator[Any]:
    """The rows of a tier; those with everything are quick."""
    for kind, table in TABLES.items():
        everything = parity_table.row_name(kind, table.everything())
        for name in parity_table.rows_of(kind, tier):
            marks = [pytest.mark.quick] if name == everything else []
            yield pytest.param(kind, name, marks=marks, id=f"{kind}: {name}")


@pytest.mark.parametrize("kind, name", rows("first"))
def test_parity(ranks: Any, kind: str, name: str) -> None:
    check_row(ranks, kind, name)


@pytest.mark.deep
@pytest.mark.parametrize("kind, name", rows("deep"))
def test_parity_where_three_options_meet(ranks: Any, kind: str, name: str) -> None:
    check_row(ranks, kind, name)


def check_row(ranks: Any, kind: str, name: str) -> None:
    """Run all strategies of a kind with the options of a row."""
    row = parity_table.named_row(kind, name)
    world = parity_table.merged(kind, row)["world"]
    check(ranks(world).run(parity_cases.compared, kind, row, STRATEGIES[kind])[0], kind, **parity_table.bounds(row))


@EACH_KIND
def test_uninitialized_memory_is_never_used(ranks: Any, kind: str) -> None:
    check(ranks(6).run(nan_case, STRATEGIES[kind])[0], kind)


def nan_case(names: tuple[str, ...]) -> list[Difference]:
    """Train with memory that is NaN until it is written, and messages as on gloo."""
    with parity_cases.nan_until_written("gloo"):
        return training.compare(Job(accumulation=2, steps=2, zero=SMALL), 3, names)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_uses_nothing(ranks: Any, overlap: bool) -> None:
    # Layer 1 in the first micro-batch of each step only, 2 in the last only, 3 in the first step only; the second step
    # uses nothing.
    skipped = {(n, 1) for n in range(9) if n % 3} | {(n, 2) for n in range(9) if n % 3 < 2}
    skipped |= {(n, 3) for n in range(3, 9)} | {(n, layer) for n in range(3, 6) for layer in range(4)}
    zero = {**SMALL, "overlap_comm": overlap}
    job = Job(sizes=SQUARE, accumulation=3, steps=3, skipped=sorted(skipped), zero=zero)
    # Stages 1 and 2 fail where nothing is used; stage 3 applies the last gradient of an unused parameter again.
    check(ranks(4).run(training.compare, job, 2, PARTITIONED, stage=0)[0], "I, G")


@EACH_KIND
@pytest.mark.parametrize("group", [1, *deep(2)])
def test_groups_inside_the_data_parallel_group(ranks: Any, kind: str, group: int) -> None:
    job = Job(accumulation=2, steps=2, tensor_parallel=2, zero=SMALL)
    for differences in ranks(4).run(training.compare, job, group, STRATEGIES[kind]):
        for row in differences:  # the two tensor-parallel ranks train different data, so only data-parallel ones agree
            assert row.weights <= 1e-5 and row.losses <= 1e-6 and row.same_decisions, row


def test_offload_of_masters_in_bf16_sums_in_fp32(ranks: Any) -> None:
    for differences in ranks(4).run(low_precision_case):
        check(differences, "N", **BF16)


def low_precision_case() -> list[Difference]:
    """Against stock; DeepSpeed asks for its CPU Adam there, which takes minutes to build."""
    from unittest import mock

    import torch
    from deepspeed.runtime.zero import stage_1_and_2

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
        oracle = training.train(job, {"stage": 2})  # as patched
        return [training.beside(oracle, name, job, placed(name)) for name in ("NIG", "NGG")]


@pytest.mark.parametrize(
    "kind, dtype, overlap",
    [("N", "fp32", False), ("I, G", "bf16", True), *deep(("N", "bf16", True), ("I, G", "fp32", False))],
)
def test_two_backwards_at_one_boundary_add_up(ranks: Any, kind: str, dtype: str, overlap: bool) -> None:
    # Stock stage 2 loses the first one in fp32.
    zero = {**SMALL, "overlap_comm": overlap}
    job = Job(accumulation=1 if kind == "N" else 2, dtype=dtype, config=FP32_SUMS, zero=zero, steps=2)
    for differences in ranks(4).run(two_backwards_case, job, REPLICATED if kind == "N" else GRADIENT_PATHS):
        for name, difference in differences:
            assert difference <= {"fp32": 1e-5, "bf16": 4e-3}[dtype], (name, difference)


def two_backwards_case(job: Job, names: tuple[str, ...]) -> list[tuple[str, float]]:
    """Two losses in each micro-step, backward one after the other or of their sum."""
    rows = []
    for name in names:
        weights = []
        for summed in (False, True):
            engine, model = training.make_engine(job, placed(name))
            data = training.batches(job)
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
        rows.append((name, ((weights[0] - weights[1]).abs().max() / weights[1].abs().max()).item()))
    return rows


def test_replicas_of_the_optimizer_decide_alike(ranks: Any) -> None:
    answers = ranks(4).run(replicas_case_of_replicated)
    assert answers == [[(name, 4.0, True, float("inf")) for name in ("NNN", "NNI", "NII")]] * 4
    assert ranks(4).run(replicas_case_of_partitioned) == [[("INI", [4.0], True), ("III", [4.0], True)]] * 4


def test_an_invalid_norm_is_reported_as_by_stock(ranks: Any) -> None:
    for norms in ranks(2).run(invalid_norm_case):
        assert norms["2"] == [float("inf")] and set(map(tuple, norms.values())) == {(float("inf"),)}, norms


def invalid_norm_case() -> dict[str, list[float]]:
    """The norms of a step with gradients that are not finite, and are not looked at before."""
    config = {"bf16": {"check_grad_overflow": False}}
    job = Job(steps=1, dtype="bf16", empty=False, overflow=[(0, 0)], config=config)
    names = ("2", "NIG", "NNN", "3", "IIG", "III", "GGG")
    return {name: training.train(job, placed(name, group_size=1)).norms for name in names}


def replicas_case_of_replicated() -> list[tuple[str, float, bool, float]]:
    """Norm, overflow and invalid norm where the parent finds another answer on each rank."""
    from unittest import mock

    import torch
    from deepspeed import comm as dist
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    rank, group = dist.get_rank(), dist.get_rank() // 2
    rows = []
    for name in ("NNN", "NNI", "NII"):
        engine, _ = training.make_engine(Job(), {"paro_strategy": name, "paro_group_size": 2})
        optimizer = engine.optimizer
        # Ranks of a group find the same; NNN has no groups for its optimizer, so there it may differ by rank.
        found = float(1 + rank) if name == "NNN" else 2.0 * (1 + group)

        def answer(norm: float, overflow: bool, optimizer: Any = optimizer) -> tuple[float, bool]:
            parent = {
                "scaled_global_norm": lambda self, norm_type=2: torch.tensor(norm),
                "has_overflow_partitioned_grads_serial": lambda self: torch.tensor([overflow]),
            }
            with mock.patch.multiple(DeepSpeedZeroOptimizer, **parent):
                return optimizer.scaled_global_norm().item(), optimizer.has_overflow()

        valid, overflow = answer(found, group == 1)
        invalid, _ = answer(-1.0 if group == 0 else 5.0, False)
        rows.append((name, valid, overflow, invalid))
        engine.destroy()
    return rows


def replicas_case_of_partitioned() -> list[tuple[str, list[float], bool]]:
    """Norms and overflow where the parent finds another answer in each group."""
    from unittest import mock

    import torch
    from deepspeed import comm as dist
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    group = dist.get_rank() // 2
    norms_of_group = {"_get_norm_groups": lambda self: [torch.tensor(2.0 * (1 + group))]}
    rows = []
    for name in ("INI", "III"):
        engine, _ = training.make_engine(Job(), placed(name))
        with mock.patch.multiple(DeepSpeedZeroOptimizer_Stage3, **norms_of_group):
            norms = [float(norm) for norm in engine.optimizer._get_norm_groups()]
        engine.optimizer.inf_or_nan_tracker.fill_(group == 1)
        rows.append((name, norms, engine.optimizer.has_overflow()))
        engine.destroy()
    return rows


@pytest.mark.parametrize("name", ["INI", "ING", "III", "IIG", "IGG"])
def test_groups_may_use_modules_in_different_orders(ranks: Any, name: str) -> None:
    job = Job(sizes=SQUARE, network=networks.Wandering, accumulation=2, steps=4, empty=False, zero=SMALL)
    for row in ranks(4).run(orders_case, job, name):  # instead of a hang
        assert row.weights <= 1e-5 and row.losses <= 1e-6 and row.norms <= 1e-5 and row.replicas_equal, row


@pytest.mark.parametrize(
    "bucket, overlap, more",
    [
        (300, True, {"steps": 6}),  # less than a parameter
        (1000, True, {"groups": 2, "checkpointing": True}),
        (2000, False, {}),
        (300, False, {"config": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}}),  # two dtypes on the wire
    ],
)
def test_buckets_cross_in_one_order_where_groups_use_modules_in_others(
    ranks: Any, bucket: int, overlap: bool, more: dict[str, Any]
) -> None:
    # IGG moves buckets between groups in each micro-step: they must hold the same in all groups.
    keys = {"network": networks.ReorderingMixtures, "accumulation": 2, "steps": 4, **more}
    zero = {**SMALL, "reduce_bucket_size": bucket, "overlap_comm": overlap}
    job = Job(sizes=SQUARE, empty=False, zero=zero, **keys)
    bound = BF16 if job.config else {"weights": 1e-5, "losses": 1e-6, "norms": 1e-5}
    for row in ranks(4).run(orders_case, job, "IGG"):
        assert row.replicas_equal and all(getattr(row, name) <= most for name, most in bound.items()), row


@pytest.mark.parametrize("overlap, accumulation", [(False, 2), (True, 4)])  # with overlap in the first step alone
def test_a_bucket_crosses_again_with_a_gradient_that_came_after_it(
    ranks: Any, overlap: bool, accumulation: int
) -> None:
    zero = {**SMALL, "overlap_comm": overlap}
    keys = {"network": networks.Returning, "accumulation": accumulation, "steps": 3}
    job = Job(sizes=SQUARE, empty=False, zero=zero, **keys)
    for row in ranks(4).run(orders_case, job, "IGG"):
        assert row.weights <= 1e-5 and row.losses <= 1e-6 and row.norms <= 1e-5 and row.replicas_equal, row


def orders_case(job: Job, name: str) -> Difference:
    """Compare to stage 0: stages 1 to 3 reduce gradients in the order in which a rank finds them."""
    stock = training.stock(job, {"stage": 0})
    ours = training.train(job, placed(name))
    return training.difference(name, ours, stock, "")


@EACH_KIND
def test_one_rank_alone(ranks: Any, kind: str) -> None:
    job = Job(accumulation=2, steps=2, zero=SMALL)
    check(ranks(1).run(training.compare, job, 1, STRATEGIES[kind])[0], kind)


@pytest.mark.deep
@EACH_KIND
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(
    sizes=some.lists(some.integers(1, 60), min_size=3, max_size=6),
    bucket=some.integers(10, 4000),
    sub_group=some.integers(10, 4000),
    threshold=some.integers(0, 1000),
    live=some.integers(1, 4000),
    groups=some.integers(1, 3),
    overlap=some.booleans(),
    contiguous=some.booleans(),
)
def test_random_models(
    ranks: Any,
    kind: str,
    sizes: list[int],
    bucket: int,
    sub_group: int,
    threshold: int,
    live: int,
    groups: int,
    overlap: bool,
    contiguous: bool,
) -> None:
    zero = {
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": 2 * bucket,
        "sub_group_size": sub_group,
        "stage3_param_persistence_threshold": threshold,
        "stage3_max_live_parameters": live,
        "stage3_prefetch_bucket_size": live // 2,
        "overlap_comm": overlap,
        "contiguous_gradients": contiguous,
    }
    job = Job(sizes=sizes, accumulation=2, groups=groups, zero=zero, steps=2)
    check(ranks(4).run(training.compare, job, 2, STRATEGIES[kind])[0], kind)
