# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Saves into memory of nodes, of which one is lost; everything here runs inside rank processes. A node is a group of
two ranks with a folder of its own."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from deepspeed import comm as dist

import deepspeed_ext
from deepspeed_ext.checkpoint import memory_restore
from deepspeed_ext.checkpoint.memory_folder import RUN
from deepspeed_ext.comm.host_channel import HostChannel
from tests.harness import calls, experts, snapshots, training


def memory_of(base: str, **more: Any) -> dict[str, Any]:
    node = Path(base, f"node{dist.get_rank() // 2}")
    node.mkdir(exist_ok=True)
    return {"checkpoint": {"async_save": True, "memory_folder": str(node), **more}}


def held_by(base: str, node: int) -> dict[str, int]:
    """Files of saves in a node's memory, and in how many folders there each of them is."""
    results = [path.name for path in Path(base, f"node{node}").glob("*/[0-9]*/*.pt")]
    return {name: results.count(name) for name in results}


def writers_in(base: str, node: int) -> dict[str, int]:
    """Files of saves in a node's memory, and the rank that has written each of them."""
    results: dict[str, int] = {}
    for manifest in Path(base, f"node{node}").glob("*/[0-9]*/manifest.json"):
        results |= json.loads(json.loads(manifest.read_text())["part"])["files"]
    return results


def lose(base: str, node: int) -> None:
    """Remove all memory of a node. Collective."""
    snapshots.on_first_rank(shutil.rmtree, f"{base}/node{node}")


def lost_case(base: str, name: str, node: int) -> tuple[Any, ...]:
    """Return the files on each node; bytes that this rank's thread sent; differences after a load by new engines;
    whether later losses match the run that continued; the tag on disk then; and whether a second load writes it."""
    zero = {"zeropp_loco_param": {}} if name.endswith("LoCo") else {}
    sent: list[int] = []
    folder = f"{base}/saved"
    lanes = 2 if name.endswith("TP") else 1
    placed = training.placed(name[:3], 2 // lanes)
    job = replace(snapshots.job_of("fp32", zero, **memory_of(base)), tensor_parallel=lanes)
    if name.endswith("experts"):
        job = replace(job, network=experts.SmallMixtral, config={**job.config, **experts.autoep(2)})
    engine, model = training.make_trained(job, placed)
    snapshots.mark(engine, model)
    saved = snapshots.snapshot(engine, model, job)
    with calls.before(HostChannel, "exchange", lambda _, parts, *__: sent.extend(part.nbytes for part in parts)):
        deepspeed_ext.save_in_memory(engine, folder)
        losses = snapshots.run(engine, job, snapshots.steps_of(job, 3, 1))
        engine.checkpoint_engine.finish()
    assert [path.name for path in Path(folder).iterdir()] == [RUN], "nothing but a small file is on disk"
    dist.barrier()
    retained = held_by(base, 0), held_by(base, 1)
    writers = writers_in(base, 0), writers_in(base, 1)
    engine.destroy()
    lose(base, node)
    memory_of(base)  # of a node that is there again
    engine, model = training.make_engine(job, placed)
    engine.load_checkpoint(folder)
    changed = snapshots.difference(saved, snapshots.snapshot(engine, model, job))
    changed = {name: by for name, by in changed.items() if "tokens_per_expert" not in name}  # of each rank, counted
    again = snapshots.run(engine, job, snapshots.steps_of(job, 3, 1))
    with mock.patch.object(memory_restore, "_write") as write:
        engine.load_checkpoint(folder)
    dist.barrier()
    assert not held_by(base, 0) and not held_by(base, 1), "what is on disk is not in memory, too"
    engine.destroy()
    return retained, writers, sum(sent), changed, losses == again, Path(folder, "latest").read_text(), write.called
