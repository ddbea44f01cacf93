# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Parity of pipelines with each strategy with ZeRO-1, and with plain torch without a pipeline."""

from typing import Any

import pytest
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from tests.harness import pipelines
from tests.harness.tiers import deep, with_cases
from tests.harness.training import PARTITIONED, REPLICATED, SMALL, placed

SOME = ("NIG", "IIG")


def run(
    ranks: Any,
    names: tuple[str, ...],
    world: int = 4,
    group: int = 1,
    oracles: tuple[str, ...] = ("torch",),
    bound: float = 1e-6,
    norms: float = 1e-6,
    **pipe: Any,
) -> None:
    """Compare, and check bounds that fp32 rounding does not reach; no gradient may be missing."""
    for row in ranks(world).rows(pipeline_case, names, group, oracles, pipe):
        assert row.same, row
        assert row.weights <= bound and row.losses <= bound and row.norms <= norms, row
        assert row.kind == ("Stage3Optimizer" if row.strategy[:2] in ("IN", "GN", "3 ") else row.kind), row


def pipeline_case(names: tuple[str, ...], group: int, oracles: tuple[str, ...], pipe: dict[str, Any]) -> list[Any]:
    pipe = {"zero": SMALL, "steps": 2, "micro_batches": 2, **pipe}
    return pipelines.compare_pipelines(pipelines.Pipe(**pipe), names, group, oracles)


@pytest.mark.quick
@pytest.mark.parametrize("names", [("NNN",), ("GGG",), *deep((REPLICATED,), (PARTITIONED,))])
def test_every_strategy_matches_zero_1(ranks: Any, names: tuple[str, ...]) -> None:
    run(ranks, names, oracles=("torch", "1"), micro_batches=3)


def test_plain_stages_2_and_3_are_the_strategies_that_they_mean(ranks: Any) -> None:
    run(ranks, ("2", "3"))


UNTRAINED = {"tied": False, "groups": 1}  # stages, with which DeepSpeed's own pipelines fail
SIXTEEN_BITS = {
    "oracles": ("1",),
    "bound": 4e-3,
    "norms": 2e-3,
    "dtype": "bf16",
}  # a few ulp of bf16, 4e-3 of a weight
OFFLOADED = {"zero": {**SMALL, "offload_optimizer": {"device": "cpu"}}, "optimizer": "Adam"}


@with_cases(
    "names, options",
    (SOME, {"stages": 3, "world": 6}),
    (SOME, {"micro_batches": 1}),
    (("NNG", *SOME), {"zero": {**SMALL, "overlap_comm": True}}),
    (
        SOME,
        {"zero": {**SMALL, "round_robin_gradients": True}, "groups": 2, "method": "parameters", "checkpointing": 1},
    ),
    (("NIG", "2"), {"experts": 2, "oracles": ("1",)}),
    (SOME, {**UNTRAINED, "frozen": (3, 4, 5), "groups": 2}),
    (("IIG", "GGG"), {"zero": {**SMALL, "stage3_leaf_bytes": True}}),
    (SOME, {**OFFLOADED, "config": {"zero_force_ds_cpu_optimizer": False}}),
    (SOME, {**SIXTEEN_BITS, "config": {"data_types": {"grad_accum_dtype": "fp32"}}}),
    *deep(
        *((names, {"world": 8, "group": 2}) for names in (("NIG", "III"), ("NNG", "IIG"))),
        (("NIG", "III"), {"group": 2}),
        *((SOME, {"micro_batches": number}) for number in (2, 8)),
        (SOME, {"zero": {**SMALL, "contiguous_gradients": False}, "two": 2}),
        (SOME, {"tied": False, "frozen": (3, 4), "checkpointing": -2}),
        (SOME, {"zero": {}, "optimizer": "Adam", "clipping": 0.0, "config": {"wall_clock_breakdown": True}}),
        *((REPLICATED, {"experts": e, "oracles": ("1",), "world": 4 * e, "group": 2}) for e in (1, 2)),
        (SOME, {**UNTRAINED, "frozen": (0, 1, 2)}),
        (SOME, {**UNTRAINED, "frozen": (2, 3), "stages": 4}),
        (SOME, SIXTEEN_BITS),
    ),
    ids=lambda value: " ".join([*value, *value.get("zero", ())] if isinstance(value, dict) else value),
)
def test_options_match_zero_1(ranks: Any, names: tuple[str, ...], options: dict[str, Any]) -> None:
    run(ranks, names, **options)


