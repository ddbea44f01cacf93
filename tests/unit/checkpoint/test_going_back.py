# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Stock ZeRO-3 loads a checkpoint of IIG, whose sub-groups are smaller, with the same ``sub_group_size``."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from deepspeed import comm as dist

from tests.harness import snapshots, training

BUCKET = 600  # elements


def test_stock_loads_saves_of_iig_with_their_sub_groups(ranks: Any, tmp_path: Path) -> None:
    for others, same in ranks(4).run(stock_case, str(tmp_path)):
        assert others and same == {}, (others, same)


def stock_case(folder: str) -> tuple[str, dict[str, float]]:
    """Return the error of a load with DeepSpeed's default, and what differs after one with the page's value."""
    job = training.Job(optimizer="Adam", empty=False, zero={"allgather_bucket_size": BUCKET})
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
    job = replace(job, zero={**job.zero, "sub_group_size": BUCKET // dist.get_world_size()})
    engine, model = training.make_engine(job, {"stage": 3})
    engine.load_checkpoint(folder, "tag")
    loaded = snapshots.snapshot(engine, model, job)
    engine.destroy()
    return error, snapshots.difference(saved, loaded)
