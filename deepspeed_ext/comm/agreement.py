# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""How ranks agree with one another, or raise together.

All functions are collective: over ``group``, a process group, or where there is none, or it is None, over all ranks.
What raises together may do so over another ``Channel`` than the process group of all ranks.
"""

import hashlib
import secrets
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, cast

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.distributed import ProcessGroup

_Result = TypeVar("_Result")
_DIGEST_BYTES = 7  # of which an int64 holds the negative, too
_RANDOM_BITS = 62
_FIRST_INTERVAL, _LONGEST_INTERVAL = 0.01, 1.0  # seconds between votes on whether all ranks have ended
_LOSSLESS = "surrogatepass"  # takes every text


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


def unique_number() -> int:
    """Return a random number, the same on all ranks."""
    return all_reduce_min(secrets.randbits(_RANDOM_BITS))


def bounds(values: Sequence[int], group: ProcessGroup | None = None) -> list[tuple[int, int]]:
    """Return of each value the smallest and the largest among the ranks, by one all-reduce."""
    mine = torch.tensor(values, dtype=torch.int64)
    highest, lowest = all_reduce_max(torch.stack([mine, -mine]), group).tolist()
    return [(-low, high) for low, high in zip(lowest, highest, strict=True)]


def all_gather_rows(values: Sequence[int], group: ProcessGroup | None = None) -> Tensor:
    """Return the values of every rank, as many on each, in the order of the group: a row for each, on the host."""
    mine = torch.tensor(values, dtype=torch.int64, device=get_accelerator().current_device_name())
    everybody = mine.new_empty(dist.get_world_size(group=group) * mine.numel())
    dist.all_gather_into_tensor(everybody, mine, group=group)
    return everybody.view(-1, mine.numel()).cpu()


def all_gather_ints(values: Sequence[int], group: ProcessGroup | None = None) -> list[list[int]]:
    """Return what ``all_gather_rows`` does, as lists."""
    rows: list[list[int]] = all_gather_rows(values, group).tolist()
    return rows


def all_gather_texts(text: str, device: str | None = None) -> list[str]:
    """Return the text of every rank.

    DeepSpeed's ``all_gather_object`` takes no device, and ends the process if the comms logger is on.

    Args:
        text: of this rank; names of files may hold bytes that are no UTF-8.
        device: where to put it for that, if not on the current one.
    """
    device = device or get_accelerator().current_device_name()
    content = torch.frombuffer(bytearray(text.encode(errors=_LOSSLESS)) or bytearray(1), dtype=torch.uint8).to(device)
    lengths = content.new_empty(dist.get_world_size(), dtype=torch.int64)
    dist.all_gather_into_tensor(lengths, lengths.new_tensor([content.numel() if text else 0]))
    longest = max(1, int(lengths.max()))
    everybody = content.new_empty(len(lengths) * longest)
    dist.all_gather_into_tensor(everybody, torch.nn.functional.pad(content, (0, longest - content.numel())))
    rows = everybody.cpu().numpy().tobytes()
    starts = range(0, len(rows), longest)
    return [
        rows[start : start + length].decode(errors=_LOSSLESS)
        for start, length in zip(starts, lengths.tolist(), strict=True)
    ]


def printable(text: str) -> str:
    """Return a text that every encoder takes: a name of a file may hold bytes that are no UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def _message_of(error: Exception) -> str:
    """Return what an error says, also where that fails: the other ranks wait for it."""
    try:
        return printable(str(error))
    except Exception as failure:
        return f"{type(error).__name__}, whose text cannot be read: {type(failure).__name__}"


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

    def wait_for(self, act: Callable[[], _Result]) -> _Result:
        """Do what may take long, and return its result."""
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

    def wait_for(self, act: Callable[[], _Result]) -> _Result:
        return act()


WORLD: Channel = _World()


def wait_on_all(ends_within: Callable[[float], bool], over: Channel = WORLD) -> None:
    """Wait until something has ended on all ranks, which may take longer than the timeout of a collective.

    Args:
        ends_within: waits for it on this rank, at most so many seconds; returns whether it has ended.
        over: how ranks agree.
    """
    interval = _FIRST_INTERVAL
    while not over.all_reduce_min(int(ends_within(interval))):
        interval = min(2 * interval, _LONGEST_INTERVAL)


def raise_together(error: Exception | None, kind: type[Exception] = RuntimeError, over: Channel = WORLD) -> None:
    """Raise on all ranks if one of them has an error.

    Raises:
        kind: with the error of the first rank that has one.
    """
    first = over.all_reduce_min(over.world if error is None else over.rank)
    if first < over.world:
        message = "" if error is None else _message_of(error)
        raise kind(f"rank {first}: {over.broadcast_text(message, first)}") from error


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
    result, error = over.wait_for(lambda: _attempt(act, doing, kind))
    raise_together(error, kind, over)
    return cast(_Result, result)


def _attempt(act: Callable[[], _Result], doing: str, kind: type[Exception]) -> tuple[_Result | None, Exception | None]:
    """Return the result, or the error."""
    try:
        return act(), None
    except kind as error:
        return None, error
    except Exception as cause:
        failure = kind(f"{doing}: {type(cause).__name__}: {_message_of(cause)}")
        failure.__cause__ = cause
        return None, failure


def require_same(what: str, value: str, kind: type[Exception] = RuntimeError) -> None:
    """Refuse a string that differs between ranks. Unless it does, this is a single all-reduce.

    Raises:
        kind: it does; with the value of the first rank that differs from rank 0.
    """
    digest = hashlib.sha256(value.encode(errors=_LOSSLESS)).digest()
    (found,) = bounds([int.from_bytes(digest[:_DIGEST_BYTES], "big")])
    if found[0] == found[1]:
        return
    problem = ValueError(f"{what} must be the same on all ranks, but here it is {value!r}.")
    raise_together(None if broadcast_text(value, 0) == value else problem, kind)
