# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Experiments of tests.campaigns.gpu: several ranks that share the GPU through gloo, and one rank of NCCL's."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from deepspeed import comm as dist

from deepspeed_ext.comm import collectives
from deepspeed_ext.comm.backends import make_reduce
from deepspeed_ext.comm.hops import GatherHop, Transfer
from deepspeed_ext.config.settings import LocoSettings
from deepspeed_ext.loco.hop import LocoHop
from tests.campaigns.gpu import states as states_of
from tests.campaigns.gpu.one_by_one import Case, batches_on, run_cases
from tests.campaigns.gpu.order import JOB, enter_alone
from tests.harness.training import BF16, PARTITIONED, REPLICATED, SMALL, Difference, Job, difference, placed, train

GROUP = 2
FP32 = {"weights": 1e-5, "losses": 1e-6, "norms": 1e-5}


def gloo_ranks(setup: Any) -> None:
    """T6: train all strategies, and compare with stock DeepSpeed, with ranks that have the GPU in common."""
    cases = []
    every: tuple[tuple[int, Sequence[str]], ...] = ((2, REPLICATED), (3, PARTITIONED))
    for title, job, more, bounds in _sections(setup.small):
        for stage, names in every:
            subset = names[-1:] if setup.small else names
            run = partial(_compare, job=job, more=more, names=subset, stage=stage, bounds=bounds)
            cases.append(Case(f"stage {stage}, {title}", run))
    on_nccl: tuple[tuple[int, Sequence[str]], ...] = ((2, ("NIG", "NGG")), (3, ("IIG", "IGG", "GGG")))
    for stage, names in on_nccl:
        subset = names[-1:] if setup.small else names
        cases.append(Case(f"stage {stage}, hops as on NCCL", partial(_as_on_nccl, names=subset, stage=stage)))
    run_cases(setup, cases)


def _as_on_nccl(setup: Any, names: Sequence[str], stage: int) -> None:
    with as_on_nccl():
        _compare(setup, _job(), {}, names, stage, FP32)


def states(setup: Any) -> None:
    """T10: optimizers on the host, four bits, few bits, Muon, overflow, checkpoints, states that are offloaded."""
    run_cases(setup, [Case("states", states_of.check, 220)])


def _job(**changed: Any) -> Job:
    return Job(**{"accumulation": 2, "steps": 3, "empty": False, "zero": dict(SMALL), **changed})


def _sections(small: bool) -> list[tuple[str, Job, dict[str, Any], dict[str, float]]]:
    sections = [("fp32", _job(), {}, FP32), ("fp32, overlap_comm", _job(), {"overlap_comm": True}, FP32)]
    return sections[:1] if small else [*sections, ("bf16", _job(dtype="bf16", steps=2), {}, BF16)]


def _compare(
    setup: Any, job: Job, more: dict[str, Any], names: Sequence[str], stage: int, bounds: dict[str, float]
) -> None:
    stock = train(job, {"stage": stage})
    worst: dict[str, float] = {}
    for name in names:
        row = difference(name, train(job, placed(name, GROUP, **more)), stock, "")
        setup.report.check(name, within(row, bounds))
        worst[name] = row.weights
    setup.report.figure("largest difference of weights", worst)


def within(row: Difference, bounds: dict[str, float]) -> bool:
    """Return whether a run is that of stock DeepSpeed within bounds of weights, losses and norms."""
    near = all(getattr(row, name) <= bound for name, bound in bounds.items())
    return near and row.replicas_equal and row.same_decisions and math.isfinite(row.weights)


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
    init = collectives.Collectives.__init__

    def unshortened(made: collectives.Collectives, *args: Any, **kwargs: Any) -> None:
        init(made, *args, **kwargs)
        if int(made.size) == 1:
            made.size = Unshortened(1)

    with mock.patch.object(collectives.Collectives, "__init__", unshortened):
        yield


