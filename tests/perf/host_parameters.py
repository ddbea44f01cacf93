# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Parameters in host memory: ING and IIG beside GNG, GGG and stock ZeRO-3, all with ``offload_param``.

    python -m tests.perf.host_parameters --csv tests/perf/results/host_parameters.csv

For models that the devices do not hold: two emulated nodes of two ranks (``scripts/emulation``), in full training and
in training of LoRA adapters beside a frozen base; with LoRA also of a smaller model over slower links. Methods take
turns in the same processes, as in ``emulated_cluster.py``, and a step's time is that of the slowest rank.

On a CPU the host and the device have the same memory. So each copy between them makes its rank sleep for as long as
its bytes would take over PCIe (``lib/pcie.py``), and no compute or communication of that rank goes on meanwhile. By
default that is 25 GB/s, PCIe 4.0 x16: 2,000 times the rate of a link of 100 Mbit/s between nodes.

For each method: seconds of a step; the bytes that a node has sent in it, by its interface; those that a rank has
copied between host and device; and the *floor*: the time of compute alone, of the method's own bytes over the
link between nodes, and of its copies.

Needs root, and ``ip`` and ``tc`` of iproute2. One launch for each setting, of two to four minutes.

Exit status 0 if ING and IIG are at least 5 times as fast as ZeRO-3 in full training and 50 times with LoRA, weights
agree, and bytes are those of the formulas; 1 if not; 2 if it could not run.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence

import torch.distributed as dist
from tqdm import tqdm

from tests.perf.lib import verdict
from tests.perf.lib.host_parameter_rows import (
    METHODS,
    SETTINGS,
    WIDTH,
    HostRow,
    HostSetting,
    missed,
    problems,
    speeds,
)
from tests.perf.lib.pcie import Pcie
from tests.perf.lib.peers import Method, Workload
from tests.perf.lib.settings import add_arguments, require_positive, run_what_is_promised
from tests.perf.lib.side_by_side import SideBySide
from tests.perf.lib.turns import Turn, over_ranks

SHORT, MOST = 5.0, 9  # steps that take less than this together go on, up to this number of them in a turn


class Worker:
    """What a rank needs to measure one setting."""

    def __init__(self, setting: HostSetting, args: argparse.Namespace) -> None:
        self._setting, self._args, self._pcie = setting, args, Pcie()
        zero = {"offload_param": {"device": "cpu"}}
        workload = Workload(setting.accumulation, setting.ranks_per_node, setting.make_model, zero=zero)
        self._ranks = SideBySide(args.methods, workload, WIDTH, {}, {})

    def rows(self) -> list[HostRow]:
        """Measure."""
        with self._pcie.between():
            return self._rows()

    def _rows(self) -> list[HostRow]:
        ranks, setting, args = self._ranks, self._setting, self._args
        held = ranks.warm_up()
        copied = {}
        for name, method in ranks.methods.items():
            before = self._pcie.nbytes
            ranks.take(method, 1)
            (copied[name],) = over_ranks([self._pcie.nbytes - before], dist.ReduceOp.MAX)
        differences = ranks.compare()  # all have taken as many steps, which is not so later
        self._pcie.gigabytes = args.pcie
        ranks.link.limit(setting.mbit)
        dist.barrier()
        rows = {
            name: HostRow(setting.name, setting.mbit, name, method.setup, held=held[name], copied=copied[name])
            for name, method in ranks.methods.items()
        }
        headers, compute, meetings = ranks.headers(), [], ranks.a_step(ranks.compute).sent
        for number in tqdm(range(args.rounds), desc=setting.name, disable=dist.get_rank() != 0):
            compute.append(ranks.one_round(number, dict(rows), self._turn))
        for name, row in rows.items():
            row.headers, row.compute, row.gigabytes = headers, statistics.median(compute), args.pcie
            row.link_bytes -= meetings  # of ranks that begin and end a step together: adapters are as small
            row.formula_bytes, row.difference = setting.bytes_between(name), differences[name]
        return list(rows.values())

    def _turn(self, method: Method) -> Turn:
        """Take a step, or several short ones: their median is steady after more of them only."""
        taken = [self._ranks.a_step(method)]
        while len(taken) < MOST and sum(turn.seconds[0] for turn in taken) < SHORT:
            taken.append(self._ranks.a_step(method))
        stolen, seconds, sent = zip(*taken, strict=True)
        return Turn(max(stolen), [one for some in seconds for one in some], statistics.mean(sent))


def print_rows(rows: Sequence[HostRow]) -> None:
    """Print a table of a setting."""
    first = rows[0]
    print(
        f"\n{first.setting}: {first.mbit:g} Mbit/s between nodes, {first.gigabytes:g} GB/s between host and device; "
        f"compute alone {first.compute:.3f} s\n"
        f"{'':<8}{'seconds (min .. max)':>28}{'floor':>8}{'speed':>7}{'MB between':>12}{'formula':>9}"
        f"{'MB copied':>11}{'formula':>9}{'weights':>10}"
    )
    faster = speeds(rows)
    for row in rows:
        spread = f"{row.median:.3f} ({min(row.seconds):.3f} .. {max(row.seconds):.3f})"
        due = "" if row.formula_bytes is None else f"{row.formula_bytes / 1e6:.3f}"
        print(
            f"{row.method:<8}{spread:>28}{row.floor:>8.3f}{faster.get(row.method, 1.0):>7.1f}"
            f"{row.bytes_between / 1e6:>12.3f}{due:>9}{row.copied / 1e6:>11.3f}{row.formula_copied / 1e6:>9.3f}"
            f"{row.difference:>10.1e}"
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time parameters in host memory on an emulated cluster.")
    add_arguments(parser, "host_parameters", SETTINGS, METHODS)
    parser.add_argument("--pcie", type=float, default=25.0, help="GB/s between host and device")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each method")
    args = parser.parse_args()
    require_positive(parser, args, "pcie", "rounds")
    return args


def main() -> int:
    args = parse_arguments()
    return run_what_is_promised(
        args,
        __spec__.name,
        SETTINGS,
        HostRow,
        lambda: Worker(SETTINGS[args.setting], args).rows(),
        lambda rows: verdict.print_each(rows, lambda row: row.setting, print_rows, problems),
        missed,
    )


if __name__ == "__main__":
    sys.exit(main())
