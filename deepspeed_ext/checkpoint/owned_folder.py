# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Temporary folders next to paths that other jobs and users share.

Note [Owned folders]
    Incomplete files and folders are created in a hidden folder next to their final path, ``.<name>.<token>.saving``,
    and renamed to that path when complete. The token is random, so no two saves, exports, conversions or jobs use the
    same folder. Its file ``owner.json`` marks it as created by this package. The process that created the folder locks
    that file (flock), and the kernel releases the lock when the process dies.

    The next ``OwnedFolder`` with the same parent removes the folders of dead processes. A folder without the marker,
    or with a locked one, is never touched. A file system may hide locks from other hosts. So a folder of another host
    is removed only a day after it was last used.

    If the system cannot exchange two names in one call, the old folder is first renamed to ``replaced`` in the owned
    folder. If a save is killed between its two renames, the old folder stays there. Loads with the extension find it,
    and cleanup of the owned folder first renames it back, unless its name is taken.
"""

import contextlib
import ctypes
import fcntl
import glob
import json
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_SUFFIX, _TOKEN_BYTES = ".saving", 4
_MARKER = "owner.json"
_STAGED, _REPLACED, _REMOVED = "made", "replaced", "removed"
_STALE_SECONDS = 24 * 3600
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h>, <linux/fs.h>


def boot_id() -> str:
    """Return an identifier of the running kernel, the same in all its containers; empty if there is none."""
    return _BOOT.read_text().strip() if _BOOT.exists() else ""


def new_token() -> str:
    """Return a random token for the name of an owned folder."""
    return secrets.token_hex(_TOKEN_BYTES)


class OwnedFolder:
    """A hidden folder for an incomplete file or folder, which then replaces its target. See Note [Owned folders].

    Args:
        target: the path to replace; a link is not followed.
        token: the same on all ranks that write into the folder; by default a new one.

    Attributes:
        path: the hidden folder.
        staging: path of the incomplete file or folder in it.
    """

    def __init__(self, target: Path, token: str | None = None) -> None:
        self.target = target
        self.path = target.with_name(f".{target.name}.{token or new_token()}{_SUFFIX}")
        self.staging = self.path / _STAGED
        self._replaced = self.path / _REPLACED
        self._marker_file: IO[str] | None = None

    def create(self) -> None:
        """Create the folder, and remove folders of dead processes with the same parent."""
        for folder in self.target.parent.glob(f".*{_SUFFIX}"):
            remove_if_abandoned(folder)
        self.path.mkdir()
        self._marker_file = create_marker(self.path)

    def publish(self) -> None:
        """Rename the new content to its target. Replaced content stays in this folder until ``remove``.

        Raises:
            OSError: the target cannot be replaced, or the rename cannot be flushed to disk. ``remove`` then leaves the
            target as it was.
        """
        sync(self.staging)  # before the rename, or a crash could leave the name without the content
        if not os.path.lexists(self.target):
            self.staging.rename(self.target)
        elif not _exchange(self.staging, self.target):
            self.target.rename(self._replaced)
            self.staging.rename(self.target)
        try:
            sync(self.target.parent)  # the rename must be on disk before ``latest`` refers to it
        except BaseException:
            self.undo_publish()  # otherwise `remove` would delete the old folder, which the rename moved into this one
            raise

    def undo_publish(self) -> None:
        """Undo ``publish``; ``remove`` then renames a folder in ``replaced`` back."""
        if not _exchange(self.staging, self.target):
            self.target.rename(self.staging)

    def remove(self) -> None:
        """Remove the folder, if this process created it. Logs a warning instead of raising."""
        if self._marker_file is None:
            return
        with self._marker_file:  # still locked, or another process could discard the folder at the same time
            try:
                _discard(self.path)
            except Exception as error:  # if raised, it would fail a committed save on this rank only
                _warn(f"{self.path} could not be removed: {error!r}")
        self._marker_file = None


def find_replaced(target: Path) -> list[Path]:
    """Return the old folders of this path that killed processes have not renamed back."""
    token = "[0-9a-f]" * 2 * _TOKEN_BYTES
    return sorted(target.parent.glob(f".{glob.escape(target.name)}.{token}{_SUFFIX}/{_REPLACED}"))


def create_marker(folder: Path, shared: bool = False) -> IO[str]:
    """Write the marker of a new folder, which is in use until the returned file is closed.

    Args:
        shared: whether other processes may also ``lock_shared`` the folder.
    """
    marker = (folder / _MARKER).open("x")
    host = boot_id()
    try:
        fcntl.flock(marker, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    except OSError:  # the file system has no locks
        host = ""
    marker.write(json.dumps({"host": host}))  # after the lock: until then `remove_if_abandoned` cannot read a host
    marker.flush()
    return marker


def lock_shared(folder: Path) -> IO[str] | None:
    """Prevent removal of a complete folder until the returned file is closed; None if it has no marker."""
    try:
        marker = (folder / _MARKER).open()
    except OSError:
        return None
    with contextlib.suppress(OSError):  # the file system has no locks
        fcntl.flock(marker, fcntl.LOCK_SH)
    with contextlib.suppress(OSError):  # it is read-only
        os.utime(marker.name)
    return marker


def remove_if_abandoned(folder: Path) -> None:
    """Remove a folder with a marker if no process uses it; do nothing otherwise. Never raises."""
    with contextlib.suppress(Exception), (folder / _MARKER).open("r+") as marker:
        try:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:
            visible = False
        else:
            visible = json.load(marker)["host"] == boot_id() != ""
        if visible or _file_system_time(folder.parent) - os.fstat(marker.fileno()).st_mtime > _STALE_SECONDS:
            hidden = folder
            if not folder.name.endswith(_SUFFIX):  # otherwise a partial folder would have a visible name
                hidden = folder.rename(OwnedFolder(folder).path)
            _discard(hidden)


def _file_system_time(folder: Path) -> float:
    """Return the time on a file system, because clocks of hosts differ and jump."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime


