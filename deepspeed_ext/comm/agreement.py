# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""How ranks agree with one another, or raise together.

All functions are collective: over ``group``, a process group, or where there is none, or it is None, over all ranks.
What raises together may do so over another ``Channel`` than the process group of all ranks.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.distributed import ProcessGroup

_Result = TypeVar("_Result")
_DIGEST_BYTES = 7  # of which an int64 holds the negative, too


def all_reduced(values: Tensor, operation: dist.ReduceOp, group: ProcessGroup | None = None) -> Tensor:
    """Return an all-reduce of values, of any shape, dtype and device; where they were."""
    found = values.to(get_accelerator().current_device_name(), copy=True)
    dist.all_reduce(found, op=operation, group=group)
    return found.to(values.device)


def all_reduce_max(values: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the largest of all ranks' values, each by itself."""
    return all_reduced(values, dist.ReduceOp.MAX, group)


def any_rank(found: bool, group: ProcessGroup | None = None) -> bool:
    """Whether one of the ranks has found it."""
    return bool(all_reduce_max(torch.tensor([float(found)]), group).item())


def all_reduce_min(value: int) -> int:
    """Return the smallest of all ranks' values."""
    return int(all_reduced(torch.tensor([value]), dist.ReduceOp.MIN).item())


def all_reduce_sum(value: int) -> int:
    """Return the sum of all ranks' values."""
    return int(all_reduced(torch.tensor([value]), dist.ReduceOp.SUM).item())


def bounds(values: Sequence[int], group: ProcessGroup | None = None) -> list[tuple[int, int]]:
    """Return of each value the smallest and the largest among the ranks, by one all-reduce."""
    mine = torch.tensor(values, dtype=torch.int64)
    highest, lowest = all_reduce_max(torch.stack([mine, -mine]), group).tolist()
    return [(-low, high) for low, high in zip(lowest, highest, strict=True)]


def all_gather_ints(values: Sequence[int], group: ProcessGroup | None = None) -> list[list[int]]:
    """Return the values of every rank, as many on each, in the order of the group."""
    mine = torch.tensor(values, dtype=torch.int64, device=get_accelerator().current_device_name())
    everybody = mine.new_empty(dist.get_world_size(group=group) * mine.numel())
    dist.all_gather_into_tensor(everybody, mine, group=group)
    rows: list[list[int]] = everybody.view(-1, mine.numel()).tolist()
    return rows


def all_gather_texts(text: str, device: str | None = None) -> list[str]:
    """Return the text of every rank.

    DeepSpeed's ``all_gather_object`` takes no device, and ends the process if the comms logger is on.

    Args:
        text: of this rank.
        device: where to put it for that, if not on the current one.
    """
    device = device or get_accelerator().current_device_name()
    content = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    lengths = content.new_empty(dist.get_world_size(), dtype=torch.int64)
    dist.all_gather_into_tensor(lengths, lengths.new_tensor([content.numel()]))
    longest = int(lengths.max())
    everybody = content.new_zeros(len(lengths), longest)
    dist.all_gather_into_tensor(everybody.view(-1), torch.nn.functional.pad(content, (0, longest - content.numel())))
    return [bytes(row[:length]).decode() for row, length in zip(everybody.tolist(), lengths.tolist(), strict=True)]


def broadcast_text(text: str, source: int) -> str:
    """Return the text of global rank ``source``, on all ranks."""
    said = [text]
    dist.broadcast_object_list(said, source)
    return said[0]


class Channel(Protocol):
    """How all ranks tell one another numbers and texts. Its methods are collective.

    Attributes:
        rank: this rank's number.
        world: the number of ranks.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def all_reduce_min(self, value: int) -> int:
        """Return the smallest of all ranks' values."""
        ...

    def all_reduce_sum(self, value: int) -> int:
        """Return the sum of all ranks' values."""
        ...

    def broadcast_text(self, text: str, source: int) -> str:
        """Return the text of rank ``source``, on all ranks."""
        ...


class _World:
    """The process group of all ranks, by ``deepspeed.comm``."""

    all_reduce_min = staticmethod(all_reduce_min)
    all_reduce_sum = staticmethod(all_reduce_sum)
    broadcast_text = staticmethod(broadcast_text)

    @property
    def rank(self) -> int:
        return int(dist.get_rank())

    @property
    def world(self) -> int:
        return int(dist.get_world_size())


WORLD: Channel = _World()


def raise_together(error: Exception | None, kind: type[Exception] = RuntimeError, over: Channel = WORLD) -> None:
    """Raise on all ranks if one of them has an error.

    Raises:
        kind: with the error of the first rank that has one.
    """
    first = over.all_reduce_min(over.world if error is None else over.rank)
    if first < over.world:
        raise kind(f"rank {first}: {over.broadcast_text(str(error), first)}") from error


def run_on_all_or_raise(
    act: Callable[[], _Result], doing: str, kind: type[Exception] = RuntimeError, over: Channel = WORLD
) -> _Result:
    """Do what may fail on one rank and not on others, which would then wait for it.

    Args:
        act: without any communication.
        doing: the beginning of the message of errors that do not have their own, which are those of ``kind``.
        kind: what is raised.
        over: how ranks agree.

    Raises:
        kind: on all ranks, if it failed on one.
    """
    error: Exception | None = None
    try:
        result = act()
    except kind as found:
        error = found
    except Exception as found:
        error = kind(f"{doing}: {type(found).__name__}: {found}")
        error.__cause__ = found
    raise_together(error, kind, over)
    return result


def require_same(what: str, value: str, kind: type[Exception] = RuntimeError) -> None:
    """Refuse a string that differs between ranks. Unless it does, this is a single all-reduce.

    Raises:
        kind: it does; with the value of the first rank that differs from rank 0.
    """
    digest = hashlib.sha256(value.encode(errors="surrogateescape")).digest()
    (found,) = bounds([int.from_bytes(digest[:_DIGEST_BYTES], "big")])
    if found[0] == found[1]:
        return
    problem = ValueError(f"{what} must be the same on all ranks, but here it is {value!r}.")
    raise_together(None if broadcast_text(value, 0) == value else problem, kind)
