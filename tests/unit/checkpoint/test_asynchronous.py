# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Asynchronous saves write the files of synchronous saves; if one fails, all ranks raise, and training continues."""

import dataclasses
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from torch.distributed import distributed_c10d

import deepspeed_ext
from deepspeed_ext.checkpoint import folder as folders
from deepspeed_ext.checkpoint import residuals
from deepspeed_ext.checkpoint.asynchronous import _FailingStep
from deepspeed_ext.checkpoint.folder import CheckpointFolder
from deepspeed_ext.checkpoint.snapshots import HostBuffers, Snapshot
from deepspeed_ext.comm import host_channel
from deepspeed_ext.comm.disjoint_groups import timeout_of
from tests.harness import calls, pipelines, saves, snapshots, training
from tests.harness.tiers import deep, with_cases

ALL = (*training.REPLICATED, *training.PARTITIONED)
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
FEW_BITS: dict[str, Any] = {"zeropp_loco_param": {}, "paro_quantized_updates": {}}
EVERYTHING = {**FEW_BITS, "paro_overlap_updates": True, "overlap_comm": True}
OUTER = {"paro_outer_optimizer": {"steps": 2}}
# (strategy, model, dtype, keys of zero_optimization, optimizer)
ROWS = [
    ("IIG", "network", "fp32", EVERYTHING, "Muon"),
    ("NIG", "network", "fp32", EVERYTHING, "Muon"),
    ("NIG", "pipeline", "bf16", {}, "Adam"),
]
DEEP = [(name, "network", "bf16", OFFLOAD, "Adam") for name in ALL]
DEEP += [("III", "network", "bf16", OUTER, "Adam"), ("NII", "network", "fp16", OFFLOAD, "Adam")]
DEEP += [("NII", "experts", "bf16", {}, "Adam"), ("IIG", "network", "bf16", FEW_BITS, "Adam")]
DEEP += [(name, kind, "bf16", {}, "Muon") for name in ("NNN", "NIG", "III", "GNG") for kind in ("network", "experts")]
DEEP += [("NGG", "network", "fp32", EVERYTHING, "Adam"), ("NNI", "network", "fp32", OUTER, "Adam")]
DEEP += [("IIG", "pipeline", "bf16", {}, "Adam"), ("NIG", "pipeline of experts", "bf16", {}, "Adam")]


@pytest.mark.parametrize("row", [*ROWS, *deep(*((row,) for row in DEEP))], ids=str)
def test_files_match_synchronous_saves(ranks: Any, tmp_path: Path, row: tuple[Any, ...]) -> None:
    for results in ranks(4).run(twins_case, str(tmp_path), *row):
        assert results.different == [] and results.files >= 28 and results.same, tuple(results)


def twins_case(folder: str, name: str, model: str, dtype: str, zero: dict[str, Any], optimizer: str) -> Any:
    if model.startswith("pipeline"):
        experts = 2 if model.endswith("experts") else 0
        pipe = pipelines.Pipe(dtype=dtype, optimizer=optimizer, experts=experts, config=saves.ASIDE)
        return saves.pipeline_case(folder, name, pipe, 1)
    job = saves.job_of_row(dtype, zero, optimizer)
    if model == "experts":  # divided among two ranks
        job = dataclasses.replace(snapshots.job_of_kind(f"2 {optimizer}", dtype, **saves.ASIDE), accumulation=2)
    return saves.twins_case(folder, name, job)


@pytest.mark.parametrize("names", [("NII", "IIG"), *deep((ALL,))])
def test_snapshots_reuse_host_memory(ranks: Any, names: tuple[str, ...]) -> None:
    for name, (rank, retained, written, addresses, more) in ranks(4).each(memory_case, names):
        wrote = {"N": 1, "I": 2, "G": 4}[name[2]] > rank  # others have replicas
        assert retained[0] <= written <= 1.02 * retained[0] + 30_000 * wrote, (name, retained)
        assert (retained[0] > 0) == wrote, (name, retained)
        assert retained == [retained[0]] * 3 and addresses == 1, (name, retained, addresses)
        provided = 4000 * (wrote and (rank == 0 or name[0] != "N"))  # in the file of weights, which not all have
        assert more == [retained[0] + provided, retained[0]], (name, retained, more)


