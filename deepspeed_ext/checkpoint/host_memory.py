# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""How much memory a process may still take, which files in a tmpfs take, too."""

import os
import sys
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
# By the controller in /proc/self/cgroup, empty for version 2: the folder, limit and use, and cache that can be freed.
_VERSIONS = {
    "": ("", "memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": (
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}


def available_memory() -> int:
    """Return bytes until the host, or a control group of this process, runs out of memory.

    That is the smallest of what the kernel calls available and, for each control group with a limit, the limit less
    what is in use apart from the cache of files on disks.
    """
    found = [sys.maxsize]
    with suppress(OSError, KeyError, ValueError):
        found.append(_table(_PROC / "meminfo")["MemAvailable:"] * 1024)
    with suppress(OSError):
        for line in (_PROC / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for version in set(controllers.split(",")) & set(_VERSIONS):
                found += _left_in(version, path)
    return max(0, min(found))


def _left_in(version: str, path: str) -> list[int]:
    """Return what is left in a control group and those around it, where there is a limit."""
    subfolder, limit, use, cache = _VERSIONS[version]
    inner = Path(os.path.normpath(path))  # in a container the outermost one may be all that is visible
    found = []
    for group in (inner, *inner.parents):
        folder = _CONTROL_GROUPS / subfolder / str(group).lstrip("/")
        with suppress(OSError, ValueError):  # there is no such file, or no limit ("max")
            most = int((folder / limit).read_text())
            statistics = _table(folder / "memory.stat")
            freed = sum(statistics.get(name, 0) for name in cache)
            found.append(most - max(0, int((folder / use).read_text()) - freed))
    return found


def _table(path: Path) -> dict[str, int]:
    """Return the first number of each line, by the word before it."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
