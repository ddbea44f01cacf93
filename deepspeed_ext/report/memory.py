# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The bytes that a rank holds of each model state."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.strategy import StateBytes


def held(engine: Engine) -> StateBytes:
    """Return the bytes of an engine's model states on this rank, with any optimizer of DeepSpeed's or of ours.

    Storages count whole and once; what serves as two states counts as the first of them. Buckets and gathered layers
    are not included.
    """
    optimizer, seen = engine.optimizer, set[tuple[str, int]]()
    parameters = list(engine.module.parameters())
    wrapped = getattr(optimizer, "optimizer", optimizer)
    masters = [one for group in wrapped.param_groups for one in group["params"]]
    masters += getattr(
        optimizer, "fp32_partitioned_groups_flat", []
    )  # ZeRO-3 shows its optimizer a sub-group at a time
    moments = [value for state in wrapped.state.values() for value in state.values()]
    sharded = [getattr(one, name, None) for one in parameters for name in ("ds_tensor", "ds_secondary_tensor")]
    return StateBytes(
        storage_bytes([*(one.data for one in parameters), *sharded], seen),
        storage_bytes(_gradients(optimizer, [*parameters, *masters]), seen),
        storage_bytes([*masters, *moments], seen),
    )


def _gradients(optimizer: Any, of: Iterable[Any]) -> Iterator[Any]:
    for one in of:
        yield from (getattr(one, name, None) for name in ("grad", "grad_accum"))
    for name in ("averaged_gradients", "all_grad_tensors"):
        yield from _flattened((getattr(optimizer, name, None) or {}).values())
    yield getattr(optimizer, "grad_partitions_flat_buffer", None)
    for family in (getattr(optimizer, "gradients", None) or {}).values():  # ours
        yield from family.tensors()


def _flattened(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flattened(value)
        else:
            yield getattr(value, "flat_partition", value)


def storage_bytes(values: Iterable[Any], seen: set[tuple[str, int]]) -> int:
    """Return the bytes of those storages of tensors that have not been seen yet."""
    total = 0
    for storage in (value.untyped_storage() for value in values if isinstance(value, Tensor)):
        key = str(storage.device), storage.data_ptr()
        if key not in seen:
            seen.add(key)
            total += storage.nbytes()
    return total
