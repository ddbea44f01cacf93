# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The folder of a checkpoint, ``<save_dir>/<tag>``: it appears, complete, or it does not.

A save writes into a hidden folder beside it, ``.<tag>.saving``. When all ranks have written their files, that folder
is renamed to the tag, and only then the file ``latest`` is replaced. So a save that is killed at any moment leaves
what was there: the file system's rename is what makes it so, and it must be atomic for folders.

If the tag exists already, it is renamed to ``.<tag>.replaced`` first. A save that is killed right between the two
renames leaves both complete folders under their hidden names; the next load or save puts the replaced one back.
"""

import os
import shutil
from pathlib import Path

LATEST = "latest"
_SAVING = ".saving"
_REPLACED = ".replaced"


class CheckpointError(RuntimeError):
    """A checkpoint that could not be saved, or cannot be loaded. Raised on all ranks alike; nothing has changed."""


class CheckpointFolder:
    """The folder of a tag.

    Args:
        save_dir: where the user has DeepSpeed save.
        tag: name of the checkpoint in it; may name a folder further down.
    """

    def __init__(self, save_dir: str | os.PathLike[str], tag: str) -> None:
        self.save_dir = Path(save_dir)
        self.tag = tag
        self.path = self.save_dir / tag
        self.staging = self.path.with_name(f".{self.path.name}{_SAVING}")
        self._replaced = self.path.with_name(f".{self.path.name}{_REPLACED}")

    def staged(self, path: str) -> str:
        """Where a save writes what is to be at ``path``; ``path`` itself if that is not in this folder."""
        inside = os.path.relpath(path, self.path)
        if inside.split(os.sep, 1)[0] == os.pardir:
            return path
        return str(self.staging / inside)

    def prepare(self) -> None:
        """Make an empty staging folder, after what killed saves have left beside it is cleared."""
        self.staging.parent.mkdir(parents=True, exist_ok=True)
        for left in self.staging.parent.glob(f".*{_REPLACED}"):
            CheckpointFolder(left.parent, left.name[1 : -len(_REPLACED)]).recover()
        for left in self.staging.parent.glob(f".*{_SAVING}"):
            shutil.rmtree(left)
        self.staging.mkdir()

    def publish(self, save_latest: bool) -> None:
        """Put the staging folder in the place of the tag's; then have ``latest`` name the tag."""
        if self.path.exists():
            # Whatever somebody else keeps there stays.
            others = shutil.ignore_patterns("*_states.pt")
            shutil.copytree(self.path, self.staging, True, others, _link, dirs_exist_ok=True)
            sync(self.staging)
            self.path.rename(self._replaced)
        else:
            sync(self.staging)
        self.staging.rename(self.path)
        sync(self.path.parent)
        if save_latest:
            replace_text(self.save_dir / LATEST, self.tag)
        self.recover()

    def recover(self) -> None:
        """Put back what a save has set aside, if it was killed before its own folder was in place; else remove it."""
        if not self._replaced.exists():
            return
        if self.path.exists():
            self._replaced.rename(self.staging)  # under this name it is never put back, should we be killed now
            shutil.rmtree(self.staging)
        else:
            self._replaced.rename(self.path)


def _link(source: str, target: str) -> None:
    """A hard link where the file system has them, else a copy; not over what is new."""
    if os.path.lexists(target):
        return
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def sync(path: str | os.PathLike[str]) -> None:
    """Have the file or folder on disk before anything refers to it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a small file that is never seen incomplete."""
    new = path.with_name(f".{path.name}{_SAVING}.txt")
    new.write_text(text)
    sync(new)
    new.replace(path)
