# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The folder of a checkpoint, ``<save_dir>/<tag>``: it appears, complete, or it does not.

A save writes into a hidden folder beside it, ``.<tag>.saving``. When all ranks have written their files, that folder
takes the tag's name, and only then the file ``latest`` is replaced. So a save that is killed at any moment leaves what
was there. It is the file system's rename that makes it so: of folders, it must be atomic.

If the tag exists already, Linux exchanges the two folders in one call. Where the file system cannot, the old one is
renamed to ``.<tag>.replaced`` first: a save that is killed right between the two renames leaves both under hidden
names, where our loads find the old one, and the next save puts it back.

A tag that is a link to a folder stays one: all this is done where the link leads to, beside that folder, so that each
rename stays on one file system.
"""

import ctypes
import logging
import os
import shutil
import time
from pathlib import Path

from deepspeed.runtime.zero.utils import ZeRORuntimeException

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
_SAVING = ".saving"
_REPLACED = ".replaced"
# What a save writes: DeepSpeed's files, and ours.
_FILES = ("*mp_rank_*_states.pt", "layer_*_states.pt", "expp_rank_*_states.pt", "residuals_rank_*.pt")
_STALE_SECONDS = 24 * 3600  # since when what a save of another tag has left is not being written any more
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h>, <linux/fs.h>


class CheckpointError(ZeRORuntimeException, RuntimeError):
    """A checkpoint that could not be saved, or cannot be loaded. Raised on all ranks alike; nothing has changed.

    Scripts catch DeepSpeed's class, which its loads raise where the states are sharded otherwise.
    """


class CheckpointFolder:
    """The folder of a tag. One save at a time may write it, and what is beside it.

    Args:
        save_dir: where the user has DeepSpeed save.
        tag: name of the checkpoint in it; may name a folder further down.

    Raises:
        CheckpointError: the tag does not name a folder in ``save_dir``.
    """

    def __init__(self, save_dir: str | os.PathLike[str], tag: str) -> None:
        self.save_dir = Path(save_dir)
        self.tag = tag
        inside = os.path.normpath(tag) if tag else os.curdir
        if os.path.isabs(inside) or inside.split(os.sep, 1)[0] in (os.curdir, os.pardir):
            raise CheckpointError(f"the tag of a checkpoint must name a folder in {save_dir}, got {tag!r}.")
        self.path = self.save_dir / inside
        self._place = behind_links(self.path)
        self.staging = self._place.with_name(f".{self._place.name}{_SAVING}")
        self._replaced = self._place.with_name(f".{self._place.name}{_REPLACED}")
        self._published = False
        self._latest: list[str | None] = []  # what the file latest was before it named this tag

    def staged(self, path: str) -> str:
        """Return where a save writes what is to be at ``path``; ``path`` itself if that is not in this folder."""
        inside = os.path.relpath(path, self.path)
        if inside.split(os.sep, 1)[0] == os.pardir:
            return path
        return str(self.staging / inside)

    # Saving ###########################################################################################

    def prepare(self) -> None:
        """Make an empty staging folder, after what killed saves have left is cleared.

        Raises:
            CheckpointError: what has the tag's name is no folder, or one that cannot be replaced.
        """
        _put_back(self._replaced)  # without which a link leads nowhere
        self._require_replaceable()
        beside = self.path.parent
        beside.mkdir(parents=True, exist_ok=True)
        for left in beside.glob(f".*{_REPLACED}"):
            _put_back(left)
        for left in (self.staging, *beside.glob(f".*{_SAVING}")):
            if left == self.staging or left.lstat().st_mtime < time.time() - _STALE_SECONDS:
                remove(left)
        self.staging.mkdir()

    def _require_replaceable(self) -> None:
        """Refuse what DeepSpeed could not write into, either, or what no rename can replace."""
        if not os.path.lexists(self.path):
            return
        linked = f" (a link to {self._place})" if self.path.is_symlink() else ""
        if not self.path.is_dir():
            found = "a file" if self.path.exists() else "nothing"
            raise CheckpointError(
                f"{self.path}{linked} must be a folder, or not be there, to be saved to; it is {found}. Remove it, or "
                f"save under another tag."
            )
        if os.path.ismount(self._place):
            raise CheckpointError(
                f"{self.path}{linked} is a mount point, which cannot be replaced as a whole. Make it a link to a "
                f"folder in there, or save under another tag."
            )

    def files(self) -> int:
        """Return the number of files that are in the staging folder."""
        return sum(path.is_file() for path in self.staging.rglob("*"))

    def publish(self) -> None:
        """Put the staging folder in the place of the tag's."""
        if self._place.is_dir():
            shutil.copytree(self._place, self.staging, True, self._ignored, _link, dirs_exist_ok=True)
        sync(self.staging)
        if not os.path.lexists(self._place):
            self.staging.rename(self._place)
        elif not _exchange(self.staging, self._place):
            self._place.rename(self._replaced)
            self.staging.rename(self._place)
        self._published = True
        sync(self._place.parent)

    def _ignored(self, folder: str, names: list[str]) -> set[str]:
        """Return what of the old folder is replaced; whatever else somebody keeps there stays."""
        return shutil.ignore_patterns(*_FILES)(folder, names) if Path(folder) == self._place else set()

    def point(self) -> None:
        """Have ``latest`` name the tag."""
        latest = self.save_dir / LATEST
        before = latest.read_text() if latest.exists() else None
        replace_text(latest, self.tag)
        self._latest = [before]

    def revert(self) -> None:
        """Take back what was done since ``prepare``: the save has failed elsewhere."""
        if self._published and not _exchange(self.staging, self._place):
            self._place.rename(self.staging)
        for text in self._latest:
            if text is None:
                behind_links(self.save_dir / LATEST).unlink()
            else:
                replace_text(self.save_dir / LATEST, text)
        self.clear()

    def clear(self) -> None:
        """Remove what was replaced, or what was written of a save that failed."""
        try:
            _put_back(self._replaced)
            remove(self.staging)
        except OSError as error:  # the checkpoint is as it should be
            logging.getLogger("DeepSpeed").warning(f"deepspeed_ext: what a save has left is still there: {error}")

    # Loading ##########################################################################################

    def present_tag(self) -> str:
        """Return the tag under which the checkpoint is found: its own, or where a killed save has set it aside.

        That is an absolute path where the tag is a link.

        Raises:
            CheckpointError: there is none.
        """
        if self.path.is_dir():
            return os.path.relpath(self.path, self.save_dir)
        if self._replaced.is_dir():
            beside = self._replaced.parent == self.path.parent
            return os.path.relpath(self._replaced, self.save_dir) if beside else str(self._replaced)
        raise CheckpointError(f"there is no checkpoint {self.path}.")


def behind_links(path: Path) -> Path:
    """Return where a link leads to, through all others, whether it is there or not; the path itself if it is none."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _put_back(replaced: Path) -> None:
    """Remove a folder that was set aside, or put it back where no other has taken its place."""
    place = replaced.with_name(replaced.name[1 : -len(_REPLACED)])
    if not os.path.lexists(replaced):
        return
    if not os.path.lexists(place):
        replaced.rename(place)
        return
    removed = replaced.with_name(f"{replaced.name}{_SAVING}")  # never put back, should we be killed now
    remove(removed)
    replaced.rename(removed)
    remove(removed)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one call; return False where the system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    arguments = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return rename is not None and rename(*arguments) == 0


def remove(path: Path) -> None:
    """Remove a folder, a file or a link, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _link(source: str, target: str) -> None:
    """Make a hard link where the file system has them, else a copy; not over what is new."""
    if os.path.lexists(target):
        return
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def sync(path: str | os.PathLike[str]) -> None:
    """Write the file or folder to disk before anything refers to it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a small file that is never seen incomplete; through a link."""
    path = behind_links(path)
    new = path.with_name(f".{path.name}{_SAVING}.txt")
    new.write_text(text)
    sync(new)
    new.replace(path)
