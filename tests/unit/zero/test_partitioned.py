# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Every strategy with p = I or G trains what stock DeepSpeed trains: the oracle runs in the same processes."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from tests.harness import networks, training
from tests.harness.networks import SQUARE
from tests.harness.training import BF16, PARTITIONED, SMALL, Difference, Job, check, placed

# One strategy for each way of a gradient: it depends on g and os, and where both are G on p; p alternates.
GRADIENT_PATHS = ("INI", "GNG", "III", "IIG", "IGG", "GGG")
# One for each way to hold parameters: p = os = I, p = I with os = G, p = os = G.
PARAMETER_PATHS = ("III", "ING", "GIG")
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}


def run(
    ranks: Any, job: Job, group: int = 2, world: int = 4, strategies: Sequence[str] = PARTITIONED, stage: int = 2
) -> list[Difference]:
    """Rows of rank 0; all ranks must agree on what concerns replicas."""
    return ranks(world).run(training.compare, job, group, strategies=strategies, stage=stage)[0]


@pytest.mark.parametrize(
    "world, group, accumulation, steps, stage",
    [(4, 2, 1, 3, 2), (4, 4, 1, 3, 2), (6, 3, 1, 3, 2), (4, 2, 3, 2, 3), (4, 1, 3, 2, 3), (6, 2, 3, 2, 3)],
)
def test_parity_at_every_shape(ranks: Any, world: int, group: int, accumulation: int, steps: int, stage: int) -> None:
    # Stock stage 3 fails with a parameter without elements.
    job = Job(accumulation=accumulation, steps=steps, empty=stage == 2, zero=SMALL)
    check(run(ranks, job, group, world, stage=stage))


