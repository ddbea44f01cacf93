# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A pipeline with DeepSpeed's ZeRO-1 and with strategies, where the network between nodes is slow.

    python -m tests.perf.pipelines

Four network namespaces are four nodes, with two CPU ranks each; see ``scripts/emulation``. A byte-level GPT, with
embedding and head tied, is cut into two stages of two nodes each: four data-parallel ranks in two groups. All cases
run in the same processes, on the same data, and take turns. Of each:

- the largest difference of its weights from those of ZeRO-1, relative to the largest weight, after the same steps;
- what a rank holds of parameters and of gradients before the flush, in bytes of tensors: the largest of all ranks;
- what a rank receives in a step, by the kernel's counters: from data-parallel ranks of its node and of others, beside
  the formula of its strategy, and from other stages;
- the time of a step, also as a ratio to ZeRO-1's of the same round.

Needs root, and ``ip`` and ``tc`` of iproute2.

Exit status 0 if all agree with ZeRO-1 and the formulas, 1 if not, 2 if it could not run.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from tqdm import tqdm

from deepspeed_ext.compare.spread import ratio
from deepspeed_ext.model_bytes import held
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates
from scripts.emulation.cluster import collect
from scripts.emulation.launching import start_rank
from scripts.emulation.network import Link
from scripts.emulation.traffic import TrafficMeter
from scripts.examples.gpt import Batches, pipeline, read_corpus
from tests.harness.training import whole_weights
from tests.perf.lib import records

