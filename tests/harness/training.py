# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Small training runs for parity tests; everything here runs inside rank processes.

``compare`` trains stock DeepSpeed and strategies on the same data, from the same seed, in the same processes. It
returns plain numbers, since the process that runs pytest does not import torch.
"""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import is_moe_param
from torch import Tensor, nn

from tests.harness.parity_table import PARTITIONED as PARTITIONED
from tests.harness.parity_table import REPLICATED as REPLICATED

SEVERAL_BUCKETS = {"reduce_bucket_size": 600, "allgather_bucket_size": 600, "sub_group_size": 300}
# And no parameter stays gathered; by default, all of these small ones would.
SMALL = {**SEVERAL_BUCKETS, "stage3_param_persistence_threshold": 0}
# Parameters are gathered for each use, and given back after it.
NOTHING_KEPT = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
NOTHING_KEPT |= {"stage3_param_persistence_threshold": 0}
# Bounds of ``check``: an ulp or two of bf16. They are tight enough to show missing gradients of small parameters,
# which would move weights by 5e-3 and norms by 5e-3.
BF16 = {"weights": 4e-3, "losses": 1e-2, "norms": 2e-3}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Job:
    """A training of a small network."""

    sizes: Sequence[int] = (13, 37, 29, 7)  # widths of the network's layers; odd, so that nothing divides evenly
    empty: bool = True  # whether it has a parameter without elements; stock ZeRO-3 fails with one
    steps: int = 2  # optimizer steps
    accumulation: int = 1  # micro-steps per step
    dtype: str = "fp32"
    optimizer: str = "SGD"
    clipping: float = 0.5
    groups: int = 1  # parameter groups, with different learning rates
    frozen: Sequence[int] = ()  # layers without gradients
    # (micro-step, layer) or (micro-step, layer, rank): layers that this micro-step, or a rank in it, does not use.
    skipped: Sequence[tuple[int, ...]] = ()
    unused_as_zeros: bool = False  # whether skipped layers run all the same, and add zero times their output
    overflow: Sequence[tuple[int, int]] = ()  # (micro-step, rank): where the loss becomes infinite
    backward: str = "engine"  # "engine" for engine.backward, "loss" for loss.backward()
    # "engine" decides, "user" sets it, "step" (managed_gradient_accumulation false), or "coalesce": all micro-steps in
    # engine.coalesce_grad_reduction().
    boundary: str = "engine"
    no_sync: bool = False  # whether micro-steps before the last run in engine.no_sync()
    checkpointing: bool | None = None  # None, or use_reentrant of torch's activation checkpointing
    tensor_parallel: int = 1  # number of neighboring tensor-parallel ranks; see ``ModelParallelUnit``
    network: Any = None  # class of the model, of ``networks.py``; None for ``Network``
    # Whether the model is built under deepspeed.zero.Init: None, "plain" or "config" (given to it).
    zero_init: str | None = None
    zero: dict[str, Any] = field(default_factory=dict)  # further keys of ``zero_optimization``
    config: dict[str, Any] = field(default_factory=dict)  # further keys of the configuration

    def __post_init__(self) -> None:
        last = max((at for at, *_ in (*self.skipped, *self.overflow)), default=0)
        assert last < self.steps * self.accumulation, f"micro-step {last} is not run"


def placed(name: str, group_size: int = 2, **more: Any) -> dict[str, Any]:
    """Return the keys of a strategy, or of one of DeepSpeed's own stages ("2"), and further keys."""
    keys = {"stage": int(name)} if name.isdigit() else {"paro_strategy": name, "paro_group_size": group_size}
    return {**keys, **more}


