# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Everything that a checkpoint must restore, whole and comparable between strategies and numbers of ranks. Everything
here runs inside rank processes."""

import contextlib
import io
import subprocess
import tempfile
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import numpy as np
import torch
from deepspeed import comm as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.moe.utils import is_moe_param
from deepspeed.utils import groups, safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, nn

from deepspeed_ext.checkpoint import to_universal
from deepspeed_ext.zero.optimizer import ParoOptimizer
from tests.harness import experts, training

CLIENT_STATE = {"epoch": 5, "day": date(2026, 1, 2), "rate": timedelta(1), "path": Path("a/b"), "seen": Counter("aab")}
CLIENT_STATE |= {"best": OrderedDict(loss=np.float64(0.5)), "time": datetime(2026, 1, 2, tzinfo=timezone.utc)}
MOMENTS = {"Adam": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",)}
MUON = {True: MOMENTS["SGD"], False: MOMENTS["Adam"]}  # whether it takes a parameter

SHARD = "zero_pp_rank_1_mp_rank_00_optim_states.pt"  # the file of a tag that rank 1 writes, whatever the strategy


class Buffered(training.Network):
    """With a buffer that each forward changes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor, skipped: Sequence[int] = ()) -> Tensor:
        self.seen.add_(1.0)
        return super().forward(x, skipped)


def job_of(dtype: str = "fp32", zero: dict[str, Any] | None = None, optimizer: str = "Adam", **more: Any) -> Any:
    """Two parameter groups, a frozen layer, a buffer, a scheduler; a loss scale that has changed."""
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 10}}
    same: dict[str, Any] = {"groups": 2, "frozen": (1,), "empty": False, "network": Buffered}
    same |= {"zero": {**training.SMALL, **(zero or {})}, "config": {"scheduler": scheduler, **more}}
    return training.Job(dtype=dtype, optimizer=optimizer, overflow=[(1, 1)] if dtype == "fp16" else [], **same)


def job_of_kind(kind: str, dtype: str, **config: Any) -> Any:
    """With an optimizer, or with AutoEP's experts divided among as many ranks as ``kind`` begins with."""
    if not kind[0].isdigit():
        return job_of(dtype, optimizer=kind, **config)
    size, _, optimizer = kind.partition(" ")
    zero = {"reduce_bucket_size": 3000, "allgather_bucket_size": 3000, "stage3_param_persistence_threshold": 0}
    config |= experts.autoep(int(size))
    network = experts.SmallMixtral
    return training.Job((13, 7), network=network, optimizer=optimizer, zero=zero, config=config, dtype=dtype)


def steps_of(job: training.Job, number: int, skip: int = 0) -> list[tuple[Tensor, Tensor]]:
    """This rank's batches of ``number`` optimizer steps, after the first ``skip``."""
    data = training.batches(job)
    return [next(data) for _ in range(skip + number)][skip:]


def mark(engine: Any, model: nn.Module) -> None:
    """Change values that the seed sets and training does not change: frozen parameters and hyperparameters."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    with deepspeed.zero.GatheredParameters(frozen, modifier_rank=0):
        for parameter in frozen:
            parameter.data.mul_(1.5)
    for number, group in enumerate(engine.optimizer.param_groups):
        group["weight_decay"] = 0.01 * (number + 1)


def run(engine: Any, job: training.Job, steps: Sequence[tuple[Tensor, Tensor]], first: int = 100) -> list[float]:
    """Train, a micro-step each, which count from ``first``; the losses."""
    losses = []
    for number, (x, y) in enumerate(steps, first):
        losses.append(training.micro_step(engine, job, number, x, y))
        engine.step()
    return losses


def snapshot(engine: Any, model: nn.Module, job: training.Job) -> dict[str, Tensor]:
    """All that is saved, by name: whole tensors in the precision in which they are held; numbers as tensors."""
    observed: dict[str, Tensor] = {}
    ours = isinstance(engine.optimizer, ParoOptimizer)
    if not ours and hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # Stock's stages 1 and 2 link the states of all parameter groups when only the first has stepped.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    parameters = dict(model.named_parameters())
    # Momentum of whole matrices, which stock's stages 1 and 2 keep without offload, they show to nobody.
    hidden = MUON[True] if not ours and not getattr(engine.optimizer, "cpu_offload", True) else ()
    for name, param in parameters.items():
        if param.requires_grad and getattr(param, "ds_numel", param.numel()):
            observed[f"{name} fp32"] = _all_experts(param, safe_get_full_fp32_param(param))
            for moment in MUON[param.use_muon] if job.optimizer == "Muon" else MOMENTS[job.optimizer]:
                if job.optimizer != "Muon" or moment not in hidden:
                    observed[f"{name} {moment}"] = _all_experts(param, safe_get_full_optimizer_state(param, moment))
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        observed.update({f"{name} model": _all_experts(param, param) for name, param in parameters.items()})
    observed.update({f"{name} buffer": buffer.clone() for name, buffer in model.named_buffers()})
    optimizer = engine.optimizer
    for number, group in enumerate(optimizer.param_groups):
        observed[f"hyperparameters {number}"] = torch.tensor([group["lr"], group.get("weight_decay", 0.0)])
    counts = [torch.as_tensor(state["step"]) for state in optimizer.optimizer.state.values() if "step" in state]
    observed["steps"] = torch.stack([count.float() for count in counts]).unique() if counts else torch.empty(0)
    observed["counters"] = torch.tensor([engine.global_steps, engine.global_samples, engine.skipped_steps])
    observed["loss scale"] = torch.tensor(float(getattr(optimizer, "loss_scale", 1.0)))
    return observed


def _all_experts(parameter: nn.Parameter, mine: Tensor) -> Tensor:
    """Return a copy of a tensor like ``parameter``; of AutoEP's experts, with those of other ranks. Collective."""
    if not is_moe_param(parameter):
        return mine.detach().clone()
    group = groups._get_expert_parallel_group(parameter.group_name)
    parts = [torch.empty_like(mine.detach()) for _ in range(dist.get_world_size(group=group))]
    dist.all_gather(parts, mine.detach().contiguous(), group=group)
    return torch.cat(parts)


