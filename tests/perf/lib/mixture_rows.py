# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The methods and settings of ``mixture_cluster.py``, its results, and the table of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.perf.lib.cluster_rows import Launch, MethodRow, rate_name, read_last
from tests.perf.lib.records import RESULTS

KEPT = RESULTS / "mixture_cluster.csv"
HIDDEN, INNER, LAYERS, EXPERTS, TOP, TOKENS = 256, 512, 2, 8, 2, 8  # TOKENS of a row, of 8 rows in a micro-batch
SIZE = 2  # expert-parallel
FEW_BITS = {"zeropp_loco_param": {}, "paro_quantized_updates": {}}
STOCK = "ZeRO-3"


@dataclass(frozen=True)
class MixtureMethod:
    """A way to train the mixture.

    Attributes:
        spread: whether AutoEP spreads the experts over the ranks of a node.
        zero: of the section ``zero_optimization``; of peers that are known by their names, nothing.
    """

    spread: bool = False
    zero: Mapping[str, Any] = field(default_factory=dict)


# With AutoEP no layer is a unit: a layer's own parameters and its experts are gathered by other ranks.
_APART = {"leaf_module": {"classes": []}}
METHODS = {
    "DDP": MixtureMethod(),
    "HSDP": MixtureMethod(),
    "ZeRO-2": MixtureMethod(),
    STOCK: MixtureMethod(),
    "AutoEP, ZeRO-2": MixtureMethod(True, {"stage": 2}),
    "AutoEP, ZeRO-3": MixtureMethod(True, {"stage": 3}),
    "NIG": MixtureMethod(False, {"paro_strategy": "NIG"}),
    "IIG": MixtureMethod(False, {"paro_strategy": "IIG"}),
    "AutoEP, NIG": MixtureMethod(True, {"paro_strategy": "NIG"}),
    "AutoEP, IIG": MixtureMethod(True, {"paro_strategy": "IIG", **_APART}),
    "AutoEP, NIG + LoCo + updates": MixtureMethod(True, {"paro_strategy": "NIG", **FEW_BITS}),
    "AutoEP, IIG + LoCo + updates": MixtureMethod(True, {"paro_strategy": "IIG", **_APART, **FEW_BITS}),
}
LEAST = 5.0  # times as fast as ``STOCK``, the best of ours


@dataclass(frozen=True)
class MixtureSetting(Launch):
    """Nodes with links of one rate."""

    mbit: float = 100
    accumulation: int = 4

    @property
    def name(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}-{rate_name(self.mbit)}"


SETTINGS = {setting.name: setting for setting in (MixtureSetting(2, 2),)}


@dataclass
class MixtureRow(MethodRow):
    """What one method took.

    Attributes:
        formula_experts: bytes of ``formula_bytes`` that are of experts.
    """

    formula_experts: float | None = None

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
            "formula_expert_bytes": "" if self.formula_experts is None else round(self.formula_experts),
            **self.counted(),
        }

    @classmethod
    def _own(cls, kept: dict[str, str]) -> dict[str, Any]:
        experts = kept["formula_expert_bytes"]
        return {
            "compute": float(kept["seconds_compute"]),
            "formula_experts": float(experts) if experts else None,
        }


def read(path: Path = KEPT) -> list[MixtureRow]:
    """Return the last that a file has of each setting and method."""
    return read_last(path, MixtureRow, lambda row: (row.setting, row.method))


def speeds(rows: Sequence[MixtureRow]) -> dict[str, float]:
    """Return how many times as fast as ``STOCK`` each method is."""
    seconds = {row.method: row.median for row in rows}
    return {name: seconds[STOCK] / value for name, value in seconds.items() if STOCK in seconds}


def table(rows: Sequence[MixtureRow]) -> tuple[list[str], list[list[str]]]:
    """Return seconds of a step of each method, beside ``STOCK`` and its floor, its bytes, and what it holds."""
    header = ["", "seconds", "min .. max", "floor", f"times {STOCK}'s speed"]
    header += ["MB between", "of the formula", "of experts", "MB held"]
    faster, lines = speeds(rows), []
    for row in sorted(rows, key=lambda row: -row.median):
        due = [""] * 2
        if row.formula_bytes and row.formula_experts is not None:
            of_experts = f"{row.formula_experts / 1e6:.1f}" if METHODS[row.method].spread else ""
            due = [f"{row.bytes_between / row.formula_bytes:.3f}", of_experts]
        seconds = [f"{row.median:.2f}", f"{min(row.seconds):.2f} .. {max(row.seconds):.2f}", f"{row.floor:.2f}"]
        speed = f"{faster.get(row.method, 1.0):.1f}"
        lines.append([row.method, *seconds, speed, f"{row.bytes_between / 1e6:.1f}", *due, f"{row.memory / 1e6:.0f}"])
    return header, lines
