# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Saves into one ``save_dir`` that the memory of a node holds, for processes that come after those that saved.

``<memory_folder>/deepspeed_ext-<user>-<key>`` has a folder ``<number of the save>-<rank>`` for each rank that wrote
into it. That appears by a rename, when all its files are there, with a manifest. So a save is whole if the folders of
all nodes hold all its files together, and the one before it is removed only when all ranks have theirs.

The key is made of the path of ``save_dir`` and the run in it: a random text in a file there, which the first save in
memory writes. So containers that share ``/dev/shm`` and use one path for different volumes have different folders, and
whoever empties a ``save_dir`` begins another run.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed.utils import logger

from deepspeed_ext.checkpoint.folder import CheckpointError
from deepspeed_ext.checkpoint.owned import OwnedFolder, boot_id
from deepspeed_ext.config.section import save_settings

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig

RUN = "deepspeed_ext_run"  # the file in ``save_dir``; not hidden, so that ``rm -r save_dir/*`` removes it, too
_RUN_TEXT = re.compile(r"[0-9a-f]{32}")
_ABOUT = "about.json"  # in a folder of memory, what it belongs to
_MANIFEST = "manifest.json"
_MOUNTS = Path("/proc/self/mounts")
_IN_MEMORY = ("tmpfs", "ramfs")
_PROC = Path("/proc")
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
# By the controller in /proc/self/cgroup, empty for version 2: the folder, limit and use, and cache that can be freed.
_VERSIONS = {
    "": ("", "memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": (
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}
_UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))


@dataclass(frozen=True)
class Identity:
    """What the folders of one save have in common.

    Attributes:
        number: of the save; random.
        tag, step: of the checkpoint; the number of steps that the engine has taken.
        time: of rank 0's clock, in seconds; of two saves of a step, the later one counts.
        latest: what the file ``latest`` of ``save_dir`` named; empty if there was none.
        model: what names and shapes of parameters are known by.
        files: the number of files of all ranks.
    """

    number: int
    tag: str
    step: int
    time: float
    latest: str
    model: str
    files: int


@dataclass(frozen=True)
class Part:
    """What one folder holds of a save.

    Attributes:
        save: which one.
        folder: its name.
        files: of each file, by its path in the checkpoint, the rank that wrote it.
    """

    save: Identity
    folder: str
    files: dict[str, int]

    @classmethod
    def from_json(cls, text: str) -> "Part":
        """Return the part of a text that ``to_json`` has made.

        Raises:
            KeyError, TypeError, ValueError: another version has made it.
        """
        content = json.loads(text)
        part = cls(Identity(**content["save"]), content["folder"], content["files"])
        for field in fields(Identity):
            _require_type(getattr(part.save, field.name), field.type)
        _require_type(part.folder, str)
        for name, rank in part.files.items():
            _require_type(name, str)
            _require_type(rank, int)
        return part

    def to_json(self) -> str:
        """Return a text that all ranks can read."""
        return json.dumps(asdict(self))


def _require_type(value: Any, kind: Any) -> None:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind}")


def run_of(save_dir: str | os.PathLike[str]) -> str:
    """Return the run in a folder; empty if no save in memory has begun one, or its file is damaged."""
    try:
        text = Path(save_dir, RUN).read_bytes().decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
    return text if _RUN_TEXT.fullmatch(text) else ""


