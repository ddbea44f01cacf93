# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What git says is different, and where a line of one version was in another."""

import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from scripts import ROOT

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", re.MULTILINE)


class Hunk(NamedTuple):
    """Lines that another version has in place of others; if there are none, the start is the line after them."""

    start: int
    count: int
    new_start: int
    new_count: int

    def lines(self) -> set[int]:
        """Return the lines of the old version that differ; of an insertion, its neighbors."""
        if self.count == 0:
            return {self.start - 1, self.start} - {0}
        return set(range(self.start, self.start + self.count))


def parsed(diff: str) -> list[Hunk]:
    """Return the hunks of a diff of one file without context (``git diff -U0``)."""
    found = []
    for match in _HUNK.finditer(diff):
        start, count, new_start, new_count = (1 if group is None else int(group) for group in match.groups())
        # Where there are no lines, git names the line before.
        found.append(Hunk(start + (count == 0), count, new_start + (new_count == 0), new_count))
    return found


def lines_before(lines: Iterable[int], hunks: Sequence[Hunk]) -> set[int]:
    """Return where lines of the new version were in the old one; of a line that is new, the lines of its hunk."""
    return {before for line in lines for before in _before(line, hunks)}


def _before(line: int, hunks: Sequence[Hunk]) -> set[int]:
    shift = 0
    for hunk in hunks:
        if line < hunk.new_start:
            break
        if line < hunk.new_start + hunk.new_count:
            return hunk.lines()
        shift = hunk.start + hunk.count - hunk.new_start - hunk.new_count
    return {line + shift}


def git(*arguments: str, root: Path = ROOT, index: Path | None = None) -> str:
    """Return what git prints."""
    environment = os.environ | ({"GIT_INDEX_FILE": str(index)} if index else {})
    done = subprocess.run(["git", *arguments], cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def tree_of_files(index: Path, root: Path = ROOT) -> str:
    """Return git's name of the files as they are now, uncommitted ones included; ``index`` is a scratch file."""
    git("read-tree", "HEAD", root=root, index=index)
    git("add", "--all", root=root, index=index)
    return git("write-tree", root=root, index=index).strip()


def hunks(old: str, new: str, path: str, root: Path = ROOT) -> list[Hunk]:
    """Return how a file of one tree differs from that of another."""
    return parsed(git("diff", "-U0", "--no-color", "--no-ext-diff", "--no-renames", old, new, "--", path, root=root))
