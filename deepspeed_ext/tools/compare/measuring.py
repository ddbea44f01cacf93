# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Measures steps, losses and memory inside the ranks of a launch of ``compare``.

Note [A script that is compared]
    The script is not changed. While an engine is constructed, two methods of this object are wrapped: ``backward``
    stores its losses, and ``step`` marks the end of an optimizer step. For a pipeline, ``train_batch`` does both. The
    first engine of a process that ends a step is measured. After the last step all ranks reduce their values, the
    first rank of each node writes the report, and all ranks raise SystemExit(0) from the same call. So the rest of the
    script does not run.
"""

import atexit
import functools
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.comm.agreement import all_reduce, all_reduce_max
from deepspeed_ext.config.section import active_strategy
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.model_bytes import measure_state_bytes
from deepspeed_ext.tools.clocks import Clock, device_name, make_clock
from deepspeed_ext.tools.compare.run_spec import UNFINISHED, RunSpec
from deepspeed_ext.version import __version__

Losses = list[list[Tensor]]  # losses of micro-batches by step; the last step has not ended


class Measurement:
    """The steps of one engine; see Note [A script that is compared].

    Args:
        spec: the turn to measure.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._clock: Clock | None = None
        self._ends: list[Any] = []
        self._engine: Engine | None = None
        self._ended = 0
        self._peak_of_warm_up = 0
        self._written = False

    def watch(self, engine: Engine) -> None:
        """Wrap the methods of an engine that is being constructed."""
        losses: Losses = [[]]
        step = 0

        def after_batch(loss: Any) -> None:
            _record_loss(loss, losses)
            self._end_step(engine, losses)

        def before_step(_: Any) -> None:
            nonlocal step
            step = engine.global_steps

        def after_step(_: Any) -> None:
            if engine.global_steps != step:  # micro-steps do not increase global_steps
                self._end_step(engine, losses)

        if engine.pipeline_parallelism:
            _wrap(engine, "train_batch", after=after_batch)
        else:
            _wrap(engine, "backward", before=lambda loss: _record_loss(loss, losses))
            _wrap(engine, "step", before_step, after_step)

    def _end_step(self, engine: Engine, losses: Losses) -> None:
        # The first engine that ends a step: a script may have others, such as a frozen reference model.
        self._engine = self._engine or engine
        if engine is not self._engine:
            losses[:] = [[]]  # free the losses of an engine that is not measured
            return
        losses.append([])
        self._ended += 1
        peak = get_accelerator().max_memory_allocated()  # on a host, the peak over these calls only
        if self._ended == self._spec.warm_up:
            self._peak_of_warm_up = peak
            get_accelerator().reset_peak_memory_stats()  # ``peak_bytes`` excludes the warm-up
        if self._ended >= self._spec.warm_up:
            self._clock = self._clock or make_clock()  # the script has chosen its device by now
            self._ends.append(self._clock.mark())  # no synchronization, which would prevent overlap with the forward
        if self._ended == self._spec.warm_up + self._spec.steps:
            self._finish(engine, losses)

    def _finish(self, engine: Engine, losses: Losses) -> None:
        """Write the report, and end the script on all ranks. Collective over all ranks."""
        report = {"seconds": self._seconds(), **_memory(engine, self._peak_of_warm_up), **_losses(losses)}
        self._write({**_describe_run(engine), **report})
        dist.barrier()  # no rank may exit while another rank still communicates or writes
        raise SystemExit(0)

    def _seconds(self) -> list[float]:
        """Return the seconds between consecutive ends of steps."""
        assert self._clock is not None
        self._clock.settle()
        return [end - begin for begin, end in itertools.pairwise(map(self._clock.seconds, self._ends))]

    def write_unfinished(self) -> None:
        """If the script ends before its last step, write its number of steps."""
        if not self._written:
            self._write({UNFINISHED: self._ended})

    def _write(self, report: dict[str, Any]) -> None:
        """Write the report on the first rank of each node that has the folder: all nodes, on a shared file system."""
        self._written = True
        path = Path(self._spec.report)
        if os.environ.get("LOCAL_RANK", "0") == "0" and path.parent.is_dir():
            temporary = path.with_name(f".{path.name}.{os.environ.get('RANK', '0')}")
            temporary.write_text(json.dumps(report))
            temporary.replace(path)


