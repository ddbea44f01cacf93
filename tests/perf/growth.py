# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Measures growth with the number of ranks: groups, messages, host time, and memory of bookkeeping.

    python -m tests.perf.growth --csv tests/perf/results/growth.csv

Runs the real engine as one rank of 64 to 16,384, in groups of 8, on torch's fake process group, for each strategy and
for DeepSpeed's own stages, in turns. The model has the tensors of a 7B Llama with a sixteenth of its width. No data is
sent, so seconds are host time only: no gloo, no NCCL, no network. MB are those of Python and its objects
(tracemalloc), not of tensors, for an engine after three steps. ``--modules 10000 --steps 0`` makes engines of a deeper
model whose layers are modules, too.
"""

import argparse
import gc
import json
import logging
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn
from tqdm import tqdm

from deepspeed_ext.comm import process_groups
from deepspeed_ext.strategy import STRATEGIES, plain_name
from tests.perf.lib import records
from tests.perf.lib.fake_world import FakeWorld, OperatorCount

WORLDS = (8, 64, 512, 4096, 16384)
STAGES = ("1", "2", "3")
LOCO = " + LoCo"
METHODS = (*STAGES, *STRATEGIES, *(name + LOCO for name in ("NIG", "IIG", "GGG")))
LAYERS, WIDTH, VOCABULARY, HIDDEN = 32, 4096, 32000, 11008
NARROWER = 16  # times, in every direction
DEEPER, OF_LAYER = 128, 11  # with --modules: as much narrower; modules in a layer
BUCKET = 500_000_000
STEPS = 3


def shapes() -> list[tuple[int, ...]]:
    width, hidden, vocabulary = WIDTH // NARROWER, HIDDEN // NARROWER, VOCABULARY // NARROWER
    layer = [(width, width)] * 4 + [(hidden, width)] * 2 + [(width, hidden), (width,), (width,)]
    return [(vocabulary, width), *(layer * LAYERS), (width,), (vocabulary, width)]


class Part(nn.Module):
    """A parameter in its own module, and a sum that gives it a gradient."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, 1e-3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.sum()


class Layer(nn.Module):
    """Modules in sequence. An ``nn.Sequential`` counts as a list of modules, which is never a unit."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


def make_model(layered: bool) -> nn.Sequential:
    """Return a module for each parameter; with ``layered``, those of a layer are in a module."""
    first, *parts = map(Part, shapes())
    size = (len(parts) - 2) // LAYERS
    layers = [Layer(*parts[size * number :][:size]) for number in range(LAYERS)] if layered else parts[:-2]
    return nn.Sequential(first, *layers, *parts[-2:])


def section_of(method: str, group_size: int) -> dict[str, Any]:
    """Return ``zero_optimization`` of a strategy, or of one of DeepSpeed's own stages ("2")."""
    if method in STAGES:
        return {"stage": int(method)}
    loco = {"zeropp_loco_param": {}} if method.endswith(LOCO) else {}
    return {"paro_strategy": method.removesuffix(LOCO), "paro_group_size": group_size, **loco}


def make_engine(zero: dict[str, Any], model: nn.Module, **more: Any) -> Any:
    """Return an engine with this ``zero_optimization``, and more of the configuration; it makes all its groups."""
    process_groups._cached_groups.clear()
    process_groups._self_groups.clear()
    deepspeed.utils.groups._WORLD_GROUP = None
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        "zero_optimization": {"reduce_bucket_size": BUCKET // NARROWER**2, **zero},
    }
    return deepspeed.initialize(model=model, config=config | more)[0]


def train(engine: Any, world: FakeWorld, steps: int) -> float:
    """Take some steps; return the seconds of the last one, in which ``world`` counts messages."""
    seconds = 0.0
    for _ in range(steps):
        world.reset()
        begin = time.perf_counter()
        engine.backward(engine(torch.ones(1, dtype=torch.bfloat16)).sum())
        engine.step()
        seconds = time.perf_counter() - begin
    return seconds


