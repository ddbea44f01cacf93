# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The folder of saves in memory on one node: whose it is, how much room there is, and what is left in it."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.quick
GIB = 2**30


def folder_of(memory: Path, save_dir: Path, run: str) -> Any:
    """The folder of a job."""
    from types import SimpleNamespace

    from deepspeed_ext.checkpoint.memory_folder import MemoryFolder

    config: Any = SimpleNamespace(_param_dict={"checkpoint": {"memory_folder": str(memory)}})
    return MemoryFolder(config, save_dir, run)


def save(folder: Any, number: int, **more: Any) -> None:
    """A whole save of one rank."""
    from deepspeed_ext.checkpoint.memory_folder import Identity, Part

    staging = folder.begin(number, 0)
    (staging / "file").write_bytes(b"12345")
    identity = Identity(number, "tag", 3, 1.0, "", "model", 1)
    folder.publish(staging, Part(identity, f"{number}-0", {"file": 0}))
    folder.keep_only(number)


def test_jobs_with_one_path_on_different_volumes_keep_their_saves(tmp_path: Path) -> None:
    from deepspeed_ext.checkpoint import memory_folder

    save_dir = tmp_path / "checkpoints"  # a volume of its own in each container
    one, two = (folder_of(tmp_path, save_dir, number * 32) for number in "ab")
    save(one, 1)
    writing = one.begin(2, 0)
    save(two, 3)
    two.begin(4, 0)
    assert [part.save.number for part in one.parts()] == [1] and writing.is_dir()
    save_dir.mkdir()
    (save_dir / "deepspeed_ext_run").write_text("b" * 32)
    config: Any = type("Config", (), {"_param_dict": {"checkpoint": {"memory_folder": str(tmp_path)}}})
    memory_folder.forget(config, save_dir)
    assert [part.save.number for part in one.parts()] == [1] and two.parts() == []
    (other,) = two.others(same=True)
    assert other.startswith(f"{one.path} (of {save_dir}, 0.000 GB, 0 seconds old)")
    assert folder_of(tmp_path, tmp_path, "b" * 32).others(same=True) == []


def test_errors_of_cleanup_do_not_fail_a_save_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path, tmp_path, "a" * 32)
    save(folder, 1)

    def out_of_memory(*args: Any, **kwargs: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", out_of_memory)
        save(folder, 2)
        folder.drop(1, 0)
    assert sorted(part.save.number for part in folder.parts()) == [1, 2]
    save(folder, 3)
    assert [part.save.number for part in folder.parts()] == [3]


def test_a_save_removes_what_a_killed_one_has_left_but_not_what_is_written(tmp_path: Path) -> None:
    killed, writing = (folder_of(tmp_path, tmp_path, "a" * 32) for _ in range(2))
    left, kept = killed.begin(1, 0), writing.begin(2, 1)
    del killed
    save(folder_of(tmp_path, tmp_path, "a" * 32), 2)
    assert kept.is_dir() and not left.parent.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": None},
        {"sizes": []},
        {"sizes": {}},
        {"part": {}},
        {"part": "no JSON"},
        {"step": "3"},
        {"time": None},
        {"tag": 3},
        {"color": "blue"},
        {"files": {"file": "rank"}},
    ],
    ids=str,
)
def test_a_manifest_of_another_version_is_ignored(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = folder_of(tmp_path, tmp_path, "a" * 32)
    save(folder, 1)
    assert len(folder.parts()) == 1
    (manifest,) = folder.path.glob("*/manifest.json")
    content = json.loads(manifest.read_text())
    if change.keys() <= content.keys():
        content |= change
    else:
        part = json.loads(content["part"])
        part = part | change if "files" in change else {**part, "save": part["save"] | change}
        content["part"] = json.dumps(part)
    manifest.write_text(json.dumps(content))
    assert folder.parts() == []


@pytest.mark.parametrize(
    "groups, files, room",
    [
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
    ],
)
def test_room_is_what_memory_and_control_groups_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, files: dict[str, Any], room: int
) -> None:
    from types import SimpleNamespace

    from deepspeed_ext.checkpoint import host_memory

    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
        if name.endswith(("max", "limit_in_bytes")) and "x" not in name.split("/"):
            path.with_name("memory.stat").touch()
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {9 * GIB // 1024} kB\nHugePages: 0\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text(f"{groups}\n")
    monkeypatch.setattr(host_memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(host_memory, "_CONTROL_GROUPS", tmp_path / "cgroup")
    folder = folder_of(tmp_path, tmp_path, "a" * 32)
    folder.path.mkdir()
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=20 * GIB, f_frsize=1))
    monkeypatch.setattr(type(folder), "is_in_memory", True)
    assert folder.free == room * GIB
    monkeypatch.setattr(type(folder), "is_in_memory", False)
    assert folder.free == 20 * GIB


def test_an_older_latest_universal_is_warned_of(tmp_path: Path) -> None:
    from deepspeed_ext.checkpoint.loading import _warn_if_older
    from tests.harness.logs import logged

    universal, latest = tmp_path / "latest_universal", tmp_path / "latest"
    with logged() as lines:
        universal.touch()
        _warn_if_older(universal, latest)
        latest.touch()
        os.utime(universal, (time.time() - 7200,) * 2)
        _warn_if_older(latest, universal)
        assert lines == []
        _warn_if_older(universal, latest)
    ((level, line),) = lines
    assert level == "WARNING"
    assert f"{universal} takes precedence, though it is 2 hours old and {latest} only 0 seconds" in line