def memory_case(name: str) -> tuple[int, list[int], int, int, list[int]]:
    """Return this rank; of three saves bytes of host memory, bytes of files, and the number of sets of addresses;
    bytes of host memory after a larger save and the next one."""
    job = training.Job(sizes=(128, 512, 256), optimizer="Adam", empty=False, config=saves.ASIDE)
    engine, _ = training.make_trained(job, name)
    files = engine.checkpoint_engine
    buffers, write, paths = files.async_saves.buffers, files.write, set[str]()
    files.write = lambda *args, write=write, paths=paths: paths.add(args[2]) or write(*args)
    with snapshots.shared_folder() as folder:
        retained, addresses = [], set()
        for extra in ({}, {}, {}, {"more": torch.zeros(1000)}, {}):  # the last frees what the larger one had
            engine.save_checkpoint(folder, "tag", extra)
            files.finish()
            retained.append(buffers.nbytes)
            if len(retained) == 3:
                written = sum(Path(folder, "tag", Path(path).name).stat().st_size for path in paths)
            if len(retained) <= 3:
                addresses.add(tuple(sorted(item.data_ptr() for group in buffers._free.values() for item in group)))
    return dist.get_rank(), retained[:3], written, len(addresses), retained[3:]


def test_a_snapshot_copies_the_content_of_each_file(ranks: Any) -> None:
    """Memory of one file may be reused when the next one is copied; storages stay shared."""
    assert ranks(1).run(taken_case) == [(list(range(5)), True, [1.0, 7.0])]


def taken_case() -> tuple[list[int], bool, list[float]]:
    """Return the first elements of the copies of tensors that use the same memory one after the other; whether copies
    of two tensors with one storage share a storage; and a tensor that only steps change, before and after its copy."""
    late, memory, copies = torch.ones(1000), bytearray(4000), []
    snapshot = Snapshot(HostBuffers(), [late])
    for number in range(5):
        copies.append(snapshot.copy_content({"it": torch.frombuffer(memory, dtype=torch.float32).fill_(number)})["it"])
    two = snapshot.copy_content([late, late[3:].view(-1), late.new_zeros(3)])
    snapshot.start_device_copies()
    before = float(late[0])
    late.fill_(7.0)  # as a step would that does not wait
    snapshot.complete_copies()
    shared = two[0].untyped_storage().data_ptr() == two[1].untyped_storage().data_ptr()
    return [int(item[0]) for item in copies], shared, [before, float(two[0][0])]


FAULTS = {  # what fails, on which rank, how, and what the error says
    "a full disk": ("save", 2, OSError(28, "No space left on device"), "No space left on device"),
    "no memory": ("complete_copies", 1, MemoryError(), "MemoryError"),
    "a writer that dies as it commits": ("publish", 0, SystemExit(7), "SystemExit"),
    "a read-only folder": ("publish", 0, PermissionError(13, "Permission denied"), "Permission denied"),
    "a file latest that cannot be written": ("latest", 0, OSError(5, "Input/output error"), "Input/output error"),
    "a writer that dies": ("save", 3, SystemExit(7), "SystemExit"),
}


def rank_of(fault: str, name: str) -> int:
    """On which rank of a strategy it happens: some have replicas that write nothing."""
    case, rank, *_ = FAULTS[fault]
    return rank if name[2] == "G" or case != "save" else 0


