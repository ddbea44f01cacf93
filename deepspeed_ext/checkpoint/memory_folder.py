# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What memory of a node holds of saves into one ``save_dir``, for processes that come after those that saved.

``<memory_folder>/deepspeed_ext-<user>-<hash of save_dir>`` has a folder ``<number of the save>-<rank>`` for each rank
that wrote into it. That appears by a rename, when all its files are there, with a manifest. So a save is whole if the
folders of all nodes hold all its files together, and the one before it goes only when all ranks have theirs.
"""

import contextlib
import hashlib
import json
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed.utils import logger

from deepspeed_ext.checkpoint.folder import CheckpointError
from deepspeed_ext.config.saves import memory_folder

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig

_MANIFEST = "manifest.json"
_SAVING = ".saving"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS = Path("/proc/self/mounts")
_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class Identity:
    """What the folders of one save have in common.

    Attributes:
        number: of the save; random.
        tag, step: of the checkpoint; the number of steps that the engine has taken.
        time: of rank 0's clock, in seconds; of two saves of a step, the later one counts.
        run: what ``save_dir`` was known by; see ``in_memory.py``.
        model: what names and shapes of parameters are known by.
        files: the number of files of all ranks.
    """

    number: int
    tag: str
    step: int
    time: float
    run: str
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
        """Return what ``to_json`` has made a text of."""
        fields = json.loads(text)
        return cls(Identity(**fields["save"]), str(fields["folder"]), dict(fields["files"]))

    def to_json(self) -> str:
        """Return a text that all ranks can read."""
        return json.dumps(asdict(self))


class MemoryFolder:
    """The folder of one ``save_dir`` on this rank's node.

    Args:
        config: of the engine.
        save_dir: where the same run saves to disk.
    """

    def __init__(self, config: "DeepSpeedConfig", save_dir: str | os.PathLike[str]) -> None:
        self.parent = Path(memory_folder(config))
        key = hashlib.sha256(os.fsencode(os.path.abspath(save_dir))).hexdigest()[:16]
        self.path = self.parent / f"deepspeed_ext-{os.getuid()}-{key}"

    @property
    def place(self) -> str:
        """What is the same on ranks that have the same folder. It must be there."""
        found = self.path.stat()
        boot = _BOOT.read_text().strip() if _BOOT.exists() else ""  # like nodes may have one name
        return f"{socket.gethostname()}:{boot}:{found.st_dev}:{found.st_ino}:{self.path}"

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
        """Bytes that may still be written."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

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
        for left in self.path.glob(f".*{_SAVING}"):
            if not left.name.startswith(f".{number}-"):  # which is another rank's, of this save
                shutil.rmtree(left, ignore_errors=True)
        staging = self.path / f".{number}-{rank}{_SAVING}"
        staging.mkdir()
        return staging

    def publish(self, staging: Path, part: Part, names: list[str]) -> None:
        """Make complete files count.

        Args:
            staging: of ``begin``.
            part: what it holds.
            names: files of the save, of all ranks.
        """
        sizes = {name: (staging / name).stat().st_size for name in part.files}
        content = {"part": part.to_json(), "sizes": sizes, "names": names}
        (staging / _MANIFEST).write_text(json.dumps(content))
        staging.rename(self.path / part.folder)

    def keep_only(self, number: int) -> None:
        """Remove all other saves; never raises, for the save is there, and other ranks take it to be."""
        with contextlib.suppress(OSError):
            for path in list(self.path.iterdir()):
                if not path.name.startswith(f"{number}-"):
                    shutil.rmtree(path, ignore_errors=True)  # another rank does so, too

    def drop(self, number: int, rank: int) -> None:
        """Remove what a rank has of a save, published or not."""
        for name in (f".{number}-{rank}{_SAVING}", f"{number}-{rank}"):
            shutil.rmtree(self.path / name, ignore_errors=True)

    def forget(self) -> None:
        """Remove all saves."""
        if self.is_ours:
            shutil.rmtree(self.path, ignore_errors=True)

    # Loading ##########################################################################################

    def parts(self) -> list[Part]:
        """Return what there is of saves, but for files that are not as they were written."""
        if self.is_ours:
            return [part for part, _ in self._manifests()]
        if os.path.lexists(self.path):
            logger.warning(
                f"deepspeed_ext: saves in memory in {self.path} are left alone, since others than this user may have "
                f"written them."
            )
        return []

    def names(self, number: int) -> list[str]:
        """Return the files of all ranks of a save; empty if nothing is there of it."""
        return next((names for part, names in self._manifests() if part.save.number == number), [])

    def _manifests(self) -> Iterator[tuple[Part, list[str]]]:
        for path in sorted(self.path.glob(f"[0-9]*/{_MANIFEST}")):
            try:
                content = json.loads(path.read_text())
                part = Part.from_json(content["part"])
            except (OSError, ValueError, KeyError, TypeError):  # of another version
                continue
            sizes = content["sizes"]
            whole = {name: rank for name, rank in part.files.items() if _size(path.with_name(name)) == sizes[name]}
            yield Part(part.save, path.parent.name, whole), content["names"]


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
