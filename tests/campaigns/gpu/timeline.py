# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Experiments of tests.campaigns.gpu: the overlap of operations, and the waits of the host for the device."""

import contextlib
import dataclasses
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from scripts import ROOT
from tests.campaigns.gpu import waits
from tests.campaigns.gpu.order import JOB, pause
from tests.harness.fake_wire import Late, Wire, enter_virtual_world
from tests.harness.training import DTYPES, PARTITIONED, REPLICATED, Job, make_engine, placed

RANKS, GROUP = 6, 3
HOP, LAYER = 50.0, 20.0  # milliseconds on the wire, and of each layer, forward and backward: a slow link
SHORT_HOP, LONG_LAYER = 4.0, 120.0  # a layer's hops, one after the other, take no longer than it
GATHERS = ("all_gather_single", "_allgather_base")
REDUCES = {"reduce", "reduce_scatter_single", "_reduce_scatter_base", "allreduce"}
REDUCES |= {"all_to_all_single", "alltoall_base"}
_FIRST, _LAST = 5, 10  # micro-steps in which synchronizations are counted, from 1


class MarkedTraining:
    """Training over a late wire, step by step: ``forward`` and ``backward`` are marks at which each layer began and
    had used its time, in the last micro-step."""

    def __init__(self, setup: Any, job: Job, zero: dict[str, Any], delay: float, layer: float) -> None:
        self.setup, self.layer = setup, layer
        self.wire = Wire(setup.device, delay=(delay, delay), keep=True)
        self.engine, model = make_engine(job, zero)
        self._job = job
        self._generator = torch.Generator().manual_seed(1)
        self.forward: list[tuple[Any, Any]] = []
        self.backward: list[tuple[Any, Any]] = []
        for module in model.layers:
            module.register_forward_pre_hook(lambda *_: self._reach(self.forward))
            module.register_forward_hook(self._watch_backward)

    def _watch_backward(self, layer: Any, inputs: Any, output: Any) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: self._reach(self.backward))

    def _reach(self, marks: list[tuple[Any, Any]]) -> None:
        begin = self.mark()
        if self.wire.keep:
            pause(self.setup, self.layer)
        marks.append((begin, self.mark()))

    def mark(self) -> Any:
        if not self.setup.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def micro_step(self, job: Job) -> None:
        self.forward.clear()
        self.backward.clear()
        batch = [torch.randn(2, width, generator=self._generator) for width in (job.sizes[0], job.sizes[-1])]
        x, y = (part.to(self.engine.device, DTYPES[job.dtype]) for part in batch)
        self.engine.backward(((self.engine(x) - y) ** 2).float().mean())
        self.engine.step()

    def before(self, one: Any, other: Any) -> bool:
        """Whether a mark is before another one, or at the same time; the device has been synchronized."""
        return one.elapsed_time(other) >= 0 if self.setup.cuda else one <= other

    def under_way(self, layer: tuple[Any, Any], late: Late) -> bool:
        """Whether a collective was under way while a layer ran; the device has been synchronized."""
        return self.before(late.began, layer[1]) and (late.ended is None or self.before(layer[0], late.ended))


@contextlib.contextmanager
def running(
    setup: Any, zero: dict[str, Any], delay: float = HOP, layer: float = LAYER, **changed: Any
) -> Iterator[MarkedTraining]:
    """Train a job of ``JOB``, changed so; destroyed afterwards."""
    run = None
    with Wire(setup.device).connected():
        run = MarkedTraining(setup, dataclasses.replace(JOB, **changed), zero, delay, layer)
    try:
        with run.wire.connected():
            yield run
    finally:
        if setup.cuda:
            torch.cuda.synchronize()
        with run.wire.connected():
            run.engine.destroy()


def timeline(setup: Any) -> None:
    """T4: check the overlap; without it, training is slow rather than wrong."""
    enter_virtual_world(RANKS)
    setup.report.figure("ms of a hop", HOP)
    for groups in (1, 2):
        updates_under_forward(setup, groups)
    for name in ("GGG", "IGG"):
        results = under_backward(setup, placed(name, GROUP), accumulation=1)
        setup.report.check(f"(c) {name}: reductions under the backward", results["any"])
    results = under_backward(setup, placed("IIG", GROUP), 2, SHORT_HOP, LONG_LAYER)
    # The CPU has no streams: there, the host waits for one hop before the next, and by default overlap_comm is off.
    settled = setup.report.check if setup.cuda else setup.report.figure
    settled("(d) IIG: between groups, under the last backward", results["between groups"])
    by_default: list[dict[str, Any]] = [{}] if setup.cuda else []
    for more in (*by_default, {"overlap_comm": True}):
        results = under_backward(setup, placed("NIG", GROUP, **more), accumulation=1)
        setup.report.check(f"(e) NIG {more or 'default'}: reductions under the backward", results["any"])


