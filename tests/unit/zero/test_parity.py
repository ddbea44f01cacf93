# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Every strategy with p = N trains what stock DeepSpeed trains: the oracle runs in the same processes."""

from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from tests.harness import training
from tests.harness.training import BF16, REPLICATED, Difference, Job

SHARDED_GRADIENTS = ("NII", "NIG", "NGG")
WHOLE_GRADIENTS = ("NNN", "NNI", "NNG")
SMALL_BUCKETS = {"reduce_bucket_size": 300, "allgather_bucket_size": 300}
check = partial(training.check, optimizer="Stage12Optimizer")


def run(ranks: Any, job: Job, world: int = 4, group: int = 2, **kwargs: Any) -> list[Difference]:
    """Rows of rank 0; all ranks must agree on what concerns replicas."""
    return ranks(world).run(training.compare, job, group, **kwargs)[0]


@pytest.mark.parametrize(
    "world, group, accumulation", [(4, 2, 1), (4, 4, 1), (6, 3, 1), (4, 2, 3), (4, 1, 3), (6, 2, 3)]
)
def test_parity_at_every_shape(ranks: Any, world: int, group: int, accumulation: int) -> None:
    check(run(ranks, Job(accumulation=accumulation, zero=SMALL_BUCKETS), world, group))


@pytest.mark.parametrize(
    "zero",
    [
        {},
        {"overlap_comm": True, **SMALL_BUCKETS},
        {"contiguous_gradients": False, **SMALL_BUCKETS},
        {"contiguous_gradients": False, "overlap_comm": True, **SMALL_BUCKETS},
        {"round_robin_gradients": True, **SMALL_BUCKETS},
        {"parameter_alignment": True, **SMALL_BUCKETS},
        {"reduce_scatter": False, **SMALL_BUCKETS},
    ],
    ids=lambda zero: "+".join(key for key in zero if "bucket" not in key) or "one-bucket",
)
def test_parity_with_each_key_of_the_parent(ranks: Any, zero: dict[str, Any]) -> None:
    check(run(ranks, Job(accumulation=3, zero=zero)))


@pytest.mark.parametrize(
    "config, reduce_scatter",
    [
        ({"prescale_gradients": True}, False),
        ({"gradient_predivide_factor": 2.0}, False),
        ({"gradient_allreduce_op": "sum"}, False),
        ({"gradient_allreduce_op": "sum"}, True),
    ],
)
def test_parity_of_gradient_scaling(ranks: Any, config: dict[str, Any], reduce_scatter: bool) -> None:
    check(run(ranks, Job(accumulation=2, config=config, zero={"reduce_scatter": reduce_scatter, **SMALL_BUCKETS})))


def test_parity_with_two_parameter_groups_frozen_layers_and_adam(ranks: Any) -> None:
    check(run(ranks, Job(groups=2, frozen=(1,), optimizer="Adam", accumulation=2, zero=SMALL_BUCKETS)))


@pytest.mark.quick
@pytest.mark.parametrize("overlap", [False, True])
def test_parity_with_messages_as_on_nccl(ranks: Any, overlap: bool) -> None:
    job = Job(accumulation=2, steps=2, zero={"overlap_comm": overlap, **SMALL_BUCKETS})
    check(ranks(6).run(nccl_case, job, 3)[0])


def nccl_case(job: Job, group: int) -> list[Difference]:
    """Train with filled up messages and collectives of the backend, and memory that is NaN until it is written."""
    from unittest import mock

    import torch

    from deepspeed_ext.comm import collectives

    torch.use_deterministic_algorithms(True)  # fills it
    try:
        with mock.patch.object(collectives, "backend_of", lambda group: "nccl"):
            return training.compare(job, group)
    finally:
        torch.use_deterministic_algorithms(False)


def test_parity_without_clipping(ranks: Any) -> None:
    check(run(ranks, Job(clipping=0.0, accumulation=2)))


@pytest.mark.parametrize("overlap", [False, True])
def test_parameter_unused_in_the_last_micro_batch(ranks: Any, overlap: bool) -> None:
    # Layer 1 is used in the first micro-batch of each step only, layer 2 in the last only.
    skipped = [(n, 1) for n in range(15) if n % 3] + [(n, 2) for n in range(15) if n % 3 < 2]
    zero = {"overlap_comm": overlap, **SMALL_BUCKETS}
    # Stage 1 with overlap_comm takes the local gradient of such a parameter for the mean, so stage 2 is the oracle.
    check(run(ranks, Job(accumulation=3, skipped=skipped, zero=zero)))


