# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Reports of steps compared with measurements: exposed communication, the cost of recording, and predictions. Exposed
time is a step's time beyond compute: in a report, the sum of all other parts."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch.distributed as dist

from deepspeed_ext.planner.rates import Rates
from deepspeed_ext.strategy import StateBytes
from deepspeed_ext.tools.clocks import HostClock
from deepspeed_ext.tools.plan.recorded_training import RecordedTraining
from deepspeed_ext.tools.plan.what_if import WhatIf
from deepspeed_ext.tools.report import measures
from deepspeed_ext.tools.report.contents import build_report
from deepspeed_ext.tools.report.measures import Step, hop_of
from deepspeed_ext.tools.report.recorder import Recorder
from deepspeed_ext.tools.report.reporter import attach
from tests.harness import calls
from tests.perf.lib.measurements import BlocksMeasurement, OverlapMeasurement
from tests.perf.lib.peers import Method
from tests.perf.lib.records import Row, Table, rate_name, seconds_of, spread
from tests.perf.lib.timeline import FRAME
from tests.perf.lib.turns import Turn, over_ranks

AT, ELSEWHERE = 500.0, (100.0, 1000.0)  # Mbit/s at which predictions are recorded, and of which they are
STOCK, NEAR, ENOUGH = "ZeRO-3", 0.1, 4
SOURCES = {"own": "its own report", "plain": f"a report of {STOCK}"}


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
        turn, steps = recorded_turn(self.made[name], self.turn, self.setting.ranks_per_node)
        self._seconds[name] += turn.seconds
        self._parts[name] += map(measures.step_parts, steps[-self.args.steps :])

    def complete(self, row: Row, rates: Rates | None) -> None:
        means = [statistics.fmean(parts[name] for parts in self._parts[row.method]) for name in measures.PARTS]
        reported = [value / dist.get_world_size() for value in over_ranks(means, dist.ReduceOp.SUM)]
        recorded = self._seconds[row.method]
        row.more |= spread("seconds_recorded", recorded)
        row.more |= {f"seconds_told_{part}": value for part, value in zip(measures.PARTS, reported, strict=True)}
        measured_exposed = statistics.median(recorded) - row.compute  # exposed, of the steps that were recorded
        exposed = sum(reported) - row.more[f"seconds_told_{measures.COMPUTE}"]
        row.more |= {"seconds_exposed_recorded": measured_exposed, "error": exposed / measured_exposed - 1}
        row.more["overhead"] = statistics.median(recorded) / row.median - 1

    @classmethod
    def missed(cls, rows: Sequence[Row]) -> list[str]:
        """Return methods whose reports differ too much from measurements, or cost too much."""
        return [
            f"{row.method}: exposed {row.more['error']:+.1%} apart, overhead {row.more['overhead']:+.1%}"
            for row in rows
            if abs(row.more["error"]) > cls.agrees[row.method] or row.more["overhead"] > cls.overhead
        ]


def recorded_turn(method: Any, turn: Callable[[Method], Turn], ranks_per_node: int) -> tuple[Turn, list[Step]]:
    """Return a turn of one of DeepSpeed's methods, and the recorder's report of its steps."""

    def hop(group: Any) -> str:
        return hop_of(dist.get_process_group_ranks(dist.group.WORLD if group is None else group), ranks_per_node)

    recorder = Recorder(HostClock(), hop)
    with attach(recorder, method.engine), calls.after(method, "step", lambda *_, **__: recorder.end_step(1)):
        return turn(method), recorder.steps()


class WhatIfMeasurement(BlocksMeasurement):
    """Accuracy of ``plan --from``: steps at the rates of ``ELSEWHERE``, compared with predictions from reports at
    ``AT``. From the report of ZeRO-3, all other methods are predicted as well. Rates of links are those of payload: a
    frame of 1514 bytes carries 1448."""

    usual = ("2x2-small-4",)
    file = "what_if.csv"
    methods = (STOCK, "ZeRO-1", "NIG", "IIG", "NIG + LoCo")
    steps = 2
    probes = False

    def points(self) -> list[tuple[float | None, dict[str, Any]]]:
        self.turns.limit(AT)
        self._recorded = {name: self._record(method) for name, method in self.made.items()}
        return [(mbit, {}) for mbit in ELSEWHERE]

    def turn(self, method: Method) -> Turn:
        return self.turns.steps_in_a_row(method, self.args.steps)

    def _record(self, method: Any) -> RecordedTraining:
        """Return the report of a method. Collective."""
        _, steps = recorded_turn(method, self.turn, self.setting.ranks_per_node)
        report = [build_report(method.engine, steps[-self.args.steps :], [], StateBytes(0, 0, 0), True)]
        dist.broadcast_object_list(report)
        assert report[0] is not None
        return RecordedTraining.from_report(report[0])

    def complete(self, row: Row, rates: Any) -> None:
        super().complete(row, rates)
        own = self._recorded[row.method]
        row.more |= {"seconds_recorded": own.step, "seconds_unexplained": own.unexplained_seconds}
        for source, recorded in (("own", own), ("plain", self._recorded[STOCK])):
            cluster = replace(recorded.planner_input.cluster, inter_gbps=(row.mbit or 0) / 1000 / FRAME)
            what_if = WhatIf(recorded, cluster, recorded.planner_input.model)
            seconds = next(o.seconds for o in what_if.rows if o.prediction.name == row.method and 8 not in o.bits)
            row.more |= {f"seconds_predicted_{source}": seconds, f"error_{source}": seconds / row.median - 1}

    @classmethod
    def table(cls, rows: Sequence[Row]) -> Table:
        header = ["Mbit/s", "", "a step, s", *(f"predicted from {source}" for source in SOURCES.values())]
        lines = [[rate_name(row.mbit), row.method, seconds_of(row.median)] for row in rows]
        for row, line in zip(rows, lines, strict=True):
            for of in SOURCES:
                line.append(f"{seconds_of(row.more[f'seconds_predicted_{of}'])} ({row.more[f'error_{of}']:+.0%})")
        return header, lines

    @classmethod
    def missed(cls, rows: Sequence[Row]) -> list[str]:
        """Return the methods that are not predicted well by their own reports, if fewer than ``ENOUGH`` are."""
        far = {row.method for row in rows if abs(row.more["error_own"]) > NEAR}
        return [f"{name}: more than {NEAR:.0%} apart" for name in far] if len(cls.methods) - len(far) < ENOUGH else []
