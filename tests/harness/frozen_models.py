# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A partly frozen model; this runs inside rank processes."""

from typing import Any

import deepspeed
import torch


def make_engine(zero: dict[str, Any], config: dict[str, Any], zero_init: bool = False) -> Any:
    """Return an engine of a layer of 6000 parameters, and one of 4000 that is frozen."""
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        **config,
    }
    with deepspeed.zero.Init(config_dict_or_path=settings, enabled=zero_init):
        model = torch.nn.Sequential(torch.nn.Linear(100, 60, bias=False), torch.nn.Linear(80, 50, bias=False))
    model[1].requires_grad_(False)
    parameters = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=settings)
    return engine
