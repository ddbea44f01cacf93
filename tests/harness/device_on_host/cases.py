# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs on the simulated device, compared with the same runs on the host; all of this runs inside rank processes."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import deepspeed
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import saves, snapshots, stream_cases, training
from tests.harness.device_on_host.accelerator import device_on_host
from tests.harness.device_on_host.backend import NAME, register
from tests.harness.stream_order import device_with_streams
from tests.harness.training import DTYPES, SMALL, Job, placed

PINNED = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
PAGEABLE = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
HOST = {"offload_param": {"device": "cpu", "pin_memory": True}}
_CACHED = {"paro_parameter_cache_bytes": 1500}
_LOCO = {"zeropp_loco_param": {"hadamard": True, "reset_T": 2}}
_FEW_BITS = {"paro_quantized_updates": {"resync_T": 2}}
OUTER = {"paro_outer_optimizer": {"steps": 2, "fragments": 2, "bits": 4}}
_DELAYED = {"paro_outer_optimizer": {"steps": 3, "delay": 1, "bits": 8, "offload": "cpu"}}
_JOB = Job(zero=SMALL, empty=False, accumulation=2, groups=2, optimizer="Adam")


_BF16 = replace(_JOB, dtype="bf16")


@dataclass(frozen=True)
class Options:
    """Options of a training on both."""

    strategies: Sequence[str]  # the strategies with a case
    zero: dict[str, Any] = field(default_factory=dict)  # further keys of zero_optimization
    job: Job = _JOB  # without these keys
    stock: bool = True  # the stage of DeepSpeed's that trains on the device as well; none where gradients are rounded


OPTIONS = {
    "on the device": Options(("NIG", "ING", "GGG")),
    "pinned": Options(("NIG", "IIG"), PINNED),
    "pageable": Options(("NGG", "III"), {**PAGEABLE, "overlap_comm": False}, stock=False),
    "overflow": Options(("NIG", "IIG"), PINNED, replace(_JOB, dtype="fp16", overflow=((3, 1),)), stock=False),
    "LoCo": Options(("NIG", "IIG"), {**_LOCO, **PINNED}, _BF16, stock=False),
    "LoCo, pageable": Options(("NGG", "III"), {**_LOCO, **PAGEABLE}, stock=False),
    "in few bits": Options(("NIG", "ING"), {**_FEW_BITS, **PINNED}, replace(_JOB, accumulation=1), stock=False),
    "ordered": Options(("NIG", "GGG"), {"paro_reduce": "ordered", "paro_group_size": 1}, _BF16, stock=False),
    "ordered within groups": Options(
        ("IIG",), {"paro_reduce": "ordered_everywhere", "paro_group_size": 4}, _BF16, stock=False
    ),
    "parameters": Options(("ING", "IIG", "IGG"), HOST),
    "parameters, cached": Options(("IIG",), {**HOST, **PINNED, **_CACHED}, replace(_JOB, frozen=(1,)), stock=False),
    "parameters, pageable": Options(("IIG",), {"offload_param": {"device": "cpu"}}, stock=False),
    "parameters, in few bits": Options(("ING", "IIG"), HOST | _FEW_BITS, replace(_JOB, accumulation=1), stock=False),
    "outer": Options(("NII", "III"), _DELAYED, replace(_JOB, steps=5, accumulation=1), stock=False),
    "outer, pinned": Options(("NII", "INI"), {**OUTER, **PINNED}, replace(_JOB, dtype="bf16"), stock=False),
    "Muon": Options(("NIG", "IIG"), {}, replace(_JOB, optimizer="Muon"), stock=False),
    "Muon, pinned": Options(("NII", "GNG"), PINNED, replace(_JOB, optimizer="Muon"), stock=False),
}


class Beside(NamedTuple):
    """The comparison of a run on the device."""

    strategy: str
    as_on_host: bool  # whether losses, norms, decisions and weights are those of the same run on the host, to the bit
    # Of weights, how far they are from those of stock DeepSpeed on the device, relative to the largest.
    from_stock: float
    places: tuple[str, str]  # device types of parameters, and of the optimizer's weights and states


def beside(library: str, options: str, names: Sequence[str]) -> list[Beside]:
    """Train strategies with a set of options on the device and on the host, and with stock where it supports them."""
    register(library)
    provided = OPTIONS[options]
    rows = []
    for name in names:
        zero = placed(name, **provided.zero)
        places: list[tuple[str, str]] = []
        # With buckets as on NCCL; but with the collectives of gloo if sums do not depend on the backend.
        with contextlib.nullcontext() if "paro_reduce" in zero else device_with_streams():
            host = training.train(provided.job, zero)
        with device_on_host(library):
            ours = training.train(provided.job, zero, look=partial(look, places))
            stock = ours
            if provided.stock:
                stock = training.train(provided.job, {"stage": 2 if name[0] == "N" else 3, **provided.zero})
        is_same = torch.equal(ours.weights.cpu(), host.weights)
        is_same &= ours._replace(weights=None) == host._replace(weights=None)
        apart = (ours.weights - stock.weights).abs().max() / stock.weights.abs().max()
        rows.append(Beside(name, is_same, apart.item(), places[0]))
    return rows


