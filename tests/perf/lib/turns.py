# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Methods that take turns on an emulated cluster, in the same processes, as seen by one rank. The order alternates
between rounds, so that other load affects all methods. A turn from which the host of a virtual machine has taken CPU
time (/proc/stat) is repeated unless it is long."""

import ctypes
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.muon.original_muon import muon_update
from torch import Tensor, nn

from deepspeed_ext.comm import collectives
from deepspeed_ext.comm.process_groups import get_topology
from deepspeed_ext.strategy import STRATEGIES
from scripts.emulation.network import Link
from tests.perf.lib.peers import MUON_RATE, PEERS, Batch, Method, Ours, Workload
from tests.perf.lib.settings import EMBEDDINGS, FORMS, FP32, MUON, NATIVE, ORDERED, WIDE

LONG = 8.0  # seconds of a turn that is not repeated
STOLEN, TRIES = 0.05, 4  # a turn that lost more of the CPU to the host than this share is repeated, as often as this
CALIBRATION = 1_000_000  # elements of fp32
WARM_UP_STEPS = 2  # in the first one Adam has no moments, and ZeRO-3 records modules; the second one is watched


class Turn(NamedTuple):
    """Some steps: the share of the CPU that was stolen from them, seconds of each, bytes that a node sent in each."""

    stolen: float
    seconds: list[float]
    sent: float


class Compute(Method):
    """Work that every method needs: forward and backward on full parameters, and an update of 1/n of them. Muon's is
    that of full matrices, of every n-th one here, the last of which took ``orthogonalizing`` seconds."""

    orthogonalizing = 0.0

    def __init__(self, workload: Workload) -> None:
        super().__init__("compute", "no communication")
        self._model, self._accumulation = workload.make_model().to(workload.dtype), workload.accumulation
        trainable = [p for p in self._model.parameters() if p.requires_grad]
        own_matrices = trainable[dist.get_rank() :: dist.get_world_size()]
        self._momenta = [(p, torch.zeros_like(p)) for p in own_matrices] if workload.optimizer == MUON else []
        flat = torch.cat([p.detach().flatten() for p in trainable]).float()
        self._share = nn.Parameter(flat[: -(-flat.numel() // dist.get_world_size())].clone())
        self._share.grad = torch.zeros_like(self._share)
        self._optimizer = torch.optim.AdamW([self._share], **workload.adamw)

    def _micro_step(self, inputs: Tensor, targets: Tensor, last: bool, look: Callable[[], None]) -> None:
        (self._model(inputs, targets) / self._accumulation).backward()
        if last:
            self._orthogonalize() if self._momenta else self._optimizer.step()
            self._model.zero_grad()

    @torch.no_grad()
    def _orthogonalize(self) -> None:
        begin = time.perf_counter()
        for matrix, momentum in self._momenta:
            matrix.sub_(muon_update(matrix.grad, momentum), alpha=MUON_RATE)
        self.orthogonalizing = time.perf_counter() - begin

    def _states(self) -> Any:
        raise NotImplementedError

    def weights(self) -> Tensor:
        raise NotImplementedError

    def close(self) -> None:
        self._model = self._optimizer = None  # type: ignore[assignment]


def methods(names: Sequence[str], workload: Workload, keys: Mapping[str, Any]) -> Iterator[Method]:
    """Yield these methods in a fixed order; strategies with these keys of ``zero_optimization``."""
    for name, make in PEERS.items():
        if name in names:
            yield make(workload)
    for name in STRATEGIES:
        zero: dict[str, Any] = {"paro_strategy": name, "paro_group_size": workload.group_size, **keys}
        for suffix, sent in FORMS.items():
            if name + suffix in names:
                used = {"zeropp_loco_param": sent.loco, "paro_quantized_updates": sent.updates}
                few_bits = {key: {} for key, settings in used.items() if settings is not None}
                yield Ours(workload, {**zero, **few_bits}, name + suffix)
        if name + WIDE in names:
            wide = {**workload.config, "communication_data_type": FP32}
            yield Ours(replace(workload, config=wide), zero, name + WIDE)
        whole = {"paro_modules": {"*.w?e": "N"}}  # of GPT-2
        for suffix, used in (("", {}), (ORDERED, {"paro_reduce": "ordered"}), (EMBEDDINGS, whole)):
            if suffix and name + suffix in names:
                yield Ours(workload, {**zero, **used}, name + suffix)
            if name + suffix + NATIVE in names:
                # As on other backends: hops use the backend's own reduce-scatter, all-to-all, and all-gather.
                with mock.patch.object(collectives, "backend_of", lambda group: "native"):
                    yield Ours(workload, {**zero, **used}, name + suffix + NATIVE)


class Turns:
    """A rank's link, and its timing of methods; ``batches`` makes its micro-batches of a step, given its number."""

    def __init__(self, group_size: int, batches: Callable[[int], list[Batch]], link: Any = None) -> None:
        self.link = link or Link()
        self.topology = get_topology(None, group_size)
        self._make_batches, self._steps = batches, Counter[str]()
        self.limit(None)

    def limit(self, mbit: float | None) -> None:
        """Limit the links. Collective."""
        dist.barrier()  # nobody sends at the rate of before
        self.link.limit(mbit)
        dist.barrier()

    def steps_of(self, method: Method) -> int:
        """Return how many steps a method has taken, repeated ones included."""
        return self._steps[method.name]

    def _batches(self, method: Method) -> list[Batch]:
        self._steps[method.name] += 1
        return self._make_batches(self._steps[method.name])

    def warm_up(self, method: Method, watch: bool = True) -> list[float]:
        """Open connections, record modules, and create moments; return the most bytes of states on a rank."""
        for number in range(WARM_UP_STEPS):
            method.step(self._batches(method), watch=watch and number > 0)
            method.finish()
        give_back_memory()
        return over_ranks([float(n) for n in asdict(method.held()).values()], dist.ReduceOp.MAX)

    def take(self, method: Method, count: int) -> None:
        for _ in range(count):
            method.step(self._batches(method))
        method.finish()

    def a_step(self, method: Method) -> Turn:
        def run() -> list[float]:
            batches = self._batches(method)
            dist.barrier()
            begin = time.perf_counter()
            method.step(batches)
            method.finish()
            get_accelerator().synchronize()
            dist.barrier()
            return over_ranks([time.perf_counter() - begin], dist.ReduceOp.MAX)

        return self._undisturbed(run, 1)

    def steps_in_a_row(self, method: Method, count: int, before: int = 1) -> Turn:
        """Time this many steps after others, because each step waits for the previous one's work in flight. A step
        lasts from the end of the previous one to its own, each on the last rank: a machine has one clock."""

        def run() -> list[float]:
            ends = []
            for batches in [self._batches(method) for _ in range(count + before)]:
                method.step(batches)
                ends.append(time.perf_counter())
            method.finish()
            ends = over_ranks(ends[before - 1 :], dist.ReduceOp.MAX)
            return [end - begin for begin, end in itertools.pairwise(ends)]

        return self._undisturbed(run, count + before)

    def _undisturbed(self, run: Callable[[], list[float]], steps: int) -> Turn:
        """Take a turn from which this machine's host took little CPU time: the best of several, unless it is long."""
        tried: list[Turn] = []
        while len(tried) < TRIES:
            tried.append(self._turn(run, steps))
            if tried[-1].stolen <= STOLEN or sum(tried[-1].seconds) > LONG:
                break
        return min(tried)

    def _turn(self, run: Callable[[], list[float]], steps: int) -> Turn:
        stolen, total = cpu_times()
        seconds, sent = self.counted(run)
        later, total_later = cpu_times()
        (share,) = over_ranks([(later - stolen) / max(1, total_later - total)], dist.ReduceOp.MAX)
        return Turn(share, seconds, sent / self.topology.sizes.groups / steps)

    def counted(self, run: Callable[[], Any]) -> tuple[Any, float]:
        """Run a function on all ranks; return its result, and the bytes that all nodes have sent. Collective."""
        dist.barrier()
        before = self.link.sent()
        dist.barrier()
        result = run()
        dist.barrier()
        return result, over_ranks([self.link.sent() - before], dist.ReduceOp.SUM)[0]

    def headers(self) -> float:
        """Return the bytes that the interfaces count for each byte of a known transfer."""
        groups, shard = self.topology.sizes.groups, torch.zeros(CALIBRATION)
        gathered, group = shard.new_empty(shard.numel() * groups), self.topology.inter
        _, sent = self.counted(lambda: dist.all_gather_into_tensor(gathered, shard, group=group))
        return sent / (4 * CALIBRATION * (groups - 1) * dist.get_world_size())


def differences(methods: Mapping[str, Method]) -> dict[str, float]:
    """Return the difference of each method's weights to the first one's, relative to the largest. Collective."""
    first = next(iter(methods.values())).weights()
    by_method = {}
    for name, method in methods.items():
        apart = ((method.weights() - first).abs().max() / first.abs().max()).nan_to_num(float("inf"))
        (by_method[name],) = over_ranks([apart.item()], dist.ReduceOp.MAX)
    return by_method


def cpu_times() -> tuple[int, int]:
    """Return CPU ticks of this machine since its start: stolen by its host, and in all. See proc(5)."""
    _, *ticks = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    return int(ticks[7]), sum(map(int, ticks[:8]))


def give_back_memory() -> None:
    """Make the C library return free memory, so that one method's memory is not kept during the others."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
    if trim is not None:
        trim(0)


def over_ranks(values: list[float], op: Any) -> list[float]:
    """Return values of all ranks, combined. Collective."""
    reduced = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(reduced, op=op)
    return reduced.tolist()
