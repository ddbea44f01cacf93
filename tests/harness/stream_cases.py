# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Training on a simulated device with streams, with many options at once; everything here runs inside rank processes.

A case is a strategy and the name of a set of options, which together use all that our optimizers have. See Note [How
order is checked] in ``stream_order.py``.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import deepspeed
from deepspeed import comm as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor

from tests.harness import mixtures, networks, pipelines, training
from tests.harness.fake_wire import FEW_AT_A_TIME, WITHOUT_TIMER
from tests.harness.stream_order import Order, device_with_streams
from tests.harness.training import PARTITIONED, REPLICATED, SMALL, Job, placed

ALL = (*REPLICATED, *PARTITIONED)
BOTH_STAGES = ("NIG", "NGG", "ING", "IIG", "GGG")
NOT_AVAILABLE = ZeroParamStatus.NOT_AVAILABLE
_JOB = Job(
    sizes=networks.SQUARE,
    network=networks.Mixture,  # a leaf module, of which ranks leave experts out
    steps=2,
    accumulation=2,
    empty=False,
    groups=2,
    frozen=(2,),
    zero={**SMALL, **FEW_AT_A_TIME},
    config=WITHOUT_TIMER,
)


@dataclass(frozen=True)
class Options:
    """What is trained, and what the user does meanwhile.

    Attributes:
        strategies: that have a case.
        zero: further keys of zero_optimization.
        job: without these keys.
        gathering: whether parameters are looked at, and changed, between forward and backward, while gathers for the
            backward are on their way.
        saving: whether a checkpoint is saved behind each step.
        pipe: a pipeline instead of the job.
    """

    strategies: Sequence[str] = ALL
    zero: dict[str, Any] = field(default_factory=dict)
    job: Job = _JOB
    gathering: bool = True
    saving: bool = False
    pipe: pipelines.Pipe | None = None


_OVERLAP = {"overlap_comm": True}
_OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
_BF16 = replace(_JOB, dtype="bf16")
_ADAM = replace(_JOB, optimizer="Adam")
_MIXTURES = replace(_JOB, network=mixtures.Routed, frozen=(1,))
_ALL_USED = replace(_MIXTURES, network=mixtures.Mixtures)
_PIPE = pipelines.Pipe(steps=2, zero=SMALL, config=WITHOUT_TIMER, groups=2, frozen=(1,))
OPTIONS = {
    "defaults": Options(),
    "plain": Options(BOTH_STAGES, job=replace(_JOB, groups=1, frozen=()), gathering=False),
    "overlap": Options(REPLICATED, _OVERLAP),
    "no overlap": Options(ALL, {"overlap_comm": False}, replace(_BF16, boundary="step")),
    "every micro-step": Options(ALL, _OVERLAP, replace(_BF16, accumulation=1), saving=True),
    "bf16": Options(ALL, _OVERLAP, replace(_BF16, boundary="user")),
    "fp16": Options(ALL, _OVERLAP, replace(_JOB, dtype="fp16", overflow=((3, 1),), steps=3)),
    "units": Options(PARTITIONED, {"stage3_leaf_bytes": True}, _MIXTURES),
    "chunks": Options(
        ("INI", "IIG", "GNG", "GGG"), {"stage3_leaf_bytes": 12_000}, replace(_MIXTURES, network=mixtures.Mixtures)
    ),
    "LoCo": Options(ALL, {**_OVERLAP, "zeropp_loco_param": {}}),
    "LoCo, reset": Options(BOTH_STAGES, {"zeropp_loco_param": {"reset_T": 1}}, replace(_BF16, steps=3)),
    "offload": Options(ALL, {**_OVERLAP, **_OFFLOAD}, _ADAM),
    "offload, LoCo": Options(BOTH_STAGES, {"zeropp_loco_param": {}, **_OFFLOAD}, _ADAM),
    "no_sync": Options(("NNN", "NNI", "NNG"), _OVERLAP, replace(_JOB, no_sync=True, accumulation=3)),
    "pipeline": Options(pipe=_PIPE),
    "pipeline, overlap": Options(ALL, _OVERLAP, pipe=replace(_PIPE, dtype="bf16")),
    "pipeline, LoCo": Options(("NGG", "IIG", "GGG"), {**_OVERLAP, "zeropp_loco_param": {}}, pipe=_PIPE),
}