class Network(nn.Module):
    """Layers of any width; any may be left out. One parameter has no elements, and one is never used."""

    unused_as_zeros = False  # see ``Job``

    def __init__(self, sizes: Sequence[int], checkpointing: bool | None = None, empty: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(a, b, bias=not i % 2) for i, (a, b) in enumerate(itertools.pairwise(sizes))
        )
        if empty:
            self.empty = nn.Parameter(torch.empty(0))
        self.unused = nn.Parameter(torch.ones(11))
        self.checkpointing = checkpointing

    def forward(self, x: Tensor, skipped: Sequence[int] = ()) -> Tensor:
        for i in range(len(self.layers)):
            x = self.apply_layer(i, x, skipped)
        return x

    def apply_layer(self, i: int, x: Tensor, skipped: Sequence[int] = ()) -> Tensor:
        """Apply a layer; a skipped one is replaced by a cut or repetition of its input."""
        layer = self.layers[i]
        if i in skipped:
            width, zeros = layer.out_features, 0.0 * layer(x) if self.unused_as_zeros else 0.0
            x = torch.cat([x] * -(-width // x.shape[-1]), -1)[..., :width] + zeros
        elif self.checkpointing is not None and i:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=self.checkpointing)
        else:
            x = layer(x)
        return torch.tanh(x)


class Record(NamedTuple):
    losses: list[float]
    weights: Tensor  # 1D, all parameters in fp32
    norms: list[float]
    scales: list[float]  # loss scale after each step
    applied: list[bool]  # whether each step changed the weights
    replicas_equal: bool = True  # whether all ranks that hold a parameter hold the same bits


def configuration(job: Job, zero: dict[str, Any]) -> dict[str, Any]:
    learning: dict[str, Any] = {"lr": 0.1}
    if job.optimizer == "SGD":
        learning["momentum"] = 0.9
    elif job.optimizer == "Muon":
        learning.update(lr=2e-2, adam_lr=1e-2, eps=1e-3, torch_adam=True)
    else:  # a large eps, since Adam would enlarge rounding of near-zero gradients to the size of a step
        learning.update(lr=1e-2, eps=1e-3, torch_adam=True)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1 if job.boundary == "coalesce" else job.accumulation,
        "optimizer": {"type": job.optimizer, "params": learning},
        "gradient_clipping": job.clipping,
        "zero_optimization": {**job.zero, **zero},
        "zero_allow_untested_optimizer": True,
    }
    if job.dtype != "fp32":
        config[job.dtype] = {"enabled": True}
    if job.dtype == "fp16":
        config["fp16"].update(initial_scale_power=8, hysteresis=1, loss_scale_window=1000)
    if job.boundary == "step":
        config["managed_gradient_accumulation"] = False
    for key, value in job.config.items():
        config[key] = {**config[key], **value} if isinstance(config.get(key), dict) else value
    return copy.deepcopy(config)


def parameter_groups(model: Network, job: Job) -> list[dict[str, Any]]:
    """Return the model's parameters in ``job.groups`` groups, dealt out in turn."""
    for layer in job.frozen:
        model.layers[layer].requires_grad_(False)
    parameters = [p for p in model.parameters() if p.requires_grad]
    dealt = [{"params": parameters[i :: job.groups], "lr": 0.1 / (i + 1)} for i in range(job.groups)]
    if any(map(is_moe_param, parameters)) or "expert_parallel" in job.config:  # DeepSpeed divides groups by name then
        dealt = [{**group, "name": f"group {i}"} for i, group in enumerate(dealt)]
    return dealt


class ModelParallelUnit:
    """Tells DeepSpeed of ``size`` neighboring tensor-parallel ranks; the model of the tests is not really split."""

    def __init__(self, size: int) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        tensor = [list(range(first, first + size)) for first in range(0, world, size)]
        data = [list(range(first, world, size)) for first in range(size)]
        self._tensor, self._data = (
            next(group for ranks, group in [(r, dist.new_group(r)) for r in all_ranks] if rank in ranks)
            for all_ranks in (tensor, data)
        )

    def get_model_parallel_group(self) -> Any:
        return self._tensor

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self._tensor)

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._tensor)

    def get_data_parallel_group(self) -> Any:
        return self._data

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._data)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._data)


