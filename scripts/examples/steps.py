# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps of DeepSpeed engines, as any script takes them, with their times."""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor


@dataclass
class TimedStep:
    """The mean loss of an optimizer step, and its seconds on the slowest rank."""

    loss: float
    seconds: float


def record(engine: DeepSpeedEngine, micro_batches: list[tuple[Tensor, Tensor]]) -> TimedStep:
    """Take a step and time it. The seconds end when all ranks have finished."""
    dist.barrier()
    begin = time.perf_counter()
    losses = train_step(engine, micro_batches)
    get_accelerator().synchronize()
    dist.barrier()
    seconds = time.perf_counter() - begin
    return TimedStep(loss=average(losses), seconds=seconds)


def train_step(engine: DeepSpeedEngine, micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Take an optimizer step as any DeepSpeed script does; return the loss of each micro-batch."""
    losses = []
    for tokens, targets in micro_batches:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def average(losses: Tensor) -> float:
    """Return the mean over micro-batches and ranks, in double precision, so that averaging adds no rounding."""
    total = losses.double().mean()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
