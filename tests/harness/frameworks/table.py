# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""How a run under a framework is compared with stock DeepSpeed's, and the table of what was found (README.md).

This module imports neither torch nor a framework: it serves the process that runs pytest, too.
"""

import datetime
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import NamedTuple

import pytest

TABLE = Path(__file__).parents[2] / "unit" / "frameworks" / "README.md"
_HEAD = """\
# Frameworks that run on the strategies

Each row is a test of this folder: a framework trains a tiny model with stock DeepSpeed and with strategies, on 4 gloo
ranks in groups of 2. Differences are the largest of all strategies and ranks, relative to the largest loss and the
largest weight; "resume" says whether a resumed run ended with the bits of the uninterrupted one.
`python -m pytest tests/unit/frameworks -m "" --write-table` writes this file where all tests pass.
[Versions](../../versions.md) says which older ones the tests run with, and what needs more than these.

| framework | version | last passed | what ran | strategies | losses | weights | resume |
|---|---|---|---|---|---|---|---|
"""


class Row(NamedTuple):
    """How far a run under a framework is from stock DeepSpeed's under the same framework."""

    strategy: str  # that ran
    losses: float  # largest difference, relative to stock's largest loss
    weights: float  # relative to stock's largest weight
    moved: float  # how far stock training moved the weights, relative as well
    replicas_equal: bool
    resumed: bool | None = None  # whether a resumed run ended with the same bits; None if there was none


class _Entry(NamedTuple):
    """A row of the table, before it is written."""

    strategies: list[str]
    losses: float
    weights: float
    resumed: bool | None  # None, or true


_entries: dict[tuple[str, str], _Entry] = {}
writing = False  # whether this session writes the table


def needs(*names: str) -> pytest.MarkDecorator:
    """Skip the tests of a module where one of these packages is not installed. None is imported."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed")


def check(
    rows: list[Row],
    strategy: str,
    framework: str,
    what: str,
    losses: float = 1e-6,
    weights: float = 1e-5,
    resumed: bool | None = None,
) -> None:
    """Check that all ranks ran the strategy and ended where stock did, and note it for the table.

    The bounds are far above fp32 rounding, and far below what an error in any gradient makes.
    """
    for row in rows:
        assert row.strategy == strategy and row.resumed is resumed, row
        assert row.moved > 0.02, row
        assert row.losses <= losses and row.weights <= weights, row
        assert row.replicas_equal, row
        note(framework, what, strategy, row.losses, row.weights, resumed)


def note(framework: str, what: str, strategy: str, losses: float, weights: float, resumed: bool | None = None) -> None:
    """Note for the table what a strategy's run has shown.

    Raises:
        AssertionError: the table that is there has no such row, and is not to be written.
    """
    if not writing:
        assert (framework, what) in rows(), f"{TABLE} has no row {framework}, {what}: run with --write-table"
    before = _entries.get((framework, what), _Entry([], 0.0, 0.0, resumed))
    names = list(dict.fromkeys([*before.strategies, strategy]))
    _entries[framework, what] = _Entry(names, max(before.losses, losses), max(before.weights, weights), resumed)


def rows() -> dict[tuple[str, str], str]:
    """What the table says: the version by framework and what ran."""
    cells = [line.strip("| ").split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| ")][1:]
    return {(framework, what): version for framework, version, _, what, *_ in cells}


def write() -> None:
    """Write the table of what has passed in this session; other rows stay as they are."""
    today = datetime.date.today().isoformat()
    lines = {}
    if TABLE.exists():
        kept = [line for line in TABLE.read_text().splitlines(keepends=True) if line.startswith("| ")][1:]
        lines = dict(zip(rows(), kept, strict=True))
    for (framework, what), entry in _entries.items():
        names = ", ".join(entry.strategies)
        resume = "" if entry.resumed is None else "exact"
        cells = (framework, importlib.metadata.version(framework), today, what, names)
        line = f"| {' | '.join(cells)} | {entry.losses:.1g} | {entry.weights:.1g} | {resume} |\n"
        lines[framework, what] = line
    TABLE.write_text(_HEAD + "".join(line for _, line in sorted(lines.items())))
