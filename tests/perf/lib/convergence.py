# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Trains the byte-level GPT of scripts/examples, small, on CPU ranks that count as groups, again and again.

For each optimizer, seed and method, from the same weights and on the same batches. The final loss is the mean over the
last tenth of the steps, during which the learning rate goes to zero. Norms are those that the engine reports, before
clipping: bounded is the ratio of their means over a run. The mean of the ratios of single steps is shown beside it;
steps at which the loss of one of two runs jumps sway it. Bytes are read from the kernel's counters. A control sends
what its reference sends, but starts from weights that noise has moved a little: it shows how far two runs part that
are equally good.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from tqdm import tqdm

from deepspeed_ext.loco import setup
from deepspeed_ext.loco.sums import QuantizedSums
from deepspeed_ext.loco.updates import QuantizedDifferences
from deepspeed_ext.model_bytes import matrices
from scripts.emulation.launching import add_options, collect, exit_on_signals, parse, start_rank
from scripts.emulation.traffic import TrafficMeter
from scripts.examples.gpt import Batches, ByteGPT, read_corpus
from scripts.examples.steps import average, train_step
from tests.perf.lib import records

TIMEOUT = 5400  # seconds that all runs may take
FINAL = 0.1  # of the steps
LOSS_BOUND = 0.005
CONTROL_NOISE = 1e-3  # of a weight
MODEL = {"dim": 64, "layers": 2, "heads": 4, "sequence_length": 64}
MICRO_BATCH = 8
CORPUS_BYTES = 2_000_000
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}}
MUON = {  # embeddings, the head and norms are Adam's
    "type": "Muon",
    "params": {"muon_lr": 0.02, "adam_lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True},
}


@dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes:
        strategy: its name.
        zero: more of ``zero_optimization``.
        against: the method that it is held against.
        noise: that moves the first weights, in their size.
        hop: what takes the place of what sends differences, or sums.
    """

    strategy: str
    against: str
    zero: Mapping[str, Any] = field(default_factory=dict)
    noise: float = 0.0
    hop: type[QuantizedDifferences] | type[QuantizedSums] | None = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put ``hop`` in the place of the class of the package from which it is derived."""
        replaced = (kind for kind in (QuantizedDifferences, QuantizedSums) if self.hop and issubclass(self.hop, kind))
        with ExitStack() as stack:
            for kind in replaced:
                stack.enter_context(mock.patch.object(setup, kind.__name__, self.hop))
            yield


@dataclass(frozen=True)
class Task:
    """What is trained, and how."""

    methods: Mapping[str, Method]
    optimizers: Mapping[str, dict[str, Any]]
    bf16: bool = False


@dataclass
class SeedRun:
    """The training run of one seed."""

    optimizer: str
    method: str
    seed: int
    losses: list[float]  # means over ranks
    norms: list[float]  # of the whole gradient
    received: float  # bytes a rank and step, between groups
    elements: int  # of the model
    seconds: float
    matrices: int = 0  # elements that Muon trains

    @property
    def final_loss(self) -> float:
        """Return the mean over the last steps."""
        return statistics.fmean(self.losses[-max(1, round(FINAL * len(self.losses))) :])


@dataclass
class MethodRow:
    """All seeds of a method, held against its reference with the same seed."""

    optimizer: str
    method: str
    final_loss: float
    seed_spread: float  # standard deviation
    differences: list[float]  # relative, a seed each
    norm_ratios: list[float]  # means over the steps of the ratio, a seed each
    ratios_of_means: list[float]  # of the norms, which single steps at which one run's loss jumps sway less
    received: float
    elements: int
    matrices: int
    seconds: float  # a run

    @property
    def difference(self) -> float:
        """Return the mean over seeds."""
        return statistics.fmean(self.differences)

    @property
    def worst(self) -> float:
        """Return the largest difference of a seed."""
        return max(map(abs, self.differences))

    def csv(self, args: argparse.Namespace) -> dict[str, Any]:
        """Return what identifies it, and it, but for what a program adds."""
        return {
            "ranks": args.ranks,
            "group_size": args.group_size,
            "steps": args.steps,
            "accumulation": args.accumulation,
            "seeds": args.seeds,
            "optimizer": self.optimizer,
            "method": self.method,
            "final_loss": round(self.final_loss, 6),
            "seed_spread": round(self.seed_spread, 6),
            "relative_difference": round(self.difference, 6),
            "relative_difference_by_seed": " ".join(f"{difference:.6f}" for difference in self.differences),
            "norm_ratio": round(statistics.fmean(self.norm_ratios), 5),
            "norm_ratio_by_seed": " ".join(f"{ratio:.5f}" for ratio in self.norm_ratios),
            "ratio_of_mean_norms": round(statistics.fmean(self.ratios_of_means), 5),
        }


# What runs in the ranks ###########################################################################


class Worker:
    """What a rank needs to train again and again."""

    def __init__(self, args: argparse.Namespace, task: Task) -> None:
        self._args = args
        self._task = task
        self._corpus = read_corpus(CORPUS_BYTES)

    def runs(self, done: Sequence[SeedRun]) -> Iterator[SeedRun]:
        """Train with each optimizer, seed and method, but for what is done."""
        found = {(run.optimizer, run.seed, run.method): run for run in done if len(run.losses) == self._args.steps}
        for optimizer in self._args.optimizers:
            for seed in range(self._args.seeds):
                for method in self._args.methods:
                    yield found.get((optimizer, seed, method)) or self._train(optimizer, method, seed)

    def _train(self, optimizer: str, name: str, seed: int) -> SeedRun:
        begin = time.perf_counter()
        method = self._task.methods[name]
        torch.manual_seed(seed)
        model = ByteGPT(**MODEL)
        if method.noise:
            move(model, method.noise)
        count = sum(parameter.numel() for parameter in model.parameters())
        config = self._configuration(optimizer, method)
        with method.in_place():
            engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        whole = sum(parameter.numel() for parameter in matrices(model.parameters()))
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
        engine.destroy()
        seconds = time.perf_counter() - begin
        means = [average(loss) for loss in losses]
        return SeedRun(optimizer, name, seed, means, norms, received, count, seconds, whole)

    def _configuration(self, optimizer: str, method: Method) -> dict[str, Any]:
        zero = {"paro_strategy": method.strategy, "paro_group_size": self._args.group_size, **method.zero}
        kind = self._task.optimizers[optimizer]
        return configuration(kind, zero, self._args.steps, self._args.accumulation, bf16=self._task.bf16)


def move(model: torch.nn.Module, noise: float) -> None:
    """Move the first weights by random parts of their size, with the random numbers that come next."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + noise * torch.randn_like(parameter))


def configuration(
    optimizer: Mapping[str, Any],
    zero: Mapping[str, Any],
    steps: int,
    accumulation: int = 1,
    *,
    bf16: bool,
) -> dict[str, Any]:
    """Return DeepSpeed's configuration of a run, during which the learning rate rises for a tenth, and then falls to
    zero.

    Args:
        optimizer: its section.
        zero: the section ``zero_optimization``.
        steps: of the optimizer.
        accumulation: micro-batches in a step.
        bf16: whether it trains in that, with fp32 masters.
    """
    schedule = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": [rate for key, rate in optimizer["params"].items() if key.endswith("lr")],  # by group
        "warmup_num_steps": max(2, steps // 10),
        "warmup_type": "linear",
        "total_num_steps": steps,
    }
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": bf16},
        "optimizer": optimizer,
        "scheduler": {"type": "WarmupDecayLR", "params": schedule},
        "zero_allow_untested_optimizer": True,  # SGD
        "steps_per_print": 1_000_000,
        "zero_optimization": dict(zero),
    }


def work(args: argparse.Namespace, task: Task) -> None:
    """Live as a rank: train and report."""
    first = start_rank()
    torch._dynamo.config.disable = True  # Muon's compiled kernels take minutes to compile for ranks without a GPU
    done = read_runs(args.runs)
    dist.barrier()  # all have read before the first one writes
    runs = []
    total = len(args.optimizers) * args.seeds * len(args.methods)
    for run in tqdm(Worker(args, task).runs(done), "runs", total, disable=not first):
        runs.append(run)
        if first and run not in done:
            print(
                f"{run.optimizer} {run.method} seed {run.seed}: {run.final_loss:.4f}, {run.seconds:.0f} s", flush=True
            )
            if args.runs is not None:
                with args.runs.open("a") as file:
                    file.write(json.dumps(asdict(run)) + "\n")
    if first:
        args.worker.write_text(json.dumps([asdict(run) for run in runs]))
    dist.destroy_process_group()


def read_runs(path: Path | None) -> list[SeedRun]:
    """Return the runs in such a file; none if there is no file."""
    if path is None or not path.exists():
        return []
    return [SeedRun(**json.loads(line)) for line in path.read_text().splitlines()]


# What starts them #################################################################################


Report = Callable[[list[MethodRow], argparse.Namespace], tuple[bool, list[dict[str, Any]]]]


def main(module: str, about: str, task: Task, steps: int, report: Report) -> int:
    """Be a program that trains, or one of its ranks.

    Args:
        module: its name.
        about: what it does, for ``--help``.
        task: what is trained.
        steps: of a run, if nothing else is said.
        report: prints a table and a verdict; returns whether all is well, and rows to keep.

    Returns:
        The exit status.
    """
    args = parse_arguments(about, task, f"{module.rpartition('.')[2]}.log", steps)
    if args.worker is not None:
        work(args, task)
        return 0
    exit_on_signals()
    begin = time.perf_counter()
    passed, kept = report(train(module, args, task), args)
    print(f"{time.perf_counter() - begin:.0f} s in all")
    if args.csv is not None:
        records.append_rows(args.csv, kept)
    return 0 if passed else 1


def parse_arguments(about: str, task: Task, log: str, steps: int) -> argparse.Namespace:
    """Parse the options of a program that trains."""
    parser = argparse.ArgumentParser(description=about)
    add_options(parser, log, TIMEOUT)
    parser.add_argument("--seeds", type=int, default=3, help="training runs of each kind")
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps of a run")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches in a step")
    for option, names in (("--optimizers", task.optimizers), ("--methods", task.methods)):
        parser.add_argument(option, nargs="+", choices=names, default=list(names), metavar="NAME")
    parser.add_argument("--runs", type=Path, help="every loss and norm, a line a run; those that are there are taken")
    parser.add_argument("--csv", type=Path, help="append a row a result here")
    args = parse(parser)
    if args.seeds < 1 or args.steps < 2:
        parser.error("--seeds must be at least 1, and --steps at least 2")
    missing = {task.methods[name].against for name in args.methods} - set(args.methods)
    if missing:
        parser.error(f"--methods must also name {', '.join(sorted(missing))}, which others are held against")
    return args


def train(module: str, args: argparse.Namespace, task: Task) -> list[MethodRow]:
    """Let ranks of a program train; return a row for each optimizer and method."""
    runs = [SeedRun(**run) for run in collect(module, args)]
    first_loss = statistics.fmean(run.losses[0] for run in runs)
    print(
        f"{args.ranks} ranks in groups of {args.group_size}, {'bf16' if task.bf16 else 'fp32'}, {args.seeds} seeds, "
        f"{args.steps} steps of {args.accumulation} micro-batches; first loss {first_loss:.3f}"
    )
    found = {(run.optimizer, run.method, run.seed): run for run in runs}
    rows = []
    for optimizer, method in dict.fromkeys((run.optimizer, run.method) for run in runs):
        mine = [run for run in runs if (run.optimizer, run.method) == (optimizer, method)]
        pairs = [(run, found[optimizer, task.methods[method].against, run.seed]) for run in mine]
        losses = [run.final_loss for run in mine]
        rows.append(
            MethodRow(
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
                statistics.fmean(run.received for run in mine),
                mine[0].elements,
                mine[0].matrices,
                statistics.fmean(run.seconds for run in mine),
            )
        )
    return rows


def print_table(rows: Sequence[MethodRow], columns: Mapping[str, Sequence[float]]) -> None:
    """Print a line for each row, with more columns of the caller's."""
    print(
        f"{'':<29}{'final loss':>10}{'+- seeds':>10}{'difference':>12}{'(each seed)':>27}{'norm ratio':>12}"
        f"{'of means':>10}{''.join(f'{name:>13}' for name in columns)}{'s a run':>9}"
    )
    for row, *values in zip(rows, *columns.values(), strict=True):
        seeds = " ".join(f"{difference:+.2%}" for difference in row.differences)
        print(
            f"{row.optimizer:<7}{row.method:<22}{row.final_loss:>10.4f}{row.seed_spread:>10.4f}"
            f"{row.difference:>+12.3%}{seeds:>27}{statistics.fmean(row.norm_ratios):>12.4f}"
            f"{statistics.fmean(row.ratios_of_means):>10.4f}{''.join(f'{value:>13.2f}' for value in values)}"
            f"{row.seconds:>9.1f}"
        )
