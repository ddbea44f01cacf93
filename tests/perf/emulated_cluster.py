# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""All 14 strategies, with and without LoCo, beside their peers, on clusters that this machine emulates. For some of
them also with updates in few bits.

A node is a network namespace with some CPU ranks (``scripts/emulation``); what it exchanges with others goes over a
link of a limited rate and is counted by the link's own interface. All methods train the same model on the same data
from the same seed in the same processes, and take turns, a step each, in rounds whose order alternates: so whatever
else this machine does falls on all of them. A step's time is that of the slowest rank.

A step of up to 8 s from which the host of a virtual machine has taken the CPU away (/proc/stat) is repeated, whatever
it took; of longer ones the rows say how much was taken. Methods whose steps are short have more of them.

For each method: seconds of a step, bytes between nodes, bytes of model states that a rank holds, and the *floor*: the
time of compute alone (forward and backward of all micro-batches on all ranks at once, and an update of 1/n of the
parameters), plus the method's own bytes over the link's rate.

In one setting they train with Muon: DeepSpeed's stages and the strategies, without torch's compiler. (The floor has
each rank orthogonalize 1/n of the matrices.) In one they compute in bf16, with fp32 masters: peers, HSDP with
reductions in bf16 and in fp32, and three strategies.

For the strategies also what the planner predicts, from rates that its probe has measured on the same links.

Needs root, and ``ip`` and ``tc`` of iproute2. One launch for each setting; all of them take about an hour on 2 cores.

Exit status 0 if weights agree and the strategies' bytes are those of the formula, 1 if not, 2 if it could not run.
"""

import argparse
import functools
import statistics
import sys
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from deepspeed_ext.planner import probe
from deepspeed_ext.strategy import STRATEGIES
from tests.perf.lib import verdict
from tests.perf.lib.blocks import make_rounded_blocks
from tests.perf.lib.cluster_rows import (
    BF16,
    BOTH,
    HSDP_REDUCTIONS,
    LOCO,
    MUON,
    NATIVE,
    SETTINGS,
    SHIPPED,
    SIZES,
    UPDATES,
    WIDE,
    MethodRow,
    Setting,
)
from tests.perf.lib.peers import PEERS, Workload
from tests.perf.lib.settings import add_arguments, require_positive, run
from tests.perf.lib.side_by_side import SideBySide
from tests.perf.lib.turns import LONG

BLOCKS = 4
IN_BF16 = ("NNG", "NIG", "IIG")
ENOUGH = 2  # a method whose steps take ``LONG`` has this number of them, whatever --rounds says
SHORT, MOST = 3.0, 20  # one whose steps take less than this together goes on, up to this number of them


# What runs in the ranks ###########################################################################


class Worker:
    """What a rank needs to measure one setting."""

    def __init__(self, setting: Setting, args: argparse.Namespace) -> None:
        self._setting, self._args = setting, args
        self._rounds = max(MOST, args.rounds)
        width, hidden = SIZES[setting.size]
        dtype = torch.bfloat16 if setting.dtype == BF16 else torch.float32
        workload = Workload(
            setting.accumulation,
            setting.ranks_per_node,
            functools.partial(make_rounded_blocks, BLOCKS, width, hidden, dtype),
            optimizer=setting.optimizer,
            dtype=dtype,
        )
        names = [name for name in args.methods if name in methods_of(setting)]
        described = {"streams": False}  # ranks compute and copy on the same cores
        self._side_by_side = SideBySide(names, workload, width, {}, described)

    def rows(self) -> list[MethodRow]:
        """Measure at all rates."""
        held = self._side_by_side.warm_up()
        differences = self._side_by_side.compare()
        rows = []
        bar = tqdm(total=len(self._setting.mbit) * self._rounds, desc=self._setting.name, disable=dist.get_rank() != 0)
        for mbit in self._setting.mbit:
            rows += self._at(mbit, held, bar)
        for row in rows:
            row.difference = differences[row.method]
        return rows

    def _at(self, mbit: float | None, held: dict[str, Any], bar: Any) -> list[MethodRow]:
        ranks = self._side_by_side
        ranks.link.limit(mbit)
        dist.barrier()
        headers = ranks.headers()
        rates = probe.measure(ranks.topology)
        rows = {
            name: MethodRow(self._setting.name, mbit, name, method.setup) for name, method in ranks.methods.items()
        }
        compute: list[float] = []
        for number in range(self._rounds):
            bar.update()
            if some := {name: row for name, row in rows.items() if self._goes_on(row.seconds)}:
                compute.append(ranks.one_round(number, some, ranks.a_step))
        alone = statistics.median(compute)
        for row in rows.values():
            row.headers, row.compute, row.held = headers, alone, held[row.method]
        ranks.predict(rows, alone, rates)
        return list(rows.values())

    def _goes_on(self, seconds: list[float]) -> bool:
        """Whether a method has another step. Of short ones the median is steady after more of them only."""
        if len(seconds) >= ENOUGH and min(seconds) > LONG:
            return False
        return len(seconds) < self._args.rounds or (sum(seconds) < SHORT and len(seconds) < MOST)


# What starts them #################################################################################


def all_methods() -> list[str]:
    return [
        *PEERS,
        *(name + suffix for name in STRATEGIES for suffix in ("", LOCO)),
        *(name + BOTH for name in UPDATES),
        *(name + NATIVE for name in ("NIG", "IIG")),
        *(name + WIDE for name in IN_BF16),
    ]


def methods_of(setting: Setting) -> list[str]:
    """Return those that a setting has: with Muon and in bf16 not all strategies, nor all in few bits."""
    if setting.dtype == BF16:
        stages = ("ZeRO-1", SHIPPED, "ZeRO-2", "ZeRO-3")
        ours = (name + suffix for name in IN_BF16 for suffix in ("", WIDE, LOCO, BOTH))
        return ["DDP", "FSDP2", *HSDP_REDUCTIONS, *stages, *ours]
    if setting.optimizer != MUON:
        return [name for name in all_methods() if name not in HSDP_REDUCTIONS and not name.endswith(WIDE)]
    few_bits = (name + suffix for name in ("NIG", "NII", "III", "IIG") for suffix in (LOCO, BOTH))
    return ["ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3 defaults", *STRATEGIES, *few_bits]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time all strategies and their peers on emulated clusters.")
    add_arguments(parser, "emulated_cluster", SETTINGS, all_methods())
    parser.add_argument("--rounds", type=int, default=3, help="steps of each method at each rate, at least")
    args = parser.parse_args()
    require_positive(parser, args, "rounds")
    return args


def main() -> int:
    args = parse_arguments()
    return run(
        args,
        __spec__.name,
        SETTINGS,
        MethodRow,
        lambda: Worker(SETTINGS[args.setting], args).rows(),
        verdict.print_all,
    )


if __name__ == "__main__":
    sys.exit(main())
