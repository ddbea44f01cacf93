# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Does training with LoCo end where training without it ends?

Trains the byte-level GPT of scripts/examples, small, with NIG on CPU ranks that count as groups: for each optimizer,
seed and way to send gradients between groups, from the same weights and on the same batches. The final loss is the
mean over the last tenth of the steps, during which the learning rate goes to zero. Norms are those that the engine
reports, before clipping: bounded is the ratio of their means over a run. The mean of the ratios of single steps is
shown beside it; steps at which the loss of one of two runs jumps sway it. Bytes are read from the kernel's counters. A
control does not compress either, but starts from weights that noise has moved a little: it shows how far two runs part
that are equally good.

Exit status 0 if LoCo keeps its bounds, 1 if it does not, 2 if the run failed. That large blocks without feedback do
worse is reported; it shows that the task would show a difference.
"""

import argparse
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
from tqdm import tqdm

from deepspeed_ext.comm.traffic import TrafficMeter
from deepspeed_ext.strategy import GroupSizes, ModelStates, parse_strategy
from scripts.checks.steps import average, train_step
from scripts.emulation.launching import add_options, collect, exit_on_signals, parse, start_rank
from scripts.examples.gpt import Batches, ByteGPT, read_corpus
from tests.perf.lib import records

STRATEGY = "NIG"
LOSS_BOUND = 0.005
NORM_BOUNDS = (0.97, 1.03)
FINAL = 0.1  # of the steps
REFERENCE, CONTROL, LOCO, COARSE = "none", "control", "LoCo", "int4/4096"
METHODS: dict[str, dict[str, Any] | None] = {
    REFERENCE: None,
    CONTROL: None,
    LOCO: {"bits": 4, "block_size": 128},
    "int4/128": {"bits": 4, "block_size": 128, "error_feedback": False},
    COARSE: {"bits": 4, "block_size": 4096, "error_feedback": False},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}},
    "SGD": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
}
MODEL = {"dim": 64, "layers": 2, "heads": 4, "sequence_length": 64}
MICRO_BATCH = 8
CORPUS_BYTES = 2_000_000
CONTROL_NOISE = 1e-3  # of a weight


@dataclass
class SeedRun:
    """The training run of one seed."""

    optimizer: str
    method: str
    seed: int
    losses: list[float]  # means over ranks
    norms: list[float]  # of the whole gradient
    compression: float  # of the gradients between groups
    seconds: float

    @property
    def final_loss(self) -> float:
        """Return the mean over the last steps."""
        return statistics.fmean(self.losses[-max(1, round(FINAL * len(self.losses))) :])


@dataclass
class LocoRow:
    """All seeds of a method, held against the reference with the same seed."""

    optimizer: str
    method: str
    final_loss: float
    seed_spread: float  # standard deviation
    differences: list[float]  # relative, a seed each
    norm_ratios: list[float]  # means over the steps of the ratio, a seed each
    ratios_of_means: list[float]  # of the norms, which single steps at which one run's loss jumps sway less
    compression: float
    seconds: float  # a run

    @property
    def difference(self) -> float:
        return statistics.fmean(self.differences)

    @property
    def out_of_bounds(self) -> list[str]:
        """Return what LoCo does not keep and must, with every seed."""
        low, high = NORM_BOUNDS
        wrong = ["loss"] if max(map(abs, self.differences)) > LOSS_BOUND else []
        return wrong + ([] if all(low <= ratio <= high for ratio in self.ratios_of_means) else ["norm"])


# What runs in the ranks ###########################################################################


class Worker:
    """What a rank needs to train again and again."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._corpus = read_corpus(CORPUS_BYTES)

    def runs(self) -> Iterator[SeedRun]:
        """Train with each optimizer, seed and method."""
        for optimizer in self._args.optimizers:
            for seed in range(self._args.seeds):
                for method in METHODS:
                    yield self._train(optimizer, method, seed)

    def _train(self, optimizer: str, method: str, seed: int) -> SeedRun:
        begin = time.perf_counter()
        torch.manual_seed(seed)
        model = ByteGPT(**MODEL)
        if method == CONTROL:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + CONTROL_NOISE * torch.randn_like(parameter))
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=self._configuration(optimizer, method)
        )
        batches = Batches(self._corpus, engine, MODEL["sequence_length"], seed)
        meter, losses, norms = TrafficMeter(), [], []
        for step in range(self._args.steps):
            if step == 1:  # the step before opens connections
                dist.barrier()
                meter.start()
                dist.barrier()
            numbers = range(step * self._args.accumulation, (step + 1) * self._args.accumulation)
            losses.append(train_step(engine, [batches.draw(number) for number in numbers]))
            norms.append(float(engine.get_global_grad_norm()))
        dist.barrier()
        meter.stop()
        received = meter.split(self._args.group_size).inter_mean / (self._args.steps - 1)
        count = sum(parameter.numel() for parameter in model.parameters())
        engine.destroy()
        return SeedRun(
            optimizer,
            method,
            seed,
            [average(loss) for loss in losses],
            norms,
            self._compression(count, received),
            time.perf_counter() - begin,
        )

    def _compression(self, count: int, received: float) -> float:
        """Return the bytes that gradients have by the formula, over those that a rank received besides parameters."""
        sizes = GroupSizes(self._args.ranks, self._args.group_size)
        states = ModelStates.of(count, parameter_bytes=4, gradient_bytes=4)
        strategy = parse_strategy(STRATEGY)
        sent = {phase.name: phase.volume.inter for phase in strategy.phases(sizes, states)}
        return sent["reduce at the boundary"] / (received - sent["gather updates"])

    def _configuration(self, optimizer: str, method: str) -> dict[str, Any]:
        zero: dict[str, Any] = {"paro_strategy": STRATEGY, "paro_group_size": self._args.group_size}
        if METHODS[method] is not None:
            zero["zeropp_loco_param"] = METHODS[method]
        chosen = OPTIMIZERS[optimizer]
        schedule = {
            "warmup_min_lr": 0.0,
            "warmup_max_lr": chosen["params"]["lr"],
            "warmup_num_steps": max(2, self._args.steps // 10),
            "warmup_type": "linear",
            "total_num_steps": self._args.steps,
        }
        return {
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "gradient_accumulation_steps": self._args.accumulation,
            "gradient_clipping": 1.0,
            "optimizer": chosen,
            "scheduler": {"type": "WarmupDecayLR", "params": schedule},
            "zero_allow_untested_optimizer": True,  # SGD
            "steps_per_print": 1_000_000,
            "zero_optimization": zero,
        }


def work(args: argparse.Namespace) -> None:
    """Live as a rank: train and report."""
    first = start_rank()
    total = len(args.optimizers) * args.seeds * len(METHODS)
    runs = []
    for run in tqdm(Worker(args).runs(), "runs", total, disable=not first):
        runs.append(run)
        if first:
            print(
                f"{run.optimizer} {run.method} seed {run.seed}: {run.final_loss:.4f}, {run.seconds:.0f} s", flush=True
            )
    if first:
        args.worker.write_text(json.dumps([asdict(run) for run in runs]))
    dist.destroy_process_group()


# What starts them #################################################################################


def rows_of(runs: list[SeedRun]) -> list[LocoRow]:
    """Return a row for each optimizer and method."""
    found = {(run.optimizer, run.method, run.seed): run for run in runs}
    rows = []
    for optimizer, method in dict.fromkeys((run.optimizer, run.method) for run in runs):
        mine = [run for run in runs if (run.optimizer, run.method) == (optimizer, method)]
        pairs = [(run, found[optimizer, REFERENCE, run.seed]) for run in mine]
        losses = [run.final_loss for run in mine]
        rows.append(
            LocoRow(
                optimizer,
                method,
                statistics.fmean(losses),
                statistics.stdev(losses) if len(losses) > 1 else 0.0,
                [run.final_loss / reference.final_loss - 1 for run, reference in pairs],
                [
                    statistics.fmean(a / b for a, b in zip(run.norms, reference.norms, strict=True))
                    for run, reference in pairs
                ],
                [statistics.fmean(run.norms) / statistics.fmean(reference.norms) for run, reference in pairs],
                statistics.fmean(run.compression for run in mine),
                statistics.fmean(run.seconds for run in mine),
            )
        )
    return rows


def print_table(rows: list[LocoRow], runs: list[SeedRun], args: argparse.Namespace) -> None:
    """Print a line for each row, then what follows from them."""
    sizes = GroupSizes(args.ranks, args.group_size)
    print(
        f"{STRATEGY}, {sizes.ranks} ranks in {sizes.groups} groups, fp32, {args.seeds} seeds, {args.steps} steps "
        f"of {args.accumulation} micro-batches; first loss {statistics.fmean(run.losses[0] for run in runs):.3f}"
    )
    print(
        f"{'':<17}{'final loss':>10}{'+- seeds':>10}{'against none':>14}{'(each seed)':>27}{'norm ratio':>12}"
        f"{'of means':>10}{'compression':>13}{'s a run':>9}"
    )
    for row in rows:
        seeds = " ".join(f"{difference:+.2%}" for difference in row.differences)
        print(
            f"{row.optimizer:<7}{row.method:<10}{row.final_loss:>10.4f}{row.seed_spread:>10.4f}"
            f"{row.difference:>+14.3%}{seeds:>27}{statistics.fmean(row.norm_ratios):>12.4f}"
            f"{statistics.fmean(row.ratios_of_means):>10.4f}{row.compression:>13.2f}{row.seconds:>9.1f}"
        )


def print_verdict(rows: list[LocoRow]) -> bool:
    """Whether LoCo keeps its bounds; and whether the task shows what coarse quantization costs."""
    passed = True
    found = {(row.optimizer, row.method): row for row in rows}
    for optimizer in dict.fromkeys(row.optimizer for row in rows):
        loco, coarse = found[optimizer, LOCO], found[optimizer, COARSE]
        passed &= not loco.out_of_bounds
        worst = max(map(abs, loco.differences))
        norms, means = (f"{min(r):.3f} to {max(r):.3f}" for r in (loco.norm_ratios, loco.ratios_of_means))
        print(
            f"{'FAIL' if loco.out_of_bounds else 'PASS'}  {optimizer}: LoCo's final loss is within {worst:.2%} of "
            f"none with every seed (bound {LOSS_BOUND:.1%}; the seeds' spread is "
            f"{found[optimizer, REFERENCE].seed_spread / found[optimizer, REFERENCE].final_loss:.2%}), norms "
            f"{means} (ratios of means; bounds {NORM_BOUNDS[0]} to {NORM_BOUNDS[1]}; means of ratios {norms})"
        )
        gaps = [b - a for a, b in zip(loco.differences, coarse.differences, strict=True)]
        verdict = "worse with every seed" if min(gaps) > 0 else "NOT worse with every seed"
        print(
            f"      {optimizer}: {COARSE} without feedback is {verdict} than LoCo, by "
            f"{', '.join(f'{gap:+.2%}' for gap in gaps)}"
        )
    return passed


def csv_row(row: LocoRow, args: argparse.Namespace) -> dict[str, Any]:
    """Return what identifies a result, and the result."""
    return {
        "strategy": STRATEGY,
        "ranks": args.ranks,
        "group_size": args.group_size,
        "steps": args.steps,
        "accumulation": args.accumulation,
        "seeds": args.seeds,
        "optimizer": row.optimizer,
        "method": row.method,
        "final_loss": round(row.final_loss, 6),
        "seed_spread": round(row.seed_spread, 6),
        "relative_difference": round(row.difference, 6),
        "relative_difference_by_seed": " ".join(f"{difference:.6f}" for difference in row.differences),
        "norm_ratio": round(statistics.fmean(row.norm_ratios), 5),
        "norm_ratio_by_seed": " ".join(f"{ratio:.5f}" for ratio in row.norm_ratios),
        "ratio_of_mean_norms": round(statistics.fmean(row.ratios_of_means), 5),
        "compression": round(row.compression, 3),
        "seconds_a_run": round(row.seconds, 1),
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train with and without LoCo, and compare where that ends.")
    add_options(parser, "loco_convergence.log", 3600)
    parser.add_argument("--seeds", type=int, default=3, help="training runs of each kind")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of a run")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches in a step")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS), metavar="NAME")
    parser.add_argument("--json", type=Path, help="write every loss and norm here")
    parser.add_argument("--csv", type=Path, help="append a row a result here")
    args = parse(parser)
    if args.seeds < 1 or args.steps < 2:
        parser.error("--seeds must be at least 1, and --steps at least 2")
    return args


def main() -> int:
    args = parse_arguments()
    if args.worker is not None:
        work(args)
        return 0
    exit_on_signals()
    begin = time.perf_counter()
    runs = [SeedRun(**run) for run in collect(__spec__.name, args)]
    rows = rows_of(runs)
    print_table(rows, runs, args)
    passed = print_verdict(rows)
    print(f"{time.perf_counter() - begin:.0f} s in all")
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(run) for run in runs], indent=2) + "\n")
    if args.csv is not None:
        records.append_rows(args.csv, [csv_row(row, args) for row in rows])
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