@pytest.mark.parametrize(
    "zero",
    [
        {"overlap_comm": True},
        {"contiguous_gradients": False},
        {"contiguous_gradients": False, "overlap_comm": True},
        {"reduce_scatter": False},
        {"sub_group_size": 10**9, "reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6},
    ],
    ids="+".join,
)
def test_parity_with_each_key_of_the_reduction(ranks: Any, zero: dict[str, Any]) -> None:
    check(run(ranks, Job(accumulation=2, steps=2, zero={**SMALL, **zero}), strategies=GRADIENT_PATHS))


@pytest.mark.parametrize(
    "zero",
    [
        {"stage3_allgather_sequential": True},
        {"stage3_param_persistence_threshold": 100},  # some
        {"stage3_param_persistence_threshold": 10**6, "overlap_comm": True},  # all
        {"stage3_prefetch_bucket_size": 0},
        {"stage3_prefetch_bucket_size": 400, "overlap_comm": True},
        {"stage3_max_live_parameters": 1},
        {"stage3_max_reuse_distance": 0},
        {"leaf_module": {"names": ["layers.1"]}},
    ],
    ids="+".join,
)
def test_parity_with_each_key_of_the_gathers(ranks: Any, zero: dict[str, Any]) -> None:
    job = Job(accumulation=2, steps=2, empty=False, zero={**SMALL, **zero})
    check(run(ranks, job, strategies=PARAMETER_PATHS, stage=3))


@pytest.mark.quick
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_uninitialized_memory_is_never_used(ranks: Any, backend: str) -> None:
    check(ranks(6).run(nan_case, 3, backend, PARTITIONED)[0])


def nan_case(group: int, backend: str, names: Sequence[str]) -> list[Difference]:
    """Train with memory that is NaN until it is written; with messages as on a backend."""
    from unittest import mock

    import torch

    from deepspeed_ext.comm import collectives

    torch.use_deterministic_algorithms(True)  # fills it
    try:
        with mock.patch.object(collectives, "backend_of", lambda group: backend):
            return training.compare(Job(accumulation=2, steps=2, zero=SMALL), group, names)
    finally:
        torch.use_deterministic_algorithms(False)


def test_parity_with_two_parameter_groups_frozen_layers_and_adam(ranks: Any) -> None:
    check(run(ranks, Job(groups=2, frozen=(1,), optimizer="Adam", accumulation=2, steps=3, zero=SMALL)))


def test_parity_with_few_trainable_parameters(ranks: Any) -> None:
    check(run(ranks, Job(sizes=SQUARE, frozen=(0, 1, 3), accumulation=2, steps=3, zero=SMALL)))


def test_parity_without_clipping(ranks: Any) -> None:
    check(run(ranks, Job(clipping=0.0, accumulation=2, steps=2), strategies=GRADIENT_PATHS))


@pytest.mark.parametrize("overlap", [False, True])
def test_parameters_unused_in_some_micro_batches_or_steps(ranks: Any, overlap: bool) -> None:
    # Layer 1 in the first micro-batch of each step only, 2 in the last only, 3 in the first step only; the second step
    # uses nothing.
    skipped = {(n, 1) for n in range(9) if n % 3} | {(n, 2) for n in range(9) if n % 3 < 2}
    skipped |= {(n, 3) for n in range(3, 9)} | {(n, layer) for n in range(3, 6) for layer in range(4)}
    zero = {**SMALL, "overlap_comm": overlap}
    job = Job(sizes=SQUARE, accumulation=3, steps=3, skipped=sorted(skipped), zero=zero)
    # Stages 1 and 2 fail where nothing is used; stage 3 applies the last gradient of an unused parameter again.
    check(run(ranks, job, strategies=GRADIENT_PATHS if overlap else PARTITIONED, stage=0))


@pytest.mark.parametrize(
    "boundary, backward", [("user", "engine"), ("step", "loss"), ("coalesce", "engine"), ("engine", "loss")]
)
def test_each_way_to_accumulate(ranks: Any, boundary: str, backward: str) -> None:
    job = Job(accumulation=3, steps=2, boundary=boundary, backward=backward, zero=SMALL)
    check(run(ranks, job, strategies=GRADIENT_PATHS))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(ranks: Any, reentrant: bool) -> None:
    job = Job(accumulation=2, steps=2, checkpointing=reentrant, zero=SMALL)
    check(run(ranks, job, strategies=PARAMETER_PATHS))


def test_torch_autocast(ranks: Any) -> None:
    config = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    check(run(ranks, Job(accumulation=2, steps=2, config=config, zero=SMALL)), **BF16)


def test_communication_in_another_dtype(ranks: Any) -> None:
    job = Job(accumulation=2, steps=2, dtype="bf16", config={"communication_data_type": "fp32"}, zero=SMALL)
    check(run(ranks, job, strategies=GRADIENT_PATHS), **BF16)


@pytest.mark.parametrize("group", [1, 2])
def test_groups_inside_the_data_parallel_group(ranks: Any, group: int) -> None:
    job = Job(accumulation=2, steps=2, tensor_parallel=2, zero=SMALL)
    for rows in ranks(4).run(training.compare, job, group, PARTITIONED):
        for row in rows:  # the two tensor-parallel ranks train different data, so only data-parallel ones agree
            assert row.weights <= 1e-5 and row.losses <= 1e-6 and row.same_decisions, row


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("fp32_accumulation", [False, True])
def test_half_precision_differs_no_more_than_stock_stages_do(ranks: Any, dtype: str, fp32_accumulation: bool) -> None:
    config = FP32_SUMS if fp32_accumulation else {}
    job = Job(accumulation=3, steps=3, dtype=dtype, config=config, zero=SMALL)
    weights, losses = ranks(4).run(training.stock_spread, job)[0]
    assert weights < 5e-3 and losses < 1e-2  # else this would show nothing
    strategies = PARTITIONED if dtype == "bf16" and fp32_accumulation else GRADIENT_PATHS
    check(run(ranks, job, strategies=strategies), weights=2 * weights, losses=2 * losses)


@pytest.mark.quick
def test_overflow_on_one_rank_is_skipped_by_all(ranks: Any) -> None:
    job = Job(accumulation=2, steps=4, dtype="fp16", overflow=[(3, 3)], zero=SMALL)
    for rank_rows in ranks(4).run(overflow_case, job, PARTITIONED, {}):
        for name, scales, applied, difference in rank_rows:
            assert applied == [True, False, True, True], (name, applied)
            assert scales == [256.0, 128.0, 128.0, 128.0], (name, scales)
            assert difference <= 1e-3, (name, difference)


@pytest.mark.parametrize("fp32_accumulation", [False, True])
def test_overflow_with_offload_drops_the_gradients(ranks: Any, fp32_accumulation: bool) -> None:
    # The overflow is in the first micro-batch, so that the second adds to what is infinite already.
    config = {"zero_force_ds_cpu_optimizer": False, **(FP32_SUMS if fp32_accumulation else {})}
    job = Job(accumulation=2, steps=4, dtype="fp16", overflow=[(2, 1)], config=config, zero=SMALL)
    strategies = PARTITIONED if fp32_accumulation else GRADIENT_PATHS
    for rank_rows in ranks(4).run(overflow_case, job, strategies, {"offload_optimizer": {"device": "cpu"}}):
        for name, _, applied, difference in rank_rows:
            assert applied == [True, False, True, True], (name, applied)
            assert difference <= 1e-3, (name, difference)


def overflow_case(
    job: Job, strategies: Sequence[str], zero: dict[str, Any]
) -> list[tuple[str, list[float], list[bool], float]]:
    """Each strategy with ``zero`` against stock stage 2 without it, through an overflow: difference of weights."""
    stock = training.train(job, {"stage": 2})
    rows = []
    for name in strategies:
        ours = training.train(job, placed(name, **zero))
        difference = training.difference(name, ours, stock, "").weights
        rows.append((name, ours.scales, ours.applied, difference))
    return rows


@pytest.mark.parametrize("dtype, overlap", [("fp32", False), ("bf16", True)])
def test_two_backwards_at_one_boundary_add_up(ranks: Any, dtype: str, overlap: bool) -> None:
    zero = {**SMALL, "overlap_comm": overlap}
    job = Job(accumulation=2, dtype=dtype, config=FP32_SUMS, zero=zero, steps=2)
    for rank_rows in ranks(4).run(two_backwards_case, job):
        for name, difference in rank_rows:
            assert difference <= {"fp32": 1e-5, "bf16": 4e-3}[dtype], (name, difference)


def two_backwards_case(job: Job) -> list[tuple[str, float]]:
    """Two losses in each micro-step, backward one after the other or of their sum."""
    rows = []
    for name in GRADIENT_PATHS:
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
    assert ranks(4).run(replicas_case) == [[("INI", [4.0], True), ("III", [4.0], True)]] * 4


def replicas_case() -> list[tuple[str, list[float], bool]]:
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


@pytest.mark.parametrize("fp32_accumulation", [False, True])
def test_optimizer_offload(ranks: Any, fp32_accumulation: bool) -> None:
    config: dict[str, Any] = {"zero_force_ds_cpu_optimizer": False}
    zero = {"offload_optimizer": {"device": "cpu"}, **SMALL}
    job = Job(accumulation=2, steps=2, groups=2, config=config, zero=zero)
    if fp32_accumulation:
        job = Job(**{**job.__dict__, "dtype": "bf16", "config": {**config, **FP32_SUMS}})
    strategies = GRADIENT_PATHS if fp32_accumulation else PARTITIONED
    check(run(ranks, job, strategies=strategies), **(BF16 if fp32_accumulation else {}))


@pytest.mark.parametrize("threshold", [0, 10**6])
def test_parameter_offload(ranks: Any, threshold: int) -> None:
    zero = {**SMALL, "offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": threshold}
    zero["offload_optimizer"] = {"device": "cpu"}
    config = {"zero_force_ds_cpu_optimizer": False}
    job = Job(accumulation=2, steps=2, frozen=(1,), empty=False, config=config, zero=zero)
    check(run(ranks, job, strategies=("INI", "III", "GNG", "GIG", "GGG"), stage=3))


@pytest.mark.parametrize("network", [networks.Shared, networks.External], ids=lambda network: network.__name__)
@pytest.mark.parametrize("stage, threshold", [(2, 0), (3, 10**6)])
def test_shared_weights(ranks: Any, network: Any, stage: int, threshold: int) -> None:
    zero = {**SMALL, "stage3_param_persistence_threshold": threshold}
    job = Job(sizes=SQUARE, network=network, accumulation=2, steps=2, empty=False, zero=zero)
    check(run(ranks, job, stage=stage, strategies=PARTITIONED if stage == 2 else PARAMETER_PATHS))


def test_experts_that_only_some_ranks_use(ranks: Any) -> None:
    job = Job(sizes=SQUARE, network=networks.Mixture, accumulation=2, steps=3, empty=False, zero=SMALL)
    check(run(ranks, job, stage=3))


def test_sequences_of_different_length(ranks: Any) -> None:
    check(run(ranks, Job(network=networks.Ragged, accumulation=2, steps=2, zero=SMALL)))


@pytest.mark.parametrize("name", ["INI", "ING", "III", "IIG"])
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


def orders_case(job: Job, name: str) -> Difference:
    """Compare to stage 0: stages 1 to 3 reduce gradients in the order in which a rank finds them."""
    stock = training.train(job, {"stage": 0})
    ours = training.train(job, placed(name))
    return training.difference(name, ours, stock, "")


def test_one_rank_alone(ranks: Any) -> None:
    check(run(ranks, Job(accumulation=2, steps=2, zero=SMALL), group=1, world=1))


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
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
    check(run(ranks, Job(sizes=sizes, accumulation=2, groups=groups, zero=zero, steps=2)))
