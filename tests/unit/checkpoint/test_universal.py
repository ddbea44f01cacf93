# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of any strategy or stage, loaded by any other: unchanged if both shard equally, or as universal ones."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.checkpoint.constants import LOSS_SCALER

from deepspeed_ext.checkpoint import to_universal, universal
from deepspeed_ext.zero.saved_states import MOMENTUM
from tests.harness import snapshots, training
from tests.harness.tiers import deep, with_cases
from tests.harness.training import PARTITIONED, REPLICATED, placed

STOCK = ("1", "2", "3")
ALL = (*REPLICATED, *PARTITIONED, *STOCK)
UNIVERSAL = {"checkpoint": {"load_universal": True}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
# A sub-group for each parameter group: DeepSpeed's stage 3 divides none anew.
ONE_SUB_GROUP = {"sub_group_size": 10**6, "allgather_bucket_size": 10**6}
SUB_GROUPS = {"reduce_bucket_size": 300, **ONE_SUB_GROUP}


def save_case(
    name: str, folder: str, dtype: str, group_size: int = 2, kind: str = "Adam", zero: Any = None, convert: bool = True
) -> None:
    job = snapshots.job_of_kind(kind, dtype)
    job = replace(job, zero={**job.zero, **(zero or {})})
    engine, model = training.make_engine(job, placed(name, group_size))
    snapshots.mark(engine, model)
    snapshots.run(engine, job, snapshots.steps_of(job, 3))
    observed = snapshots.snapshot(engine, model, job)
    engine.save_checkpoint(f"{folder}/{name}", client_state={"epoch": 5})
    snapshots.on_first_rank(torch.save, observed, f"{folder}/{name}/seen.pt")
    if convert:
        snapshots.convert(f"{folder}/{name}", ours=kind != "Adam")


def load_case(
    pair: tuple[str, str],
    folder: str,
    dtype: str,
    group_size: int = 2,
    kind: str = "Adam",
    zero: dict[str, Any] | None = None,
    config: dict[str, Any] = UNIVERSAL,
) -> dict[str, float]:
    job = snapshots.job_of_kind(kind, dtype, **config)
    job = replace(job, zero={**job.zero, **(zero or {})})
    saved, loaded = pair
    engine, model = training.make_trained(job, placed(loaded, group_size), skip=7)  # something to be overwritten
    _, client_state = engine.load_checkpoint(f"{folder}/{saved}")
    assert client_state["epoch"] == 5
    differences = snapshots.difference(torch.load(f"{folder}/{saved}/seen.pt"), snapshots.snapshot(engine, model, job))
    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    counts = snapshots.snapshot(engine, model, job)["steps"]
    assert counts.tolist() == [4.0], counts  # each of the optimizer's tensors has counted that step, and once
    return differences


def pairs_of(sources: tuple[str, ...], targets: int) -> list[tuple[str, str]]:
    """Return pairs of each source with some of the others, in which each is a target equally often, except pairs that
    DeepSpeed loads with its own code, without buffers and frozen parameters."""
    pairs = [(a, sources[(i + 1 + j * 3) % len(sources)]) for i, a in enumerate(sources) for j in range(targets)]
    sharded = (*PARTITIONED, "3")
    return [(a, b) for a, b in pairs if b not in STOCK or (a in sharded) != (b in sharded)]


SOME = ("NII", "IIG", "2", "3")


@with_cases(
    "dtype, sources, targets",
    ("bf16", ("III", "NIG", "2", "3"), 1),
    *deep(("fp32", ALL, 2), ("bf16", SOME, 2), ("fp16", SOME, 2)),
)
def test_each_strategy_loads_from_the_others(
    ranks: Any, tmp_path: Path, dtype: str, sources: tuple[str, ...], targets: int
) -> None:
    """Weights, moments, step counts, hyperparameters, frozen parameters, buffers and counters: to the bit."""
    ranks(4).each(save_case, sources, str(tmp_path), dtype)
    for pair, differences in ranks(4).each(load_case, pairs_of(sources, targets), str(tmp_path), dtype):
        assert differences == {}, (pair, differences)


@with_cases(
    "world_size, group_size, dtype, optimizer",
    (2, 1, "fp32", "Adam"),
    (2, 2, "fp32", "Muon"),
    *deep((6, 2, "fp32", "Adam"), (8, 4, "fp32", "Muon"), (2, 1, "fp16", "Muon"), (4, 4, "bf16", "Muon")),
)
def test_checkpoints_load_with_other_numbers_of_ranks(
    ranks: Any, tmp_path: Path, world_size: int, group_size: int, dtype: str, optimizer: str
) -> None:
    pairs = [("NIG", "IIG"), ("IIG", "GGG"), ("2", "NIG"), ("NIG", "3")][: 2 if optimizer == "Muon" else 4]
    ranks(4).each(save_case, {saved for saved, _ in pairs}, str(tmp_path), dtype, 2, optimizer)
    for row in ranks(world_size).each(load_case, pairs, str(tmp_path), dtype, group_size, optimizer):
        assert row[1].keys() <= {"counters"}, row  # samples of a step


@with_cases(
    "saved_by, world_size, group_size, loaded_by, optimizer",
    (4, 2, 2, 2, "Adam"),
    *deep(*((*shape, "Adam") for shape in ((2, 2, 2, 1), (4, 4, 2, 2), (1, 8, 4, 4), (2, 4, 4, 4), (2, 8, 2, 1)))),
    *deep(*((*shape, "Muon") for shape in ((4, 2, 2, 2), (2, 8, 2, 1)))),
)
def test_experts_load_with_another_expert_parallel_size(
    ranks: Any, tmp_path: Path, saved_by: int, world_size: int, group_size: int, loaded_by: int, optimizer: str
) -> None:
    pairs = [("NIG", "IIG"), ("IIG", "2")][: 1 if optimizer == "Muon" else 2]
    saving, loading = f"{saved_by} {optimizer}", f"{loaded_by} {optimizer}"
    ranks(4).each(save_case, {saved for saved, _ in pairs}, str(tmp_path), "fp32", 2, saving)
    for row in ranks(world_size).each(load_case, pairs, str(tmp_path), "fp32", group_size, loading):
        retained = [name for name in row[1] if not name.endswith("tokens_per_expert buffer")]
        assert set(retained) <= {"counters"}, row  # samples of a step; a rank's tokens are not saved


MODULE, NO_STATES = {"load_module_only": True}, {"load_optimizer_states": False}


@with_cases("parts", ((MODULE, True), (NO_STATES, False)), *deep((((MODULE, False), (NO_STATES, True)),)))
def test_weights_load_without_optimizer_states(ranks: Any, tmp_path: Path, parts: Any) -> None:
    ranks(4).each(save_case, ("NIG", "IIG"), str(tmp_path), "bf16")
    for part, from_fp32 in parts:
        pairs = (("NIG", "III"), ("IIG", "NNI"))
        for pair, (model, masters, moments) in ranks(4).each(weights_case, pairs, str(tmp_path), part, from_fp32):
            assert model == 0.0 and (masters == 0.0) == from_fp32, (pair, model, masters)
            assert not moments, pair


def weights_case(pair: tuple[str, str], folder: str, part: dict[str, bool], fp32: bool) -> tuple[float, float, bool]:
    """Return differences of the model's and the optimizer's weights, and whether moments have changed."""
    job = snapshots.job_of("bf16", **UNIVERSAL)
    job = replace(job, zero={**job.zero, "load_from_fp32_weights": fp32})
    saved, loaded = pair
    engine, model = training.make_trained(job, loaded, skip=7)
    before = snapshots.snapshot(engine, model, job)
    engine.load_checkpoint(f"{folder}/{saved}", **part)
    after, expected = snapshots.snapshot(engine, model, job), torch.load(f"{folder}/{saved}/seen.pt")
    gaps = snapshots.difference(expected, after)
    of_model = max((gap for name, gap in gaps.items() if name.endswith((" model", " buffer"))), default=0.0)
    of_masters = max((gap for name, gap in gaps.items() if name.endswith(" fp32")), default=0.0)
    moved = [name for name in snapshots.difference(before, after) if " exp_avg" in name or name == "steps"]
    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    return of_model, of_masters, bool(moved)


# (optimizer, saved by, on ranks, loaded by, on ranks); groups of 2. With os = I a group holds all states, whatever the
# number of groups; with os = G strategies with p = N, and those with p sharded, and DeepSpeed's, load each other's.
ALIKE = [("Adam", "2", 4, "NIG", 4), ("Adam", "3", 4, "IIG", 4), ("Adam", "III", 4, "INI", 2)]
ALIKE += [("Muon", "GNG", 4, "IIG", 4), *deep(("Adam", "3", 2, "III", 4), ("Adam", "NNN", 4, "NNN", 2))]
ALIKE += deep(("Adam", "NNG", 4, "1", 4), ("Adam", "GGG", 4, "ING", 4), ("Adam", "2", 2, "NII", 4))
ALIKE += deep(("Muon", "NII", 4, "NNI", 2), ("Adam", "INI", 6, "III", 4), ("Adam", "NII", 4, "NNI", 6))
ALIKE += deep(("Muon", "III", 4, "INI", 6))


@pytest.mark.parametrize("optimizer, saved, ranks_before, loaded, ranks_after", ALIKE)
def test_equally_sharded_states_load_without_conversion(
    ranks: Any, tmp_path: Path, optimizer: str, saved: str, ranks_before: int, loaded: str, ranks_after: int
) -> None:
    case = {"dtype": "fp32", "kind": optimizer}
    ranks(ranks_before).run(save_case, saved, str(tmp_path), **case, zero=ONE_SUB_GROUP, convert=False)
    more = {"zero": {"sub_group_size": 40}, "config": {}}
    for results in ranks(ranks_after).run(load_case, (saved, loaded), str(tmp_path), **case, **more):
        # Samples of a step go by the number of ranks.
        assert results.keys() <= ({"counters"} if ranks_before != ranks_after else set()), results


# (saved by, loaded by, keys of both, keys of the first)
PAIRS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("2", "NIG", {}, {}),
    ("1", "NNG", {"round_robin_gradients": True}, {}),
    ("NIG", "2", OFFLOAD, {}),
]
SHARDED: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [("3", "IIG", {}, {}), ("GNG", "3", {}, {})]
MORE_PAIRS = [*PAIRS, ("2", "NGG", {"parameter_alignment": True}, {}), ("1", "NIG", {}, OFFLOAD)]
MORE_SHARDED = [*SHARDED, ("3", "GIG", OFFLOAD, {})]
# DeepSpeed's own runs, from universal checkpoints
CONVERTED = [("IIG", "2", {}, {}), ("IIG", "3", {}, {}), ("NIG", "1", OFFLOAD, {})]


