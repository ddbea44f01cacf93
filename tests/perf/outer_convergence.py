# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Does training with an outer optimizer between groups end where exact training ends, and what do 4 bits cost?

    python -m tests.perf.outer_convergence --csv FILE

Trains the model of ``lib/convergence.py`` in bf16 with fp32 masters: with each method on as many tokens, and with
twice the groups on twice as many. Groups, of one rank by default, train apart under NII, which alone trains as NIG
does. Losses are those of outer weights, on text that no run trains on: of each 220,000 bytes of the corpus the last
20,000, so that it is of the same kind. Beside them stand the losses of each group's own weights a step before the end,
when the rate is next to zero, and the last outer step has not been taken.

A run is added to FILE as soon as it has ended. Started again, the program trains what is missing there of the same
settings: it may be stopped at any time.

Exit status 0 if 4 bits end within the bound of 32 bits on average, 1 if they do not, 2 if a run failed.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor
from tqdm import tqdm

from deepspeed_ext import outer_weights
from scripts.emulation.launching import add_options, exit_on_signals, launch_workers, start_rank
from scripts.emulation.traffic import TrafficMeter
from scripts.examples.gpt import Batches, ByteGPT, read_corpus
from scripts.examples.steps import average, train_step
from tests.perf.lib import convergence, outer_rows, records
from tests.perf.lib.convergence import CORPUS_BYTES, FINAL, MICRO_BATCH, MODEL
from tests.perf.lib.outer_rows import GROUPS, METHODS, SEEDS, STEPS, OuterRow, Run
from tests.perf.tables import markdown

OPTIMIZERS = {"AdamW": convergence.ADAMW, "Muon": convergence.MUON}
DTYPE = "bf16"
HELD_OUT, PERIOD = 20_000, 220_000  # bytes: so many of each so many
EVALUATED = 1024  # rows of held-out text
POINTS = 10  # of the curve
TIMEOUT = 48 * 3600  # seconds that a launch may take


def split(corpus: Tensor) -> tuple[Tensor, Tensor]:
    """Return what is trained on, and what is held out."""
    place = torch.arange(len(corpus)) % PERIOD
    held = place >= PERIOD - HELD_OUT
    return corpus[~held], corpus[held]


def held_out_rows(text: Tensor, rank: int, ranks: int) -> Tensor:
    """Return the rows that a rank evaluates, of the same length as those that are trained, and one more byte."""
    length = MODEL["sequence_length"]
    starts = torch.linspace(0, len(text) - length - 1, EVALUATED).long()[rank::ranks]
    return text[starts[:, None] + torch.arange(length + 1)].long()


class Trainer:
    """Trains one run after another, as one of the ranks."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._corpus, held = split(read_corpus(CORPUS_BYTES * PERIOD // (PERIOD - HELD_OUT)))
        self._rows = held_out_rows(held, dist.get_rank(), dist.get_world_size())

    def train(self, run: Run) -> OuterRow:
        """Train, and evaluate."""
        begin = time.perf_counter()
        torch.manual_seed(run.seed)
        model = ByteGPT(**MODEL)
        method = METHODS[run.method]
        outer = outer_of(self._args, run)
        zero = {"paro_strategy": method.strategy, "paro_group_size": self._args.group_size, **method.zero}
        zero |= {} if outer is None else {"paro_outer_optimizer": outer}
        config = convergence.configuration(OPTIMIZERS[run.optimizer], zero, self._args.steps, bf16=True)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        losses, received, curve, own = self._steps(engine, run)
        engine.destroy()
        return OuterRow(
            *(DTYPE, dist.get_world_size(), run.groups, self._args.steps, run.optimizer, run.method, method.strategy),
            "" if outer is None else json.dumps(outer),
            run.seed,
            tokens=self._args.steps * dist.get_world_size() * MICRO_BATCH * MODEL["sequence_length"],
            final_loss=curve[-1][1],
            own_loss=own,
            training_loss=statistics.fmean(losses[-max(1, round(FINAL * len(losses))) :]),
            inter_bytes=received,
            seconds=time.perf_counter() - begin,
            curve=tuple(curve),
        )

    def _steps(self, engine: DeepSpeedEngine, run: Run) -> tuple[list[float], float, list[tuple[int, float]], float]:
        """Return training losses, bytes a step, the curve, and the loss of own weights before the last step."""
        batches = Batches(self._corpus, engine, MODEL["sequence_length"], run.seed)
        meter, losses, curve, own = TrafficMeter(), [], [], 0.0
        steps = self._args.steps
        for step in range(steps):
            if step == 1:  # the step before opens connections
                dist.barrier()
                meter.start()
                dist.barrier()
            if step == steps - 1:
                own = self._evaluate(engine)
            losses.append(train_step(engine, [batches.draw(step)]))
            if (step + 1) % max(1, steps // POINTS) == 0 and step < steps - 1:
                curve.append((step + 1, self._evaluate_outer(engine)))
        curve.append((steps, self._evaluate_outer(engine)))  # what travels has arrived then
        dist.barrier()
        meter.stop()
        received = meter.split(self._args.group_size).inter_mean / (steps - 1)
        return [average(loss) for loss in losses], received, curve, own

    def _evaluate_outer(self, engine: DeepSpeedEngine) -> float:
        with outer_weights(engine):
            return self._evaluate(engine)

    def _evaluate(self, engine: DeepSpeedEngine) -> float:
        """Return the mean loss on held-out text: each rank's part by the weights that it has."""
        engine.eval()
        with torch.no_grad():
            losses = [engine(rows[:, :-1], rows[:, 1:]) for rows in self._rows.split(64)]
        engine.train()
        return average(torch.stack(losses))


