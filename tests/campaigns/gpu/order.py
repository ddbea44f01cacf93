# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Experiments of tests.campaigns.gpu: nothing is read before it is complete."""

import contextlib
import dataclasses
import functools
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import deepspeed
import torch

from tests.harness import calls, fake_wire
from tests.harness.fake_wire import CYCLES, WITHOUT_TIMER, Trained, Wire, enter_virtual_world, train_over
from tests.harness.training import PARTITIONED, REPLICATED, SMALL, Job, make_engine, placed, whole_weights

SLOW = 300  # milliseconds of a step
JOB = dataclasses.replace(fake_wire.JOB, steps=3, config=WITHOUT_TIMER)
# A shared-memory all-reduce of the CPU's: minutes to build, and it stays in /dev/shm. Without it DeepSpeed uses gloo.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def pause(setup: Any, milliseconds: float) -> None:
    if setup.cuda:
        torch.cuda._sleep(int(milliseconds * CYCLES))


def enter_alone(setup: Any) -> None:
    """Be the only rank of a world: NCCL's on a GPU."""
    if setup.cuda:
        torch.cuda.set_device(0)
    meeting = f"file://{tempfile.mkdtemp()}/meeting"
    deepspeed.init_distributed("nccl" if setup.cuda else "gloo", init_method=meeting, rank=0, world_size=1)


@contextlib.contextmanager
def spoiled_memory() -> Iterator[None]:
    """Within this context, torch fills uninitialized memory with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def slow_step(setup: Any) -> None:
    """T1: see that the parameters gathered for the next forward are those that a slow step has written."""
    enter_alone(setup)
    for name in ["III", "GGG", "IIG"] if not setup.small else ["GGG"]:
        expected = _train_slowly(setup, name, synchronized=True)
        results = _train_slowly(setup, name, synchronized=False)
        is_same = bool(torch.isfinite(expected).all()) and torch.equal(results, expected)
        setup.report.check(f"{name} ends with the same weights", is_same)


def _train_slowly(setup: Any, name: str, synchronized: bool) -> torch.Tensor:
    job = dataclasses.replace(JOB, network=None, zero={**SMALL}, steps=5)
    engine, model = make_engine(job, placed(name, group_size=1))
    generator = torch.Generator().manual_seed(5)
    batches = [
        tuple(torch.randn(2, width, generator=generator).to(engine.device) for width in (job.sizes[0], job.sizes[-1]))
        for _ in range(job.steps * job.accumulation)
    ]
    if setup.cuda:
        torch.cuda.synchronize()
    with calls.before(engine.optimizer.optimizer, "step", lambda *_, **__: pause(setup, SLOW)):
        for x, y in batches:
            engine.backward(((engine(x) - y) ** 2).float().mean())
            engine.step()
            if synchronized and setup.cuda:
                torch.cuda.synchronize()
    weights = whole_weights(model).cpu()
    engine.destroy()
    return weights


def late_results(setup: Any) -> None:
    """T2: see that training over a late wire ends with the bits of training over a prompt one."""
    enter_virtual_world(6)
    names = ["NGG", "IGG"] if setup.small else [*REPLICATED, *PARTITIONED]
    for overlap in (True, False):
        for name in names:
            compare(setup, name, {"overlap_comm": overlap})
    for name in names if setup.small else ("NIG", "IIG", "IGG"):
        compare(setup, name, {"zeropp_loco_param": {}})
    compare(setup, "III", {"stage3_leaf_bytes": True})
    two_groups = dataclasses.replace(JOB, groups=2)
    for name in () if setup.small else ("NIG", "IIG", "GGG"):
        compare(setup, name, {}, two_groups, "two parameter groups")
        compare(setup, name, {}, dataclasses.replace(JOB, dtype="bf16"), "bf16")


def compare(setup: Any, name: str, more: dict[str, Any], job: Job = JOB, what: str = "") -> None:
    """Train over a prompt and over a late wire, and check that weights are the same."""

    def trained(prompt: bool) -> Trained:
        wire = Wire(setup.device, prompt=prompt)
        with spoiled_memory():
            return train_over(wire, job, placed(name, group_size=3, **more))

    begin, options = time.perf_counter(), " ".join([*(f"{key} {value}" for key, value in more.items()), what])
    expected, results = trained(True), trained(False)
    setup.report.check(f"{name} {options}".strip(), expected[1] and results == expected)
    setup.report.figure("seconds of the last comparison", round(time.perf_counter() - begin, 2))


def sanitizer(setup: Any) -> None:
    """T3: see that torch's sanitizer, which TORCH_CUDA_SANITIZER=1 switches on, finds no access out of order."""
    enter_alone(setup)
    for name in [] if setup.small else ["III", "GGG", "IIG"]:
        _watch(setup, f"{name} with a slow step", functools.partial(_train_slowly, setup, name, synchronized=False))
    _watch_strategies(setup, ["IGG"] if setup.small else ["III", "GGG", "IIG", "IGG"])


def sanitizer_of_others(setup: Any) -> None:
    """T3B: the same of the other kinds of strategies."""
    _watch_strategies(setup, ["NGG"] if setup.small else ["NIG", "NGG", "GNG", "ING"])


def _watch_strategies(setup: Any, names: Sequence[str]) -> None:
    enter_virtual_world(6)
    job = dataclasses.replace(JOB, steps=2)
    for name in names:
        wire = Wire(setup.device, delay=(0.0, 0.1))
        _watch(setup, name, functools.partial(train_over, wire, job, placed(name, group_size=3, overlap_comm=True)))


def _watch(setup: Any, name: str, run: Callable[[], Any]) -> None:
    """Check that the sanitizer finds nothing; it prints its findings, and raises them."""
    results = ""
    with _of_elements(setup):
        try:
            run()
        except Exception as error:
            if type(error).__name__ != "CUDASanitizerErrors":
                raise
            results = "\n".join(map(str, getattr(error, "errors", [error])))
    setup.report.check(name, not results)
    if results:
        setup.report.figure(f"found in {name}", results[:12000])


@contextlib.contextmanager
def _of_elements(setup: Any) -> Iterator[None]:
    """Have the sanitizer pass over tensors without elements, and keep the innermost frames of a stack alone. It tells
    tensors without memory apart by their ids, which are used again. Whole stacks take most of the time."""
    if not setup.cuda:
        yield
        return
    from torch.cuda import _sanitizer

    setup.report.check("the sanitizer is on", _sanitizer.cuda_sanitizer.enabled)
    handle, extract = _sanitizer.ArgumentHandler._handle_argument, traceback.StackSummary.extract

    def of_elements(handler: Any, value: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(value, torch.Tensor) or value.numel():
            handle(handler, value, *args, **kwargs)

    innermost = functools.partial(extract, limit=30)
    with (
        mock.patch.object(_sanitizer.ArgumentHandler, "_handle_argument", of_elements),
        mock.patch.object(traceback.StackSummary, "extract", innermost),
    ):
        yield
