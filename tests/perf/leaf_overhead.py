# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What ZeRO-3 costs the host on a model of many small modules, with leaf modules chosen in several ways.

The time of a micro-step (forward and backward; no optimizer step ever comes) of a mixture of experts whose modules are
so small that hooks and bookkeeping take most of it, in fp32 on CPU ranks with gloo: with plain PyTorch, with stock
ZeRO-3, with ZeRO-3 and leaf modules set by hand, and with ours (``stage3_leaf_bytes``). Overhead is what a micro-step
takes beyond plain PyTorch's, of which as many processes run side by side, without communication. With one rank it is
the host's cost alone. A granularity threshold of 1 makes no module a leaf; in stock it happens to switch on a faster
path for those that were set by hand. Parameters are gathered in each micro-step (no parameter persists), but for two
rows with DeepSpeed's default, which lets all of these small ones persist.

Each case runs in processes of its own, because DeepSpeed replaces functions of PyTorch for good; in those of the stock
cases our package is switched off. All cases take turns, round for round, so that whatever else this machine does falls
on all of them; the numbers are medians over all micro-steps of all rounds and ranks. The first loss of each rank must
be plain PyTorch's.

    python tests/perf/leaf_overhead.py

Exit status 0 if ours keeps its aims with one rank, 1 if not, 2 if a case could not run or computed something else.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import records
import torch
import torch.distributed as dist
from launching import exit_on_sigterm, start_rank
from torch import Tensor, nn

HIDDEN = 32
TOKENS = 8
ACCUMULATION = 1_000_000  # never reached
WARM_UP_STEPS = 3  # ZeRO-3 records its trace in the first, holds the second against it, and prefetches from then on
LOSS_BOUND = 1e-5
STOCK_AIM, HAND_MADE_AIM = 0.2, 0.6  # ours' overhead, in that of stock ZeRO-3 and of the best leaf modules by hand
TIMEOUT = 900  # seconds that a case may take
PLAIN, STOCK, OURS, PERSISTENT = "plain", "zero3", "ours", "zero3, persistent"
GATHERED = {"stage3_param_persistence_threshold": 0}
FAST = {"stage3_module_granularity_threshold": 1}
RESULTS = Path(__file__).parent / "results" / "leaf_overhead.csv"
LOG = Path(tempfile.gettempdir()) / "leaf_overhead.log"  # what the ranks of the last case print


@dataclass(frozen=True)
class Case:
    """A way to train.

    Attributes:
        zero: ``zero_optimization``; None for plain PyTorch.
        stock: our package is switched off.
        by_hand: leaf modules are set by hand.
        against: the stock case that it is held against.
    """

    name: str
    zero: dict[str, Any] | None
    stock: bool = True
    by_hand: bool = False
    against: str = STOCK


def _by_hand(name: str, **more: Any) -> Case:
    zero = {"stage": 3, "leaf_module": {"classes": [name]}, **GATHERED, **more}
    return Case(f"{STOCK} + leaf: {name}{', threshold 1' if more else ''}", zero, by_hand=True)


CASES = (
    Case(PLAIN, None, stock=False),
    Case(STOCK, {"stage": 3, **GATHERED}),
    _by_hand("MoE"),
    _by_hand("MoE", **FAST),
    _by_hand("Layer"),
    _by_hand("Layer", **FAST),
    Case(OURS, {"stage": 3, "stage3_leaf_bytes": True, **GATHERED}, stock=False),
    Case(PERSISTENT, {"stage": 3}, against=PERSISTENT),
    Case("ours, persistent", {"stage": 3, "stage3_leaf_bytes": True}, stock=False, against=PERSISTENT),
)


@dataclass
class Times:
    """What the rounds of a case have given so far, with some number of ranks."""

    seconds: list[float] = field(default_factory=list)  # of each micro-step of each rank
    losses: list[float] = field(default_factory=list)  # the first of each rank
    hooks: int = 0  # that DeepSpeed registered on modules

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


Found = dict[tuple[int, str], Times]  # by ranks and case


# What runs in the ranks ###########################################################################


class Expert(nn.Module):
    """Three linear layers, gated."""

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
        self.experts = nn.ModuleList(Expert() for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1).unbind(-1)
        y = torch.zeros_like(x)
        for expert, weight in zip(self.experts, weights, strict=True):
            y = y + expert(x) * weight.unsqueeze(-1)
        return y