def look(places: list[tuple[str, str]], engine: Any) -> None:
    weights = {tensor.device.type for tensor in _weights(engine)}
    places.append((_only({p.device.type for p in engine.module.parameters()}), _only(weights)))


def _only(values: set[str]) -> str:
    return " ".join(sorted(values))


def watched(library: str, options: str, names: Sequence[str], folder: str) -> dict[str, list[str]]:
    """Train with a set of ``stream_cases``; return of each strategy accesses without an order, the host's as well."""
    register(library)
    results = {}
    for name in names:
        with device_on_host(library) as order:
            stream_cases.run_case(order, name, options, folder)
        assert order.accesses > 800 and order.pairs > 60, (name, order.accesses, order.pairs)
        results[name] = [str(finding) for finding in order.findings]
    return results


class Resumed(NamedTuple):
    """Differences from the saved run."""

    strategy: str
    # loaded, resumed: after a load, and after going on: on the device, to the bit.
    loaded: dict[str, float]
    resumed: dict[str, float]
    elsewhere: dict[str, float]  # after a load on the host of a save of the device, or vice versa


def resume(
    library: str, folder: str, names: Sequence[str], optimizer: str, zero: dict[str, Any], from_device: bool
) -> list[Resumed]:
    """Save on the device or on the host; load on both, and continue from there."""
    register(library)
    places: list[Callable[[], Any]] = [lambda: device_on_host(library), device_with_streams]
    directory, node = places if from_device else reversed(places)
    job = snapshots.job_of("bf16", zero, optimizer)
    return [resumed(job, f"{folder}/{name}", name, directory, node) for name in names]


def resumed(job: Job, folder: str, name: str, here: Callable[[], Any], there: Callable[[], Any]) -> Resumed:
    """Save in one context; load in it and in another one, and continue."""
    with here(), _engine(job, name) as (engine, model):
        snapshots.mark(engine, model)
        snapshots.run(engine, job, snapshots.steps_of(job, 2))
        engine.save_checkpoint(folder)
        saved = _seen(engine, model, job)
        snapshots.run(engine, job, snapshots.steps_of(job, 2, skip=2))
        full = _seen(engine, model, job)
    with here(), _engine(job, name) as (engine, model):
        snapshots.run(engine, job, snapshots.steps_of(job, 2, skip=7))  # something to be overwritten
        engine.load_checkpoint(folder)
        loaded = snapshots.difference(saved, _seen(engine, model, job))
        snapshots.run(engine, job, snapshots.steps_of(job, 2, skip=2))
        resumed = snapshots.difference(full, _seen(engine, model, job))
    with there(), _engine(job, name) as (engine, model):
        engine.load_checkpoint(folder)
        elsewhere = snapshots.difference(saved, _seen(engine, model, job))
        snapshots.run(engine, job, snapshots.steps_of(job, 2, skip=2))
        elsewhere |= snapshots.difference(full, _seen(engine, model, job))
    return Resumed(name, loaded, resumed, elsewhere)


