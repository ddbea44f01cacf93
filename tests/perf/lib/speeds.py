# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Two nodes, of which the second one computes at half the speed: equal, own, and measured numbers of micro-batches."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from deepspeed_ext.planner.rates import Rates
from deepspeed_ext.zero.pace import TIMED, WARM_UP
from tests.perf.lib import settings
from tests.perf.lib.measurements import ROWS, PausedMeasurement
from tests.perf.lib.peers import Batch, Method, Ours
from tests.perf.lib.records import Row, Table, seconds_of
from tests.perf.lib.turns import WARM_UP_STEPS, Compute, Turns

FILE, RANKS = "speeds.csv", 2  # in a node
NUMBERS = (8, 4)  # of micro-batches, with which both nodes compute equally long
MEAN = sum(NUMBERS) // len(NUMBERS)
# Suffixes of a strategy's name.
OWN, MEASURED = f", {NUMBERS[0]} and {NUMBERS[1]}", ", measured"


def numbers_of(method: Method) -> list[int]:
    """Return the numbers of micro-batches of the nodes in the next step."""
    numbers = method.engine._config.zero_config.paro_micro_batches if isinstance(method, Ours) else None
    return numbers if isinstance(numbers, list) else [MEAN] * len(NUMBERS)


class DividedTurns(Turns):
    """Each rank takes its own of a step's micro-batches."""

    def _batches(self, method: Method) -> list[Batch]:
        numbers = NUMBERS if isinstance(method, Compute) else numbers_of(method)
        by_rank = [number for number in numbers for _ in range(RANKS)]
        first = sum(by_rank[: dist.get_rank()])
        return super()._batches(method)[first : first + by_rank[dist.get_rank()]]


class SpeedsMeasurement(PausedMeasurement):
    """Blocks of the second node sleep twice as long. Steps of all methods have the same samples. Compute alone is that
    of the ideal division."""

    file, settings, turns_class = FILE, settings.SPEEDS, DividedTurns
    methods = ("ZeRO-1", "HSDP", *(name + suffix for name in ("NIG", "IIG") for suffix in ("", OWN, MEASURED)))
    stock, steps = "ZeRO-1", 2
    keys: ClassVar = {"paro_overlap_updates": True}

    def measure(self) -> list[Row]:
        self.pause(self.args.pause * (1 + dist.get_rank() // RANKS))  # also when numbers are measured
        with tempfile.TemporaryDirectory() as self.folder:
            return super().measure()

    def make_methods(self) -> Iterator[Method]:
        yield from super().make_methods()
        for name in self.names:
            zero: dict[str, Any] = {"paro_strategy": name.partition(",")[0], "paro_group_size": RANKS, **self.keys}
            if name.endswith(OWN):
                workload = replace(self.workload, config={"gradient_accumulation_steps": None})
                yield Ours(workload, {**zero, "paro_micro_batches": list(NUMBERS)}, name)
            elif name.endswith(MEASURED):
                zero |= {"paro_micro_batches": "measured", "paro_decision_file": f"{self.folder}/{name}"}
                yield Ours(self.workload, zero, name)

    def compare(self) -> dict[str, float]:
        apart = super().compare()
        for method in (method for name, method in self.made.items() if name.endswith(MEASURED)):
            self.turns.take(method, WARM_UP + TIMED - WARM_UP_STEPS)
        return apart

    def complete(self, row: Row, rates: Rates | None) -> None:
        super().complete(row, rates)
        if row.method.endswith(MEASURED):
            row.setup = row.setup.replace(f"{self.folder}/", "")
            row.more["numbers"] = " and ".join(map(str, numbers_of(self.made[row.method])))

    def batches(self, step: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(step)
        return [(x, y) for x, y in torch.randn(RANKS * sum(NUMBERS), 2, ROWS, self.width, generator=generator)]

    @classmethod
    def table(cls, rows: Sequence[Row]) -> Table:
        """Return seconds of a step, samples per second, and compute alone, by method and rate."""
        lines = []
        for row in rows:
            samples = f"{RANKS * sum(NUMBERS) * ROWS / row.median:.0f}"
            method = row.method + (f": {row.more['numbers']}" if row.more.get("numbers") else "")
            lines.append([f"{row.mbit:g}", method, seconds_of(row.median), samples, seconds_of(row.compute)])
        return ["Mbit/s", "", "seconds", "samples per second", "compute alone"], lines