@pytest.mark.parametrize("boundary", ["user", "step", "coalesce"])
@pytest.mark.parametrize("backward", ["engine", "loss"])
def test_each_way_to_accumulate(ranks: Any, boundary: str, backward: str) -> None:
    check(run(ranks, Job(accumulation=3, boundary=boundary, backward=backward, zero=SMALL_BUCKETS)))


def test_loss_backward_called_directly(ranks: Any) -> None:
    check(run(ranks, Job(accumulation=2, backward="loss", zero=SMALL_BUCKETS)))


def test_no_sync(ranks: Any) -> None:
    job = Job(accumulation=3, no_sync=True, zero=SMALL_BUCKETS)
    check(run(ranks, job, strategies=WHOLE_GRADIENTS, stage=1))


def test_torch_autocast(ranks: Any) -> None:
    config = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    check(run(ranks, Job(accumulation=2, config=config, zero=SMALL_BUCKETS)), **BF16)


def test_communication_in_another_dtype(ranks: Any) -> None:
    job = Job(accumulation=2, dtype="bf16", config={"communication_data_type": "fp32"}, zero=SMALL_BUCKETS)
    check(run(ranks, job), **BF16)


@pytest.mark.parametrize("group", [1, 2])
def test_groups_inside_the_data_parallel_group(ranks: Any, group: int) -> None:
    job = Job(accumulation=2, tensor_parallel=2, zero=SMALL_BUCKETS)
    for rows in ranks(4).run(training.compare, job, group):
        for row in rows:  # the two tensor-parallel ranks train different data, so only data-parallel ones agree
            assert row.weights <= 1e-5 and row.losses <= 1e-6 and row.same_decisions, row


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(ranks: Any, reentrant: bool) -> None:
    check(run(ranks, Job(accumulation=2, checkpointing=reentrant, zero=SMALL_BUCKETS)))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("fp32_accumulation", [False, True])
def test_half_precision_differs_no_more_than_stock_stages_do(ranks: Any, dtype: str, fp32_accumulation: bool) -> None:
    config = {"data_types": {"grad_accum_dtype": "fp32"}} if fp32_accumulation else {}
    job = Job(accumulation=3, dtype=dtype, config=config, zero=SMALL_BUCKETS)
    weights, losses = ranks(4).run(training.stock_spread, job)[0]
    assert weights < 5e-3 and losses < 1e-2  # else this would show nothing
    check(run(ranks, job), weights=2 * weights, losses=2 * losses)


@pytest.mark.quick
def test_overflow_on_one_rank_is_skipped_by_all(ranks: Any) -> None:
    job = Job(accumulation=2, dtype="fp16", overflow=[(5, 3)], steps=5, zero=SMALL_BUCKETS)
    results = ranks(4).run(overflow_case, job)
    for rank_rows in results:
        for name, stock_stage, scales, applied, unchanged in rank_rows:
            assert applied == [True, True, False, True, True], (name, stock_stage, applied)
            assert scales == [256.0, 256.0, 128.0, 128.0, 128.0], (name, scales)
            assert unchanged, name


def overflow_case(job: Job) -> list[tuple[str, int, list[float], list[bool], bool]]:
    """Each strategy through an overflow in step 3; whether the skipped step left the weights as they were."""
    import dataclasses

    import torch

    rows = []
    for name in REPLICATED:
        zero = {"paro_strategy": name, "paro_group_size": 2}
        whole = training.train(job, zero)
        before = training.train(dataclasses.replace(job, steps=2), zero).weights
        after = training.train(dataclasses.replace(job, steps=3), zero).weights
        rows.append((name, 0, whole.scales, whole.applied, torch.equal(before, after)))
    return rows


def test_overflow_parity(ranks: Any) -> None:
    job = Job(accumulation=2, dtype="fp16", overflow=[(4, 1)], zero=SMALL_BUCKETS)
    check(run(ranks, job), weights=1e-3, losses=1e-3)


@pytest.mark.parametrize("fp32_accumulation", [False, True])
def test_optimizer_offload(ranks: Any, fp32_accumulation: bool) -> None:
    config: dict[str, Any] = {"zero_force_ds_cpu_optimizer": False}
    job = Job(accumulation=3, groups=2, config=config, zero={"offload_optimizer": {"device": "cpu"}, **SMALL_BUCKETS})
    if fp32_accumulation:
        job = Job(
            **{**job.__dict__, "dtype": "bf16", "config": {**config, "data_types": {"grad_accum_dtype": "fp32"}}}
        )
    check(run(ranks, job), **(BF16 if fp32_accumulation else {}))


