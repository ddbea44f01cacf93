# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Training on the samples of a ``GroupSampler``, compared with one process that trains on the same samples."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import deepspeed_ext
from tests.harness import training

JOB = training.Job(optimizer="SGD", clipping=0.0)
SAMPLES, EPOCHS = 29, 2


def make_model() -> training.Network:
    torch.manual_seed(7)
    return training.Network(JOB.sizes)


def train(engine: Any, module: Any, micro_step: Callable[[Tensor, Tensor], Any]) -> tuple[float, int]:
    """Train; return the largest difference of weights from those of one process, and the number of steps."""
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(*(torch.randn(SAMPLES, size, generator=generator) for size in (JOB.sizes[0], JOB.sizes[-1])))
    sampler = deepspeed_ext.GroupSampler(data, engine, seed=3)
    loader = DataLoader(data, engine.train_micro_batch_size_per_gpu(), sampler=sampler)
    expected, total, steps = make_model(), engine.train_batch_size(), 0
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            micro_step(x, y)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(3 + epoch))
        for samples in order[: SAMPLES // total * total].split(total):
            x, y = data[samples]
            ((expected(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    assert engine.global_steps == steps and len(loader) == steps // EPOCHS * engine.gradient_accumulation_steps()
    start, ours, theirs = (training.whole_weights(model) for model in (make_model(), module, expected))
    assert (theirs - start).abs().max() > 0.01
    return float((ours - theirs).abs().max()), steps
