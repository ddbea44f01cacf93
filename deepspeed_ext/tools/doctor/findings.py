# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What a check has found, and how ranks are named in it. Pure."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

_Value = TypeVar("_Value", bound=Hashable)


class Level(IntEnum):
    """How bad it is; a greater value is worse."""

    OK = 0
    LOOK = 1  # it works, and is slower or other than one may think
    WRONG = 2  # training fails by it, or is much slower than it has to be

    @property
    def word(self) -> str:
        """Return what is printed."""
        return self.name.lower()


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Attributes:
        subject: what was looked at.
        level: how bad it is.
        found: what was found.
        advice: what to do; empty if nothing.
        details: further lines, such as a plot.
    """

    subject: str
    level: Level
    found: str
    advice: str = ""
    details: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "subject": self.subject,
            "level": self.level.word,
            "found": self.found,
            "advice": self.advice,
            "details": list(self.details),
        }


@dataclass(frozen=True)
class Section:
    """The findings of one check.

    Attributes:
        title: name of the check.
        findings: in order.
        measured: what each rank answered, by rank, as plain values.
    """

    title: str
    findings: tuple[Finding, ...]
    measured: Mapping[int, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "title": self.title,
            "findings": [finding.as_dict() for finding in self.findings],
            "measured": {str(rank): answer for rank, answer in self.measured.items()},
        }


def worst(sections: Iterable[Section]) -> Level:
    """Return the worst level of all findings."""
    return max((finding.level for section in sections for finding in section.findings), default=Level.OK)


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as ``rank 3`` or ``ranks 0-3, 8``."""
    ordered = sorted(ranks)
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    shown = ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
    return f"rank {shown}" if len(ordered) == 1 else f"ranks {shown}"


def by_value(values: Mapping[int, _Value]) -> dict[_Value, list[int]]:
    """Return the ranks that have each value; the most frequent value first."""
    found: dict[_Value, list[int]] = {}
    for rank, value in sorted(values.items()):
        found.setdefault(value, []).append(rank)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def bytes_text(nbytes: float) -> str:
    """Return bytes as ``64 KiB``, ``1.5 GiB`` and the like."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB"


def rate_text(rate: float) -> str:
    """Return bytes per second as ``11.9 MB/s``; units of 10^3, as networks have them."""
    for unit in ("B/s", "KB/s", "MB/s"):
        if rate < 999.5:
            return f"{rate:.3g} {unit}"
        rate /= 1000
    return f"{rate:.3g} GB/s"
