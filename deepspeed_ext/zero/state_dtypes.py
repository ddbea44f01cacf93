# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The dtypes of optimizer states after a load."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.zero.muon import MOMENTUM


@contextmanager
def keep_state_dtypes(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Load states in the dtypes in which the optimizer computes them, in this context.

    ``torch.optim.Optimizer.load_state_dict`` casts all states to the dtype of the weights. With bf16 master weights
    that would round fp32 states: Muon's momentum, and the moments of DeepSpeed's CPU Adam.
    """
    saved: dict[str, Any] = {}
    dtypes: list[dict[str, torch.dtype]] = []

    def record(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        saved.update(state)
        dtypes.extend(
            _dtypes(optimizer, group, weights) for group in optimizer.param_groups for weights in group["params"]
        )

    def restore(_: torch.optim.Optimizer) -> None:
        tensors = (weights for group in optimizer.param_groups for weights in group["params"])
        numbers = (number for group in saved["param_groups"] for number in group["params"])
        for weights, number, expected in zip(tensors, numbers, dtypes, strict=True):
            state, loaded = optimizer.state.get(weights, {}), saved["state"].get(number, {})
            for name in expected.keys() & loaded.keys():
                if isinstance(loaded[name], Tensor) and state[name].dtype != expected[name]:
                    state[name] = loaded[name].to(device=state[name].device, dtype=expected[name])

    hooks = (
        optimizer.register_load_state_dict_pre_hook(record),
        optimizer.register_load_state_dict_post_hook(restore),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _dtypes(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], weights: Tensor) -> dict[str, torch.dtype]:
    """Return the dtypes of the states of a tensor of weights, by their names."""
    state = optimizer.state.get(weights, {})
    dtypes = {name: value.dtype for name, value in state.items() if isinstance(value, Tensor) and name != "step"}
    # A new optimizer has no momentum yet; see Note [Precision of Muon's messages] in ``muon.py``.
    return {**dtypes, MOMENTUM: torch.float32} if group.get("use_muon", False) else dtypes