def updates_under_forward(setup: Any, groups: int) -> None:
    """Check (a) and (b): the gather between groups after a step, and the next forward."""
    with running(setup, placed("IIG", GROUP), groups=groups, accumulation=1, config={}) as run:
        for _ in range(4):
            run.micro_step(JOB)
        gathers = [late for late in run.wire.sent if late.name in GATHERS and late.ranks == RANKS // GROUP]
        pending = [late for late in gathers if not late.is_completed()]
        setup.report.check(f"(a) {groups} parameter groups: step returns before its gathers end", bool(pending))
        run.micro_step(JOB)
        if setup.cuda:
            torch.cuda.synchronize()
        ended = gathers[-1].ended if gathers else None
        results = ended is not None and run.before(run.forward[0][0], ended)
        setup.report.check(f"(b) {groups} parameter groups: the first layer runs before the last gather ends", results)


def under_backward(
    setup: Any, zero: dict[str, Any], accumulation: int, delay: float = HOP, layer: float = LAYER
) -> dict[str, bool]:
    """Return which reductions are under way while layers run their backward, in the last micro-step of a step."""
    with running(setup, zero, delay, layer, accumulation=accumulation) as run:
        for _ in range(3 * accumulation):
            run.wire.sent.clear()
            run.micro_step(JOB)
        if setup.cuda:
            torch.cuda.synchronize()
        sent = [late for late in run.wire.sent if late.name in REDUCES]
        under = [late for late in sent if any(run.under_way(span, late) for span in run.backward)]
    return {"any": bool(under), "between groups": any(late.ranks == RANKS // GROUP for late in under)}


def synchronizations(setup: Any) -> None:
    """T5: see that the host waits for the device in six micro-steps no more often than is recorded, and note where."""
    enter_virtual_world(RANKS)
    names = ["NIG", "IIG"] if setup.small else [*REPLICATED, *PARTITIONED]
    for stage in () if setup.small else (2, 3):
        setup.report.figure(f"stock ZeRO-{stage}", _synchronizations_of(setup, {"stage": stage}, {}))
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [(name, placed(name, GROUP), {}) for name in names]
    four_bits = placed("IIG", GROUP, zeropp_loco_param={})
    cases.append(("IIG in four bits", four_bits, {}))
    cases.append(("IIG without the timer", placed("IIG", GROUP), {"config": JOB.config}))
    with tempfile.TemporaryDirectory() as folder:
        monitor = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "checks"}}
        cases.append(("IIG in four bits, monitored", four_bits, {"config": monitor}))
        if not setup.small:
            cases += [(f"{name} in fp16", placed(name, GROUP), {"dtype": "fp16"}) for name in ("NIG", "IIG")]
        for title, zero, changed in cases:
            waits.check(setup, title, _synchronizations_of(setup, zero, changed))


def _synchronizations_of(setup: Any, zero: dict[str, Any], changed: dict[str, Any]) -> dict[str, int]:
    job = dataclasses.replace(JOB, **{"config": {}, **changed})
    with counter_of(setup) as counting, running(setup, zero, 0.0, **{"config": {}, **changed}) as run:
        run.wire.keep = False
        for _ in range(1, _FIRST):
            run.micro_step(job)
        with counting() as counts:
            for _ in range(_FIRST, _LAST + 1):
                run.micro_step(job)
        return dict(sorted(counts.items()))


@contextlib.contextmanager
def counter_of(setup: Any) -> Iterator[Any]:
    """Yield a counter of synchronizations of the host, by call site; without a GPU of a simulated device."""
    if setup.cuda:
        yield _counted_on_gpu
        return
    from tests.harness.stream_order import asking, device_with_streams

    with device_with_streams() as order:

        @contextlib.contextmanager
        def counted() -> Iterator[Counter[str]]:
            counts: Counter[str] = Counter()
            with order.watch(), asking(order):
                before = Counter(order.synchronizations)
                yield counts
                counts.update({str(item): count for item, count in (order.synchronizations - before).items()})

        yield counted


@contextlib.contextmanager
def _counted_on_gpu() -> Iterator[Counter[str]]:
    counts: Counter[str] = Counter()

    def shown(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        if "synchroniz" in str(message):
            counts[_where()] += 1

    def watched(method: Any, kind: str) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[kind + _where()] += 1
            return method(*args, **kwargs)

        return counted

    with contextlib.ExitStack() as context:
        # What the mode does not see: waits for the device, and for events.
        for owner, kind in ((torch.cuda, ""), (torch.cuda.Event, waits.EVENT)):
            method = watched(owner.synchronize, kind)
            context.enter_context(mock.patch.object(owner, "synchronize", method))
        context.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        warnings.showwarning = shown
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield counts
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _where() -> str:
    """Return the innermost line of ours or of DeepSpeed's."""
    frame: Any = sys._getframe(2)
    tests = str(ROOT / "tests")  # the repository may lie in a folder of the package's name
    while frame is not None:
        path = frame.f_code.co_filename
        registered = "/deepspeed_ext/" in path or ("/deepspeed/" in path and "/accelerator/" not in path)
        if registered and not path.startswith(tests):
            return f"{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back
    return waits.ELSEWHERE
