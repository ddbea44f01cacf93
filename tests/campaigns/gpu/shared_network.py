# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Experiment T14: two nodes of two ranks that share the GPU train a GPT by each method over a slow link.

Compute is real, and ranks take turns on the GPU. Messages go through host memory and gloo, over the links of network
namespaces where the machine allows these, otherwise with delays (``scripts/emulation/staged_messages.py``). Rates are
such that ZeRO-3's bytes take the link ``RATIOS`` times a step's compute. gloo itself may take longer: the ratio that
was reached is a figure. The most important methods come first; what there is no time for is left out.
"""

import argparse
import contextlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deepspeed_ext.planner.memory import Model
from deepspeed_ext.planner.models import describe
from scripts.emulation.network import NODE, Link, Network
from scripts.emulation.staged_messages import StagedMessages
from scripts.examples.gpt import VOCABULARY, ByteGPT
from tests.campaigns.gpu.one_by_one import RANKS, Case, run_cases
from tests.campaigns.gpu.ranks import GROUP
from tests.perf.lib.blocks import make_adapter
from tests.perf.lib.gpt2 import RATE, Gpt2Measurement, apart
from tests.perf.lib.peers import Batch, Workload
from tests.perf.lib.records import Row, markdown
from tests.perf.lib.settings import BF16, BOTH, MOVES, Setting, by_name
from tests.perf.lib.turns import WARM_UP_STEPS, Compute, Turns, over_ranks

MEDIUM = {"dim": 1024, "layers": 28, "heads": 16, "sequence_length": 1024}  # 354 million parameters
TINY = {"dim": 128, "layers": 3, "heads": 2, "sequence_length": 32}
RATIOS = (2.2, 1.0, 0.3)  # 2.2: 7B parameters on the paper's clusters
SECONDS, MOST_ROWS = 0.6, 64  # of compute in a micro-batch of all ranks; of a micro-batch
UNTIL = 200.0  # seconds, after which no method begins; the last one ends before the experiment's limit
BUCKET = 20_000_000  # elements
LORA_RANK, LORA_RATE = 8, 5e-3
GPT, LORA = "GPT", "GPT with LoRA"
KEY = ("ZeRO-3", "IIG", "ZeRO-2", "NII")  # at all ratios, the others at the first
OTHERS = (f"HSDP (reduces in {BF16})", "NIG", "ZeRO-1", "NIG" + BOTH, "IIG" + BOTH)
ADAPTED = ("ZeRO-3", "ING")


@dataclass(frozen=True)
class Plan:
    """What a case measures."""

    folder: str  # where ranks keep what they have found
    setting: str
    method: str
    ratios: Sequence[float]
    until: float  # of the monotonic clock: when it is too late to begin

    @property
    def name(self) -> str:
        return f"{self.setting}, {self.method}"


def make_gpt(shape: Mapping[str, int], lora: bool, device: str, note: Callable[[Tensor], None]) -> torch.nn.Module:
    """Return the same fp32 model on every call and every rank, of weights that bf16 represents exactly. Blocks compute
    their forward again in the backward. Each forward's loss is given to ``note``."""
    torch.manual_seed(0)
    with torch.device(device):
        model = ByteGPT(**shape).requires_grad_(not lora)
        for block in cast(Any, model.blocks):
            if lora:
                block.adapter = make_adapter(shape["dim"], LORA_RANK, 3 * shape["dim"])
                block.qkv.register_forward_hook(lambda layer, x, out, adapter=block.adapter: out + adapter(x[0]))
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    model.register_forward_hook(lambda module, inputs, loss: note(loss.detach()))
    return model.to(torch.bfloat16).float()


