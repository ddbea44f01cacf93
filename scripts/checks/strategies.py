# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Run every strategy on this machine's CPU, and hold each against stock DeepSpeed and against its formula.

One row a strategy: how far its weights are from those that stock DeepSpeed trains (ZeRO-2 where parameters are not
cut, ZeRO-3 where they are; same seed, same data, same processes), the bytes that a rank receives in an optimizer step,
read from the kernel's counters, and the bytes that a rank holds of each model state, read from the storages of its
tensors. All ranks are processes on this machine, which count as ``ranks / group size`` groups.

Exit status 0 if all is within bounds, 1 if something is not, 2 if the run failed.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from deepspeed_ext.comm.traffic import TrafficMeter
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates
from deepspeed_ext.zero.stage3 import Stage3Optimizer
from scripts.checks.model_states import held, largest, whole_weights
from scripts.checks.training import SEED, configuration
from scripts.emulation.launching import add_options, collect, exit_on_signals, parse, start_rank
from scripts.examples.gpt import Batches, ByteGPT, read_corpus

PARITY_BOUND = 1e-5  # of the largest weight
BYTES_BOUND = 0.02
MEMORY_BOUND = 0.05
COLUMNS = ("intra", "inter", "parameters", "gradients", "optimizer")
STEPS = 3
MODEL = {"dim": 192, "layers": 2, "heads": 4, "sequence_length": 64}
CORPUS_BYTES = 500_000


@dataclass
class StrategyRow:
    """The largest relative difference of a strategy's weights to stock's, and bytes counted and due by column."""

    strategy: str
    difference: float
    counted: dict[str, float]
    formula: dict[str, float]

    @property
    def out_of_bounds(self) -> list[str]:
        """Return what is out of bounds."""
        wrong = [] if self.difference <= PARITY_BOUND else ["weights"]
        for column in COLUMNS:
            bound = BYTES_BOUND if column in ("intra", "inter") else MEMORY_BOUND
            if abs(self.counted[column] - self.formula[column]) > bound * self.formula[column]:
                wrong.append(column)
        return wrong


# What runs in the ranks ###########################################################################


class Worker:
    """What a rank needs to train the same model again and again."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._corpus = read_corpus(CORPUS_BYTES)
        self._stock: dict[int, Tensor] = {}  # ZeRO stage: weights

    def rows(self) -> Iterator[StrategyRow]:
        """Train with each strategy."""
        sizes = GroupSizes(self._args.ranks, self._args.group_size)
        for name in self._args.strategies:
            strategy = STRATEGIES[name]
            oracle = 3 if strategy.stage == 3 else 2
            if oracle not in self._stock:
                engine, _ = self._train({"stage": oracle})
                self._stock[oracle] = whole_weights(engine.module)
                engine.destroy()
            engine, counted = self._train({"paro_strategy": name, "paro_group_size": sizes.group_size})
            stock = self._stock[oracle]
            difference = largest(((whole_weights(engine.module) - stock).abs().max() / stock.abs().max()).item())
            self._micro_step(engine, STEPS * self._args.accumulation)
            counted |= {state: largest(nbytes) for state, nbytes in asdict(held(engine)).items()}
            count = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
            states = ModelStates.of(count, parameter_bytes=4, gradient_bytes=4)
            volume = strategy.volume(sizes, states, self._args.accumulation)
            formula = asdict(volume) | asdict(strategy.memory(sizes, states))
            yield StrategyRow(name, difference, counted, formula)
            engine.destroy()

    def _train(self, zero: dict[str, Any]) -> tuple[Any, dict[str, float]]:
        """Train from the seed; the engine, and the bytes that a rank received in the last step."""
        torch.manual_seed(SEED)
        model = ByteGPT(**MODEL)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=configuration(self._args.accumulation, zero)
        )
        meter = TrafficMeter()
        for step in range(STEPS):  # the last one is metered: those before open connections and record the modules
            dist.barrier()
            meter.start()
            for number in range(step * self._args.accumulation, (step + 1) * self._args.accumulation):
                self._micro_step(engine, number)
                engine.step()
            if isinstance(engine.optimizer, Stage3Optimizer):
                engine.optimizer.parameters.drain()  # or slices are completed during the next forward
            dist.barrier()
            meter.stop()
        traffic = meter.split(self._args.group_size)
        return engine, {"intra": traffic.intra_mean, "inter": traffic.inter_mean}

    def _micro_step(self, engine: Any, number: int) -> None:
        tokens, targets = Batches(self._corpus, engine, MODEL["sequence_length"], SEED).draw(number)
        engine.backward(engine(tokens, targets))


def work(args: argparse.Namespace) -> None:
    """Live as a rank: train and report."""
    first = start_rank()
    rows = list(tqdm(Worker(args).rows(), "strategies", len(args.strategies), disable=not first))
    if first:
        args.worker.write_text(json.dumps([asdict(row) for row in rows]))
    dist.destroy_process_group()


# What starts them #################################################################################


def print_table(rows: list[StrategyRow], args: argparse.Namespace) -> None:
    """Print a line for each strategy; MB that a rank receives in a step or holds, counted / by the formula."""
    sizes = GroupSizes(args.ranks, args.group_size)
    print(
        f"{sizes.ranks} ranks in {sizes.groups} groups, {args.accumulation} micro-batches a step, fp32 with Adam; "
        f"MB a rank, counted / formula"
    )
    titles = ("received in group", "between groups", "parameters", "gradients", "optimizer")
    print(f"{'':<6}{'weights':>9}" + "".join(f"{title:>19}" for title in titles))
    for row in rows:
        pairs = (f"{row.counted[c] / 1e6:>9.3f} /{row.formula[c] / 1e6:>8.3f}" for c in COLUMNS)
        verdict = f"out of bounds: {', '.join(row.out_of_bounds)}" if row.out_of_bounds else "ok"
        print(f"{row.strategy:<6}{row.difference:>9.1e}{''.join(pairs)}  {verdict}")
    print(
        f"bounds: weights {PARITY_BOUND:g} of the largest (against stock ZeRO-2 where parameters are whole, else "
        f"ZeRO-3), received {BYTES_BOUND:.0%}, held {MEMORY_BOUND:.0%}"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check every strategy on this machine's CPU.")
    add_options(parser, "strategies.log", 600)
    parser.add_argument("--accumulation", type=int, default=2, help="micro-steps in an optimizer step, at least 2")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES), metavar="NAME")
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    args = parse(parser)
    if args.accumulation < 2:
        parser.error("gradients are counted between two micro-steps: --accumulation must be at least 2")
    return args


def main() -> int:
    args = parse_arguments()
    if args.worker is not None:
        work(args)
        return 0
    exit_on_signals()
    rows = [StrategyRow(**row) for row in collect(__spec__.name, args)]
    print_table(rows, args)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return 1 if any(row.out_of_bounds for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
