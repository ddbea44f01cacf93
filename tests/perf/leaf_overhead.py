# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Measures ZeRO-3's host time on a model of many small modules, with several choices of leaf modules.

    python -m tests.perf.leaf_overhead

It measures a step of one micro-batch of a mixture of experts so small that hooks take most of the time, in fp32 on CPU
ranks with gloo; the learning rate is 0. The overhead is its time beyond that of the same number of processes of plain
PyTorch; with one rank it is host time alone. No parameter persists. Any granularity threshold that selects modules
here makes leaf modules of layers.

Each case has its own processes, because DeepSpeed's engines replace functions of PyTorch permanently; in stock cases
our package is disabled. Cases take turns. Numbers are medians over the steps of all rounds and ranks. A rank's losses
must equal those of plain PyTorch. With ``--packed``, experts are 3-D parameters, as in transformers 5, of which ours
also fetches windows of an eighth; then there are no targets.

Exit status 0 if ours reaches its targets with one rank, 1 if not, 2 if a case could not run or computed wrong losses.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_ext.tools.compare.launching import RunFailed
from deepspeed_ext.tools.compare.verdict import BOUNDS, loss_difference
from scripts.emulation.launching import exit_on_signals, launch, start_rank
from tests.harness.mixtures import PackedExperts
from tests.perf.lib import records
from tests.perf.lib.fake_world import OperatorCount

HIDDEN, TOKENS, LAYERS, EXPERTS = 32, 8, 8, 64  # tokens of a rank, experts of a layer
THRESHOLD = 30_000  # parameters for each module of a layer, packed or not
WARM_UP_STEPS = 3  # ZeRO-3 records its trace in the first, and decides by it in the second what to release when
STOCK_AIM, BY_HAND_AIM = 0.2, 0.6  # ours' overhead, in that of stock ZeRO-3 and of its best leaf modules
TIMEOUT = 1800  # seconds that a case may take
LOG = Path(tempfile.gettempdir()) / "leaf_overhead.log"  # what the ranks of the last case print

PLAIN, STOCK, OURS, WINDOWS = "plain PyTorch", "ZeRO-3", "stage3_leaf_bytes", "windows of 8 experts"
BY_HAND = ("ZeRO-3, mixtures as leaf modules", "ZeRO-3, granularity threshold")
GATHERED: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
OUR_KEY = "stage3_leaf_bytes"
WINDOW = 8  # experts, each with what is gathered, what it is gathered into, and its gradient
CASES: dict[str, dict[str, Any] | None] = {  # zero_optimization of each
    PLAIN: None,
    STOCK: GATHERED,
    BY_HAND[0]: GATHERED | {"leaf_module": {"classes": ["MoE"]}},
    BY_HAND[1]: GATHERED | {"stage3_module_granularity_threshold": THRESHOLD},
    OURS: GATHERED | {OUR_KEY: True},
    WINDOWS: GATHERED | {OUR_KEY: WINDOW * 3 * 4 * (2 * HIDDEN + 1) * (HIDDEN + 3)},
}
SWITCHED_OFF = {name for name, zero in CASES.items() if zero and OUR_KEY not in zero}  # our package is

Found = dict[str, list[dict[str, Any]]]  # what each rank reports, by case


# What runs in the ranks ###########################################################################


class Expert(nn.Module):
    """Three linear layers, one of which is a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class MoE(nn.Module):
    """A router and experts, all of which are used."""

    def __init__(self, experts: int, packed: bool) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, experts, bias=False)
        self.experts = PackedExperts(HIDDEN, experts) if packed else nn.ModuleList(Expert() for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        if isinstance(self.experts, PackedExperts):
            out: Tensor = self.experts(x, torch.arange(weights.shape[-1]).expand_as(weights), weights)
            return out
        return sum(expert(x) * weight for expert, weight in zip(self.experts, weights.split(1, -1), strict=True))


class Layer(nn.Module):
    """A block of experts, and two linear layers in place of attention."""

    def __init__(self, experts: int, packed: bool) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(HIDDEN), MoE(experts, packed)
        self.value, self.output = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.output(self.value(self.norm(x)))
        return x + self.moe(x)


def make_engine(name: str, model: nn.Module) -> Any:
    """Make a DeepSpeed engine; raise an error if it is ours instead of stock, or vice versa."""
    config = {
        "train_micro_batch_size_per_gpu": TOKENS,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": CASES[name],
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    if type(engine.optimizer).__module__.startswith("deepspeed_ext") == (name in SWITCHED_OFF):
        raise RuntimeError(f"{name} runs with {type(engine.optimizer)}")
    return engine


def work(name: str, folder: Path, args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    layers = (Layer(EXPERTS, args.packed) for _ in range(LAYERS))
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), *layers, nn.Linear(HIDDEN, 1))
    report: dict[str, Any] = {"losses": [], "seconds": [], "hooks": 0}
    if CASES[name] is None:
        dist.init_process_group("gloo")  # to start together
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        use = [model, Tensor.backward, optimizer.step, optimizer.zero_grad]
    else:
        start_rank()
        engine = make_engine(name, model)
        offload = engine.optimizer.parameter_offload
        report["hooks"] = len(offload.forward_hooks) + len(offload.backward_hooks)
        use = [engine, engine.backward, engine.step]
    forward, backward, *update = cast(list[Any], use)
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> None:
        dist.barrier()
        begin = time.perf_counter()
        loss = forward(x).square().mean()
        backward(loss)
        for one in update:
            one()
        report["seconds"].append(time.perf_counter() - begin)
        report["losses"].append(loss.item())

    for _ in range(WARM_UP_STEPS + args.steps):
        step()
    with OperatorCount() as operators:
        step()
    del report["seconds"][-1]
    (folder / str(dist.get_rank())).write_text(json.dumps(report | {"operators": operators.count}))
    dist.barrier()
    dist.destroy_process_group()


# What starts them #################################################################################


def run_case(name: str, ranks: int) -> list[dict[str, Any]]:
    """Run a case, and return each rank's report; RunFailed, with no process left, if a rank fails or does not end."""
    switch = {"DEEPSPEED_EXT_DISABLE": str(int(name in SWITCHED_OFF))}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, switch):
        launch(__spec__.name, [*sys.argv[1:], "--worker", name, folder], ranks, LOG, TIMEOUT)
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(ranks)]


