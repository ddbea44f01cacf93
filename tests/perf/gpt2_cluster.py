# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""GPT-2 with 124 M parameters on two emulated nodes: NIG and IIG, exact and in few bits, beside ZeRO, HSDP and DDP.

    python -m tests.perf.gpt2_cluster --csv tests/perf/results/gpt2_cluster.csv

Two nodes of two ranks (``scripts/emulation``) train transformers' GPT-2 from random weights, in bf16 with fp32
masters, at two rates of the links between nodes. Memory holds one method at a time: each is made for its turn, takes
two steps without a limit, is timed at each rate, and is let go of. A second round has the reverse order, so a drift of
this machine does not fall on the same methods twice. A step's time is that of the slowest rank.

Every step has the same tokens, so that losses fall within a few steps. Those of exact methods must agree. Weights
cannot be compared: a layer norm's 1.0 is the largest, and bf16 knows it only to more than a step changes it.

For each method: seconds of a step; the bytes that a node has sent in it, by its interface; of strategies also those of
the planner's formula; bytes of model states that a rank holds; and the *floor*: the time of compute alone (forward and
backward of all micro-batches on all ranks at once, and an update of 1/n of the parameters), and of the method's own
bytes over the link.

Needs root, ``ip`` and ``tc`` of iproute2, transformers, and 16 GB of free memory. One launch of half an hour on two
cores. ``--settings 2x2-tiny`` tries the program with a tiny model in some three minutes.

Exit status 0 if losses agree and the strategies' bytes are those of the formula, 1 if not, 2 if it could not run.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from tqdm import tqdm

from deepspeed_ext.planner.cost import predict
from deepspeed_ext.planner.models import describe
from deepspeed_ext.planner.rates import Rates
from deepspeed_ext.strategy import STRATEGIES
from tests.perf.lib import verdict
from tests.perf.lib.cluster_rows import FORMS, UNLIMITED, rate_name
from tests.perf.lib.gpt2 import make_gpt2
from tests.perf.lib.gpt2_rows import MEASURED, METHODS, SETTINGS, Gpt2Row, Gpt2Setting, apart, problems, table
from tests.perf.lib.one_by_one import OneByOne
from tests.perf.lib.peers import Batch, Method, Workload
from tests.perf.lib.settings import add_arguments, require_positive, run
from tests.perf.lib.side_by_side import COMPUTE, Compute, methods

DTYPE = torch.bfloat16
RATE = 2e-4  # at 1e-3 the loss of a GPT-2 without a warm-up rises again, and rounding decides how far


