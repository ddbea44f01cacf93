# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Time of a step with and without LoCo where the network between groups is slow.

Two network namespaces are two nodes, with two CPU ranks each; see ``scripts/emulation``. The rate of the link
between them is limited, what ranks of one node send one another is not. That it is so is measured: by a probe inside
a node and between them, and by holding what the interfaces have sent against what the sockets have received from the
other node.

The same perceptron is trained with NIG by two engines in the same processes, which take turns: blocks of plain steps
and blocks of steps with LoCo. LoCo compresses gradients; the updated parameters cross the same link in full precision,
once a step, so the ratio of the step times cannot be less than that of the bytes, which is printed beside it. What the
last rate shows is a link that is no bottleneck.

Needs root, and ``ip`` and ``tc`` of iproute2.

Exit status 0 if the bytes are those of the formula and only they are limited, 1 if not, 2 if it could not run.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from deepspeed_ext.comm.traffic import TrafficMeter
from deepspeed_ext.loco.settings import LocoSettings
from deepspeed_ext.strategy import GroupSizes, ModelStates, parse_strategy
from scripts.checks.steps import record
from scripts.emulation.cluster import collect
from scripts.emulation.launching import start_rank
from scripts.emulation.network import Link
from tests.perf.lib import records

STRATEGY = "NIG"
NODES, RANKS_PER_NODE = 2, 2
SIZES = GroupSizes(NODES * RANKS_PER_NODE, RANKS_PER_NODE)
METHODS: dict[str, dict[str, Any] | None] = {"plain": None, "LoCo": {"bits": 4, "block_size": 128}}
WIDTHS = {"bf16": 2, "fp32": 4}  # bytes of a parameter, and of a gradient
WIDTH, HIDDEN = 1024, 2048  # of the model: many parameters, on which this machine computes for a short time
ACCUMULATION = 4
WARM_UP_STEPS = 2
PROBE_BYTES = 4_000_000
UNLIMITED_MBIT = 2000  # at least so much within a node, as fast as this machine copies
BYTES_BOUND = 0.02
HEADERS_BOUND = 1.1  # bytes on the link for each that a socket receives: 1.003; why so few, network.Traffic says


@dataclass
class Steps:
    """What one engine's steps took at one rate."""

    blocks: list[list[float]]  # seconds of each step, a list a block
    inter_bytes: float  # that a rank received from the other node in a step
    link_bytes: float  # that the link carried in a step for a rank of its receiving end, headers included

    @property
    def seconds(self) -> list[float]:
        return sorted(itertools.chain.from_iterable(self.blocks))

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high


@dataclass
class RateResult:
    """Both engines at one rate."""

    dtype: str
    mbit: float
    parameters: int
    between_mbit: float  # the probes
    within_mbit: float
    plain: Steps
    loco: Steps

    @classmethod
    def of(cls, values: dict[str, Any]) -> "RateResult":
        """Make one from JSON."""
        return cls(**values | {name: Steps(**values[name]) for name in ("plain", "loco")})

    @property
    def ratio(self) -> float:
        """Return the ratio of LoCo to plain, of the medians."""
        return self.loco.median / self.plain.median

    @property
    def ratios(self) -> list[float]:
        """Return the same for each pair of blocks."""
        pairs = zip(self.loco.blocks, self.plain.blocks, strict=True)
        return [statistics.median(loco) / statistics.median(plain) for loco, plain in pairs]

    def formula(self, method: str) -> tuple[float, float]:
        """Return the bytes that a rank must receive from the other node in a step: of parameters, and of gradients."""
        width = WIDTHS[self.dtype]
        states = ModelStates.of(self.parameters, parameter_bytes=width, gradient_bytes=width)
        strategy = parse_strategy(STRATEGY)
        sent = {phase.name: phase.volume.inter for phase in strategy.phases(SIZES, states)}
        loco = METHODS[method]
        ratio = 1.0 if loco is None else LocoSettings(**loco).wire_bits / (8 * width)
        return sent["gather updates"], sent["reduce at the boundary"] * ratio

    def floor(self, method: str) -> float:
        """Return the seconds that the link takes for these bytes alone; all ranks of a node share it."""
        return sum(self.formula(method)) * RANKS_PER_NODE * 8 / (self.mbit * 1e6)

    @property
    def wrong(self) -> list[str]:
        """Return what shows that this did not measure what it claims to."""
        found = []
        for method, steps in (("plain", self.plain), ("LoCo", self.loco)):
            due = sum(self.formula(method))
            if abs(steps.inter_bytes - due) > BYTES_BOUND * due:
                found.append(f"bytes of {method}")
            if steps.link_bytes > HEADERS_BOUND * steps.inter_bytes:
                found.append(f"other traffic on the link with {method}")
        if self.between_mbit > 1.2 * self.mbit or self.within_mbit < UNLIMITED_MBIT:
            found.append("the link's rate")
        return found


