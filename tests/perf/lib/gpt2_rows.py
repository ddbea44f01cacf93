# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The methods and settings of ``gpt2_cluster.py``, its results, what must hold of them, and the table of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from tests.perf.lib import verdict
from tests.perf.lib.cluster_rows import BF16, BOTH, LOCO, Launch, MethodRow, rate_name, read_last
from tests.perf.lib.records import RESULTS

KEPT = RESULTS / "gpt2_cluster.csv"
STOCK = "ZeRO-1"  # the fastest of DeepSpeed's stages where links are slow: it reduces once a step
VOCABULARY = 50_257  # GPT-2's
HSDP = tuple(f"HSDP{kept} (reduces in {BF16})" for kept in ("", " kept"))
METHODS = (STOCK, "ZeRO-2", "ZeRO-3", *HSDP, "DDP", "NIG", "IIG", "NIG" + BOTH, "IIG" + BOTH)
# Of how far the loss falls. Ranks of bf16 round sums in another order; a node that trains by itself is further away.
LOSS_BOUND = 0.02
LOCO_BOUND = 0.25  # rounding to 4 bits is seen in the first steps; who does not train is at 1


@dataclass(frozen=True)
class Gpt2Setting(Launch):
    """A GPT-2, and links of some rates in Mbit/s.

    Attributes:
        shape: what the model's configuration has otherwise than GPT-2 with 124 M parameters.
        tokens: of a micro-batch, one row.
        bucket: elements in a bucket of DeepSpeed's; the embedding is larger in every size.
    """

    size: str = "gpt2"
    shape: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 128
    bucket: int = 5_000_000
    accumulation: int = 4
    mbit: tuple[float | None, ...] = (100, 1000)

    @property
    def name(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}-{self.size}"

    @property
    def vocabulary(self) -> int:
        """Number of different tokens."""
        return int(self.shape.get("vocab_size", VOCABULARY))


TINY = {
    "n_layer": 3,
    "n_head": 2,
    "n_embd": 128,
    "vocab_size": 8192,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SETTINGS = {one.name: one for one in (Gpt2Setting(2, 2), Gpt2Setting(2, 2, "tiny", TINY, tokens=32, bucket=200_000))}
MEASURED = next(iter(SETTINGS))  # the tiny one is there to try the program


@dataclass
class Gpt2Row(MethodRow):
    """What one method took at one rate.

    Attributes:
        losses: of the steps of all turns, in the mean over micro-batches and ranks.
    """

    compared: ClassVar[str] = "loss"

    losses: list[float] = field(default_factory=list)

    def to_csv(self) -> dict[str, Any]:
        """Return what identifies a result, and the result."""
        seconds = {**self.spread, "compute": self.compute, "floor": self.floor}
        return {
            "setting": self.setting,
            "link_mbit": rate_name(self.mbit),
            "method": self.method,
            "setup": self.setup,
            "steps": len(self.seconds),
            **{f"seconds_{name}": round(value, 5) for name, value in seconds.items()},
            "stolen_median": round(self.stolen_median, 3),
            **self.counted(),
            "loss_first": round(self.losses[0], 5),
            "loss_last": round(self.losses[-1], 5),
        }

    @classmethod
    def _own(cls, kept: dict[str, str]) -> dict[str, Any]:
        losses = [float(kept[f"loss_{which}"]) for which in ("first", "last")]
        return {"compute": float(kept["seconds_compute"]), "losses": losses}


def read(path: Path = KEPT) -> list[Gpt2Row]:
    """Return the last that a file has of each setting, rate and method; nothing if there is no file yet."""
    return read_last(path, Gpt2Row, lambda row: (row.setting, row.mbit, row.method)) if path.exists() else []


def measured(path: Path = KEPT) -> list[Gpt2Row]:
    """Return those that are of the full size."""
    return [row for row in read(path) if row.setting == MEASURED]


def apart(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest difference of two methods' losses in a step, of how far those of the second one fall.

    Infinite if these do not fall: then it says nothing of training.
    """
    fall = others[0] - min(others)
    return (
        max(abs(one - other) for one, other in zip(losses, others, strict=True)) / fall if fall > 0 else float("inf")
    )


def problems(rows: Sequence[Gpt2Row]) -> list[str]:
    """Return what shows that methods did not train the same, or sent other bytes than they must."""
    found = []
    for row in rows:
        bound = LOCO_BOUND if LOCO in row.method or BOTH in row.method else LOSS_BOUND
        if not row.difference <= bound:  # NaN is not
            found.append(f"{row.method}: losses differ by {row.difference:.1e} of their fall from the first method's")
        found += verdict.other_bytes(row)
    return found


def table(rows: Sequence[Gpt2Row]) -> tuple[list[str], list[list[str]]]:
    """Return seconds of a step of each method at each rate, beside their floor and ``STOCK``'s, its bytes, and what it
    holds, of a setting's rows; the slowest first."""
    rates = sorted({row.mbit for row in rows}, key=lambda mbit: mbit or float("inf"))
    header = [""]
    for mbit in rates:
        named = "without a limit" if mbit is None else f"at {mbit:g} Mbit/s"
        header += [f"seconds {named}", "min .. max", "floor", f"times {STOCK}'s speed"]
    header += ["MB between", "of the formula", "MB held"]
    found = {(row.mbit, row.method): row for row in rows}
    lines = []
    for first in sorted((row for row in rows if row.mbit == rates[0]), key=lambda row: -row.median):
        line = [first.method]
        for mbit in rates:
            line += _cells(found.get((mbit, first.method)), found.get((mbit, STOCK)))
        due = f"{first.bytes_between / first.formula_bytes:.3f}" if first.formula_bytes else ""
        lines.append([*line, f"{first.bytes_between / 1e6:.0f}", due, f"{first.memory / 1e6:.0f}"])
    return header, lines


def _cells(row: Gpt2Row | None, stock: Gpt2Row | None) -> list[str]:
    """Return what a table has of a method at a rate."""
    if row is None:
        return [""] * 4
    seconds = [_seconds(row.median), f"{_seconds(min(row.seconds))} .. {_seconds(max(row.seconds))}"]
    return [*seconds, _seconds(row.floor), "" if stock is None else f"{stock.median / row.median:.1f}"]


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
