# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Builds the kernels of ``csrc`` with DeepSpeed's op builder, at first use or ahead of time with DS_BUILD_LOCO=1.

Note [Two locks]
    Torch creates a file named ``lock`` in the build folder, and all other processes wait until it is removed. The file
    does not identify its creator. If a build is killed, its file stays, and later builds wait forever. So we take an
    flock, too, which the kernel releases when its holder dies:

    - Exclusive, for the first process, which builds. If torch's lock exists now, its holder is dead, so we remove it.
    - Shared, for the others, once the first has finished. Then all of them load its build, at the same time.

    Newer releases of torch (2.15, but not 2.13) take an flock on their file as well, and keep the file after a build.
    There, its existence blocks no process.

    Some network file systems apply an flock to one machine only. So holders write the machine's boot id to our file.
    We remove torch's lock only if all holders ran under this kernel (or the others are more than a day old). Otherwise
    we wait for it, with a warning. One case is not handled: a compiler that briefly outlives its killed parent.
"""

import fcntl
import importlib
import importlib.util
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch
from deepspeed.ops.op_builder.builder import CUDAOpBuilder
from deepspeed.utils import logger

# The stable ABI of the oldest torch that we support, so that a build with a newer torch runs with all releases since.
_STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"
# Bits must not depend on the compiler, so each operation is rounded once.
_EXACT = ("-ffp-contract=off", "-Wno-psabi")
_POLL_SECONDS = 0.1
_UNKNOWN_SECONDS = 10.0  # until a warning about a holder that may be dead
_ALIVE_SECONDS = 60.0  # until a warning about a holder that builds: kernels for a GPU take about as long
_SEVERAL_MACHINES = "several machines"
_EXPIRY_SECONDS = 24 * 3600.0  # age from which another machine's note is ignored


class LocoBuilder(CUDAOpBuilder):
    """Builds LoCo's kernels for the CPU, and for CUDA if torch has it."""

    BUILD_VAR = "DS_BUILD_LOCO"
    NAME = "loco"

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=self.NAME if name is None else name)

    def absolute_name(self) -> str:
        """Return the name of the module that is built ahead of time."""
        return "deepspeed_ext.loco._kernels"

    def sources(self) -> list[str]:
        """Return the source files."""
        names = ["loco_cpu.cpp", "lossless_cpu.cpp"]
        if not self.build_for_cpu:
            names += ["loco_cuda.cu", "difference_cuda.cu", "lossless_cuda.cu", "sum_cuda.cu"]
        return [str(source_folder() / name) for name in names]

    def include_paths(self) -> list[str]:
        """Return the folders of headers."""
        return [str(source_folder())]

    def cxx_args(self) -> list[str]:
        """Return DeepSpeed's compiler flags, with torch's stable ABI and exact arithmetic.

        Debug symbols are left out, since they take a quarter of the compile time.
        """
        cuda = [] if self.build_for_cpu else ["-DUSE_CUDA"]
        return [*(arg for arg in super().cxx_args() if arg != "-g"), _STABLE_ABI, *_EXACT, *cuda]

    def nvcc_args(self) -> list[str]:
        """Return DeepSpeed's nvcc flags, with exact arithmetic."""
        args = [arg for arg in super().nvcc_args() if arg != "--use_fast_math"]
        return [*args, "-fmad=false", "-DUSE_CUDA", _STABLE_ABI] if args else args

    def builder(self) -> Any:
        """Return the extension for a ``setup.py``, with relative paths of sources, as setuptools requires.

        Raises:
            RuntimeError: torch is for ROCm.
        """
        if torch.version.hip is not None:
            raise RuntimeError(
                "LoCo has no kernels for ROCm; its operators run in plain PyTorch. Install without DS_BUILD_LOCO."
            )
        extension = super().builder()
        extension.sources = [os.path.relpath(source) for source in extension.sources]
        return extension

    def is_built(self) -> bool:
        """Return whether the kernels were built ahead of time."""
        return importlib.util.find_spec(self.absolute_name()) is not None

    def load(self, verbose: bool = True) -> Any:
        """Import the kernels if they were built ahead of time; otherwise build them now."""
        if self.is_built():
            return importlib.import_module(self.absolute_name())
        from torch.utils.cpp_extension import _get_build_directory  # the folder of ``jit_load``

        folder = Path(_get_build_directory(self.name, verbose=False))
        with build_once(folder, "the kernels of LoCo"):
            if not (folder / f"{self.name}.so").exists():  # else it is loaded, and compiled only if sources are newer
                logger.warning(
                    f"deepspeed_ext: compiling the kernels of LoCo in {folder}, which takes a minute or two, once"
                )
            return self.jit_load(verbose)


