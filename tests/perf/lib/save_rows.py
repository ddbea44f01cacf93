# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The settings and methods of ``saves.py``, its results, what is promised of them, and the table."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from deepspeed_ext.strategy import STRATEGIES, Placement
from tests.perf.lib.blocks import Blocks, Pauses, make_sleeping_blocks
from tests.perf.lib.cluster_rows import Launch, MethodRow, rate_name, read_last
from tests.perf.lib.records import RESULTS

KEPT = RESULTS / "saves.csv"
REAL, SLOW = "real", "slow"  # disks
CRITICAL, BESIDE = 0.10, 1.05  # of a synchronous save; of an undisturbed step: at most
BUFFERS = 0.01  # of the formula, beside a few scalars
SIZES = {"25M": (12, 512), "200M": (24, 1024)}  # blocks, and their width; 4 times as wide inside
_STATES, _WEIGHT = 12, 2  # bytes of a parameter: fp32 weights and Adam's moments; bf16


@dataclass(frozen=True)
class SaveMethod:
    """How an engine saves.

    Attributes:
        base: what trains: a strategy, or a stage of DeepSpeed's.
        checkpoint: section of the configuration.
    """

    base: str
    checkpoint: Mapping[str, Any] = field(default_factory=dict)

    @property
    def aside(self) -> bool:
        return bool(self.checkpoint.get("async_save"))

    @property
    def decoupled(self) -> bool:
        """Whether another process writes, whose disk is always the real one."""
        return bool(self.checkpoint.get("writer", {}).get("decoupled"))

    @property
    def promised(self) -> bool:
        """Whether nothing crosses between ranks for a save."""
        return self.aside and not self.checkpoint.get("zero_order")

    def buffers(self, parameters: int, ranks: int, group_size: int) -> float:
        """Return the bytes of host buffers of the rank that has most, by the formula.

        A rank copies what its files have: its shard of the optimizer's states; with p = N the first one also the
        weights. With p = I and G these are in the optimizer's states alone.
        """
        if not self.aside:
            return 0.0
        strategy = STRATEGIES[self.base]
        shards = {Placement.N: 1, Placement.I: group_size, Placement.G: ranks}[strategy.os]
        return parameters * (_STATES / shards + (_WEIGHT if strategy.p == Placement.N else 0))


STAGES: dict[str, dict[str, Any]] = {"ZeRO-2": {"stage": 2}, "ZeRO-3": {"stage": 3}}
METHODS = {
    "ZeRO-2": SaveMethod("ZeRO-2"),
    "ZeRO-3": SaveMethod("ZeRO-3"),
    "ZeRO-3, python writer": SaveMethod("ZeRO-3", {"writer": {"type": "python"}}),
    "ZeRO-3, decoupled": SaveMethod("ZeRO-3", {"writer": {"type": "python", "decoupled": True}}),
    "NIG": SaveMethod("NIG"),
    "NIG, asynchronous": SaveMethod("NIG", {"async_save": True}),
    "NIG, asynchronous, zero_order": SaveMethod("NIG", {"async_save": True, "zero_order": True}),
    "IIG": SaveMethod("IIG"),
    "IIG, asynchronous": SaveMethod("IIG", {"async_save": True}),
}


@dataclass(frozen=True)
class SaveSetting(Launch):
    """A model, and the nodes' links.

    Attributes:
        size: of the model, a key of ``SIZES``.
        pause: seconds that a step sleeps in the model: its emulated compute.
        slow: MB/s that each rank writes to the slow disk.
    """

    size: str = "25M"
    mbit: float = 1000
    pause: float = 1.0
    slow: float = 10
    accumulation: int = 4

    @property
    def name(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}-{self.size}-{rate_name(self.mbit)}"

    @property
    def parameters(self) -> int:
        blocks, width = SIZES[self.size]
        return blocks * 8 * width * width

    def make_model(self, pauses: Pauses) -> Blocks:
        """Return the same model on every call and every rank, in bf16 from the beginning: so it takes half."""
        blocks, width = SIZES[self.size]
        return make_sleeping_blocks(blocks, width, 4 * width, pauses, torch.bfloat16)

    def buffers(self, method: str) -> float:
        """Return ``SaveMethod.buffers`` here."""
        return METHODS[method].buffers(self.parameters, self.sizes.ranks, self.ranks_per_node)


