# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs the cases of an experiment one after the other on the same ranks; one that raises or hangs ends no other. Ranks
of one world cannot continue after an error on one of them: their next messages would not match. So the ranks of a case
that has failed are killed, and new ones begin with the next case."""

import contextlib
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch

import deepspeed_ext  # noqa: F401  it activates itself where it is installed; here may be its sources alone
from tests.campaigns.gpu.order import enter_alone
from tests.campaigns.gpu.runs import Setup
from tests.harness import training

RANKS = 4
_TIMEOUT = timedelta(seconds=120)
_START = 60.0  # seconds that new ranks may take, beside their first case
_END = 15.0  # seconds that ranks may take to end
_TEXT = 3000  # characters of an error that are kept
_OVER = "over"


@dataclass(frozen=True)
class Case:
    """Some checks that belong together."""

    name: str  # name of it; before the names of its checks
    run: Callable[[Any], None]  # makes them, on each rank, given its setup; can be pickled
    limit: float = 90.0  # seconds


def run_cases(setup: Any, cases: Sequence[Case], alone: bool = False) -> None:
    """Run cases on ranks that share the GPU, or alone on one rank of NCCL's. A check holds if it does on all ranks
    that make it. Figures are those of rank 0."""
    remaining = list(cases)
    while remaining:
        remaining = remaining[_run_while_good(setup, remaining, 1 if alone else RANKS) :]


def _run_while_good(setup: Any, cases: Sequence[Case], ranks: int) -> int:
    """Run cases until one fails, on new ranks, which are killed in the end; return how many are over."""
    context = multiprocessing.get_context("spawn")
    processes, pipes = list[Any](), list[Connection]()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            provided = rank, ranks, replace(setup, report=None), folder, list(cases), theirs
            process = context.Process(target=_rank, args=provided, daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            theirs.close()  # so that its end is seen
            processes.append(process)
            pipes.append(ours)
        for number, case in enumerate(cases):
            begin, limit = time.monotonic(), case.limit + (0.0 if number else _START)
            why = collect_results(setup.report, case, pipes, limit)
            setup.report.figure(f"{case.name}: seconds", round(time.monotonic() - begin, 1))
            setup.report.check(f"{case.name}: ran to its end", not why)
            if why:
                setup.report.figure(f"{case.name}: why", why[-_TEXT:])
                return number + 1
        for process in processes:
            process.join(timeout=_END)
        ended = all(process.exitcode == 0 for process in processes)
        setup.report.check(f"ranks that ran {cases[-1].name} ended well", ended)
    return len(cases)


def collect_results(report: Any, case: Case, pipes: Sequence[Connection], limit: float) -> str:
    """Record the results of ranks, until the case is over on all of them; return why it has failed, if so."""
    until, retained, running = time.monotonic() + limit, dict[str, bool](), dict(enumerate(pipes))
    while running:
        ready = wait(list(running.values()), timeout=max(0.0, until - time.monotonic()))
        if not ready:
            return f"ranks {sorted(running)} did not end within {limit:.0f} s"
        for rank in [rank for rank, pipe in running.items() if pipe in ready]:
            try:
                kind, name, value = running[rank].recv()
            except EOFError:
                return f"the process of rank {rank} has ended"
            if kind == "check":
                retained[name] = retained.get(name, True) and value
                report.check(f"{case.name}: {name}", retained[name])
            elif kind == "figure" and rank == 0:
                report.figure(f"{case.name}: {name}", value)
            elif kind == _OVER:
                if value:
                    return f"rank {rank}: {value}"
                del running[rank]
    return "" if retained else "it checked nothing"


class _RankReport:
    """The report of a rank, which is sent to the process of the experiment."""

    def __init__(self, pipe: Connection) -> None:
        self.check = lambda name, held: pipe.send(("check", name, bool(held)))
        self.figure = lambda name, value: pipe.send(("figure", name, value))
        self.over = lambda why: pipe.send((_OVER, "", why))  # of a case: why it has failed; empty if it has not


def _rank(rank: int, ranks: int, setup: Setup, folder: str, cases: Sequence[Case], pipe: Connection) -> None:
    report = _RankReport(pipe)
    setup = replace(setup, report=report)
    run = partial(_run, cases=cases)
    try:
        if ranks == 1:
            enter_alone(setup)
            run(setup)
        else:
            if setup.enter is not None:
                setup.enter(rank)
            _share_gpu(rank, setup, folder, run)
    except BaseException as error:
        lines = traceback.format_exception(error)
        report.over(f"{type(error).__name__}: {error}\n{''.join(lines)}"[-_TEXT:])
        time.sleep(3600)  # until it is killed: if it ended, others would raise because of that


def _run(setup: Any, cases: Sequence[Case]) -> None:
    for case in cases:
        case.run(setup)
        setup.report.over("")


def _share_gpu(rank: int, setup: Any, folder: str, run: Callable[[Any], None]) -> None:
    """Run checks as one of the ranks that have the GPU in common, and meet in a folder. Collectives go through the
    host on streams of their own, so waits work as with NCCL, which refuses two ranks on one GPU."""
    sizes = {"WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "LOCAL_SIZE": RANKS, "RANK": rank, "LOCAL_RANK": 0}
    os.environ.update({name: str(value) for name, value in sizes.items()})
    torch.set_num_threads(1)
    if setup.cuda:
        torch.cuda.set_device(0)
    common: dict[str, Any] = {"init_method": f"file://{Path(folder) / 'meeting'}", "timeout": _TIMEOUT}
    torch.distributed.init_process_group("cpu:gloo,cuda:gloo", rank=rank, world_size=RANKS, **common)
    deepspeed.init_distributed()
    with batches_on(setup):
        run(setup)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@contextlib.contextmanager
def batches_on(setup: Any) -> Iterator[None]:
    """Within this context, ``training`` puts its batches on the device."""
    created = training.batches

    def moved(job: training.Job) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for x, y in created(job):
            yield x.to(setup.device), y.to(setup.device)

    with mock.patch.object(training, "batches", moved):
        yield