@with_cases(
    "pairs, dtype, universal",
    (PAIRS[1:], "fp32", False),
    (CONVERTED[:1], "fp32", True),
    *deep((SHARDED, "fp16", False)),
    *deep(*((pairs, dtype, False) for pairs in (MORE_PAIRS, MORE_SHARDED) for dtype in ("fp32", "fp16"))),
    *deep((CONVERTED, "fp32", True), (CONVERTED, "fp16", True)),
    ids=lambda value: f"{len(value)} pairs" if isinstance(value, list) else str(value),
)
def test_stock_and_strategies_exchange_momentum(
    ranks: Any, tmp_path: Path, pairs: list[tuple[Any, ...]], dtype: str, universal: bool
) -> None:
    # As in parity tests. Momentum with a loss scale too many would be 256 times what it should be.
    bound = 1e-4 if dtype == "fp32" else 5e-2
    for pair, (weights, momentum) in ranks(4).each(interchange_case, pairs, str(tmp_path), dtype, universal):
        assert weights < bound and momentum < bound, (pair, weights, momentum)


def interchange_case(pair: tuple[Any, ...], folder: str, dtype: str, universal: bool) -> list[float]:
    """Relative differences of weights and momentum between a run and one that another has begun."""
    config = UNIVERSAL if universal else {}
    job = training.Job((13, 37, 29, 29, 7), False, optimizer="Muon", dtype=dtype, groups=2, config=config)
    first, then = snapshots.steps_of(job, 3), snapshots.steps_of(job, 2, skip=3)

    def keys(name: str, zero: dict[str, Any]) -> dict[str, Any]:
        return placed(name, 2, **SUB_GROUPS, **({"reduce_scatter": False} if name == "3" else {}), **zero)

    saved, loaded, both, more = pair
    folder = f"{folder}/{saved}{loaded}"
    engine, _ = training.make_engine(job, keys(saved, {**both, **more}))
    snapshots.run(engine, job, first)
    engine.save_checkpoint(folder)
    engine.destroy()
    if universal:
        snapshots.convert(folder, ours=True)
    results = []
    for resumed in (False, True):
        engine, model = training.make_engine(job, keys(loaded, both))
        if resumed:
            engine.load_checkpoint(folder)
        else:
            snapshots.run(engine, job, first)
        snapshots.run(engine, job, then)
        observed = snapshots.snapshot(engine, model, job)
        kinds = ("model", "momentum_buffer")
        results.append([[item for key, item in observed.items() if key.endswith(kind)] for kind in kinds])
        engine.destroy()
    both_runs = [zip(*kind, strict=True) for kind in zip(*results, strict=True)]
    assert all(torch.isfinite(item).all() for kind in results[1] for item in kind)
    return [float(max(((a - b).abs().max() / b.abs().max() for a, b in kind), default=0.0)) for kind in both_runs]