def export(library: str, folder: str, names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Of each: which weights of an export from the device are not those of the model when it was called. All have room
    in host memory, or almost none, so that it is used again and again."""
    register(library)
    rows = []
    for name in names:
        for how in ({"asynchronous": True}, {"host_bytes": 512}):
            with device_on_host(library):
                rows.append((name, exported(f"{folder}/{name}", name, **how)))
    return rows


def exported(folder: str, name: str, **how: Any) -> list[str]:
    from safetensors.torch import load_file

    import deepspeed_ext

    job = snapshots.job_of("bf16")
    with _engine(job, name) as (engine, model):
        snapshots.run(engine, job, snapshots.steps_of(job, 1))
        export = deepspeed_ext.export_weights(engine, folder, writers=2, **how)
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            before = {key: param.detach().to("cpu", copy=True) for key, param in model.named_parameters()}
        snapshots.run(engine, job, snapshots.steps_of(job, 1, skip=1))
        export.wait()
    saved = load_file(f"{folder}/model.safetensors")
    return [key for key in before if not torch.equal(before[key], saved[key])]


def twins(library: str, folder: str, rows: Sequence[tuple[str, str, dict[str, Any], str]]) -> list[saves.Twins]:
    """Of each row of ``saves.job_of_row``, compare the files of synchronous and asynchronous saves on the device."""
    register(library)
    results = []
    for number, (name, *row) in enumerate(rows):
        with device_on_host(library):
            results.append(saves.twins_case(f"{folder}/{number}", name, saves.job_of_row(*row)))
    return results


@contextlib.contextmanager
def _engine(job: Job, name: str) -> Iterator[tuple[Any, Any]]:
    engine, model = training.make_engine(job, placed(name))
    try:
        yield engine, model
    finally:
        engine.destroy()


def _seen(engine: Any, model: Any, job: Job) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in snapshots.snapshot(engine, model, job).items()}


class Offloaded(NamedTuple):
    """The states of a run that offloads and reloads them after each backward."""

    strategy: str
    same: bool  # whether the weights are those of a run without
    away: tuple[str, bool]  # devices of states in between; whether those that are held for long were pinned
    back: str  # devices afterwards


def offload_states(
    library: str, names: Sequence[str], optimizer: str, pinned: bool, zero: dict[str, Any]
) -> list[Offloaded]:
    """Offload and reload all states after each backward, on the device."""
    register(library)
    rows = []
    for name in names:
        with device_on_host(library):
            rows.append(offloaded(name, optimizer, pinned, zero))
    return rows


def offloaded(name: str, optimizer: str, pinned: bool, zero: dict[str, Any]) -> Offloaded:
    """Offload and reload all states of a strategy after each backward."""
    job = replace(_JOB, steps=2, optimizer=optimizer, zero={**SMALL, **zero})
    plain = training.train(job, placed(name)).weights
    with _engine(job, name) as (engine, model):
        away, back = set(), set()
        pins = True
        for number, batch in zip(range(4), training.batches(job), strict=False):
            training.micro_step(engine, job, number, *batch)
            engine.offload_states(pin_memory=pinned)
            retained = _held(engine)
            away |= {tensor.device.type for tensor in retained}
            pins &= all(tensor.is_pinned() == pinned for tensor in retained if tensor.device.type == "cpu")
            engine.reload_states()
            back |= {tensor.device.type for tensor in _held(engine)}
            engine.step()
        is_same = torch.equal(plain, training.whole_weights(model))
    return Offloaded(name, is_same, (_only(away), pins), _only(back))


def _weights(engine: Any) -> list[Tensor]:
    optimizer = engine.optimizer
    flat = getattr(optimizer, "fp32_partitioned_groups_flat", None)  # of stage 3: its groups are filled in a step
    retained = flat or [p for group in optimizer.optimizer.param_groups for p in group["params"]]
    return [p.data for p in retained if p.numel()]


def _held(engine: Any) -> list[Tensor]:
    """Return weights and states of the optimizer, but step counts, and those of an outer one."""
    states = [item for state in engine.optimizer.optimizer.state.values() for item in state.values()]
    fragments = getattr(engine.optimizer.outer, "fragments", ())
    outer = [tensor for item in fragments for tensor in (item.anchor, item.weights, item.momentum)]
    return [*_weights(engine), *(item for item in states if torch.is_tensor(item) and item.dim()), *outer]


class Held(NamedTuple):
    """Memory of the parameters of a model, in bytes."""

    strategy: str
    places: set[tuple[str, bool]]  # devices of slices, and whether they are pinned
    # host, cached: bytes of slices, and of slices that are on the device as well.
    host: int
    cached: int
    on_host: int  # bytes of all memory of the host that has the parameters' dtype
    peak: int  # the most that memory of the device with the parameters' dtype was in a step


def slices_held(library: str, names: Sequence[str], job: Job, zero: dict[str, Any]) -> tuple[int, list[Held]]:
    """Train with parameters on the host, in a dtype that nothing else has for long: bytes of all, and of their memory.
    Here each transfer ends when it is started, so at most one transfer in flight is counted."""
    register(library)
    rows, full = [], 0
    for name in names:
        with device_on_host(library), LiveBytes(DTYPES[job.dtype]) as live:
            engine, model = training.make_engine(job, placed(name, **HOST, **zero))
            full = sum(p.ds_numel * p.ds_tensor.element_size() for p in model.parameters())
            live.most = 0
            for number, batch in zip(range(job.steps * job.accumulation), training.batches(job), strict=False):
                training.micro_step(engine, job, number, *batch)
                engine.step()
            engine.optimizer.drain_parameters()
            slices = engine.optimizer.slices["dense"]
            retained = [slices.shard_of(param) for param in slices.params]
            places = {(item.device.type, item.is_pinned()) for item in retained}
            cached = sum(item.nbytes for item in slices.rows.cache._rows.values())
            row = places, sum(item.nbytes for item in retained), cached, live.of("cpu"), live.most
            rows.append(Held(name, *row))
            engine.destroy()
    return full, rows


class LiveBytes(TorchDispatchMode):
    """Records in ``most`` the most bytes of a dtype that the device had after an operator in this context."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._known: dict[int, tuple[StorageWeakRef, str, int]] = {}
        self._lock = threading.Lock()  # autograd runs in threads of its own
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        results = [item for item in pytree.tree_leaves((args, kwargs, outputs)) if isinstance(item, Tensor)]
        with self._lock:
            for item in results:
                if item.dtype == self._dtype:
                    storage = item.untyped_storage()
                    self._known[storage._cdata] = StorageWeakRef(storage), item.device.type, storage.nbytes()
            self._known = {key: entry for key, entry in self._known.items() if not entry[0].expired()}
            self.most = max(self.most, self._sum(NAME))
        return outputs

    def of(self, device: str) -> int:
        """Return the bytes that there are of a device."""
        with self._lock:
            return self._sum(device)

    def _sum(self, device: str) -> int:
        return sum(nbytes for ref, where, nbytes in self._known.values() if where == device and not ref.expired())
