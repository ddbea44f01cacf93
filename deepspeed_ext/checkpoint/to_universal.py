# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``python -m deepspeed_ext convert``: DeepSpeed's ``ds_to_universal.py``, also for Muon.

Note [Momentum in universal checkpoints]
    DeepSpeed's converter knows the states ``exp_avg`` and ``exp_avg_sq`` by name, and fails with a ``KeyError`` where
    a parameter has others; Muon's matrices have ``momentum_buffer``. Like ``exp_avg``, that is a mean of gradients. So
    it is shown to the converter as ``exp_avg`` while fragments are extracted, beside zeros of a byte each as
    ``exp_avg_sq``. By the dtype of these zeros the files are found afterwards: they are removed, and momentum gets its
    own name, ``momentum_buffer.pt``. DeepSpeed's stages 1 and 2 load states by the names of files, so they find it.

    The momentum of a universal checkpoint is of gradients without the loss scale, as a strategy has it.
"""

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    FP32_FLAT_GROUPS,
    GROUP_PADDINGS,
    LOSS_SCALER,
    OPTIMIZER_STATE_DICT,
    PARAM,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)
from torch import Tensor

from deepspeed_ext.checkpoint.files import inspect
from deepspeed_ext.zero.momentum import MOMENTUM_SCALE, unscaled
from deepspeed_ext.zero.muon import MOMENTUM

_SHOWN_AS, _BESIDE = "exp_avg", "exp_avg_sq"
_MARK = torch.uint8  # no moment has this dtype

# Bound before ``convert`` replaces them. Worker processes find ours by name in this module, and these in DeepSpeed's.
_extract_replicated = ds_to_universal.extract_zero_shards
_extract_partitioned = ds_to_universal.extract_zero_shards_stage3


def convert(arguments: argparse.Namespace) -> None:
    """Convert a checkpoint; see Note [Momentum in universal checkpoints].

    Args:
        arguments: DeepSpeed's, of its own ``main``.

    Raises:
        ValueError: the momentum is that of DeepSpeed's stages and cannot be told apart; says what to do.
    """
    with mock.patch.multiple(
        ds_to_universal, extract_zero_shards=extract_replicated, extract_zero_shards_stage3=extract_partitioned
    ):
        ds_to_universal.main(arguments)
    for path in Path(arguments.output_folder, "zero").glob(f"*/{_BESIDE}.pt"):
        saved = inspect(path)
        if (saved[PARAM] if isinstance(saved, dict) else saved).dtype == _MARK:
            path.with_name(f"{_SHOWN_AS}.pt").rename(path.with_name(f"{MOMENTUM}.pt"))
            path.unlink()


def extract_replicated(*args: Any, **kwargs: Any) -> None:
    """Extract a rank's fragments at stages 1 and 2. Arguments are those of DeepSpeed's ``extract_zero_shards``."""
    with _momentum_shown():
        _extract_replicated(*args, **kwargs)


def extract_partitioned(*args: Any, **kwargs: Any) -> None:
    """Extract a rank's fragments at stage 3. Arguments are those of DeepSpeed's ``extract_zero_shards_stage3``."""
    with _momentum_shown():
        _extract_partitioned(*args, **kwargs)


@contextmanager
def _momentum_shown() -> Iterator[None]:
    """Show momentum as a moment of Adam in files that are loaded within this context."""
    load = torch.load

    def load_shown(*args: Any, **kwargs: Any) -> Any:
        found = load(*args, **kwargs)
        return {**found, OPTIMIZER_STATE_DICT: shown(found[OPTIMIZER_STATE_DICT])}

    with mock.patch.object(torch, "load", load_shown):
        yield


def shown(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rank's state dict with momentum as ``exp_avg``, beside marked zeros as ``exp_avg_sq``.

    Args:
        state: as ``state_dict()`` of a ZeRO optimizer, ours or DeepSpeed's, gives it.

    Raises:
        ValueError: it cannot be told what the momentum is of.
    """
    stage3 = BASE_OPTIMIZER_STATE not in state
    key = OPTIMIZER_STATE_DICT if stage3 else BASE_OPTIMIZER_STATE
    flats = state[FP32_FLAT_GROUPS if stage3 else SINGLE_PARTITION_OF_FP32_GROUPS]
    paddings = [0] * len(flats) if stage3 else state[GROUP_PADDINGS]
    base = state[key]
    groups = base["param_groups"] if isinstance(base, dict) else ()
    muon = [number for group in groups if group.get("use_muon", False) for number in group["params"]]
    if not muon:
        return dict(state)
    moments = {
        number: _momentum(state, base["state"].get(number, {}), flats[number].numel() + paddings[number])
        for number in muon
    }
    states = {
        number: {_SHOWN_AS: moment, _BESIDE: torch.zeros(1, dtype=_MARK).expand(moment.numel())}
        for number, moment in moments.items()
    }
    return {**state, key: {**base, "state": {**base["state"], **states}}}


def _momentum(state: Mapping[str, Any], saved: Mapping[str, Any], numel: int) -> Tensor:
    """Return the momentum (1D, fp32) of a flat shard, of gradients without the loss scale; zeros if there is none."""
    momentum = saved.get(MOMENTUM)
    if momentum is None:  # before the first step, or where a rank has nothing of the parameter group
        return torch.zeros(numel)
    scaled = MOMENTUM_SCALE not in state and getattr(state.get(LOSS_SCALER), "cur_scale", 1.0) != 1
    if scaled or momentum.numel() != numel:
        what = "has a loss scale or not" if scaled else f"is of {momentum.numel()} elements, expected {numel}"
        raise ValueError(
            f"The checkpoint is of DeepSpeed's own Muon, whose momentum {what}, depending on optimizer offload. Load "
            f"it with a paro_strategy on as many ranks (NGG for stages 1 and 2, GGG for stage 3), save it, and "
            f"convert that."
        )
    return unscaled(state, momentum, offloaded=False).float()