@contextmanager
def failing(fault: str, rank: int) -> Iterator[None]:
    """Let the next save fail so, half-way, on this rank, in this context."""
    case, _, error, _ = FAULTS[fault]
    owner: Any = {"save": torch, "publish": CheckpointFolder, "latest": folders, "complete_copies": Snapshot}[case]
    name = "replace_text" if case == "latest" else case
    original = getattr(owner, name)

    def fail(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() != rank:
            return original(*args, **kwargs)
        if case in ("save", "publish"):
            original(*({"a": "part"}, *args[1:]) if case == "save" else args, **kwargs)
        raise error

    with mock.patch.object(owner, name, fail):
        yield


def host_groups() -> int:
    channels = [channel for channel in gc.get_objects() if isinstance(channel, host_channel.HostChannel)]
    return sum(group.gloo is not None for channel in channels for group in channel._groups)


class Failure(NamedTuple):
    """A failed save, the call that raised its error, type and text, and whether the folder is unchanged."""

    fault: str
    at: str
    message: str
    untouched: bool


@with_cases(
    "name, boundary, faults",
    ("NIG", "step", list(FAULTS)[:3]),
    ("IIG", "engine", list(FAULTS)[3:]),
    *deep(*((*run, list(FAULTS)) for run in (("III", "step"), ("NNN", "user"), ("GGG", "coalesce")))),
)
def test_failures_raise_on_all_ranks(ranks: Any, tmp_path: Path, name: str, boundary: str, faults: list[str]) -> None:
    answers = ranks(4).run(faults_case, str(tmp_path), name, boundary, faults, timeout=120.0)
    for failures, losses, undisturbed, changed, groups in answers:
        assert failures == answers[0][0], "the same on all ranks"
        assert {failure.at for failure in failures} == {"step", "save", "load", "destroy"}
        for failure in failures:
            rank, expected_text = rank_of(failure.fault, name), FAULTS[failure.fault][-1]
            assert failure.message.startswith("SaveFailed: the asynchronous save of the checkpoint "), failure
            assert failure.untouched, failure
            assert f"rank {rank}: " in failure.message and expected_text in failure.message, failure
        assert losses == undisturbed and changed == {} and groups == 0, (losses, undisturbed, changed, groups)


def faults_case(
    folder: str, name: str, boundary: str, faults: list[str]
) -> tuple[list[Failure], list[float], list[float], dict[str, float], int]:
    """Return the failures; losses of that run and of an undisturbed one; differences after a load of the next save;
    and the number of remaining host process groups."""
    job = snapshots.job_of("bf16", **saves.ASIDE, wall_clock_breakdown=True, steps_per_print=10**6)
    job = dataclasses.replace(job, boundary=boundary, accumulation=2)
    runs = []
    for _ in range(2):
        engine, model = training.make_engine(job, training.placed(name))
        runs.append(saves.Run(engine, model, job, folder))
    run, undisturbed = runs
    run.step()
    run.save("last")
    failures = []

    def fail(fault: str, at: str, act: Callable[[], Any]) -> None:
        run.engine.checkpoint_engine.finish()
        dist.barrier()
        before = saves.files_below(folder)
        dist.barrier()
        with failing(fault, rank_of(fault, name)):
            run.save("last")
            message = snapshots.error_of(act)
        dist.barrier()
        failures.append(Failure(fault, at, message, saves.files_below(folder) == before))

    for fault in faults:
        fail(fault, "step", run.steps_until_one_raises)
        run.engine.step()  # the one that has raised
    fail(faults[0], "save", lambda: run.save("other"))
    while len(undisturbed.losses) < len(run.losses):
        undisturbed.step()
    losses = list(run.losses)
    run.save("last")
    observed = snapshots.snapshot(run.engine, run.model, job)
    run.step()
    fail(faults[1], "load", lambda: run.engine.load_checkpoint(folder, "last"))
    run.engine.load_checkpoint(folder, "last")
    changed = snapshots.difference(observed, snapshots.snapshot(run.engine, run.model, job))
    fail(faults[2], "destroy", run.engine.destroy)
    undisturbed.engine.destroy()
    return failures, losses, undisturbed.losses, changed, host_groups()


@pytest.mark.quick
def test_the_chosen_step_raises() -> None:
    failing = _FailingStep()
    assert not failing.begin()
    failing.choose(mock.Mock(all_reduce_min=lambda step: step))
    assert failing.begin()


def test_two_engines_save_at_the_same_time(ranks: Any, tmp_path: Path) -> None:
    for loaded, messages, latest, groups in ranks(4).run(two_engines_case, str(tmp_path)):
        assert loaded == [{}, {}] and latest == "1" and groups == [2, 0]
        for message, why in zip(messages, ("local object", "MemoryError"), strict=True):
            assert message.startswith("CheckpointError: rank 0: ") and why in message, message


def two_engines_case(folder: str) -> tuple[list[dict[str, float]], list[str], str, list[int]]:
    """Save with two engines at the same time, each twice: one on a rank without threads, the other on disks of nodes.
    Return differences after a load; errors of saves with unsupported content; the tag in ``latest``; the remaining
    process groups as the engines are destroyed."""
    runs = []
    for number, (name, keys) in enumerate((("NIG", {}), ("IIG", {"use_node_local_storage": True}))):
        job = snapshots.job_of(checkpoint={**saves.ASIDE["checkpoint"], **keys})
        engine, model = training.make_engine(job, training.placed(name))
        runs.append(saves.Run(engine, model, job, f"{folder}/{number}"))
    if dist.get_rank() == 2:
        no_thread = mock.Mock(side_effect=RuntimeError("can't start new thread"))
        runs[0].engine.checkpoint_engine.async_saves._background.add = no_thread
    for tag in range(2):
        for run in runs:
            run.step()
        observed = [snapshots.snapshot(run.engine, run.model, run.job) for run in runs]
        with saves.late_copies():
            for run in runs:
                run.save(str(tag))
    loaded, unsaved = [], ({"bad": lambda: 0}, {"bad": Uncopyable()})
    messages = [snapshots.error_of(runs[0].engine.save_checkpoint, f"{folder}/0", "1", bad) for bad in unsaved]
    for run, expected in zip(runs, observed, strict=True):
        run.step()
        run.engine.load_checkpoint(run.folder)
        loaded.append(snapshots.difference(expected, snapshots.snapshot(run.engine, run.model, run.job)))
    latest = Path(folder, "0", "latest").read_text()
    groups = []
    for run in runs:
        run.engine.destroy()
        run.engine.checkpoint_engine.cleanup()  # another destroy, as of the garbage collector
        groups.append(host_groups())
    return loaded, messages, latest, groups


class Uncopyable:
    """Cannot be copied to the host."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise MemoryError


def test_a_save_outlives_the_process_groups(ranks: Any, tmp_path: Path) -> None:
    assert ranks(1).run(outliving_case, str(tmp_path)) == ["1"]


def outliving_case(folder: str) -> str:
    engine, _ = training.make_engine(snapshots.job_of(**saves.ASIDE), training.placed("NIG", 1))
    engine.save_checkpoint(folder, "1")
    deepspeed.comm.destroy_process_group()
    engine.checkpoint_engine.cleanup()
    # The engine is destroyed before the next case, which takes a process group.
    deepspeed.init_distributed("gloo", init_method=f"file://{folder}/again", rank=0, world_size=1)
    return Path(folder, "latest").read_text()


@pytest.mark.parametrize("seconds", [0.0, *deep(4.0)])
def test_saves_work_after_slow_disks_and_lost_connections(ranks: Any, tmp_path: Path, seconds: float) -> None:
    for slow, lost, after, remaining in ranks(2).run(connections_case, str(tmp_path), seconds):
        assert slow == ["", "slow"]
        for message in lost:
            assert message.startswith(("SaveFailed: rank ", "RuntimeError: in the middle")), message
        assert all("connection" in message for message in lost[:3]), lost
        assert after == ["", "", "after"] and remaining == [], (after, remaining)


def connections_case(folder: str, seconds: float) -> tuple[list[str], list[str], list[str], list[str]]:
    """Return errors and outcomes of a save that is ``seconds`` slower; of saves to disk (in a vote, in the exchange of
    states) and to memory in which a rank loses its connections, and of a save that an exception ends; of saves after
    that; and the remaining hidden names."""
    section = {"async_save": True, "memory_folder": folder}
    job = training.Job(empty=False, zero=training.SMALL, config={"checkpoint": section})
    brief = timedelta(seconds=2.5)
    patched = mock.patch.object(host_channel, "timeout_of", lambda group: brief)
    with patched:
        engine, _ = training.make_engine(job, training.placed("NIG", 1))
    files, saved = engine.checkpoint_engine, f"{folder}/saved"

    def lose(channel: Any, *_: Any) -> None:
        if dist.get_rank() == 1:
            channel.close()

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
    with patched, saves.late_copies(seconds * dist.get_rank()):
        slow = [snapshots.error_of(save, "slow"), Path(saved, "latest").read_text()]
    distributed_c10d._set_pg_timeout(before, dist.get_world_group())
    lost = []
    for name, act in (("all_reduce_sum", save), ("exchange", save), ("exchange_text", save_in_memory)):
        with calls.before(host_channel.HostChannel, name, lose):
            lost.append(snapshots.error_of(act, "lost"))
    with mock.patch.object(residuals, "save", side_effect=RuntimeError("in the middle")):
        lost.append(snapshots.error_of(save, "in the middle"))
    after = [snapshots.error_of(save_in_memory, "after"), snapshots.error_of(save, "after")]
    after.append(Path(saved, "latest").read_text())
    dist.barrier()
    engine.destroy()
    hidden = [path.name for path in Path(folder).rglob(".*") if path.name.endswith((".saving", ".replaced"))]
    return slow, lost, after, hidden
