# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Changes of C++ code, by patterns: an operator or a constant is another, or a call is dropped."""

import re
from collections.abc import Iterator
from pathlib import Path

from scripts import ROOT
from tests.campaigns.mutants.mutant import Mutant

# Spaces tell operators from the brackets of templates: the sources are formatted so.
_SWAPPED = {" < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ", " != ": " == "}
_SWAPPED |= {" + ": " - ", " - ": " + ", " * ": " + ", " / ": " * ", " % ": " / ", " && ": " || ", " || ": " && "}
_SWAPPED |= {" << ": " >> ", " >> ": " << ", " & ": " | ", " | ": " & ", " ^ ": " & "}
_OPERATOR = re.compile("|".join(re.escape(old) for old in sorted(_SWAPPED, key=len, reverse=True)))
_INTEGER = re.compile(r"(?<![\w.])\d+(?=u?\b)(?![\w.]*[.x])")
_CALL = re.compile(r"^ +([a-z][\w:<>]*\(.*\);)$")
_LEFT_OUT = re.compile(r"^\s*(#|//|template|static_assert|using|return \w+;$)|TORCH_LIBRARY|STD_TORCH_CHECK")


def changes(path: Path) -> Iterator[Mutant]:
    """The changes of a file that can be made within its functions.

    Args:
        path: in the repository.
    """
    start = 0
    for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(keepends=True), 1):
        code = line.partition("//")[0].rstrip()
        if code.startswith("  ") and not _LEFT_OUT.search(code):
            for first, last, new in _of_line(code):
                yield Mutant(path, number, start + first, start + last, new)
        start += len(line.encode())


def _of_line(code: str) -> Iterator[tuple[int, int, str]]:
    """First and last character of what is replaced, and by what."""
    for found in _OPERATOR.finditer(code):
        yield found.start(), found.end(), _SWAPPED[found[0]]
    for found in _INTEGER.finditer(code):
        yield found.start(), found.end(), str(int(found[0]) + 1)
    if found := _CALL.match(code):
        yield found.start(1), found.end(1), ";"