def outer_of(args: argparse.Namespace, run: Run) -> dict[str, Any] | None:
    """Return ``paro_outer_optimizer`` of a run."""
    return outer_rows.outer_keys(run.method, run.optimizer, lr=args.lr, momentum=args.momentum)


def work(args: argparse.Namespace) -> None:
    """Live as a rank: train what is missing, and keep each run."""
    first = start_rank()
    torch._dynamo.config.disable = True  # Muon's compiled kernels take minutes to compile for ranks without a GPU
    order = json.loads(args.worker.read_text())
    trainer = Trainer(args)
    for values in tqdm(order["runs"], "runs", disable=not first):
        row = trainer.train(Run(*values))
        if first:
            print(f"{' '.join(map(str, row.run))}: {row.final_loss:.4f}, {row.seconds:.0f} s", flush=True)
            records.append_rows(Path(order["csv"]), [order["circumstances"] | row.to_csv()])
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description="Train groups apart, with an outer optimizer between them.")
    add_options(parser, "outer_convergence.log", TIMEOUT)
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of a run")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="of the runs")
    parser.add_argument("--groups", type=int, nargs="+", default=list(GROUPS), help="in place of --ranks")
    parser.add_argument("--lr", type=float, help="of the outer optimizer; else as outer_rows.py says")
    parser.add_argument("--momentum", type=float, help="of the outer optimizer; else as outer_rows.py says")
    for option, names in (("--optimizers", list(OPTIMIZERS)), ("--methods", list(METHODS))):
        parser.add_argument(option, nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--csv", type=Path, help="append each run here; those that are there are not trained again")
    parser.set_defaults(group_size=outer_rows.GROUP_SIZE)
    args = parser.parse_args()
    if min(args.steps - 1, args.group_size, *args.groups) < 1:
        parser.error("--steps must be at least 2, --group-size and --groups at least 1")
    return args


def missing(wanted: dict[Run, tuple[Any, ...]], rows: Sequence[OuterRow]) -> list[Run]:
    """Return the runs that are not among the rows, in their order."""
    found = outer_rows.by_run(rows, wanted)
    return [run for run in wanted if run not in found]


def main(module: str) -> int:
    """Train what is missing, print what is there, and return the exit status."""
    args = parse_arguments()
    if args.worker is not None:
        work(args)
        return 0
    exit_on_signals()
    runs = outer_rows.planned(args.optimizers, args.groups, args.seeds, args.methods)
    size = args.group_size
    wanted = {run: outer_rows.settings_of(run, DTYPE, size, args.steps, outer_of(args, run)) for run in runs}
    with tempfile.TemporaryDirectory() as folder:
        path = (args.csv or Path(folder) / "rows.csv").resolve()
        todo = missing(wanted, outer_rows.read(path))
        print(f"{len(runs) - len(todo)} of {len(runs)} runs are there, {len(todo)} to train", flush=True)
        if todo:
            # Rows state the program and the package as they were when the ranks started.
            started = {name: value for name, value in records.circumstances().items() if name != "date"}
            order = Path(folder) / "order.json"
            for groups, some in itertools.groupby(todo, key=lambda run: run.groups):
                order.write_text(json.dumps({"runs": list(some), "csv": str(path), "circumstances": started}))
                launch_workers(module, order, args, groups * size, sys.argv[1:])
        found = outer_rows.by_run(outer_rows.read(path), wanted)
    return report([found[run] for run in runs])


def report(rows: Sequence[OuterRow]) -> int:
    """Print a table and the verdict; return the exit status."""
    print(markdown(*outer_rows.table(rows)))
    verdicts = list(outer_rows.verdict(rows))
    print("\n".join(line for _, line in verdicts))
    return 0 if all(kept for kept, _ in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(__spec__.name))