@with_cases("names", SOME, *deep((REPLICATED,), (PARTITIONED,)))
def test_muon_matches_zero_1(ranks: Any, names: tuple[str, ...]) -> None:
    # The embedding is tied, and trained by Adam. Muon's iterations amplify rounding errors.
    muon: dict[str, Any] = {"oracles": ("1",), "optimizer": "Muon", "bound": 1e-5, "norms": 1e-5}
    run(ranks, names[1:], **muon)
    run(ranks, names[:2], tied=False, groups=2, clipping=0.0, frozen=(3,), **muon)


@pytest.mark.quick
def test_an_overflow_on_one_rank_skips_the_step_of_all_stages(ranks: Any) -> None:
    for rows in ranks(4).run(overflow_case):
        assert rows == [("NIG", True), ("IIG", True)]


def overflow_case() -> list[tuple[str, bool]]:
    """Return strategies, and whether they took the decisions of ZeRO-1 and have its weights."""
    pipe = pipelines.Pipe(dtype="fp16", overflow=[(1, 3)], micro_batches=2)
    stock = pipelines.train_pipeline(pipe, {"stage": 1})
    assert stock.applied == [True, False, True]
    rows = []
    for name in SOME:
        ours = pipelines.train_pipeline(pipe, {"paro_strategy": name, "paro_group_size": 1})
        row = pipelines.apart(name, ours, stock)
        rows.append((name, ours.applied == stock.applied and ours.same and max(row[1:4]) < 1e-3))
    return rows


def test_compression_keeps_tied_weights_equal_on_all_stages(ranks: Any, kernels: bool) -> None:
    for name, equal, weights in ranks(4).rows(loco_case):
        assert equal and weights < 0.05, (name, equal, weights)


def loco_case() -> list[tuple[str, bool, float]]:
    """Return strategies, whether all copies of weights are bitwise equal, and their distance from ZeRO-1's."""
    rows, both = [], {"zeropp_loco_param": {}, "paro_quantized_updates": {}}
    pipes = {tied: pipelines.Pipe(micro_batches=2, tied=tied) for tied in (True, False)}
    stock = {tied: pipelines.train_pipeline(pipe, {"stage": 1}) for tied, pipe in pipes.items()}
    for name, tied, compressed in (
        ("NIG", True, {"zeropp_loco_param": {}}),
        ("IIG", False, both),
        *((name, True, both) for name in ("NNI", "INI")),
    ):
        ours = pipelines.train_pipeline(pipes[tied], {"paro_strategy": name, "paro_group_size": 1, **compressed})
        rows.append((name, ours.same, pipelines.apart(name, ours, stock[tied]).weights))
    return rows


def test_tensor_parallel_pipelines_match_zero_1(ranks: Any) -> None:
    for row in ranks(8).rows(tensor_parallel_case):
        assert row.same and max(row.weights, row.losses, row.norms) < 1e-6, row


def tensor_parallel_case() -> list[Any]:
    """Return the distance from ZeRO-1 with 2 stages of 2 data-parallel and 2 tensor-parallel ranks each. Layers are
    not sharded; activations between stages are, as in DeepSpeed."""
    pipe, topology = pipelines.Pipe(2, 2, 2, zero=SMALL), PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    stock = pipelines.train_pipeline(pipe, {"stage": 1}, topology=topology)
    ours = {name: pipelines.train_pipeline(pipe, placed(name, 1), topology=topology) for name in SOME}
    return [pipelines.apart(name, run, stock) for name, run in ours.items()]


def test_evaluation_between_steps(ranks: Any) -> None:
    (_, stock), *answers = ranks(4).each(evaluation_case, ("1", "NIG", "IIG"))
    assert all(losses == stock for _, losses in answers), (stock, answers)


def evaluation_case(name: str) -> list[float]:
    engine, data = pipelines.start(pipelines.Pipe(), placed(name, 1))
    return [round(float(run(data)), 5) for run in (engine.train_batch, engine.eval_batch) * 2]