@pytest.mark.quick
def test_momentum_with_a_scale_is_told_from_momentum_without() -> None:
    ones, flat, without = torch.ones(2), torch.zeros(2), torch.zeros(2)
    for scale, refused in ((1.0, nullcontext()), (8.0, pytest.raises(ValueError, match="loss scale or not"))):
        with refused:
            state = {LOSS_SCALER: SimpleNamespace(cur_scale=scale)}
            assert torch.equal(to_universal._momentum(state, {MOMENTUM: ones}, 2), ones)
    for offload, factor in ((False, 8.0), (True, 1.0)):
        states = {flat: {MOMENTUM: ones.clone()}, without: {}}
        stock = mock.Mock(loss_scale=8, offload_optimizer=offload, fp32_partitioned_groups_flat=[flat, without])
        stock.optimizer.state, stock.muon_momentum_buffer_partitioned_groups_flat = states, {}
        universal._convert_momentum_for_stock(stock, True, Path())
        assert torch.equal(states[flat][MOMENTUM], factor * ones)


def test_stock_loads_saves_of_iig_with_their_sub_groups(ranks: Any, tmp_path: Path) -> None:
    """Sub-groups of IIG are smaller than DeepSpeed's default."""
    for others, same in ranks(4).run(smaller_sub_groups_case, str(tmp_path)):
        assert others and same == {}, (others, same)


def smaller_sub_groups_case(folder: str) -> tuple[str, dict[str, float]]:
    """Return the error of a load with DeepSpeed's default, and what differs after one with the page's value."""
    job = training.Job(optimizer="Adam", empty=False, zero={"allgather_bucket_size": 600})
    engine, model = training.make_engine(job, training.placed("IIG"))
    assert len(engine.optimizer.fp16_groups) > 1
    snapshots.run(engine, job, snapshots.steps_of(job, 2))
    engine.save_checkpoint(folder, "tag")
    saved = snapshots.snapshot(engine, model, job)
    engine.destroy()
    dist.barrier()
    engine, _ = training.make_engine(job, {"stage": 3})
    error = snapshots.error_of(engine.load_checkpoint, folder, "tag")
    engine.destroy()
    job = replace(job, zero={**job.zero, "sub_group_size": 600 // dist.get_world_size()})
    engine, model = training.make_engine(job, {"stage": 3})
    engine.load_checkpoint(folder, "tag")
    return error, snapshots.difference(saved, snapshots.snapshot(engine, model, job))