class GpuMeasurement(Gpt2Measurement):
    """A method of T14."""

    settings = by_name(Setting(GPT, dtype=BF16), Setting(LORA, dtype=BF16, lora=True))
    stock = "ZeRO-3"
    methods = (*KEY, *OTHERS, ADAPTED[1])
    compute: Any = Compute  # of which none is made here

    def __init__(self, setup: Any, plan: Plan) -> None:
        super().__init__(self.settings[plan.setting], argparse.Namespace(methods=[plan.method], rounds=1, steps=1))
        self.plan, self._losses, self._device = plan, list[Tensor](), setup.device
        self._compute = Path(plan.folder, f"{plan.setting}-{dist.get_rank()}")  # rows, and seconds of a step
        self._count = 2 if setup.small else 8  # rows of a micro-batch
        self._shape = TINY if setup.small else MEDIUM
        self._make = partial(make_gpt, self._shape, self.setting.lora)
        model, rate = partial(self._make, setup.device, self._losses.append), LORA_RATE if self.setting.lora else RATE
        sizes: dict[str, Any] = {"bucket": BUCKET, "stage_bucket": 2**22 if setup.small else 2**29}
        self.workload = Workload(self.setting.accumulation, GROUP, model, **sizes, dtype=torch.bfloat16, rate=rate)
        self.turns = Turns(GROUP, self.batches, _link(plan.folder, setup.small))

    def batches(self, step: int) -> list[Batch]:
        """Return the same random row in all rows and for every step; one row in the warm-up."""
        rows, length = 1 if step <= WARM_UP_STEPS else self._count, self._shape["sequence_length"]
        generator = torch.Generator().manual_seed(dist.get_rank())
        drawn = torch.randint(VOCABULARY, (self.setting.accumulation, 1, length + 1), generator=generator)
        return [(row[:, :-1], row[:, 1:]) for row in drawn.to(self._device).expand(-1, rows, -1)]

    def describe(self, method: Any = None) -> Model:
        return describe(self._make("meta", print).to(torch.bfloat16), accumulation=self.setting.accumulation)

    def peer_bytes(self, name: str) -> float:
        """Return the bytes that a node sends in a step of a peer, which gathers all parameters for each use."""
        states, steps, moves = self.describe().states, self.setting.accumulation, MOVES.get(name)
        if moves is None:  # HSDP: an all-reduce of shards between nodes
            return 2 * (1 - GROUP / RANKS) * states.gradients
        frozen = 2 * steps * (states.parameters - states.gradients)  # gathered, not reduced
        return (1 - 1 / RANKS) * ((steps * moves[0] + moves[1]) * states.gradients + frozen)

    def find_rows(self, small: bool) -> float:
        """Find how many rows take ``SECONDS``; return the seconds of a step of all ranks without communication."""
        compute = Compute(self.workload)
        self.turns.warm_up(compute, watch=False)
        (seconds,) = self.turns.a_step(compute).seconds
        if not small:
            self._count = max(1, min(MOST_ROWS, round(self._count * SECONDS * self.setting.accumulation / seconds)))
            (seconds,) = self.turns.a_step(compute).seconds
        compute.close()
        self._compute.write_text(json.dumps([self._count, seconds]))
        return seconds

    def take(self) -> tuple[list[Row], list[float]]:
        """Measure the method, two steps at the first ratio and one at the others; return rows, and losses of steps."""
        (name,), headers = self.names, self.turns.headers()
        self._count, compute = json.loads(self._compute.read_text())
        wire = self.peer_bytes("ZeRO-3") * 8 / 1e6 / compute  # Mbit/s at a ratio of 1
        rows = [Row(self.setting.name, wire / ratio, name, more={"ratio": ratio}) for ratio in self.plan.ratios]
        self.rows = {name: [rows[0], *rows]}
        losses = self._take(name)
        for row in rows:
            row.headers, row.compute = headers, compute
            row.formula_bytes = row.formula_bytes or self.peer_bytes(name)
        return rows, losses