def make_engine(job: Job, zero: dict[str, Any]) -> tuple[Any, Network]:
    if job.dtype == "fp16" or job.zero_init == "plain":
        # DeepSpeed's CPU accelerator denies fp16 only out of caution; without it, zero.Init makes bf16 of any dtype.
        get_accelerator().is_fp16_supported = lambda: True
    if job.optimizer == "Muon":
        torch._dynamo.config.disable = True  # compiling would take minutes for code that runs for milliseconds here
    torch.manual_seed(7)
    init: Any = contextlib.nullcontext()
    if job.zero_init == "plain":
        init = deepspeed.zero.Init(dtype=DTYPES[job.dtype])
    elif job.zero_init == "config":
        init = deepspeed.zero.Init(config_dict_or_path=configuration(job, zero))
    with init:
        model = (job.network or Network)(job.sizes, job.checkpointing, job.empty)
    model.unused_as_zeros = job.unused_as_zeros
    groups = parameter_groups(model, job)
    mpu = ModelParallelUnit(job.tensor_parallel) if job.tensor_parallel > 1 else None
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=configuration(job, zero), mpu=mpu)
    return engine, model


def batches(job: Job) -> Iterator[tuple[Tensor, Tensor]]:
    lanes = job.config.get("tensor_parallel", {}).get("autotp_size", 1)  # neighbors, which have one sample together
    generator = torch.Generator().manual_seed(1000 + dist.get_rank() // lanes)
    device, ends = get_accelerator().current_device_name(), (job.sizes[0], job.sizes[-1])
    while True:
        x, y = (torch.randn(2, size, generator=generator).to(device, DTYPES[job.dtype]) for size in ends)
        yield x, y


def micro_step(engine: Any, job: Job, number: int, x: Tensor, y: Tensor) -> float:
    skipped = [layer for at, layer, *ranks in job.skipped if at == number and (not ranks or dist.get_rank() in ranks)]
    if len(skipped) == len(job.sizes) - 1:
        x.requires_grad_()  # otherwise there would be no graph
    loss = ((engine(x, skipped) - y) ** 2).float().mean()
    backward = loss
    if (number, dist.get_rank()) in job.overflow:
        backward = loss * torch.inf
    if job.backward == "engine":
        engine.backward(backward)
    else:
        # The engine divides by the accumulation steps only if it runs the backward itself.
        engine.scale(backward).backward()
    return loss.item()


def step(engine: Any, job: Job, number: int = 0, data: Iterator[tuple[Tensor, Tensor]] | None = None) -> float:
    """Run a micro-step with the next batch, or the first one of ``job``, and ``engine.step()``; return the loss."""
    loss = micro_step(engine, job, number, *next(data or batches(job)))
    engine.step()
    return loss


def begin(job: Job, zero: dict[str, Any]) -> tuple[Any, Network, Iterator[tuple[Tensor, Tensor]]]:
    return *make_engine(job, zero), batches(job)


def make_trained(job: Job, zero: str | dict[str, Any], steps: int = 1, skip: int = 0) -> tuple[Any, nn.Module]:
    """Return an engine and its model after steps of a micro-step each, with batches after the first ``skip``."""
    engine, model = make_engine(job, placed(zero) if isinstance(zero, str) else zero)
    for number, (x, y) in enumerate(itertools.islice(batches(job), skip, skip + steps), 100):  # none that a job names
        micro_step(engine, job, number, x, y)
        engine.step()
    return engine, model


def train(job: Job, zero: dict[str, Any], look: Callable[[Any], None] | None = None) -> Record:
    """Train and return the record; ``look`` sees the engine before it is destroyed."""
    engine, model = make_engine(job, zero)
    data = batches(job)
    record = Record([], torch.empty(0), [], [], [])
    for step in range(job.steps):
        with engine.coalesce_grad_reduction() if job.boundary == "coalesce" else contextlib.nullcontext():
            for number in range(step * job.accumulation, (step + 1) * job.accumulation):
                last = (number + 1) % job.accumulation == 0
                if job.boundary == "user":
                    engine.set_gradient_accumulation_boundary(last)
                with engine.no_sync() if job.no_sync and not last else contextlib.nullcontext():
                    record.losses.append(micro_step(engine, job, number, *next(data)))
                if job.no_sync and not last:
                    engine.micro_steps += 1  # no_sync leaves the counting to the caller
                elif job.boundary == "engine" and not last:
                    engine.step()
        engine.step()
        record.norms.append(float(engine.get_global_grad_norm() or 0.0))
        record.scales.append(float(getattr(engine.optimizer, "loss_scale", 1.0)))  # BF16_Optimizer has none
        record.applied.append(engine.was_step_applied())
    if look is not None:
        look(engine)
    weights, alike = whole_weights(model), all_replicas_equal(engine, model)
    engine.destroy()
    return record._replace(weights=weights, replicas_equal=alike)


def whole_weights(model: nn.Module) -> Tensor:
    """Return all parameters of the model, gathered: 1D, fp32."""
    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return torch.cat([p.detach().float().flatten() for p in parameters])


def replicas_equal(weights: Tensor, group: Any = None) -> bool:
    """Return whether all ranks, or those of a group, hold the same bits."""
    everybody = [torch.empty_like(weights) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybody, weights, group)
    return all(torch.equal(other, weights) for other in everybody)


def all_replicas_equal(engine: Any, model: nn.Module) -> bool:
    """Return whether all ranks that hold a parameter hold the same bits of it; an expert is on some ranks only."""
    kinds: dict[Any, list[nn.Parameter]] = {}
    for param in model.parameters():
        kinds.setdefault(param.group_name if is_moe_param(param) else None, []).append(param)
    alike = []
    for name in sorted(kinds, key=str):
        group = engine.seq_data_parallel_group if name is None else engine.expert_data_parallel_group[name]
        with deepspeed.zero.GatheredParameters(kinds[name]):
            weights = torch.cat([p.detach().float().flatten() for p in kinds[name]])
        alike.append(replicas_equal(weights, group))
    return all(alike)


class Difference(NamedTuple):
    """The differences of a strategy's run from stock DeepSpeed's."""

    strategy: str
    weights: float  # largest difference, relative to the largest weight
    losses: float
    norms: float  # relative
    replicas_equal: bool
    same_decisions: bool  # steps skipped and loss scales
    optimizer: str


def difference(name: str, ours: Record, stock: Record, optimizer: str) -> Difference:
    return Difference(
        name,
        ((ours.weights - stock.weights).abs().max() / stock.weights.abs().max()).item(),
        max(abs(a - b) for a, b in zip(ours.losses, stock.losses, strict=True)),
        max((abs(a - b) / b for a, b in zip(ours.norms, stock.norms, strict=True) if 0 < b < torch.inf), default=0.0),
        ours.replicas_equal,
        (ours.scales, ours.applied) == (stock.scales, stock.applied),
        optimizer,
    )


def check(
    rows: list[Difference],
    weights: float = 1e-5,
    losses: float = 1e-6,
    norms: float | None = None,
    optimizer: str = "",
) -> None:
    """Check whose optimizer ran, and bounds that fp32 rounding stays far below, but errors in gradients exceed."""
    norms = weights if norms is None else norms
    for row in rows:
        kind = optimizer or ("Stage12Optimizer" if row.strategy[0] == "N" else "Stage3Optimizer")
        assert row.optimizer == kind, row
        assert row.weights <= weights and row.losses <= losses and row.norms <= norms, row
        assert row.replicas_equal and row.same_decisions, row


def compare(job: Job, group_size: int, strategies: Sequence[str] = REPLICATED, stage: int = 2) -> list[Difference]:
    """Train stock ``stage`` and each strategy; return the differences."""
    oracle = train(job, {"stage": stage})
    assert torch.isfinite(oracle.weights).all()
    return [beside(oracle, name, job, placed(name, group_size)) for name in strategies]


def against(job: Job, variants: list[dict[str, Any]], oracle: dict[str, Any]) -> list[Difference]:
    """Return the differences of variants of zero_optimization from the oracle's."""
    record = train(job, oracle)
    return [beside(record, str(zero.get("paro_strategy", zero)), job, zero) for zero in variants]


def beside(oracle: Record, name: str, job: Job, zero: dict[str, Any]) -> Difference:
    results: list[str] = []
    ours = train(job, zero, look=lambda engine: results.append(type(engine.optimizer).__name__))
    return difference(name, ours, oracle, results[0])
