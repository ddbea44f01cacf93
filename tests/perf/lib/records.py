# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Append the results of benchmarks to CSV files, each with what it depends on."""

import csv
import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import deepspeed_ext

RESULTS = Path(__file__).resolve().parents[1] / "results"


def circumstances(commit: str = "") -> dict[str, Any]:
    """Return what a number depends on and does not say by itself.

    Args:
        commit: of a copy of the working tree that has no git.
    """
    ours, others = f"deepspeed_ext {deepspeed_ext.__version__}", ("deepspeed", "torch")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": "; ".join(
            [ours, *(f"{name} {metadata.version(name)}" for name in others), f"commit {commit or _commit()}"]
        ),
        "hardware": f"{os.cpu_count()} cores of {_processor()}",
        "command": command(sys.orig_argv),
    }


def command(words: Sequence[str]) -> str:
    """Return a command line without the options that name a file or a folder of this machine alone."""
    kept = list[str]()
    for word in words[1:]:
        if word.startswith("--") and os.path.isabs(word.partition("=")[2]):
            continue
        if os.path.isabs(word) and kept and kept[-1].startswith("--"):
            kept.pop()
        else:
            kept.append(word)
    return shlex.join(["python", *kept])


def append_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Append results, each with its circumstances; a new file gets a header.

    Raises:
        ValueError: the file has other columns.
    """
    rows = [circumstances() | row for row in rows]
    columns = list(rows[0])
    new = not path.exists() or not path.stat().st_size
    if not new:
        with path.open(newline="") as file:
            if next(csv.reader(file)) != columns:
                raise ValueError(f"{path} has other columns than {', '.join(columns)}: move it away.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if new:
            writer.writeheader()
        writer.writerows(rows)


def _commit() -> str:
    """Return the commit of the package that was measured; earlier rows of the same run do not count as changes."""
    root = Path(deepspeed_ext.__file__).parents[1]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!tests/perf/results")
        return git("describe", "--always") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _processor() -> str:
    """Return the kernel's name of it: ``platform`` knows the architecture only."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
