# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``python -m deepspeed_ext leaf-modules`` shows the leaf modules that ZeRO-3 would use, without training."""

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from deepspeed_ext.config.keys import LEAF_BYTES, SECTION, STRATEGY, THRESHOLD
from deepspeed_ext.config.section import parse_section
from deepspeed_ext.leaf.modules import choose
from deepspeed_ext.leaf.setup import choice_table, settings_and_live
from deepspeed_ext.tools.arguments import import_callable

_STEPS = 3  # more than one, since DeepSpeed records the order of modules in the first steps


def run(arguments: argparse.Namespace) -> None:
    """Print the report; with a batch, also train and print measurements.

    Args:
        arguments: ``model``, ``bytes``, ``threshold``, ``batch``, and keys of ``zero_optimization``, each None if not
            given.

    Raises:
        ValueError: an argument is not a function's name, or the budget does not fit the model.
    """
    section: dict[str, Any] = {"stage": 3}
    options = {key: value for key, value in vars(arguments).items() if key.startswith("stage3_") and value is not None}
    section.update(options)
    if arguments.threshold is not None:
        section |= {STRATEGY: "GGG", THRESHOLD: arguments.threshold}  # plain ZeRO-3 would choose other modules
    if arguments.threshold is None or arguments.bytes is not None:
        section[LEAF_BYTES] = True if arguments.bytes is None else arguments.bytes
    config = parse_section(section)
    model = import_callable(arguments.model)()
    settings, live = settings_and_live(config, model)
    choice = choose(model, settings)
    print(choice_table(choice, model, settings, live))
    if arguments.batch:
        measured = _measure(model, import_callable(arguments.batch), section)
        print("  measured on one rank: " + ", ".join(f"{key} {value:,}" for key, value in measured.items()))


def _measure(model: nn.Module, make_batch: Callable[..., Any], section: Mapping[str, Any]) -> dict[str, int]:
    """Train a few steps in one process, and return the number of hooks and the peak of gathered elements."""
    import deepspeed

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29511")
    # One process reduces nothing, so skip compiling DeepSpeed's shared-memory reduction, which takes a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    config = {"train_micro_batch_size_per_gpu": 1, SECTION: dict(section), "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for _ in range(_STEPS):
        batch = make_batch()
        out = engine(**batch) if isinstance(batch, Mapping) else engine(*batch)
        engine.backward(_loss(out))
        engine.step()
    offload = engine.optimizer.parameter_offload
    measured = {"hooks": len(offload.forward_hooks) + len(offload.backward_hooks)}
    measured["parameters gathered at a time at most"] = sum(
        gathers.live.peak for gathers in engine.optimizer.gathers.values()
    )
    engine.destroy()
    return measured


def _loss(out: Any) -> torch.Tensor:
    """Return the loss in a model's output, or the mean of its first tensor."""
    loss = getattr(out, "loss", None)
    if loss is None:
        first = out if isinstance(out, torch.Tensor) else next(iter(out.values() if isinstance(out, Mapping) else out))
        loss = first.float().mean()
    return loss
