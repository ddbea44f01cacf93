# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Builds an extension once, whatever became of the process that built it before.

Note [Two locks]
    Torch creates a file named ``lock`` in the build folder, and everybody else waits until it is gone. It does not say
    who made it: the file of a build that was killed stays, and later builds wait forever. Beside it we hold an flock,
    which the kernel releases when its holder dies:

    - Exclusive: the first process, which builds. If torch's lock is there now, its holder is dead: we remove it.
    - Shared: the others, once the first has finished. They load what it has built, all of them at once.

    Newer releases of torch (2.15 does, 2.13 does not) take an flock on their file as well, and leave the file behind
    when they have built. There it tells nothing, and is no obstacle.

    Some network file systems keep an flock within one machine. Holders therefore note the machine's boot id in the
    file. Only if all of them ran under this kernel (or the others were there more than a day ago) do we remove torch's
    lock; otherwise we wait for it and say so. A compiler that outlives its killed parent for a moment is not known.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from deepspeed.utils import logger

_POLL_SECONDS = 0.1
_UNKNOWN_SECONDS = 10.0  # after which a wait for a holder that may be dead is told
_ALIVE_SECONDS = 60.0  # the same for a holder that builds: kernels for a GPU take about as long
_SEVERAL = "several machines"
_FORGOTTEN_SECONDS = 24 * 3600.0  # after which another machine's note says nothing of now


@contextmanager
def built_once(folder: Path, name: str) -> Iterator[None]:
    """Make one process at a time build in a folder; see Note [Two locks].

    Args:
        folder: where torch builds.
        name: of what is built, for messages.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torchs, began, told = folder / "lock", time.monotonic(), False
    with (folder / "holders").open("a+") as ours:
        kind = fcntl.LOCK_EX
        while waits_for := _obstacle(torchs, ours, kind, name):
            reason, patience = waits_for
            if not told and time.monotonic() - began > patience:
                logger.warning(f"deepspeed_ext: waiting {reason}")
                told = True
            time.sleep(_POLL_SECONDS)
            kind = fcntl.LOCK_SH  # by now somebody has built, or died
        yield


def _obstacle(torchs: Path, ours: TextIO, kind: int, name: str) -> tuple[str, float] | None:
    """Take our lock, or say what one waits for, and after how many seconds to tell; None if nothing is in the way."""
    try:
        alone = kind == fcntl.LOCK_EX and _take(ours, fcntl.LOCK_EX)
        if not alone and not _take(ours, fcntl.LOCK_SH):
            return f"for another process, which builds {name} and holds {ours.name}.", _ALIVE_SECONDS
        if (age := _blocked_since(torchs)) is None:
            _note(ours, alone)
            return None
        alone = alone or _take(ours, fcntl.LOCK_EX)
        if alone and _noted(ours) == _boot_id() != "":
            torchs.unlink(missing_ok=True)
            logger.warning(
                f"deepspeed_ext: removed {torchs}, {age:.0f} s old: the process that built {name} there has died."
            )
            return None
        fcntl.flock(ours, fcntl.LOCK_UN)
    except OSError:  # the file system has no flock
        if (age := _blocked_since(torchs)) is None:
            return None
    return (
        f"for {torchs}, {age:.0f} s old, the lock file of a process that builds {name} or was killed while it did. "
        f"If no process on any machine builds there, remove the file.",
        _UNKNOWN_SECONDS,
    )


def _take(ours: TextIO, kind: int) -> bool:
    try:
        fcntl.flock(ours, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _blocked_since(torchs: Path) -> float | None:
    """Return how many seconds ago torch's lock file was made; None if there is none, or if it blocks nobody."""
    from torch.utils import cpp_extension

    if not hasattr(cpp_extension, "FileBaton"):  # whose file blocks by being there
        return None
    try:
        return max(0.0, time.time() - torchs.stat().st_mtime)
    except FileNotFoundError:
        return None


def _noted(ours: TextIO) -> str:
    ours.seek(0)
    return ours.read()


def _note(ours: TextIO, alone: bool) -> None:
    """Note that a process of this machine is about to build or load."""
    machine, noted = _boot_id(), _noted(ours)
    forgotten = not noted or time.time() - os.fstat(ours.fileno()).st_mtime > _FORGOTTEN_SECONDS
    if noted != machine and not (alone and forgotten):
        machine = _SEVERAL
    if noted != machine:
        ours.truncate(0)
        ours.write(machine)  # appended: at the beginning now
        ours.flush()


def _boot_id() -> str:
    """Return what tells one boot of a machine from all others, in containers, too; empty where Linux is not there."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
