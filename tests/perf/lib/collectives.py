# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""All-gathers and reduce-scatters over all ranks, without a model: two hops, a flat ring, and gloo's collectives."""

import ctypes
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from deepspeed_ext.comm import observers
from deepspeed_ext.comm.backends import make_reduce
from deepspeed_ext.comm.hops import GatherHop, Transfer
from deepspeed_ext.comm.process_groups import Topology
from deepspeed_ext.comm.redistribution import GradientRedistribution, ParameterRedistribution
from deepspeed_ext.comm.transfer_queue import TransferQueue
from deepspeed_ext.planner import probe
from deepspeed_ext.strategy import Placement
from tests.perf.lib import plots
from tests.perf.lib.measurements import Measurement
from tests.perf.lib.records import RESULTS, Row, Table, read
from tests.perf.lib.rings import ring_all_gather, ring_reduce_scatter
from tests.perf.lib.settings import COLLECTIVES
from tests.perf.lib.turns import Turns, over_ranks

FILE, PLOT = "collectives.csv", RESULTS / "collectives.svg"
GATHER, REDUCE = "all-gather", "reduce-scatter"
RING, GLOO = "flat ring", "gloo"
WINDOWS = {"two hops": 1, "two hops, 8 windows": 8}
METHODS = (RING, *WINDOWS, GLOO)
MEGABYTES, DELAYS = (
    (1, 4, 16, 64),
    (50, 1000),
)  # of the complete message, in MiB; of messages of 1 MiB, in microseconds
DRAWN = ((1, "two hops"), (64, "two hops"), (64, "two hops, 8 windows"))  # six curves and that of bytes
LEAST = 16  # MiB that are sent in a turn, in messages one after the other: a link sends its first 128 KiB at once
KEEP_MAPPED = ((-4, 0), (-1, 2**30))  # mallopt: M_MMAP_MAX, M_TRIM_THRESHOLD


class Point(NamedTuple):
    operation: str
    megabytes: int
    delay_us: int


