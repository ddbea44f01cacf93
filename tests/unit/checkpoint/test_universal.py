# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Universal checkpoints, converted by DeepSpeed's own tool: from any strategy and stage to any other."""

from pathlib import Path
from typing import Any

import pytest

from tests.harness.snapshots import job_of, job_of_kind
from tests.harness.tiers import by_strategies, deep
from tests.harness.training import PARTITIONED, REPLICATED, placed

STOCK = ("1", "2", "3")
ALL = (*REPLICATED, *PARTITIONED, *STOCK)
UNIVERSAL = {"checkpoint": {"load_universal": True}}


def save_case(folder: str, names: tuple[str, ...], dtype: str, group_size: int = 2, kind: str = "Adam") -> None:
    """Train, save, convert, and keep what was saved beside it."""
    import torch
    from deepspeed import comm as dist

    from tests.harness import snapshots, training

    job = job_of_kind(kind, dtype)
    for name in names:
        engine, model = training.make_engine(job, placed(name, group_size))
        snapshots.mark(engine, model)
        snapshots.run(engine, job, snapshots.steps_of(job, 3))
        seen = snapshots.snapshot(engine, model, job)
        engine.save_checkpoint(f"{folder}/{name}", client_state={"epoch": 5})
        if dist.get_rank() == 0:
            torch.save(seen, f"{folder}/{name}/seen.pt")
        snapshots.convert(f"{folder}/{name}", ours=kind != "Adam")
        engine.destroy()


def load_case(
    folder: str, pairs: list[tuple[str, str]], dtype: str, group_size: int = 2, kind: str = "Adam"
) -> list[tuple[str, str, dict[str, float]]]:
    """Load with another strategy; what differs from what was saved."""
    import torch

    from tests.harness import snapshots, training

    job = job_of_kind(kind, dtype, **UNIVERSAL)
    rows = []
    for saved, loaded in pairs:
        engine, model = training.make_engine(job, placed(loaded, group_size))
        snapshots.run(engine, job, snapshots.steps_of(job, 1, skip=7))  # something to be overwritten
        _, client_state = engine.load_checkpoint(f"{folder}/{saved}")
        assert client_state["epoch"] == 5
        found = snapshots.difference(torch.load(f"{folder}/{saved}/seen.pt"), snapshots.snapshot(engine, model, job))
        snapshots.run(engine, job, snapshots.steps_of(job, 1))
        counts = snapshots.snapshot(engine, model, job)["steps"]
        assert counts.tolist() == [4.0], counts  # each of the optimizer's tensors has counted that step, and once
        engine.destroy()
        rows.append((saved, loaded, found))
    return rows


def pairs_of(sources: tuple[str, ...], targets: int) -> list[tuple[str, str]]:
    """Each source with some of the others, each a target as often.

    What DeepSpeed's own ZeRO loads alone, without buffers and frozen parameters, is left to it.
    """
    pairs = [(a, sources[(i + 1 + j * 3) % len(sources)]) for i, a in enumerate(sources) for j in range(targets)]
    sharded = (*PARTITIONED, "3")
    return [(a, b) for a, b in pairs if b not in STOCK or (a in sharded) != (b in sharded)]


@pytest.mark.parametrize(
    "dtype, sources",
    [
        ("fp32", ("NNN", "NNG", "NII", "NIG", "INI", "IIG", "GNG", "GGG", "2", "3")),
        ("bf16", ("NII", "IIG", "2", "3")),
        ("fp16", ("NII", "IIG", "2", "3")),
        *deep(("fp32", ALL)),
    ],
    ids=by_strategies,
)
def test_from_each_to_others(ranks: Any, tmp_path: Path, dtype: str, sources: tuple[str, ...]) -> None:
    """Weights, moments, step counts, hyperparameters, frozen parameters, buffers and counters: to the bit."""
    ranks(4).run(save_case, str(tmp_path), sources, dtype)
    for rows in ranks(4).run(load_case, str(tmp_path), pairs_of(sources, 2), dtype):
        for row in rows:
            assert row[2] == {}, row


