# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""An outer optimizer between two nodes, beside what crosses in every step, over links of 5 Mbit/s and more.

    python -m tests.perf.outer_cluster --csv tests/perf/results/outer_cluster.csv

Nodes and compute are emulated, as in ``overlap.py``. Methods take turns. A turn of one with an outer optimizer is a
period of H steps that is not timed, and one that is: its step is the mean of these. No fragment is on its way where a
turn begins or ends. A turn of another one is some steps behind one that is not timed.

For each method: seconds of a step; what of them is exposed, that is what a step takes more than without communication;
and the bytes that a node has sent in a step, over whole periods, by its interface. Those of the outer optimizers and
of NIG are compared with the formula, and the weights of III and of its peer after one period without few bits.

Needs root, and ``ip`` and ``tc`` of iproute2. One launch for each rate, of which each appends its rows at its end.

Exit status 0 if weights agree and bytes are those of the formula, 1 if not, 2 if it could not run.
"""

import argparse
import functools
import statistics
import sys
from collections.abc import Sequence

import torch.distributed as dist
from tqdm import tqdm

from deepspeed_ext.loco.settings import LocoSettings, UpdateSettings
from deepspeed_ext.planner.compression import Compression
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates
from tests.perf.lib.blocks import Pauses, make_blocks
from tests.perf.lib.outer_cluster_rows import (
    BACKWARD,
    EVERY_STEP,
    EXACT,
    HIDDEN,
    METHODS,
    OUTER,
    PEER,
    SETTINGS,
    WIDTH,
    OuterRow,
    OuterSetting,
)
from tests.perf.lib.peers import Method, Ours, OuterFSDP2, Workload
from tests.perf.lib.settings import add_arguments, require_positive, run
from tests.perf.lib.side_by_side import WARM_UP_STEPS, SideBySide
from tests.perf.lib.turns import Turn

BLOCK = 2 * WIDTH * HIDDEN
BOUND, PARITY = 0.02, 1e-4  # of bytes; of the largest weight
SGD = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
ALIGNED = 2  # steps into a period where turns begin: what has left at its end is used before
ELEMENT = {4: 0.5 + 2 / 128, 32: 4.0}  # bytes that cross


# What runs in the ranks ###########################################################################


class Worker:
    """What a rank needs to measure one setting."""

    def __init__(self, setting: OuterSetting, args: argparse.Namespace) -> None:
        self._setting, self._args = setting, args
        self._pauses = Pauses()
        make_model = functools.partial(make_blocks, args.blocks, WIDTH, HIDDEN, self._pauses)
        workload = Workload.overlapping(1, setting.ranks_per_node, make_model, BLOCK)
        every_step = [name for name in args.methods if name not in OUTER and name != PEER]
        self._ranks = SideBySide(every_step, workload, WIDTH, {"paro_overlap_updates": True}, {})
        for name in args.methods:
            if name in OUTER:
                section = {"steps": args.every, **SGD, **OUTER[name]}
                zero = {"paro_strategy": "III", "paro_group_size": setting.ranks_per_node}
                self._ranks.methods[name] = Ours(workload, {**zero, "paro_outer_optimizer": section}, name)
            elif name == PEER:
                self._ranks.methods[name] = OuterFSDP2(workload, name, args.every, SGD)

    def rows(self) -> list[OuterRow]:
        """Measure."""
        ranks, setting, args = self._ranks, self._setting, self._args
        held = ranks.warm_up()
        outer = {name: method for name, method in ranks.methods.items() if name in OUTER or name == PEER}
        for method in outer.values():
            ranks.take(method, args.every - WARM_UP_STEPS)
        apart = self._differences(outer)
        for method in outer.values():
            ranks.take(method, ALIGNED)
        forward = args.pause / args.blocks / (1 + BACKWARD)
        self._pauses.forward, self._pauses.backward = forward, BACKWARD * forward
        ranks.link.limit(setting.mbit)
        dist.barrier()
        rows = {
            name: OuterRow(setting.name, setting.mbit, name, method.setup, held=held[name])
            for name, method in ranks.methods.items()
        }
        compute = []
        for number in tqdm(range(args.rounds), desc=setting.name, disable=dist.get_rank() != 0):
            compute.append(ranks.one_round(number, dict(rows), self._turn))
        for name, row in rows.items():
            row.headers, row.compute, row.formula_bytes = ranks.headers(), statistics.median(compute), self._due(name)
            row.blocks, row.pause, row.every = args.blocks, args.pause, args.every
            row.timed, row.difference = args.every if name in outer else args.steps, apart.get(name, 0.0)
        return list(rows.values())

    def _turn(self, method: Method) -> Turn:
        if method.name not in OUTER and method.name != PEER:
            return self._ranks.steps_in_a_row(method, self._args.steps)
        turn = self._ranks.steps_in_a_row(method, self._args.every, self._args.every)
        return turn._replace(seconds=[statistics.mean(turn.seconds)])

    def _differences(self, outer: dict[str, Method]) -> dict[str, float]:
        """Return how far outer weights are from the peer's, relative to the largest of these."""
        if PEER not in outer:
            return {}
        peers = outer[PEER].weights()
        return {
            name: ((method.weights() - peers).abs().max() / peers.abs().max()).item() for name, method in outer.items()
        }

    def _due(self, name: str) -> float | None:
        """Return the bytes that a node must receive in a step, by the formula."""
        nodes, numel = self._setting.nodes, self._args.blocks * BLOCK
        if name in OUTER or name == PEER:
            bits = OUTER.get(name, {"bits": 32})["bits"]
            return 2 * (nodes - 1) / nodes * numel * ELEMENT[bits] / self._args.every
        if name != EVERY_STEP:
            return None
        sizes = GroupSizes(nodes * self._setting.ranks_per_node, self._setting.ranks_per_node)
        sent = Compression(LocoSettings(), UpdateSettings())
        phases = STRATEGIES["NIG"].phases(sizes, ModelStates.of(numel, parameter_bytes=4, gradient_bytes=4))
        return sum(sent.volume(phase, 4, 4).inter for phase in phases) * sizes.group_size


