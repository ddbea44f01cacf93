# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The settings of ``emulated_cluster.py``, and its results: as they are measured, and as a file keeps them."""

import csv
import statistics
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from deepspeed_ext.loco.settings import LocoSettings, UpdateSettings
from deepspeed_ext.planner.compression import AS_IT_IS, Compression
from deepspeed_ext.strategy import GroupSizes
from tests.perf.lib.records import RESULTS

KEPT = RESULTS / "emulated_cluster.csv"
SIZES = {"large": (512, 2048), "small": (256, 1024)}  # width and hidden width of 4 blocks: 8.4 and 2.1 M parameters
NATIVE = " (gloo's collectives)"  # after a strategy's name, as these are
FORMS = {
    sent.label: sent for sent in (AS_IT_IS, Compression(LocoSettings()), Compression(LocoSettings(), UpdateSettings()))
}
_, LOCO, BOTH = FORMS
UPDATES = ("NNG", "NIG", "NII", "III", "IIG")  # are measured with both
_Row = TypeVar("_Row", bound="MethodRow")
UNLIMITED = "unlimited"
MUON = "Muon"
FP32, BF16 = "fp32", "bf16"
WIDE = " (reduces in fp32)"  # after a strategy's name; in bf16 they reduce in bf16
HSDP_REDUCTIONS = {  # how parameters are from forward to backward, and the dtype of reductions: beside bf16 only
    f"HSDP{kept} (reduces in {short})": (between, dtype)
    for kept, between in ((" kept", "whole"), ("", "cut"))
    for short, dtype in ((FP32, "float32"), (BF16, "bfloat16"))
}
SHIPPED = "ZeRO-1 as shipped"  # use_multi_rank_bucket_allreduce true


def rate_name(mbit: float | None) -> str:
    """Return a rate as files and tables name it."""
    return UNLIMITED if mbit is None else f"{mbit:g}"


@dataclass(frozen=True)
class Launch:
    """The ranks of one launch, in a group for each node."""

    nodes: int
    ranks_per_node: int

    @property
    def sizes(self) -> GroupSizes:
        return GroupSizes(self.nodes * self.ranks_per_node, self.ranks_per_node)


@dataclass(frozen=True)
class Setting(Launch):
    """A model and an optimizer."""

    size: str
    accumulation: int
    mbit: tuple[float | None, ...] = (100, 500, None)
    optimizer: str = "AdamW"
    dtype: str = FP32

    @property
    def name(self) -> str:
        suffix = "" if self.optimizer == "AdamW" else f"-{self.optimizer.lower()}"
        suffix += "" if self.dtype == FP32 else f"-{self.dtype}"
        return f"{self.nodes}x{self.ranks_per_node}-{self.size}-{self.accumulation}{suffix}"


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting(2, 2, "large", 4),
        Setting(2, 2, "small", 1),
        Setting(2, 2, "small", 4),
        Setting(2, 2, "small", 16),
        Setting(4, 2, "small", 4),
        Setting(2, 2, "large", 4, optimizer=MUON),
        Setting(2, 2, "large", 4, (100,), dtype=BF16),
    )
}


