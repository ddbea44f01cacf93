# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""How near ``plan --from`` is: records at 500 Mbit/s, predicts 100 Mbit/s and 1 Gbit/s, and measures both.

    python -m tests.perf.what_if --csv tests/perf/results/what_if.csv

Two emulated nodes of two ranks, each with a report of its own; from the report of ZeRO-3, all other methods are
predicted as well. The links' figures are those of payload: a frame of 1514 bytes carries 1448. Needs what
``tests.perf.cluster`` needs. Exit status 0 if four of five methods are within 10 % at both rates by their own reports.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from deepspeed_ext.strategy import StateBytes
from deepspeed_ext.tools.plan.recorded import Recorded
from deepspeed_ext.tools.plan.what_if import WhatIf
from deepspeed_ext.tools.report.contents import make
from scripts.emulation.cluster import collect
from scripts.emulation.launching import start_rank
from tests.perf.lib import records
from tests.perf.lib.measurements import BlocksMeasurement
from tests.perf.lib.peers import Method
from tests.perf.lib.recorded import recorded_turn
from tests.perf.lib.records import Row, Table, rate_name, seconds_of
from tests.perf.lib.settings import BLOCKS
from tests.perf.lib.timeline import FRAME
from tests.perf.lib.turns import Turn

AT, ELSEWHERE = 500.0, (100.0, 1000.0)  # Mbit/s
STOCK = "ZeRO-3"
METHODS = (STOCK, "ZeRO-1", "NIG", "IIG", "NIG + LoCo")
NEAR, ENOUGH = 0.1, 4
SOURCES = {"own": "its own report", "plain": f"a report of {STOCK}"}


class WhatIfMeasurement(BlocksMeasurement):
    """Steps at the rates of ``ELSEWHERE``, beside what reports at ``AT`` predict."""

    probes = False

    def points(self) -> list[tuple[float | None, dict[str, Any]]]:
        self.turns.limit(AT)
        self._recorded = {name: self._record(method) for name, method in self.made.items()}
        return [(mbit, {}) for mbit in ELSEWHERE]

    def turn(self, method: Method) -> Turn:
        return self.turns.steps_in_a_row(method, self.args.steps)

    def _record(self, method: Any) -> Recorded:
        """Return what a report has of a method. Collective."""
        _, steps = recorded_turn(method, self.turn, self.setting.ranks_per_node)
        report = [make(method.engine, steps[-self.args.steps :], [], StateBytes(0, 0, 0), True)]
        dist.broadcast_object_list(report)
        assert report[0] is not None
        return Recorded.of(report[0])

    def complete(self, row: Row, rates: Any) -> None:
        super().complete(row, rates)
        own = self._recorded[row.method]
        row.more |= {"seconds_recorded": own.step, "seconds_unexplained": own.unexplained}
        for source, recorded in (("own", own), ("plain", self._recorded[STOCK])):
            cluster = replace(recorded.described.cluster, inter_gbps=(row.mbit or 0) / 1000 / FRAME)
            found = WhatIf(recorded, cluster, recorded.described.model)
            seconds = next(o.seconds for o in found.rows if o.prediction.name == row.method and 8 not in o.bits)
            row.more |= {f"seconds_predicted_{source}": seconds, f"error_{source}": seconds / row.median - 1}

    @classmethod
    def table(cls, rows: Sequence[Row]) -> Table:
        header = ["Mbit/s", "", "a step, s", *(f"predicted from {said}" for said in SOURCES.values())]
        lines = [[rate_name(row.mbit), row.method, seconds_of(row.median)] for row in rows]
        for row, line in zip(rows, lines, strict=True):
            for one in SOURCES:
                line.append(f"{seconds_of(row.more[f'seconds_predicted_{one}'])} ({row.more[f'error_{one}']:+.0%})")
        return header, lines

    @classmethod
    def missed(cls, rows: Sequence[Row]) -> list[str]:
        """Return the methods that are not predicted well enough from their own reports, if they are too many."""
        far = {row.method for row in rows if abs(row.more["error_own"]) > NEAR}
        return [f"{name}: more than {NEAR:.0%} apart" for name in far] if len(METHODS) - len(far) < ENOUGH else []


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare predictions from reports to measured steps.")
    parser.add_argument("--setting", choices=BLOCKS, default="2x2-large-4")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each method")
    parser.add_argument("--steps", type=int, default=2, help="of a turn, and that are recorded")
    parser.add_argument("--log", type=Path, default=Path("what_if.log"), help="what the ranks print")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that all may take")
    parser.add_argument("--csv", type=Path, help="append a row a result here")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # a rank, and where it reports
    args = parser.parse_args()
    args.methods, setting = METHODS, BLOCKS[args.setting]
    if args.worker is not None:
        first = start_rank()
        rows = WhatIfMeasurement(setting, args).measure()
        if first:
            args.worker.write_text(json.dumps([asdict(row) for row in rows]))
        dist.destroy_process_group()
        return 0
    found = collect(setting.nodes, setting.ranks_per_node, __spec__.name, args.log, args.timeout)
    rows = [Row(**values) for values in found]
    print(f"\n{args.setting}, recorded at {AT:g} Mbit/s\n{records.markdown(WhatIfMeasurement.table(rows))}")
    problems, missed = WhatIfMeasurement.problems(rows), WhatIfMeasurement.missed(rows)
    print("".join(f"FAIL: {line}\n" for line in problems) + "".join(f"MISSED: {line}\n" for line in missed))
    if args.csv is not None and not problems:
        records.append_rows(args.csv, [row.to_csv() for row in rows])
    return int(bool(problems or missed))


if __name__ == "__main__":
    sys.exit(main())