class Layer(nn.Module):
    """Where attention would be there are two linear layers."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.value, self.output = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.moe = MoE(experts)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.output(self.value(self.norm(x)))
        return x + self.moe(x)


class Net(nn.Module):
    """Layers between two linear layers; returns its own loss."""

    def __init__(self, layers: int, experts: int) -> None:
        super().__init__()
        self.input = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(Layer(experts) for _ in range(layers))
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.input(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def make_engine(case: Case, model: nn.Module) -> Any:
    """A DeepSpeed engine that is what the case says.

    Raises:
        RuntimeError: it is ours where it must be stock, or the other way around.
    """
    import deepspeed  # plain PyTorch's ranks must not

    config = {
        "train_micro_batch_size_per_gpu": TOKENS,
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": ACCUMULATION,
        "zero_optimization": case.zero,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    if type(engine.optimizer).__module__.startswith("deepspeed_ext") == case.stock:
        raise RuntimeError(f"{case.name} runs with {type(engine.optimizer)}")
    return engine


def work(case: Case, folder: Path, args: argparse.Namespace) -> None:
    """The life of a rank."""
    torch.manual_seed(0)
    model, engine = Net(args.layers, args.experts), None
    if case.zero is None:
        dist.init_process_group("gloo")  # to start together
    else:
        start_rank()
        engine = make_engine(case, model)
    rank = dist.get_rank()
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(rank))
    times = Times()
    for step in range(WARM_UP_STEPS + args.steps):
        dist.barrier()
        begin = time.perf_counter()
        loss = model(x) if engine is None else engine(x)
        loss.backward() if engine is None else engine.backward(loss)
        seconds = time.perf_counter() - begin
        if engine is not None:
            engine.step()  # counts
        if step == 0:
            times.losses.append(loss.item())
        if step >= WARM_UP_STEPS:
            times.seconds.append(seconds)
    if engine is not None:
        offload = engine.optimizer.parameter_offload
        times.hooks = len(offload.forward_hooks) + len(offload.backward_hooks)
        if engine.global_steps:
            raise RuntimeError("there was an optimizer step")
    (folder / f"{rank}.json").write_text(json.dumps(vars(times)))
    dist.barrier()
    dist.destroy_process_group()


# What starts them #################################################################################


def run_ranks(case: Case, ranks: int, folder: Path) -> None:
    """Run a case once. Not with torchrun: its ranks would survive a launcher that is killed.

    Raises:
        RuntimeError: a rank failed, or they did not end in time. None is left.
    """
    from compare import environment, free_port  # they draw pictures, and drawing takes seconds to import

    env = environment() | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "DEEPSPEED_EXT_DISABLE": str(int(case.stock))}
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", case.name, str(folder)]
    processes: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + TIMEOUT
    with LOG.open("wb") as log:
        try:
            for rank in range(ranks):
                own = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT))
            while any(process.poll() is None for process in processes):
                if any(process.returncode for process in processes) or time.monotonic() > deadline:
                    break
                time.sleep(0.2)
            if any(process.returncode != 0 for process in processes):
                raise RuntimeError(f"{case.name}, {ranks} rank(s): failed, or not finished in time; see {LOG}")
        finally:
            for process in processes:
                process.kill()
                process.wait()


def measure(args: argparse.Namespace) -> Found:
    """Run all cases, round for round; exits with status 2 if one fails or its losses are not plain PyTorch's."""
    found: Found = {}
    for number in range(args.rounds):
        for ranks in args.ranks:
            for case in CASES if number % 2 == 0 else reversed(CASES):
                try:
                    times = run_case(case, ranks)
                    plain = found.setdefault((ranks, PLAIN), times)  # which the first round begins with
                    gap = max(abs(a - b) for a, b in zip(times.losses, plain.losses, strict=False))
                    if not gap <= LOSS_BOUND:
                        raise RuntimeError(f"{case.name}, {ranks} rank(s): the loss is off by {gap:g}")
                except RuntimeError as failure:
                    print(failure, file=sys.stderr)
                    sys.exit(2)
                print(
                    f"round {number + 1} of {args.rounds}, {ranks} rank(s), {case.name}: {times.median * 1e3:.1f} ms",
                    file=sys.stderr,
                )
                before = found.setdefault((ranks, case.name), times)
                if before is not times:
                    before.seconds += times.seconds
    return found


