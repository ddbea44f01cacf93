# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Reduces and compares small values over ranks, and raises errors on all of them.

All functions are collective over ``group``, a process group; without that argument, or if it is None, over all ranks.
Functions that raise on all ranks may use another ``Channel`` than the process group of all ranks.
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
_DIGEST_BYTES = 7  # fits an int64, and so does its negative
_RANDOM_BITS = 62
_SHORTEST_INTERVAL, _LONGEST_INTERVAL = 0.01, 1.0  # seconds between votes on whether all ranks have ended
_LOSSLESS = "surrogatepass"  # encodes every text


def all_reduce(values: Tensor, operation: dist.ReduceOp, group: ProcessGroup | None = None) -> Tensor:
    """Return an all-reduce of values of any shape, dtype, and device, on their device."""
    # A copy, because the reduction is in place.
    reduced = values.to(get_accelerator().current_device_name(), copy=True)
    dist.all_reduce(reduced, op=operation, group=group)
    return reduced.to(values.device)


def all_reduce_max(values: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the elementwise maximum of all ranks' values."""
    return all_reduce(values, dist.ReduceOp.MAX, group)


def any_rank(flag: bool, group: ProcessGroup | None = None) -> bool:
    """Return whether ``flag`` is true on any rank."""
    return bool(all_reduce_max(torch.tensor([float(flag)]), group).item())


def all_reduce_min(value: int, group: ProcessGroup | None = None) -> int:
    """Return the smallest of all ranks' values."""
    return int(all_reduce(torch.tensor([value]), dist.ReduceOp.MIN, group).item())


def all_reduce_sum(value: int) -> int:
    """Return the sum of all ranks' values."""
    return int(all_reduce(torch.tensor([value]), dist.ReduceOp.SUM).item())


def unique_number(group: ProcessGroup | None = None) -> int:
    """Return a random number, the same on all ranks."""
    return all_reduce_min(secrets.randbits(_RANDOM_BITS), group)


def bounds(values: Sequence[int], group: ProcessGroup | None = None) -> list[tuple[int, int]]:
    """Return (minimum, maximum) over ranks of each value, by one all-reduce."""
    local = torch.tensor(values, dtype=torch.int64)
    # The minimum is the negated maximum of negated values.
    highest, lowest = all_reduce_max(torch.stack([local, -local]), group).tolist()
    return [(-low, high) for low, high in zip(lowest, highest, strict=True)]


def all_gather_rows(values: Sequence[int], group: ProcessGroup | None = None) -> Tensor:
    """All-gather values, the same number on each rank, in group order: a row for each rank, on the host."""
    local = torch.tensor(values, dtype=torch.int64, device=get_accelerator().current_device_name())
    gathered = local.new_empty(dist.get_world_size(group=group) * local.numel())
    dist.all_gather_into_tensor(gathered, local, group=group)
    return gathered.view(-1, local.numel()).cpu()


def all_gather_ints(values: Sequence[int], group: ProcessGroup | None = None) -> list[list[int]]:
    """Return the result of ``all_gather_rows`` as lists."""
    rows: list[list[int]] = all_gather_rows(values, group).tolist()
    return rows


def all_gather_texts(text: str, device: str | None = None) -> list[str]:
    """All-gather the text of every rank.

    DeepSpeed's ``all_gather_object`` has no device argument, and ends the process if the comms logger is enabled.

    Args:
        text: this rank's text; file names may contain bytes that are not UTF-8.
        device: device of the buffers; by default the current one.
    """
    device = device or get_accelerator().current_device_name()
    # At least one byte: torch.frombuffer refuses an empty buffer.
    content = torch.frombuffer(bytearray(text.encode(errors=_LOSSLESS)) or bytearray(1), dtype=torch.uint8).to(device)
    lengths = content.new_empty(dist.get_world_size(), dtype=torch.int64)
    dist.all_gather_into_tensor(lengths, lengths.new_tensor([content.numel() if text else 0]))
    longest = max(1, int(lengths.max()))  # all ranks must send the same number of bytes
    gathered = content.new_empty(len(lengths) * longest)
    dist.all_gather_into_tensor(gathered, torch.nn.functional.pad(content, (0, longest - content.numel())))
    rows = gathered.cpu().numpy().tobytes()
    starts = range(0, len(rows), longest)
    return [
        rows[start : start + length].decode(errors=_LOSSLESS)
        for start, length in zip(starts, lengths.tolist(), strict=True)
    ]


def printable(text: str) -> str:
    """Return a text that every encoder accepts: file names may contain bytes that are not UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def _message_of(error: Exception) -> str:
    """Return the text of an error. Never raises, because the other ranks wait for this text."""
    try:
        return printable(str(error))
    except Exception as failure:
        return f"{type(error).__name__}, whose text cannot be read: {type(failure).__name__}"


def broadcast_text(text: str, source: int) -> str:
    """Broadcast the text of global rank ``source``."""
    texts = [text]
    dist.broadcast_object_list(texts, source)
    return texts[0]


class Channel(Protocol):
    """Reduces numbers and broadcasts texts over all ranks. Its methods are collective.

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
        """Broadcast the text of rank ``source``."""
        ...

    def wait_for(self, function: Callable[[], _Result]) -> _Result:
        """Run a function that may take long, and return its result."""
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

    def wait_for(self, function: Callable[[], _Result]) -> _Result:
        return function()


WORLD: Channel = _World()


def wait_for_all_ranks(has_ended_within: Callable[[float], bool], channel: Channel = WORLD) -> None:
    """Wait until a task has ended on all ranks, which may take longer than the timeout of a collective.

    Args:
        has_ended_within: waits for this rank's task, at most this many seconds; returns whether it has ended.
        channel: channel of the votes.
    """
    interval = _SHORTEST_INTERVAL
    # Ranks vote in every round, so a rank that has ended still answers the others.
    while not channel.all_reduce_min(int(has_ended_within(interval))):
        interval = min(2 * interval, _LONGEST_INTERVAL)


def raise_together(error: Exception | None, kind: type[Exception] = RuntimeError, channel: Channel = WORLD) -> None:
    """Raise on all ranks if one of them has an error.

    Raises:
        kind: with the error of the first rank that has one.
    """
    first = channel.all_reduce_min(channel.world if error is None else channel.rank)
    if first < channel.world:  # the same branch on all ranks, because it broadcasts
        message = "" if error is None else _message_of(error)
        raise kind(f"rank {first}: {channel.broadcast_text(message, first)}") from error


def run_on_all_or_raise(
    function: Callable[[], _Result], action: str, kind: type[Exception] = RuntimeError, channel: Channel = WORLD
) -> _Result:
    """Run a function on all ranks; if it fails on one of them, raise on all, so that none waits for it.

    Args:
        function: the function, which must not communicate.
        action: start of the message of errors that are not of type ``kind``; those keep their own message.
        kind: type of the raised error.
        channel: channel of the votes.

    Raises:
        kind: on all ranks, if ``function`` failed on one.
    """
    result, error = channel.wait_for(lambda: _attempt(function, action, kind))
    raise_together(error, kind, channel)
    return cast(_Result, result)


def run_on_first_or_raise(
    function: Callable[[], _Result], action: str, kind: type[Exception] = RuntimeError
) -> _Result | None:
    """Run a function on rank 0; if it fails, raise on all ranks. Its result is None on other ranks. Collective."""
    return run_on_all_or_raise(lambda: function() if dist.get_rank() == 0 else None, action, kind)


def broadcast_from_first(function: Callable[[], str], action: str, kind: type[Exception] = RuntimeError) -> str:
    """Return on all ranks the text that a function returns on rank 0; if it fails, raise on all. Collective."""
    return broadcast_text(run_on_first_or_raise(function, action, kind) or "", 0)


def _attempt(
    function: Callable[[], _Result], action: str, kind: type[Exception]
) -> tuple[_Result | None, Exception | None]:
    """Return (result, None) or (None, error)."""
    try:
        return function(), None
    except kind as error:
        return None, error
    except Exception as cause:
        failure = kind(f"{action}: {type(cause).__name__}: {_message_of(cause)}")
        failure.__cause__ = cause
        return None, failure


def require_same(name: str, value: str, kind: type[Exception] = RuntimeError) -> None:
    """Raise if a string differs between ranks. If it does not, this takes a single all-reduce.

    Raises:
        kind: the string differs; with the value of the first rank that differs from rank 0.
    """
    digest = hashlib.sha256(value.encode(errors=_LOSSLESS)).digest()
    (bound,) = bounds([int.from_bytes(digest[:_DIGEST_BYTES], "big")])
    if bound[0] == bound[1]:  # the same result on all ranks
        return
    problem = ValueError(f"{name} must be the same on all ranks, but here it is {value!r}.")
    raise_together(None if broadcast_text(value, 0) == value else problem, kind)
