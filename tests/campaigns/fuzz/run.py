# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""An engine in training, with events between its steps; inside rank processes only."""

import contextlib
import dataclasses
import gc
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor, nn

from tests.campaigns.fuzz.cases import Case, Step
from tests.campaigns.fuzz.models import Choosing, Drawn, Packed
from tests.harness import networks, snapshots, stream_cases, training
from tests.harness.stream_order import Order


def job_of(case: Case) -> training.Job:
    """The job of ``tests.harness.training`` that a case is."""

    def make(sizes: Any, checkpointing: Any, empty: bool) -> nn.Module:
        return Drawn(case)

    same = ("empty", "accumulation", "dtype", "optimizer", "clipping", "groups", "backward", "boundary", "no_sync")
    return training.Job(
        sizes=networks.SQUARE if case.network else (case.inputs, case.outputs),
        network=getattr(networks, case.network) if case.network else make,
        **{name: getattr(case, name) for name in (*same, "tensor_parallel", "zero_init", "config")},
    )


def live_bytes() -> int:
    """Of all tensors that the garbage collector sees, each memory once."""
    storages = {}
    for entry in gc.get_objects():
        if type(entry) in (Tensor, nn.Parameter):
            storage = entry.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


class Sampled(nn.Module):
    """Some parameters of a model, by their names, and all buffers: each costs several collectives to look at."""

    def __init__(self, model: nn.Module, most: int = 6) -> None:
        super().__init__()
        named = list(model.named_parameters())
        self._named = named[:: -(-len(named) // most)]
        self._buffers_of = list(model.named_buffers())

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return iter(self._named)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return iter(self._buffers_of)


@dataclass
class Run:
    """An engine in training."""

    case: Case
    zero: dict[str, Any]  # keys of zero_optimization
    ours: bool  # whether events that must change nothing take place
    order: Order | None = None  # order of a device with streams, or none
    losses: list[Tensor] = field(default_factory=list)
    norms: list[Any] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    applied: list[bool] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)  # values that events have read
    stepped: bool = False  # whether there are optimizer states

    def __post_init__(self) -> None:
        self.job = job_of(self.case)
        self.data = training.batches(self.job)
        self.parts = contextlib.ExitStack()
        self.calls = 0
        self._make({})

    def make_engine(self, config: dict[str, Any]) -> tuple[Any, nn.Module]:
        """Return engine and model, with further keys; under zero.Init only sharded parameters can be trained."""
        zero_init = self.job.zero_init if dataclasses.replace(self.case, zero=self.zero).stage == 3 else None
        job = dataclasses.replace(self.job, config={**self.job.config, **config}, zero_init=zero_init)
        return training.make_engine(job, self.zero)

    def _make(self, config: dict[str, Any]) -> None:
        self.engine, self.model = self.make_engine(config)
        if self.order is not None:
            self.order.synchronize()  # what makes an engine is not looked at
            self.parts.enter_context(stream_cases.stepping_on_host(self.engine, self.order))

    def make_anew(self, zero: dict[str, Any] | None = None, config: dict[str, Any] | None = None) -> None:
        """Destroy the engine and make another one, perhaps with other keys."""
        self.destroy()
        self.zero = self.zero if zero is None else zero
        self.stepped = False
        self._make(config or {})

    def destroy(self) -> None:
        self.parts.close()
        self.engine.destroy()
        del self.engine, self.model
        gc.collect()

    def set_calls(self, model: nn.Module, calls: int) -> None:
        for module in model.modules():
            if isinstance(module, Choosing | Packed):
                module.calls = calls

    def step(self, step: Step) -> None:
        case, engine = self.case, self.engine
        count = step.micro_steps or case.accumulation
        with engine.coalesce_grad_reduction() if case.boundary == "coalesce" else contextlib.nullcontext():
            for number in range(count):
                last = number + 1 == count
                if case.boundary == "user":
                    engine.set_gradient_accumulation_boundary(last)
                with engine.no_sync() if case.no_sync and not last else contextlib.nullcontext():
                    self._micro_step(step, number)
                if case.no_sync and not last:
                    engine.micro_steps += 1  # no_sync leaves the counting to the caller
                elif case.boundary in ("engine", "user") and not last:
                    engine.step()
        engine.step()
        self.stepped = self.stepped or engine.was_step_applied()

    def _micro_step(self, step: Step, number: int) -> None:
        x, y = next(self.data)
        self.calls += 1
        self.set_calls(self.model, self.calls)
        skipped = [block for at, block in step.skipped if at == number]
        loss = ((self.engine(x, skipped) - y) ** 2).float().mean()
        self.losses.append(loss.detach())
        if (number, dist.get_rank()) in step.overflow:
            loss = loss * torch.inf
        parts = (0.25, 0.75) if number in step.twice else (1.0,)
        for i, part in enumerate(parts):
            last = i + 1 == len(parts)
            scaled = loss if part == 1.0 else loss * part
            if self.case.backward == "engine":
                self.engine.backward(scaled, retain_graph=not last)
            else:  # the engine divides by the accumulation steps where it runs the backward itself
                self.engine.scale(scaled).backward(retain_graph=not last)

    def states(self) -> dict[str, Tensor]:
        """All that is saved; nothing where there is none yet, or no ZeRO."""
        # Of stock's stages 1 and 2 with Muon, some ranks raise where others wait for them.
        without = "stage" in self.zero and (self.job.optimizer == "Muon" or self.zero["stage"] == 0)
        if not self.stepped or (without and not self.ours):
            return {}
        return snapshots.snapshot(self.engine, Sampled(self.model), self.job)