class MemoryFolder:
    """The folder of one ``save_dir`` on this rank's node.

    Args:
        config: of the engine.
        save_dir: where the same run saves to disk.
        run: in ``save_dir``.
    """

    def __init__(self, config: "DeepSpeedConfig", save_dir: str | os.PathLike[str], run: str) -> None:
        self.parent, self._save_dir = Path(save_settings(config).memory_folder), os.path.abspath(save_dir)
        key = hashlib.sha256(os.fsencode(self._save_dir) + run.encode()).hexdigest()[:16]
        self.path = self.parent / f"{_prefix()}{key}"
        self._owned: OwnedFolder | None = None  # what a save is written into

    @property
    def place(self) -> str:
        """What is the same on ranks that have the same folder. It must be there."""
        found = self.path.stat()
        # Several nodes may have one name.
        return f"{socket.gethostname()}:{boot_id()}:{found.st_dev}:{found.st_ino}:{self.path}"

    @property
    def is_ours(self) -> bool:
        """Whether it is there, and nobody else can write into it: what is loaded from it is run."""
        try:
            found = self.path.lstat()
        except OSError:
            return False
        others = stat.S_IWGRP | stat.S_IWOTH
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & others

    @property
    def is_in_memory(self) -> bool:
        """Whether it is on a file system that is in memory, as far as is known."""
        if not _MOUNTS.exists():
            return True
        path = Path(os.path.realpath(self.path))
        mounts = [line.split()[1:3] for line in _MOUNTS.read_text().splitlines()]
        around = [(len(place), kind) for place, kind in mounts if path.is_relative_to(place)]
        return not around or max(around)[1] in _IN_MEMORY

    @property
    def free(self) -> int:
        """Bytes that may still be written: of the file system, and of memory if it is in that."""
        found = os.statvfs(self.path)
        room = found.f_bavail * found.f_frsize
        return min(room, available_memory()) if self.is_in_memory else room

    # Saving ###########################################################################################

    def begin(self, number: int, rank: int) -> Path:
        """Make what a rank writes into, and return it; remove what killed saves of any rank have left.

        Called when no other save is under way.

        Raises:
            CheckpointError: there is no memory folder, or somebody else has made it.
        """
        if not self.parent.is_dir():
            raise CheckpointError(
                f"{self.parent}, where saves in memory go, is no folder on the node of rank {rank}. Set "
                f"checkpoint.memory_folder to one that is in memory (tmpfs) and outlives the processes that train."
            )
        self.path.mkdir(mode=0o700, exist_ok=True)
        if not self.is_ours:
            raise CheckpointError(
                f"{self.path} must be a folder that only this user can write into. Remove it, or set "
                f"checkpoint.memory_folder to another place."
            )
        about = self.path / _ABOUT
        if not about.exists():
            about.write_text(json.dumps({"save_dir": self._save_dir}))
        self._owned = OwnedFolder(self.path / f"{number}-{rank}")
        self._owned.create()
        self._owned.made.mkdir()
        return self._owned.made

    def publish(self, staging: Path, part: Part) -> None:
        """Make complete files count.

        Args:
            staging: of ``begin``.
            part: what it holds.
        """
        sizes = {name: (staging / name).stat().st_size for name in part.files}
        content = {"part": part.to_json(), "sizes": sizes}
        (staging / _MANIFEST).write_text(json.dumps(content))
        staging.rename(self.path / part.folder)
        self._end()

    def keep_only(self, number: int) -> None:
        """Remove all other saves; never raises, for the save is there, and other ranks take it to be."""
        with contextlib.suppress(Exception):
            for path in list(self.path.glob("[0-9]*-*")):
                if not path.name.startswith(f"{number}-"):
                    shutil.rmtree(path, ignore_errors=True)  # another rank does so, too

    def drop(self, number: int, rank: int) -> None:
        """Remove what a rank has of a save, published or not. Never raises."""
        self._end()
        with contextlib.suppress(Exception):
            shutil.rmtree(self.path / f"{number}-{rank}", ignore_errors=True)

    def _end(self) -> None:
        if self._owned is not None:
            self._owned.remove()

    def forget(self) -> None:
        """Remove all saves."""
        if self.is_ours:
            shutil.rmtree(self.path, ignore_errors=True)

    def others(self, same: bool = False) -> list[str]:
        """Describe folders of this user's other saves in memory: path, save_dir, size and age. Never raises.

        Args:
            same: only those of other runs in the same ``save_dir``.
        """
        found = []
        for path in sorted(self.parent.glob(f"{_prefix()}*")):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                about = path / _ABOUT
                save_dir = json.loads(about.read_text())["save_dir"] if about.exists() else "unknown"
                if path != self.path and (save_dir == self._save_dir or not same):
                    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                    found.append(f"{path} (of {save_dir}, {size / 1e9:.3f} GB, {age(path.stat().st_mtime)} old)")
        return found

    # Loading ##########################################################################################

    def parts(self) -> list[Part]:
        """Return what there is of saves, but for files that are not as they were written."""
        if self.is_ours:
            return list(self._manifests())
        if os.path.lexists(self.path):
            logger.warning(
                f"deepspeed_ext: saves in memory in {self.path} are left alone, since others than this user may have "
                f"written them."
            )
        return []

    def _manifests(self) -> Iterator[Part]:
        for path in sorted(self.path.glob(f"[0-9]*/{_MANIFEST}")):
            try:
                content = json.loads(path.read_text())
                part, sizes = Part.from_json(content["part"]), content["sizes"]
                whole = {name: rank for name, rank in part.files.items() if _size(path.parent / name) == sizes[name]}
            except (OSError, ValueError, KeyError, TypeError, AttributeError):  # of another version
                continue
            yield Part(part.save, path.parent.name, whole)


def forget(config: "DeepSpeedConfig", save_dir: str | os.PathLike[str]) -> None:
    """Remove the saves in memory of the run in ``save_dir`` from this node. Never raises."""
    with contextlib.suppress(OSError):
        if any(Path(save_settings(config).memory_folder).glob(f"{_prefix()}*")) and (run := run_of(save_dir)):
            MemoryFolder(config, save_dir, run).forget()


def age(since: float) -> str:
    """Return the time since then in words."""
    seconds = max(0.0, time.time() - since)
    unit, name = next(((unit, name) for unit, name in _UNITS if seconds >= unit), _UNITS[-1])
    return f"{seconds / unit:.0f} {name}"


def _prefix() -> str:
    return f"deepspeed_ext-{os.getuid()}-"


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


# Room #############################################################################################


def available_memory() -> int:
    """Return bytes until the host, or a control group of this process, runs out of memory.

    That is the smallest of what the kernel calls available and, for each control group with a limit, the limit less
    what is in use apart from the cache of files on disks.
    """
    found = [sys.maxsize]
    with contextlib.suppress(OSError, KeyError, ValueError):
        found.append(_table(_PROC / "meminfo")["MemAvailable:"] * 1024)
    with contextlib.suppress(OSError):
        for line in (_PROC / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for version in set(controllers.split(",")) & set(_VERSIONS):
                found += _left_in(version, path)
    return max(0, min(found))


def _left_in(version: str, path: str) -> list[int]:
    """Return what is left in a control group and those around it, where there is a limit."""
    subfolder, limit, use, cache = _VERSIONS[version]
    inner = Path(os.path.normpath(path))  # in a container the outermost one may be all that is visible
    found = []
    for group in (inner, *inner.parents):
        folder = _CONTROL_GROUPS / subfolder / str(group).lstrip("/")
        with contextlib.suppress(OSError, ValueError):  # there is no such file, or no limit ("max")
            most = int((folder / limit).read_text())
            statistics = _table(folder / "memory.stat")
            freed = sum(statistics.get(name, 0) for name in cache)
            found.append(most - max(0, int((folder / use).read_text()) - freed))
    return found


def _table(path: Path) -> dict[str, int]:
    """Return the first number of each line, by the word before it."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
