# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The folder of a checkpoint, ``<save_dir>/<tag>``: it appears complete or not at all.

A save writes into a hidden sibling folder; see Note [Owned folders] in ``owned_folder.py``. When all ranks have
written their files, that folder is renamed to the tag, and only then is the file ``latest`` replaced. So the previous
checkpoint stays intact if a save is killed at any moment. This requires a file system that renames folders atomically.

If the tag already exists, Linux exchanges the two folders in one call. If the file system does not support that, the
old folder is renamed first. If a save is killed between the two renames, both folders have hidden names. Loads with
the extension find the old folder there, and the next save renames it back.

A tag that is a link to a folder stays a link. All renames then happen next to the link's target, so that each one
stays on one file system.
"""

import os
import shutil
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from deepspeed.runtime.zero.utils import ZeRORuntimeException
from deepspeed.utils import logger

from deepspeed_ext.checkpoint.owned_folder import OwnedFolder, find_replaced, replace_text, resolve_links

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
RECORD, SIDECAR = "digests.json", ".digest"  # of all files, and of one file while it is being saved: ``digests.py``


class RankFile(Enum):
    """The files that a rank may add to DeepSpeed's in a checkpoint. A save replaces all that are listed."""

    RESIDUALS = "residuals"
    OUTER = "outer"

    def file_name(self, rank: int, mp_rank: int) -> str:
        """Return the file name of a data-parallel and model-parallel rank."""
        return f"{self.value}_rank_{rank:05d}_mp_rank_{mp_rank:02d}.pt"

    def pattern(self, mp_rank: int | None = None) -> str:
        """Return a pattern for the files of all data-parallel ranks; None also matches all model-parallel ranks."""
        return f"{self.value}_rank_*_mp_rank_{'*' if mp_rank is None else f'{mp_rank:02d}'}.pt"


# The files that a save writes, DeepSpeed's and the extension's. Other files in the folder are kept. If a pattern were
# missing here, stale files of the previous save would stay.
_FILES = (
    *("*mp_rank_*_states.pt", "layer_*_states.pt", "expp_rank_*_states.pt"),
    *(file.pattern() for file in RankFile),
    RECORD,
)


def saved_files(folder: Path) -> list[Path]:
    """Return the files in a folder that a save would replace, except the record of all files."""
    return sorted({path for pattern in _FILES for path in folder.glob(pattern)} - {folder / RECORD})


class CheckpointError(ZeRORuntimeException, RuntimeError):
    """A checkpoint could not be saved or loaded. Raised on all ranks; nothing has changed.

    It is a ``ZeRORuntimeException`` because scripts catch that: DeepSpeed raises it if states are sharded differently.
    """


def error_text(error: BaseException) -> str:
    """Return an error's message, or its type if the message is empty, as for ``MemoryError``."""
    return str(error) or type(error).__name__


