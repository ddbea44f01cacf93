# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""All-gathers and reduce-scatters over all ranks, without a model: two hops, a flat ring, and gloo's collectives."""

import ctypes
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from deepspeed_ext.comm import backends, hops, observers, process_groups, redistribution, transfer_queue
from deepspeed_ext.planner import probe
from deepspeed_ext.strategy import Placement
from tests.perf.lib import plots, rings, settings
from tests.perf.lib.measurements import Measurement
from tests.perf.lib.records import RESULTS, Row, Table, read, speed
from tests.perf.lib.turns import Turns, over_ranks

PLOT = RESULTS / "collectives.svg"
OPERATIONS = GATHER, REDUCE = "all-gather", "reduce-scatter"
METHODS = GLOO, RING, HOPS, WINDOWS = "gloo", "flat ring", "two hops", "8 windows"
Run = Callable[[], Any]
# Messages of a step, their MiB, and microseconds of delay. A link that was idle passes 128 KiB at once.
STEPS = ((16, 1, 0), (4, 4, 0), (1, 16, 0), (1, 64, 0), (16, 1, 50), (16, 1, 1000))


def moves(
    topology: process_groups.Topology, operation: str, elements: int, delay: float
) -> dict[str, tuple[Run, float]]:
    """Return a function for each method, and how far its first result is from gloo's on any rank. Two hops are our
    redistributions G -> N and N -> G. These order messages by column (rank in a group), so a message is also copied,
    as flat buffers are. Windows overlap as buckets do: one's second hop and the next one's first. Messages between
    nodes arrive ``delay`` seconds later, but not gloo's."""
    sizes, groups, generator = topology.sizes, (topology.intra, topology.inter), torch.Generator()
    generator.manual_seed(topology.rank)
    numels, late = (elements, elements // sizes.ranks), 0.0 if topology.rank % sizes.group_size else delay
    full, shard = (torch.randint(-9, 9, (numel,), generator=generator).float() for numel in numels)
    gathers = redistribution.ParameterRedistribution(*map(hops.GatherHop, groups, ("intra", "inter")))
    sums = redistribution.GradientRedistribution(*map(backends.make_reduce, groups, ("intra", "inter")))
    queue = transfer_queue.TransferQueue(True, thread_completes=operation == REDUCE)  # as for updates, or gradients

    def on_start(name: str, group: Any, nbytes: float, handle: Any) -> Any:
        delayed = SimpleNamespace(wait=lambda: (handle.wait(), time.sleep(delay)))
        return delayed if delay and name.startswith("inter") else handle

    def two_hops(windows: int) -> None:
        cells = full.view(sizes.groups, sizes.group_size, -1).transpose(0, 1).chunk(windows, -1)
        with observers.observed_by(SimpleNamespace(on_start=on_start, on_wait=nullcontext)):
            for part, own in zip(cells, shard.chunk(windows), strict=True):
                if operation == GATHER:
                    gather = gathers.gather(own, Placement.G, Placement.N)
                    queue.submit(gather, lambda gathered, part=part: part.copy_(gathered.view(part.shape)))
                else:
                    queue.submit(sums.reduce_cells(part.contiguous(), Placement.G, ()), own.copy_)
            queue.drain()

    if operation == GATHER:
        flat: list[Run] = [partial(dist.all_gather_into_tensor, full, shard)]
        flat.append(partial(rings.ring_all_gather, full, shard, topology.world, late))
    else:
        flat = [partial(dist.reduce_scatter_tensor, shard, full)]
        flat.append(lambda: shard.copy_(rings.ring_reduce_scatter(full.chunk(sizes.ranks), topology.world, late)))
    written, results = full if operation == GATHER else shard, []
    for run in (runs := [*flat, partial(two_hops, 1), partial(two_hops, 8)]):
        written.zero_()
        run()
        results.append(written.clone())
    apart = over_ranks([(result - results[0]).abs().max().item() for result in results], dist.ReduceOp.MAX)
    return dict(zip(METHODS, zip(runs, apart, strict=True), strict=True))


class CollectivesMeasurement(Measurement):
    """Seconds of messages. Names of methods begin with the operation and the messages."""

    compared, bounds = "results", {settings.FP32: 0.0}
    slack = 2.0**19  # of headers of small messages
    file, settings, methods = "collectives.csv", settings.COLLECTIVES, METHODS

    def measure(self) -> list[Row]:
        for option in ((-4, 0), (-1, 2**30)):  # M_MMAP_MAX, M_TRIM_THRESHOLD: memory is used again, as on a device
            ctypes.CDLL(None).mallopt(*option)
        turns, rows = Turns(self.setting.ranks_per_node, lambda _: []), list[Row]()
        turns.limit(self.setting.mbit[0])
        headers, inside = turns.headers(), probe.sample_hop(hops.GatherHop(turns.topology.intra), torch.float32)[-1]
        sent = {RING: 1 - 1 / self.setting.sizes.ranks, GLOO: 0.0}  # of a message, by a node
        points = [(operation, *step) for operation in OPERATIONS for step in STEPS]
        for operation, count, mib, delay in tqdm(points, self.setting.name, disable=dist.get_rank() > 0):
            steps, point = [], f"{operation}, {count} x {mib} MiB, " + f"{delay} us, " * (delay > 0)
            for name, (run, apart) in moves(turns.topology, operation, mib * 2**18, delay * 1e-6).items():
                step = SimpleNamespace(name=name, finish=bool, step=lambda _, r=run, n=count: [r() for _ in range(n)])
                row = Row(self.setting.name, self.setting.mbit[0], point + name, headers=headers, difference=apart)
                row.formula_bytes = sent.get(name, 1 - 1 / self.setting.nodes) * count * mib * 2**20 or None
                row.more = {"inside_mbit": 8e-6 * inside[0] / inside[1]}  # that each rank receives
                steps += [(row, step)] if name in self.names and not (delay and name == GLOO) else []
            for number in range(self.args.rounds):
                for row, step in random.Random(number).sample(steps, len(steps)):
                    row.add(*turns.a_step(step))
            rows += [row for row, _ in steps]
        return rows


def table(of: str = "") -> Table:
    """Return seconds of each method for messages, and speeds relative to the flat ring: measured, and by bytes."""
    points, lines = dict[str, dict[str, Row]](), []
    for row in (row for row in read(CollectivesMeasurement.file) if of in row.method):
        point, _, method = row.method.rpartition(", ")
        points.setdefault(f"{row.setting}, {point}", {})[method] = row
    for point, rows in points.items():
        times = [(row.median, min(row.steps), max(row.steps)) for row in map(rows.get, METHODS) if row]
        cells = ["{:.2f} ({:.2f} .. {:.2f})".format(*spread) for spread in times]
        bytes_of_ring, bytes_of_hops = (rows[method].formula_bytes or 0.0 for method in (RING, HOPS))
        speeds = [*(speed(rows[method], rows[RING]).value for method in METHODS[2:]), bytes_of_ring / bytes_of_hops]
        lines.append([point, *[""] * (4 - len(cells)), *cells, *(f"{value:.2f}" for value in speeds)])
    return ["nodes x ranks", *METHODS, *(f"{of}, speed" for of in METHODS[2:]), "speed by bytes"], lines


def plot() -> None:
    """Draw the speeds of large messages over the number of nodes."""
    (*_, hop, window, by_bytes), lines = table()
    curves: dict[str, dict[float, float]] = {by_bytes: {}}
    ticks = {float(setting.nodes): name for name, setting in settings.COLLECTIVES.items()}
    for (nodes, operation), line in [(line[0].split(", ")[:2], line) for line in lines if line[0].endswith("64 MiB")]:
        for name, value in zip((f"{operation}, {hop}", f"{operation}, {window}", by_bytes), line[-3:], strict=True):
            curves.setdefault(name, {})[float(nodes.split("x")[0])] = float(value)
    plots.draw(PLOT, curves, ticks, ("nodes x ranks", "relative to a flat ring"), table())