SETTINGS = {
    setting.name: setting
    for setting in (SaveSetting(2, 2), SaveSetting(2, 2, mbit=100), SaveSetting(2, 2, "200M", pause=2.0, slow=40))
}


@dataclass
class SaveRow(MethodRow):
    """What saves of one method took; ``MethodRow.seconds`` are those of ``save_checkpoint`` on the rank that is last.

    All lists have an entry for each save but ``first``, ``steps`` and ``beside``.

    Attributes:
        disk: "real"; or "slow", by the rate ``megabytes`` of each rank.
        megabytes: of a slow disk, each second and rank.
        first: seconds of saves that make the buffers.
        waits: seconds that steps after a save waited for its copies.
        behind: seconds from the beginning of a save until it was committed.
        steps: seconds of undisturbed steps.
        beside: of each step while the writer is at work, how many times as long as the undisturbed ones of its turn.
        lost: seconds that the steps beside a writer took longer, together.
        cpu: seconds of a core that the writers of all ranks took, together: a lower bound of ``lost`` where cores are
            busy.
        buffers: bytes of host buffers of the rank that has most.
        load: processes that wanted a core during the last minute, those of this program among them.
    """

    disk: str = REAL
    megabytes: float | None = None
    first: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    behind: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    buffers: float = 0.0
    load: list[float] = field(default_factory=list)

    @property
    def critical(self) -> float:
        """Seconds for which one save stops the training: the median of saves with what steps wait for them."""
        return statistics.median(save + wait for save, wait in zip(self.seconds, self.waits, strict=True))

    def to_csv(self) -> dict[str, Any]:
        """Return what identifies a result, and the result."""
        lists = {
            "save": self.seconds,
            "first_save": self.first,
            "wait": self.waits,
            "until_committed": self.behind,
            "step": self.steps,
            "lost": self.lost,
            "writers_cpu": self.cpu,
        }
        spreads = {
            f"{name}_seconds_{part}": value
            for name, values in lists.items()
            for part, value in _spread(values).items()
        }
        return {
            "setting": self.setting,
            "link_mbit": rate_name(self.mbit),
            "disk": self.disk,
            "slow_megabytes": "" if self.megabytes is None else self.megabytes,
            "method": self.method,
            "setup": self.setup,
            "saves": len(self.seconds),
            **spreads,
            "critical_seconds": round(self.critical, 4),
            "steps_beside": len(self.beside),
            **{f"beside_{part}": value for part, value in _spread(self.beside).items()},
            "buffer_bytes": round(self.buffers),
            "buffer_formula_bytes": round(SETTINGS[self.setting].buffers(self.method)),
            "link_bytes": round(self.link_bytes),
            "stolen_median": round(self.stolen_median, 3),
            "load_median": round(statistics.median(self.load), 1),
        }

    @classmethod
    def from_csv(cls, kept: dict[str, str]) -> "SaveRow":
        """Return what a file has kept: the least, the median and the largest of each list, and waits that give the
        same ``critical``."""

        def spread(name: str) -> list[float]:
            return [float(kept[f"{name}_{part}"]) for part in ("min", "median", "max") if kept[f"{name}_{part}"]]

        saves = spread("save_seconds")
        return cls(
            setting=kept["setting"],
            mbit=float(kept["link_mbit"]),
            method=kept["method"],
            setup=kept["setup"],
            disk=kept["disk"],
            megabytes=float(kept["slow_megabytes"]) if kept["slow_megabytes"] else None,
            seconds=saves,
            stolen=[float(kept["stolen_median"])],
            first=spread("first_save_seconds"),
            waits=[float(kept["critical_seconds"]) - saves[1]] * len(saves),
            behind=spread("until_committed_seconds"),
            steps=spread("step_seconds"),
            beside=spread("beside"),
            lost=spread("lost_seconds"),
            cpu=spread("writers_cpu_seconds"),
            buffers=float(kept["buffer_bytes"]),
            link_bytes=float(kept["link_bytes"]),
            load=[float(kept["load_median"])],
        )


