# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The settings of ``outer_cluster.py``, its results, and the table of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.perf.lib.cluster_rows import BOTH, MethodRow, rate_name, read_last
from tests.perf.lib.records import RESULTS

KEPT = RESULTS / "outer_cluster.csv"
WIDTH, HIDDEN = 512, 2048  # of a block: 2.1 M parameters
BACKWARD = 2.0  # seconds of backward for each of forward
OUTER: dict[str, dict[str, Any]] = {  # of III, by the name of the method
    "III outer": {"bits": 4},
    "III outer, streaming": {"bits": 4, "fragments": 5, "delay": 2},
    "III outer, 32 bits": {"bits": 32},
}
EXACT = "III outer, 32 bits"
PEER = "FSDP2 outer"
EVERY_STEP = "NIG" + BOTH
METHODS = (EVERY_STEP, "DDP", "HSDP", *OUTER, PEER)


@dataclass(frozen=True)
class OuterSetting:
    """One launch: two nodes at one rate.

    With one rank a node all of a step that is not emulated is its own: hops inside nodes are copies on these cores.
    """

    mbit: float | None
    ranks_per_node: int = 1
    nodes: int = 2

    @property
    def name(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}-{rate_name(self.mbit)}"


RATES = (None, 100, 20, 5)
SETTINGS = {setting.name: setting for setting in (OuterSetting(rate, ranks) for ranks in (1, 2) for rate in RATES)}


@dataclass
class OuterRow(MethodRow):
    """What one method took at one rate; ``MethodRow.compute`` is a step's without communication, as measured.

    Attributes:
        blocks, pause, every: of the model, seconds that a step sleeps in it, H.
        timed: steps that each of ``seconds`` is the mean of.
    """

    blocks: int = 4
    pause: float = 0.0
    every: int = 30
    timed: int = 1

    def to_csv(self) -> dict[str, Any]:
        """Return what identifies a result, and the result."""
        seconds = {
            **self.spread,
            "compute": self.compute,
            "exposed": self.exposed,
            "pause": self.pause,
        }
        return {
            "setting": self.setting,
            "link_mbit": rate_name(self.mbit),
            "method": self.method,
            "setup": self.setup,
            "blocks": self.blocks,
            "outer_every": self.every,
            "turns": len(self.seconds),
            "steps_of_a_turn": self.timed,
            **{f"seconds_{name}": round(value, 5) for name, value in seconds.items()},
            "stolen_median": round(self.stolen_median, 3),
            **self.counted(),
        }

    @classmethod
    def _own(cls, kept: dict[str, str]) -> dict[str, Any]:
        return {
            "compute": float(kept["seconds_compute"]),
            "pause": float(kept["seconds_pause"]),
            "blocks": int(kept["blocks"]),
            "every": int(kept["outer_every"]),
            "timed": int(kept["steps_of_a_turn"]),
        }


def read(path: Path = KEPT) -> list[OuterRow]:
    """Return the last that a file has of each setting and method."""
    return read_last(path, OuterRow, lambda row: (row.setting, row.method))


def table(rows: Sequence[OuterRow], ranks_per_node: int = 1) -> tuple[list[str], list[list[str]]]:
    """Return seconds of a step of each method at each rate, and what of them is exposed; kB of a step, MB held."""
    found = {(row.setting, row.method): row for row in rows}
    settings = [one for one in SETTINGS.values() if one.ranks_per_node == ranks_per_node]
    lines = []
    for name in METHODS:
        cells = [found.get((one.name, name)) for one in settings]
        known = [row for row in cells if row is not None]
        if known:
            spread = ["" if row is None else f"{row.median:.3f} ({row.exposed:.3f})" for row in cells]
            last = known[-1]
            lines.append([name, *spread, f"{last.bytes_between / 1e3:.0f}", f"{last.memory / 1e6:.0f}"])
    return ["", *(rate_name(one.mbit) for one in settings), "kB a step", "MB held"], lines