@pytest.mark.parametrize(
    "world_size, group_size, dtype, optimizer",
    [
        (6, 2, "fp32", "Adam"),
        (2, 1, "fp32", "Adam"),
        (2, 2, "fp32", "Muon"),
        *deep((8, 4, "fp32", "Muon"), (2, 1, "fp16", "Muon"), (4, 4, "bf16", "Muon")),
    ],
)
def test_to_other_numbers_of_ranks(
    ranks: Any, tmp_path: Path, world_size: int, group_size: int, dtype: str, optimizer: str
) -> None:
    pairs = [
        ("NIG", "IIG"),
        ("IIG", "GGG"),
        ("GGG", "NNG"),
        ("III", "ING"),
        ("2", "NIG"),
        ("NIG", "3"),
        ("INI", "III"),
    ]
    if optimizer == "Muon":
        pairs = [("NIG", "IIG"), ("IIG", "GGG"), ("III", "NIG")]
    ranks(4).run(save_case, str(tmp_path), tuple({saved for saved, _ in pairs}), dtype, 2, optimizer)
    for rows in ranks(world_size).run(load_case, str(tmp_path), pairs, dtype, group_size, optimizer):
        for row in rows:
            assert row[2].keys() <= {"counters"}, row  # samples of a step


@pytest.mark.parametrize(
    "saved_by, world_size, group_size, loaded_by, optimizer",
    [
        (4, 2, 2, 2, "Adam"),
        *deep(*((*shape, "Adam") for shape in ((2, 2, 2, 1), (4, 4, 2, 2), (1, 8, 4, 4), (2, 4, 4, 4), (2, 8, 2, 1)))),
        *deep(*((*shape, "Muon") for shape in ((4, 2, 2, 2), (2, 8, 2, 1)))),
    ],
)
def test_experts_divided_otherwise(
    ranks: Any, tmp_path: Path, saved_by: int, world_size: int, group_size: int, loaded_by: int, optimizer: str
) -> None:
    pairs = [("NIG", "IIG"), ("III", "NNG"), ("NII", "GGG"), ("NNN", "3"), ("GGG", "2")]
    if optimizer == "Muon":
        pairs = pairs[:3]
    saving, loading = f"{saved_by} {optimizer}", f"{loaded_by} {optimizer}"
    ranks(4).run(save_case, str(tmp_path), tuple({saved for saved, _ in pairs}), "fp32", 2, saving)
    for rows in ranks(world_size).run(load_case, str(tmp_path), pairs, "fp32", group_size, loading):
        for row in rows:  # samples of a step; and a rank's tokens, which are not saved
            kept = [name for name in row[2] if not name.endswith("tokens_per_expert buffer")]
            assert set(kept) <= {"counters"}, row


MODULE, NO_STATES = {"load_module_only": True}, {"load_optimizer_states": False}


@pytest.mark.parametrize(
    "part, from_fp32", [(MODULE, True), (NO_STATES, False), *deep((MODULE, False), (NO_STATES, True))]
)
def test_weights_alone(ranks: Any, tmp_path: Path, part: dict[str, bool], from_fp32: bool) -> None:
    ranks(4).run(save_case, str(tmp_path), ("NIG", "IIG"), "bf16")
    for rows in ranks(4).run(weights_case, str(tmp_path), part, from_fp32):
        for saved, loaded, model, masters, moments in rows:
            assert model == 0.0 and (masters == 0.0) == from_fp32, (saved, loaded, model, masters)
            assert not moments, (saved, loaded)


def weights_case(folder: str, part: dict[str, bool], from_fp32: bool) -> list[tuple[str, str, float, float, bool]]:
    """Difference of the model and of the optimizer's weights to what was saved; whether moments have changed."""
    import dataclasses

    import torch

    from tests.harness import snapshots, training

    job = job_of("bf16", **UNIVERSAL)
    job = dataclasses.replace(job, zero={**job.zero, "load_from_fp32_weights": from_fp32})
    rows = []
    for saved, loaded in (("NIG", "NIG"), ("NIG", "III"), ("IIG", "GGG"), ("IIG", "NNI"), ("NIG", "IIG")):
        engine, model = training.make_engine(job, placed(loaded))
        snapshots.run(engine, job, snapshots.steps_of(job, 1, skip=7))
        before = snapshots.snapshot(engine, model, job)
        engine.load_checkpoint(f"{folder}/{saved}", **part)
        after, wanted = snapshots.snapshot(engine, model, job), torch.load(f"{folder}/{saved}/seen.pt")
        gaps = snapshots.difference(wanted, after)
        of_model = max((gap for name, gap in gaps.items() if name.endswith((" model", " buffer"))), default=0.0)
        of_masters = max((gap for name, gap in gaps.items() if name.endswith(" fp32")), default=0.0)
        moved = [name for name in snapshots.difference(before, after) if " exp_avg" in name or name == "steps"]
        snapshots.run(engine, job, snapshots.steps_of(job, 1))
        engine.destroy()
        rows.append((saved, loaded, of_model, of_masters, bool(moved)))
    return rows
