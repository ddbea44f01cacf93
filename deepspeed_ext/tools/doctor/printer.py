# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""How a report is shown: a line for each finding, in columns. Pure."""

import textwrap
from collections.abc import Sequence

from deepspeed_ext.tools.doctor.findings import Finding, Level, Section, worst

WIDTH = 110
_WORD = 7  # columns of "wrong" and what is beside it
_COLORS = {Level.OK: "32", Level.LOOK: "33", Level.WRONG: "31"}  # green, yellow, red
_BAR = 30


def text(sections: Sequence[Section], color: bool = False, width: int = WIDTH) -> str:
    """Return the report.

    Args:
        sections: what was found.
        color: whether the reader is a terminal.
        width: columns of a line.
    """
    most = max((len(finding.subject) for section in sections for finding in section.findings), default=0)
    lines: list[str] = []
    for section in sections:
        lines += ["", section.title]
        for finding in section.findings:
            lines += _lines(finding, most, color, width)
    counts = [
        f"{sum(finding.level == level for section in sections for finding in section.findings)} {level.word}"
        for level in Level
    ]
    lines += ["", f"{_painted(worst(sections), color).strip()}: {', '.join(counts)}"]
    return "\n".join(lines[1:])


def bar(value: float, most: float) -> str:
    """Return a bar of ``value`` where the longest one shows ``most``; padded."""
    return ("#" * max(1, round(_BAR * value / most))).ljust(_BAR)


def _lines(finding: Finding, most: int, color: bool, width: int) -> list[str]:
    indent = 2 + _WORD + most + 2
    first, *rest = textwrap.wrap(finding.found, width - indent, break_on_hyphens=False) or [""]
    lines = [f"  {_painted(finding.level, color)}{finding.subject.ljust(most)}  {first}".rstrip()]
    lines += [" " * indent + line for line in (*rest, *finding.details)]
    advice = textwrap.wrap(finding.advice, width - indent - 3, break_on_hyphens=False)
    return lines + [f"{' ' * indent}{'-> ' if not i else '   '}{line}" for i, line in enumerate(advice)]


def _painted(level: Level, color: bool) -> str:
    word = level.word.ljust(_WORD)
    return f"\033[{_COLORS[level]}m{word}\033[0m" if color else word
