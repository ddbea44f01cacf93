# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Bars of progress: on a terminal, by the first rank, and nowhere else."""

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from scripts import ROOT

pytestmark = pytest.mark.quick

PROGRAM = """
from deepspeed_ext.progress import bar, followed
print(sum(followed([1, 2, 3], "adding", "number")))
with bar(2, "waiting", "turn") as shown:
    shown.update()
    shown.update()
"""


def run(stderr: int, rank: str | None = None) -> subprocess.CompletedProcess[bytes]:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {"PYTHONPATH": str(ROOT)}
    environment |= {} if rank is None else {"RANK": rank}
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, check=True, timeout=120)


def on_a_terminal(rank: str | None) -> str:
    """Return what a program writes to its stderr, if that is a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))  # a bar needs room
    try:
        assert run(theirs, rank).stdout == b"6\n"
    finally:
        os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # Linux's end of a terminal that nobody writes to any more
        while chunk := os.read(ours, 65536):
            shown += chunk
    os.close(ours)
    return shown.decode()


def test_a_log_gets_none() -> None:
    done = run(subprocess.PIPE)
    assert done.stdout == b"6\n" and b"adding" not in done.stderr and b"it/s" not in done.stderr


@pytest.mark.parametrize("rank", [None, "0"])
def test_a_terminal_shows_counts(rank: str | None) -> None:
    shown = on_a_terminal(rank)
    assert "adding: 100%" in shown and "3/3" in shown and "waiting: 100%" in shown and "2/2" in shown


def test_other_ranks_show_none() -> None:
    assert "adding" not in on_a_terminal("1")


def test_the_package_has_no_bar_elsewhere() -> None:
    """One place decides where bars are shown."""
    files = (ROOT / "deepspeed_ext").rglob("*.py")
    assert [path for path in files if "import tqdm" in path.read_text()] == [Path(ROOT, "deepspeed_ext/progress.py")]
