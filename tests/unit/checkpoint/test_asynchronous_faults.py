# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A save that fails beside the training is told on all ranks, leaves what was there, and the training goes on."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from tests.harness.tiers import deep
from tests.harness.training import placed

FAULTS = {  # what fails, on which rank, how, and what is said of it
    "a full disk": ("save", 2, OSError(28, "No space left on device"), "No space left on device"),
    "a folder that is read only": ("publish", 0, PermissionError(13, "Permission denied"), "Permission denied"),
    "a file latest that cannot be written": ("point", 0, OSError(5, "Input/output error"), "Input/output error"),
    "no memory": ("complete", 1, MemoryError(), "MemoryError"),
    "a writer that dies": ("save", 3, SystemExit(7), "SystemExit"),
    "one that dies as it commits": ("publish", 0, SystemExit(7), "SystemExit"),
}


def rank_of(fault: str, name: str) -> int:
    """On which rank of a strategy it happens: some have replicas that write nothing."""
    what, rank, *_ = FAULTS[fault]
    return rank if name[2] == "G" or what != "save" else 0


@contextmanager
def failing(fault: str, rank: int) -> Iterator[None]:
    """Let the next save fail so, half-way, on this rank, in this context."""
    import torch
    from deepspeed import comm as dist

    from deepspeed_ext.checkpoint import folder as folders
    from deepspeed_ext.checkpoint.folder import CheckpointFolder
    from deepspeed_ext.checkpoint.snapshots import Snapshot

    what, _, error, _ = FAULTS[fault]
    owner: Any = {"save": torch, "publish": CheckpointFolder, "point": folders, "complete": Snapshot}[what]
    name = "replace_text" if what == "point" else what
    original = getattr(owner, name)

    def fail(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() != rank:
            return original(*args, **kwargs)
        if what in ("save", "publish"):
            original(*({"a": "part"}, *args[1:]) if what == "save" else args, **kwargs)
        raise error

    with mock.patch.object(owner, name, fail):
        yield


def host_groups() -> int:
    """How many process groups on the host there are, for saves beside the training."""
    import gc

    from deepspeed_ext.comm.host_channel import HostChannel

    channels = [one for one in gc.get_objects() if isinstance(one, HostChannel)]
    return sum(group.gloo is not None for channel in channels for group in channel._groups)


class Told(NamedTuple):
    """What has become of a save that failed.

    Attributes:
        at: where it was told.
        message: type and text.
        untouched: whether the folder is as it was.
    """

    fault: str
    at: str
    message: str
    untouched: bool


@pytest.mark.parametrize(
    "name, boundary, accumulation",
    [("NIG", "step", 2), ("IIG", "engine", 2), *deep(("III", "step", 1), ("NNN", "user", 2), ("GGG", "coalesce", 2))],
)
def test_it_is_told_where_it_can_be_and_training_goes_on(
    ranks: Any, tmp_path: Path, name: str, boundary: str, accumulation: int
) -> None:
    answers = ranks(4).run(faults_case, str(tmp_path), name, boundary, accumulation, timeout=120.0)
    for told, losses, undisturbed, changed, groups in answers:
        assert told == answers[0][0], "the same on all ranks"
        assert {one.at for one in told} == {"step", "save", "load", "destroy"}
        for one in told:
            rank, says = rank_of(one.fault, name), FAULTS[one.fault][-1]
            assert one.message.startswith("SaveFailed: the checkpoint ") and one.untouched, one
            assert f"rank {rank}: " in one.message and says in one.message, one
        assert losses == undisturbed and changed == {} and groups == 0, (losses, undisturbed, changed, groups)


def faults_case(
    folder: str, name: str, boundary: str, accumulation: int
) -> tuple[list[Told], list[float], list[float], dict[str, float], int]:
    """What was told; losses of that run, and of an undisturbed one; what a load of the next save does not restore; how
    many process groups on the host are left."""
    from deepspeed import comm as dist

    from tests.harness import saves, snapshots, training

    job = snapshots.job_of("bf16", **saves.ASIDE, wall_clock_breakdown=True, steps_per_print=10**6)
    job = dataclasses.replace(job, boundary=boundary, accumulation=accumulation)
    runs = []
    for _ in range(2):
        engine, model = training.make_engine(job, placed(name))
        runs.append(saves.Run(engine, model, job, folder))
    run, undisturbed = runs
    run.step()
    run.save("last")
    told = []

    def tell(fault: str, at: str, act: Callable[[], Any]) -> None:
        run.engine.checkpoint_engine.finish()
        dist.barrier()
        before = saves.files_below(folder)
        dist.barrier()
        with failing(fault, rank_of(fault, name)):
            run.save("last")
            message = snapshots.error_of(act)
        dist.barrier()
        told.append(Told(fault, at, message, saves.files_below(folder) == before))

    for fault in FAULTS:
        tell(fault, "step", run.steps_until_one_raises)
        run.engine.step()  # the one that has raised
    tell("a full disk", "save", lambda: run.save("other"))
    for _ in run.losses:
        if not undisturbed.losses[len(run.losses) - 1 :]:
            undisturbed.step()
    losses = list(run.losses)
    run.save("last")
    seen = snapshots.snapshot(run.engine, run.model, job)
    run.step()
    tell("no memory", "load", lambda: run.engine.load_checkpoint(folder, "last"))
    run.engine.load_checkpoint(folder, "last")
    changed = snapshots.difference(seen, snapshots.snapshot(run.engine, run.model, job))
    tell("a writer that dies", "destroy", run.engine.destroy)
    undisturbed.engine.destroy()
    return told, losses, undisturbed.losses, changed, host_groups()


def test_two_engines_save_at_once_and_what_cannot_be_saved_is_told_at_once(ranks: Any, tmp_path: Path) -> None:
    for loaded, messages, latest, groups in ranks(4).run(two_engines_case, str(tmp_path)):
        assert loaded == [{}, {}] and latest == "1" and groups == [1, 0]
        for message, why in zip(messages, ("local object", "MemoryError"), strict=True):
            assert message.startswith("CheckpointError: rank 0: ") and why in message, message


def two_engines_case(folder: str) -> tuple[list[dict[str, float]], list[str], str, list[int]]:
    """What two engines load that have saved at the same time, each twice, one on a rank without threads, the other on
    disks of nodes; what saves raise that cannot be; what ``latest`` names; process groups left as they are destroyed.
    """
    from deepspeed import comm as dist

    from tests.harness import saves, snapshots, training

    runs = []
    for number, (name, keys) in enumerate((("NIG", {}), ("IIG", {"use_node_local_storage": True}))):
        job = snapshots.job_of(checkpoint={**saves.ASIDE["checkpoint"], **keys})
        engine, model = training.make_engine(job, placed(name))
        runs.append(saves.Run(engine, model, job, f"{folder}/{number}"))
    if dist.get_rank() == 2:
        runs[0].engine.checkpoint_engine.aside._background.add = no_thread
    for tag in range(2):
        for run in runs:
            run.step()
        seen = [snapshots.snapshot(run.engine, run.model, run.job) for run in runs]
        with saves.late_copies():
            for run in runs:
                run.save(str(tag))
    loaded, unsaved = [], ({"bad": lambda: 0}, {"bad": Uncopyable()})
    messages = [snapshots.error_of(runs[0].engine.save_checkpoint, f"{folder}/0", "1", bad) for bad in unsaved]
    for run, wanted in zip(runs, seen, strict=True):
        run.step()
        run.engine.load_checkpoint(run.folder)
        loaded.append(snapshots.difference(wanted, snapshots.snapshot(run.engine, run.model, run.job)))
    latest = Path(folder, "0", "latest").read_text()
    groups = []
    for run in runs:
        run.engine.destroy()
        run.engine.checkpoint_engine.cleanup()  # another destroy, as of the garbage collector
        groups.append(host_groups())
    return loaded, messages, latest, groups


def no_thread(*_: Any) -> None:
    """As the system does that has no more."""
    raise RuntimeError("can't start new thread")


class Uncopyable:
    """Cannot be copied to the host."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise MemoryError


def test_what_saves_may_outlive_the_process_groups(ranks: Any, tmp_path: Path) -> None:
    assert ranks(1).run(outliving_case, str(tmp_path)) == ["1"]


def outliving_case(folder: str) -> str:
    """What ``latest`` names after that, and after the end of what has saved."""
    import deepspeed

    from tests.harness import saves, snapshots, training

    engine, _ = training.make_engine(snapshots.job_of(**saves.ASIDE), placed("NIG", 1))
    engine.save_checkpoint(folder, "1")
    deepspeed.comm.destroy_process_group()
    engine.checkpoint_engine.cleanup()
    # The engine is destroyed before the next case, which takes a process group.
    deepspeed.init_distributed("gloo", init_method=f"file://{folder}/again", rank=0, world_size=1)
    return Path(folder, "latest").read_text()


def test_a_disk_may_be_slow_and_saves_go_on_after_lost_connections(ranks: Any, tmp_path: Path) -> None:
    for slow, lost, after, left in ranks(2).run(connections_case, str(tmp_path)):
        assert slow == ["", "slow"]
        for message in lost:
            assert message.startswith(("SaveFailed: rank ", "RuntimeError: in the middle")), message
        assert "connection" in lost[0] and "connection" in lost[1], lost
        assert after == ["", "", "after"] and left == [], (after, left)


def connections_case(folder: str) -> tuple[list[str], list[str], list[str], list[str]]:
    """A save that takes longer than the timeout of all process groups; saves to disk and to memory during which a
    rank loses its connections, and one that another exception ends; saves after that; hidden names that are left."""
    import time
    from datetime import timedelta

    from deepspeed import comm as dist
    from torch.distributed import distributed_c10d

    import deepspeed_ext
    from deepspeed_ext.checkpoint import residuals
    from deepspeed_ext.checkpoint.snapshots import Snapshot
    from deepspeed_ext.comm import host_channel
    from deepspeed_ext.comm.disjoint_groups import timeout_of
    from tests.harness import snapshots, training

    section = {"async_save": True, "memory_folder": folder}
    job = training.Job(empty=False, config={"checkpoint": section})
    brief = timedelta(seconds=2.5)
    patched = mock.patch.object(host_channel, "timeout_of", lambda group: brief)
    with patched:
        engine, _ = training.make_engine(job, placed("IIG", 1))
    files, saved = engine.checkpoint_engine, f"{folder}/saved"
    complete, total = Snapshot.complete, host_channel.HostChannel.all_reduce_sum

    def slowly(self: Snapshot) -> None:
        time.sleep(4.0 * dist.get_rank())
        complete(self)

    def lose(self: host_channel.HostChannel, *args: Any) -> int:
        if dist.get_rank() == 1:
            self.close()
        return total(self, *args)

    def save(tag: str) -> None:
        engine.save_checkpoint(saved, tag)
        files.finish()

    def save_in_memory(tag: str) -> None:
        deepspeed_ext.save_in_memory(engine, saved, tag)
        files.finish()

    engine.save_checkpoint(saved, "first")
    files.finish()
    before = timeout_of(None)
    distributed_c10d._set_pg_timeout(brief, dist.get_world_group())
    with patched, mock.patch.object(Snapshot, "complete", slowly):
        slow = [snapshots.error_of(save, "slow"), Path(saved, "latest").read_text()]
    distributed_c10d._set_pg_timeout(before, dist.get_world_group())
    lost = []
    with mock.patch.object(host_channel.HostChannel, "all_reduce_sum", lose):
        lost.append(snapshots.error_of(save, "lost"))
    with mock.patch.object(host_channel.HostChannel, "exchange_text", lambda self, *args: lose(self, 1)):
        lost.append(snapshots.error_of(save_in_memory, "lost"))
    with mock.patch.object(residuals, "save", side_effect=RuntimeError("in the middle")):
        lost.append(snapshots.error_of(save, "in the middle"))
    after = [snapshots.error_of(save_in_memory, "after"), snapshots.error_of(save, "after")]
    after.append(Path(saved, "latest").read_text())
    dist.barrier()
    engine.destroy()
    hidden = [path.name for path in Path(folder).rglob(".*") if path.name.endswith((".saving", ".replaced"))]
    return slow, lost, after, hidden
