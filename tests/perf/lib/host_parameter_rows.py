# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The settings of ``host_parameters.py``, its results, what they must be, and the table of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_ext.strategy import STRATEGIES, ModelStates, Placement
from tests.perf.lib import verdict
from tests.perf.lib.blocks import Blocks, make_adapted_blocks, make_blocks
from tests.perf.lib.cluster_rows import Launch, MethodRow, rate_name, read_last
from tests.perf.lib.records import RESULTS

KEPT = RESULTS / "host_parameters.csv"
WIDTH = 512  # of a block
STOCK = "ZeRO-3"
OURS = ("ING", "IIG")
METHODS = (STOCK, "GGG", "GNG", *OURS)
LEAST = {"full": 5.0, "LoRA": 50.0}  # times as fast as ``STOCK``, each of ``OURS``
COPIED_BOUND = 0.01  # of the bytes that are copied
SLACK = 4000  # bytes between nodes that are no parameters or gradients: norms, for example


@dataclass(frozen=True)
class HostSetting(Launch):
    """A model, and how it is trained.

    Attributes:
        training: "full", or "LoRA": of adapters, beside a frozen base.
        mbit: of a node's link.
        blocks, hidden: of the model.
        rank: of the adapters.
    """

    training: str
    mbit: float = 100
    blocks: int = 4
    hidden: int = 2048
    rank: int = 1
    accumulation: int = 4

    @property
    def name(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}-{self.training}-{rate_name(self.mbit)}"

    def make_model(self) -> Blocks:
        """Return the same model on every call and every rank."""
        if self.training == "full":
            return make_blocks(self.blocks, WIDTH, self.hidden)
        return make_adapted_blocks(self.blocks, WIDTH, self.hidden, self.rank)

    @property
    def states(self) -> ModelStates:
        parameters = list(self.make_model().parameters())
        trainable = sum(one.numel() for one in parameters if one.requires_grad)
        return ModelStates.of(sum(one.numel() for one in parameters), trainable, parameter_bytes=4, gradient_bytes=4)

    def bytes_between(self, method: str) -> float | None:
        """Return what a node must receive from others in a step, by the formula; None for a peer."""
        if method not in STRATEGIES:
            return None
        return STRATEGIES[method].volume(self.sizes, self.states, self.accumulation).inter * self.ranks_per_node

    def copied(self, method: str) -> float:
        """Return the bytes that a rank must copy between host and device in a step.

        It copies its part of the model to the device in each forward and in each backward, and what the step has
        changed of that part to the host. Its part is 1/m of the model with p = I, and else 1/n.
        """
        p = STRATEGIES[method].p if method in STRATEGIES else Placement.G
        return (2 * self.accumulation * self.states.parameters + self.states.updated) / self.sizes.shards(p)


SETTINGS = {
    setting.name: setting
    for setting in (
        HostSetting(2, 2, "full"),
        HostSetting(2, 2, "LoRA"),
        HostSetting(2, 2, "LoRA", 15, blocks=2, hidden=1024),
    )
}


@dataclass
class HostRow(MethodRow):
    """What one method took; ``MethodRow.compute`` is a step's without communication or copies, as measured.

    Attributes:
        gigabytes: per second between host and device.
        copied: bytes between them in a step, of the rank that copies most.
    """

    gigabytes: float = 0.0
    copied: float = 0.0

    @property
    def formula_copied(self) -> float:
        return SETTINGS[self.setting].copied(self.method)

    @property
    def floor(self) -> float:
        """Seconds of compute, of the node's link, and of copies, one after the other."""
        return super().floor + self.copied / (self.gigabytes * 1e9)

    def to_csv(self) -> dict[str, Any]:
        """Return what identifies a result, and the result."""
        seconds = {**self.spread, "compute": self.compute, "floor": self.floor}
        return {
            "setting": self.setting,
            "link_mbit": rate_name(self.mbit),
            "pcie_gigabytes": self.gigabytes,
            "method": self.method,
            "setup": self.setup,
            "steps": len(self.seconds),
            **{f"seconds_{name}": round(value, 5) for name, value in seconds.items()},
            "stolen_median": round(self.stolen_median, 3),
            "copied_bytes": round(self.copied),
            "copied_formula_bytes": round(self.formula_copied),
            **self.counted(),
        }

    @classmethod
    def _own(cls, kept: dict[str, str]) -> dict[str, Any]:
        return {
            "compute": float(kept["seconds_compute"]),
            "gigabytes": float(kept["pcie_gigabytes"]),
            "copied": float(kept["copied_bytes"]),
        }


def read(path: Path = KEPT) -> list[HostRow]:
    """Return the last that a file has of each setting, rate between host and device, and method."""
    return read_last(path, HostRow, lambda row: (row.setting, row.gigabytes, row.method))


def speeds(rows: Iterable[HostRow]) -> dict[str, float]:
    """Return how many times as fast as ``STOCK`` each of the other methods of a setting is."""
    seconds = {row.method: row.median for row in rows}
    return {name: seconds[STOCK] / value for name, value in seconds.items() if STOCK in seconds and name != STOCK}


def missed(rows: Sequence[HostRow]) -> list[str]:
    """Return those of ``OURS`` that are not as fast beside ``STOCK`` as they should be."""
    least = LEAST[SETTINGS[rows[0].setting].training]
    return [
        f"{name} is {speed:.1f} times as fast as {STOCK}, not {least:g}"
        for name, speed in speeds(rows).items()
        if name in OURS and speed < least
    ]


def problems(rows: Sequence[HostRow]) -> list[str]:
    """Return what shows that methods did not train the same, or sent or copied other bytes than they must."""
    return verdict.problems(rows, SLACK) + [
        f"{row.method}: bytes between host and device differ by {row.copied / row.formula_copied - 1:+.1%} from the "
        f"formula"
        for row in rows
        if abs(row.copied / row.formula_copied - 1) > COPIED_BOUND
    ]


def table(rows: Sequence[HostRow]) -> tuple[list[str], list[list[str]]]:
    """Return seconds of a step of each method in each setting, beside ``STOCK``, its floor, and its bytes."""
    header = [
        "training, Mbit/s",
        "",
        "seconds",
        "min .. max",
        "floor",
        f"times {STOCK}'s speed",
        "MB between",
        "MB copied",
    ]
    lines = []
    for setting in SETTINGS.values():
        some = [row for row in rows if row.setting == setting.name]
        faster = speeds(some)
        for row in sorted(some, key=lambda row: -row.median):
            spread = f"{min(row.seconds):.2f} .. {max(row.seconds):.2f}"
            speed = f"{faster.get(row.method, 1.0):.1f}"
            figures = [f"{row.median:.2f}", spread, f"{row.floor:.2f}", speed]
            nbytes = [f"{value / 1e6:.3g}" for value in (row.bytes_between, row.copied)]
            lines.append([f"{setting.training}, {rate_name(setting.mbit)}", row.method, *figures, *nbytes])
    return header, lines