class LateMessages:
    """Delivers messages between groups later: an observer that replaces the handles of those hops."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def on_start(self, name: str, group: dist.ProcessGroup, nbytes: float, handle: Any) -> Any:
        return _LateHandle(handle, self._seconds) if name.startswith("inter") else handle

    def on_wait(self) -> AbstractContextManager[None]:
        return nullcontext()


class _LateHandle(NamedTuple):
    handle: Any
    seconds: float

    def wait(self) -> None:
        self.handle.wait()
        time.sleep(self.seconds)


class Collectives:
    """Every method of both operations, between ``full`` messages and the ``shard`` of each rank, in rank order.

    Two hops are our redistributions G -> N and N -> G. Their messages are ordered by columns (ranks of a group), so
    each is copied, as flat buffers are. With several windows they run as buckets do: while a window is in its second
    hop, the next one is in its first.
    """

    def __init__(self, topology: Topology) -> None:
        self._world, self._m, self._k = topology.world, topology.sizes.group_size, topology.sizes.groups
        self._first = topology.rank % self._m == 0  # its predecessor in the ring is in another group
        intra, inter = topology.intra, topology.inter
        self._gathers = ParameterRedistribution(GatherHop(intra, "intra"), GatherHop(inter, "inter"))
        self._reductions = GradientRedistribution(make_reduce(intra, "intra"), make_reduce(inter, "inter"))
        self._updates, self._gradients = TransferQueue(True), TransferQueue(True, thread_completes=True)

    def run(self, method: str, operation: str, full: Tensor, shard: Tensor, delay: float = 0.0) -> None:
        """Write ``full`` (all-gather) or ``shard`` (reduce-scatter); gloo has no delay."""
        if method == GLOO:
            gather = operation == GATHER
            dist.all_gather_into_tensor(full, shard) if gather else dist.reduce_scatter_tensor(shard, full)
        elif method == RING:
            late = delay if self._first else 0.0
            if operation == GATHER:
                ring_all_gather(full, shard, self._world, late)
            else:
                shard.copy_(ring_reduce_scatter(full.chunk(self._m * self._k), self._world, late))
        else:
            with observers.observed_by(LateMessages(delay)) if delay else nullcontext():
                self._in_two_hops(operation, full, shard, WINDOWS[method])

    def _in_two_hops(self, operation: str, full: Tensor, shard: Tensor, windows: int) -> None:
        queue = self._updates if operation == GATHER else self._gradients
        cells = full.view(self._k, self._m, -1).transpose(0, 1).chunk(windows, -1)
        for part, own in zip(cells, shard.chunk(windows), strict=True):
            if operation == GATHER:
                queue.submit(
                    self._gathers.gather(own, Placement.G, Placement.N),
                    lambda gathered, part=part: part.copy_(gathered.view(part.shape)),
                )
            else:
                queue.submit(self._reduce(part), own.copy_)
        queue.drain()

    def _reduce(self, cells: Tensor) -> Transfer:
        return (yield from self._reductions.reduce_cells(cells.contiguous(), Placement.G, ()))


class Repeated(NamedTuple):
    """A collective as a step, which ``Turns`` times."""

    name: str
    run: Callable[[], None]
    count: int

    def step(self, _: Any) -> None:
        for _ in range(self.count):
            self.run()

    def finish(self) -> None:
        """Do nothing."""


class CollectivesMeasurement(Measurement):
    """Seconds of a collective of each method. Memory stays mapped, as that of a device would."""

    file = FILE
    settings = COLLECTIVES
    methods = METHODS
    stock = RING

    def measure(self) -> list[Row]:
        for option in KEEP_MAPPED:
            ctypes.CDLL(None).mallopt(*option)
        self.turns = Turns(self.setting.ranks_per_node, lambda _: [])
        self.collectives = Collectives(self.turns.topology)
        (mbit,) = self.setting.mbit
        self.turns.limit(mbit)
        hop = GatherHop(self.turns.topology.intra, "intra")
        inside = probe._hop_rate(hop, torch.float32).bandwidth * 8 / 1e6
        headers = self.turns.headers()
        points = [Point(op, size, 0) for op in (GATHER, REDUCE) for size in MEGABYTES]
        points += [Point(op, MEGABYTES[0], delay) for op in (GATHER, REDUCE) for delay in DELAYS]
        rows = [
            row for point in tqdm(points, self.setting.name, disable=dist.get_rank() != 0) for row in self.of(point)
        ]
        for row in rows:
            row.headers, row.mbit, row.more["inside_mbit"] = headers, mbit, inside
        return rows

    def of(self, point: Point) -> list[Row]:
        """Measure one operation with messages of one size; the first message opens connections and is compared."""
        ranks, elements = dist.get_world_size(), point.megabytes * 2**18
        generator = torch.Generator().manual_seed(dist.get_rank())
        full, shard = (torch.randint(-9, 9, (n,), generator=generator).float() for n in (elements, elements // ranks))
        written = full if point.operation == GATHER else shard
        results, rows, steps = dict[str, Tensor](), dict[str, Row](), dict[str, Any]()
        for name in (GLOO, *(name for name in self.names if name != GLOO)):
            run = partial(self.collectives.run, name, point.operation, full, shard, point.delay_us * 1e-6)
            run()
            results[name] = written.clone()
            more = {**point._asdict(), "messages": max(1, LEAST // point.megabytes)}
            apart = over_ranks([(results[name] - results[GLOO]).abs().max().item()], dist.ReduceOp.MAX)
            rows[name] = Row(self.setting.name, None, name, more=more, difference=apart[0])
            ends = {RING: 1 - 1 / ranks, GLOO: None}.get(name, 1 - 1 / self.setting.nodes)
            rows[name].formula_bytes = ends and ends * 4 * elements
            steps[name] = Repeated(name, run, more["messages"])
        if point.delay_us:
            del rows[GLOO]
        del results
        for number in range(self.args.rounds):
            for name in random.Random(number).sample(list(rows), len(rows)):
                stolen, seconds, sent = self.turns.a_step(steps[name])
                rows[name].add(stolen, [seconds[0] / steps[name].count], sent / steps[name].count)
        return list(rows.values())

    @classmethod
    def problems(cls, rows: Sequence[Row]) -> list[str]:
        """Return messages about results that are not torch's, and about other bytes than the formula's."""
        apart = [
            f"{row.method} differs by {row.difference:.1e} from gloo's {row.more}" for row in rows if row.difference
        ]
        return apart + [message for row in rows for message in cls.other_bytes(row)]

    @classmethod
    def table(cls, rows: Sequence[Row]) -> Table:
        return tabulate(rows)


def expected_speed(nodes: int, ranks: int = 16) -> float:
    """Return the speed of two hops relative to a flat ring if only bytes between nodes take time."""
    return (1 - 1 / ranks) / (1 - 1 / nodes)


def tabulate(rows: Sequence[Row]) -> Table:
    """Return milliseconds of each method, and speeds relative to the flat ring."""
    header = ["operation, nodes x ranks, MiB", *(f"{method}, ms" for method in METHODS)]
    header += [f"speed, {method}" for method in WINDOWS] + ["by bytes"]
    by_point: dict[str, dict[str, Row]] = {}
    for row in rows:
        name = f"{row.more['operation']}, {row.setting}, {row.more['megabytes']:g}"
        name += f", delay {row.more['delay_us']:g} us" if row.more["delay_us"] else ""
        by_point.setdefault(name, {})[row.method] = row
    lines = []
    for name, row_of in by_point.items():
        times = [_milliseconds(row_of[method]) if method in row_of else "" for method in METHODS]
        speeds = [f"{row_of[RING].median / row_of[method].median:.2f}" for method in WINDOWS]
        lines.append([name, *times, *speeds, f"{expected_speed(COLLECTIVES[row_of[RING].setting].nodes):.2f}"])
    return header, lines


def _milliseconds(row: Row) -> str:
    return f"{1e3 * row.median:.0f} ({1e3 * min(row.steps):.0f} .. {1e3 * max(row.steps):.0f})"


def table() -> Table:
    """Return the table of all rows."""
    return tabulate(read(FILE))


def plot(path: Path = PLOT) -> None:
    """Draw speeds relative to the flat ring over the number of nodes."""
    row_of = {(row.setting, row.method, *(row.more[key] for key in Point._fields)): row for row in read(FILE)}
    curves = {"bytes alone": {setting.nodes: expected_speed(setting.nodes) for setting in COLLECTIVES.values()}}
    for operation, size, method in ((o, s, m) for o in (GATHER, REDUCE) for s, m in DRAWN):
        points = {
            setting.nodes: row_of[name, RING, operation, size, 0].median
            / row_of[name, method, operation, size, 0].median
            for name, setting in COLLECTIVES.items()
        }
        curves[f"{operation}, {size} MiB, {method}"] = points
    ticks = {setting.nodes: f"{name}" for name, setting in COLLECTIVES.items()}
    labels = "nodes x ranks per node", "speed relative to a flat ring"
    plots.draw(path, curves, ticks, labels, table(), subs=range(1, 10))
