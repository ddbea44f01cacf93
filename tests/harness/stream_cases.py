# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Training on a simulated device with streams, with many options at once; everything here runs inside rank processes.

A case is a strategy and the name of a set of options, which together use all that our optimizers have. See Note [How
order is checked] in ``stream_order.py``.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor

from deepspeed_ext.comm import redistribution
from deepspeed_ext.zero.sharded.gradients import ShardedGradients
from tests.harness import calls, experts, mixtures, networks, pipelines, training
from tests.harness.fake_wire import FEW_AT_A_TIME, WITHOUT_TIMER
from tests.harness.missing_wait_mutations import sites, under
from tests.harness.stream_order import Order, device_with_streams
from tests.harness.training import PARTITIONED, REPLICATED, SMALL, Job, placed

ALL = (*REPLICATED, *PARTITIONED)
BOTH_STAGES = ("NIG", "NGG", "ING", "IIG", "GGG")
NOT_AVAILABLE = ZeroParamStatus.NOT_AVAILABLE
_JOB = Job(
    sizes=networks.SQUARE,
    network=networks.Mixture,  # a leaf module; ranks leave some of its experts out
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
    """A training, and the operations of a user's script during it."""

    strategies: Sequence[str] = ALL  # the strategies to run
    zero: dict[str, Any] = field(default_factory=dict)  # further keys of zero_optimization
    job: Job = _JOB  # without these keys
    # Whether parameters are looked at, and changed, between forward and backward, while gathers for the backward are
    # on their way.
    gathering: bool = True
    saving: bool = False  # whether a checkpoint is saved and loaded after each step
    aside: bool = False  # whether an asynchronous save starts after each step
    reported: bool = False  # whether steps are recorded, and reported on
    pipe: pipelines.Pipe | None = None  # a pipeline instead of the job


_OVERLAP = {"overlap_comm": True}
_AHEAD = {"paro_overlap_updates": True}
_EXACT = {"paro_quantized_updates": {"bits": "exact", "resync_T": 3}}
_FEW_BITS = {"paro_quantized_updates": {"resync_T": 2}}
_LOCO: dict[str, Any] = {"zeropp_loco_param": {}}
_CROSSING = tuple(name for name in ALL if name[0] != "G")  # updates, or sums, cross in few bits
_APART = ("NNI", "NII", "INI", "III")  # those that may have an outer optimizer
_OUTER = {"paro_outer_optimizer": {"steps": 2, "fragments": 2, "bits": 4}}
_DELAYED = {"paro_outer_optimizer": {"steps": 4, "delay": 2, "warmup_steps": 1, "bits": 16, "offload": "cpu"}}
_OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
_HOST = {"offload_param": {"device": "cpu", "pin_memory": True}}
_PAGEABLE = {"offload_param": {"device": "cpu", "pin_memory": False}}
_CACHED = {"paro_parameter_cache_bytes": 2000}
_WHOLE = {"paro_modules": {"layers.[01]": "N"}}
_GROUPED = {"paro_modules": {"layers.[01]": "I"}}
_SLICED = ("ING", "IIG", "IGG")
_BF16 = replace(_JOB, dtype="bf16")
_ADAM = replace(_JOB, optimizer="Adam")
_PLAIN = replace(_JOB, groups=1, frozen=(), network=None, skipped=((2, 1), (3, 1)))  # a layer rests for a step
_DEEPER = replace(_JOB, sizes=(13, *(11,) * 6, 7), network=None)
_ASIDE = replace(_ADAM, dtype="bf16", steps=3, config={**WITHOUT_TIMER, "checkpoint": {"async_save": True}})
_EVERY = replace(_BF16, accumulation=1, steps=3, network=None, skipped=((1, 1), (2, 0)))
_MIXTURES = replace(_JOB, network=mixtures.Routed, frozen=(1,))
_EXPERTS = replace(_JOB, sizes=(13, 10, 10, 7), network=networks.RoutedOverTwo, frozen=(1,), config=WITHOUT_TIMER)
_AUTOEP = replace(_EXPERTS, network=experts.SmallMixtral, groups=1, config={**WITHOUT_TIMER, **experts.autoep(2)})
_PIPE = pipelines.Pipe(steps=2, zero=SMALL, config=WITHOUT_TIMER, groups=2, frozen=(1,))
BY_HAND = "by hand"
OPTIONS = {
    "defaults": Options(),
    "plain": Options(BOTH_STAGES, _AHEAD, _PLAIN, gathering=False),
    "overlap": Options(REPLICATED, {**_OVERLAP, "reduce_bucket_size": 600}),  # buffers of several gradients
    "many buckets": Options(("NGG", "NIG"), {**_OVERLAP, "reduce_bucket_size": 300}, _DEEPER),  # which reuse buffers
    "no overlap": Options(ALL, {"overlap_comm": False}, replace(_BF16, boundary="step")),
    "every micro-step": Options(ALL, {**_OVERLAP, **_AHEAD}, _EVERY, saving=True),
    "bf16": Options(BOTH_STAGES, _OVERLAP, replace(_BF16, boundary="user")),
    "fp16": Options(ALL, _OVERLAP, replace(_JOB, dtype="fp16", overflow=((3, 1),), steps=3)),
    "no buffers": Options(BOTH_STAGES, {**_OVERLAP, "contiguous_gradients": False, "reduce_scatter": False}),
    "ordered": Options(ALL, {**_OVERLAP, "paro_reduce": "ordered_everywhere"}, _BF16),
    "whole modules": Options(PARTITIONED, {**_OVERLAP, **_WHOLE}, replace(_BF16, network=None), gathering=False),
    "whole modules, saved": Options(("IIG",), {**_OVERLAP, **_WHOLE}, replace(_BF16, network=None), saving=True),
    "units": Options(("ING", "III", "IGG", "GIG", "GGG"), {"stage3_leaf_bytes": True}, _MIXTURES),
    "chunks": Options(
        ("INI", "IIG", "GNG", "GGG"), {"stage3_leaf_bytes": 12_000}, replace(_MIXTURES, network=mixtures.Mixtures)
    ),
    "windows": Options(
        ("INI", "IIG", "GNG", "GGG"), {"stage3_leaf_bytes": 6552}, replace(_MIXTURES, network=mixtures.Packed), False
    ),
    "LoCo": Options(ALL, {**_OVERLAP, **_LOCO}),
    "LoCo, reset": Options(BOTH_STAGES, {"zeropp_loco_param": {"reset_T": 1}}, replace(_BF16, steps=3)),
    "offload": Options(ALL, {**_OVERLAP, **_OFFLOAD}, _ADAM),
    "pageable": Options(
        ("NGG", "IGG"), {**_OVERLAP, "offload_optimizer": {"device": "cpu", "pin_memory": False}}, _ADAM
    ),
    "offload, LoCo": Options(BOTH_STAGES, {"zeropp_loco_param": {"hadamard": True}, **_OFFLOAD}, _ADAM),
    # To change parameters would have all updates travel whole.
    "in few bits": Options(_CROSSING, {**_OVERLAP, **_FEW_BITS}, replace(_BF16, steps=3), gathering=False),
    "in few bits, ahead": Options(("NNG", "NIG", "NGG"), {**_AHEAD, **_FEW_BITS, **_LOCO}, _EVERY, gathering=False),
    "in few bits, offload": Options(("NIG", "NII", "ING", "IIG"), {**_FEW_BITS, **_OFFLOAD}, _ADAM, gathering=False),
    "without loss": Options(("NIG", "NGG", "ING", "IIG"), {**_OVERLAP, **_EXACT}, _BF16, gathering=False),
    "Muon": Options(ALL, _OVERLAP, replace(_BF16, optimizer="Muon")),
    "Muon, in few bits": Options(
        ("NIG", "IIG"), {**_OVERLAP, **_FEW_BITS, **_LOCO}, replace(_JOB, optimizer="Muon"), False
    ),
    "Muon, offload": Options(("NIG", "NNI", "III", "IGG"), {**_OVERLAP, **_OFFLOAD}, replace(_ADAM, optimizer="Muon")),
    "experts": Options(("NNN", "NIG", "NGG"), {**_OVERLAP, **_AHEAD}, _EXPERTS, gathering=False),
    "experts, in few bits": Options(("NNI", "NIG"), {**_OVERLAP, **_FEW_BITS, **_LOCO}, _EXPERTS, gathering=False),
    "experts, sharded": Options(("ING", "III", "IGG", "GGG"), _OVERLAP, _AUTOEP, gathering=False),
    "experts, Muon": Options(("NNN", "NIG"), _OVERLAP, replace(_EXPERTS, optimizer="Muon"), gathering=False),
    "parameters on the host": Options(_SLICED, {**_OVERLAP, **_HOST}, replace(_ADAM, steps=3), saving=True),
    "parameters and offload": Options(_SLICED, {**_HOST, **_CACHED, **_OFFLOAD}, _ADAM, saving=True),
    "parameters, in few bits": Options(("ING", "IIG"), {**_OVERLAP, **_HOST, **_CACHED, **_FEW_BITS}, _BF16, False),
    "parameters, pageable": Options(("IIG",), {**_OVERLAP, **_PAGEABLE}, _BF16),
    "outer": Options(_APART, {**_OVERLAP, **_OUTER}, replace(_ADAM, steps=3), saving=True),
    "outer, delayed": Options(_APART, {**_OVERLAP, **_DELAYED}, replace(_EVERY, steps=7), gathering=False),
    "outer, offload": Options(("NII", "III"), {**_OUTER, **_OFFLOAD}, replace(_ADAM, steps=3)),
    "saves aside": Options(ALL, {**_OVERLAP, **_AHEAD, **_LOCO}, _ASIDE, aside=True),
    "saves aside, offload": Options(("NIG", "NNI", "IIG"), {**_OVERLAP, **_OFFLOAD}, _ASIDE, aside=True),
    "reported": Options(("NIG", "IIG"), {**_OVERLAP, **_AHEAD}, replace(_JOB, steps=9), False, reported=True),
    "no_sync": Options(("NNN", "NNI", "NNG"), _OVERLAP, replace(_JOB, no_sync=True, accumulation=3)),
    "pipeline": Options((*REPLICATED, "GGG"), pipe=_PIPE),
    "pipeline, overlap": Options(ALL, _OVERLAP, pipe=replace(_PIPE, dtype="bf16")),
    "pipeline, fp16": Options(("NIG", "IIG"), {**_OVERLAP, **_AHEAD}, pipe=replace(_PIPE, dtype="fp16")),
    "pipeline, LoCo": Options(("NGG", "IIG", "GGG"), {**_OVERLAP, **_LOCO}, pipe=_PIPE),
    "pipeline, offload": Options(BOTH_STAGES, {**_OVERLAP, **_OFFLOAD}, pipe=replace(_PIPE, optimizer="Adam")),
    "modules in groups": Options(("GIG", "GGG", "GNG"), {**_OVERLAP, **_GROUPED}, replace(_BF16, network=None)),
}


def watch_cases(options: str, folder: str, number: int, **more: Any) -> dict[str, tuple[list[str], int, int]]:
    """Watch this number of a set's strategies, evenly spread, and others of another set; see ``watch_case``."""
    strategies, first = OPTIONS[options].strategies, list(OPTIONS).index(options)
    names = [strategies[(first + at * len(strategies) // number) % len(strategies)] for at in range(number)]
    return {name: watch_case(name, options, folder, **more) for name in names}


def watch_case(name: str, options: str, folder: str, **more: Any) -> tuple[list[str], int, int]:
    """Run a case; return accesses without an order, and numbers of accesses and of pairs, as in ``Order``."""
    with device_with_streams() as order:
        run_case(order, name, options, folder, **more)
    return [str(finding) for finding in order.findings], order.accesses, order.pairs


def leave_out(place: str, name: str, options: str, folder: str, group_size: int, steps: int) -> list[str]:
    """Omit a wait of ``missing_wait_mutations.sites``; return accesses without an order. See ``run_case``."""
    with device_with_streams() as order:
        order.left_out = under(sites()[place])
        run_case(order, name, options, folder, steps, group_size=group_size)
    return [str(finding) for finding in order.findings]


def run_case(order: Order, name: str, options: str, folder: str = "", steps: int = 0, **more: Any) -> None:
    """Train a strategy, or a stage, with a set of options, or ``BY_HAND``, while the order is watched.

    The engine is destroyed while the device has streams: what is in flight is completed. 0 ``steps`` are the number in
    the options, and ``more`` are further keys of zero_optimization.
    """
    if options == BY_HAND:
        gather_by_hand(order, name)
        return
    given = OPTIONS[options]
    if given.pipe is not None:
        engine, data = pipelines.start(given.pipe, placed(name, **{"group_size": 1, **given.zero, **more}))
        with stepping_on_host(engine, order), order.watch():
            for _ in range(steps or given.pipe.steps):
                engine.train_batch(data)
        engine.destroy()
        return
    job = job_of(options, name, steps)
    zero = {key: value for key, value in given.zero.items() if key not in _AHEAD or not name.isdigit()}
    if given.reported:
        more["paro_report"] = {"folder": f"{folder}/{name}", "after": 2, "steps": 1, "probe": False}
    engine, model, data = training.begin(job, placed(name, **zero, **more))
    batches = [next(data) for _ in range(job.steps * job.accumulation)]
    with stepping_on_host(engine, order), order.watch():
        for number, batch in enumerate(batches):
            last = (number + 1) % job.accumulation == 0
            micro_step(engine, model, job, number, batch, given.gathering)
            if job.no_sync and not last:
                engine.micro_steps += 1  # no_sync leaves the counting to the caller
            elif last or job.boundary != "step":
                engine.step()
            if last and given.saving:
                read_by_host(engine.optimizer)
                engine.save_checkpoint(folder, tag=f"{name}-{number}")
                engine.load_checkpoint(folder, tag=f"{name}-{number}")
            if last and given.aside:
                engine.save_checkpoint(folder, tag=name)
            if last and given.gathering and name[0] == name[2] != "N":
                next(model.parameters()).ds_tensor.mul_(0.9)  # the user writes what this rank holds of a parameter
    engine.destroy()


def job_of(options: str, name: str, steps: int = 0) -> Job:
    """Train a strategy with a set of options other than a pipeline; 0 steps: the number of the options."""
    job = OPTIONS[options].job
    steps = steps or job.steps
    if name.startswith("N") and job.network is not networks.RoutedOverTwo:
        # Ranks must use the same parameters there; not all of them.
        job = replace(job, network=None, skipped=((1, 1), (2, 0)))
    skipped, overflow = ([at for at in ats if at[0] < steps * job.accumulation] for ats in (job.skipped, job.overflow))
    return replace(job, steps=steps, skipped=skipped, overflow=overflow)


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


def gather_by_hand(order: Order, name: str) -> float:
    """Gather parameters ahead on a stream, and others meanwhile on the current one; the sum of the gathered ones.

    Gathers are finished in the order in which they have begun, so the second finishes the first. A third one begins
    on the stream ahead and is used on the current one. Afterwards the parameters are released.
    """
    engine, model = training.make_engine(Job(sizes=networks.SQUARE, empty=False, zero=SMALL), placed(name))
    ahead, used = get_accelerator().Stream(), get_accelerator().current_stream()
    params, second_layer = list(model.layers[0].parameters()), list(model.layers[1].parameters())
    with order.watch():
        ahead.wait_stream(used)
        with get_accelerator().stream(ahead):
            handle = params[0].all_gather_coalesced(params)
        with deepspeed.zero.GatheredParameters([model.unused]):
            model.unused.sum()  # without a look at the sum, which would synchronize
        with get_accelerator().stream(ahead):
            handle.wait()
            torch.zeros(10)
            handle = second_layer[0].all_gather_coalesced(second_layer)
        handle.wait()
        with get_accelerator().stream(ahead):
            torch.zeros(10)
        used.wait_stream(ahead)
        full = sum(param.abs().sum() for param in params + second_layer)
        params[0].partition(param_list=params + second_layer)
        torch.zeros(10)
    engine.destroy()
    return float(full)


@contextlib.contextmanager
def stepping_on_host(engine: Any, order: Order) -> Iterator[None]:
    """Within this context, report the host's accesses of an offloaded optimizer to the order.

    It clips and steps, and sums tied gradients. With p = I or G, it also clears accumulated gradients, and converts
    tensors that are sent to the device in another dtype. Muon reads and writes shards on the host, and copies that it
    waits for. An order that knows the host sees all of this itself.
    """
    if order.knows_host:
        yield
        return
    optimizer = engine.optimizer
    parts = [(optimizer.optimizer, "step"), (optimizer, "unscale_and_clip_grads"), (optimizer, "complete_gradients")]
    families = getattr(optimizer, "gradients", {}).values()  # stock's have none
    if families:
        parts += [(optimizer.muon, "apply"), (optimizer.muon, "finish_step")]
    sharded = [item for item in families if isinstance(item, ShardedGradients)]
    on_host = [item for item in sharded if item.accumulator.device.type == "cpu" and item.rows == 1]
    parts += [(item, name) for item in on_host for name in ("_prepare_accumulator", "_clear_padding")]

    def read(windows: Sequence[Tensor], *_: Any) -> None:
        with order.by_host():
            for window in windows:
                window.sum()

    def block(*_: Any) -> None:
        order.synchronize("stream", order.current.clock)

    with contextlib.ExitStack() as patches:
        shards = getattr(optimizer, "shards", None)
        if hasattr(shards, "pass_to_optimizer") and engine.optimizer_name() == "muon":  # with p = N
            # As for copies to the device, since norms are taken of these.
            patches.enter_context(calls.after(shards, "pass_to_optimizer", block))
        if on_host and engine.zero_cpu_offload():
            for item in on_host:  # whose copies to the host block it
                patches.enter_context(calls.after(item, "_store_sums", block))
            patches.enter_context(calls.before(redistribution, "align_rows", read))  # which converts on the host
        for owner, name in parts if engine.zero_cpu_offload() else ():
            patches.enter_context(mock.patch.object(owner, name, order.by_host()(getattr(owner, name))))
        yield


def read_by_host(optimizer: Any) -> None:
    """Let the host read parameters that it holds, as it may once DeepSpeed has announced a checkpoint."""
    on_host = [value for value in getattr(optimizer, "slices", {}).values() if value.rows.on_host]
    if on_host:
        optimizer.checkpoint_event_prologue()
    for slices in on_host:
        sum(slices.shard_of(param).sum() for param in slices.params)


def gather_and_change(parameters: list[Any]) -> None:
    """Look at two parameters and change a third, as users do; none in flight, which DeepSpeed does not support."""
    with deepspeed.zero.GatheredParameters([parameters[-1], parameters[len(parameters) // 2]]):
        parameters[-1].sum()
    resting = [p for p in parameters if getattr(p, "ds_status", NOT_AVAILABLE) == NOT_AVAILABLE]
    with deepspeed.zero.GatheredParameters(resting[:1], modifier_rank=0):
        for param in resting[:1]:
            param.data.mul_(1.5)
