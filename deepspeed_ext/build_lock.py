# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Builds an extension once, even if an earlier build was killed.

Note [Two locks]
    Torch creates a file named ``lock`` in the build folder, and all other processes wait until it is gone. The file
    does not say who made it. If a build is killed, its file stays, and later builds wait forever. So we hold an flock,
    too, which the kernel releases when its holder dies:

    - Exclusive, for the first process, which builds. If torch's lock exists now, its holder is dead, so we remove it.
    - Shared, for the others, once the first has finished. All of them then load what it has built, at the same time.

    Newer releases of torch (2.15, but not 2.13) take an flock on their file as well, and leave the file after a build.
    There, the file means nothing and blocks nobody.

    Some network file systems keep an flock within one machine. So holders write the machine's boot id to our file. We
    remove torch's lock only if all holders ran under this kernel (or the others are more than a day old). Otherwise we
    wait for it, and a warning says so. One case is not handled: a compiler that briefly outlives its killed parent.
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
_UNKNOWN_SECONDS = 10.0  # of waiting for a holder that may be dead, after which a warning says so
_ALIVE_SECONDS = 60.0  # the same for a holder that builds, since kernels for a GPU take about as long
_SEVERAL = "several machines"
_FORGOTTEN_SECONDS = 24 * 3600.0  # age from which another machine's note is ignored


@contextmanager
def built_once(folder: Path, name: str) -> Iterator[None]:
    """Within this context, only one process at a time builds in a folder; see Note [Two locks].

    Args:
        folder: the folder in which torch builds.
        name: name of the extension, for messages.
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
            kind = fcntl.LOCK_SH  # by now, another process has built, or died
        yield


def _obstacle(torchs: Path, ours: TextIO, kind: int, name: str) -> tuple[str, float] | None:
    """Try to take our lock; return None if that succeeds and nothing else blocks.

    Otherwise return the reason for waiting, and the seconds after which a warning should give it.
    """
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
    """Return the age of torch's lock file in seconds; None if there is none, or if it blocks nobody."""
    from torch.utils import cpp_extension

    if not hasattr(cpp_extension, "FileBaton"):  # only FileBaton's file blocks by existing
        return None
    try:
        return max(0.0, time.time() - torchs.stat().st_mtime)
    except FileNotFoundError:
        return None


def _noted(ours: TextIO) -> str:
    ours.seek(0)
    return ours.read()


def _note(ours: TextIO, alone: bool) -> None:
    """Record that a process of this machine is about to build or load."""
    machine, noted = _boot_id(), _noted(ours)
    forgotten = not noted or time.time() - os.fstat(ours.fileno()).st_mtime > _FORGOTTEN_SECONDS
    if noted != machine and not (alone and forgotten):
        machine = _SEVERAL
    if noted != machine:
        ours.truncate(0)
        ours.write(machine)  # the file is open for appending; it is empty now
        ours.flush()


def _boot_id() -> str:
    """Return an id of this boot of this machine, the same in all of its containers; empty without Linux."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
