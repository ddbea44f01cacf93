# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Makes a change in a copy of the repository, and runs there what may find it."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from scripts import ROOT
from tests.campaigns.mutants.changes import Mutant

_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", "*.egg-info")
_KERNELS = ("-c", "from deepspeed_ext.loco import ops; assert ops.load_kernels()")
TESTS = ("-m", "pytest", "-x", "-p", "no:cacheprovider", "-o", "addopts=-q --strict-markers", "--timeout=100")


class Outcome(NamedTuple):
    """What became of a change: "killed", "survived", "hangs", or "no code" if it does not compile."""

    kind: str
    by: str  # the test, or the problem
    seconds: float


@contextmanager
def copied(tree: Path = ROOT) -> Iterator[Path]:
    """A copy of a tree, without what is built or ignored, removed in the end."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        shutil.copytree(tree, copy, ignore=_LEFT_OUT, symlinks=True)
        yield copy


def tried(mutant: Mutant, copy: Path, commands: Sequence[Sequence[str]], limit: float) -> Outcome:
    """Make a change in a copy, run commands of Python there until one fails, and take the change back.

    Args:
        mutant: the change.
        copy: of the repository.
        commands: arguments of Python; what they print names what fails in lines with FAILED or ERROR.
        limit: seconds for each, after which it counts as a hang.
    """
    path = copy / mutant.path
    text = path.read_bytes()
    path.write_bytes(mutant.applied(text))
    begin = time.monotonic()
    try:
        if mutant.room == "csrc" and _run(copy, _KERNELS, 300.0)[0]:
            return Outcome("no code", "", time.monotonic() - begin)
        for command in commands:
            status, printed = _run(copy, command, limit)
            if status is None:
                return Outcome("hangs", "", time.monotonic() - begin)
            if status:
                return Outcome("killed", _told(printed), time.monotonic() - begin)
        return Outcome("survived", "", time.monotonic() - begin)
    finally:
        path.write_bytes(text)


def collected() -> frozenset[str]:
    """The tests of the first tier."""
    status, printed = _run(ROOT, [*TESTS, "-m", "not deep", "--collect-only"], 300.0)
    if status:
        raise RuntimeError("\n".join(printed[-20:]))
    return frozenset(line for line in printed if "::" in line)


def _run(copy: Path, command: Sequence[str], limit: float) -> tuple[int | None, list[str]]:
    """The exit status of Python, None if it was ended, and what it printed."""
    environment = os.environ | {"PYTHONPATH": str(copy), "TORCH_EXTENSIONS_DIR": str(copy / ".extensions")}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # a change within a second, of the same length, would not be seen
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", *command],
            cwd=copy,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = None
        output.seek(0)
        return status, output.read().splitlines()


def _told(printed: Sequence[str]) -> str:
    """What failed first: a test, or the line below the case of the fuzzer."""
    told = [at for at, line in enumerate(printed) if line.startswith(("FAILED", "ERROR"))]
    if not told:
        return "the session"
    first = printed[told[0]].split(" - ")[0]
    return first if "::" in first else printed[min(told[0] + 1, len(printed) - 1)].strip()[:100]
