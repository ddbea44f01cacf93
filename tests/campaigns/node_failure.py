# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Kill a node in the middle of a step: the run must continue with the other node, by itself, and lose only steps.

Two emulated nodes of two ranks train under torchrun's elastic launcher, with one command that does not change. All
processes of the second node are killed: in a forward, in the reductions of a backward, before an optimizer step, while
it saves, and without closing connections, as in a power failure: then the others wait for their collectives' timeout.
The launcher of the first node starts its ranks again. They choose a strategy for half as many ranks, convert the last
checkpoint, and continue with the same global batch. From there on, each loss is compared with that of an undisturbed
run.

With ``--in-memory`` the run saves after each step into memory of the nodes, and never to disk. The memory of the
second node is lost: the states of its ranks are read from the copies on the first node.

Exit status 0 if all runs continued as they must, 1 if one did not, 2 if a run could not be made.
"""

import argparse
import json
import math
import operator
import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

import deepspeed_ext
from scripts.emulation.cluster import NodeJob, Processes, require_emulation
from scripts.emulation.launching import exit_on_signals, start_rank
from scripts.emulation.network import PORT, Network, address
from scripts.examples.gpt import ByteGPT

MODEL = {"dim": 128, "layers": 3, "heads": 4, "sequence_length": 32}
NODES = 2
ROWS, MICRO_ROWS = 8, 2  # of a step, and of a rank's micro-batch
STEPS, EVERY = 9, 3  # of a run; between saves
KILLED_IN = 5  # the step
STRATEGIES = {4: "IIG", 2: "fastest"}  # by number of ranks
LOG = Path("node_failure.log")  # what the ranks print
LIMIT = 300  # seconds that a run may take
MEMORY = "NODE_FAILURE_MEMORY"  # variable that names a node's memory folder
SILENT = "silent"
MOMENTS = ("forward", "reductions", "update", "saving", SILENT)
TOLERANCE = 1e-5  # relative, of losses: sums over other numbers of ranks are rounded otherwise
# A dead node is noticed after interval x attempts seconds; then the others wait for a last call whether one joins.
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=3,join_timeout=60"

# By default torch 2.13 has restarted ranks meet in the store of those before them, and find the addresses of the dead.
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
TIMEOUT = {"DEEPSPEED_TIMEOUT": "1"}  # minutes after which a collective fails


@dataclass
class Plan:
    """The settings of the ranks."""

    folder: str  # folder of checkpoints and reports
    moment: str  # in which the second node is killed; empty for none
    in_memory: bool = False  # whether the run saves into memory of the nodes


# What runs in the ranks ###########################################################################


class Run:
    """A rank's training, which asks to be killed."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._folder = plan, Path(plan.folder)
        self._ranks = dist.get_world_size()
        torch.manual_seed(0)
        self._model = ByteGPT(**MODEL)
        name = STRATEGIES[self._ranks]
        aside = {"async_save": True, "memory_folder": os.environ[MEMORY]} if plan.in_memory else {}
        config = {
            "train_batch_size": ROWS,
            "train_micro_batch_size_per_gpu": MICRO_ROWS,  # accumulation follows from these and the ranks
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-4, "torch_adam": True}},
            "zero_optimization": {"paro_strategy": name, "reduce_bucket_size": 100_000},
            "checkpoint": {"load_universal": True, **aside},
            "steps_per_print": 1_000_000,
        }
        self.engine, *_ = deepspeed.initialize(model=self._model, config=config)
        self.report("started", strategy=self.engine.optimizer.strategy.name)

    def report(self, event: str, by_any: bool = False, **fields: Any) -> None:
        """Append a line of JSON, on the first rank, or on each."""
        if by_any or dist.get_rank() == 0:
            with (self._folder / "reports").open("a") as file:
                file.write(json.dumps({"event": event, "time": time.time(), "ranks": self._ranks, **fields}) + "\n")

    def run(self) -> None:
        checkpoints = self._folder / "checkpoints"
        if checkpoints.exists():
            self.engine.load_checkpoint(checkpoints)
            self.report("loaded", step=self.engine.global_steps)
        while (step := self.engine.global_steps) < STEPS:
            self.report("trained", step=step, loss=self._step(step))
            if self._plan.in_memory:
                self._ask("saving", step)
                deepspeed_ext.save_in_memory(self.engine, checkpoints)
            elif self.engine.global_steps % EVERY == 0:
                self._ask("saving", step)
                self.engine.save_checkpoint(checkpoints)

    def _step(self, step: int) -> float:
        rows = torch.randint(256, (ROWS, MODEL["sequence_length"] + 1), generator=torch.Generator().manual_seed(step))
        losses = []
        for number in range(self.engine.gradient_accumulation_steps()):
            first = (number * self._ranks + dist.get_rank()) * MICRO_ROWS
            tokens = rows[first : first + MICRO_ROWS]
            self._ask("forward", step)
            if self._asks("reductions", step):  # in the middle of the backward
                middle = self._model.blocks[len(self._model.blocks) // 2]
                middle.register_full_backward_hook(lambda *_: self._ask("reductions", step))
            loss: Tensor = self.engine(tokens[:, :-1], tokens[:, 1:])
            self.engine.backward(loss)
            losses.append(loss.detach())
            self._ask("update", step)
            self._ask(SILENT, step)
            self.engine.step()
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        return mean.item() / self._ranks

    def _asks(self, moment: str, step: int) -> bool:
        full = self._ranks == max(STRATEGIES)
        return full and moment == self._plan.moment and step == KILLED_IN

    def _ask(self, moment: str, step: int) -> None:
        """Ask to be killed, if that is the moment; a save continues until it happens."""
        if self._asks(moment, step) and dist.get_rank() == self._ranks - 1:
            (self._folder / "kill").write_text(moment)
            if moment != "saving":
                time.sleep(60)


def work(path: Path) -> None:
    start_rank()
    run = Run(Plan(**json.loads(path.read_text())))
    try:
        run.run()
    except Exception:
        run.report("noticed", by_any=True)
        raise
    dist.destroy_process_group()


# What starts them #################################################################################


@dataclass
class Outcome:
    """A run: losses by step, the last of each, and its messages."""

    losses: dict[int, float]
    reports: list[dict[str, Any]]
    killed: float = math.nan

    def after(self, event: str, since: float) -> dict[str, Any]:
        """Return the first report of that kind from then on."""
        return next(report for report in self.reports if report["event"] == event and report["time"] >= since)


def train(folder: Path, plan: Plan) -> Outcome:
    """Run until the end, and kill the second node when it asks; RuntimeError if that did not end well."""
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(asdict(plan)))
    killed = math.nan
    with LOG.open("ab") as output, Network(NODES) as network, Processes(network) as processes:
        options = ["--nnodes", f"1:{NODES}", "--nproc-per-node", "2", "--max-restarts", "3"]
        options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address(0)}:{PORT}", "--rdzv-id", folder.name]
        script = ["-m", "tests.campaigns.node_failure", "--worker", str(folder / "plan.json")]
        for node in range(NODES):
            # There is no name server, by which torchrun would find out where it runs.
            local = ["--local-addr", address(node), "--rdzv-conf", f"{RENDEZVOUS},is_host={int(not node)}"]
            command = [sys.executable, "-m", "torch.distributed.run", *options, *local, *script]
            memory = folder / f"memory_of_node_{node}"
            memory.mkdir()
            processes.start(NodeJob(node, command, FRESH_STORE | TIMEOUT | {MEMORY: str(memory)}), output)
        ends = time.monotonic() + LIMIT
        while (remaining := ends - time.monotonic()) > 0:
            if (folder / "kill").exists() and math.isnan(killed):
                killed = time.time()
                if plan.moment == SILENT:
                    network.cut(1)
                network.kill([1])
                processes.forget(1)
                shutil.rmtree(folder / "memory_of_node_1", ignore_errors=True)
            try:
                failure = processes.wait(min(remaining, 0.01))
            except TimeoutError:
                continue
            if failure is not None:
                raise RuntimeError(f"node {failure.node} failed with status {failure.status}; see {LOG}")
            break
        else:
            raise RuntimeError(f"not finished after {LIMIT} s; see {LOG}")
    reports = [json.loads(line) for line in (folder / "reports").read_text().splitlines()]
    losses = {report["step"]: report["loss"] for report in reports if report["event"] == "trained"}
    return Outcome(losses, reports, killed)


