# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts on two emulated nodes: strategies with AutoEP and without, beside stock ZeRO, DDP and HSDP.

    python -m tests.perf.mixture_cluster --csv tests/perf/results/mixture_cluster.csv

Two nodes of two ranks (``scripts/emulation``) train layers of Mixtral's. Methods take turns in the same processes, as
in ``emulated_cluster.py``, and a step's time is that of the slowest rank. AutoEP spreads the experts over the two
ranks of a node, so tokens stay inside nodes, and each expert is trained by two ranks, one in each node.

For each method: seconds of a step; the bytes that a node has sent in it, by its interface; of strategies also those
that the planner's formula gives for the dense family and for experts; and the *floor*: the time of compute alone, all
experts on each rank, and of the method's own bytes over the link between nodes.

Needs root, ``ip`` and ``tc`` of iproute2, and transformers. One launch of some five minutes on two cores.

Exit status 0 if one of ours is at least 5 times as fast as ZeRO-3, weights agree, and bytes are those of the formula;
1 if not; 2 if it could not run.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence

import torch.distributed as dist
from tqdm import tqdm

from deepspeed_ext.loco.settings import LocoSettings, UpdateSettings
from deepspeed_ext.planner.compression import AS_IT_IS, Compression
from deepspeed_ext.planner.cost import predict
from deepspeed_ext.planner.models import describe
from deepspeed_ext.planner.rates import Rates
from deepspeed_ext.strategy import STRATEGIES
from tests.perf.lib import verdict
from tests.perf.lib.mixture import make_mixture, mixture_methods, whole_mixture
from tests.perf.lib.mixture_rows import (
    HIDDEN,
    LEAST,
    METHODS,
    SETTINGS,
    STOCK,
    TOKENS,
    MixtureRow,
    MixtureSetting,
    speeds,
    table,
)
from tests.perf.lib.peers import Method, Ours, Workload
from tests.perf.lib.settings import add_arguments, require_positive, run_what_is_promised
from tests.perf.lib.side_by_side import SideBySide

FEW_BITS = Compression(LocoSettings(), UpdateSettings())


class Worker:
    """What a rank needs to measure one setting."""

    def __init__(self, setting: MixtureSetting, args: argparse.Namespace) -> None:
        self._setting, self._args = setting, args
        workload = Workload(setting.accumulation, setting.ranks_per_node, make_mixture, whole=whole_mixture)
        self._ranks = SideBySide([], workload, TOKENS * HIDDEN, {}, {})
        self._ranks.methods |= {one.name: one for one in mixture_methods(args.methods, workload)}

    def rows(self) -> list[MixtureRow]:
        """Measure."""
        ranks, setting = self._ranks, self._setting
        held, differences = ranks.warm_up(), ranks.compare()
        ranks.link.limit(setting.mbit)
        dist.barrier()
        rows = {
            name: MixtureRow(setting.name, setting.mbit, name, method.setup, held=held[name])
            for name, method in ranks.methods.items()
        }
        headers, compute = ranks.headers(), []
        for number in tqdm(range(self._args.rounds), desc=setting.name, disable=dist.get_rank() != 0):
            compute.append(ranks.one_round(number, dict(rows), ranks.a_step))
        for name, row in rows.items():
            row.headers, row.compute, row.difference = headers, statistics.median(compute), differences[name]
            row.formula_bytes, row.formula_experts = self._due(ranks.methods[name])
        return list(rows.values())

    def _due(self, method: Method) -> tuple[float, float] | tuple[None, None]:
        """Return the bytes that a node must receive in a step, all and of experts; nothing for a peer."""
        if not isinstance(method, Ours):
            return None, None
        model = describe(method.module, accumulation=self._setting.accumulation)
        strategy = STRATEGIES[str(METHODS[method.name].zero["paro_strategy"])]
        sent = FEW_BITS if "LoCo" in method.name else AS_IT_IS
        sizes = self._ranks.topology.sizes
        rates = Rates.of_links(sizes, sizes.group_size, 1.0, 1.0)  # any: bytes do not depend on them
        found = predict(strategy, sizes, model, rates, sent)
        return found.volume.inter * sizes.group_size, found.of_experts.inter * sizes.group_size


def print_rows(rows: Sequence[MixtureRow]) -> None:
    """Print a table of a setting, as the page has it, and how far weights are apart."""
    first, (header, lines) = rows[0], table(rows)
    print(f"\n{first.setting}: {first.mbit:g} Mbit/s between nodes; compute alone {first.compute:.3f} s")
    apart = {row.method: f"{row.difference:.1e}" for row in rows}
    for line in [[*header, "weights"], *([*line, apart[line[0]]] for line in lines)]:
        print(f"{line[0]:<30}" + "".join(f"{cell:>21}" for cell in line[1:]))


def missed(rows: Sequence[MixtureRow]) -> list[str]:
    """Return what the best of ours lacks beside ZeRO-3."""
    ours = [(speed, name) for name, speed in speeds(rows).items() if "paro_strategy" in METHODS[name].zero]
    speed, name = max(ours, default=(LEAST, ""))
    return [f"{name} is {speed:.1f} times as fast as {STOCK}, not {LEAST:g}"] if speed < LEAST else []


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time a mixture of experts on an emulated cluster.")
    add_arguments(parser, "mixture_cluster", SETTINGS, list(METHODS))
    parser.add_argument("--rounds", type=int, default=3, help="steps of each method")
    args = parser.parse_args()
    require_positive(parser, args, "rounds")
    return args


def main() -> int:
    args = parse_arguments()
    return run_what_is_promised(
        args,
        __spec__.name,
        SETTINGS,
        MixtureRow,
        lambda: Worker(SETTINGS[args.setting], args).rows(),
        lambda rows: verdict.print_each(rows, lambda row: row.setting, print_rows),
        missed,
    )


if __name__ == "__main__":
    sys.exit(main())