NODES, RANKS_PER_NODE, STAGES = 4, 2, 2
SIZES = GroupSizes(NODES * RANKS_PER_NODE // STAGES, RANKS_PER_NODE)  # of a stage
STOCK = "ZeRO-1"
CASES: dict[str, dict[str, Any]] = {STOCK: {"stage": 1}}
for _name in ("NNG", "NIG", "NGG", "IIG", "GGG"):
    CASES[_name] = {"paro_strategy": _name, "paro_group_size": RANKS_PER_NODE}
ZERO: dict[str, Any] = {
    "reduce_bucket_size": 500_000,
    "allgather_bucket_size": 500_000,
    # The formula gathers each parameter twice in a micro-batch: nothing may stay from forward to backward.
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_reuse_distance": 0,
}
SEQUENCE_LENGTH, ROWS = 32, 1
CORPUS_BYTES = 500_000
SEED = 0
WARM_UP_STEPS = 2
PARITY_BOUND = 1e-5
BYTES_BOUND = 0.05
RESULTS = records.RESULTS / "pipelines.csv"


@dataclass
class PipelineRow:
    """What one case took at one rate."""

    case: str
    mbit: float
    difference: float = 0.0
    parameters: int = 0  # bytes held
    gradients: int = 0
    intra: float = 0.0  # bytes received a step, the mean over ranks
    inter: float = 0.0
    other_stages: float = 0.0
    intra_formula: float = 0.0
    inter_formula: float = 0.0
    seconds: list[list[float]] = field(default_factory=list)  # of each step, a list a round

    def wrong(self) -> list[str]:
        """Return what is out of bounds."""
        found = [] if self.difference <= PARITY_BOUND else ["weights"]
        if self.case != STOCK:
            for name in ("intra", "inter"):
                due = getattr(self, f"{name}_formula")
                if abs(getattr(self, name) - due) > BYTES_BOUND * max(self.intra_formula, self.inter_formula):
                    found.append(name)
        return found


# What runs in the ranks ###########################################################################


class Case:
    """A pipeline with its data."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = name
        model = pipeline(args.dim, args.layers, 4, SEQUENCE_LENGTH, STAGES, SEED)
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": args.micro_batches,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-4, "torch_adam": True}},
            "steps_per_print": 1_000_000,
            "zero_optimization": {**ZERO, **CASES[name]},
        }
        self.numels = {name: param.numel() for name, param in model.named_parameters()}
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self._data = iter(Batches(read_corpus(CORPUS_BYTES), self.engine, SEQUENCE_LENGTH, SEED))
        self.bytes_held = (0, 0)  # parameters, gradients
        self._watch()

    def _watch(self) -> None:
        """Record what the engine holds after all micro-batches."""
        reduce = self.engine._INSTRUCTION_MAP[schedule.ReduceTiedGrads]

        def note(engine: Any) -> None:
            self.bytes_held = self._held(engine)
            reduce(engine)

        self.engine._INSTRUCTION_MAP = {**self.engine._INSTRUCTION_MAP, schedule.ReduceTiedGrads: note}

    def _held(self, engine: Any) -> tuple[int, int]:
        if self.name != STOCK:
            states = held(engine)
            return int(states.parameters), int(states.gradients)
        parameters = list(engine.module.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        return sum(p.nbytes for p in parameters), sum(g.nbytes for g in gradients)

    def step(self) -> float:
        """Run one; seconds, of the slowest rank."""
        dist.barrier()
        begin = time.perf_counter()
        self.engine.train_batch(self._data)
        if hasattr(self.engine.optimizer, "parameters"):
            self.engine.optimizer.drain_parameters()  # or slices are completed during the next forward
        dist.barrier()
        return time.perf_counter() - begin


def rows_of(args: argparse.Namespace) -> Iterator[PipelineRow]:
    """Return a row for each rate and case."""
    link, meter = Link(), TrafficMeter()
    cases = {name: Case(name, args) for name in CASES}
    for case in tqdm(cases.values(), "warm-up", disable=dist.get_rank() != 0):
        for _ in range(WARM_UP_STEPS):
            case.step()
    for mbit in args.rates:
        link.limit(mbit)
        dist.barrier()
        rows = {name: PipelineRow(name, mbit) for name in cases}
        for _ in tqdm(range(args.rounds), f"{mbit:g} Mbit/s", disable=dist.get_rank() != 0):
            for name, case in cases.items():
                dist.barrier()
                meter.start()
                dist.barrier()
                rows[name].seconds.append([case.step() for _ in range(args.steps)])
                meter.stop()
                _count(rows[name], meter.read(), args.rounds * args.steps)
        stock = whole_weights(cases[STOCK].engine.module)
        for name, case in cases.items():
            row = rows[name]
            difference = (whole_weights(case.engine.module) - stock).abs().max() / stock.abs().max()
            row.difference = largest(difference.item())
            row.parameters, row.gradients = (int(largest(float(n))) for n in case.bytes_held)
            _expect(row, case, args.micro_batches)
            yield row


def largest(value: float) -> float:
    """Return the largest value of all ranks."""
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def _count(row: PipelineRow, received: list[list[int]], steps: int) -> None:
    """Add what ranks received in a round of one case; of all steps, a step's."""
    ranks = len(received)
    for rank, by_sender in enumerate(received):
        for sender, count in enumerate(by_sender):
            share = count / steps / ranks
            if sender * STAGES // ranks != rank * STAGES // ranks:
                row.other_stages += share
            elif sender // RANKS_PER_NODE == rank // RANKS_PER_NODE:
                row.intra += share
            else:
                row.inter += share


def _expect(row: PipelineRow, case: Case, micro_batches: int) -> None:
    """Set what the strategy's formula says, the mean over stages."""
    if case.name == STOCK:
        return
    states = ModelStates.of(sum(case.numels.values()), parameter_bytes=4, gradient_bytes=4)
    volume = STRATEGIES[case.name].volume(SIZES, states, micro_batches)
    found = torch.tensor([volume.intra, volume.inter], dtype=torch.float64)
    dist.all_reduce(found)
    row.intra_formula, row.inter_formula = (found / dist.get_world_size()).tolist()


def work(args: argparse.Namespace) -> None:
    """Live as a rank: measure and report."""
    first = start_rank()
    rows = list(rows_of(args))
    if first:
        args.worker.write_text(json.dumps([asdict(row) for row in rows]))
    dist.destroy_process_group()


# What starts them #################################################################################


def csv_row(row: PipelineRow, stock: PipelineRow, args: argparse.Namespace) -> dict[str, Any]:
    """Return what identifies a row, and the row; its time in ZeRO-1's with the interval of ``compare``."""
    of_stock = ratio(stock.seconds, row.seconds)
    layout = {"stages": STAGES, "ranks_per_node": RANKS_PER_NODE, "nodes": NODES, "dim": args.dim}
    values = asdict(row) | {"seconds_median": statistics.median(s for one in row.seconds for s in one)}
    del values["seconds"]
    values |= {"of_zero1_median": of_stock.value, "of_zero1_min": of_stock.low, "of_zero1_max": of_stock.high}
    rounded = {key: round(value, 6) if isinstance(value, float) else value for key, value in values.items()}
    return layout | {"layers": args.layers, "micro_batches": args.micro_batches} | rounded


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pipelines with ZeRO-1 and with strategies on slow links.")
    parser.add_argument("--rates", nargs="+", type=float, default=[100, 500], metavar="MBIT", help="of the links")
    parser.add_argument("--micro-batches", type=int, default=8, help="of a step")
    parser.add_argument("--dim", type=int, default=256, help="width of the model")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the model")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each case")
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn")
    parser.add_argument("--log", type=Path, default=Path("pipelines.log"), help="what the ranks print")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds that all of it may take")
    parser.add_argument("--csv", type=Path, default=RESULTS, help="file to append the rows to")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # a rank, and where it reports
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    if args.worker is not None:
        work(args)
        return 0
    rows = [PipelineRow(**values) for values in collect(NODES, RANKS_PER_NODE, __spec__.name, args.log, args.timeout)]
    stock = {row.mbit: row for row in rows if row.case == STOCK}
    found = [csv_row(row, stock[row.mbit], args) for row in rows]
    header = list(found[0])[6:]
    print(records.markdown((header, [[f"{row[name]}" for name in header] for row in found])))
    wrong = [f"{row.case}, {row.mbit:g} Mbit/s: {', '.join(row.wrong())}" for row in rows if row.wrong()]
    print("".join(f"FAIL: {line}\n" for line in wrong))
    records.append_rows(args.csv, found)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
