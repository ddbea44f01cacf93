# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A training loop of DeepSpeed's own on a tiny model of transformers; everything here runs inside rank processes."""

from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from torch import Tensor

from tests.harness import training
from tests.harness.frameworks import comparison, tiny

STEPS = 2
Look = Callable[[Any], Any]


def loss_of(engine: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = engine(**batch).loss
    return loss


def train(
    config: dict[str, Any],
    make: Callable[[], dict[str, Any]],
    prepare: Look = lambda engine: None,
    finish: Look = lambda engine: None,
    loss_of: Callable[[Any, dict[str, Tensor]], Tensor] = loss_of,
    parts: int | None = None,
) -> tuple[tiny.Run, Tensor]:
    """Train; return the final state of the run, and the weights before it.

    ``make`` makes arguments of deepspeed.initialize; a model, if not the tiny one. ``prepare`` and ``finish`` see the
    engine before and after. ``parts`` of the data are each for as many ranks; by default every rank has its own.
    """
    provided = make()
    provided.setdefault("model", tiny.make_model())
    engine, *_ = deepspeed.initialize(config=config, **provided)
    start = training.whole_weights(engine.module)
    prepare(engine)
    parts = parts or dist.get_world_size()
    part = dist.get_rank() // (dist.get_world_size() // parts)
    tokens = torch.tensor([row["input_ids"] for row in tiny.sequences(64, 8)])[part::parts]
    losses = []
    for batch in tokens.split(2)[: STEPS * comparison.ACCUMULATION]:
        loss = loss_of(engine, {"input_ids": batch, "labels": batch})
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    finish(engine)
    return tiny.final_state(engine, losses), start


def compare(
    stock: dict[str, Any],
    ours: dict[str, Any],
    make: Callable[[], dict[str, Any]] = dict,
    group: Callable[[], Any] = lambda: None,
    **options: Any,
) -> comparison.Row:
    """Train with two configurations, of which the same weights are held by all ranks or those of a group."""
    expected, start = train(stock, make, **options)
    return tiny.compare_runs(start, expected, train(ours, make, **options)[0], group=group())
