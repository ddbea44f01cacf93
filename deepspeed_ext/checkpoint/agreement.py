# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What ranks must find alike before any of them goes on."""

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.checkpoint.folder import CheckpointError

_Result = TypeVar("_Result")


def raise_together(error: Exception | None) -> None:
    """Raise on all ranks if one of them has an error. Collective.

    Raises:
        CheckpointError: with the error of the first rank that has one.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    first = smallest(world if error is None else rank)
    if first == world:
        return
    device = get_accelerator().current_device_name()
    text = str(error).encode() if rank == first else b""
    length = torch.tensor([len(text)], device=device)
    dist.broadcast(length, first)
    content = torch.zeros(int(length.item()), dtype=torch.uint8, device=device)
    if rank == first:
        content.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    dist.broadcast(content, first)
    raise CheckpointError(f"rank {first}: {bytes(content.tolist()).decode()}") from error


def together(act: Callable[[], _Result], doing: str) -> _Result:
    """Do what may fail on one rank and not on others, which would then wait for it. Collective.

    Args:
        act: without any communication.
        doing: the beginning of the message of errors that do not have their own.

    Raises:
        CheckpointError: on all ranks, if it failed on one.
    """
    error: CheckpointError | None = None
    try:
        result = act()
    except CheckpointError as found:
        error = found
    except Exception as found:
        error = CheckpointError(f"{doing}: {type(found).__name__}: {found}")
        error.__cause__ = found
    raise_together(error)
    return result


def smallest(value: int) -> int:
    """The smallest of all ranks' values. Collective."""
    return _reduced(value, dist.ReduceOp.MIN)


def total(value: int) -> int:
    """The sum of all ranks' values. Collective."""
    return _reduced(value, dist.ReduceOp.SUM)


def _reduced(value: int, operation: Any) -> int:
    found = torch.tensor([value], dtype=torch.int64, device=get_accelerator().current_device_name())
    dist.all_reduce(found, op=operation)
    return int(found.item())


def require_same(what: str, value: str) -> None:
    """Refuse a string that differs between ranks. Collective.

    Raises:
        CheckpointError: it does; with the value of the first rank that differs from rank 0.
    """
    number = int.from_bytes(hashlib.blake2b(value.encode(), digest_size=7).digest(), "big")
    expected = torch.tensor([number], dtype=torch.int64, device=get_accelerator().current_device_name())
    dist.broadcast(expected, 0)
    same = int(expected.item()) == number
    raise_together(None if same else ValueError(f"{what} must be the same on all ranks, but here it is {value!r}."))
