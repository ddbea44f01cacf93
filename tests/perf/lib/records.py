# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Rows of all results: written with the circumstances that they depend on, read again, and compared."""

import csv
import datetime
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import deepspeed_ext
from deepspeed_ext.tools.compare.verdict import Ratio, ratio
from tests.perf.lib.settings import UNLIMITED, rate_name

RESULTS = Path(__file__).resolve().parents[1] / "results"
STATES = ("parameter", "gradient", "optimizer")
Table = tuple[list[str], list[list[str]]]  # header, lines


def circumstances() -> dict[str, Any]:
    versions = [f"{name} {metadata.version(name)}" for name in ("deepspeed", "torch")]
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": "; ".join([f"deepspeed_ext {deepspeed_ext.__version__}", *versions, f"commit {_commit()}"]),
        "hardware": f"{os.cpu_count()} cores of {_processor()}",
        "command": command(sys.orig_argv),
    }


def command(words: Sequence[str]) -> str:
    """Return the command line without options that name a file or folder of this machine."""
    portable = list[str]()
    for word in words[1:]:
        if word.startswith("--") and os.path.isabs(word.partition("=")[2]):
            continue
        if os.path.isabs(word) and portable and portable[-1].startswith("--"):
            portable.pop()
        else:
            portable.append(word)
    return shlex.join(["python", *portable])


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file; none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def append_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Append results, each with its circumstances. Earlier rows of the file get columns that they lack."""
    added = [circumstances() | row for row in rows]
    before = read_rows(path)
    columns = list(dict.fromkeys(name for row in [*before[:1], *added] for name in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    same_columns = bool(before) and columns == list(before[0])
    with path.open("a" if same_columns else "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        if not same_columns:
            writer.writeheader()
            writer.writerows(before)
        writer.writerows(added)


def _commit() -> str:
    """Return the commit of the measured package; earlier rows of the same run do not count as changes."""
    git = ["git", "-C", str(Path(deepspeed_ext.__file__).parents[1])]
    changes = ["status", "--porcelain", "--untracked-files=no", "--", ".", ":!tests/perf/results"]
    try:
        commit, changed = (
            subprocess.run([*git, *words], capture_output=True, text=True, check=True).stdout.strip()
            for words in (["describe", "--always"], changes)
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("-dirty" if changed else "")


def _processor() -> str:
    """Return the kernel's name of the processor: ``platform`` has the architecture only."""
    info = Path("/proc/cpuinfo")
    name = re.search(r"^model name\s*:\s*(.*\S)", info.read_text() if info.exists() else "", re.MULTILINE)
    return name[1] if name else platform.machine()


# Measured on emulated clusters ####################################################################


@dataclass
class Row:
    """Measurements of one method in one setting."""

    setting: str
    mbit: float | None
    method: str
    setup: str = ""
    seconds: list[list[float]] = field(default_factory=list)  # of each step, a list for each round
    stolen: list[float] = field(default_factory=list)  # shares of the CPU used by the machine's host
    link_bytes: float = 0.0  # bytes that a node sent in a step, by its interface
    headers: float = 1.0  # bytes counted for a byte of payload
    formula_bytes: float | None = None  # bytes that a node must receive from others; None without a formula
    # Bytes of parameters, gradients and optimizer states on the rank with the most.
    held: Sequence[float] = (0.0, 0.0, 0.0)
    difference: float = 0.0  # difference of the weights, or losses, to the first method's
    compute: float = 0.0  # seconds of a step without communication
    more: dict[str, Any] = field(default_factory=dict)  # other columns of the file

    @property
    def steps(self) -> list[float]:
        return [step for steps in self.seconds for step in steps]

    @property
    def median(self) -> float:
        return statistics.median(self.steps)

    @property
    def exposed(self) -> float:
        """Seconds of a step beyond those without communication, with hops inside nodes."""
        return self.median - self.compute

    @property
    def memory(self) -> float:
        return sum(self.held)

    @property
    def predicted(self) -> Any:
        """Seconds of a step by the planner; None without a prediction."""
        return self.more.get("seconds_predicted")

    @property
    def bytes_between(self) -> float:
        """Payload that a node received from others in a step."""
        return self.link_bytes / self.headers

    @property
    def floor(self) -> float:
        """Seconds of compute, of the node's link, and of copies between host and device, one after the other."""
        link = 0.0 if self.mbit is None else self.bytes_between * 8 / (self.mbit * 1e6)
        return self.compute + link + self.more.get("copied_bytes", 0.0) / (self.more.get("pcie_gigabytes", 1.0) * 1e9)

    def add(self, stolen: float, seconds: list[float], sent: float) -> None:
        """Add a turn: the share of the CPU that it lost, seconds of its steps, bytes that a node sent in a step."""
        self.seconds.append(seconds)
        self.stolen.append(stolen)
        self.link_bytes += (sent - self.link_bytes) * len(seconds) / len(self.steps)

    def to_csv(self) -> dict[str, Any]:
        """Return the columns of a result, those that identify it first."""
        columns = {
            "setting": self.setting,
            "link_mbit": rate_name(self.mbit),
            "method": self.method,
            "setup": self.setup,
            "steps": len(self.steps),
            **spread("seconds", self.steps),
            "seconds_compute": self.compute,
            "seconds_floor": self.floor,
            "stolen_median": statistics.median(self.stolen),
            "link_bytes": round(self.link_bytes),
            "header_factor": self.headers,
            "formula_bytes": None if self.formula_bytes is None else round(self.formula_bytes),
            **{f"{state}_bytes": round(nbytes) for state, nbytes in zip(STATES, self.held, strict=True)},
            "difference": f"{self.difference:.2e}",
            **self.more,
        }
        return {name: round(value, 5) if isinstance(value, float) else value for name, value in columns.items()}

    @classmethod
    def from_csv(cls, cells: dict[str, str]) -> "Row":
        """Return the result of a row of a file; its round has minimum, median and maximum of all steps."""
        numbers = {name: _number(value) for name, value in cells.items()}
        rate = cells["link_mbit"]
        return cls(
            cells["setting"],
            None if rate == UNLIMITED else float(rate),
            cells["method"],
            cells["setup"],
            [[numbers[f"seconds_{part}"] for part in ("min", "median", "max")]],
            [numbers.get("stolen_median") or 0.0],
            numbers.get("link_bytes") or 0.0,
            numbers.get("header_factor") or 1.0,
            numbers.get("formula_bytes"),
            [numbers.get(f"{state}_bytes") or 0.0 for state in STATES],
            numbers.get("difference") or 0.0,
            numbers.get("seconds_compute") or 0.0,
            {name: value for name, value in numbers.items() if value is not None and name not in _OWN},
        )


