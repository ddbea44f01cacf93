# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What was found of a DeepSpeed beside the one that we know, and how it is printed."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from deepspeed_ext.integration.patches import DEEPSPEED_VERSIONS
from scripts.fork.deepspeed_source import requirement


@dataclass(frozen=True)
class Difference:
    """A difference in something that we use.

    Attributes:
        symbol: the dotted name; for an import that fails, the error.
        what: missing, arguments, kind, value, new or import.
        expected: what we know.
        found: what is there.
        breaks: modules of ours.
        why: the feature that needs it, a clause.
        matters: whether something breaks; otherwise, what we call still takes what it is given.
    """

    symbol: str
    what: str
    expected: str
    found: str
    breaks: tuple[str, ...]
    why: str
    matters: bool = True


@dataclass(frozen=True)
class Report:
    """What was found of one DeepSpeed: ``label`` says which; ``used`` counts what was compared."""

    label: str
    used: int
    differences: tuple[Difference, ...]
    notes: tuple[str, ...] = ()

    @property
    def breaking(self) -> int:
        """The number of differences that matter."""
        return sum(one.matters for one in self.differences)


def _head(one: Report) -> str:
    rest = len(one.differences) - one.breaking
    more = f", {rest} break nothing" if rest else ""
    return f"{one.label}: {one.breaking} differences break something{more}; {one.used} symbols are used"


def _places(difference: Difference, most: int = 3) -> str:
    shown = ", ".join(place.removeprefix("deepspeed_ext.") for place in difference.breaks[:most])
    left = len(difference.breaks) - most
    return shown + (f" and {left} more" if left > 0 else "")


def as_text(reports: Iterable[Report]) -> str:
    """Return the reports for people."""
    lines = []
    for one in reports:
        lines.append(_head(one))
        lines += [f"  note: {note}" for note in one.notes]
        for each in one.differences:
            lines.append(f"  {each.what:<9} {each.symbol}")
            if each.expected:
                lines += [f"            known: {each.expected}", f"            there: {each.found}"]
            lines.append(f"            {'breaks' if each.matters else 'fits'} {_places(each)}: {each.why}")
    return "\n".join(lines)


def as_markdown(reports: Iterable[Report]) -> str:
    """Return the reports as a page: a heading and a table each."""
    lines = []
    for one in reports:
        lines += [f"## {one.label}", "", _head(one).partition(": ")[2] + ".", ""]
        lines += [f"- {note}" for note in one.notes]
        if one.differences:
            lines += ["| What | Symbol | Known | There | Breaks | For |", "|---|---|---|---|---|---|"]
        for each in one.differences:
            breaks = _places(each) if each.matters else "nothing"
            cells = each.what, f"`{each.symbol}`", each.expected, each.found, breaks, each.why
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip()


def as_json(reports: Iterable[Report]) -> str:
    """Return the reports for programs."""
    found = [asdict(one) | {"breaking": one.breaking} for one in reports]
    return json.dumps({"base": requirement().version, "supported": DEEPSPEED_VERSIONS, "reports": found}, indent=2)