@cache
def _link(folder: str, small: bool) -> Any:
    """Stage messages from here on, and return this rank's link."""
    messages = StagedMessages(GROUP, Path(folder), always=small)
    messages.install()
    with mock.patch.dict(os.environ, LOCAL_RANK=str(dist.get_rank() % GROUP)):  # all have 0, as they have one GPU
        return Link() if NODE in os.environ else messages


def measure_compute(setup: Any, plan: Plan) -> None:
    seconds = GpuMeasurement(setup, plan).find_rows(setup.small)
    get_accelerator().empty_cache()  # for the other ranks
    setup.report.check("takes time", seconds > 0)


def measure_method(setup: Any, plan: Plan) -> None:
    """Measure a method, unless it is too late."""
    (now,) = over_ranks([time.monotonic()], dist.ReduceOp.MAX)
    rows, losses = GpuMeasurement(setup, plan).take() if now < plan.until else ([], [])
    get_accelerator().empty_cache()
    setup.report.check("losses are finite", all(map(math.isfinite, losses)))
    setup.report.figure("losses", losses)
    for row in rows:
        setup.report.figure(f"{row.more['ratio']:g}", row.to_csv())


def shared_network(setup: Any) -> None:
    """T14: see that methods train alike and send the bytes of the formulas, and measure how long their steps take."""
    until = time.monotonic() + UNTIL
    with contextlib.ExitStack() as stack:
        folder, network = stack.enter_context(tempfile.TemporaryDirectory()), Network(RANKS // GROUP)
        try:
            if setup.small:
                raise OSError("a small run")
            stack.enter_context(network)
            setup = replace(setup, enter=partial(network.enter, ranks_per_node=GROUP))
            setup.report.figure("links", "network namespaces")
        except (OSError, RuntimeError) as why:
            setup.report.figure("links", f"delays: {why}")
        plans = list[Plan]()
        for name, methods in ((GPT, KEY), (LORA, ADAPTED), (GPT, OTHERS)):
            ratios = (10.0,) if setup.small else RATIOS[:1] if methods == OTHERS else RATIOS
            some = methods[:2] if setup.small else methods
            plans += [Plan(folder, name, method, ratios, until) for method in some]
        first = [next(plan for plan in plans if plan.setting == name) for name in (GPT, LORA)]
        cases = [Case(f"{plan.setting}, compute", partial(measure_compute, plan=plan)) for plan in first]
        run_cases(setup, cases + [Case(plan.name, partial(measure_method, plan=plan), 150) for plan in plans])
    _judge(setup, plans)


def _judge(setup: Any, plans: Sequence[Plan]) -> None:
    """Check losses, bytes, and that no step was shorter than its link needs; and note all steps in tables."""
    report, rows = setup.report, list[Row]()
    for plan in plans:
        losses, expected = (report.figures.get(f"{name}: losses") for name in (plan.name, f"{plan.setting}, ZeRO-3"))
        if not losses or not expected:
            report.figure(f"{plan.name}: not measured", "no time was left" if losses == [] else "it failed")
            report.check(f"{plan.name}: measured, or of minor importance", plan.method in OTHERS)
            continue
        for ratio in plan.ratios:
            row = Row.from_csv(report.figures[f"{plan.name}: {ratio:g}"])
            row.difference = apart(losses, expected[: len(losses)])
            short = row.median < 0.95 * (row.floor - row.compute)
            problems = GpuMeasurement.problems([row]) + ["a step is shorter than the link needs"] * short
            report.check(f"{plan.name}, {ratio:g}: losses, bytes, time of the link", not problems)
            if problems:
                report.figure(f"{plan.name}, {ratio:g}: why", problems)
            rows.append(row)
    for name in (GPT, LORA):
        subset = [row for row in rows if row.setting == name]
        report.figure(f"{name}: steps", "\n" + markdown(GpuMeasurement.table(subset)))
        reached = {row.more["ratio"]: round(row.exposed / row.compute, 2) for row in subset if row.method == "ZeRO-3"}
        report.figure(f"{name}: communication of ZeRO-3 over compute, as set and as reached", reached)