# What runs in the ranks ###########################################################################


class Perceptron(nn.Module):
    """Two layers, which return their own loss, as ``steps.record`` expects."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, HIDDEN, bias=False), nn.GELU(), nn.Linear(HIDDEN, WIDTH, bias=False)
        )

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return (self.layers(inputs).float() - targets).square().mean()


class Worker:
    """What a rank needs to measure every dtype at every rate."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._link = Link()
        self._meter = TrafficMeter()
        self._generator = torch.Generator().manual_seed(dist.get_rank())

    def results(self) -> Iterator[RateResult]:
        """Yield a result for each dtype and rate."""
        for dtype in self._args.dtypes:
            engines = {method: self._engine(dtype, method) for method in METHODS}
            count = sum(parameter.numel() for parameter in engines["plain"].module.parameters())
            for mbit in self._args.rates:
                self._link.limit(mbit)
                dist.barrier()
                between, within = (self._probe(other) for other in (RANKS_PER_NODE, 1))
                steps = self._measure(engines)
                yield RateResult(dtype, mbit, count, between, within, steps["plain"], steps["LoCo"])
            for engine in engines.values():
                engine.destroy()

    def _engine(self, dtype: str, method: str) -> Any:
        torch.manual_seed(0)
        zero: dict[str, Any] = {"paro_strategy": STRATEGY, "paro_group_size": RANKS_PER_NODE}
        if METHODS[method] is not None:
            zero["zeropp_loco_param"] = METHODS[method]
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": ACCUMULATION,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "bf16": {"enabled": dtype == "bf16"},
            "steps_per_print": 1_000_000,
            "zero_optimization": zero,
        }
        model = Perceptron()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        return engine

    def _probe(self, other: int) -> float:
        """Return the Mbit/s at which the first rank sends to another one; the best of three."""
        payload, best = torch.zeros(PROBE_BYTES, dtype=torch.uint8), 0.0
        for _ in range(3):
            dist.barrier()
            begin = time.perf_counter()
            if dist.get_rank() == 0:
                dist.send(payload, other)
                dist.recv(payload[:1], other)  # arrived
            elif dist.get_rank() == other:
                dist.recv(payload, 0)
                dist.send(payload[:1], 0)
            best = max(best, PROBE_BYTES * 8 / 1e6 / (time.perf_counter() - begin))
        dist.barrier()
        return best

    def _measure(self, engines: dict[str, Any]) -> dict[str, Steps]:
        """Measure blocks of steps in turns, so that whatever else this machine does falls on both engines."""
        for engine in engines.values():
            for _ in range(WARM_UP_STEPS):
                self._step(engine)
        found = {method: Steps([], 0.0, 0.0) for method in engines}
        for block in range(self._args.blocks):
            for method in sorted(engines, reverse=bool(block % 2)):
                seconds, inter, link = self._block(engines[method])
                found[method].blocks.append(seconds)
                found[method].inter_bytes += inter / self._args.blocks
                found[method].link_bytes += link / self._args.blocks
        return found

    def _block(self, engine: Any) -> tuple[list[float], float, float]:
        """Return each step's seconds, and a rank's bytes in a step: from the other node, and on the link."""
        dist.barrier()
        self._meter.start()
        sent = self._link.sent()
        dist.barrier()
        seconds = [self._step(engine) for _ in range(self._args.block_steps)]
        dist.barrier()
        self._meter.stop()
        carried = torch.tensor(float(self._link.sent() - sent), dtype=torch.float64)
        dist.all_reduce(carried)
        per_rank_step = self._args.block_steps * SIZES.ranks
        received = self._meter.split(RANKS_PER_NODE).inter
        return seconds, sum(received) / per_rank_step, carried.item() / per_rank_step

    def _step(self, engine: Any) -> float:
        """Take a step, and return its seconds."""
        dtype, _ = engine.get_data_types()
        rows = torch.randn(ACCUMULATION, 2, 1, WIDTH, generator=self._generator)
        return record(engine, [(inputs.to(dtype), targets) for inputs, targets in rows]).seconds


def work(args: argparse.Namespace) -> None:
    """Live as a rank: measure and report."""
    first = start_rank()
    total = len(args.dtypes) * len(args.rates)
    results = list(tqdm(Worker(args).results(), "rates", total, disable=not first))
    if first:
        args.worker.write_text(json.dumps([asdict(result) for result in results]))
    dist.destroy_process_group()


# What starts them #################################################################################