class CheckpointFolder:
    """The folder of a tag. Only one save at a time may write to it and its neighbors.

    Args:
        save_dir: the ``save_dir`` of DeepSpeed's ``save_checkpoint``.
        tag: name of the checkpoint in it; may name a nested folder.
        files: patterns of the files that a save writes; all others stay.

    Raises:
        CheckpointError: the tag does not name a folder in ``save_dir``.
    """

    def __init__(self, save_dir: str | os.PathLike[str], tag: str, files: Sequence[str] = _FILES) -> None:
        self.save_dir, self._files = Path(save_dir), files
        self.tag = tag
        inside = os.path.normpath(tag) if tag else os.curdir
        if os.path.isabs(inside) or inside.split(os.sep, 1)[0] in (os.curdir, os.pardir):
            raise CheckpointError(f"the tag of a checkpoint must name a folder in {save_dir}, got {tag!r}.")
        self.path = self.save_dir / inside
        self._target = resolve_links(self.path)
        self.set_token(None)
        self._published = False
        self._previous_latest: list[str | None] = []  # the previous text of ``latest``, once replaced; None: no file

    def set_token(self, token: str | None) -> None:
        """Name the staging folder by a token that all ranks share, or by a new one."""
        self._owned = OwnedFolder(self._target, token)
        self.staging = self._owned.staging

    def staging_path(self, path: str) -> str:
        """Return the staging path for ``path``; ``path`` itself if it is not in this folder."""
        inside = os.path.relpath(path, self.path)
        if inside.split(os.sep, 1)[0] == os.pardir:
            return path
        return str(self.staging / inside)

    # Saving ###########################################################################################

    def prepare(self) -> None:
        """Clean up after killed saves, and create an empty staging folder.

        Raises:
            CheckpointError: the tag's path is not a folder, or cannot be replaced.
        """
        replaced = self._find_replaced()
        if replaced is not None and not os.path.lexists(self._target):
            replaced.rename(self._target)  # before the check below, which refuses a link without a target
        self._require_replaceable()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._owned.create()
        self.staging.mkdir()

    def _require_replaceable(self) -> None:
        """Refuse a path that DeepSpeed could not write into either, or that no rename can replace."""
        if not os.path.lexists(self.path):
            return
        linked = f" (a link to {self._target})" if self.path.is_symlink() else ""
        if not self.path.is_dir():
            state = "a file" if self.path.exists() else "a link without a target"
            raise CheckpointError(
                f"{self.path}{linked} must be a folder, or must not exist; it is {state}. Remove it, or save under "
                f"another tag."
            )
        if os.path.ismount(self._target):
            raise CheckpointError(
                f"{self.path}{linked} is a mount point, which a rename cannot replace. Make it a link to a folder "
                f"on that file system, or save under another tag."
            )

    def count_files(self) -> int:
        """Return the number of files in the staging folder that are visible together with their digests."""
        names = {str(path) for path in self.staging.rglob("*") if path.is_file()}
        return sum(f"{name}{SIDECAR}" in names for name in names)

    def publish(self) -> None:
        """Replace the tag's folder with the staging folder."""
        if self._target.is_dir():
            shutil.copytree(self._target, self.staging, True, self._ignore_replaced, _link_or_copy, dirs_exist_ok=True)
        self._owned.publish()  # after the copy: kept files must never be missing under the final name
        self._published = True

    def _ignore_replaced(self, folder: str, names: list[str]) -> set[str]:
        """Return the names in the old folder that a save replaces; all others are kept, by hard links."""
        return shutil.ignore_patterns(*self._files)(folder, names) if Path(folder) == self._target else set()

    def keeps(self, name: str) -> bool:
        """Return whether ``publish`` keeps this file of the old folder."""
        return (self._target / name).is_file() and not self._ignore_replaced(str(self._target), [name])

    def update_latest(self) -> None:
        """Write the tag into ``latest``."""
        latest = self.save_dir / LATEST
        previous = latest.read_text() if latest.exists() else None
        replace_text(latest, self.tag)
        self._previous_latest = [previous]

    def revert(self) -> None:
        """Undo everything since ``prepare``. Called when the save has failed on any rank."""
        if self._published:
            self._owned.undo_publish()
        self._published = False  # otherwise a second call would undo this one
        latest = self.save_dir / LATEST
        for text in self._previous_latest:
            if latest.read_text() != self.tag:  # another engine has since saved to the same ``save_dir``
                continue
            if text is None:
                resolve_links(latest).unlink()
            else:
                replace_text(latest, text)
        self.clear()

    def abandon(self) -> None:
        """Undo everything since ``prepare`` when ranks can no longer communicate. Logs errors instead of raising."""
        try:
            self.revert()
        except Exception as error:
            logger.error(f"deepspeed_ext: could not undo a failed save in {self.save_dir}: {error_text(error)}")

    def clear(self) -> None:
        """Remove the replaced folder, or the files of a failed save. Nothing can be undone after this."""
        self._published, self._previous_latest = False, []
        self._owned.remove()

    # Loading ##########################################################################################

    def actual_tag(self) -> str:
        """Return the tag's actual name: its own, or the one to which a killed save renamed it.

        If the tag is a link, the latter is an absolute path.

        Raises:
            CheckpointError: there is no such checkpoint.
        """
        if self.path.is_dir():
            return os.path.relpath(self.path, self.save_dir)
        replaced = self._find_replaced()
        if replaced is not None:
            beside = self._target.parent == self.path.parent
            return os.path.relpath(replaced, self.save_dir) if beside else str(replaced)
        raise CheckpointError(f"there is no checkpoint {self.path}.")

    def _find_replaced(self) -> Path | None:
        """Return the renamed old folder of a killed save; None if there is none."""
        replaced = find_replaced(self._target)
        older = self._target.with_name(f".{self._target.name}.replaced")  # of versions without ``owned_folder.py``
        if any(any(older.glob(pattern)) for pattern in self._files):
            replaced.append(older)
        return replaced[0] if replaced else None


def _link_or_copy(source: str, target: str) -> None:
    """Create a hard link, or a copy if the file system has no links. An existing target is not changed."""
    if os.path.lexists(target):
        return
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