def verdict(expected: Outcome, found: Outcome, every: int) -> tuple[bool, dict[str, Any]]:
    """Return whether a run with such saves continued correctly; the steps it lost; seconds of each recovery part."""
    noticed = found.after("noticed", found.killed)
    started = found.after("started", noticed["time"])
    loaded = found.after("loaded", started["time"])
    trained = found.after("trained", loaded["time"])
    last = max(row["step"] for row in found.reports if row["event"] == "trained" and row["time"] < loaded["time"])
    gaps = [abs(found.losses[step] / loss - 1) for step, loss in expected.losses.items()]
    times = [found.killed, noticed["time"], started["time"], loaded["time"], trained["time"]]
    parts = dict(zip(("noticed", "started", "loaded", "trained"), map(operator.sub, times[1:], times), strict=False))
    lost = last + 1 - loaded["step"]
    passed = max(gaps) <= TOLERANCE and loaded["step"] % every == 0 and lost < every + 1 and trained["ranks"] == 2
    row = {"strategy": started["strategy"], "resumed": loaded["step"], "lost": lost, **parts}
    return passed, row | {"all": times[-1] - times[0], "gap": max(gaps)}


def check(in_memory: bool) -> bool:
    columns = ("strategy", "resumed", "lost", "noticed", "started", "loaded", "trained", "all", "gap")
    print(f"{'killed in':<12}" + "".join(f"{column:>10}" for column in columns), flush=True)
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        expected = train(base / "undisturbed", Plan(str(base / "undisturbed"), ""))
        passed = True
        for moment in MOMENTS:
            folder = base / moment
            results = train(folder, Plan(str(folder), moment, in_memory))
            good, row = verdict(expected, results, 1 if in_memory else EVERY)
            passed &= good
            cells = (f"{value:.3g}" if isinstance(value, float) else value for value in row.values())
            row_cells = "".join(f"{cell:>10}" for cell in cells)
            print(f"{moment:<12}{row_cells}{'' if good else '  NOT AS IT HAD TO'}", flush=True)
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-memory", action="store_true", help="save after each step, into memory of the nodes")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        work(args.worker)
        return 0
    require_emulation()
    exit_on_signals()
    try:
        return 0 if check(args.in_memory) else 1
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
