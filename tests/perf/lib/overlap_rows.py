# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The settings of ``overlap.py``, and its results."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_ext.strategy import STRATEGIES, ModelStates
from tests.perf.lib.cluster_rows import Launch, MethodRow, read_last
from tests.perf.lib.overlap_bound import Compute, LinkSeconds, bound, of_peer, of_strategy
from tests.perf.lib.records import RESULTS

KEPT = RESULTS / "overlap.csv"
WIDTH, HIDDEN = 256, 400  # of a block: 204,800 parameters, whose compute is nothing beside what its messages take
BLOCK = 2 * WIDTH * HIDDEN
BACKWARD = 2.0  # seconds of backward for each of forward
RATIOS = (0.5, 1.0, 2.0)


@dataclass(frozen=True)
class OverlapSetting(Launch):
    """A model of so many blocks."""

    accumulation: int
    blocks: int = 8
    mbit: float = 100.0

    @property
    def name(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}-{self.accumulation}"

    @property
    def states(self) -> ModelStates:
        return ModelStates.of(self.blocks * BLOCK, parameter_bytes=4, gradient_bytes=4)

    @property
    def wire(self) -> float:
        """W: seconds that a link is occupied by two hops between groups of the whole model."""
        link = of_strategy(STRATEGIES["NIG"], self.sizes, self.states, self.mbit)
        return link.total(self.accumulation)

    def compute(self, ratio: float) -> Compute:
        """Return the compute with which W is ``ratio`` times that of a micro-batch."""
        forward = self.wire / ratio / (1 + BACKWARD)
        return Compute(forward, BACKWARD * forward, self.blocks, self.accumulation)


SETTINGS = {
    setting.name: setting
    for setting in (
        OverlapSetting(2, 2, 1),
        OverlapSetting(2, 2, 4),
        OverlapSetting(4, 2, 1),
        OverlapSetting(4, 2, 4),
    )
}


@dataclass
class OverlapRow(MethodRow):
    """What one method took with one compute; ``MethodRow.compute`` is a step's without communication, as measured.

    Attributes:
        nodes, ranks_per_node, accumulation, blocks: of the setting.
        ratio: of W to the compute of a micro-batch.
        payload_mbit: that a link carries of a long gather, by the planner's probe.
    """

    nodes: int = 2
    ranks_per_node: int = 2
    accumulation: int = 1
    blocks: int = 8
    ratio: float = 1.0
    payload_mbit: float = 0.0

    @property
    def _setting(self) -> OverlapSetting:
        assert self.mbit is not None
        return OverlapSetting(self.nodes, self.ranks_per_node, self.accumulation, self.blocks, self.mbit)

    @property
    def emulated(self) -> Compute:
        return self._setting.compute(self.ratio)

    @property
    def link(self) -> LinkSeconds:
        """Of a strategy by the formula, of a peer by what was measured."""
        setting = self._setting
        if self.method in STRATEGIES:
            return of_strategy(STRATEGIES[self.method], setting.sizes, setting.states, setting.mbit)
        return of_peer(self.method, self.bytes_between * 8 / (setting.mbit * 1e6), self.accumulation)

    @property
    def wire(self) -> float:
        """Seconds that a node's link is occupied in a step."""
        return self.link.total(self.accumulation)

    @property
    def hidden(self) -> float:
        """What of the shorter, compute or communication, was hidden by the longer."""
        return (self.compute + self.wire - self.median) / min(self.compute, self.wire)

    @property
    def bound(self) -> float:
        """Of the emulated compute alone."""
        return bound(self.emulated, self.link)

    @property
    def measured_bound(self) -> float:
        """With what the host takes where there is no communication."""
        return bound(self.emulated, self.link, self.compute)

    def kept_bytes(self) -> float:
        """Return what of the formula's bytes does not cross with p = G: ZeRO-3 keeps the last block of a forward for
        its backward."""
        assert self.mbit is not None
        return self.accumulation * self.link.parameters * self.mbit * 1e6 / 8 / (2 * self.blocks)

    @property
    def payload_bound(self) -> float:
        """Of a strategy, also at the rate at which the link carries payload, by the probe."""
        assert self.method in STRATEGIES
        link = of_strategy(STRATEGIES[self.method], self._setting.sizes, self._setting.states, self.payload_mbit)
        return bound(self.emulated, link, self.compute)

    def to_csv(self) -> dict[str, Any]:
        """Return what identifies a result, and the result."""
        seconds = {
            **self.spread,
            "forward": self.emulated.forward,
            "backward": self.emulated.backward,
            "compute": self.compute,
            "wire": self.wire,
            "exposed": self.exposed,
            "bound": self.bound,
            "measured_bound": self.measured_bound,
        }
        return {
            "setting": self.setting,
            "nodes": self.nodes,
            "ranks_per_node": self.ranks_per_node,
            "accumulation": self.accumulation,
            "blocks": self.blocks,
            "wire_of_compute": self.ratio,
            "link_mbit": self.mbit,
            "payload_mbit": round(self.payload_mbit, 2),
            "method": self.method,
            "setup": self.setup,
            "steps": len(self.seconds),
            **{f"seconds_{name}": round(value, 5) for name, value in seconds.items()},
            "seconds_predicted": "" if self.predicted is None else round(self.predicted, 5),
            "stolen_median": round(self.stolen_median, 3),
            **self.counted(),
        }

    @classmethod
    def _own(cls, kept: dict[str, str]) -> dict[str, Any]:
        return {
            "parts": {"all": float(kept["seconds_predicted"])} if kept["seconds_predicted"] else {},
            "compute": float(kept["seconds_compute"]),
            "nodes": int(kept["nodes"]),
            "ranks_per_node": int(kept["ranks_per_node"]),
            "accumulation": int(kept["accumulation"]),
            "blocks": int(kept["blocks"]),
            "ratio": float(kept["wire_of_compute"]),
            "payload_mbit": float(kept["payload_mbit"]),
        }


def read(path: Path = KEPT) -> list[OverlapRow]:
    """Return the last that a file has of each setting, compute and method."""
    return read_last(path, OverlapRow, lambda row: (row.setting, row.ratio, row.method))
