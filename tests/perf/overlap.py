# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What of the communication between nodes hides under compute: all 14 strategies beside their peers.

    python -m tests.perf.overlap --csv tests/perf/results/overlap.csv

Compute is emulated: each block sleeps in its forward and, twice as long, in its backward, which leaves the cores to
the transport as a GPU does. So are the nodes, by network namespaces whose links have a limited rate
(``scripts/emulation``). With W the seconds in which such a link carries two hops of the whole model, blocks sleep so
long that W is 0.5, 1 and 2 times the compute of a micro-batch.

All methods train the same model on the same data from the same seed in the same processes, and take turns, as in
``emulated_cluster.py``. A turn is some steps in a row, without a barrier, of which the first one is not timed: what a
step leaves under way is for the next one to wait for. Buckets have the size of a block, and overlap is switched on,
for all methods.

For each method: seconds of a step; those that a link is occupied (of strategies by the formula, of peers by the
interface's counters); what of them is exposed, that is what a step takes more than without communication; and the
bound of Note [The bound of a step], once with the emulated compute and once with a step without communication as it
was measured: its forward and backward, and an update of 1/n of the parameters. For the strategies also what the
planner predicts, from rates of the same links and from that compute.

gloo's collectives run on the host: a method that waits for one, where on a GPU a stream would, hides nothing. That is
so for FSDP2's and for ZeRO's reductions. So beside each peer stands also what it would take if it hid all that it can.

Needs root, and ``ip`` and ``tc`` of iproute2. One launch for each setting, of some minutes for each compute.

Exit status 0 if weights agree and the strategies' bytes are those of the formula, 1 if not, 2 if it could not run.
"""

import argparse
import functools
import statistics
import sys
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from tqdm import tqdm

from deepspeed_ext.planner import probe
from deepspeed_ext.planner.rates import Rates
from deepspeed_ext.strategy import STRATEGIES
from tests.perf.lib import overlap_verdict
from tests.perf.lib.blocks import Pauses, make_blocks
from tests.perf.lib.overlap_rows import BLOCK, HIDDEN, RATIOS, SETTINGS, WIDTH, OverlapRow, OverlapSetting
from tests.perf.lib.peers import PEERS, Workload
from tests.perf.lib.settings import add_arguments, require_positive, run
from tests.perf.lib.side_by_side import SideBySide

OURS = {"paro_overlap_updates": True}


# What runs in the ranks ###########################################################################


class Worker:
    """What a rank needs to measure one setting."""

    def __init__(self, setting: OverlapSetting, args: argparse.Namespace) -> None:
        self._setting, self._args = setting, args
        self._pauses = Pauses()
        make_model = functools.partial(make_blocks, setting.blocks, WIDTH, HIDDEN, self._pauses)
        workload = Workload.overlapping(setting.accumulation, setting.ranks_per_node, make_model, BLOCK)
        streams = not get_accelerator().is_synchronized_device()
        described = {"streams": streams, "overlap": True, "overlap_updates": True}
        self._side_by_side = SideBySide(args.methods, workload, WIDTH, OURS, described)

    def rows(self) -> list[OverlapRow]:
        """Measure with each compute."""
        ranks = self._side_by_side
        held = ranks.warm_up()
        ranks.link.limit(self._setting.mbit)
        dist.barrier()
        headers, rates = ranks.headers(), probe.measure(ranks.topology)
        rows = []
        total = len(self._args.ratios) * self._args.rounds
        bar = tqdm(total=total, desc=self._setting.name, disable=dist.get_rank() != 0)
        for ratio in self._args.ratios:
            rows += self._at(ratio, rates, bar)
        differences = ranks.compare()
        for row in rows:
            row.headers, row.held, row.difference = headers, held[row.method], differences[row.method]
        return rows

    def _at(self, ratio: float, rates: Rates, bar: Any) -> list[OverlapRow]:
        ranks, setting = self._side_by_side, self._setting
        emulated = setting.compute(ratio)
        self._pauses.forward = emulated.forward / setting.blocks
        self._pauses.backward = emulated.backward / setting.blocks
        described = {key: value for key, value in asdict(setting).items() if key != "mbit"}
        rows = {
            name: OverlapRow(setting.name, setting.mbit, name, method.setup, **described, ratio=ratio)
            for name, method in ranks.methods.items()
        }
        compute = []
        for number in range(self._args.rounds):
            turn = functools.partial(ranks.steps_in_a_row, count=self._args.steps)
            compute.append(ranks.one_round(number, rows, turn))
            bar.update()
        alone = statistics.median(compute)
        payload = rates.gather.inter.bandwidth * setting.ranks_per_node * 8 / 1e6
        for row in rows.values():
            row.compute, row.payload_mbit = alone, payload
        ranks.predict(rows, alone, rates)
        for row in rows.values():
            if row.formula_bytes is not None:
                row.formula_bytes -= row.kept_bytes()
        return list(rows.values())


# What starts them #################################################################################


def _setting(name: str, args: argparse.Namespace) -> OverlapSetting:
    setting = SETTINGS[name]
    return replace(setting, blocks=args.blocks, mbit=args.mbit or setting.mbit)


def parse_arguments() -> argparse.Namespace:
    everything = [*PEERS, *STRATEGIES]
    parser = argparse.ArgumentParser(description="Measure what of a step's communication hides under compute.")
    add_arguments(parser, "overlap", SETTINGS, everything)
    parser.add_argument("--ratios", nargs="+", type=float, default=RATIOS, help="of W to compute of a micro-batch")
    parser.add_argument("--blocks", type=int, default=OverlapSetting.blocks, help="of the model")
    parser.add_argument("--mbit", type=float, help="of a node's link, in place of the settings'")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each method with each compute")
    parser.add_argument("--steps", type=int, default=2, help="of a turn that are timed, behind one that is not")
    args = parser.parse_args()
    require_positive(parser, args, "rounds", "steps", "blocks", "mbit", "ratios")
    return args


def main() -> int:
    args = parse_arguments()
    return run(
        args,
        __spec__.name,
        SETTINGS,
        OverlapRow,
        lambda: Worker(_setting(args.setting, args), args).rows(),
        overlap_verdict.print_all,
    )


if __name__ == "__main__":
    sys.exit(main())
