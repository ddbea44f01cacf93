# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Measures ZeRO-3's host time on a model of many small modules, with several choices of leaf modules.

    python -m tests.perf.leaf_overhead

It measures a micro-batch (forward and backward), and a step of one micro-batch, of a mixture of experts so small that
hooks take most of the time, in fp32 on CPU ranks with gloo; the learning rate is 0. The overhead is a micro-batch's
time beyond that of the same number of processes of plain PyTorch; with one rank it is host time alone. No parameter
persists. Any granularity threshold that selects modules here makes leaf modules of layers.

Each case has its own processes, because DeepSpeed replaces functions of PyTorch permanently; in stock cases our
package is disabled. Cases take turns. Numbers are medians over the micro-batches of all rounds and ranks. A rank's
losses must equal those of plain PyTorch. With ``--packed``, experts are 3-D parameters, as in transformers 5, of which
ours also fetches windows of an eighth; then there are no targets.

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
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_ext.tools.compare.launching import RunFailed
from deepspeed_ext.tools.compare.verdict import BOUNDS, loss_difference
from scripts.emulation.launching import exit_on_signals, launch, start_rank
from tests.perf.lib import records
from tests.perf.lib.fake_world import OperatorCount

HIDDEN, TOKENS = 32, 8
THRESHOLD = 30_000  # parameters for each module of a layer, packed or not
WARM_UP_STEPS = 3  # ZeRO-3 records its trace in the first, and decides by it in the second what to release when
STOCK_AIM, BY_HAND_AIM = 0.2, 0.6  # ours' overhead, in that of stock ZeRO-3 and of the best leaf modules by hand
TIMEOUT = 1800  # seconds that a case may take
LOG = Path(tempfile.gettempdir()) / "leaf_overhead.log"  # what the ranks of the last case print

PLAIN, STOCK, OURS, WINDOWS = "plain", "zero3", "ours", "ours, windows"
GATHERED: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
OUR_KEY = "stage3_leaf_bytes"
WINDOW = 8  # experts, each with what is gathered, what it is gathered into, and its gradient
CASES: dict[str, dict[str, Any] | None] = {  # zero_optimization of each
    PLAIN: None,
    STOCK: GATHERED,
    "zero3 + leaf: MoE": GATHERED | {"leaf_module": {"classes": ["MoE", "PackedMoE"]}},
    "zero3 + threshold": GATHERED | {"stage3_module_granularity_threshold": THRESHOLD},
    OURS: GATHERED | {OUR_KEY: True},
    WINDOWS: GATHERED | {OUR_KEY: WINDOW * 3 * 4 * 3 * HIDDEN * HIDDEN},
}
SWITCHED_OFF = {name for name, zero in CASES.items() if zero and OUR_KEY not in zero}  # our package is
BY_HAND = [name for name in SWITCHED_OFF if name != STOCK]

Found = dict[tuple[int, str], list[dict[str, Any]]]  # what each rank reports, by number of ranks and case


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

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, experts, bias=False)
        self.experts = self.make_experts(experts)

    def make_experts(self, experts: int) -> nn.Module:
        return nn.ModuleList(Expert() for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1).split(1, -1)
        return sum(expert(x) * weight for expert, weight in zip(self.experts, weights, strict=True))


