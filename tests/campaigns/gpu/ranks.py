# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Experiments of tests.campaigns.gpu: several ranks that share the GPU through gloo, and one rank of NCCL's."""

import contextlib
import dataclasses
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
from deepspeed import comm as dist

from deepspeed_ext.comm import collectives
from deepspeed_ext.comm.backends import make_reduce
from deepspeed_ext.comm.collectives import Collectives
from deepspeed_ext.comm.hops import GatherHop, Transfer
from deepspeed_ext.comm.pairwise import Handles
from deepspeed_ext.loco.hop import LocoHop
from deepspeed_ext.loco.settings import LocoSettings
from tests.campaigns.gpu import states as states_of
from tests.campaigns.gpu.order import JOB, enter_alone
from tests.harness import training
from tests.harness.training import BF16, PARTITIONED, REPLICATED, SMALL, Difference, Job, placed

RANKS, GROUP = 4, 2
FP32 = {"weights": 1e-5, "losses": 1e-6, "norms": 1e-5}
_TIMEOUT = timedelta(seconds=120)


def gloo_ranks(place: Any) -> None:
    """T6: train all strategies beside stock DeepSpeed, with ranks that have the GPU in common."""
    on_ranks(place, beside_stock)


def states(place: Any) -> None:
    """T10: optimizers on the host, four bits, few bits, Muon, overflow, checkpoints, states that are offloaded."""
    on_ranks(place, states_of.check)


def on_ranks(place: Any, run: Callable[[Any], None]) -> None:
    """Run checks on ranks that have the GPU in common.

    Collectives go through the host on streams of their own, so waits mean what they mean with NCCL, which refuses two
    ranks on one GPU. This process is rank 0.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        others = [
            context.Process(target=_other_rank, args=(rank, place.device, place.small, folder, run), daemon=True)
            for rank in range(1, RANKS)
        ]
        for process in others:
            process.start()
        try:
            be_rank(0, place, folder, run)
        finally:
            for process in others:
                process.join(timeout=20)
                process.kill()
    place.report.check("the other ranks ended well", all(process.exitcode == 0 for process in others))


class _Silent:
    """The report of several ranks; only rank 0's findings count."""

    def check(self, name: str, held: bool) -> None:
        """Forget it."""

    def figure(self, name: str, value: Any) -> None:
        """Forget it."""


@dataclasses.dataclass
class RankPlace:
    """A ``Place`` of a rank that another process has started."""

    device: str
    small: bool
    report: Any = dataclasses.field(default_factory=_Silent)

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"


def _other_rank(rank: int, device: str, small: bool, folder: str, run: Callable[[Any], None]) -> None:
    be_rank(rank, RankPlace(device, small), folder, run)


def be_rank(rank: int, place: Any, folder: str, run: Callable[[Any], None]) -> None:
    """Run checks as one of the ranks that have the GPU in common, and meet in a folder."""
    sizes = {"WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "LOCAL_SIZE": RANKS, "RANK": rank, "LOCAL_RANK": 0}
    os.environ.update({name: str(value) for name, value in sizes.items()})
    torch.set_num_threads(1)
    if place.cuda:
        torch.cuda.set_device(0)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:gloo",
        init_method=f"file://{Path(folder) / 'meeting'}",
        rank=rank,
        world_size=RANKS,
        timeout=_TIMEOUT,
    )
    deepspeed.init_distributed()
    with batches_on(place):
        run(place)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def beside_stock(place: Any) -> None:
    """Check all strategies beside stock DeepSpeed, on each rank."""
    for title, job, more, bounds in _sections(place.small):
        every: tuple[tuple[int, Sequence[str]], ...] = ((2, REPLICATED), (3, PARTITIONED))
        for stage, names in every:
            some = names[-1:] if place.small else names
            _compare(place, f"stage {stage}, {title}", job, more, some, stage, bounds)
    with as_on_nccl():
        on_nccl: tuple[tuple[int, Sequence[str]], ...] = ((2, ("NIG", "NGG")), (3, ("IIG", "IGG", "GGG")))
        for stage, names in on_nccl:
            some = names[-1:] if place.small else names
            _compare(place, f"stage {stage}, hops as on NCCL", _job(), {}, some, stage, FP32)


def _job(**changed: Any) -> Job:
    return Job(**{"accumulation": 2, "steps": 3, "empty": False, "zero": dict(SMALL), **changed})


def _sections(small: bool) -> list[tuple[str, Job, dict[str, Any], dict[str, float]]]:
    sections = [("fp32", _job(), {}, FP32), ("fp32, overlap_comm", _job(), {"overlap_comm": True}, FP32)]
    return sections[:1] if small else [*sections, ("bf16", _job(dtype="bf16", steps=2), {}, BF16)]


def _compare(
    place: Any, title: str, job: Job, more: dict[str, Any], names: Sequence[str], stage: int, bounds: dict[str, float]
) -> None:
    begin = time.perf_counter()
    stock = training.train(job, {"stage": stage})
    worst: dict[str, float] = {}
    for name in names:
        row = training.difference(name, training.train(job, placed(name, GROUP, **more)), stock, "")
        place.report.check(f"{name} beside {title}", within(row, bounds))
        worst[name] = row.weights
    place.report.figure(f"{title}: largest difference of weights", worst)
    place.report.figure(f"{title}: seconds", round(time.perf_counter() - begin, 1))