def test_offload_of_masters_in_bf16_sums_in_fp32(ranks: Any) -> None:
    for rows in ranks(4).run(low_precision_case):
        check(rows, **BF16)


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
        zero={"offload_optimizer": {"device": "cpu"}, **SMALL_BUCKETS},
    )
    with mock.patch.object(stage_1_and_2, "DeepSpeedCPUAdam", torch.optim.SGD):
        return training.compare(job, 2, ("NIG", "NGG"))


def test_overflow_with_offload_drops_the_gradients(ranks: Any) -> None:
    config = {"zero_force_ds_cpu_optimizer": False, "data_types": {"grad_accum_dtype": "fp32"}}
    job = Job(accumulation=2, dtype="fp16", overflow=[(4, 1)], config=config, zero=SMALL_BUCKETS)
    for rank_rows in ranks(4).run(overflow_offload_case, job):
        for name, applied, difference in rank_rows:
            assert applied == [True, True, False, True, True], (name, applied)
            assert difference <= 1e-3, (name, difference)


def overflow_offload_case(job: Job) -> list[tuple[str, list[bool], float]]:
    """Steps applied, and the difference to the same without offload.

    Stock DeepSpeed is no oracle: with offload it adds the next step's gradients to those of a skipped step.
    """
    rows = []
    for name in REPLICATED:
        zero: dict[str, Any] = {"paro_strategy": name, "paro_group_size": 2}
        device = training.train(job, zero)
        offloaded = training.train(job, {**zero, "offload_optimizer": {"device": "cpu"}})
        difference = (device.weights - offloaded.weights).abs().max() / device.weights.abs().max()
        rows.append((name, offloaded.applied, difference.item()))
    return rows


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("overlap", [False, True])
def test_two_backwards_at_one_boundary_add_up(ranks: Any, dtype: str, overlap: bool) -> None:
    config = {"data_types": {"grad_accum_dtype": "fp32"}}
    job = Job(dtype=dtype, config=config, zero={"overlap_comm": overlap, **SMALL_BUCKETS}, steps=3)
    for rank_rows in ranks(4).run(two_backwards_case, job):
        for name, difference in rank_rows:
            assert difference <= {"fp32": 1e-5, "bf16": 4e-3}[dtype], (name, difference)


def two_backwards_case(job: Job) -> list[tuple[str, float]]:
    """Two losses, backward one after the other or of their sum; stock stage 2 loses the first one in fp32."""
    import torch

    rows = []
    for name in REPLICATED:
        weights = []
        for summed in (False, True):
            engine, model = training.make_engine(job, {"paro_strategy": name, "paro_group_size": 2})
            data = training.batches(job)
            for _ in range(job.steps):
                losses = [((engine(x) - y) ** 2).float().mean() for x, y in (next(data), next(data))]
                for loss in [losses[0] + losses[1]] if summed else losses:
                    engine.backward(loss)
                engine.step()
            weights.append(torch.cat([p.detach().float().flatten() for p in model.parameters()]))
            engine.destroy()
        rows.append((name, ((weights[0] - weights[1]).abs().max() / weights[1].abs().max()).item()))
    return rows


def test_replicas_of_the_optimizer_decide_alike(ranks: Any) -> None:
    answers = ranks(4).run(replicas_case)
    assert answers == [[("NNN", 4.0, True, -1.0), ("NNI", 4.0, True, -1.0), ("NII", 4.0, True, -1.0)]] * 4


def replicas_case() -> list[tuple[str, float, bool, float]]:
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


def test_one_rank_alone(ranks: Any) -> None:
    check(run(ranks, Job(accumulation=2, zero=SMALL_BUCKETS), world=1, group=1))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(
    sizes=some.lists(some.integers(1, 60), min_size=3, max_size=6),
    bucket=some.integers(10, 4000),
    accumulation=some.integers(1, 3),
    groups=some.integers(1, 3),
    overlap=some.booleans(),
    contiguous=some.booleans(),
)
def test_random_models(
    ranks: Any, sizes: list[int], bucket: int, accumulation: int, groups: int, overlap: bool, contiguous: bool
) -> None:
    zero = {
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": 2 * bucket,
        "overlap_comm": overlap,
        "contiguous_gradients": contiguous,
    }
    job = Job(sizes=sizes, accumulation=accumulation, groups=groups, zero=zero, steps=3)
    check(run(ranks, job))
