# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A report of steps beside what is measured without one: what of a step is exposed, and what recording costs.

In a report, exposed is what is left of a step beside compute and the update: what waits for the links, and what
handles and copies what communicates.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch.distributed as dist

from deepspeed_ext.planner.rates import Rates
from deepspeed_ext.tools.clocks import HostClock
from deepspeed_ext.tools.report import measures
from deepspeed_ext.tools.report.measures import BETWEEN, WITHIN, Step, hop_of
from deepspeed_ext.tools.report.recorder import Recorder
from deepspeed_ext.tools.report.reporter import attach
from tests.perf.lib.measurements import OverlapMeasurement
from tests.perf.lib.peers import Method
from tests.perf.lib.records import Row, spread
from tests.perf.lib.turns import Turn, over_ranks


class RecordedMeasurement(OverlapMeasurement):
    """Steps with and without a recorder, in turns."""

    file = "report_accuracy.csv"
    usual = ("2x2-4",)
    methods = ("ZeRO-2", "ZeRO-3", "NIG", "IIG")
    rounds, steps = 4, 3
    keys: ClassVar[Mapping[str, Any]] = {}
    agrees: ClassVar = {"ZeRO-2": 0.03, "ZeRO-3": 0.03, "NIG": 0.03, "IIG": 0.05}
    overhead = 0.01

    def round(self, number: int, rows: Mapping[str, Row]) -> float:
        if number == 0:
            self._seconds: dict[str, list[float]] = {name: [] for name in rows}
            self._parts: dict[str, list[dict[str, float]]] = {name: [] for name in rows}
        compute = super().round(number, rows)
        for name in rows:
            self._record(name)
        return compute

    def _record(self, name: str) -> None:
        """Take a turn with a recorder."""
        turn, steps = recorded_turn(self.made[name], self.turn, self.setting.ranks_per_node)
        self._seconds[name] += turn.seconds
        self._parts[name] += map(measures.parts, steps[-self.args.steps :])

    def complete(self, row: Row, rates: Rates | None) -> None:
        means = [statistics.fmean(parts[name] for parts in self._parts[row.method]) for name in measures.PARTS]
        told = [value / dist.get_world_size() for value in over_ranks(means, dist.ReduceOp.SUM)]
        recorded = self._seconds[row.method]
        row.more |= spread("seconds_recorded", recorded)
        row.more |= {f"seconds_told_{part}": value for part, value in zip(measures.PARTS, told, strict=True)}
        taken = statistics.median(recorded) - row.compute  # exposed, of the steps that were recorded
        exposed = sum(row.more[f"seconds_told_{part}"] for part in (WITHIN, BETWEEN, measures.OTHER))
        row.more |= {"seconds_exposed_recorded": taken, "error": exposed / taken - 1}
        row.more["overhead"] = statistics.median(recorded) / row.median - 1

    @classmethod
    def missed(cls, rows: Sequence[Row]) -> list[str]:
        """Return methods whose reports are too far from what was measured, or cost too much."""
        return [
            f"{row.method}: exposed {row.more['error']:+.1%} apart, overhead {row.more['overhead']:+.1%}"
            for row in rows
            if abs(row.more["error"]) > cls.agrees[row.method] or row.more["overhead"] > cls.overhead
        ]


def recorded_turn(method: Any, turn: Callable[[Method], Turn], ranks_per_node: int) -> tuple[Turn, list[Step]]:
    """Return a turn of one of DeepSpeed's methods, and what a recorder has of its steps."""

    def hop(group: Any) -> str:
        return hop_of(dist.get_process_group_ranks(dist.group.WORLD if group is None else group), ranks_per_node)

    recorder, step = Recorder(HostClock(), hop), method.step

    def counted(*args: Any, **kwargs: Any) -> None:
        step(*args, **kwargs)
        recorder.end_step(1)

    with attach(recorder, method.engine):
        method.step = counted
        try:
            return turn(method), recorder.steps()
        finally:
            del method.step
