# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Universal checkpoints, converted by DeepSpeed's own tool: from any strategy and stage to any other."""

from pathlib import Path
from typing import Any

import pytest
from training import PARTITIONED, REPLICATED

STOCK = ("1", "2", "3")
ALL = (*REPLICATED, *PARTITIONED, *STOCK)
UNIVERSAL = {"checkpoint": {"load_universal": True}}


def placed(name: str, group_size: int = 2) -> dict[str, Any]:
    """Keys of a strategy, or of a stage of DeepSpeed's own."""
    return {"stage": int(name)} if name in STOCK else {"paro_strategy": name, "paro_group_size": group_size}


def job_of(dtype: str, **more: Any) -> Any:
    """Two parameter groups, a frozen layer, a buffer, a scheduler."""
    import snapshots
    import training

    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 10}}
    return training.Job(
        dtype=dtype,
        optimizer="Adam",
        groups=2,
        frozen=(1,),
        empty=False,
        network=snapshots.Buffered,
        zero=training.SMALL,
        config={"scheduler": scheduler, **more},
    )


def save_case(folder: str, names: tuple[str, ...], dtype: str, group_size: int = 2) -> None:
    """Train, save, convert, and keep what was saved beside it."""
    import snapshots
    import torch
    import training
    from deepspeed import comm as dist

    job = job_of(dtype)
    for name in names:
        engine, model = training.make_engine(job, placed(name, group_size))
        snapshots.mark(engine, model)
        snapshots.run(engine, job, snapshots.steps_of(job, 3))
        seen = snapshots.snapshot(engine, model, job)
        engine.save_checkpoint(f"{folder}/{name}", client_state={"epoch": 5})
        if dist.get_rank() == 0:
            torch.save(seen, f"{folder}/{name}/seen.pt")
        snapshots.convert(f"{folder}/{name}")
        engine.destroy()


def load_case(
    folder: str, pairs: list[tuple[str, str]], dtype: str, group_size: int = 2
) -> list[tuple[str, str, dict[str, float]]]:
    """Load with another strategy; what differs from what was saved."""
    import snapshots
    import torch
    import training

    job = job_of(dtype, **UNIVERSAL)
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
    """Each source with some of the others, of which each is a target as often; scripts/checkpoints.py runs them all.

    DeepSpeed's own loads of what it has saved itself at the same stage are left as they are.
    """
    pairs = [(a, sources[(i + 1 + j * 3) % len(sources)]) for i, a in enumerate(sources) for j in range(targets)]
    return [(a, b) for a, b in pairs if not {a, b} <= {"1", "2"} and (a, b) != ("3", "3")]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_from_each_to_others(ranks: Any, tmp_path: Path, dtype: str) -> None:
    """Weights, moments, step counts, hyperparameters, frozen parameters, buffers and counters: to the bit."""
    sources = ALL if dtype == "fp32" else ("NII", "IIG", "2", "NIG", "III", "3")
    ranks(4).run(save_case, str(tmp_path), sources, dtype)
    for row in ranks(4).run(load_case, str(tmp_path), pairs_of(sources, 3), dtype)[0]:
        assert row[2] == {}, row


@pytest.mark.parametrize("world_size, group_size", [(6, 2), (6, 3), (2, 1), (2, 2)])
def test_to_other_numbers_of_ranks(ranks: Any, tmp_path: Path, world_size: int, group_size: int) -> None:
    pairs = [
        ("NIG", "IIG"),
        ("IIG", "GGG"),
        ("GGG", "NNG"),
        ("III", "ING"),
        ("2", "NIG"),
        ("NIG", "3"),
        ("INI", "III"),
    ]
    ranks(4).run(save_case, str(tmp_path), tuple({saved for saved, _ in pairs}), "fp32")
    for row in ranks(world_size).run(load_case, str(tmp_path), pairs, "fp32", group_size)[0]:
        without = {"counters"}  # samples of a step
        assert row[2].keys() <= without, row