def _spread(values: Sequence[float]) -> dict[str, Any]:
    """Return what a file keeps of a list; nothing of an empty one."""
    if not values:
        return dict.fromkeys(("median", "min", "max"), "")
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {part: round(value, 4) for part, value in found.items()}


def read(path: Path = KEPT) -> list[SaveRow]:
    """Return the last that a file has of each setting, disk and method."""
    return read_last(path, SaveRow, lambda row: (row.setting, row.disk, row.method))


def synchronous(row: SaveRow, rows: Sequence[SaveRow]) -> SaveRow | None:
    """Return the row of the saves without a key that an asynchronous one stands beside; None for others."""
    if not METHODS[row.method].aside:
        return None
    name = METHODS[row.method].base
    same = (one for one in rows if (one.setting, one.disk, one.method) == (row.setting, row.disk, name))
    return next(same, None)


def missed(rows: Sequence[SaveRow]) -> list[str]:
    """Return which asynchronous saves stop the training for too long, and beside which steps take too long."""
    found = []
    for row in (row for row in rows if METHODS[row.method].promised):
        where, whole = f"{row.setting}, {row.disk} disk: {row.method}", synchronous(row, rows)
        if whole is not None and row.critical > CRITICAL * whole.critical:
            share = row.critical / whole.critical
            found.append(f"{where} stops for {share:.1%} of a synchronous save, not {CRITICAL:.0%}")
        if row.beside and statistics.median(row.beside) > BESIDE:
            found.append(f"{where}: steps beside it take {statistics.median(row.beside):.3f}, not {BESIDE}")
    return found


def problems(rows: Sequence[SaveRow]) -> list[str]:
    """Return whose host buffers are not those of the formula."""
    due = {row.method: SETTINGS[row.setting].buffers(row.method) for row in rows}
    return [
        f"{row.method} has {row.buffers:,.0f} bytes of host buffers, not {due[row.method]:,.0f}"
        for row in rows
        if abs(row.buffers - due[row.method]) > BUFFERS * due[row.method] + 1
    ]


def table(rows: Sequence[SaveRow]) -> tuple[list[str], list[list[str]]]:
    """Return what saves of each method took in each setting, on each disk."""
    header = ["parameters, Mbit/s, disk", "", "save, s", "min .. max", "first", "stops for", "of synchronous"]
    header += ["committed after", "CPU s", "a step, s", "beside the writer", "MB of buffers", "MB between"]
    lines = []
    for row in sorted(rows, key=_place):
        setting, whole = SETTINGS[row.setting], synchronous(row, rows)
        place = f"{setting.size}, {rate_name(setting.mbit)}, {row.disk}"
        saves = [f"{row.median:.2f}", f"{min(row.seconds):.2f} .. {max(row.seconds):.2f}", _median(row.first)]
        stops = [f"{row.critical:.2f}", "" if whole is None else f"{row.critical / whole.critical:.1%}"]
        steps = [_median(row.behind), _median(row.cpu), _median(row.steps), _median(row.beside, 3)]
        held = f"{row.buffers / 1e6:.0f}" if row.buffers else ""
        lines.append([place, row.method, *saves, *stops, *steps, held, f"{row.link_bytes / 1e6:.1f}"])
    return header, lines


def _place(row: SaveRow) -> tuple[int, ...]:
    """Return where a row is in the table."""
    orders: tuple[tuple[Iterable[str], str], ...] = (
        (SETTINGS, row.setting),
        ((REAL, SLOW), row.disk),
        (METHODS, row.method),
    )
    return tuple(list(order).index(name) for order, name in orders)


def _median(values: Sequence[float], digits: int = 2) -> str:
    return f"{statistics.median(values):.{digits}f}" if values else ""
