# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The folder of a checkpoint appears complete or not at all, whichever call of its save is killed."""

import os
import shutil
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from deepspeed_ext.checkpoint import owned_folder
from deepspeed_ext.checkpoint.folder import CheckpointError, CheckpointFolder
from tests.harness.calls import before
from tests.harness.tiers import deep, with_cases


class Killed(BaseException):
    """Stands in for the end of the process."""


def write(folder: Any, text: str) -> None:
    """One save of two files."""
    folder.prepare()
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        Path(folder.staging_path(str(folder.path / name))).write_text(text)


def publish(folder: Any) -> None:
    """The end of a save."""
    folder.publish()
    folder.update_latest()
    folder.clear()


def save(folder: Any, text: str) -> None:
    write(folder, text)
    publish(folder)


def read(folder: Any) -> set[str]:
    return {path.read_text() for path in (folder.save_dir / folder.actual_tag()).glob("*_states.pt")}


@pytest.fixture(params=["exchanged", "renamed"])
def _rename(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without a file system that exchanges names."""
    if request.param == "renamed":
        monkeypatch.setattr(owned_folder, "_exchange", lambda one, other: False)


pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("_rename")]


@pytest.mark.parametrize("tag", ["global_step10", "a/b", ".hidden", "a b.c"])
def test_checkpoints_have_deepspeeds_paths(tmp_path: Path, tag: str) -> None:
    folder = CheckpointFolder(tmp_path, tag)
    write(folder, "one")
    assert not (tmp_path / tag).exists() and not (tmp_path / "latest").exists()
    publish(folder)
    assert read(folder) == {"one"} and (tmp_path / "latest").read_text() == tag
    assert {path.name for path in (tmp_path / tag).parent.iterdir()} <= {Path(tag).name, "latest"}


def test_files_outside_of_the_folder_are_not_staged(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, "one")
    assert folder.staging_path(str(tmp_path / "zero_to_fp32.py")) == str(tmp_path / "zero_to_fp32.py")
    assert folder.staging_path(str(tmp_path / "one_more" / "file")) == str(tmp_path / "one_more" / "file")
    assert folder.staging_path(str(tmp_path / "one" / "sub" / "file")) == str(folder.staging / "sub" / "file")


def test_errors_of_cleanup_fail_no_committed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CheckpointFolder(tmp_path, "one")
    save(folder, "first")
    write(folder, "second")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", mock.Mock(side_effect=MemoryError))
        publish(folder)
    assert read(folder) == {"second"} and len(names_in(tmp_path)) == 3
    save(folder, "third")
    assert read(folder) == {"third"} and names_in(tmp_path) == ["latest", "one"]


def test_only_folders_of_killed_saves_are_removed(tmp_path: Path) -> None:
    own = [".notes.replaced", ".photos.saving", ".three.0123abcd.saving", ".three.replaced", ".three.saving"]
    for name in own:  # also those of versions without a marker
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("mine")
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / "notes").mkdir()
    running, killed = CheckpointFolder(tmp_path, "one"), CheckpointFolder(tmp_path, "two")
    for folder in (running, killed):
        write(folder, folder.tag)
    del folder, killed  # its lease ends with the process
    folder = CheckpointFolder(tmp_path, "three")
    save(folder, "done")
    remaining = [running.staging.parent.name, *own, "latest", "notes", "three"]
    assert names_in(tmp_path) == sorted(remaining)
    assert all(names_in(tmp_path / name) == ["file"] for name in own)
    publish(running)
    assert read(running) == {"one"} and names_in(tmp_path) == sorted([*remaining[1:], "one"])


def test_a_failed_save_keeps_latest_of_another_engine(tmp_path: Path) -> None:
    actor, critic = CheckpointFolder(tmp_path, "actor"), CheckpointFolder(tmp_path, "critic")
    for folder in (actor, critic):
        write(folder, "new")
        folder.publish()
        folder.update_latest()
    actor.revert()
    assert (tmp_path / "latest").read_text() == "critic"


@pytest.mark.parametrize(
    "host, days, jump", [("this", 0, 0), ("another", 0, 0), ("another", 2, -4), ("another", 0, 2)]
)
def test_folders_of_another_host_are_removed_after_a_day(
    tmp_path: Path, host: str, days: int, jump: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock of the file system, whatever days this host's is ahead."""
    remaining = owned_folder.OwnedFolder(tmp_path / "one")
    remaining.create()
    marker = remaining.path / "owner.json"
    if host == "another":
        marker.write_text('{"host": "another"}')
    os.utime(marker, (time.time() - days * 86400,) * 2)
    path, now = remaining.path, time.time() + jump * 86400
    monkeypatch.setattr(time, "time", lambda: now)
    owned_folder.OwnedFolder(tmp_path / "two").create()
    assert path.exists(), "it is in use"
    del remaining
    owned_folder.OwnedFolder(tmp_path / "two").create()
    assert path.exists() == (host == "another" and not days)


def test_folders_replaced_by_older_versions_are_found(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, "one")
    save(folder, "first")
    folder.path.rename(tmp_path / ".one.replaced")
    assert read(folder) == {"first"} and folder.actual_tag() == ".one.replaced"
    folder = CheckpointFolder(tmp_path, "one")
    folder.prepare()
    assert folder.actual_tag() == "one"
    folder.revert()
    assert read(folder) == {"first"}


@pytest.mark.parametrize("tag", ["", ".", "..", "../other", "/absolute", "a/../.."])
def test_tags_outside_of_the_save_dir_are_refused(tmp_path: Path, tag: str) -> None:
    with pytest.raises(CheckpointError, match="must name a folder in"):
        CheckpointFolder(tmp_path, tag)


def test_nested_tags_keep_each_other(tmp_path: Path) -> None:
    outer, inner = CheckpointFolder(tmp_path, "run"), CheckpointFolder(tmp_path, "run/step5")
    for folder, text in ((outer, "one"), (inner, "two"), (outer, "three")):
        save(folder, text)
    (outer.path / "rng_states.pt").write_text("of somebody else")
    save(outer, "four")
    assert (outer.path / "rng_states.pt").exists() and read(inner) == {"two"}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_saves_follow_links_and_keep_them(tmp_path: Path) -> None:
    saves, disk = tmp_path / "saves", tmp_path / "disk"
    (disk / "target").mkdir(parents=True)
    saves.mkdir()
    (disk / "target" / "tokenizer.json").write_text("mine")
    (disk / "via").symlink_to("target")
    (saves / "last").symlink_to(disk / "via")
    (saves / "latest").symlink_to(disk / "latest")  # which is not there yet
    for text in ("first", "second"):
        folder = CheckpointFolder(saves, "last")
        write(folder, text)
        assert folder.staging.parent.parent == disk and names_in(saves) == ["last", "latest"]
        publish(folder)
        assert read(folder) == {text} and (disk / "target" / "tokenizer.json").read_text() == "mine"
        assert {path.read_text() for path in (disk / "target").glob("*_states.pt")} == {text}
        assert (saves / "last").is_symlink() and (saves / "latest").is_symlink()
        assert (disk / "latest").read_text() == "last"
        assert names_in(saves) == ["last", "latest"] and names_in(disk) == ["latest", "target", "via"]
    write(folder, "third")
    folder.publish()
    folder.update_latest()
    folder.revert()
    assert read(folder) == {"second"} and names_in(disk) == ["latest", "target", "via"]


@with_cases(
    "found, message",
    ("file", "/tag must be a folder, or must not exist; it is a file. Remove it, or"),
    ("link to a file", r"/tag \(a link to .*/other\) must be a folder, .*; it is a file. Remove it"),
    ("dangling link", r"/tag \(a link to .*/nowhere\) must be a folder.*; it is a link without a target. Remove"),
    ("loop", r"/tag \(a link to .*/tag\) must be a folder, .*; it is a link without a target. Remove it"),
    ("mount point", r"/tag \(a link to /proc\) is a mount point, which a rename cannot replace"),
)
def test_paths_that_are_no_folder_are_refused(tmp_path: Path, found: str, message: str) -> None:
    tag, other = tmp_path / "tag", tmp_path / "other"
    other.write_text("mine")
    if found == "file":
        tag.write_text("mine")
    else:
        targets = {"link to a file": "other", "dangling link": "nowhere", "loop": "tag", "mount point": "/proc"}
        tag.symlink_to(targets[found])
    with pytest.raises(CheckpointError, match=message):
        CheckpointFolder(tmp_path, "tag").prepare()
    assert names_in(tmp_path) == ["other", "tag"] and other.read_text() == "mine"
    assert tag.is_symlink() or tag.read_text() == "mine"


@pytest.mark.parametrize("tag", ["one", "two"])
def test_a_save_that_fails_on_another_rank_is_undone(tmp_path: Path, tag: str) -> None:
    for latest in (None, "one"):
        if latest:
            item = CheckpointFolder(tmp_path, "one")
            save(item, "first")
        for done in range(3):
            folder = CheckpointFolder(tmp_path, tag)
            write(folder, "second")
            for act in (folder.publish, folder.update_latest)[:done]:
                act()
            folder.revert()
            assert {path.name for path in tmp_path.iterdir()} == ({"one", "latest"} if latest else set())
            assert not latest or (read(item) == {"first"} and (tmp_path / "latest").read_text() == "one")


@pytest.mark.parametrize("tag", ["one", "two"])
def test_a_rename_is_undone_if_its_flush_fails(tmp_path: Path, tag: str) -> None:
    previous = CheckpointFolder(tmp_path, "one")
    save(previous, "first")
    folder = CheckpointFolder(tmp_path, tag)
    write(folder, "second")

    def fail_on_parent(path: Path) -> None:
        if Path(path) == tmp_path:
            raise OSError("Input/output error")

    with before(owned_folder, "sync", fail_on_parent), pytest.raises(OSError, match="Input/output error"):
        folder.publish()
    folder.revert()
    assert read(previous) == {"first"} and previous.actual_tag() == "one"
    assert names_in(tmp_path) == ["latest", "one"] and (tmp_path / "latest").read_text() == "one"


@pytest.mark.parametrize("tag, disk", [("two", False), ("one", True), *deep(("one", False))])
def test_a_killed_save_leaves_one_save(tmp_path: Path, tag: str, disk: bool) -> None:
    """Killed before its n-th call that changes the file system, for every n: the next load finds all of one save. The
    tag may be a link to another disk."""
    calls = 0
    while True:
        if disk:
            (tmp_path / f"disk{calls}" / "target").mkdir(parents=True)
            (tmp_path / str(calls)).mkdir()
            (tmp_path / str(calls) / "one").symlink_to(tmp_path / f"disk{calls}" / "target")
        folder = kill_at(tmp_path / str(calls), calls, tag)
        if folder is None:
            break
        latest = (folder.save_dir / "latest").read_text()
        results = read(type(folder)(folder.save_dir, latest))
        assert results in ({"first"}, {"second"}), (calls, latest, results)
        assert (folder.path / "tokenizer.json").exists() or tag == "two" or results == {"first"}
        calls += 1
        # The next save works, too, and leaves no extra files, but for a folder that was not marked as ours yet.
        folder = type(folder)(folder.save_dir, tag)
        save(folder, "third")
        names = left_in(folder.save_dir)
        assert read(folder) == {"third"} and names == sorted({"one", tag, "latest"}), (calls, names)
        assert not disk or (folder.path.is_symlink() and left_in(tmp_path / f"disk{calls - 1}") == ["target"])
    assert calls >= 5


def left_in(folder: Path) -> list[str]:
    """Return the names in a folder, except empty hidden folders."""
    return [name for name in names_in(folder) if name[0] != "." or any((folder / name).iterdir())]


def kill_at(path: Path, number: int, tag: str) -> Any:
    """Save to tag "one", then to ``tag``, killed before a call; the second folder, or None if it came to its end."""
    folder = CheckpointFolder(path, "one")
    save(folder, "first")
    (folder.path / "tokenizer.json").write_text("of somebody else")
    folder = CheckpointFolder(path, tag)
    count, write_text = 0, Path.write_text

    def kill(name: str, *args: Any, **_: Any) -> None:
        nonlocal count
        count += 1
        if count > number:
            if name == "write_text":
                write_text(args[0], "")  # half-way
            raise Killed

    with ExitStack() as stack:
        paths = ((Path, name) for name in ("mkdir", "rename", "replace", "write_text"))
        calls = ((os, name) for name in ("link", "unlink", "rmdir"))
        others = ((shutil, "copystat"), (owned_folder, "_exchange"), (owned_folder, "create_marker"))
        for owner, name in (*paths, *calls, *others):
            stack.enter_context(before(owner, name, partial(kill, name)))
        try:
            save(folder, "second")
        except Killed:
            return folder
    return None


OF_A_LARGER_RUN = (
    "zero_pp_rank_7_mp_rank_00_optim_states.pt",
    "expp_rank_7_mp_rank_00_optim_states.pt",
    "layer_07-model_states.pt",
    "residuals_rank_00007_mp_rank_00.pt",
    "outer_rank_00007_mp_rank_00.pt",
)


def test_other_files_in_the_folder_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CheckpointFolder(tmp_path, "one")
    (tmp_path / "one" / "tokenizer").mkdir(parents=True)
    (tmp_path / "one" / "tokenizer" / "vocabulary.json").write_text("mine")
    (tmp_path / "one" / "link").symlink_to("tokenizer")
    write(folder, "first")
    for name in OF_A_LARGER_RUN:
        (folder.staging / name).write_text("of a larger run")
    publish(folder)
    for number in range(2):
        if number:  # a file system without hard links
            monkeypatch.setattr(os, "link", mock.Mock(side_effect=OSError("no links here")))
        save(folder, "again")
        assert (folder.path / "tokenizer" / "vocabulary.json").read_text() == "mine"
        assert (folder.path / "link").is_symlink()
        assert not set(OF_A_LARGER_RUN) & set(names_in(folder.path)) and read(folder) == {"again"}
