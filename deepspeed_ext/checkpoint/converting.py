# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Converts a checkpoint when it is loaded, if it is sharded otherwise than the run.

Note [Converted checkpoints]
    With ``"checkpoint": {"load_universal": true}``, a run that lost a node, or has another strategy, continues from
    its ordinary checkpoint D/T. A checkpoint that fits is loaded as it is, bit for bit. Otherwise the first rank runs
    ``python -m deepspeed_ext convert`` to make D/T_converted, and all ranks load that. The converted folder appears
    complete or not at all. It records the files that it was made from, and is used again as long as these are the
    same. Only the newest one is kept. A universal checkpoint that the user has made is loaded as DeepSpeed does.

    Converting may take minutes, longer than a collective may wait. So the other ranks watch the disk, not the network.
    While the first rank is at work, it keeps appending to a file; if the file stops growing, that rank has died, and
    the others raise. They look for growth and not at times, since the clocks of hosts differ. They count only the time
    in which they could look, since a file server may stall all of them.
"""

import contextlib
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from deepspeed import comm as dist
from deepspeed.utils import logger

from deepspeed_ext.checkpoint.folder import CheckpointError, put_in_place
from deepspeed_ext.comm.agreement import broadcast_text, run_on_all_or_raise

SUFFIX = "_converted"
STAGING = ".converting"  # at the end of the name of a hidden folder beside the converted one
_SOURCE = "converted_from.json"  # names, sizes and times of the files that were converted
_DONE = "done"
_AT_WORK = "at_work"  # grows by a byte in each second in which the first rank is at work
_BEAT = 1.0  # seconds between two bytes
_LOOKS = 0.2  # seconds between two looks of the other ranks
_SILENT = 60.0  # seconds without growth after which the first rank counts as dead
_VISIBLE = 60.0  # seconds until other nodes see what one has written; NFS may take so long
_SHOWN = 2000  # last characters of the converter's output that an error shows


def is_universal(folder: Path) -> bool:
    """Return whether a checkpoint is universal: whether it has a folder for each parameter."""
    return (folder / "zero").is_dir()


def converted(load_dir: str, tag: str, why: str) -> str:
    """Return the tag of a universal checkpoint made of an ordinary one; see Note [Converted checkpoints].

    Collective over all ranks.

    Args:
        load_dir: a folder on a file system that all ranks share.
        tag: of the ordinary checkpoint.
        why: why it cannot be loaded as it is.

    Raises:
        CheckpointError: on all ranks, if it cannot be converted; nothing is left of the attempt. If the first rank has
            died, on all other ranks.
    """
    folder = Path(load_dir, tag)
    target = folder.with_name(folder.name + SUFFIX)
    staging = folder.with_name(f".{folder.name}{STAGING}")
    first = dist.get_rank() == 0
    current = run_on_all_or_raise(
        lambda: first and _is_current(folder, target), f"{folder} cannot be read", CheckpointError
    )
    if broadcast_text(str(current), 0) != str(True):
        run_on_all_or_raise(lambda: begin(staging) if first else None, f"{staging} cannot be written", CheckpointError)
        dist.barrier()
        run_on_all_or_raise(lambda: _find(staging), f"{staging} is not seen by all ranks", CheckpointError)
        if first:
            logger.warning(
                f"deepspeed_ext: {folder} cannot be loaded as it is. It is converted into {target} first, which may "
                f"take minutes."
            )
        problem = _convert(folder, target, staging) if first else _wait(folder, staging)
        run_on_all_or_raise(lambda: _raise(problem, folder, why), f"{folder} cannot be converted", CheckpointError)
        if first:
            _clear(target, staging)
    return str(Path(tag).with_name(target.name))


def _signature(folder: Path) -> list[list[str | int]]:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _is_current(folder: Path, target: Path) -> bool:
    source = target / _SOURCE
    return source.is_file() and json.loads(source.read_text()) == _signature(folder)


def begin(staging: Path) -> None:
    """Make an empty folder to convert into."""
    if staging.exists():  # left by a conversion that was killed
        shutil.rmtree(staging)
    staging.mkdir()


def _find(staging: Path) -> None:
    ends = time.monotonic() + _VISIBLE
    while not staging.is_dir():
        if time.monotonic() > ends:
            raise CheckpointError(
                f"{staging}, which the first rank has made, is not there on rank {dist.get_rank()}: to be converted, "
                f"a checkpoint must be in a folder that all nodes share."
            )
        time.sleep(_LOOKS)


def _convert(folder: Path, target: Path, staging: Path) -> str:
    """Run the converter, and show the other ranks when it has ended. Return its problem; empty if none."""
    problem = ""
    with _at_work(staging):
        try:
            _run(folder, target, staging / target.name)
        except CheckpointError as error:
            problem = str(error)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    try:
        (staging / _DONE).write_text("")
    except OSError as error:  # a full disk, say; without its folder, the other ranks know that the work has ended
        problem = problem or f"{type(error).__name__}: {error}"
        shutil.rmtree(staging)
    return problem


def _run(folder: Path, target: Path, made: Path) -> None:
    """Convert ``folder`` into ``made``, and rename that to ``target``, replacing what was there.

    Raises:
        CheckpointError: the converter has failed; with the end of its output.
    """
    command = [sys.executable, "-m", "deepspeed_ext", "convert"]
    signature = _signature(folder)
    done = subprocess.run(
        [*command, "--input_folder", str(folder), "--output_folder", str(made)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        raise CheckpointError(f"{' '.join(command[1:])} has failed: {done.stdout[-_SHOWN:].strip()}")
    (made / _SOURCE).write_text(json.dumps(signature))
    put_in_place(made, target)


@contextlib.contextmanager
def _at_work(staging: Path) -> Iterator[None]:
    """Show the other ranks, within this context, that this one is at work."""
    over = threading.Event()

    def show() -> None:
        while not over.wait(_BEAT):
            with contextlib.suppress(OSError), (staging / _AT_WORK).open("ab") as file:
                file.write(b".")

    thread = threading.Thread(target=show, name="deepspeed_ext converting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _wait(folder: Path, staging: Path) -> str:
    """Wait until the first rank has ended its work. Returns no problem, since the first rank reports it.

    Raises:
        CheckpointError: the first rank has died. Every other rank finds this on its own; none may wait for that one.
    """
    seen, silent = b"", 0.0
    while not (staging / _DONE).exists() and staging.exists():
        if silent > _SILENT:
            raise CheckpointError(
                f"{folder} was not converted: for {_SILENT:g} s the first rank, which converts it, has not written to "
                f"{staging / _AT_WORK}, so it has died or cannot write."
            )
        time.sleep(_LOOKS)
        shown = b""
        with contextlib.suppress(OSError):
            shown = (staging / _AT_WORK).read_bytes()  # opening it makes NFS fetch what another node has written
        silent = silent + _LOOKS if shown == seen else 0.0
        seen = shown
    return ""


def _raise(problem: str, folder: Path, why: str) -> None:
    if problem:
        shutil.rmtree(folder.with_name(f".{folder.name}{STAGING}"), ignore_errors=True)
        raise CheckpointError(
            f"{folder} cannot be loaded as it is ({why.splitlines()[0]}), and it cannot be converted: {problem}"
        )


def _clear(target: Path, staging: Path) -> None:
    """Remove the staging folder, and earlier conversions."""
    shutil.rmtree(staging, ignore_errors=True)
    for other in target.parent.glob(f"*{SUFFIX}"):
        if other != target and (other / _SOURCE).is_file():
            shutil.rmtree(other, ignore_errors=True)