# What starts them #################################################################################


def print_all(rows: Sequence[OuterRow]) -> bool:
    """Print a table; whether methods trained differently, or sent other bytes than they must."""
    first = rows[0]
    print(
        f"\n{first.setting}: {first.blocks} blocks of {BLOCK:,} parameters, H = {first.every}; a step sleeps for "
        f"{first.pause:.3f} s, and takes {first.compute:.3f} s without communication"
    )
    print(
        f"{'':<22}{'seconds (min .. max)':>26}{'exposed':>9}{'kB sent':>10}{'formula':>10}{'MB held':>9}{'apart':>9}"
    )
    failed = False
    for row in sorted(rows, key=lambda row: row.median):
        spread = f"{row.median:.3f} ({min(row.seconds):.3f} .. {max(row.seconds):.3f})"
        due = "" if row.formula_bytes is None else f"{row.formula_bytes / 1e3:.1f}"
        print(
            f"{row.method:<22}{spread:>26}{row.exposed:>9.3f}{row.bytes_between / 1e3:>10.1f}{due:>10}"
            f"{row.memory / 1e6:>9.1f}{row.difference:>9.1e}"
        )
        if row.formula_bytes is not None and abs(row.bytes_between / row.formula_bytes - 1) > BOUND:
            print(f"  FAIL: {row.method} sends {row.bytes_between / row.formula_bytes:.3f} of the formula's bytes")
            failed = True
        if row.method == EXACT and not row.difference < PARITY:
            print(f"  FAIL: {row.method} is {row.difference:.1e} from {PEER}")
            failed = True
    return failed


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure an outer optimizer beside what crosses in every step.")
    add_arguments(parser, "outer_cluster", SETTINGS, METHODS)
    parser.add_argument("--blocks", type=int, default=4, help="of the model")
    parser.add_argument("--pause", type=float, default=0.08, help="seconds that a step sleeps")
    parser.add_argument("--every", type=int, default=30, help="H")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each method")
    parser.add_argument("--steps", type=int, default=1, help="of a turn without an outer optimizer that are timed")
    args = parser.parse_args()
    require_positive(parser, args, "blocks", "rounds", "steps", "pause")
    if args.every < 15:
        parser.error(f"--every must be at least 15, got {args.every}")
    return args


def main() -> int:
    args = parse_arguments()
    return run(args, __spec__.name, SETTINGS, OuterRow, lambda: Worker(SETTINGS[args.setting], args).rows(), print_all)


if __name__ == "__main__":
    sys.exit(main())
