# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""In-memory saves: after the loss of a node, the run continues from the copies on the other nodes. A node is a group
of two ranks with a folder of its own."""

import dataclasses
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist

import deepspeed_ext
from deepspeed_ext.checkpoint import commit, in_memory, memory_folder, memory_restore
from deepspeed_ext.checkpoint.loading import _warn_if_older
from deepspeed_ext.checkpoint.memory_folder import Identity, MemoryFolder, Part
from deepspeed_ext.comm.agreement import broadcast_text
from tests.harness import calls, logs, memory_saves, snapshots, training
from tests.harness.tiers import deep, with_cases

LOST = [("NIG + LoCo", 1), ("IIG", 0)]
CROSSING = ("residuals", "layer_", "expp_rank")  # files that each rank has, or that DeepSpeed has one rank write
MORE = deep(("NNN", 0), ("NIG", 0), ("IIG", 1), ("III", 0))
MORE += deep(("NIG + TP", 1), ("NII + experts", 0), ("III + experts", 0), ("IIG + experts", 1))


@pytest.mark.parametrize("name, node", [*LOST, *MORE])
def test_files_of_a_lost_node_are_read_from_other_nodes(ranks: Any, tmp_path: Path, name: str, node: int) -> None:
    experts = name.endswith("experts")
    crossing = (*CROSSING, "mp_rank_00_model") if experts else CROSSING
    cut = {"N": 1, "I": 2, "G": 4}[name[2]]
    answers = ranks(4).run(memory_saves.lost_case, str(tmp_path), name, node)
    for retained, writers, sent, changed, is_same, latest, again in answers:
        for files in retained:  # each node has all states, each file once
            assert set(files.values()) == {1}
            assert sum("optim_states" in name for name in files) == cut and any("model" in name for name in files)
        assert set(retained[0]) == set(retained[1])
        for present, files in enumerate(writers):
            own = [item for item in files if cut < 4 or (item.startswith("mp_rank") and "model" in item)]
            assert {files[item] // 2 for item in own if not any(kind in item for kind in crossing)} <= {present}
        if not experts:
            assert (sent > 100) == (cut == 4), "only states that no other group has cross"
        assert changed == {} and is_same and latest == "global_step1" and not again


def test_half_of_the_ranks_continue_from_memory(ranks: Any, tmp_path: Path) -> None:
    ranks(4).run(four_ranks_case, str(tmp_path))
    for differences, names in ranks(2).run(two_ranks_case, str(tmp_path)):
        assert differences == {} and names == ["deepspeed_ext_run", "global_step1", "global_step1_converted", "latest"]


def four_ranks_case(base: str) -> None:
    """Take a step, save in memory, and store a snapshot of the states in a file."""
    job = training.Job(optimizer="Adam", empty=False, config=memory_saves.memory_of(base))
    engine, model = training.make_trained(job, "IIG")
    deepspeed_ext.save_in_memory(engine, f"{base}/saved")
    snapshots.on_first_rank(torch.save, snapshots.snapshot(engine, model, job), f"{base}/seen.pt")
    engine.destroy()
    memory_saves.lose(base, 1)


def two_ranks_case(base: str) -> tuple[dict[str, float], list[str]]:
    """Return differences after a load by two ranks, and the names in the folder; then save in memory."""
    job = training.Job(optimizer="Adam", empty=False, config=memory_saves.memory_of(base, load_universal=True))
    engine, model = training.make_engine(job, training.placed("NIG", 2))
    assert engine.load_checkpoint(f"{base}/nothing") == (None, None), "not even a universal checkpoint"
    engine.load_checkpoint(f"{base}/saved")
    differences = snapshots.difference(torch.load(f"{base}/seen.pt"), snapshots.snapshot(engine, model, job))
    differences.pop("counters", None)  # samples of a step
    names = sorted(path.name for path in Path(base, "saved").glob("[!.]*") if path.suffix != ".py")
    deepspeed_ext.save_in_memory(engine, f"{base}/saved", tag="alone")
    engine.destroy()
    dist.barrier()
    assert len(memory_saves.held_by(base, 0)) == 3 and {1} == set(memory_saves.held_by(base, 0).values())
    return differences, names


# What happens to the last of three saves, to disk and twice in memory; which one is loaded, and what is said of it.
CASES = {
    "": ("3", "", "resuming 3 from a save in memory of step 2, .*; the last checkpoint on disk is of step 0"),
    "torn": ("2", "", "of 3 lacks 4 of 8 files"),
    "failed": ("2", "no room here", "resuming 2 from a save in memory"),
    "run": ("", "", "ignoring the saves in memory of another run in "),  # which stay
    "full": ("1", "Saves of other runs also use it: ", ""),
    "old": ("3 from disk", "", ""),
    "missing": ("1", "", "the last checkpoint on disk is of step"),
    "edited": ("0", "", "latest named 1 at the time of the save, and names 0 now"),
    "damaged": ("1", "", "ignoring the saves in memory of another run in "),
    "version": ("1", "", ""),
    "model": ("", "", "to another model"),
    "others": ("1", "only this user", "ignoring the saves in memory in "),
}


def open_to_others(self: Any, *args: Any, publish: Callable[..., None] = MemoryFolder.publish) -> None:
    publish(self, *args)
    self.path.chmod(0o770)


CHANGED: dict[str, tuple[str, Any]] = {  # what of the folder in memory is replaced during the saves
    "torn": ("remove_others", lambda self, number: None),
    "old": ("remove", lambda self: None),
    "full": ("free_bytes", 1000),
    "others": ("publish", open_to_others),
}


@pytest.mark.quick
def test_the_newest_complete_save_is_loaded(ranks: Any, tmp_path: Path) -> None:
    for results in ranks(4).run(newest_case, str(tmp_path)):
        for case, (loaded, error, warning) in CASES.items():
            assert results[case][0] == loaded, (case, results[case])
            assert error in results[case][1] and bool(error) == bool(results[case][1]), (case, results[case])
            said = results[case][2]
            assert re.search(warning, said) and bool(warning) == bool(said), (case, results[case])


def newest_case(base: str) -> dict[str, tuple[str, str, str]]:
    """Return, for each case, the loaded tag, the error of a save, and the warnings of a load."""
    results = {}
    job = training.Job(optimizer="Adam", empty=False, config=memory_saves.memory_of(base))
    engine, _ = training.make_engine(job, training.placed("IIG"))
    for case in CASES:
        folder = f"{base}/{case}_saved"
        with mock.patch.object(MemoryFolder, *CHANGED[case]) if case in CHANGED else nullcontext():
            error = three_saves(engine, job, folder, case)
        snapshots.on_first_rank(spoil, base, folder, case)
        if case == "model":
            engine.destroy()
            job = dataclasses.replace(job, sizes=(13, 36, 29, 7))
            engine, _ = training.make_engine(job, training.placed("IIG"))
        if not case:
            saves = {path.name.split("-")[0] for path in Path(base).glob("node*/*/[0-9]*")}
            assert len(saves) == 1, "earlier saves stay in memory"
            # What some ranks wrote cannot be seen: nothing is lost.
            with mock.patch.object(memory_restore, "_copy"), mock.patch.multiple(commit, _POLLS=1, time=mock.DEFAULT):
                assert not tag_of_a_load(engine, folder)
        with logs.logged() as lines:
            tag = tag_of_a_load(engine, folder)
        warnings = [text for level, text in lines if level == "WARNING" and "in memory" in text]
        results[case] = tag, error, broadcast_text("; ".join(warnings), 0)
    engine.destroy()
    return results


def tag_of_a_load(engine: Any, folder: str) -> str:
    """The tag of the checkpoint that is loaded; empty if none is."""
    try:
        path, _ = engine.load_checkpoint(folder)
    except RuntimeError:
        return ""
    return Path(path).parent.name if path else ""


def three_saves(engine: Any, job: Any, folder: str, what: str) -> str:
    """A save and a step, three times. The error of a save in memory."""
    error = ""
    for tag in ("1", "2", "3"):
        if tag == "1":
            engine.save_checkpoint(folder, tag)
        elif tag == "3" and what == "old":
            engine.save_checkpoint(folder, "3 from disk")
        else:
            fails = what == "failed" and tag == "3" and dist.get_rank() == 3
            room = OSError("no room here") if fails else in_memory._create_mapped_file
            with mock.patch.object(in_memory, "_create_mapped_file", side_effect=room):  # for the copies that it gets
                error = snapshots.error_of(deepspeed_ext.save_in_memory, engine, folder, tag)
                error = snapshots.error_of(engine.checkpoint_engine.finish) or error
        snapshots.run(engine, job, snapshots.steps_of(job, 1))
    return error


def spoil(base: str, folder: str, what: str) -> None:
    """Remove the folders of ranks 1 and 3, with the same files, of the last or all saves; or change files."""
    if what in ("torn", "missing"):
        for manifest in Path(base).glob("node*/*/*-[13]/manifest.json"):
            tag = json.loads(json.loads(manifest.read_text())["part"])["save"]["tag"]
            if what == "missing" or tag == "3":
                shutil.rmtree(manifest.parent)
    if what == "run":
        for path in Path(folder).glob("[!.]*"):  # as rm -r folder/* does
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if what == "edited":
        shutil.copytree(Path(folder, "1"), Path(folder, "0"))
        Path(folder, "latest").write_text("0")
    if what == "damaged":
        Path(folder, "deepspeed_ext_run").write_bytes(b"\xff\xfe damaged")
    if what == "version":
        for manifest in Path(base).glob("node*/*/*/manifest.json"):
            manifest.write_text(json.dumps({"part": json.loads(manifest.read_text())["part"], "version": 2}))


def test_missing_requirements_are_refused(ranks: Any, tmp_path: Path) -> None:
    for without, local, copies, relative in ranks(2).run(refused_case, str(tmp_path)):
        assert "async_save" in without and "node_local" in local
        assert "memory_copies must be an integer of at least 0" in copies and "absolute path" in relative


def refused_case(base: str) -> list[str]:
    """Errors: without ``async_save``, with storage of each node, and of bad values."""

    def save(section: dict[str, Any]) -> None:
        job = training.Job(empty=False, config={"checkpoint": section})
        engine, _ = training.make_engine(job, training.placed("NIG", 1))
        try:
            deepspeed_ext.save_in_memory(engine, base)
        finally:
            engine.destroy()

    more = ({"use_node_local_storage": True}, {"memory_copies": -1}, {"memory_folder": "here"})
    return [snapshots.error_of(save, {}), *(snapshots.error_of(save, {"async_save": True, **item}) for item in more)]


@pytest.mark.parametrize("copies", [2, 5])
def test_next_groups_get_copies_and_limits_are_logged(ranks: Any, tmp_path: Path, copies: int) -> None:
    """Four groups on one node, with which copies are lost, and which have no place for five copies."""
    warnings = ["copies of 4 rank(s) are on the same node", "memory_copies is 5", "each file has 3 copies."]
    answers = ranks(4).run(copies_case, str(tmp_path), copies)
    for rank, (retained, needed, expected, numbers, lines, message) in enumerate(answers):
        assert retained == sorted((rank - step) % 4 for step in range(min(copies, 3) + 1))
        assert needed == expected, "also what it receives must have room"
        assert numbers == 6, "what a rank sends to all others does not grow with their number"
        assert all((words in lines) == (rank == 0) for words in warnings[: 1 if copies == 2 else 3]), lines
        assert message.startswith("CheckpointError: rank 0: ") and "on the node of ranks [0, 1, 2, 3]. " in message


def copies_case(base: str, copies: int) -> tuple[list[int], int, int, int, str, str]:
    """Return the shards that this rank holds, by the ranks that wrote them; bytes that it has asked for, and of the
    files of these ranks, which share one of weights; the most numbers that it has sent to all ranks at once; warnings;
    and the error of a node without room."""
    rank, messages = dist.get_rank(), []
    config = {"checkpoint": {"async_save": True, "memory_folder": base, "memory_copies": copies}}
    job = training.Job(optimizer="Adam", empty=False, config=config)
    engine, _ = training.make_trained(job, training.placed("NGG", 1))
    in_memory._warn_once.cache_clear()
    gathers = calls.after(in_memory, "all_gather_rows", lambda rows, values: messages.append((values, rows)))
    with gathers, logs.logged() as lines:
        deepspeed_ext.save_in_memory(engine, f"{base}/saved")
        engine.checkpoint_engine.finish()
    dist.barrier()
    shards = Path(base).glob(f"deepspeed_ext*/*-{rank}/*optim_states.pt")
    retained = sorted(int(path.name.split("_")[3]) for path in shards)
    parts = (json.loads(path.read_text())["part"] for path in Path(base).glob("*/*/manifest.json"))
    assert all(abs(Part.from_json(part).save.time - time.time()) < 3600 for part in parts)
    sent, rows = zip(*messages, strict=True)
    sizes = {key: size for item in retained for key, size in rows[0][item, 2:].view(-1, 2).tolist()}
    with mock.patch.object(MemoryFolder, "free_bytes", 1000):
        message = snapshots.error_of(deepspeed_ext.save_in_memory, engine, f"{base}/saved", "full")
    engine.destroy()
    warnings = "".join(text for _, text in lines)
    return retained, sent[1][1], sum(sizes.values()), max(map(len, sent)), warnings, message


GIB = 2**30


def folder_of(memory: Path, save_dir: Path, run: str) -> Any:
    config: Any = SimpleNamespace(_param_dict={"checkpoint": {"memory_folder": str(memory)}})
    return MemoryFolder(config, save_dir, run)


def publish(folder: Any, number: int, **more: Any) -> None:
    staging = folder.create_staging(number, 0)
    (staging / "file").write_bytes(b"12345")
    folder.publish(staging, Part(Identity(number, "tag", 3, 1.0, "", "model", 1), f"{number}-0", {"file": 0}))
    folder.remove_others(number)


@pytest.mark.quick
def test_jobs_with_one_path_on_two_volumes_keep_their_saves(tmp_path: Path) -> None:
    save_dir = tmp_path / "checkpoints"  # a volume of its own in each container
    item, two = (folder_of(tmp_path, save_dir, number * 32) for number in "ab")
    publish(item, 1)
    writing = item.create_staging(2, 0)
    publish(two, 3)
    two.create_staging(4, 0)
    assert [part.save.number for part in item.read_parts()] == [1] and writing.is_dir()
    save_dir.mkdir()
    (save_dir / "deepspeed_ext_run").write_text("b" * 32)
    config: Any = type("Config", (), {"_param_dict": {"checkpoint": {"memory_folder": str(tmp_path)}}})
    memory_folder.remove_memory_saves(config, save_dir)
    assert [part.save.number for part in item.read_parts()] == [1] and two.read_parts() == []
    (other,) = two.describe_others(same=True)
    assert other.startswith(f"{item.path} (of {save_dir}, 0.000 GB, 0 seconds old)")
    assert folder_of(tmp_path, tmp_path, "b" * 32).describe_others(same=True) == []


@pytest.mark.quick
def test_errors_of_cleanup_fail_no_save_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path, tmp_path, "a" * 32)
    publish(folder, 1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", mock.Mock(side_effect=MemoryError))
        publish(folder, 2)
        folder.remove_files_of(1, 0)
    assert sorted(part.save.number for part in folder.read_parts()) == [1, 2]
    publish(folder, 3)
    assert [part.save.number for part in folder.read_parts()] == [3]


@pytest.mark.quick
def test_a_save_removes_folders_of_killed_saves(tmp_path: Path) -> None:
    killed, writing = (folder_of(tmp_path, tmp_path, "a" * 32) for _ in range(2))
    remaining, retained = killed.create_staging(1, 0), writing.create_staging(2, 1)
    del killed
    publish(folder_of(tmp_path, tmp_path, "a" * 32), 2)
    assert retained.is_dir() and not remaining.parent.exists()


CHANGES: list[dict[str, Any]] = [{"sizes": None}, {"sizes": []}, {"sizes": {}}, {"part": {}}, {"part": "no JSON"}]
CHANGES += [{"step": "3"}, {"time": None}, {"tag": 3}, {"color": "blue"}, {"files": {"file": "rank"}}]


@pytest.mark.quick
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_manifest_of_another_version_is_ignored(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = folder_of(tmp_path, tmp_path, "a" * 32)
    publish(folder, 1)
    assert len(folder.read_parts()) == 1
    (manifest,) = folder.path.glob("*/manifest.json")
    content = json.loads(manifest.read_text())
    if change.keys() <= content.keys():
        content |= change
    else:
        part = json.loads(content["part"])
        part = part | change if "files" in change else {**part, "save": part["save"] | change}
        content["part"] = json.dumps(part)
    manifest.write_text(json.dumps(content))
    assert folder.read_parts() == []


@pytest.mark.quick
@with_cases(
    "groups, files, room",
    ("0::/", {}, 9),
    ("0::/a/b", {"a/b/memory.max": "max", "a/b/memory.current": 8 * GIB}, 9),
    ("0::/a/b", {"a/memory.max": 4 * GIB, "a/memory.current": 3 * GIB}, 1),
    ("0::/", {"memory.max": 4 * GIB, "memory.current": 5 * GIB}, 0),
    ("0::/", {"memory.max": 6 * GIB, "memory.current": 5 * GIB, "memory.stat": f"inactive_file {2 * GIB}"}, 3),
    ("3:cpu:/\n4:memory:/host/x", {"memory/memory.limit_in_bytes": 8 * GIB}, 9),  # what is in use is not known
    (
        "4:cpu,memory:/host/x\n0::/",
        {
            "memory/memory.limit_in_bytes": 8 * GIB,
            "memory/memory.usage_in_bytes": 7 * GIB,
            "memory/memory.stat": f"cache 7\ntotal_active_file {GIB}\ntotal_inactive_file {GIB}",
            "memory/host/x/memory.limit_in_bytes": 2**63 - 4096,
        },
        3,
    ),
)
def test_free_bytes_respect_memory_and_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, files: dict[str, Any], room: int
) -> None:
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
        if name.endswith(("max", "limit_in_bytes")) and "x" not in name.split("/"):
            path.with_name("memory.stat").touch()
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {9 * GIB // 1024} kB\nHugePages: 0\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text(f"{groups}\n")
    monkeypatch.setattr(memory_folder, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(memory_folder, "_CONTROL_GROUPS", tmp_path / "cgroup")
    folder = folder_of(tmp_path, tmp_path, "a" * 32)
    folder.path.mkdir()
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=20 * GIB, f_frsize=1))
    monkeypatch.setattr(type(folder), "is_in_memory", True)
    assert folder.free_bytes == room * GIB
    monkeypatch.setattr(type(folder), "is_in_memory", False)
    assert folder.free_bytes == 20 * GIB


@pytest.mark.quick
def test_an_older_latest_universal_logs_a_warning(tmp_path: Path) -> None:
    universal, latest = tmp_path / "latest_universal", tmp_path / "latest"
    with logs.logged() as lines:
        universal.touch()
        _warn_if_older(universal, latest)
        latest.touch()
        os.utime(universal, (time.time() - 7200,) * 2)
        _warn_if_older(latest, universal)
        assert lines == []
        _warn_if_older(universal, latest)
    ((level, line),) = lines
    assert level == "WARNING"
    assert f"{universal} takes precedence, although it is 2 hours old and {latest} is only 0 seconds" in line