@dataclass
class MethodRow:
    """What one method took at one rate.

    Attributes:
        seconds: of each step.
        stolen: share of the CPU's time that the host of a virtual machine took for others meanwhile, of each step.
        link_bytes: that a node sent to others in a step, by its interface.
        headers: how many bytes the interface counts for one of a known transfer.
        formula_bytes: that a node must receive from others; None for a peer.
        held: bytes of parameters, gradients and optimizer states on the rank that holds most.
        difference: of the weights to the first method's after as many steps, relative to the largest.
        parts: predicted seconds of a step, by the planner, by part; none for a peer.
        compared: of what ``difference`` is, as files name it.
    """

    compared: ClassVar[str] = "weights"

    setting: str
    mbit: float | None
    method: str
    setup: str
    seconds: list[float] = field(default_factory=list)
    stolen: list[float] = field(default_factory=list)
    link_bytes: float = 0.0
    headers: float = 1.0
    formula_bytes: float | None = None
    held: tuple[float, float, float] = (0.0, 0.0, 0.0)
    difference: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    compute: float = 0.0

    @property
    def predicted(self) -> float | None:
        return sum(self.parts.values()) if self.parts else None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def stolen_median(self) -> float:
        return statistics.median(self.stolen)

    @property
    def spread(self) -> dict[str, float]:
        """Seconds of steps, as files keep them."""
        return {"median": self.median, "min": min(self.seconds), "max": max(self.seconds)}

    @property
    def exposed(self) -> float:
        """Seconds of a step beyond those without communication; what is done inside nodes is in it."""
        return self.median - self.compute

    @property
    def memory(self) -> float:
        return sum(self.held)

    @property
    def bytes_between(self) -> float:
        """Return the payload that a node received from others in a step."""
        return self.link_bytes / self.headers

    @property
    def floor(self) -> float:
        link = 0.0 if self.mbit is None else self.bytes_between * 8 / (self.mbit * 1e6)
        return self.compute + link

    def to_csv(self) -> dict[str, Any]:
        """Return what identifies a result, and the result."""
        setting = SETTINGS[self.setting]
        return {
            "setting": self.setting,
            "nodes": setting.nodes,
            "ranks_per_node": setting.ranks_per_node,
            "size": setting.size,
            "accumulation": setting.accumulation,
            "link_mbit": rate_name(self.mbit),
            "method": self.method,
            "setup": self.setup,
            "steps": len(self.seconds),
            **{f"seconds_{name}": round(value, 5) for name, value in self.spread.items()},
            "stolen_median": round(self.stolen_median, 3),
            "compute_seconds": round(self.compute, 5),
            "floor_seconds": round(self.floor, 5),
            "predicted_seconds": "" if self.predicted is None else round(self.predicted, 5),
            "predicted_within_seconds": round(self.parts["within"], 5) if self.parts else "",
            **self.counted(),
        }

    def counted(self) -> dict[str, Any]:
        """Return the last columns of every file: bytes, and how far methods are apart."""
        return {
            "link_bytes": round(self.link_bytes),
            "header_factor": round(self.headers, 5),
            "formula_bytes": "" if self.formula_bytes is None else round(self.formula_bytes),
            "parameter_bytes": round(self.held[0]),
            "gradient_bytes": round(self.held[1]),
            "optimizer_bytes": round(self.held[2]),
            f"{self.compared}_difference": f"{self.difference:.2e}",
        }

    @classmethod
    def from_csv(cls: type[_Row], kept: dict[str, str]) -> _Row:
        """Return what a file has kept: of all steps' seconds the least, the median and the largest."""
        return cls(
            setting=kept["setting"],
            mbit=None if kept["link_mbit"] == UNLIMITED else float(kept["link_mbit"]),
            method=kept["method"],
            setup=kept["setup"],
            seconds=[float(kept[f"seconds_{part}"]) for part in ("min", "median", "max")],
            stolen=[float(kept["stolen_median"])],
            link_bytes=float(kept["link_bytes"]),
            headers=float(kept["header_factor"]),
            formula_bytes=float(kept["formula_bytes"]) if kept["formula_bytes"] else None,
            held=tuple(float(kept[f"{state}_bytes"]) for state in ("parameter", "gradient", "optimizer")),
            difference=float(kept[f"{cls.compared}_difference"]),
            **cls._own(kept),
        )

    @classmethod
    def _own(cls, kept: dict[str, str]) -> dict[str, Any]:
        """Return what only rows of this class have kept."""
        planned, within = (float(kept[f"predicted_{what}seconds"] or 0) for what in ("", "within_"))
        parts = {"within": within, "rest": planned - within} if planned else {}
        return {"parts": parts, "compute": float(kept["compute_seconds"])}


def read(path: Path = KEPT) -> list[MethodRow]:
    """Return the last that a file has of each setting, method and rate."""
    return read_last(path, MethodRow, lambda row: (row.setting, row.method, row.mbit))


def read_last(path: Path, row: type[_Row], key: Callable[[_Row], Hashable]) -> list[_Row]:
    """Return the last row that a file has of each key."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row.from_csv(kept) for kept in csv.DictReader(file)]
    return list({key(one): one for one in rows}.values())
