# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that is sharded otherwise than the run that loads it, converted where it is loaded.

Note [Converted checkpoints]
    With ``"checkpoint": {"load_universal": true}`` a run that lost a node, or has another strategy, goes on from its
    ordinary checkpoint D/T. One that fits is loaded as it is, which is bit for bit. Of another the first rank has
    DeepSpeed's ``ds_to_universal.py`` make D/T_converted, which all load. It appears complete, or it does not, and
    says of which files it was made: it is used again as long as these are the same. Only the newest one is kept.
    A universal checkpoint of the user's own making is loaded as DeepSpeed does.

    Converting takes minutes where a collective must not. So the other ranks look at the disk, not at the network.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from deepspeed import comm as dist

from deepspeed_ext.checkpoint.folder import CheckpointError, sync
from deepspeed_ext.comm.agreement import together, told

SUFFIX = "_converted"
_SOURCE = "converted_from.json"  # names, sizes and times of the files that were converted
_STAGING = ".converting"
_DONE = "done"
_LOOKS = 0.2  # seconds
_VISIBLE = 60.0  # seconds until what one node has written is seen by others, as NFS may take
_SHOWN = 2000  # characters of what the converter says


def is_universal(folder: Path) -> bool:
    """Whether a checkpoint has a folder for each parameter."""
    return (folder / "zero").is_dir()


def converted(load_dir: str, tag: str, why: str) -> str:
    """Return the tag of a universal checkpoint made of an ordinary one; see Note [Converted checkpoints].

    Collective over all ranks.

    Args:
        load_dir: on a file system that all ranks share.
        tag: of the ordinary checkpoint.
        why: it cannot be loaded as it is.

    Raises:
        CheckpointError: on all ranks, if it cannot be converted. Nothing is left of the attempt.
    """
    folder = Path(load_dir, tag)
    target = folder.with_name(folder.name + SUFFIX)
    staging = folder.with_name(f".{folder.name}{_STAGING}")
    first = dist.get_rank() == 0
    current = together(lambda: first and _is_current(folder, target), f"{folder} cannot be read", CheckpointError)
    if told(str(current), 0) != str(True):
        together(lambda: _begin(staging) if first else None, f"{staging} cannot be written", CheckpointError)
        dist.barrier()
        together(lambda: _find(staging), f"{staging} is not seen by all ranks", CheckpointError)
        problem = _convert(folder, target, staging) if first else _wait(staging)
        together(lambda: _raise(problem, folder, why), f"{folder} cannot be converted", CheckpointError)
        if first:
            _clear(target, staging)
    return os.path.relpath(target, load_dir)


def _signature(folder: Path) -> list[list[str | int]]:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _is_current(folder: Path, target: Path) -> bool:
    source = target / _SOURCE
    return source.is_file() and json.loads(source.read_text()) == _signature(folder)


def _begin(staging: Path) -> None:
    if staging.exists():  # of a conversion that was killed
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
    """Have DeepSpeed convert the checkpoint; return what has failed."""
    made, problem = staging / target.name, ""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    try:
        signature = _signature(folder)
        done = subprocess.run(
            [*command, "--input_folder", str(folder), "--output_folder", str(made)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            problem = f"{' '.join(command[1:])} has failed: {done.stdout[-_SHOWN:].strip()}"
        else:
            (made / _SOURCE).write_text(json.dumps(signature))
            sync(made)
            if target.exists():
                shutil.rmtree(target)
            made.rename(target)
            sync(target.parent)
    except OSError as error:
        problem = str(error)
    (staging / _DONE).write_text("")
    return problem


def _wait(staging: Path) -> str:
    while not (staging / _DONE).exists() and staging.exists():
        time.sleep(_LOOKS)
    return ""


def _raise(problem: str, folder: Path, why: str) -> None:
    if problem:
        shutil.rmtree(folder.with_name(f".{folder.name}{_STAGING}"), ignore_errors=True)
        raise CheckpointError(
            f"{folder} cannot be loaded as it is ({why.splitlines()[0]}), and it cannot be converted: {problem}"
        )


def _clear(target: Path, staging: Path) -> None:
    """Remove what was needed to convert, and what was converted before."""
    shutil.rmtree(staging, ignore_errors=True)
    for other in target.parent.glob(f"*{SUFFIX}"):
        if other != target and (other / _SOURCE).is_file():
            shutil.rmtree(other, ignore_errors=True)
