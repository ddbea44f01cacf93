# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Disks that are not shared between nodes, and writers that are not torch's."""

import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from deepspeed import comm as dist
from deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine import FastCheckpointEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from deepspeed_ext.checkpoint import commit
from deepspeed_ext.checkpoint import folder as folders
from deepspeed_ext.checkpoint.files import CheckpointFiles, wrap
from tests.harness import snapshots, training
from tests.harness.logs import logged
from tests.harness.snapshots import error_of
from tests.harness.tiers import deep

LOCAL = {"checkpoint": {"use_node_local_storage": True}}


def make(job: Any, name: str = "NGG") -> tuple[Any, Any]:
    """An engine after a step, on one of two nodes with two ranks each."""
    engine, model = training.make_engine(job, {"paro_strategy": name, "paro_group_size": 2})
    engine.local_rank = dist.get_rank() % 2
    engine._configure_checkpointing()
    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    return engine, model


def node_dir(folder: str) -> str:
    """Where this node's disk is."""
    return f"{folder}/node{dist.get_rank() // 2}"


@pytest.mark.parametrize("name, tag", [("NGG", "same"), ("IIG", "new"), *deep(("NGG", "new"), ("IIG", "same"))])
def test_a_save_that_fails_on_one_node_changes_no_disk(ranks: Any, tmp_path: Path, name: str, tag: str) -> None:
    for message, before, after, left in ranks(4).run(node_local_case, str(tmp_path), name, tag):
        assert message.startswith("CheckpointError: rank 2: the checkpoint could not be saved"), message
        assert "no space for names" in message and before == {} and after == {}, (message, before, after)
        assert left == sorted({"same", tag, "latest"}), left


def node_local_case(folder: str, name: str, tag: str) -> tuple[str, Any, Any, list[str]]:
    """A publication that fails on the second node only: the error, what differs in what was there before, on all
    nodes, and in what is saved next; and what is on the disk then. Disks are slow when the save is taken back."""
    job = training.Job(optimizer="Adam", empty=False, config=LOCAL)
    engine, model = make(job, name)
    disk = node_dir(folder)
    engine.save_checkpoint(disk, "same")
    saved = snapshots.snapshot(engine, model, job)
    snapshots.run(engine, job, snapshots.steps_of(job, 1))

    def fail(*_: Any) -> None:
        raise OSError("no space for names")

    revert = folders.CheckpointFolder.revert

    def revert_late(taken: folders.CheckpointFolder) -> None:
        time.sleep(0.5)
        revert(taken)

    with (
        mock.patch.object(folders, "replace_text", fail if dist.get_rank() == 2 else folders.replace_text),
        mock.patch.object(folders.CheckpointFolder, "revert", revert_late),
    ):
        message = error_of(engine.save_checkpoint, disk, tag)
    engine.load_checkpoint(disk)
    before = snapshots.difference(saved, snapshots.snapshot(engine, model, job))
    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    now = snapshots.snapshot(engine, model, job)
    engine.save_checkpoint(disk, tag)
    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    engine.load_checkpoint(disk)
    after = snapshots.difference(now, snapshots.snapshot(engine, model, job))
    engine.destroy()
    dist.barrier()
    return message, before, after, sorted(path.name for path in Path(disk).iterdir() if path.suffix != ".py")


def test_disks_that_are_not_shared_are_noticed(ranks: Any, tmp_path: Path) -> None:
    for message, left in ranks(4).run(not_shared_case, str(tmp_path)):
        assert message.startswith("CheckpointError: rank 0: of 5 files that all ranks have written rank 0 sees 3 in ")
        assert "checkpoint.use_node_local_storage must be true" in message and "global_step1" not in left, left


def not_shared_case(folder: str) -> tuple[str, list[str]]:
    """The error where each node has its own disk and nobody has said so, and what is left on the first one."""
    engine, _ = make(training.Job(empty=False))
    disk = node_dir(folder)
    (Path(disk) / ".global_step1.saving").mkdir(parents=True, exist_ok=True)
    dist.barrier()
    with mock.patch.object(commit, "_LOOKS", 1):
        message = error_of(engine.save_checkpoint, disk)
    engine.destroy()
    return message, sorted(path.name for path in Path(folder, "node0").iterdir())


def test_another_checkpoint_writer_is_left_alone(ranks: Any) -> None:
    assert ranks(1).run(writer_case) == [(True, False, True)]


def writer_case() -> tuple[bool, bool, bool]:
    """Whether torch's is ours then, whether another is, and whether a warning names the key."""
    fast = object.__new__(FastCheckpointEngine)
    with logged() as lines:
        kinds = [isinstance(wrap(inner), CheckpointFiles) for inner in (TorchCheckpointEngine(), fast)]
    warned = any(level == "WARNING" and "checkpoint.writer" in line for level, line in lines)
    return kinds[0], kinds[1], warned


@pytest.mark.parametrize("stage", [2, 3])
def test_stock_loads_files_that_are_no_zip_archives(ranks: Any, tmp_path: Path, stage: int) -> None:
    assert ranks(2).run(stock_case, str(tmp_path), stage) == [0.0] * 2


def stock_case(folder: str, stage: int) -> float:
    """Stock DeepSpeed's universal checkpoint, loaded by it, with our package beside it: largest difference."""
    job = training.Job(optimizer="Adam", empty=False, config={"checkpoint": {"checkpoint_serialization": False}})
    weights = []
    for universal in (False, True):
        job.config["checkpoint"]["load_universal"] = universal
        engine, model = training.make_engine(job, {"stage": stage})
        snapshots.run(engine, job, snapshots.steps_of(job, 1, skip=int(universal)))
        if universal:
            engine.load_checkpoint(folder)
        else:
            engine.save_checkpoint(folder)
            snapshots.convert(folder)
        weights.append(training.whole_weights(model))
        engine.destroy()
    return (weights[0] - weights[1]).abs().max().item()