def source_folder() -> Path:
    """Return ``csrc/loco``, which is next to the package in a clone, and inside an installed package."""
    package = Path(__file__).resolve().parent
    installed = package / "csrc" / "loco"
    return installed if installed.is_dir() else package.parent / "csrc" / "loco"


# One build at a time ##############################################################################


@contextmanager
def build_once(folder: Path, name: str) -> Iterator[None]:
    """Allow only one process at a time to build in a folder; see Note [Two locks].

    Args:
        folder: torch's build folder.
        name: name of the extension, for messages.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch_lock, start, warned = folder / "lock", time.monotonic(), False
    with (folder / "holders").open("a+") as holders:
        kind = fcntl.LOCK_EX
        while waits_for := _obstacle(torch_lock, holders, kind, name):
            reason, patience = waits_for
            if not warned and time.monotonic() - start > patience:
                logger.warning(f"deepspeed_ext: waiting {reason}")
                warned = True
            time.sleep(_POLL_SECONDS)
            kind = fcntl.LOCK_SH  # by now, another process has built, or died
        yield


def _obstacle(torch_lock: Path, holders: TextIO, kind: int, name: str) -> tuple[str, float] | None:
    """Try to take our lock; return None if that succeeds and nothing else blocks.

    Otherwise return (reason for waiting, seconds until a warning with it).
    """
    try:
        exclusive = kind == fcntl.LOCK_EX and _try_lock(holders, fcntl.LOCK_EX)
        if not exclusive and not _try_lock(holders, fcntl.LOCK_SH):
            return f"for another process, which builds {name} and holds {holders.name}.", _ALIVE_SECONDS
        if (age := _blocked_since(torch_lock)) is None:
            _write_note(holders, exclusive)
            return None
        exclusive = exclusive or _try_lock(holders, fcntl.LOCK_EX)
        if exclusive and _read_note(holders) == _boot_id() != "":
            torch_lock.unlink(missing_ok=True)
            logger.warning(
                f"deepspeed_ext: removed {torch_lock}, {age:.0f} s old: the process that built {name} there has died."
            )
            return None
        fcntl.flock(holders, fcntl.LOCK_UN)
    except OSError:  # the file system has no flock
        if (age := _blocked_since(torch_lock)) is None:
            return None
    return (
        f"for {torch_lock}, {age:.0f} s old, the lock file of a process that builds {name} or was killed during its "
        f"build. If no process on any machine builds there, remove the file.",
        _UNKNOWN_SECONDS,
    )


def _try_lock(holders: TextIO, kind: int) -> bool:
    try:
        fcntl.flock(holders, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _blocked_since(torch_lock: Path) -> float | None:
    """Return the age of torch's lock file in seconds; None if there is none, or if it blocks no process."""
    from torch.utils import cpp_extension

    if not hasattr(cpp_extension, "FileBaton"):  # only FileBaton's file blocks by existing
        return None
    try:
        return max(0.0, time.time() - torch_lock.stat().st_mtime)
    except FileNotFoundError:
        return None


def _read_note(holders: TextIO) -> str:
    holders.seek(0)
    return holders.read()


def _write_note(holders: TextIO, exclusive: bool) -> None:
    """Record that a process of this machine is about to build or load."""
    machine, noted = _boot_id(), _read_note(holders)
    expired = not noted or time.time() - os.fstat(holders.fileno()).st_mtime > _EXPIRY_SECONDS
    if noted != machine and not (exclusive and expired):
        machine = _SEVERAL_MACHINES
    if noted != machine:
        holders.truncate(0)
        holders.write(machine)  # the file is open for appending; it is empty now
        holders.flush()


def _boot_id() -> str:
    """Return an id of this boot of this machine, the same in all of its containers; empty without Linux."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