_measurement: Measurement | None = None


def watch(engine: Engine, spec: RunSpec) -> None:
    """Measure the steps of an engine that is being constructed, or of another engine of this process.

    Args:
        engine: a DeepSpeedEngine with its configuration.
        spec: the turn to measure.
    """
    global _measurement
    if _measurement is None:
        _measurement = Measurement(spec)
        atexit.register(_measurement.write_unfinished)
    _measurement.watch(engine)


def _wrap(
    engine: Engine,
    name: str,
    before: Callable[[Any], None] = lambda _: None,
    after: Callable[[Any], None] = lambda _: None,
) -> None:
    """Call functions before a method of an engine, with its first argument, and after it, with its result."""
    method = getattr(engine, name)

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before(args[0] if args else kwargs.get("loss"))
        result = method(*args, **kwargs)
        after(result)
        return result

    setattr(engine, name, wrapped)


def _record_loss(loss: Any, losses: Losses) -> None:
    if isinstance(loss, Tensor) and loss.numel() == 1:
        losses[-1].append(loss.detach().reshape(()).clone())  # the script may reuse the loss's memory


def _describe_run(engine: Engine) -> dict[str, Any]:
    """Return the configuration of the run, the same on all ranks."""
    strategy = active_strategy(engine._config)
    dtype, _ = engine.get_data_types()
    return {
        "strategy": f"ZeRO-{engine.zero_optimization_stage()}" if strategy is None else strategy.name,
        "ranks": dist.get_world_size(),
        "device": device_name(),
        "dtype": str(dtype).removeprefix("torch."),
        "samples": engine.train_batch_size(),
        "micro_batches": engine.gradient_accumulation_steps(),
        "skipped_steps": engine.skipped_steps,
        "versions": {"deepspeed_ext": __version__, "deepspeed": deepspeed.__version__, "torch": torch.__version__},
    }


def _memory(engine: Engine, before: int) -> dict[str, int]:
    """Return the maximum bytes over all ranks. Collective.

    Args:
        engine: the measured engine.
        before: this rank's peak until the end of the warm-up.
    """
    peak = get_accelerator().max_memory_allocated()
    states = measure_state_bytes(engine)
    values = [peak, max(peak, before), int(states.parameters), int(states.optimizer)]
    names = "peak_bytes", "peak_bytes_of_run", "parameter_bytes", "optimizer_bytes"
    return dict(zip(names, map(int, all_reduce_max(torch.tensor(values)).tolist()), strict=True))


def _losses(losses: Losses) -> dict[str, list[float | None]]:
    """Return the loss of each step: the mean over micro-batches and ranks that have losses, and rank 0's.

    It is None for a step without losses. Collective.
    """
    ended = losses[:-1]
    has_loss = torch.tensor([bool(step_losses) for step_losses in ended])
    means = [
        torch.stack(step_losses).double().mean().cpu() if step_losses else torch.zeros((), dtype=torch.double)
        for step_losses in ended
    ]
    own_means = torch.stack(means)
    first = has_loss & (dist.get_rank() == 0)
    rows = [torch.where(kind, own_means, 0.0) for kind in (has_loss, first)] + [has_loss.double(), first.double()]
    # Ranks without a loss add zeros, and are not counted in the mean.
    sums, of_first, ranks, has_first = all_reduce(torch.stack(rows), dist.ReduceOp.SUM).tolist()
    return {
        "losses": [total / count if count else None for total, count in zip(sums, ranks, strict=True)],
        "losses_of_rank_0": [loss if has else None for loss, has in zip(of_first, has_first, strict=True)],
    }
