# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Compares sums of bf16 gradients with exact sums, without communication.

    python -m tests.perf.sum_errors

Ranks have the same gradient with noise of their own (signal), or independent gradients (noise). Sums:

    ordered     fp32 in rank order, rounded once (``paro_reduce``)
    ring        bf16, rounded after each rank, as in a ring reduce-scatter of bf16
    two levels  ordered within groups of 8, rounded, then ordered between groups: a redistribution of two hops

Errors are relative to the root mean square of the exact sums. The exact sums are in fp64.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.comm.backends import sum_parts
from tests.perf.lib import plots, records

RANKS = (2, 4, 8, 16, 32, 64)
GROUP = 8
PLOT = records.RESULTS / "sum_errors.svg"
SIGNAL = {"signal": 1.0, "noise": 0.0}  # share of the gradient that all ranks have


def ring(parts: Tensor) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def in_two_levels(parts: Tensor) -> Tensor:
    """Return the sum over groups of sums within groups."""
    return sum_parts(torch.stack([sum_parts(group) for group in parts.split(GROUP)]))


SUMS: dict[str, Callable[[Tensor], Tensor]] = {"ordered": sum_parts, "ring": ring, "two levels": in_two_levels}


def rows_of(elements: int) -> Iterator[dict[str, Any]]:
    for ranks in RANKS:
        for kind, share in SIGNAL.items():
            generator = torch.Generator().manual_seed(ranks)
            common = torch.randn(elements, generator=generator)
            parts = (share * common + torch.randn(ranks, elements, generator=generator)) / ranks  # pre-divided
            rounded = parts.bfloat16()
            exact = rounded.double().sum(0)
            scale = exact.square().mean().sqrt()
            for name, function in SUMS.items():
                error = (function(rounded).double() - exact) / scale
                rms, largest = error.square().mean().sqrt().item(), error.abs().max().item()
                row = {"ranks": ranks, "gradients": kind, "sum": name, "elements": elements}
                yield row | {"rms_error": f"{rms:.3e}", "largest_error": f"{largest:.3e}"}


def table() -> records.Table:
    by_sum = errors()
    columns = [(kind, name) for kind in SIGNAL for name in SUMS]
    lines = [[str(ranks), *(f"{100 * by_sum[column][ranks]:.2f} %" for column in columns)] for ranks in RANKS]
    return ["ranks", *(f"{name}, {kind}" for kind, name in columns)], lines


def plot() -> None:
    curves = {name: {float(ranks): 100 * error for ranks, error in errors()["signal", name].items()} for name in SUMS}
    labels = "ranks", "root mean square error of bf16 sums, %"
    plots.draw(PLOT, curves, {float(ranks): str(ranks) for ranks in RANKS}, labels, table())


def errors() -> dict[tuple[str, str], dict[int, float]]:
    by_sum: dict[tuple[str, str], dict[int, float]] = {}
    for row in records.read_rows(records.RESULTS / "sum_errors.csv"):
        by_sum.setdefault((row["gradients"], row["sum"]), {})[int(row["ranks"])] = float(row["rms_error"])
    return by_sum


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure errors of sums of bf16 gradients.")
    parser.add_argument("--csv", type=Path, help="append a row a result here")
    args = parser.parse_args()
    records.report(list(rows_of(elements=2**20)), args.csv)


if __name__ == "__main__":
    main()
