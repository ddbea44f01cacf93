# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Findings of the checks, and the text of a report. Pure."""

import textwrap
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from itertools import groupby
from typing import Any, TypeVar

_Value = TypeVar("_Value", bound=Hashable)

WIDTH = 110
_WORD = 7  # columns of the level's word and the space after it
_BAR = 30


class Level(IntEnum):
    """Severity of a finding; a greater value is worse."""

    OK = 0
    LOOK = 1  # it works, but is slower than necessary, or behaves unexpectedly
    WRONG = 2  # training fails, or is much slower than necessary

    @property
    def word(self) -> str:
        """Return the word in the report."""
        return self.name.lower()


@dataclass(frozen=True)
class Finding:
    """A line of the report: subject, level, observation, advice, and further lines such as a plot."""

    subject: str
    level: Level
    found: str
    advice: str = ""
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """The findings of one check, in the order of the report, and the answer of each rank as plain values."""

    title: str
    findings: tuple[Finding, ...]
    measured: Mapping[int, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        findings = [asdict(finding) | {"level": finding.level.word} for finding in self.findings]
        return {"title": self.title, "findings": findings, "measured": {str(k): v for k, v in self.measured.items()}}


def finding_for(subject: str, problem: str, advice: str, ok_text: str, level: Level = Level.LOOK) -> Finding:
    """Return a finding of this level if there is a problem; otherwise an OK finding with the text ``ok_text``."""
    return Finding(subject, level, problem, advice) if problem else Finding(subject, Level.OK, ok_text)


def worst_level(sections: Iterable[Section]) -> Level:
    """Return the worst level of all findings."""
    return max((finding.level for section in sections for finding in section.findings), default=Level.OK)


def report_text(sections: Sequence[Section], color: bool = False, width: int = WIDTH) -> str:
    """Return the report, ``width`` columns wide; with colored levels for a terminal."""
    levels = [finding.level for section in sections for finding in section.findings]
    columns = max((len(finding.subject) for section in sections for finding in section.findings), default=0)
    lines: list[str] = []
    for section in sections:
        lines.append(section.title)
        lines += [line for finding in section.findings for line in _lines(finding, columns, color, width)] + [""]
    counts = ", ".join(f"{levels.count(level)} {level.word}" for level in Level)
    return "\n".join([*lines, f"{_level_text(worst_level(sections), color).strip()}: {counts}"])


def _lines(finding: Finding, columns: int, color: bool, width: int) -> list[str]:
    indent = " " * (2 + _WORD + columns + 2)

    def wrapped(text: str, first: str = "", rest: str = "") -> list[str]:
        first, rest = indent + first, indent + rest
        return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)

    head = f"  {_level_text(finding.level, color)}{finding.subject.ljust(columns)}  "
    first, *rest = wrapped(finding.found) or [indent]
    details = [indent + line for line in finding.details]
    return [(head + first[len(indent) :]).rstrip(), *rest, *details, *wrapped(finding.advice, "-> ", "   ")]


def _level_text(level: Level, color: bool) -> str:
    word, code = level.word.ljust(_WORD), (32, 33, 31)[level]  # green, yellow, red
    return f"\033[{code}m{word}\033[0m" if color else word


def bar(value: float, largest: float) -> str:
    """Return a padded bar of ``value``; the bar of ``largest`` fills the column."""
    return ("#" * max(1, round(_BAR * value / largest))).ljust(_BAR)


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as ``rank 3`` or ``ranks 0-3, 8``."""
    ordered = sorted(ranks)
    # In a run of consecutive ranks, rank minus position is constant.
    spans = [[rank for _, rank in span] for _, span in groupby(enumerate(ordered), lambda item: item[1] - item[0])]
    spans_text = ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
    return f"rank {spans_text}" if len(ordered) == 1 else f"ranks {spans_text}"


def by_value(values: Mapping[int, _Value]) -> dict[_Value, list[int]]:
    """Return the ranks that have each value; the most frequent value first."""
    ranks: dict[_Value, list[int]] = {}
    for rank, value in sorted(values.items()):
        ranks.setdefault(value, []).append(rank)
    return dict(sorted(ranks.items(), key=lambda item: -len(item[1])))


def bytes_text(nbytes: float) -> str:
    """Return bytes as ``64 KiB``, ``1.5 GiB`` and the like."""
    return _with_unit(nbytes, 1024, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def rate_text(rate: float) -> str:
    """Return bytes per second as ``11.9 MB/s``, in the powers of 1000 that networks use."""
    return _with_unit(rate, 1000, 999.5, ("B/s", "KB/s", "MB/s", "GB/s"))


def _with_unit(number: float, base: int, limit: float, units: Sequence[str]) -> str:
    while number >= limit and len(units) > 1:
        number, units = number / base, units[1:]
    return f"{number:.3g} {units[0]}"
