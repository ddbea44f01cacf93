# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Does training with LoCo end where training without it ends?

    python -m tests.perf.loco_convergence

Trains with NIG in fp32, as ``lib/convergence.py`` says, with each optimizer and way to send gradients between groups.

Exit status 0 if LoCo keeps its bounds, 1 if it does not, 2 if the run failed. That large blocks without feedback do
worse is reported; it shows that the task would show a difference.
"""

import argparse
import sys
from typing import Any

from deepspeed_ext.strategy import GroupSizes, ModelStates, parse_strategy
from tests.perf.lib import convergence
from tests.perf.lib.convergence import CONTROL_NOISE, LOSS_BOUND, Method, MethodRow, Task

STRATEGY = "NIG"
NORM_BOUNDS = (0.97, 1.03)
REFERENCE, LOCO, COARSE = "none", "LoCo", "int4/4096"


def sending(**keys: Any) -> Method:
    """Return the method that sends gradients so."""
    return Method(STRATEGY, REFERENCE, {"zeropp_loco_param": {"bits": 4, **keys}})


METHODS = {
    REFERENCE: Method(STRATEGY, REFERENCE),
    "control": Method(STRATEGY, REFERENCE, noise=CONTROL_NOISE),
    LOCO: sending(block_size=128),
    "int4/128": sending(block_size=128, error_feedback=False),
    COARSE: sending(block_size=4096, error_feedback=False),
}
SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
TASK = Task(METHODS, {"AdamW": convergence.ADAMW, "SGD": SGD})


def out_of_bounds(row: MethodRow) -> list[str]:
    """Return what LoCo does not keep and must, with every seed."""
    low, high = NORM_BOUNDS
    wrong = ["loss"] if row.worst > LOSS_BOUND else []
    return wrong + ([] if all(low <= ratio <= high for ratio in row.ratios_of_means) else ["norm"])


def compression(row: MethodRow, sizes: GroupSizes) -> float:
    """Return the bytes that gradients have by the formula, over those that a rank received besides parameters."""
    states = ModelStates.of(row.elements, parameter_bytes=4, gradient_bytes=4)
    sent = {phase.name: phase.volume.inter for phase in parse_strategy(STRATEGY).phases(sizes, states)}
    return sent["reduce at the boundary"] / (row.received - sent["gather updates"])


def print_verdict(rows: list[MethodRow]) -> bool:
    """Whether LoCo keeps its bounds; and whether the task shows what coarse quantization costs."""
    passed = True
    found = {(row.optimizer, row.method): row for row in rows}
    for optimizer in dict.fromkeys(row.optimizer for row in rows):
        loco, coarse = (found.get((optimizer, method)) for method in (LOCO, COARSE))
        if loco is None:
            continue
        wrong = out_of_bounds(loco)
        passed &= not wrong
        norms, means = (f"{min(r):.3f} to {max(r):.3f}" for r in (loco.norm_ratios, loco.ratios_of_means))
        print(
            f"{'FAIL' if wrong else 'PASS'}  {optimizer}: LoCo's final loss is within {loco.worst:.2%} of "
            f"none with every seed (bound {LOSS_BOUND:.1%}; the seeds' spread is "
            f"{found[optimizer, REFERENCE].seed_spread / found[optimizer, REFERENCE].final_loss:.2%}), norms "
            f"{means} (ratios of means; bounds {NORM_BOUNDS[0]} to {NORM_BOUNDS[1]}; means of ratios {norms})"
        )
        if coarse is None:
            continue
        gaps = [b - a for a, b in zip(loco.differences, coarse.differences, strict=True)]
        verdict = "worse with every seed" if min(gaps) > 0 else "NOT worse with every seed"
        print(
            f"      {optimizer}: {COARSE} without feedback is {verdict} than LoCo, by "
            f"{', '.join(f'{gap:+.2%}' for gap in gaps)}"
        )
    return passed


def report(rows: list[MethodRow], args: argparse.Namespace) -> tuple[bool, list[dict[str, Any]]]:
    """Print what was found; return whether LoCo keeps its bounds, and rows to keep."""
    shrunk = [compression(row, GroupSizes(args.ranks, args.group_size)) for row in rows]
    convergence.print_table(rows, {"compression": shrunk})
    kept = [
        {"strategy": STRATEGY, **row.csv(args), "compression": round(one, 3), "seconds_a_run": round(row.seconds, 1)}
        for row, one in zip(rows, shrunk, strict=True)
    ]
    return print_verdict(rows), kept


if __name__ == "__main__":
    about = "Train with and without LoCo, and compare where that ends."
    sys.exit(convergence.main(__spec__.name, about, TASK, 300, report))