class Watched(NamedTuple):
    """What was seen of a case.

    Attributes:
        findings: what has no order.
        accesses, pairs: see ``Order``.
    """

    findings: list[str]
    accesses: int
    pairs: int


def watch_cases(options: str, folder: str = "") -> dict[str, Watched]:
    """Watch all strategies that have a case with a set of options; see ``watch_case``."""
    return {name: watch_case(name, options, folder) for name in OPTIONS[options].strategies}


def watch_case(name: str, options: str, folder: str = "", **more: Any) -> Watched:
    """Train a strategy and look at what has no order; arguments as of ``run_case``."""
    with device_with_streams() as order:
        run_case(order, name, options, folder, **more)
    return Watched([str(finding) for finding in order.findings], order.accesses, order.pairs)


def run_case(order: Order, name: str, options: str, folder: str = "", steps: int = 0, **more: Any) -> None:
    """Train a strategy, or a stage, with a set of options, while the order is watched.

    The engine is destroyed while the device has streams: what is in flight is completed.

    Args:
        order: of the device.
        name: of the strategy, or the stage.
        options: name of the set.
        folder: for checkpoints.
        steps: how many; 0 for as many as the options say.
        more: further keys of zero_optimization.
    """
    given = OPTIONS[options]
    if given.pipe is not None:
        engine: Any = pipelines.make_pipeline(given.pipe, placed(name, 1, **given.zero, **more))
        data = pipelines.batches(engine.grid.get_data_parallel_rank())
        with order.watch():
            for _ in range(steps or given.pipe.steps):
                engine.train_batch(data)
        engine.destroy()
        return
    job = replace(given.job, steps=steps or given.job.steps)
    if name.startswith("N"):  # ranks must use the same parameters there; not all of them
        job = replace(job, network=None, skipped=((1, 1), (2, 0)))
    engine, model = training.make_engine(job, placed(name, **given.zero, **more))
    data = training.batches(job)
    batches = [next(data) for _ in range(job.steps * job.accumulation)]
    with order.watch():
        for number, batch in enumerate(batches):
            last = (number + 1) % job.accumulation == 0
            micro_step(engine, model, job, number, batch, given.gathering)
            if job.no_sync and not last:
                engine.micro_steps += 1  # no_sync leaves the counting to the caller
            elif last or job.boundary != "step":
                engine.step()
            if last and given.saving:
                engine.save_checkpoint(folder, tag=f"{name}-{number}")
    engine.destroy()


def micro_step(engine: Any, model: Any, job: Job, number: int, batch: tuple[Tensor, Tensor], gathering: bool) -> None:
    """Forward and backward, without a look at the loss, which would have the host wait."""
    x, y = batch
    last = (number + 1) % job.accumulation == 0
    if job.boundary == "user":
        engine.set_gradient_accumulation_boundary(last)
    with engine.no_sync() if job.no_sync and not last else contextlib.nullcontext():
        loss = ((engine(x, [layer for at, layer in job.skipped if at == number]) - y) ** 2).float().mean()
        if (number, dist.get_rank()) in job.overflow:
            loss = loss * float("inf")
        if gathering:
            gather_and_change(list(model.parameters()))
        engine.backward(loss)


def gather_and_change(parameters: list[Any]) -> None:
    """Look at two parameters, and change another, as users do; DeepSpeed lets nobody change one in flight."""
    with deepspeed.zero.GatheredParameters([parameters[-1], parameters[len(parameters) // 2]]):
        parameters[-1].sum()
    resting = [p for p in parameters if getattr(p, "ds_status", NOT_AVAILABLE) == NOT_AVAILABLE]
    with deepspeed.zero.GatheredParameters(resting[:1], modifier_rank=0):
        for param in resting[:1]:
            param.data.mul_(1.5)