def nccl_alone(setup: Any) -> None:
    """T7: use NCCL's interface at one rank: each collective that hops are made of, and all strategies."""
    enter_alone(setup)
    with without_short_cuts(), as_on_nccl():
        _hops_alone(setup)
    names = ["NGG", "IGG"] if setup.small else [*REPLICATED, *PARTITIONED]
    job = dataclasses.replace(JOB, steps=2)
    keys: tuple[dict[str, Any], ...] = ({}, {"zeropp_loco_param": {}})
    for name in names:
        for more in keys:
            if more and name not in ("NIG", "IGG"):
                continue
            with batches_on(setup), without_short_cuts(), as_on_nccl():
                results = train(job, placed(name, 1, **more)).weights
            title = f"{name} in four bits" if more else name
            if more:  # rounded
                setup.report.check(f"{title}: finite weights", bool(torch.isfinite(results).all()))
                continue
            with batches_on(setup):
                expected = train(job, placed(name, 1)).weights
            setup.report.check(f"{title}: the weights of the short cuts", torch.equal(results, expected))


def _hops_alone(setup: Any) -> None:
    group = dist.new_group([0])
    other_ranks = [dist.new_group([0]) for _ in range(3)]
    numbers = torch.arange(1000, dtype=torch.float32, device=setup.device)
    gather, reduce = GatherHop(group, "alone"), make_reduce(group, "alone")
    full = make_reduce(group, "alone", False)
    cases = {
        "all-gather": lambda: gather.all_gather(numbers.clone()),
        "reduce-scatter": lambda: reduce.reduce_scatter(numbers.clone(), [1000]),
        "all-reduce": lambda: reduce.all_reduce(numbers.clone()),
        "all-reduce that keeps a part": lambda: full.reduce_scatter(numbers.clone(), [1000]),
    }
    for title, start in cases.items():
        before = _peak(setup)
        for waits in (1, 3):
            done = _finished(setup, title, start(), waits)
            setup.report.check(f"{title}, waits {waits}", torch.equal(done, numbers))
        setup.report.figure(f"{title}: peak bytes", _peak(setup) - before)
    title, out = "all-gather in place", numbers.clone()
    setup.report.check(title, torch.equal(_finished(setup, title, gather.all_gather(out, out=out), 2), numbers))
    _collectives_alone(setup, reduce.collectives, numbers)
    title, coarse = "a reduction in four bits", LocoHop(group, "alone", LocoSettings())
    results = _finished(setup, title, coarse.reduce_scatter(numbers.clone(), [1000]))
    setup.report.check(title, bool((results - numbers).abs().max() < 100))
    for other in other_ranks:
        next(make_reduce(other, "dropped").all_reduce(torch.ones(10, device=setup.device)))  # and nobody waits
    if setup.cuda:
        torch.cuda.synchronize()
    setup.report.check("handles that nobody waits for", True)


def _finished(setup: Any, title: str, transfer: Transfer, waits: int = 1) -> torch.Tensor:
    """Finish a transfer, which must communicate, and wait so often for each handle."""
    started = 0
    while True:
        try:
            handle = next(transfer)
        except StopIteration as done:
            setup.report.check(f"{title}: communicates", started > 0)
            return done.value
        started += 1
        for _ in range(waits):
            handle.wait()


def _collectives_alone(setup: Any, alone: collectives.Collectives, numbers: torch.Tensor) -> None:
    parts = list(numbers.clone().split([300, 0, 700]))
    root = dist.get_global_rank(alone.group, 0)
    handle = collectives.Handles([alone.start("reduce", dist.reduce, part, root) for part in parts if part.numel()])
    handle.wait()
    handle.wait()
    setup.report.check("several reduces as one handle", torch.equal(torch.cat(parts), numbers))
    sent = torch.arange(100, device=setup.device).to(torch.uint8)
    received, nothing = torch.zeros_like(sent), sent[:0]
    alone.all_to_all(received, sent, [100], "exchange").wait()
    alone.all_to_all(nothing.clone(), nothing, [0], "exchange").wait()
    setup.report.check("all-to-all of bytes, with empty parts", torch.equal(received, sent))


def _peak(setup: Any) -> int:
    return int(torch.cuda.max_memory_allocated()) if setup.cuda else 0