def measure(args: argparse.Namespace) -> Found:
    """Run all cases, in rounds; RunFailed if a case fails, or its losses are not plain PyTorch's."""
    reports_by_case: Found = {name: [] for name in CASES if args.packed or name != WINDOWS}
    for number in range(args.rounds):
        for name, known in reports_by_case.items():
            reports = run_case(name, args.ranks)
            known += reports
            for report, plain in zip(reports, reports_by_case[PLAIN], strict=False):
                if loss_difference(report["losses"], plain["losses"][:1] * len(report["losses"])) > BOUNDS["float32"]:
                    raise RunFailed(f"{name}: losses {report['losses']}, not {plain['losses'][0]}")
            print(f"round {number + 1}, {name}: {statistics.median(measured(reports)):.1f} ms", file=sys.stderr)
    return reports_by_case


def measured(reports: Sequence[dict[str, Any]]) -> list[float]:
    return [seconds * 1e3 for report in reports for seconds in report["seconds"][WARM_UP_STEPS:]]


def rows_of(reports_by_case: Found, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    plain, stock = (statistics.median(measured(reports_by_case[name])) for name in (PLAIN, STOCK))
    for name, reports in reports_by_case.items():
        low, median, high = statistics.quantiles(measured(reports), n=4, method="inclusive")
        row: dict[str, Any] = {"layers": LAYERS, "experts": EXPERTS}
        row |= {key: getattr(args, key) for key in ("packed", "rounds", "steps", "ranks")}
        row |= {"case": name, "milliseconds_median": median}
        row |= {"milliseconds_quartile_1": low, "milliseconds_quartile_3": high}
        row |= {"overhead_milliseconds": median - plain, "of_stock": (median - plain) / (stock - plain)}
        row |= {key: reports[0][key] for key in ("hooks", "operators")}
        rows.append({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
    return rows


def misses_targets(rows: Sequence[dict[str, Any]]) -> bool:
    overhead = {row["case"]: row["overhead_milliseconds"] for row in rows}
    by_hand = min(overhead[name] for name in BY_HAND)
    return bool(overhead[OURS] > STOCK_AIM * overhead[STOCK] or overhead[OURS] > BY_HAND_AIM * by_hand)


def main() -> int:
    parser = argparse.ArgumentParser(description="What ZeRO-3 costs the host on a model of many small modules.")
    parser.add_argument("--ranks", type=int, default=1, help="number of processes")
    parser.add_argument("--rounds", type=int, default=3, help="times that each case is run")
    parser.add_argument("--steps", type=int, default=8, help="of a run that are measured, at least 2")
    parser.add_argument("--packed", action="store_true", help="experts in parameters of three dimensions")
    parser.add_argument("--csv", type=Path, help="append rows here")
    parser.add_argument("--worker", nargs=2, metavar=("CASE", "FOLDER"), help=argparse.SUPPRESS)  # a rank
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # set by the launcher
    args = parser.parse_args()
    if args.worker is not None:
        work(args.worker[0], Path(args.worker[1]), args)
        return 0
    exit_on_signals()
    try:
        rows = rows_of(measure(args), args)
    except RunFailed as failure:
        print(failure, file=sys.stderr)
        return 2
    records.report(rows, args.csv)
    return int(args.ranks == 1 and not args.packed and misses_targets(rows))


if __name__ == "__main__":
    sys.exit(main())
