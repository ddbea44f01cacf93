# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Converts a checkpoint during a load if its sharding differs from the run's.

Note [Converted checkpoints]
    With ``"checkpoint": {"load_universal": true}``, a run that lost a node, or has another strategy, continues from
    its ordinary checkpoint D/T. A checkpoint that fits is loaded unchanged, bit for bit. Otherwise the first rank runs
    ``python -m deepspeed_ext convert`` to create D/T_converted, and all ranks load that. The converted folder appears
    complete or not at all. It records its source files, and is reused as long as these do not change. Only the newest
    one is kept, and those that other jobs are loading. A universal checkpoint that the user converted is loaded as in
    DeepSpeed.

    Several jobs may load one checkpoint at the same time. Each converts it in its own folder (``owned_folder.py``).
    The first job to finish renames its result to D/T_converted, and the others use that.

    Conversion may take minutes, longer than a collective may wait. So the other ranks poll the disk, not the network.
    While the first rank is converting, it keeps updating the time of a file. It removes the file at the end, which
    also works on a full disk. If the file stops changing, that rank has died, and the others raise. They compare times
    for changes only, because the clocks of hosts differ, and at growing intervals, because there may be many ranks.
    They count only time during which they could poll, because a file server may stall all of them.
"""

import contextlib
import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from deepspeed import comm as dist
from deepspeed.utils import logger

from deepspeed_ext.checkpoint.folder import CheckpointError
from deepspeed_ext.checkpoint.owned_folder import (
    OwnedFolder,
    create_marker,
    lock_shared,
    new_token,
    remove_if_abandoned,
)
from deepspeed_ext.checkpoint.trust import is_trusted
from deepspeed_ext.comm.agreement import broadcast_text, run_on_all_or_raise, run_on_first_or_raise

SUFFIX = "_converted"
_SOURCE = "converted_from.json"  # names, sizes and times of the source files
_HEARTBEAT_FILE = "at_work"  # its time changes every second while the first rank is converting
_BEAT_SECONDS = 1.0  # seconds between two changes
_POLL_SECONDS = 0.2  # seconds of the other ranks' first polling interval
_POLL_GROWTH, _MAX_POLL_SECONDS = 1.2, 10.0  # growth factor of the polling interval, and its maximum in seconds
_DEAD_SECONDS = 60.0  # seconds without a change after which the first rank counts as dead
_VISIBLE_SECONDS = 60.0  # seconds until a new file is visible on other nodes; NFS may take this long
_OUTPUT_CHARACTERS = 2000  # last characters of the converter's output in an error message
# ``-m`` would import from the current folder, and Python 3.10 has no ``-P``. The package may not be installed.
_RUN = """
import sys
sys.path[:] = [path for path in sys.path if path] + [sys.argv.pop(1)]
from deepspeed_ext.__main__ import main
main()
"""


def is_universal(folder: Path) -> bool:
    """Return whether a checkpoint is universal: it has a folder for each parameter."""
    return (folder / "zero").is_dir()


def convert_for_load(load_dir: str, tag: str, reason: str) -> tuple[str, IO[str] | None]:
    """Convert an ordinary checkpoint into a universal one; see Note [Converted checkpoints].

    Collective over all ranks.

    Args:
        load_dir: a folder on a file system that all ranks share.
        reason: the error of a load without conversion.

    Returns:
        The tag of the universal checkpoint; on the first rank, a lease that keeps other jobs from removing it until
        closed.

    Raises:
        CheckpointError: on all ranks, if it cannot be converted; the attempt is removed. If the first rank has died or
            cannot write, each rank raises its own error.
    """
    folder = Path(load_dir, tag)
    target = folder.with_name(folder.name + SUFFIX)
    first = dist.get_rank() == 0
    lease = run_on_first_or_raise(
        lambda: _reuse_conversion(folder, target), f"{folder} cannot be read", CheckpointError
    )
    if broadcast_text(str(lease is not None), 0) != str(True):
        owned = OwnedFolder(target, broadcast_text(new_token(), 0))
        heartbeat = owned.path / _HEARTBEAT_FILE
        run_on_first_or_raise(
            lambda: _create_folder(owned, heartbeat), f"{owned.path} cannot be written", CheckpointError
        )
        # A rank that does not see the file yet would assume in `_wait_for_conversion` that the conversion has ended.
        run_on_all_or_raise(
            lambda: _wait_for_file(heartbeat), f"{owned.path} is not visible to all ranks", CheckpointError
        )
        problem = ""
        if first:
            logger.warning(
                f"deepspeed_ext: {folder} cannot be loaded without conversion. Converting it to {target}, which may "
                f"take minutes."
            )
            lease, problem = _convert(folder, owned, heartbeat)
            owned.remove()
        else:
            _wait_for_conversion(folder, heartbeat)
        run_on_all_or_raise(
            lambda: _raise_problem(problem, folder, reason), f"{folder} cannot be converted", CheckpointError
        )
        if first:
            _remove_older(target)
    return str(Path(tag).with_name(target.name)), lease


def _signature(folder: Path) -> list[list[str | int]]:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _reuse_conversion(folder: Path, target: Path) -> IO[str] | None:
    """Return a lease of the existing conversion, if its source files have not changed."""
    if not (target / _SOURCE).is_file():
        return None
    lease = lock_shared(target)
    with contextlib.suppress(FileNotFoundError, ValueError):  # another job is replacing it
        if lease is not None and json.loads((target / _SOURCE).read_text()) == _signature(folder):
            return lease
    return None


def _create_folder(owned: OwnedFolder, heartbeat: Path) -> None:
    """Create an empty folder to convert into.

    Raises:
        CheckpointError: the name of the converted folder is taken.
    """
    if os.path.lexists(owned.target) and not (owned.target / _SOURCE).is_file():
        raise CheckpointError(f"{owned.target} exists, and was not created by a load: remove or rename it.")
    owned.create()
    try:
        heartbeat.touch()
    except OSError:
        owned.remove()
        raise


def _wait_for_file(heartbeat: Path) -> None:
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while not heartbeat.is_file():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{heartbeat}, which the first rank has created, is not visible to rank {dist.get_rank()}: a "
                f"conversion requires a checkpoint folder that all nodes share."
            )
        time.sleep(_POLL_SECONDS)


def _convert(folder: Path, owned: OwnedFolder, heartbeat: Path) -> tuple[IO[str] | None, str]:
    """Run the converter, then signal its end to the other ranks.

    Returns:
        A lease of the converted folder; the error message, empty if there is none.

    Raises:
        CheckpointError: the end cannot be signaled. The other ranks time out, and this rank must not wait for them.
    """
    lease, problem = None, ""
    with _heartbeat(heartbeat):
        try:
            lease = _run_converter(folder, owned)
        except CheckpointError as error:
            problem = str(error)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    try:
        heartbeat.unlink()
    except OSError as error:
        raise CheckpointError(f"{folder} was not converted: {problem or error}") from error
    return lease, problem


def _run_converter(folder: Path, owned: OwnedFolder) -> IO[str]:
    """Convert a checkpoint, and publish the result unless another job has done so; return a lease of it.

    Raises:
        CheckpointError: the converter failed; the message has the end of its output.
    """
    signature = _signature(folder)
    packages = str(Path(__file__).parents[2])
    arguments = ["convert", "--input_folder", str(folder), "--output_folder", str(owned.staging)]
    if is_trusted():
        arguments.append("--trusted")
    done = subprocess.run(
        [sys.executable, "-c", _RUN, packages, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        command = " ".join(["python -m deepspeed_ext", *arguments])
        raise CheckpointError(f"{command} failed: {done.stdout[-_OUTPUT_CHARACTERS:].strip()}")
    (owned.staging / _SOURCE).write_text(json.dumps(signature))
    lease = create_marker(owned.staging, shared=True)  # before `publish`: other jobs remove unlocked conversions
    other_lease = _reuse_conversion(folder, owned.target)
    if other_lease is None:
        try:
            owned.publish()
        except OSError:  # another job has just done so
            other_lease = _reuse_conversion(folder, owned.target)
            if other_lease is None:
                raise
    return lease if other_lease is None else other_lease


@contextlib.contextmanager
def _heartbeat(heartbeat: Path) -> Iterator[None]:
    """Update the file's time within this context, to signal progress to the other ranks."""
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(_BEAT_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(heartbeat)

    thread = threading.Thread(target=beat, name="deepspeed_ext converting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _wait_for_conversion(folder: Path, heartbeat: Path) -> None:
    """Wait until the first rank has finished converting.

    Raises:
        CheckpointError: the first rank has died. Each other rank detects this alone; none may wait for that rank.
    """
    last_time, silent, pause = 0, 0.0, _POLL_SECONDS
    while True:
        new_time = last_time
        try:
            with heartbeat.open("rb") as file:  # opening it makes NFS fetch changes from other nodes
                new_time = os.fstat(file.fileno()).st_mtime_ns
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                return
        silent = silent + pause if new_time == last_time else 0.0
        if silent > _DEAD_SECONDS:
            raise CheckpointError(
                f"{folder} was not converted: the first rank, which converts it, has not updated {heartbeat} for "
                f"{_DEAD_SECONDS:g} s, so it has died or cannot write."
            )
        last_time = new_time
        time.sleep(pause)
        pause = min(pause * _POLL_GROWTH, _MAX_POLL_SECONDS)


def _raise_problem(problem: str, folder: Path, reason: str) -> None:
    if problem:
        raise CheckpointError(
            f"{folder} cannot be loaded without conversion ({reason.splitlines()[0]}), and its conversion failed: "
            f"{problem}"
        )


def _remove_older(target: Path) -> None:
    """Remove earlier conversions, unless they are in use."""
    for other in target.parent.glob(f"*{SUFFIX}"):
        if other != target and (other / _SOURCE).is_file():
            remove_if_abandoned(other)