def resume(place: str, job: Any, keys: dict[str, Any], first: int, last: int, later: Any = None) -> tuple[Any, ...]:
    """Save after the first steps and train to the last; then load, and continue from there with ``later`` keys. Return
    the saved states, differences after the load, and differences at the end."""
    engine, model = training.make_engine(job, keys)
    mark(engine, model)
    run(engine, job, steps_of(job, first), first=0)
    engine.save_checkpoint(place, client_state=CLIENT_STATE)
    saved = snapshot(engine, model, job)
    losses = run(engine, job, steps_of(job, last - first, skip=first))
    full = snapshot(engine, model, job)
    engine.destroy()
    dist.barrier()
    engine, model = training.make_engine(job, {**keys, **(later or {})})
    run(engine, job, steps_of(job, 2, skip=last + 2))  # something to be overwritten
    path, client_state = engine.load_checkpoint(place)
    assert path and client_state.items() >= CLIENT_STATE.items()
    loaded = difference(saved, snapshot(engine, model, job))
    again = run(engine, job, steps_of(job, last - first, skip=first))
    resumed = difference(full, snapshot(engine, model, job))
    assert again == losses, (again, losses)
    engine.destroy()
    return saved, loaded, resumed


def difference(one: dict[str, Tensor], two: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference of each thing that differs; infinite where the shapes do, or one has no such thing."""
    results = {}
    for name in one.keys() | two.keys():
        if name not in one or name not in two or one[name].shape != two[name].shape:
            results[name] = torch.inf
        elif not torch.equal(one[name], two[name]):
            results[name] = (one[name].double() - two[name].double()).abs().max().item()
    return results


def error_of(act: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the type and message of the error that a call raises on this rank; empty without one."""
    try:
        act(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """Yield a new folder, the same on all ranks; removed afterwards."""
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared, src=0)
        yield shared[0]
        dist.barrier()


def on_first_rank(act: Callable[..., Any], *args: Any) -> None:
    """Call a function on the first rank, while the others wait. Collective."""
    dist.barrier()
    if dist.get_rank() == 0:
        act(*args)
    dist.barrier()


def convert(folder: str, ours: bool = False) -> None:
    """Run a converter on the first rank, DeepSpeed's or ours. Collective."""
    try:
        if dist.get_rank() == 0:
            source = Path(folder) / Path(folder, "latest").read_text()
            _convert(source, Path(f"{source}_universal"), ours)
    finally:
        dist.barrier()


def _convert(source: Path, target: Path, ours: bool) -> None:
    arguments = Namespace(input_folder=str(source), output_folder=str(target), keep_temp_folder=False)
    arguments.num_extract_workers = arguments.num_merge_workers = 1
    arguments.strict = arguments.inject_missing_state = True
    with contextlib.redirect_stdout(io.StringIO()):
        (to_universal.convert if ours else ds_to_universal.main)(arguments)


@contextlib.contextmanager
def converting_here() -> Iterator[None]:
    """Let loads convert in this process within the context, which takes less time than in a new one."""

    def run(command: list[str], **_: Any) -> Any:
        _convert(Path(command[-3]), Path(command[-1]), ours=True)
        return subprocess.CompletedProcess(command, 0, "")

    with mock.patch.object(subprocess, "run", run):
        yield
