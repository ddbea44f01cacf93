# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What a launch of ``compare`` measures inside its ranks.

Note [A script that is compared]
    The script is not changed. While an engine is made, two methods of that one object are wrapped: ``backward`` keeps
    the losses that it is given, and ``step`` notes when an optimizer step has ended. Of a pipeline, ``train_batch``
    does both. The first engine of a process that ends a step is the one that is measured. After the last step all
    ranks bring their numbers together, the first rank of each node writes the report, and all raise SystemExit(0) out
    of the same call. So nothing of the script that follows runs.
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

from deepspeed_ext.comm.agreement import all_reduce_max, all_reduced
from deepspeed_ext.config.section import active_strategy
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.model_bytes import held
from deepspeed_ext.tools.clocks import Clock, device_name, make_clock
from deepspeed_ext.tools.compare.turn import UNFINISHED, Turn
from deepspeed_ext.version import __version__

Losses = list[list[Tensor]]  # of each step its micro-batches, of which the last step has not ended


class Measurement:
    """The steps of one engine; see Note [A script that is compared].

    Args:
        turn: what to measure.
    """

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._clock: Clock | None = None
        self._ends: list[Any] = []
        self._engine: Engine | None = None
        self._ended = 0
        self._peak_of_warm_up = 0
        self._written = False

    def watch(self, engine: Engine) -> None:
        """Wrap the methods of an engine that is being made."""
        losses: Losses = [[]]
        step = 0

        def after_batch(loss: Any) -> None:
            _keep(loss, losses)
            self._end_step(engine, losses)

        def before_step(_: Any) -> None:
            nonlocal step
            step = engine.global_steps

        def after_step(_: Any) -> None:
            if engine.global_steps != step:  # and not after one of the micro-steps before
                self._end_step(engine, losses)

        if engine.pipeline_parallelism:
            _wrap(engine, "train_batch", after=after_batch)
        else:
            _wrap(engine, "backward", before=lambda loss: _keep(loss, losses))
            _wrap(engine, "step", before_step, after_step)

    def _end_step(self, engine: Engine, losses: Losses) -> None:
        self._engine = self._engine or engine
        if engine is not self._engine:
            losses[:] = [[]]  # of an engine that is not measured
            return
        losses.append([])
        self._ended += 1
        peak = get_accelerator().max_memory_allocated()  # on hosts only what is seen here
        if self._ended == self._turn.warm_up:
            self._peak_of_warm_up = peak
            get_accelerator().reset_peak_memory_stats()
        if self._ended >= self._turn.warm_up:
            self._clock = self._clock or make_clock()  # not before the script has chosen its device
            self._ends.append(self._clock.mark())  # nobody waits, so what runs under the next forward does so
        if self._ended == self._turn.warm_up + self._turn.steps:
            self._finish(engine, losses)

    def _finish(self, engine: Engine, losses: Losses) -> None:
        """Write the report, and end the script on all ranks. Collective over all ranks."""
        report = {"seconds": self._seconds(), **_memory(engine, self._peak_of_warm_up), **_losses(losses)}
        self._write({**_described(engine), **report})
        dist.barrier()  # no rank is gone while another one still sends, or writes
        raise SystemExit(0)

    def _seconds(self) -> list[float]:
        """Return the seconds from each end of a step to the next one."""
        assert self._clock is not None
        self._clock.settle()
        return [end - begin for begin, end in itertools.pairwise(map(self._clock.seconds, self._ends))]

    def say_unfinished(self) -> None:
        """Write how many steps the script has taken, where it ends before it has taken all."""
        if not self._written:
            self._write({UNFINISHED: self._ended})

    def _write(self, report: dict[str, Any]) -> None:
        """Write on the first rank of a node, if that has the folder: all of them, on a file system that they share."""
        self._written = True
        path = Path(self._turn.report)
        if os.environ.get("LOCAL_RANK", "0") == "0" and path.parent.is_dir():
            aside = path.with_name(f".{path.name}.{os.environ.get('RANK', '0')}")
            aside.write_text(json.dumps(report))
            aside.replace(path)


_measurement: Measurement | None = None


def watch(engine: Engine, turn: Turn) -> None:
    """Measure the steps of an engine that is being made, or of another one of this process.

    Args:
        engine: a DeepSpeedEngine that knows its configuration.
        turn: what to measure.
    """
    global _measurement
    if _measurement is None:
        _measurement = Measurement(turn)
        atexit.register(_measurement.say_unfinished)
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


def _keep(loss: Any, losses: Losses) -> None:
    if isinstance(loss, Tensor) and loss.numel() == 1:
        losses[-1].append(loss.detach().reshape(()).clone())  # its memory may be used again


def _described(engine: Engine) -> dict[str, Any]:
    """Return what ran, the same on all ranks."""
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
    """Return bytes on the rank with the most. Collective.

    Args:
        engine: what is measured.
        before: the peak until the end of the warm-up on this rank.
    """
    peak = get_accelerator().max_memory_allocated()
    states = held(engine)
    values = [peak, max(peak, before), int(states.parameters), int(states.optimizer)]
    names = "peak_bytes", "peak_bytes_of_run", "parameter_bytes", "optimizer_bytes"
    return dict(zip(names, map(int, all_reduce_max(torch.tensor(values)).tolist()), strict=True))


def _losses(losses: Losses) -> dict[str, list[float | None]]:
    """Return the loss of each step: the mean over micro-batches and those ranks that were given one, and rank 0's.

    It is None where nobody was given one. Collective.
    """
    ended = losses[:-1]
    given = torch.tensor([bool(some) for some in ended])
    means = [
        torch.stack(some).double().mean().cpu() if some else torch.zeros((), dtype=torch.double) for some in ended
    ]
    mine = torch.stack(means)
    first = given & (dist.get_rank() == 0)
    rows = [torch.where(kind, mine, 0.0) for kind in (given, first)] + [given.double(), first.double()]
    sums, of_first, ranks, has_first = all_reduced(torch.stack(rows), dist.ReduceOp.SUM).tolist()
    return {
        "losses": [total / count if count else None for total, count in zip(sums, ranks, strict=True)],
        "losses_of_rank_0": [one if has else None for one, has in zip(of_first, has_first, strict=True)],
    }
