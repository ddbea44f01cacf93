# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A change of one file, in one place."""

from pathlib import Path
from typing import NamedTuple

from scripts import ROOT


class Mutant(NamedTuple):
    """A change of one file."""

    path: Path  # in the repository
    line: int
    start: int  # in the file's bytes
    end: int
    new: str

    def applied(self, text: bytes) -> bytes:
        """Return the changed file."""
        return text[: self.start] + self.new.encode() + text[self.end :]

    def __str__(self) -> str:
        lines = [text.splitlines()[self.line - 1].strip() for text in self._texts()]
        return f"{self.path}:{self.line}: {lines[0].decode()}  ->  {lines[1].decode()}"

    def _texts(self) -> tuple[bytes, bytes]:
        text = (ROOT / self.path).read_bytes()
        return text, self.applied(text)

    @property
    def room(self) -> str:
        """See ``room_of``."""
        return room_of(self.path)


def room_of(path: Path) -> str:
    """The folder or the file of the package that a file is in; csrc is one."""
    return path.parts[0] if path.parts[0] == "csrc" else path.parts[1]
