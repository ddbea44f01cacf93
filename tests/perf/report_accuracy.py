# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Whether a report of a step says what is exposed, and what recording costs: beside what ``overlap.py`` measures.

    python -m tests.perf.report_accuracy --csv tests/perf/results/report_accuracy.csv

The same models on the same emulated clusters, with compute that sleeps. Each method takes steps with and without a
recorder in turns. What ``overlap.py`` calls exposed is what a step takes more than one without communication. In a
report it is what is left of a step beside compute and the update: what waits for the links, and what handles and
copies what communicates.

Needs root, and ``ip`` and ``tc`` of iproute2. One launch for each setting, of some minutes.

Exit status 0 if both agree within 5 %, and recorded steps take at most 1 % longer than others; 1 if not; 2 if it could
not run.
"""

import argparse
import functools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

from deepspeed_ext.clocks import HostClock
from deepspeed_ext.report import measures
from deepspeed_ext.report.hooks import recorded_by
from deepspeed_ext.report.recorder import Recorder
from deepspeed_ext.report.recording import BETWEEN, WITHIN, Step, hop_of
from tests.perf.lib.blocks import Pauses, make_blocks
from tests.perf.lib.cluster_rows import MethodRow
from tests.perf.lib.overlap_rows import BLOCK, HIDDEN, SETTINGS, WIDTH, OverlapSetting
from tests.perf.lib.peers import PEERS, Method, Workload
from tests.perf.lib.settings import add_arguments, require_positive, run_what_is_promised
from tests.perf.lib.side_by_side import SideBySide
from tests.perf.lib.turns import Turn, over_ranks

METHODS = ("ZeRO-2", "ZeRO-3", "NIG", "IIG")
AGREES = 0.05
OVERHEAD = 0.01


@dataclass
class AccuracyRow(MethodRow):
    """What one method took; ``MethodRow.seconds`` are of steps without a recorder.

    Attributes:
        recorded: seconds of steps with one.
        parts_recorded: seconds of a recorded step by part, in the mean over steps and ranks.
    """

    recorded: list[float] = field(default_factory=list)
    parts_recorded: dict[str, float] = field(default_factory=dict)

    @property
    def told(self) -> float:
        """Return the exposed seconds of the report."""
        return sum(self.parts_recorded[part] for part in (WITHIN, BETWEEN, measures.OTHER))

    @property
    def taken(self) -> float:
        """Return what ``overlap.py`` calls exposed, of the steps that were recorded."""
        return statistics.median(self.recorded) - self.compute

    @property
    def error(self) -> float:
        """Return how far the report is from that, relative to it."""
        return self.told / self.taken - 1

    @property
    def overhead(self) -> float:
        """Return what recorded steps take more."""
        return statistics.median(self.recorded) / self.median - 1

    def to_csv(self) -> dict[str, Any]:
        seconds = {
            **self.spread,
            "compute_alone": self.compute,
            "exposed": self.exposed,
            "exposed_recorded": self.taken,
            "recorded_median": statistics.median(self.recorded),
            "recorded_min": min(self.recorded),
            "recorded_max": max(self.recorded),
            **{f"told_{part}": value for part, value in self.parts_recorded.items()},
        }
        return {
            "setting": self.setting,
            "link_mbit": self.mbit,
            "method": self.method,
            "setup": self.setup,
            "steps": len(self.seconds),
            **{f"seconds_{name}": round(value, 5) for name, value in seconds.items()},
            "error": round(self.error, 4),
            "overhead": round(self.overhead, 4),
            "stolen_median": round(self.stolen_median, 3),
        }


# What runs in the ranks ###########################################################################


class Worker:
    """What a rank needs to measure one setting."""

    def __init__(self, setting: OverlapSetting, args: argparse.Namespace) -> None:
        self._setting, self._args = setting, args
        pauses = Pauses()
        make_model = functools.partial(make_blocks, setting.blocks, WIDTH, HIDDEN, pauses)
        workload = Workload.overlapping(setting.accumulation, setting.ranks_per_node, make_model, BLOCK)
        self._ranks = SideBySide(args.methods, workload, WIDTH, {}, {"streams": False, "overlap": True})
        self._pauses = pauses

    def rows(self) -> list[AccuracyRow]:
        """Measure."""
        ranks, setting = self._ranks, self._setting
        ranks.warm_up()
        ranks.link.limit(setting.mbit)
        emulated = setting.compute(self._args.ratio)
        self._pauses.forward = emulated.forward / setting.blocks
        self._pauses.backward = emulated.backward / setting.blocks
        dist.barrier()
        rows = {
            name: AccuracyRow(setting.name, setting.mbit, name, method.setup) for name, method in ranks.methods.items()
        }
        turn = functools.partial(ranks.steps_in_a_row, count=self._args.steps)
        parts: dict[str, list[dict[str, float]]] = {name: [] for name in rows}
        compute = []
        for number in tqdm(range(self._args.rounds), desc=setting.name, disable=dist.get_rank() != 0):
            compute.append(ranks.one_round(number, dict(rows), turn))
            for name, row in rows.items():
                seconds, steps = self._recorded(ranks.methods[name], turn)
                row.recorded += seconds
                parts[name] += map(measures.parts, steps)
        for name, row in rows.items():
            row.compute = statistics.median(compute)
            means = [statistics.fmean(one[part] for one in parts[name]) for part in measures.PARTS]
            summed = over_ranks(means, dist.ReduceOp.SUM)
            row.parts_recorded = {
                part: value / dist.get_world_size() for part, value in zip(measures.PARTS, summed, strict=True)
            }
        return list(rows.values())

    def _recorded(self, method: Method, turn: Any) -> tuple[list[float], list[Step]]:
        """Take a turn with a recorder; return seconds of steps, and what was recorded of them."""
        recorder = Recorder(HostClock(), self._hop_of)
        step = method.step

        def counted(*args: Any, **kwargs: Any) -> None:
            step(*args, **kwargs)
            recorder.step_ends(1)

        with recorded_by(recorder, method.engine):
            method.step = counted
            try:
                found: Turn = turn(method)
            finally:
                del method.step
        return found.seconds, recorder.steps()[-self._args.steps :]

    def _hop_of(self, group: Any) -> str:
        ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        return hop_of(ranks, self._setting.ranks_per_node)


# What starts them #################################################################################


def print_all(rows: Sequence[AccuracyRow]) -> bool:
    """Print a table; nothing in it is wrong by itself."""
    print(f"\n{rows[0].setting}; a step without communication takes {rows[0].compute:.3f} s")
    parts = [f"told: {part}" for part in measures.PARTS]
    header = ("a step", "recorded", "exposed of it", *parts, "exposed, told", "apart", "overhead")
    print(f"{'':<10}" + "".join(f"{title:>16}" for title in header))
    for row in rows:
        recorded = statistics.median(row.recorded)
        figures = (row.median, recorded, row.taken, *(row.parts_recorded[part] for part in measures.PARTS), row.told)
        cells = [*(f"{figure:.3f}" for figure in figures), f"{row.error:+.1%}", f"{row.overhead:+.1%}"]
        print(f"{row.method:<10}" + "".join(f"{cell:>16}" for cell in cells))
    return False


def missed(rows: Sequence[AccuracyRow]) -> list[str]:
    """Return what is said of methods whose reports are too far from what was measured, or cost too much."""
    wrong = [row for row in rows if abs(row.error) > AGREES or row.overhead > OVERHEAD]
    return [f"{row.method}: exposed {row.error:+.1%} apart, overhead {row.overhead:+.1%}" for row in wrong]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare what a report says is exposed with what a step takes more.")
    add_arguments(parser, "report_accuracy", SETTINGS, [*PEERS, *METHODS])
    parser.set_defaults(settings=["2x2-4"], methods=list(METHODS))
    parser.add_argument("--ratio", type=float, default=1.0, help="of two hops of the model to a micro-batch's compute")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each method")
    parser.add_argument("--steps", type=int, default=3, help="of a turn that are timed, after one that is not")
    args = parser.parse_args()
    require_positive(parser, args, "rounds", "steps", "ratio")
    return args


def main() -> int:
    args = parse_arguments()
    measure = lambda: Worker(SETTINGS[args.setting], args).rows()  # noqa: E731
    return run_what_is_promised(args, __spec__.name, SETTINGS, AccuracyRow, measure, print_all, missed)


if __name__ == "__main__":
    sys.exit(main())