class Worker:
    """What a rank needs to measure one setting."""

    def __init__(self, setting: Gpt2Setting, args: argparse.Namespace) -> None:
        self._setting, self._args = setting, args
        self._rates = setting.mbit if args.mbit is None else tuple(args.mbit)
        self._ranks = OneByOne(setting.ranks_per_node, self._batches)
        make_model = partial(make_gpt2, setting.shape, self._ranks.note)
        self._workload = Workload(
            setting.accumulation, setting.ranks_per_node, make_model, bucket=setting.bucket, dtype=DTYPE, rate=RATE
        )
        self._names = [name for name in METHODS if name in args.methods]
        self._rows = {name: [Gpt2Row(setting.name, rate, name, "") for rate in self._rates] for name in self._names}

    def rows(self) -> list[Gpt2Row]:
        """Measure."""
        due, headers, compute = self._due(), self._headers(), list[float]()
        order = [COMPUTE, *self._names]
        bar = tqdm(total=self._args.rounds * len(order), desc=self._setting.name, disable=dist.get_rank() != 0)
        for number in range(self._args.rounds):
            for name in order if number % 2 == 0 else reversed(order):
                if name == COMPUTE:
                    taken = self._ranks.take(partial(Compute, self._workload), (None,), 1, watch=False)
                    compute += taken.turns[0][0].seconds
                else:
                    self._take(name)
                bar.update()
        first = self._rows[self._names[0]][0].losses
        for name, some in self._rows.items():
            for row, factor in zip(some, headers, strict=True):
                row.headers, row.compute, row.formula_bytes = factor, statistics.median(compute), due.get(name)
                row.difference = apart(row.losses, first)
        return [row for some in self._rows.values() for row in some]

    def _take(self, name: str) -> None:
        """Give a method its turn, and put down what that has shown at each rate."""
        taken = self._ranks.take(self._maker(name), self._rates, self._args.steps)
        for row, turns in zip(self._rows[name], taken.turns, strict=True):
            row.setup, row.held = taken.setup, taken.held
            row.losses += taken.losses
            for turn in turns:
                turn.count_in(row)

    def _maker(self, name: str) -> Callable[[], Method]:
        return lambda: next(methods([name], self._workload, {}))

    def _batches(self) -> list[Batch]:
        """Return this rank's micro-batches, random tokens."""
        generator = torch.Generator().manual_seed(dist.get_rank())
        size = self._setting.accumulation, 1, self._setting.tokens
        return [(row, row) for row in torch.randint(self._setting.vocabulary, size, generator=generator)]

    def _headers(self) -> list[float]:
        """Return at each rate the bytes that the interfaces count for each of a known transfer."""
        found = []
        for rate in self._rates:
            self._ranks.set_rate(rate)
            found.append(self._ranks.headers())
        self._ranks.set_rate(None)
        return found

    def _due(self) -> dict[str, float]:
        """Return the bytes that a node must receive in a step, of each strategy."""
        with torch.device("meta"):
            model = describe(make_gpt2(self._setting.shape).to(DTYPE), accumulation=self._setting.accumulation)
        sizes = self._ranks.topology.sizes
        rates = Rates.of_links(sizes, sizes.group_size, 1.0, 1.0)  # any: bytes do not depend on them
        return {
            name + suffix: predict(strategy, sizes, model, rates, sent).volume.inter * sizes.group_size
            for name, strategy in STRATEGIES.items()
            for suffix, sent in FORMS.items()
        }


def print_rows(rows: Sequence[Gpt2Row]) -> None:
    """Print the table of a setting, as the page has it, and how losses fall."""
    header, lines = table(rows)
    widths = [max(map(len, column)) + 2 for column in zip(header, *lines, strict=True)]
    print(f"\n{rows[0].setting}: compute alone {rows[0].compute:.3f} s")
    for line in [header, *lines]:
        print("".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)))
    print("losses of the steps of a turn, and how far they are apart from the first method's, of their fall")
    for row in {row.method: row for row in rows}.values():
        losses = "".join(f"{loss:>9.4f}" for loss in row.losses)
        print(f"{row.method:>{widths[0]}}{losses}{row.difference:>10.1e}")


def a_rate(given: str) -> float | None:
    """Read a rate as tables name it."""
    return None if given == UNLIMITED else float(given)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time GPT-2 with 124 M parameters on an emulated cluster.")
    add_arguments(parser, "gpt2_cluster", SETTINGS, METHODS)
    parser.set_defaults(settings=[MEASURED])
    default = " and ".join(map(rate_name, SETTINGS[MEASURED].mbit))
    parser.add_argument("--mbit", nargs="+", type=a_rate, help=f"rates, or {UNLIMITED}; by default {default}")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each method")
    parser.add_argument("--steps", type=int, default=1, help="of each turn at each rate")
    args = parser.parse_args()
    require_positive(parser, args, "rounds", "steps")
    return args


def main() -> int:
    args = parse_arguments()
    return run(
        args,
        __spec__.name,
        SETTINGS,
        Gpt2Row,
        lambda: Worker(SETTINGS[args.setting], args).rows(),
        lambda rows: verdict.print_each(rows, lambda row: row.setting, print_rows, problems),
    )


if __name__ == "__main__":
    sys.exit(main())