class PackedExperts(nn.Module):
    """The same experts in parameters of three dimensions."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * HIDDEN, HIDDEN) / HIDDEN)
        self.down_proj = nn.Parameter(torch.randn(experts, HIDDEN, HIDDEN) / HIDDEN)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            tokens, k = torch.where(top_k_index == expert)
            gate, up = (hidden_states[tokens] @ self.gate_up_proj[expert].T).chunk(2, -1)
            expert_output = ((nn.functional.silu(gate) * up) @ self.down_proj[expert].T) * top_k_weights[
                tokens, k, None
            ]
            out = out.index_add(0, tokens, expert_output)
        return out


class PackedMoE(MoE):
    """A router and packed experts, all of which are used."""

    make_experts = staticmethod(PackedExperts)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return self.experts(x, torch.arange(weights.shape[-1]).expand_as(weights), weights)


class Layer(nn.Module):
    """A block of experts, and two linear layers in place of attention."""

    def __init__(self, experts: int, packed: bool = False) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(HIDDEN), (PackedMoE if packed else MoE)(experts)
        self.value, self.output = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.output(self.value(self.norm(x)))
        return x + self.moe(x)


def make_engine(name: str, model: nn.Module) -> Any:
    """Make a DeepSpeed engine; raise an error if it is ours instead of stock, or vice versa."""
    import deepspeed  # plain PyTorch's ranks must not

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
    layers = (Layer(args.experts, args.packed) for _ in range(args.layers))
    model, engine = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), *layers, nn.Linear(HIDDEN, 1)), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if CASES[name] is None:
        dist.init_process_group("gloo")  # to start together
    else:
        start_rank()
        engine = make_engine(name, model)
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(dist.get_rank()))
    forward, backward = (model, Tensor.backward) if engine is None else (engine, engine.backward)
    report: dict[str, Any] = {"losses": [], "seconds": [], "step_seconds": []}

    def step() -> None:
        dist.barrier()
        begin = time.perf_counter()
        loss = forward(x).square().mean()
        backward(loss)
        report["seconds"].append(time.perf_counter() - begin)
        if engine is None:
            optimizer.step()
            optimizer.zero_grad()
        else:
            engine.step()
        report["step_seconds"].append(time.perf_counter() - begin)
        report["losses"].append(loss.item())

    for _ in range(WARM_UP_STEPS + args.steps):
        step()
    with OperatorCount() as operators:
        step()
    offload = None if engine is None else engine.optimizer.parameter_offload
    hooks = 0 if offload is None else len(offload.forward_hooks) + len(offload.backward_hooks)
    (folder / str(dist.get_rank())).write_text(json.dumps(report | {"hooks": hooks, "operators": operators.count}))
    dist.barrier()
    dist.destroy_process_group()


# What starts them #################################################################################


def run_case(name: str, ranks: int) -> list[dict[str, Any]]:
    """Run a case, and return each rank's report.

    Raises:
        RunFailed: a rank failed, or the ranks did not end in time. No process is left.
    """
    switch = {"DEEPSPEED_EXT_DISABLE": str(int(name in SWITCHED_OFF))}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, switch):
        launch(__spec__.name, [*sys.argv[1:], "--worker", name, folder], ranks, LOG, TIMEOUT)
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(ranks)]


def measure(args: argparse.Namespace) -> Found:
    """Run all cases, in rounds.

    Raises:
        RunFailed: a case failed, or its losses are not plain PyTorch's.
    """
    plan = [(ranks, name) for ranks in args.ranks for name in CASES if args.packed or name != WINDOWS]
    reports_by_case: Found = {key: [] for key in plan}
    for number in range(args.rounds):
        for ranks, name in plan:
            reports = run_case(name, ranks)
            reports_by_case[ranks, name] += reports
            for report, plain in zip(reports, reports_by_case[ranks, PLAIN], strict=False):
                if loss_difference(report["losses"], plain["losses"][:1] * len(report["losses"])) > BOUNDS["float32"]:
                    raise RunFailed(f"{name}, {ranks} rank(s): losses {report['losses']}, not {plain['losses'][0]}")
            milliseconds = statistics.median(measured(reports, "seconds"))
            print(f"round {number + 1}, {ranks} rank(s), {name}: {milliseconds:.1f} ms", file=sys.stderr)
    return reports_by_case


def measured(reports: Sequence[dict[str, Any]], name: str) -> list[float]:
    """Return milliseconds of all ranks; the last step had its operators counted."""
    return [seconds * 1e3 for report in reports for seconds in report[name][WARM_UP_STEPS:-1]]


def rows_of(reports_by_case: Found, args: argparse.Namespace) -> list[dict[str, Any]]:
    times = {key: measured(reports, "seconds") for key, reports in reports_by_case.items()}
    over = {key: statistics.median(times[key]) - statistics.median(times[key[0], PLAIN]) for key in reports_by_case}
    rows = []
    for (ranks, name), reports in reports_by_case.items():
        low, median, high = statistics.quantiles(times[ranks, name], n=4, method="inclusive")
        overhead, best = over[ranks, name], min(BY_HAND, key=lambda hand, ranks=ranks: over[ranks, hand])
        row: dict[str, Any] = {key: getattr(args, key) for key in ("layers", "experts", "rounds", "steps")}
        row |= {"ranks": ranks, "case": f"{name}, packed" if args.packed else name}
        row |= {"milliseconds_median": median, "milliseconds_quartile_1": low, "milliseconds_quartile_3": high}
        row |= {"overhead_milliseconds": overhead, "best_by_hand": best}
        row |= {"step_milliseconds_median": statistics.median(measured(reports, "step_seconds"))}
        row |= {key: reports[0][key] for key in ("hooks", "operators")}
        row |= {"of_stock": overhead / over[ranks, STOCK], "of_best_by_hand": overhead / over[ranks, best]}
        rows.append({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="What ZeRO-3 costs the host on a model of many small modules.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4], help="numbers of processes to measure with")
    parser.add_argument("--rounds", type=int, default=3, help="times that each case is run")
    parser.add_argument("--steps", type=int, default=8, help="micro-steps of a run that are measured, at least 2")
    parser.add_argument("--layers", type=int, default=8, help="of the model")
    parser.add_argument("--experts", type=int, default=64, help="of a layer")
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
    (ours,) = [row for row in rows if row["case"] == OURS and row["ranks"] == 1] or [None]
    return int(ours is not None and (ours["of_stock"] > STOCK_AIM or ours["of_best_by_hand"] > BY_HAND_AIM))


if __name__ == "__main__":
    sys.exit(main())
