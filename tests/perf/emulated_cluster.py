# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""All 14 strategies, with and without LoCo, beside their peers, on clusters that this machine emulates.

A node is a network namespace with some CPU ranks (``scripts/emulation``); what it exchanges with others goes over a
link of a limited rate and is counted by the link's own interface. All methods train the same model on the same data
from the same seed in the same processes, and take turns, a step each, in rounds whose order alternates: so whatever
else this machine does falls on all of them. A step's time is that of the slowest rank.

A step of up to 8 s from which the host of a virtual machine has taken the CPU away (/proc/stat) is repeated, whatever
it took; of longer ones the rows say how much was taken. Methods whose steps are short have more of them.

For each method: seconds of a step, bytes between nodes, bytes of model states that a rank holds, and the *floor*: the
time of compute alone (forward and backward of all micro-batches on all ranks at once, and an update of 1/n of the
parameters), plus the method's own bytes over the link's rate.

For the strategies also what the planner predicts, from rates that its probe has measured on the same links.

Needs root, and ``ip`` and ``tc`` of iproute2. One launch for each setting; all of them take about an hour on 2 cores.

Exit status 0 if weights agree and the strategies' bytes are those of the formula, 1 if not, 2 if it could not run.
"""

import argparse
import functools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from deepspeed_ext.comm import collectives
from deepspeed_ext.comm.process_groups import get_topology
from deepspeed_ext.loco.settings import LocoSettings
from deepspeed_ext.planner import probe
from deepspeed_ext.planner.choice import plan
from deepspeed_ext.planner.cost import Model
from deepspeed_ext.planner.models import describe
from deepspeed_ext.strategy import STRATEGIES
from scripts.emulation.cluster import collect
from scripts.emulation.launching import start_rank
from scripts.emulation.network import Link
from tests.perf.lib import records, verdict
from tests.perf.lib.cluster_rows import LOCO, NATIVE, SETTINGS, SIZES, MethodRow, Setting
from tests.perf.lib.peers import ADAMW, PEERS, Batch, Method, Ours, Workload

BLOCKS, ROWS = 4, 8
WARM_UP_STEPS = 2
LONG, ENOUGH = 8.0, 2  # a method whose steps take so many seconds has this number of them, whatever --rounds says
SHORT, MOST = 3.0, 20  # one whose steps take less than this together goes on, up to this number of them
STOLEN, TRIES = 0.05, 4  # a step that lost more of the CPU to the host than this share is repeated, as often as this
CALIBRATION = 1_000_000  # elements of fp32
COMPUTE = "compute"


# What runs in the ranks ###########################################################################


class ShortcutBlock(nn.Module):
    """Two layers with a shortcut."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.rise = nn.Linear(width, hidden, bias=False)
        self.fall = nn.Linear(hidden, width, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.fall(nn.functional.gelu(self.rise(inputs)))


class Blocks(nn.Module):
    """Blocks that return their own loss."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ShortcutBlock(width, hidden) for _ in range(BLOCKS))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        inputs.requires_grad_()  # or DeepSpeed's own leaf modules crash: the first block has nothing to hook
        for block in self.blocks:
            inputs = block(inputs)
        return (inputs - targets).square().mean()


class Compute(Method):
    """What no method can do without: forward and backward on whole parameters, and an update of 1/n of them."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(COMPUTE, "no communication")
        self._model, self._accumulation = workload.make_model(), workload.accumulation
        flat = torch.cat([p.detach().flatten() for p in self._model.parameters()])
        self._share = nn.Parameter(flat[: -(-flat.numel() // dist.get_world_size())].clone())
        self._share.grad = torch.zeros_like(self._share)
        self._optimizer = torch.optim.AdamW([self._share], **ADAMW)

    def _micro_step(self, inputs: Tensor, targets: Tensor, last: bool, look: Callable[[], None]) -> None:
        (self._model(inputs, targets) / self._accumulation).backward()
        if last:
            self._optimizer.step()
            self._model.zero_grad()

    def _states(self) -> Any:
        raise NotImplementedError

    def weights(self) -> Tensor:
        raise NotImplementedError

    def close(self) -> None:
        self._model = self._optimizer = None  # type: ignore[assignment]


def methods(names: list[str], workload: Workload) -> Iterator[Method]:
    """Yield what is asked for, in a fixed order."""
    for name, make in PEERS.items():
        if name in names:
            yield make(workload)
    for name in STRATEGIES:
        zero: dict[str, Any] = {"paro_strategy": name, "paro_group_size": workload.group_size}
        if name in names:
            yield Ours(workload, zero, name)
        if name + LOCO in names:
            yield Ours(workload, {**zero, "zeropp_loco_param": {}}, name + LOCO)
        if name + NATIVE in names:
            # As on other backends: hops take the backend's own reduce-scatter and all-gather.
            with mock.patch.object(collectives, "backend_of", lambda group: "native"):
                yield Ours(workload, zero, name + NATIVE)


class Timed(NamedTuple):
    """A step: the share of the CPU that was stolen from it, its seconds, and bytes that a node sent on average."""

    stolen: float
    seconds: float
    sent: float


def cpu_times() -> tuple[int, int]:
    """Return CPU ticks of this machine since its start: stolen by its host, and in all. See proc(5)."""
    _, *ticks = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    return int(ticks[7]), sum(map(int, ticks[:8]))


class Worker:
    """What a rank needs to measure one setting."""

    def __init__(self, setting: Setting, args: argparse.Namespace) -> None:
        self._setting, self._args = setting, args
        self._rounds = max(MOST, args.rounds)
        self._link = Link()
        self._topology = get_topology(None, setting.ranks_per_node)
        width, hidden = SIZES[setting.size]
        self._width = width
        workload = Workload(
            setting.accumulation, setting.ranks_per_node, functools.partial(self._model, width, hidden)
        )
        self._link.limit(None)
        dist.barrier()
        self._described = replace(
            describe(workload.make_model(), accumulation=setting.accumulation), bucket=workload.bucket
        )
        self._compute = Compute(workload)
        self._methods = {method.name: method for method in methods(args.methods, workload)}
        self._steps = dict.fromkeys([COMPUTE, *self._methods], 0)

    @staticmethod
    def _model(width: int, hidden: int) -> nn.Module:
        torch.manual_seed(0)
        return Blocks(width, hidden)

    def rows(self) -> list[MethodRow]:
        """Measure at all rates."""
        held = self._warm_up()
        differences = self._compare()
        rows = []
        bar = tqdm(total=len(self._setting.mbit) * self._rounds, desc=self._setting.name, disable=dist.get_rank() != 0)
        for mbit in self._setting.mbit:
            rows += self._at(mbit, held, bar)
        for row in rows:
            row.difference = differences[row.method]
        return rows

    def _warm_up(self) -> dict[str, tuple[float, float, float]]:
        """Open connections, record modules, make moments; return what is held."""
        held = {}
        for method in [self._compute, *self._methods.values()]:
            for number in range(WARM_UP_STEPS):
                method.step(self._batches(method), watch=number > 0 and method is not self._compute)
                method.finish()
            if method is not self._compute:
                states = asdict(method.held())
                held[method.name] = tuple(_over_ranks(list(states.values()), dist.ReduceOp.MAX))
        return held

    def _at(self, mbit: float | None, held: dict[str, Any], bar: Any) -> list[MethodRow]:
        self._link.limit(mbit)
        dist.barrier()
        headers = self._headers()
        rates = probe.measure(self._topology)
        rows = {
            name: MethodRow(self._setting.name, mbit, name, method.setup) for name, method in self._methods.items()
        }
        compute: list[float] = []
        for number in range(self._rounds):
            bar.update()
            order = [name for name, row in rows.items() if self._goes_on(row.seconds)]
            if not order:
                continue
            random.Random(number).shuffle(order)
            for name in order:
                row = rows[name]
                step = self._undisturbed(self._methods[name])
                row.seconds.append(step.seconds)
                row.stolen.append(step.stolen)
                row.link_bytes += (step.sent - row.link_bytes) / len(row.seconds)
            compute.append(self._undisturbed(self._compute).seconds)
        alone = statistics.median(compute)
        model = replace(self._described, compute=alone / self._setting.accumulation)
        for row in rows.values():
            row.headers, row.compute, row.held = headers, alone, held[row.method]
        self._predict(rows, model, rates)
        return list(rows.values())

    def _goes_on(self, seconds: list[float]) -> bool:
        """Whether a method has another step. Of short ones the median is steady after more of them only."""
        if len(seconds) >= ENOUGH and min(seconds) > LONG:
            return False
        return len(seconds) < self._args.rounds or (sum(seconds) < SHORT and len(seconds) < MOST)

    def _predict(self, rows: dict[str, MethodRow], model: Model, rates: Any) -> None:
        for suffix, loco in (("", None), (LOCO, LocoSettings())):
            for one in plan(self._setting.sizes, model, rates, None, [loco]).predictions:
                row = rows.get(one.strategy + suffix)
                if row is not None:
                    row.parts = one.seconds
                    row.formula_bytes = one.volume.inter * self._setting.ranks_per_node
        for name in STRATEGIES:
            if name in rows and name + NATIVE in rows:
                rows[name + NATIVE].formula_bytes = rows[name].formula_bytes

    def _undisturbed(self, method: Method) -> Timed:
        """Time a step from which the host of this machine has taken little: the best of some, none of them long."""
        tried: list[Timed] = []
        while len(tried) < TRIES:
            tried.append(self._timed(method))
            if tried[-1].stolen <= STOLEN or tried[-1].seconds > LONG:
                break
        return min(tried)

    def _timed(self, method: Method) -> Timed:
        batches = self._batches(method)
        dist.barrier()
        before = self._link.sent()
        stolen, total = cpu_times()
        dist.barrier()
        begin = time.perf_counter()
        method.step(batches)
        method.finish()
        dist.barrier()
        (seconds,) = _over_ranks([time.perf_counter() - begin], dist.ReduceOp.MAX)
        (sent,) = _over_ranks([self._link.sent() - before], dist.ReduceOp.SUM)
        later, total_later = cpu_times()
        (share,) = _over_ranks([(later - stolen) / max(1, total_later - total)], dist.ReduceOp.MAX)
        return Timed(share, seconds, sent / self._setting.nodes)

    def _headers(self) -> float:
        """Return the bytes that the interfaces count for each of a known transfer."""
        shard = torch.zeros(CALIBRATION)
        gathered = shard.new_empty(shard.numel() * self._setting.nodes)
        dist.barrier()
        before = self._link.sent()
        dist.barrier()
        dist.all_gather_into_tensor(gathered, shard, group=self._topology.inter)
        dist.barrier()
        (sent,) = _over_ranks([self._link.sent() - before], dist.ReduceOp.SUM)
        return sent / (4 * CALIBRATION * (self._setting.nodes - 1) * dist.get_world_size())

    def _batches(self, method: Method) -> list[Batch]:
        """Make the batches of a method's next step: those that every other method has in that step."""
        step = self._steps[method.name]
        self._steps[method.name] += 1
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        rows = torch.randn(self._setting.accumulation, 2, ROWS, self._width, generator=generator)
        return [(inputs, targets) for inputs, targets in rows]

    def _compare(self) -> dict[str, float]:
        """Return the difference of each method's weights to the first one's, relative to the largest. Collective."""
        first = next(iter(self._methods.values())).weights()
        found = {}
        for name, method in self._methods.items():
            apart = ((method.weights() - first).abs().max() / first.abs().max()).nan_to_num(float("inf"))
            (found[name],) = _over_ranks([apart.item()], dist.ReduceOp.MAX)
        return found


def _over_ranks(values: list[float], op: Any) -> list[float]:
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, op=op)
    return found.tolist()


def work(args: argparse.Namespace) -> None:
    """Live as a rank: measure and report."""
    first = start_rank()
    rows = Worker(SETTINGS[args.setting], args).rows()
    if first:
        args.worker.write_text(json.dumps([asdict(row) for row in rows]))
    dist.destroy_process_group()


# What starts them #################################################################################


def all_methods() -> list[str]:
    return [
        *PEERS,
        *(name + suffix for name in STRATEGIES for suffix in ("", LOCO)),
        *(name + NATIVE for name in ("NIG", "IIG")),
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time all strategies and their peers on emulated clusters.")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--methods", nargs="+", choices=all_methods(), default=all_methods(), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each method at each rate, at least")
    parser.add_argument("--log", type=Path, default=Path("emulated_cluster.log"), help="what the ranks print")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that a setting may take")
    parser.add_argument("--csv", type=Path, help="append a row a result here")
    parser.add_argument("--setting", choices=SETTINGS, help=argparse.SUPPRESS)  # of a rank
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # a rank, and where it reports
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    return args


def main() -> int:
    args = parse_arguments()
    if args.worker is not None:
        work(args)
        return 0
    failed = False
    for name in args.settings:
        setting, more = SETTINGS[name], ["--setting", name]
        found = collect(setting.nodes, setting.ranks_per_node, __spec__.name, args.log, args.timeout, more)
        rows = [MethodRow(**values | {"held": tuple(values["held"])}) for values in found]
        wrong = verdict.print_all(rows, setting.sizes)
        failed |= wrong
        if args.csv is not None and not wrong:  # what did not train the same, or not as it should, is no result
            records.append_rows(args.csv, [row.to_csv() for row in rows])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
