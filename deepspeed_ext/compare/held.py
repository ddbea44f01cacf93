# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The bytes of model states that a rank holds between steps, under a strategy and under stock ZeRO."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from deepspeed_ext.deepspeed_types import Engine


def parameter_bytes(engine: Engine) -> int:
    """Return the bytes of parameters, or of the shards of partitioned ones; storages count whole and once."""
    found = [tensor for p in engine.module.parameters() for tensor in (p.data, getattr(p, "ds_tensor", None))]
    return _storages(found)


def optimizer_bytes(engine: Engine) -> int:
    """Return the bytes of optimizer states, master weights included; a count of steps is none."""
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)  # ZeRO's is around the user's
    states = optimizer.state  # by master weight
    own = {id(p) for p in engine.module.parameters()}  # without ZeRO in fp32, these are their own masters
    return sum(
        tensor.nbytes
        for master, state in states.items()
        for tensor in (*(() if id(master) in own else (master,)), *state.values())
        if isinstance(tensor, Tensor) and tensor.dim()
    )


def _storages(tensors: Iterable[Any]) -> int:
    found = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())