def count_host_work(engine: Any, world: FakeWorld) -> dict[str, int]:
    """Return the numbers of torch operators, and of Python and C calls, of a step: host time that is not a clock."""
    with OperatorCount() as operators:
        train(engine, world, 1)
    events = Counter[str]()
    sys.setprofile(lambda frame, event, argument: events.update((event,)))
    try:
        train(engine, world, 1)
    finally:
        sys.setprofile(None)
    return {"operators": operators.count, "calls": events["call"] + events["c_call"]}


def measure_once(method: str, world: FakeWorld, args: argparse.Namespace, traced: bool = False) -> dict[str, Any]:
    """Make an engine and train; return the counts, with ``traced`` MB instead of seconds."""
    gc.collect()
    world.reset()
    if traced:
        tracemalloc.start()
    model = make_model(layered=args.modules is not None)
    begin = time.perf_counter()
    engine = make_engine(section_of(method, world.group_size), model)
    counts: dict[str, Any] = {"seconds_creation": time.perf_counter() - begin, "groups": world.made.total()}
    counts["messages_creation"] = world.messages.total()
    counts["seconds_step"] = train(engine, world, args.steps)
    if not args.steps:
        world.reset()
    for kind in ("intra", "inter", "world"):
        counts[f"messages_{kind}"] = world.messages[kind]
        counts[f"bytes_{kind}"] = world.received[kind]
    if args.steps and not traced:
        counts |= count_host_work(engine, world)
    if traced:
        gc.collect()
        counts["mb"] = tracemalloc.get_traced_memory()[0] / 2**20
        tracemalloc.stop()
    engine.destroy()
    return counts


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure methods in turns, in this process; return a row for each."""
    global LAYERS, NARROWER
    (ranks,), group_size, methods = args.worlds, args.group_size, args.methods
    if args.modules is not None:
        LAYERS, NARROWER = args.modules // OF_LAYER, DEEPER
    world = FakeWorld(ranks, group_size)
    deepspeed.init_distributed(dist_backend="gloo")  # finds the fake one
    logging.disable(logging.WARNING)
    for method in (methods[0], *[method for method in methods if method.endswith(LOCO)][:1]):
        measure_once(method, world, args)  # imports, kernels
    samples = [[measure_once(method, world, args) for method in methods] for _ in range(args.rounds)]
    for method, rows in zip(methods, zip(*samples, strict=True), strict=True):
        row = {"ranks": ranks, "group_size": group_size, "method": method, "modules": args.modules, **rows[0]}
        for name in ("seconds_creation", "seconds_step"):
            row[name] = round(statistics.median(sample[name] for sample in rows), 4)
        row["mb"] = "" if args.no_memory else round(measure_once(method, world, args, True)["mb"], 2)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS, help="numbers of ranks")
    parser.add_argument("--methods", nargs="+", type=plain_name, default=METHODS, help="strategies and stages 1, 2, 3")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--modules", type=int, help="of a deeper model, about; by default, a narrow 7B Llama")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median is taken")
    parser.add_argument("--steps", type=int, default=STEPS, help="that an engine makes; 0: none")
    parser.add_argument("--no-memory", action="store_true", help="leave out MB, for which a method runs once more")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="append a row per result")
    parser.add_argument("--json", action="store_true", help="measure the only world in this process, and print JSON")
    args = parser.parse_args()
    rows = list[dict[str, Any]]()
    if args.json:
        print(json.dumps(list(measure(args))))
        return
    for ranks in tqdm(args.worlds, disable=not sys.stderr.isatty()):
        command = [sys.executable, "-m", __spec__.name, *sys.argv[1:], "--json", "--worlds", str(ranks)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        rows += json.loads(done.stdout.splitlines()[-1])
    columns = ["ranks", "method", "groups", "messages_creation", "seconds_creation", "seconds_step"]
    records.report(rows, args.csv, [*columns, *["operators", "calls"] * bool(args.steps), "mb"])


if __name__ == "__main__":
    main()
