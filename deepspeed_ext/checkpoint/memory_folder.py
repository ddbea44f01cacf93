# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A node's in-memory saves for one ``save_dir``, which outlive the processes that wrote them.

``<memory_folder>/deepspeed_ext-<user>-<key>`` has a folder ``<number of the save>-<rank>`` for each rank that wrote
into it. A rename publishes this folder when all its files and a manifest are complete. So a save is complete if the
folders of all nodes together contain all its files. The previous save is removed only after all ranks have published.

The key is a hash of the path of ``save_dir`` and its run: a random text in a file there, written by the first save in
memory. So containers that share ``/dev/shm`` and use one path for different volumes have different folders, and
emptying a ``save_dir`` starts another run.
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

from deepspeed_ext.checkpoint.digests import take
from deepspeed_ext.checkpoint.folder import CheckpointError
from deepspeed_ext.checkpoint.owned_folder import OwnedFolder, boot_id
from deepspeed_ext.config.section import save_settings

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig

RUN = "deepspeed_ext_run"  # the file in ``save_dir``; not hidden, so that ``rm -r save_dir/*`` removes it, too
_RUN_TEXT = re.compile(r"[0-9a-f]{32}")
_ABOUT = "about.json"  # in a memory folder: the ``save_dir`` that it belongs to
_MANIFEST = "manifest.json"
_MOUNTS = Path("/proc/self/mounts")
_IN_MEMORY = ("tmpfs", "ramfs")
_PROC = Path("/proc")
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
# By controller in /proc/self/cgroup, empty for version 2: folder, limit and usage files, and cache that can be freed.
_CONTROLLERS = {
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
    """Identifies one save; the same in all its folders.

    Attributes:
        number: a random number.
        tag, step: of the checkpoint; the number of steps that the engine has taken.
        time: rank 0's clock, in seconds; of two saves of a step, the later one is loaded.
        latest: the tag in the file ``latest`` of ``save_dir``; empty if there was none.
        model: hash of the names and shapes of parameters.
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
    """The files of a save in one folder.

    Attributes:
        save: the save.
        folder: the folder's name.
        files: path in the checkpoint: rank that wrote the file.
    """

    save: Identity
    folder: str
    files: dict[str, int]

    @classmethod
    def from_json(cls, text: str) -> "Part":
        """Return the part from a text of ``to_json``.

        Raises:
            KeyError, TypeError, ValueError: another version wrote the text.
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
        """Return a JSON text of this part."""
        return json.dumps(asdict(self))


def _require_type(value: Any, expected: Any) -> None:
    if type(value) is not expected:
        raise TypeError(f"{value!r} is no {expected}")


def read_run(save_dir: str | os.PathLike[str]) -> str:
    """Return the run in a folder; empty if no save in memory has started one, or its file is damaged."""
    try:
        text = Path(save_dir, RUN).read_bytes().decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
    return text if _RUN_TEXT.fullmatch(text) else ""


class MemoryFolder:
    """The memory folder for one ``save_dir`` on this rank's node.

    Args:
        config: the engine's configuration.
        save_dir: the folder of the same run's checkpoints on disk.
        run: the run in ``save_dir``.
    """

    def __init__(self, config: "DeepSpeedConfig", save_dir: str | os.PathLike[str], run: str) -> None:
        self.parent, self._save_dir = Path(save_settings(config).memory_folder), os.path.abspath(save_dir)
        key = hashlib.sha256(os.fsencode(self._save_dir) + run.encode()).hexdigest()[:16]
        self.path = self.parent / f"{_prefix()}{key}"
        self._owned: OwnedFolder | None = None  # staging folder of the running save

    @property
    def location(self) -> str:
        """An identifier that is equal on ranks that share this folder, which must exist."""
        status = self.path.stat()
        # Several nodes may have the same host name.
        return f"{socket.gethostname()}:{boot_id()}:{status.st_dev}:{status.st_ino}:{self.path}"

    @property
    def is_private(self) -> bool:
        """Whether it exists and no other user can write into it. Loading a file can execute code from it."""
        try:
            status = self.path.lstat()
        except OSError:
            return False
        write_bits = stat.S_IWGRP | stat.S_IWOTH
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & write_bits

    @property
    def is_in_memory(self) -> bool:
        """Whether it is on a file system in memory. True if that cannot be determined."""
        if not _MOUNTS.exists():
            return True
        path = Path(os.path.realpath(self.path))
        mounts = [line.split()[1:3] for line in _MOUNTS.read_text().splitlines()]
        parents = [(len(mount), kind) for mount, kind in mounts if path.is_relative_to(mount)]
        return not parents or max(parents)[1] in _IN_MEMORY

    @property
    def free_bytes(self) -> int:
        """Bytes that can still be written, limited by the file system, and also by memory if it is in memory."""
        statistics = os.statvfs(self.path)
        free = statistics.f_bavail * statistics.f_frsize
        return min(free, available_memory()) if self.is_in_memory else free

    # Saving ###########################################################################################

    def create_staging(self, number: int, rank: int) -> Path:
        """Create and return a rank's staging folder; remove those of killed saves of any rank.

        Called when no other save is running.

        Raises:
            CheckpointError: there is no memory folder, or other users can write into it.
        """
        if not self.parent.is_dir():
            raise CheckpointError(
                f"{self.parent}, the folder for saves in memory, does not exist on the node of rank {rank}. Set "
                f"checkpoint.memory_folder to a folder in memory (tmpfs) that outlives the training processes."
            )
        self.path.mkdir(mode=0o700, exist_ok=True)
        if not self.is_private:
            raise CheckpointError(
                f"{self.path} must be a folder that only this user can write to. Remove it, or set "
                f"checkpoint.memory_folder to another folder."
            )
        about = self.path / _ABOUT
        if not about.exists():
            about.write_text(json.dumps({"save_dir": self._save_dir}))
        self._owned = OwnedFolder(self.path / f"{number}-{rank}")
        self._owned.create()
        self._owned.staging.mkdir()
        return self._owned.staging

    def publish(self, staging: Path, part: Part) -> None:
        """Publish complete files.

        Args:
            staging: the folder from ``create_staging``.
        """
        sizes = {name: (staging / name).stat().st_size for name in part.files}
        content = {"part": part.to_json(), "sizes": sizes, "digests": {name: take(staging / name) for name in sizes}}
        (staging / _MANIFEST).write_text(json.dumps(content))
        staging.rename(self.path / part.folder)  # with the manifest, so no visible folder is without one
        self._remove_staging()

    def remove_others(self, number: int) -> None:
        """Remove all other saves. Never raises, because the save is already published on all ranks."""
        with contextlib.suppress(Exception):
            for path in list(self.path.glob("[0-9]*-*")):
                if not path.name.startswith(f"{number}-"):
                    shutil.rmtree(path, ignore_errors=True)  # other ranks of the node remove it, too

    def remove_files_of(self, number: int, rank: int) -> None:
        """Remove a rank's files of a save, published or not. Never raises."""
        self._remove_staging()
        with contextlib.suppress(Exception):
            shutil.rmtree(self.path / f"{number}-{rank}", ignore_errors=True)

    def _remove_staging(self) -> None:
        if self._owned is not None:
            self._owned.remove()

    def remove(self) -> None:
        """Remove all saves."""
        if self.is_private:
            shutil.rmtree(self.path, ignore_errors=True)

    def describe_others(self, same: bool = False) -> list[str]:
        """Describe folders of this user's other saves in memory: path, save_dir, size and age. Never raises.

        Args:
            same: only other runs in the same ``save_dir``.
        """
        folders = []
        for path in sorted(self.parent.glob(f"{_prefix()}*")):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                about = path / _ABOUT
                save_dir = json.loads(about.read_text())["save_dir"] if about.exists() else "unknown"
                if path != self.path and (save_dir == self._save_dir or not same):
                    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                    folders.append(
                        f"{path} (of {save_dir}, {size / 1e9:.3f} GB, {age_text(path.stat().st_mtime)} old)"
                    )
        return folders

    # Loading ##########################################################################################

    def read_parts(self) -> list[Part]:
        """Return all parts of saves, without files of a wrong size."""
        if self.is_private:
            return list(self._manifests())
        if os.path.lexists(self.path):
            logger.warning(
                f"deepspeed_ext: ignoring the saves in memory in {self.path}, because other users may have written "
                f"them."
            )
        return []

    def saved_digests(self, folder: str) -> dict[str, str]:
        """Return the digests of the files in a part's folder; empty if an earlier version has saved it."""
        digests: dict[str, str] = json.loads((self.path / folder / _MANIFEST).read_text()).get("digests", {})
        return digests

    def _manifests(self) -> Iterator[Part]:
        for path in sorted(self.path.glob(f"[0-9]*/{_MANIFEST}")):
            try:
                content = json.loads(path.read_text())
                part, sizes = Part.from_json(content["part"]), content["sizes"]
                intact = {name: rank for name, rank in part.files.items() if _size(path.parent / name) == sizes[name]}
            except (OSError, ValueError, KeyError, TypeError, AttributeError):  # written by another version
                continue
            yield Part(part.save, path.parent.name, intact)


def remove_memory_saves(config: "DeepSpeedConfig", save_dir: str | os.PathLike[str]) -> None:
    """Remove the saves in memory of the run in ``save_dir`` from this node. Never raises."""
    with contextlib.suppress(OSError):
        if any(Path(save_settings(config).memory_folder).glob(f"{_prefix()}*")) and (run := read_run(save_dir)):
            MemoryFolder(config, save_dir, run).remove()


def age_text(since: float) -> str:
    """Return the time since ``since`` in words."""
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

    That is the minimum of the kernel's available memory and, for each control group with a limit, the limit minus the
    usage without the cache of files on disks.
    """
    candidates = [sys.maxsize]
    with contextlib.suppress(OSError, KeyError, ValueError):
        candidates.append(_read_table(_PROC / "meminfo")["MemAvailable:"] * 1024)
    with contextlib.suppress(OSError):
        for line in (_PROC / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for version in set(controllers.split(",")) & set(_CONTROLLERS):
                candidates += _remaining_bytes(version, path)
    return max(0, min(candidates))


def _remaining_bytes(version: str, path: str) -> list[int]:
    """Return the bytes left in a control group and in each of its parents, if they have a limit."""
    subfolder, limit, use, cache = _CONTROLLERS[version]
    inner = Path(os.path.normpath(path))  # in a container, only the outermost group may be visible
    remaining = []
    for group in (inner, *inner.parents):
        folder = _CONTROL_GROUPS / subfolder / str(group).lstrip("/")
        with contextlib.suppress(OSError, ValueError):  # there is no such file, or no limit ("max")
            limit_bytes = int((folder / limit).read_text())
            statistics = _read_table(folder / "memory.stat")
            freed = sum(statistics.get(name, 0) for name in cache)
            remaining.append(limit_bytes - max(0, int((folder / use).read_text()) - freed))
    return remaining


def _read_table(path: Path) -> dict[str, int]:
    """Return a dict from the first word of each line to its first number."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
