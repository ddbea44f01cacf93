# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Two nodes, of which the second one computes at half the speed: equal and own numbers of micro-batches."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from tests.perf.lib import settings
from tests.perf.lib.measurements import ROWS, PausedMeasurement
from tests.perf.lib.peers import Batch, Method, Ours
from tests.perf.lib.records import Row, Table, read, seconds_of
from tests.perf.lib.turns import Compute, Turns

FILE, RANKS = "speeds.csv", 2  # in a node
NUMBERS = (8, 4)  # of micro-batches, with which both nodes compute equally long
OWN = f", {NUMBERS[0]} and {NUMBERS[1]}"  # suffix of a strategy's name


class DividedTurns(Turns):
    """Each rank takes its own of a step's micro-batches."""

    def _batches(self, method: Method) -> list[Batch]:
        equal = [sum(NUMBERS) // 2] * 2
        numbers = NUMBERS if isinstance(method, Compute) or method.name.endswith(OWN) else equal
        by_rank = [number for number in numbers for _ in range(RANKS)]
        first = sum(by_rank[: dist.get_rank()])
        return super()._batches(method)[first : first + by_rank[dist.get_rank()]]


class SpeedsMeasurement(PausedMeasurement):
    """Blocks of the second node sleep twice as long. Steps of all methods have the same samples. Compute alone is that
    of the ideal division."""

    file, settings, turns_class = FILE, settings.SPEEDS, DividedTurns
    methods = ("ZeRO-1", "HSDP", *(name + suffix for name in ("NIG", "IIG") for suffix in ("", OWN)))
    stock, steps = "ZeRO-1", 2
    keys: ClassVar = {"paro_overlap_updates": True}

    def make_methods(self) -> Iterator[Method]:
        yield from super().make_methods()
        workload = replace(self.workload, config={"gradient_accumulation_steps": None})
        for name in (name for name in self.names if name.endswith(OWN)):
            zero = {"paro_strategy": name.removesuffix(OWN), "paro_group_size": RANKS, **self.keys}
            yield Ours(workload, {**zero, "paro_micro_batches": list(NUMBERS)}, name)

    def batches(self, step: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(step)
        return [(x, y) for x, y in torch.randn(RANKS * sum(NUMBERS), 2, ROWS, self.width, generator=generator)]

    def at(self, mbit: float | None, more: dict[str, Any]) -> list[Row]:
        self.pause(self.args.pause * (1 + dist.get_rank() // RANKS))
        return super().at(mbit, more)


def table() -> Table:
    """Return seconds of a step, samples per second, and compute alone relative to the step, by method and rate."""
    rows, lines = {(row.method, row.mbit): row for row in read(FILE)}, []
    for method, rate in rows:
        row = rows[method, rate]
        samples = f"{RANKS * sum(NUMBERS) * ROWS / row.median:.0f}"
        lines.append([f"{rate:g}", method, seconds_of(row.median), samples, seconds_of(row.compute)])
    return ["Mbit/s", "", "seconds", "samples per second", "compute alone"], lines
