# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Trains a drawn case, and records the values for a comparison; inside rank processes only."""

import contextlib
import gc
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.leaf.windows import windowed_modules
from tests.campaigns.fuzz.cases import Case
from tests.campaigns.fuzz.events import EVENTS, SHARED
from tests.campaigns.fuzz.run import Run, job_of, live_bytes
from tests.harness import networks, training
from tests.harness.stream_order import Order


@dataclass
class Trained:
    """The final state of a run, in plain values and tensors."""

    # losses, norms, scales, applied: of micro-steps and evaluations; of steps.
    losses: list[float]
    norms: list[float]
    scales: list[float]
    applied: list[bool]
    states: dict[str, Tensor]  # see ``tests.harness.snapshots.snapshot``
    weights: Tensor  # weights of all parameters, in one dimension and fp32
    replicas_equal: bool  # whether all ranks that hold a parameter hold the same bits
    held: list[int]  # bytes of tensors that live after each step
    left: int = 0  # bytes of tensors that live longer than the engine and the model
    windows: int = 0  # modules with packed experts that are fetched in windows


def _run(run: Run) -> None:
    for step in run.case.steps:
        for event in step.before:
            if run.ours or event.name in SHARED:
                EVENTS[event.name](run, event.value)
        run.step(step)
        run.norms.append(run.engine.get_global_grad_norm())
        run.scales.append(float(getattr(run.engine.optimizer, "loss_scale", 1.0)))
        run.applied.append(run.engine.was_step_applied())
        if run.order is None:
            run.held.append(live_bytes())


def _record(run: Run) -> Trained:
    """Return the current values for a comparison."""
    return Trained(
        [loss.item() for loss in run.losses],
        [float(norm or 0.0) for norm in run.norms],
        run.scales,
        run.applied,
        run.states() if run.order is None else {},
        training.whole_weights(run.model),
        training.all_replicas_equal(run.engine, run.model) if run.case.tensor_parallel == 1 else True,
        run.held,
        windows=len(windowed_modules(run.model)),
    )


def train(case: Case, zero: dict[str, Any], ours: bool, order: Order | None = None) -> Trained:
    """Train a case. ``ours``: whether events that must change nothing take place; ``order`` checks all accesses."""
    gc.collect()
    before = live_bytes()
    with contextlib.nullcontext() if order is None else order.watch():
        run = Run(case, zero, ours, order)
        _run(run)
    trained = _record(run)
    run.destroy()
    del run
    # What the record itself has is no remainder.
    retained = sum(item.untyped_storage().nbytes() for item in (*trained.states.values(), trained.weights))
    trained.left = _settled() - before - retained
    return trained


def _settled() -> int:
    """Bytes of all tensors, once they stay the same: the last that groups have sent are let go of a little later."""
    live = -1
    while True:
        gc.collect()
        last, live = live, live_bytes()
        if live == last:
            return live
        time.sleep(0.02)


def first_weights(case: Case) -> Tensor:
    """Return the initial weights of a case, as ``Trained.weights``; of the last restart, if there is one."""
    torch.manual_seed(7)
    model = job_of(case).network(networks.SQUARE, None, case.empty)
    return torch.cat([p.detach().to(training.DTYPES[case.dtype]).float().flatten() for p in model.parameters()])