def _discard(folder: Path) -> None:
    """Remove an owned folder, its marker last; rename the replaced folder back unless its name is taken."""
    replaced, removed = folder / _REPLACED, folder / _REMOVED
    for path in folder.iterdir():
        if path.name not in (_MARKER, _REPLACED):
            remove(path)
    if os.path.lexists(replaced):
        target = folder.with_name(folder.name[1 : -len(_SUFFIX) - 2 * _TOKEN_BYTES - 1])
        if os.path.lexists(target):
            remove(replaced.rename(removed))  # otherwise a partial folder could be renamed back
        else:
            replaced.rename(target)
    (folder / _MARKER).unlink()  # last: without it, no process would ever remove the rest
    folder.rmdir()


@contextlib.contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yield a path to write; the file replaces ``path`` at the end of the context. A link stays a link."""
    owned = OwnedFolder(resolve_links(path))
    owned.create()
    try:
        yield owned.staging
        sync(owned.staging)
        owned.staging.replace(owned.target)
    finally:
        owned.remove()


def replace_text(path: Path, text: str) -> None:
    """Replace the content of a small file atomically; a link stays a link."""
    with replace_atomically(path) as new:
        new.write_text(text)


def resolve_links(path: Path) -> Path:
    """Return the final target of a link, whether it exists or not; ``path`` itself if it is not a link."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def remove(path: Path) -> None:
    """Remove a folder, a file or a link, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: str | os.PathLike[str]) -> None:
    """Flush a file or folder to disk. Call it before anything refers to the path."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names in one call; return False if the system cannot, or one of them is missing."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    arguments = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return rename is not None and rename(*arguments) == 0


def _warn(text: str) -> None:
    logging.getLogger("DeepSpeed").warning(f"deepspeed_ext: {text}")