def within(row: Difference, bounds: dict[str, float]) -> bool:
    """Return whether a run is that of stock DeepSpeed within bounds of weights, losses and norms."""
    near = all(getattr(row, name) <= bound for name, bound in bounds.items())
    return near and row.replicas_equal and row.same_decisions and math.isfinite(row.weights)


@contextlib.contextmanager
def batches_on(place: Any) -> Iterator[None]:
    """Within this context, ``training`` puts its batches on the device."""
    made = training.batches

    def moved(job: Job) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for x, y in made(job):
            yield x.to(place.device), y.to(place.device)

    with mock.patch.object(training, "batches", moved):
        yield


def as_on_nccl() -> Any:
    """Return a context in which hops are as on NCCL; gloo has the collectives that they need."""
    return mock.patch.object(collectives, "backend_of", lambda group: "nccl")


class Unshortened(int):
    """A one that is not known to be one: hops take no short cut for a group of one rank."""

    def __eq__(self, other: object) -> bool:
        return False

    def __gt__(self, other: int) -> bool:
        return other <= 1

    __hash__ = int.__hash__


@contextlib.contextmanager
def without_short_cuts() -> Iterator[None]:
    """Within this context, hops over one rank communicate."""
    init = Collectives.__init__

    def unshortened(made: Collectives, *args: Any, **kwargs: Any) -> None:
        init(made, *args, **kwargs)
        if int(made.size) == 1:
            made.size = Unshortened(1)

    with mock.patch.object(Collectives, "__init__", unshortened):
        yield


def nccl_alone(place: Any) -> None:
    """T7: use NCCL's interface at one rank: each collective that hops are made of, and all strategies."""
    enter_alone(place)
    with without_short_cuts(), as_on_nccl():
        _hops_alone(place)
    names = ["NGG", "IGG"] if place.small else [*REPLICATED, *PARTITIONED]
    job = dataclasses.replace(JOB, steps=2)
    keys: tuple[dict[str, Any], ...] = ({}, {"zeropp_loco_param": {}})
    for name in names:
        for more in keys:
            if more and name not in ("NIG", "IGG"):
                continue
            with batches_on(place), without_short_cuts(), as_on_nccl():
                found = training.train(job, placed(name, 1, **more)).weights
            title = f"{name} in four bits" if more else name
            if more:  # rounded
                place.report.check(f"{title}: finite weights", bool(torch.isfinite(found).all()))
                continue
            with batches_on(place):
                expected = training.train(job, placed(name, 1)).weights
            place.report.check(f"{title}: the weights of the short cuts", torch.equal(found, expected))


def _hops_alone(place: Any) -> None:
    group = dist.new_group([0])
    others = [dist.new_group([0]) for _ in range(3)]
    numbers = torch.arange(1000, dtype=torch.float32, device=place.device)
    gather, reduce = GatherHop(group, "alone"), make_reduce(group, "alone")
    whole = make_reduce(group, "alone", False)
    cases = {
        "all-gather": lambda: gather.all_gather(numbers.clone()),
        "reduce-scatter": lambda: reduce.reduce_scatter(numbers.clone(), [1000]),
        "all-reduce": lambda: reduce.all_reduce(numbers.clone()),
        "all-reduce that keeps a part": lambda: whole.reduce_scatter(numbers.clone(), [1000]),
    }
    for title, start in cases.items():
        before = _peak(place)
        for waits in (1, 3):
            place.report.check(
                f"{title}, waits {waits}", torch.equal(_finished(place, title, start(), waits), numbers)
            )
        place.report.figure(f"{title}: peak bytes", _peak(place) - before)
    title, out = "all-gather in place", numbers.clone()
    place.report.check(title, torch.equal(_finished(place, title, gather.all_gather(out, out=out), 2), numbers))
    _collectives_alone(place, reduce.collectives, numbers)
    title, coarse = "a reduction in four bits", LocoHop(group, "alone", LocoSettings())
    found = _finished(place, title, coarse.reduce_scatter(numbers.clone(), [1000]))
    place.report.check(title, bool((found - numbers).abs().max() < 100))
    for other in others:
        next(make_reduce(other, "dropped").all_reduce(torch.ones(10, device=place.device)))  # and nobody waits
    if place.cuda:
        torch.cuda.synchronize()
    place.report.check("handles that nobody waits for", True)


def _finished(place: Any, title: str, transfer: Transfer, waits: int = 1) -> torch.Tensor:
    """Finish a transfer, which must communicate, and wait so often for each handle."""
    started = 0
    while True:
        try:
            handle = next(transfer)
        except StopIteration as done:
            place.report.check(f"{title}: communicates", started > 0)
            return done.value
        started += 1
        for _ in range(waits):
            handle.wait()


def _collectives_alone(place: Any, alone: Collectives, numbers: torch.Tensor) -> None:
    parts = list(numbers.clone().split([300, 0, 700]))
    root = dist.get_global_rank(alone.group, 0)
    handle = Handles([alone.start("reduce", dist.reduce, part, root) for part in parts if part.numel()])
    handle.wait()
    handle.wait()
    place.report.check("several reduces as one handle", torch.equal(torch.cat(parts), numbers))
    sent = torch.arange(100, device=place.device).to(torch.uint8)
    received, nothing = torch.zeros_like(sent), sent[:0]
    alone.all_to_all(received, sent, [100], "exchange").wait()
    alone.all_to_all(nothing.clone(), nothing, [0], "exchange").wait()
    place.report.check("all-to-all of bytes, with empty parts", torch.equal(received, sent))


def _peak(place: Any) -> int:
    return int(torch.cuda.max_memory_allocated()) if place.cuda else 0
