# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Does training with updates in few bits end where exact training ends, and would the task show it if not?

    python -m tests.perf.updates_convergence

Trains in bf16 with fp32 masters, as ``lib/convergence.py`` says: with NIG, whose updated parameters cross between
groups as differences, and with NII, whose sums of gradients come back. Beside them stand two methods that the package
does not have; this program puts them in. Direct: parameters themselves cross in few bits, in place of what receivers
lack of them. Coarse: sums cross in blocks as large as those of differences, and their errors are added whole.

Exit status 0 if differences and sums, with LoCo, end within the bound of exact training on average, and direct
parameters in 4 bits and coarse sums outside of it with every seed; 1 if not; 2 if the run failed.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.comm.hops import Agree, Update
from deepspeed_ext.loco.settings import LocoSettings, UpdateSettings
from deepspeed_ext.loco.sums import QuantizedSums
from deepspeed_ext.loco.updates import QuantizedDifferences
from deepspeed_ext.planner.compression import Compression
from deepspeed_ext.strategy import GroupSizes, ModelStates, parse_strategy
from tests.perf.lib import convergence
from tests.perf.lib.convergence import CONTROL_NOISE, LOSS_BOUND, Method, MethodRow, Task


class DirectHop(QuantizedDifferences):
    """Sends parameters themselves, in few bits."""

    def encode(self, updates: Sequence[Update], agree: Agree) -> list[Tensor]:
        """Code what updates differ from zeros."""
        return super().encode([update._replace(held=torch.zeros_like(update.held)) for update in updates], agree)

    def write(self, arrived: Tensor, held: Tensor) -> None:
        """Forget what is held."""
        held.zero_()
        super().write(arrived, held)


class CoarseSums(QuantizedSums):
    """Sums as 1-bit Adam's server quantizes them, in blocks of 128."""

    def __init__(self, settings: LocoSettings, device: str | None = None, pinned: bool = False) -> None:
        super().__init__(replace(settings, err_beta=0.0, block_size=128), device, pinned)


LOCO: dict[str, Any] = {"zeropp_loco_param": {}}
FOUR, EIGHT = ({"paro_quantized_updates": {"bits": bits}} for bits in (4, 8))
COARSE = {"paro_quantized_updates": {"block_size": 128}}
EXACT, EXACT_SUMS, DIRECT, COARSE_SUMS = "NIG", "NII", "NIG + direct 4 bits", "NII + LoCo + coarse"
ALONE, BOTH = "NIG + LoCo", "NIG + LoCo + updates"
METHODS = {
    EXACT: Method("NIG", EXACT),
    "NIG, control": Method("NIG", EXACT, noise=CONTROL_NOISE),
    ALONE: Method("NIG", EXACT, LOCO),
    "NIG + updates": Method("NIG", EXACT, FOUR),
    BOTH: Method("NIG", EXACT, LOCO | FOUR),
    "NIG + LoCo + exact": Method("NIG", EXACT, LOCO | {"paro_quantized_updates": {"bits": "exact"}}),
    "NIG + LoCo + 8 bits": Method("NIG", EXACT, LOCO | EIGHT),
    DIRECT: Method("NIG", EXACT, FOUR, hop=DirectHop),
    "NIG + direct 8 bits": Method("NIG", EXACT, EIGHT, hop=DirectHop),
    EXACT_SUMS: Method("NII", EXACT_SUMS),
    "NII + LoCo + updates": Method("NII", EXACT_SUMS, LOCO | FOUR),
    "NII + LoCo + 8 bits": Method("NII", EXACT_SUMS, LOCO | EIGHT),
    COARSE_SUMS: Method("NII", EXACT_SUMS, LOCO | COARSE, hop=CoarseSums),
}
TOO_COARSE = (DIRECT, COARSE_SUMS)
BOUNDED = ("NIG + updates", BOTH, "NII + LoCo + updates")
TASK = Task(METHODS, {"AdamW": convergence.ADAMW, "Muon": convergence.MUON}, bf16=True)


def formula(row: MethodRow, sizes: GroupSizes) -> float:
    """Return the bytes that a rank receives between groups in a step, as the planner has them: with Muon the most."""
    method = METHODS[row.method]
    loco, updates = (method.zero.get(key) for key in ("zeropp_loco_param", "paro_quantized_updates"))
    compression = Compression(
        None if loco is None else LocoSettings.parse(loco), None if updates is None else UpdateSettings.parse(updates)
    )
    states = ModelStates.of(row.elements, parameter_bytes=2, gradient_bytes=2)
    strategy = parse_strategy(method.strategy)
    moved = [
        compression.volume(phase, gradient_bytes=2, parameter_bytes=2) for phase in strategy.phases(sizes, states)
    ]
    return sum(volume.inter for volume in [*moved, strategy.exchange(sizes, 2 * row.matrices)])


def print_verdict(rows: list[MethodRow]) -> bool:
    """Whether what must be close is, and what must not is not."""
    optimizers = dict.fromkeys(row.optimizer for row in rows)
    return all([_print_one({row.method: row for row in rows if row.optimizer == one}) for one in optimizers])


def _print_one(found: dict[str, MethodRow]) -> bool:
    """Print the verdict on an optimizer's methods, by name."""
    passed = True
    for name in filter(found.__contains__, BOUNDED):
        row, reference = found[name], found[METHODS[name].against]
        spread = reference.seed_spread / reference.final_loss
        kept = abs(row.difference) <= LOSS_BOUND
        passed &= kept
        print(
            f"{'PASS' if kept else 'FAIL'}  {row.optimizer}, {name}: the final loss is {row.difference:+.2%} "
            f"from exact training on average (bound {LOSS_BOUND:.1%}), {row.worst:.2%} with the worst seed; the "
            f"seeds' spread is {spread:.2%}"
        )
    if {ALONE, BOTH} <= set(found):
        added = [b - a for a, b in zip(found[ALONE].differences, found[BOTH].differences, strict=True)]
        print(f"      of that, differences add {', '.join(f'{one:+.2%}' for one in added)} to what LoCo costs alone")
    for name in filter(found.__contains__, TOO_COARSE):
        least = min(found[name].differences)
        shown = least > LOSS_BOUND
        passed &= shown
        print(
            f"{'PASS' if shown else 'FAIL'}  {name}: at least {least:.2%} worse with every seed, so the task "
            f"{'shows' if shown else 'does NOT show'} what is too coarse"
        )
    return passed


def report(rows: list[MethodRow], args: argparse.Namespace) -> tuple[bool, list[dict[str, Any]]]:
    """Print what was found; return whether it is as it must be, and rows to keep."""
    expected = [formula(row, GroupSizes(args.ranks, args.group_size)) for row in rows]
    of_formula = [row.received / most for row, most in zip(rows, expected, strict=True)]
    sent = {"kB between": [row.received / 1e3 for row in rows], "of formula": of_formula}
    convergence.print_table(rows, sent)
    kept = [
        {
            "dtype": "bf16",
            **row.csv(args),
            "inter_bytes": round(row.received),
            "inter_bytes_formula": round(most),
            "seconds_a_run": round(row.seconds, 1),
        }
        for row, most in zip(rows, expected, strict=True)
    ]
    return print_verdict(rows), kept


if __name__ == "__main__":
    about = "Train with updates in few bits, and compare where that ends."
    sys.exit(convergence.main(__spec__.name, about, TASK, 1000, report))
