# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs that save wherever a save may be called; everything here runs inside rank processes. ``twins`` trains the same
run twice, once with synchronous saves and once with asynchronous saves whose copies are late, and compares files and
losses. So code that changes states right after a save, without waiting, changes its files."""

import dataclasses
import io
import secrets
import time
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed import utils
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import Init
from torch import nn

from deepspeed_ext import outer_weights
from deepspeed_ext.checkpoint.folder import RECORD
from deepspeed_ext.checkpoint.snapshots import Snapshot
from tests.harness import calls, pipelines, snapshots, training

ASIDE: dict[str, Any] = {"checkpoint": {"async_save": True}}
KINDS = ("at once", "aside")
LATE = 0.05  # seconds
Save = Callable[[str], None]


def files_below(folder: str | Path, read: Callable[[Path], bytes] = Path.read_bytes) -> dict[str, bytes]:
    """Content of each file, by its path; ``read`` returns it."""
    results = (path for path in sorted(Path(folder).rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): read(path) for path in results}


def as_from_host(path: Path) -> bytes:
    """Return the content that a file would have if its tensors had been on the host during the save."""
    if path.suffix != ".pt":
        return b"" if path.name == RECORD else path.read_bytes()
    saved = io.BytesIO()
    torch.save(torch.load(path, map_location="cpu", weights_only=False), saved)
    return saved.getvalue()


def late_copies(seconds: float = LATE) -> Any:
    """Let threads that write complete snapshots later, in this context."""
    return calls.before(Snapshot, "complete_copies", lambda _: time.sleep(seconds))


class Twins(NamedTuple):
    """The comparison of two runs."""

    different: list[str]  # tags of which files differ
    files: int  # how many there are
    same: bool  # whether all losses and errors are equal
    raised: list[str]  # errors of the run with asynchronous saves


class Run:
    """A training that saves its checkpoints in a folder."""

    def __init__(self, engine: Any, model: nn.Module, job: Any, folder: str) -> None:
        self.engine, self.model, self.job, self.folder = engine, model, job, folder
        self.losses: list[float] = []
        self.raised: list[str] = []
        self._data, self._numbers = training.batches(job), count()

    def save(self, tag: str) -> None:
        self.engine.save_checkpoint(self.folder, tag, {"tag": tag})

    def around_a_load(self) -> None:
        """Save after a step, load another checkpoint at once, save, and continue."""
        self.step()
        self.save("before a load")
        self.engine.load_checkpoint(self.folder, "after a step")
        self.save("after a load")
        self.step()

    def try_to(self, act: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        message = snapshots.error_of(act, *args, **kwargs)
        if message:
            self.raised.append(message.replace(self.folder, ""))

    def micro_step(self) -> None:
        self.losses.append(training.micro_step(self.engine, self.job, next(self._numbers), *next(self._data)))

    def step(self) -> None:
        with self.engine.coalesce_grad_reduction() if self.job.boundary == "coalesce" else nullcontext():
            for remaining in reversed(range(self.job.accumulation)):
                if self.job.boundary == "user":
                    self.engine.set_gradient_accumulation_boundary(not remaining)
                self.micro_step()
                if remaining and self.job.boundary == "engine":
                    self.engine.step()
        self.engine.step()

    def steps_until_one_raises(self, most: int = 500) -> None:
        """Take at most this number of steps, which under load may take less time than a save."""
        for _ in range(most):
            self.step()

    def everything(self) -> None:
        """Save at each possible point, each time followed at once by another operation."""
        self.save("new")
        self.step()
        self.save("after a step")
        self.micro_step()
        self.save("in an accumulation")
        self.engine.step()
        self.micro_step()
        self.save("after a backward")
        self.engine.step()
        sets = (self.set_weights, self.set_states, self.set_local_weights, self.set_local_states)
        for change in (*sets, self.edit, self.refresh):
            self.save(f"before {change.__name__}")
            change()
        self.around_a_load()
        with outer_weights(self.engine):
            self.try_to(self.save, "outer weights")
        self.offload()
        self.step()
        self.save("last")

    def offload(self) -> None:
        """Move states to the host, where a save may be refused, and back."""
        if self.job.zero.get("offload_optimizer"):
            return
        fused = "deepspeed.ops.adam.fused_adam.FusedAdam"  # DeepSpeed's stage 3 moves no others
        with mock.patch(fused, type(self.engine.optimizer.optimizer)):
            self.save("before an offload")
            self.try_to(self.engine.offload_states, pin_memory=False)
            self.try_to(self.save, "offloaded")
            self.engine.reload_states()

    def _trained(self) -> list[nn.Parameter]:
        """Two parameters, one of which most ranks have elements of."""
        results = [param for param in self.model.parameters() if param.requires_grad and _numel(param)]
        return [max(results, key=_numel), results[0]]

    def _state(self, param: Any) -> str:
        return snapshots.MUON[param.use_muon][0] if self.job.optimizer == "Muon" else "exp_avg"

    def set_weights(self) -> None:
        for param in self._trained():
            utils.safe_set_full_fp32_param(param, utils.safe_get_full_fp32_param(param) * 1.125)

    def set_states(self) -> None:
        for param in self._trained():
            value = utils.safe_get_full_optimizer_state(param, self._state(param))
            if value is not None:
                self.try_to(utils.safe_set_full_optimizer_state, param, value + 0.125, self._state(param))

    def set_local_weights(self) -> None:
        for param in self._local():
            self.try_to(utils.safe_set_local_fp32_param, param, utils.safe_get_local_fp32_param(param) * 1.125)

    def set_local_states(self) -> None:
        for param in self._local():
            value = utils.safe_get_local_optimizer_state(param, self._state(param)) + 0.125
            self.try_to(utils.safe_set_local_optimizer_state, param, value, self._state(param))

    def _local(self) -> list[nn.Parameter]:
        """Those that have a local part, as DeepSpeed takes it."""
        sharded = [param for param in self._trained() if hasattr(param, "ds_id")]
        local = utils.safe_get_local_fp32_param
        return [param for param in sharded if local(param).numel() == param.ds_tensor.numel()]

    def refresh(self) -> None:
        self.engine.optimizer.refresh_fp32_params()

    def edit(self) -> None:
        """As scripts do: weights, buffers and hyperparameters, in place."""
        with deepspeed.zero.GatheredParameters(self._trained(), modifier_rank=0):
            for param in self._trained():
                param.data.mul_(1.125)
        for buffer in self.model.buffers():
            buffer.add_(1)
        for group in self.engine.optimizer.param_groups:
            group["weight_decay"] = 0.125


def _numel(param: Any) -> int:
    return int(getattr(param, "ds_numel", param.numel()))


class PipelineRun(Run):
    """The same of a pipeline, which has its micro-steps to itself."""

    def __init__(self, engine: Any, job: pipelines.Pipe, folder: str) -> None:
        super().__init__(engine, engine.module, _AS_JOB[job.optimizer == "Muon"], folder)
        self._batches = pipelines.batches(engine.grid.get_data_parallel_rank())

    def step(self) -> None:
        self.losses.append(float(self.engine.train_batch(self._batches)))

    def everything(self) -> None:
        """Save between steps, each time followed at once by another operation."""
        self.step()
        self.save("after a step")
        self.step()
        for change in (self.set_weights, self.set_states, self.edit):
            self.save(f"before {change.__name__}")
            change()
        self.around_a_load()
        self.save("last")


_AS_JOB = {False: training.Job(optimizer="Adam"), True: training.Job(optimizer="Muon")}


def twins(folder: str, make: Callable[[str], Run], read: Callable[[Path], bytes] = Path.read_bytes) -> Twins:
    """Make and run two runs that save into a folder, and compare the part of each file that ``read`` returns."""
    runs = []
    # Differs between calls, because channels with one number would share keys of the store.
    number = zlib.crc32(folder.encode())
    with mock.patch.object(secrets, "randbits", lambda bits: number), late_copies():
        for kind in KINDS:
            Init.param_id = 0  # ZeRO-3 numbers the parameters of a process, and files have the numbers
            runs.append(make(f"{folder}/{kind}"))
            if kind == KINDS[0]:
                runs[0].engine.checkpoint_engine.async_saves = None
            runs[-1].everything()
            runs[-1].engine.destroy()
            dist.barrier()
    item, two = (files_below(f"{folder}/{kind}", read) for kind in KINDS)
    outcomes = [(run.losses, run.raised) for run in runs]
    different = [name for name in item.keys() | two.keys() if item.get(name) != two.get(name)]
    tags = sorted({Path(name).parts[0] for name in different})
    return Twins(tags, len(item), outcomes[0] == outcomes[1], runs[1].raised)


def twins_case(folder: str, name: str, job: training.Job, group_size: int = 2, kind: type[Run] = Run) -> Twins:
    """Compare two runs of a strategy, with the steps and saves of a ``kind``. With a device, files are compared
    ``as_from_host``: they contain device names."""

    def make(into: str) -> Run:
        engine, model = training.make_engine(job, training.placed(name, group_size))
        snapshots.mark(engine, model)
        return kind(engine, model, job, into)

    return twins(folder, make, Path.read_bytes if get_accelerator().is_synchronized_device() else as_from_host)


def job_of_row(dtype: str, zero: dict[str, Any], optimizer: str = "Adam") -> training.Job:
    """Two micro-steps a step, two parameter groups, a frozen layer, a buffer; in fp16 an overflow."""
    more = {"zero_force_ds_cpu_optimizer": False} if "offload_optimizer" in zero else {}
    job: training.Job = snapshots.job_of(dtype, zero, optimizer, **ASIDE, **more)
    return dataclasses.replace(job, accumulation=2)


def pipeline_case(folder: str, name: str, pipe: pipelines.Pipe, group_size: int = 2) -> Twins:
    keys = training.placed(name, group_size)
    return twins(folder, lambda into: PipelineRun(pipelines.make_pipeline(pipe, keys), pipe, into))
