# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Hops: the sums and gathers over one process group that moves are made of.

Note [Hops and transfers]
    A hop is a sum or a gather over one process group. Its methods are generators: they start one communication,
    yield its handle, and go on when it is done; the result is the generator's return value. A *transfer* composes
    them into a move. ``InFlight`` runs transfers, one after the other or overlapped: the first hop of a transfer is
    on the wire while the one before it is in its second hop.
"""

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.comm import comms_logger
from deepspeed.comm.torch import get_coalescing_manager
from torch import Tensor

from deepspeed_ext.comm.bandwidth import counted_over

Transfer = Generator[Any, None, Tensor]  # yields handles with a wait() method


class Run(NamedTuple):
    """A stretch of a message: where in this rank's shards its elements belong."""

    buffer: int
    row: int
    start: int  # within the row
    numel: int


Part = tuple[Run, ...]  # what a part of a message holds, in order; elements behind its runs are padding
Contents = tuple[Part, ...]  # of a message: a part for each rank that it goes to


# Elements that take 16 bytes or more in any dtype. NCCL copies 16 bytes at a time if all its pointers are multiples of
# that, else element by element, or byte by byte in a gather. Pointers are where parts of messages begin.
_WIDEST = 16


def fill_up(numel: int, multiple: int) -> int:
    """The smallest multiple that is not below ``numel``."""
    return -(-numel // multiple) * multiple


def joined(pieces: Iterable[Tensor], lengths: Iterable[int]) -> Tensor:
    """Pieces (1D, of one dtype) one after the other, each filled up with zeros to its length; by one copy."""
    filled: list[Tensor] = []
    for piece, length in zip(pieces, lengths, strict=True):
        filled.append(piece)
        if length > piece.numel():
            filled.append(piece.new_zeros(1).expand(length - piece.numel()))
    return torch.cat(filled)


def aligned(flat: Tensor, multiple: int) -> Tensor:
    """``flat`` (1D) as a message of one part: filled up with zeros to a multiple; a copy only where that is needed."""
    length = fill_up(flat.numel(), multiple)
    if length == flat.numel() and not flat.storage_offset() % multiple:
        return flat
    return joined([flat], [length])


def cut_runs(runs: Part, lengths: Sequence[int]) -> Contents:
    """Runs, cut into parts of these lengths."""
    left, parts = list(reversed(runs)), []
    for length in lengths:
        part = []
        while length and left:
            run = left.pop()
            taken = min(length, run.numel)
            part.append(run._replace(numel=taken))
            length -= taken
            if taken < run.numel:
                left.append(Run(run.buffer, run.row, run.start + taken, run.numel - taken))
        parts.append(tuple(part))
    return tuple(parts)


class Memory:
    """What a reduction remembers from message to message, and from step to step; this one: nothing."""

    remembers = False

    def finish_step(self, applied: bool) -> None:
        """What was reduced since the last call has been applied to the weights; or it was discarded."""

    def states(self) -> dict[str, Any]:
        """Plain values, and tensors on the CPU, for a checkpoint."""
        return {}

    def load_states(self, states: Mapping[str, Any]) -> None:
        """Take over states of the same messages."""

    def numbers_of(self, states: Mapping[str, Any]) -> Iterable[tuple["Run", Tensor]]:
        """What such states, of this rank or another, remember of each run: fp32, 1D."""
        return ()

    def load_numbers(self, numbers: Mapping["Run", Tensor], steps: int) -> None:
        """Take over what was remembered of other messages: fp32, 1D, of each run; after so many steps."""

    def forget(self) -> None:
        """Be as in the beginning."""

    def offload(self) -> None:
        """Be in host memory until the next reduction."""


class Hop(ABC):
    """One leg of a move, over one process group of ``size`` ranks.

    ``reduce_scatter`` is the one to replace: a compressed reduction implements it, and gets ``all_reduce`` for it.
    Sums are taken in rank order in fp32, or as the backend does; every rank of the group gets the same bits.

    A reduction may remember something of what it has sent; so it is told what messages hold.

    Any message is right. One is cheapest if its parts begin at multiples of ``multiple`` elements, and if those of a
    reduce-scatter have the ``lengths``: then nothing is copied.
    """

    memory: "Memory"
    multiple = 1
    keeps_zeros = True  # whether sums of zeros are zeros
    scale: Callable[[], float] = staticmethod(lambda: 1.0)  # what gradients are multiplied with: the loss scale

    def __init__(self, group: Any, name: str = "hop") -> None:
        self.group = dist.get_world_group() if group is None else group
        self.name = name  # in the records of DeepSpeed's comms logger: intra_all_gather, inter_reduce_scatter, ...
        self.size: int = dist.get_world_size(group=group)
        self.rank: int = dist.get_rank(group=group)
        self.memory = Memory()
        gloo = _backend(self.group) == "gloo"
        # gloo's own messages are for tensors of the host only, its collectives also for others.
        self._swaps = gloo and get_accelerator().device_name() == "cpu"
        self.multiple = 1 if gloo or self.size == 1 else _WIDEST

    def _start(self, operation: str, collective: Callable[..., Any], *arguments: Any) -> Any:
        """Start a collective over the group, and return its handle; ``operation`` is for the records."""
        with counted_over(self.size):
            return collective(*arguments, group=self.group, async_op=True, log_name=f"{self.name}_{operation}")

    def lengths(self, splits: Sequence[int]) -> list[int]:
        """To what lengths parts of a message are best filled up; empty ones may stay so."""
        return [fill_up(split, self.multiple) for split in splits]

    @abstractmethod
    def reduce_scatter(self, flat: Tensor, splits: Sequence[int], contents: Contents = ()) -> Transfer:
        """Sum of ``flat`` (1D) over the group, of which this rank gets part ``rank``.

        Args:
            flat: 1D, the parts one after the other; may be overwritten.
            splits: length of each part, the same on all ranks; they may differ.
            contents: what each part holds; without, nothing is remembered of the message.

        Returns:
            1D of ``splits[rank]`` elements, dtype of ``flat``.
        """

    def all_reduce(self, flat: Tensor, runs: Part = ()) -> Transfer:
        """Sum of ``flat`` (1D) over the group, on all ranks; ``flat`` may be overwritten.

        Args:
            flat: 1D.
            runs: what it holds.
        """
        if self.size == 1 or not flat.numel():
            return flat
        part = fill_up(-(-flat.numel() // self.size), self.multiple)
        numel, missing = flat.numel(), part * self.size - flat.numel()
        padded = torch.nn.functional.pad(flat, (0, missing)) if missing else flat  # a pad by nothing is a copy
        splits = [part] * self.size
        mine = yield from self.reduce_scatter(padded, splits, cut_runs(runs, splits) if runs else ())
        gathered = yield from self.all_gather(mine)
        return gathered[:numel]

    def all_gather(self, shard: Tensor, out: Tensor | None = None) -> Transfer:
        """The ``shard`` (1D) of every rank of the group, in rank order: 1D of ``size * shard.numel()`` elements.

        Args:
            shard: 1D.
            out: where to gather, of which ``shard`` may be this rank's part already; by default a new tensor.
        """
        if self.size == 1 or not shard.numel():
            return shard
        gathered = shard.new_empty(self.size * shard.numel()) if out is None else out
        shard = shard.contiguous()
        if self._swaps:
            yield swap(self.group, gathered.split(shard.numel()), [shard] * self.size, f"{self.name}_all_gather")
        else:
            yield self._start("all_gather", dist.all_gather_into_tensor, gathered, shard)
        return gathered

    def _exchange(self, received: Tensor, sent: Tensor, splits: Sequence[int], operation: str) -> Any:
        """Start an all-to-all; its handle.

        Args:
            received: 1D, ``size`` parts of equal length, one from each rank.
            sent: 1D, a part for each rank.
            splits: lengths of the parts of ``sent``, the same on all ranks.
            operation: for the records.
        """
        mine = [splits[self.rank]] * self.size
        if self._swaps:
            return swap(self.group, received.split(mine), sent.split(list(splits)), f"{self.name}_{operation}")
        return self._start(operation, dist.all_to_all_single, received, sent, mine, list(splits))


class _All:
    """Several started communications as one handle; may be waited for again."""

    def __init__(self, handles: Iterable[Any]) -> None:
        self._handles = list(handles)

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()


# A connection breaks if a message that was announced is not taken. So whoever drops a transfer does not drop its
# messages: they are kept until somebody has waited for them, or the group is gone.
_under_way: "weakref.WeakKeyDictionary[Any, set[_Swap]]" = weakref.WeakKeyDictionary()


class _Swap(_All):
    """The messages of a swap."""

    def __init__(self, group: Any, handles: Iterable[Any]) -> None:
        super().__init__(handles)
        self._others = _under_way.setdefault(group, set())
        self._others.add(self)

    def wait(self) -> None:
        super().wait()
        self._handles.clear()  # a second wait for such a message would block
        self._others.discard(self)


def swap(group: Any, received: Sequence[Tensor], sent: Sequence[Tensor], log_name: str) -> _Swap:
    """Start an all-to-all of messages between pairs of ranks; its handle.

    For gloo, whose collectives send before they say that they are ready to receive. Then the rank that comes last
    puts its whole message before these words, and the other one waits for it: the link is used in one direction at a
    time (measured: up to twice the time). Here all receives are posted first.

    Args:
        group: process group.
        received: from each rank, contiguous.
        sent: to each rank, contiguous.
        log_name: for the records of the comms logger.
    """
    rank, size = dist.get_rank(group=group), len(sent)
    received[rank].copy_(sent[rank])
    # Each rank begins with the one behind it, so that not all begin with the same.
    others = [((rank + step) % size, (rank - step) % size) for step in range(1, size)]
    receives = [(dist.irecv, received[source], source) for _, source in others]
    sends = [(dist.isend, sent[target], target) for target, _ in others]
    started = [
        dist.P2POp(operation, part, dist.get_global_rank(group, peer), group)
        for operation, part, peer in receives + sends
        if part.numel()
    ]
    return _Swap(group, dist.batch_isend_irecv(started, log_name=log_name) if started else ())


class ExchangeHop(Hop):
    """For gloo: an all-to-all and a local sum.

    gloo's reduce-scatter sends what an all-reduce would, twice the bytes (measured at the interface). Unequal parts
    cost nothing extra here, the sum is taken in fp32, and its order is fixed.
    """

    def reduce_scatter(self, flat: Tensor, splits: Sequence[int], contents: Contents = ()) -> Transfer:
        if self.size == 1 or not flat.numel():
            return flat
        mine = splits[self.rank]
        parts = flat.new_empty(self.size * mine)
        yield self._exchange(parts, flat, splits, "reduce_scatter")
        total = parts[:mine].float()
        for part in range(1, self.size):
            total += parts[part * mine : (part + 1) * mine]
        return total.to(flat.dtype)


class NativeHop(Hop):
    """For backends whose reduce-scatter is one (NCCL): equal parts by reduce-scatter, unequal ones as is cheaper."""

    def lengths(self, splits: Sequence[int]) -> list[int]:
        filled = super().lengths(splits)
        longest = max(filled)
        # A rank receives (size-1)*longest by a padded reduce-scatter, and about all of the message by a chain of
        # rooted reduces, one to the owner of each part.
        return [longest] * self.size if (self.size - 1) * longest <= sum(filled) else filled

    def reduce_scatter(self, flat: Tensor, splits: Sequence[int], contents: Contents = ()) -> Transfer:
        if self.size == 1 or not flat.numel():
            return flat
        lengths, mine = self.lengths(splits), splits[self.rank]
        if lengths != list(splits):
            flat = joined(flat.split(list(splits)), lengths)
        if len(set(lengths)) == 1:
            part = flat.new_empty(lengths[0])
            yield self._start("reduce_scatter", dist.reduce_scatter_tensor, part, flat)
            return part[:mine]
        parts = flat.split(lengths)
        yield self._reduce_each(parts)
        return parts[self.rank][:mine].clone()  # a view would keep the message through the next hop

    def _reduce_each(self, parts: Sequence[Tensor]) -> Any:
        """Start a rooted reduce of each part, all as one launch where that can be: else each waits for the one before
        it to go through all ranks."""
        together = _launches_together(self.group, parts[0].device)
        with get_coalescing_manager(self.group, parts[0].device, [], True) if together else nullcontext() as launch:
            handles = [
                self._start("reduce_scatter", dist.reduce, part, dist.get_global_rank(self.group, owner))
                for owner, part in enumerate(parts)
                if part.numel()
            ]
        return launch if together else _All(handles)

    def all_reduce(self, flat: Tensor, runs: Part = ()) -> Transfer:
        if self.size > 1 and flat.numel():
            yield self._start("all_reduce", dist.all_reduce, flat)
        return flat


class AllReduceHop(NativeHop):
    """For ``reduce_scatter: false``: an all-reduce of everything, of which a rank keeps its part."""

    def lengths(self, splits: Sequence[int]) -> list[int]:
        return Hop.lengths(self, splits)

    def reduce_scatter(self, flat: Tensor, splits: Sequence[int], contents: Contents = ()) -> Transfer:
        flat = yield from self.all_reduce(flat)
        return flat.split(list(splits))[self.rank].clone() if self.size > 1 else flat


def _launches_together(group: Any, device: torch.device) -> bool:
    """Whether the backend can start several collectives as one; not while DeepSpeed's comms logger times each."""
    return not comms_logger.enabled and group._get_backend(device).supports_coalescing


MakeHop = Callable[[Any, str, bool], Hop]  # arguments as those of ``make_hop``


def make_hop(group: Any, name: str, reduce_scatter: bool = True) -> Hop:
    """The plain hop for this group's backend; ``reduce_scatter`` is DeepSpeed's key of that name."""
    if not reduce_scatter:
        return AllReduceHop(group, name)
    return (ExchangeHop if _backend(group) == "gloo" else NativeHop)(group, name)


def _backend(group: Any) -> str:
    """The backend for tensors of the accelerator; a group may have one for each kind of device."""
    device = get_accelerator().device_name().partition(":")[0]
    backends = dict(
        entry.split(":") for entry in torch.distributed.get_backend_config(group).split(",") if ":" in entry
    )
    return backends.get(device, torch.distributed.get_backend(group))


class InFlight:
    """Runs transfers. Overlapped, each submitted transfer moves all earlier ones on by one hop first.

    So at most as many transfers are open as one has hops, and all ranks start the same communications in the same
    order.
    """

    def __init__(self, overlap: bool) -> None:
        self._overlap = overlap
        self._open: deque[tuple[Transfer, Any]] = deque()

    def submit(self, transfer: Transfer) -> None:
        """Start a transfer; without overlap, also finish it."""
        self._advance()
        self._resume(transfer)
        if not self._overlap:
            self.drain()

    def drain(self) -> None:
        """Finish all transfers."""
        while self._open:
            self._advance()

    def drop(self) -> None:
        """Leave all transfers where they are: nobody will read what they bring."""
        self._open.clear()

    def _advance(self) -> None:
        for _ in range(len(self._open)):
            transfer, handle = self._open.popleft()
            handle.wait()
            self._resume(transfer)

    def _resume(self, transfer: Transfer) -> None:
        with suppress(StopIteration):
            self._open.append((transfer, next(transfer)))


class Started:
    """A transfer whose first hop is on the wire; ``complete`` runs the rest, and ``finish`` hands out the result, to
    several streams if need be.

    Args:
        transfer: what to start.
        hops: of how many communications it is made at most. Where waiting for one orders streams and does not block
            the host, all are started at once.
    """

    def __init__(self, transfer: Transfer, hops: int = 1) -> None:
        self._transfer = transfer
        self._handle: Any = None
        self._result: Tensor | None = None
        self._streams = not get_accelerator().is_synchronized_device()
        self._home = get_accelerator().current_stream()
        self._done: Any = None  # event: the result is complete
        self._resume()
        if self._streams:
            for _ in range(hops - 1):
                if self._result is None:
                    self._handle.wait()
                    self._resume()

    def complete(self) -> None:
        """Run the rest, where the transfer was started: the memory of its messages is that stream's."""
        with get_accelerator().stream(self._home):
            while self._result is None:
                self._handle.wait()
                self._resume()

    def finish(self) -> Tensor:
        """The transfer's result, complete for what the current stream runs from now on.

        To wait for the handle again would not do, for results may be made of what has arrived.
        """
        self.complete()
        assert self._result is not None
        if self._streams and get_accelerator().current_stream() != self._home:
            get_accelerator().current_stream().wait_event(self._done)
            self._result.record_stream(get_accelerator().current_stream())
        return self._result

    def _resume(self) -> None:
        try:
            self._handle = next(self._transfer)
        except StopIteration as done:
            self._result = done.value
            if self._streams:
                self._done = get_accelerator().Event()
                self._done.record()
