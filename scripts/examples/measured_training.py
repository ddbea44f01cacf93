# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Train the model of the examples, and report the cost of each step.

The training is that of ``examples/train.py``: nothing of ours is imported before the engine is made. The report has
the loss and the seconds of each step, on gloo the bytes that the ranks received from one another, and the bytes of
optimizer states that a rank holds::

    deepspeed --num_accelerators 4 --module scripts.examples.measured_training --deepspeed_config CONFIG --report FILE
"""

import argparse
import json
import os
import statistics
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor
from tqdm import tqdm

from scripts.examples.gpt import Batches, ByteGPT, read_corpus
from scripts.examples.steps import TimedStep, record

REST_SECONDS = 0.2  # seconds without arrivals after which the wire counts as idle
WARM_UP_STEPS = 1  # ZeRO-3 records its trace and gloo opens its connections in the first step


class ByteCounter:
    """Count, on gloo, the bytes that ranks receive over several steps."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._meter = None
        if dist.get_backend() == "gloo":
            # Imported here, after deepspeed.initialize, to show that training itself needs no import of ours.
            from scripts.emulation.traffic import TrafficMeter

            self._meter = TrafficMeter()
        elif dist.get_rank() == 0:
            print(f"bytes are not counted: that needs the backend gloo, this is {dist.get_backend()}", flush=True)

    def start(self) -> None:
        """Start counting."""
        if self._meter is not None:
            self._wait_for_rest()
            self._meter.start()
            dist.barrier()  # no rank sends before all ranks have read their counters

    def stop(self) -> dict[str, float | None]:
        """Stop counting; return bytes by origin, means over the ranks, or None if nothing counts them."""
        if self._meter is None:
            return {"intra_bytes": None, "inter_bytes": None}
        self._wait_for_rest()
        self._meter.stop()
        traffic = self._meter.split(self._group_size)
        return {"intra_bytes": traffic.intra_mean, "inter_bytes": traffic.inter_mean}

    @staticmethod
    def _wait_for_rest() -> None:
        """Wait until nothing arrives any more, since a step may return while its messages are under way."""
        from scripts.emulation.traffic import received_bytes

        before, now = None, received_bytes()
        while now != before:
            time.sleep(REST_SECONDS)
            before, now = now, received_bytes()
        dist.barrier()


def summarize(steps: list[TimedStep], received: dict[str, float | None]) -> dict[str, float | None]:
    """Return seconds, and bytes of a step, over the steps after the warm-up."""
    seconds = [step.seconds for step in steps]
    return {
        "seconds_median": statistics.median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        **{name: None if count is None else count / len(steps) for name, count in received.items()},
    }


def optimizer_bytes(engine: DeepSpeedEngine) -> int:
    """Return the bytes of optimizer states, master weights included, on the rank that holds the most."""
    states = engine.optimizer.optimizer.state  # by master weight
    retained = sum(
        tensor.nbytes
        for master, state in states.items()
        for tensor in (master, *state.values())
        if isinstance(tensor, Tensor) and tensor.dim()  # a count of steps is no state
    )
    most = torch.tensor(retained, device=engine.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most.item())


def versions() -> dict[str, str | None]:
    """Return the versions that the numbers depend on; None for a package that is not installed as a distribution."""
    results: dict[str, str | None] = {}
    for name in ("torch", "deepspeed", "deepspeed_ext"):
        try:
            results[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            results[name] = None
    return results


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the model of the examples, and measure.")
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="decides the model and every batch")
    parser.add_argument("--dim", type=int, default=192, help="width of the model")
    parser.add_argument("--layers", type=int, default=4, help="number of blocks")
    parser.add_argument("--heads", type=int, default=4, help="attention heads")
    parser.add_argument("--sequence-length", type=int, default=128, help="bytes in a row")
    parser.add_argument(
        "--group-size",
        type=int,
        default=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        help="ranks in a group; only splits the counted bytes (default: ranks on this node)",
    )
    parser.add_argument("--report", type=Path, help="rank 0 writes what it saw here, as JSON")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    return deepspeed.add_config_arguments(parser).parse_args()


def build_report(
    args: argparse.Namespace,
    engine: DeepSpeedEngine,
    count: int,
    held: int,
    steps: list[TimedStep],
    summary: dict[str, Any],
) -> dict[str, Any]:
    """Return everything that is needed to compare this run with another."""
    dtype, _ = engine.get_data_types()
    return {
        "versions": versions(),
        "backend": dist.get_backend(),
        "world_size": dist.get_world_size(),
        "group_size": args.group_size,
        "parameters": count,
        "parameter_bytes": count * dtype.itemsize,
        "optimizer_bytes": held,
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "config": json.loads(Path(args.deepspeed_config).read_text()),
        "options": {name: getattr(args, name) for name in ("seed", "dim", "layers", "heads", "sequence_length")},
        "steps": [asdict(step) for step in steps],
        "summary": summary,
    }


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    model = ByteGPT(args.dim, args.layers, args.heads, args.sequence_length)
    count = sum(parameter.numel() for parameter in model.parameters())  # before ZeRO-3 shards them
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())

    batches = Batches(read_corpus(), engine, args.sequence_length, args.seed)
    counter = ByteCounter(args.group_size)
    accumulation = engine.gradient_accumulation_steps()
    steps: list[TimedStep] = []
    warm_up = min(WARM_UP_STEPS, args.steps - 1)
    bar = tqdm(range(args.steps), desc=Path(args.deepspeed_config).stem, unit="step", disable=dist.get_rank() != 0)
    for index in bar:
        micro_batches = [batches.draw(index * accumulation + micro) for micro in range(accumulation)]
        if index == warm_up:
            counter.start()
        steps.append(record(engine, micro_batches))
        bar.set_postfix(loss=f"{steps[-1].loss:.4f}")

    summary = summarize(steps[warm_up:], counter.stop())
    retained = optimizer_bytes(engine)
    if dist.get_rank() == 0:
        report = build_report(args, engine, count, retained, steps, summary)
        print(json.dumps(summary), flush=True)
        if args.report is not None:
            args.report.write_text(json.dumps(report, indent=2) + "\n")
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