def print_table(results: list[RateResult], args: argparse.Namespace) -> None:
    """Print two lines for each result, and the ratio."""
    print(
        f"{STRATEGY}, {NODES} nodes of {RANKS_PER_NODE} CPU ranks, {results[0].parameters / 1e6:.2f} M parameters, "
        f"{ACCUMULATION} micro-batches a step, {args.blocks} blocks of {args.block_steps} steps each, in turns.\n"
        f"MB: what a rank receives from the other node in a step, counted / formula, of which gradients and "
        f"parameters; floor: the time of the formula's bytes on the link."
    )
    for result in results:
        by_bytes = sum(result.formula("LoCo")) / sum(result.formula("plain"))
        print(
            f"\n{result.dtype}, {result.mbit:g} Mbit/s (probes: {result.between_mbit:.0f} between nodes, "
            f"{result.within_mbit:.0f} within): LoCo takes {result.ratio:.3f} of the time (pairs of "
            f"blocks: median {statistics.median(result.ratios):.3f}, {min(result.ratios):.3f} to "
            f"{max(result.ratios):.3f}; ratio of the bytes: {by_bytes:.3f})"
        )
        for method, steps in (("plain", result.plain), ("LoCo", result.loco)):
            low, high = steps.quartiles
            parameters, gradients = result.formula(method)
            print(
                f"  {method:<6} median {steps.median * 1e3:>6.0f} ms (quartiles {low * 1e3:.0f} to {high * 1e3:.0f}), "
                f"floor {result.floor(method) * 1e3:>5.0f} ms; {steps.inter_bytes / 1e6:.3f} / "
                f"{(parameters + gradients) / 1e6:.3f} MB: {gradients / 1e6:.3f} + {parameters / 1e6:.3f} "
                f"(parameters {parameters / (parameters + gradients):.0%}); on the link "
                f"{steps.link_bytes / steps.inter_bytes:.3f} times that"
            )
        if result.wrong:
            print(f"  FAIL: {', '.join(result.wrong)}")


def csv_row(result: RateResult, args: argparse.Namespace) -> dict[str, Any]:
    """Return what identifies a result, and the result."""
    row: dict[str, Any] = {
        "strategy": STRATEGY,
        "nodes": NODES,
        "ranks_per_node": RANKS_PER_NODE,
        "parameters": result.parameters,
        "accumulation": ACCUMULATION,
        "dtype": result.dtype,
        "link_mbit": result.mbit,
        "probe_between_mbit": round(result.between_mbit),
        "probe_within_mbit": round(result.within_mbit),
        "steps_each": args.blocks * args.block_steps,
    }
    for method, steps in (("plain", result.plain), ("loco", result.loco)):
        due = result.formula("plain" if method == "plain" else "LoCo")
        row |= {
            f"{method}_seconds_median": round(steps.median, 5),
            f"{method}_seconds_quartile_1": round(steps.quartiles[0], 5),
            f"{method}_seconds_quartile_3": round(steps.quartiles[1], 5),
            f"{method}_seconds_floor": round(result.floor("plain" if method == "plain" else "LoCo"), 5),
            f"{method}_inter_bytes": round(steps.inter_bytes),
            f"{method}_inter_bytes_formula": round(sum(due)),
            f"{method}_parameter_share": round(due[0] / sum(due), 4),
            f"{method}_link_bytes": round(steps.link_bytes),
        }
    return row | {
        "ratio": round(result.ratio, 4),
        "ratio_blocks_median": round(statistics.median(result.ratios), 4),
        "ratio_blocks_min": round(min(result.ratios), 4),
        "ratio_blocks_max": round(max(result.ratios), 4),
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time steps with and without LoCo on a slow link.")
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[100, 300, 1000, 10000], metavar="MBIT", help="of the link"
    )
    parser.add_argument("--dtypes", nargs="+", choices=WIDTHS, default=list(WIDTHS), metavar="NAME")
    parser.add_argument("--blocks", type=int, default=4, help="blocks of steps for each engine, in turns")
    parser.add_argument("--block-steps", type=int, default=4, help="steps of a block")
    parser.add_argument("--log", type=Path, default=Path("loco_network.log"), help="what the ranks print")
    parser.add_argument("--timeout", type=float, default=1200, help="seconds that all of it may take")
    parser.add_argument("--json", type=Path, help="write the time of every step here")
    parser.add_argument("--csv", type=Path, help="append a row a result here")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # a rank, and where it reports
    args = parser.parse_args()
    if args.blocks < 1 or args.block_steps < 2 or min(args.rates) <= 0:
        parser.error("--blocks and --rates must be positive, and --block-steps at least 2 (their spread is shown)")
    return args


def main() -> int:
    args = parse_arguments()
    if args.worker is not None:
        work(args)
        return 0
    results = [
        RateResult.of(values) for values in collect(NODES, RANKS_PER_NODE, __spec__.name, args.log, args.timeout)
    ]
    print_table(results, args)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    if args.csv is not None:
        records.append_rows(args.csv, [csv_row(result, args) for result in results])
    return 1 if any(result.wrong for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