_OWN = {"setting", "link_mbit", "method", "setup", "steps", "date", "versions", "hardware", "command", "formula_bytes"}
_OWN |= {"stolen_median", "link_bytes", "header_factor", "difference", *(f"{state}_bytes" for state in STATES)}
_OWN |= {f"seconds_{part}" for part in ("min", "median", "max", "compute", "floor")}


def _number(value: str) -> Any:
    """Return a cell as a number if it is one, and None if it is empty."""
    try:
        return float(value) if value else None
    except ValueError:
        return value


def spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Return the columns for a list: the median, the minimum, and the maximum; empty for an empty list."""
    parts = {"median": statistics.median, "min": min, "max": max}
    return {f"{name}_{part}": round(of(values), 5) if values else None for part, of in parts.items()}


def read(file: str) -> list[Row]:
    """Return the last row of a file of results for each setting, rate, method, ratio of compute, and disk."""
    rows = map(Row.from_csv, read_rows(RESULTS / file))
    keys = ("wire_of_compute", "disk")
    return list({(r.setting, r.method, r.mbit, *map(r.more.get, keys)): r for r in rows}.values())


def speed(row: Row, other: Row) -> Ratio:
    """Return the speed of a method relative to another, with the interval of ``deepspeed_ext.tools.compare``. Only
    rounds that both have are used."""
    rounds = min(len(row.seconds), len(other.seconds))
    return ratio(row.seconds[:rounds], other.seconds[:rounds])


def slower(rows: Sequence[Row], stock: str, least: dict[str, float]) -> list[str]:
    """Return the methods of a setting that miss their required speed relative to ``stock``, if both were measured."""
    by_method = {row.method: row for row in rows}
    speeds = {name: speed(by_method[name], by_method[stock]) for name in least if {name, stock} <= set(by_method)}
    return [
        f"{name} is {ratio.value:.2f} times as fast as {stock} ({ratio.low:.2f} to {ratio.high:.2f}), "
        f"not {least[name]:g}"
        for name, ratio in speeds.items()
        if ratio.value < least[name]
    ]


def seconds_of(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def markdown(table: Table) -> str:
    header, *lines = [f"| {' | '.join(cells)} |" for cells in (table[0], *table[1])]
    return "\n".join([header, "|" + "---|" * len(table[0]), *lines, ""])


def report(rows: Sequence[dict[str, Any]], path: Path | None, columns: Sequence[str] = ()) -> None:
    """Print these columns of rows, by default all, and append the rows to a file if one is given."""
    header = list(columns or rows[0])
    cells = [[f"{row[key]:.4g}" if isinstance(row[key], float) else str(row[key]) for key in header] for row in rows]
    print(markdown((header, cells)), flush=True)
    if path is not None:
        append_rows(path, rows)