def run_case(case: Case, ranks: int) -> Times:
    """All ranks of a case, run once, taken together."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(case, ranks, Path(folder))
        each = [Times(**json.loads((Path(folder) / f"{rank}.json").read_text())) for rank in range(ranks)]
    return Times(sum((one.seconds for one in each), []), sum((one.losses for one in each), []), each[0].hooks)


def rows_of(found: Found, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each number of ranks and case; a ratio is empty where there is nothing to hold against."""
    rows = []
    for ranks in args.ranks:
        over = {case.name: found[ranks, case.name].median - found[ranks, PLAIN].median for case in CASES}
        best = min((case.name for case in CASES if case.by_hand), key=lambda name: over[name])
        for case in CASES:
            times, overhead = found[ranks, case.name], over[case.name]
            low, _, high = statistics.quantiles(times.seconds, n=4, method="inclusive")
            rows.append(
                {
                    "layers": args.layers,
                    "experts": args.experts,
                    "ranks": ranks,
                    "rounds": args.rounds,
                    "steps": args.steps,
                    "case": case.name,
                    "milliseconds_median": round(times.median * 1e3, 3),
                    "milliseconds_quartile_1": round(low * 1e3, 3),
                    "milliseconds_quartile_3": round(high * 1e3, 3),
                    "overhead_milliseconds": round(overhead * 1e3, 3),
                    "hooks": times.hooks,
                    "of_stock": "" if case.name == PLAIN else round(overhead / over[case.against], 4),
                    "of_best_by_hand": ""
                    if case.against != STOCK or case.name == PLAIN
                    else round(overhead / over[best], 4),
                    "best_by_hand": case.name == best,
                }
            )
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    """One line a row."""
    print(
        f"{'ranks':>5}  {'case':<34}{'ms: median (quartiles)':>26}{'overhead ms':>13}{'hooks':>8}{'of zero3':>10}"
        f"{'of best by hand':>17}"
    )
    for row in rows:
        quartiles = f"({row['milliseconds_quartile_1']:.1f} to {row['milliseconds_quartile_3']:.1f})"
        ratios = [f"{row[key]:.3f}" if row[key] != "" else "" for key in ("of_stock", "of_best_by_hand")]
        print(
            f"{row['ranks']:>5}  {row['case']:<34}{row['milliseconds_median']:>8.1f} {quartiles:>17}"
            f"{row['overhead_milliseconds']:>13.1f}{row['hooks']:>8}{ratios[0]:>10}{ratios[1]:>17}"
            f"{' *' if row['best_by_hand'] else ''}"
        )
    print("*: the best leaf modules by hand; of zero3: with as many persistent parameters")


def print_verdict(rows: list[dict[str, Any]]) -> bool:
    """Whether ours keeps its aims with one rank; with several ranks they are only shown."""
    passed = True
    for row in rows:
        if row["case"] != OURS:
            continue
        for key, what, aim in (
            ("of_stock", "stock ZeRO-3", STOCK_AIM),
            ("of_best_by_hand", "the best leaf modules by hand", HAND_MADE_AIM),
        ):
            kept = row[key] <= aim
            passed &= kept or row["ranks"] != 1
            verdict = "PASS" if kept else "FAIL"
            print(
                f"{verdict if row['ranks'] == 1 else '    '}  {row['ranks']} rank(s): ours has {row[key]:.3f} of the "
                f"overhead of {what} (aim: at most {aim})"
            )
    return passed


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The host's time for ZeRO-3 on a model of many small modules.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4], help="numbers of processes to measure with")
    parser.add_argument("--rounds", type=int, default=3, help="times that each case is run")
    parser.add_argument("--steps", type=int, default=8, help="micro-steps that are measured of a run")
    parser.add_argument("--layers", type=int, default=8, help="of the model")
    parser.add_argument("--experts", type=int, default=64, help="of a layer")
    parser.add_argument("--csv", type=Path, default=RESULTS, help="file to append the rows to")
    parser.add_argument("--worker", nargs=2, metavar=("CASE", "FOLDER"), help=argparse.SUPPRESS)  # a rank
    args = parser.parse_args()
    if min(*args.ranks, args.rounds, args.steps, args.layers, args.experts) < 1:
        parser.error("all numbers must be at least 1")
    return args


def main() -> int:
    args = parse_arguments()
    if args.worker is not None:
        name, folder = args.worker
        work(next(case for case in CASES if case.name == name), Path(folder), args)
        return 0
    exit_on_sigterm()
    rows = rows_of(measure(args), args)
    print_table(rows)
    passed = print_verdict(rows)
    records.append_rows(args.csv, rows)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
