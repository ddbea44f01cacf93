# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Moves of flat buffers between placements, made of hops.

Note [Flat buffers, cells and slices]
    A flat buffer is cut into rows x cols *cells* of ``chunk`` elements; cell (row j, column i) starts at element
    (j*cols + i)*chunk. With columns = numbers in the group (m) and rows = groups (k), cell (j, i) is the chunk that
    ZeRO gives to data-parallel rank j*m + i. The I-slice of a rank is its column, the *strided* chunks
    {i, m+i, 2m+i, ...}: a reduce-scatter of it between groups lands on exactly ZeRO's chunk, so checkpoints need no
    permutation. Where the optimizer's states are not cut between groups there is one row, and the slice is
    contiguous.

Note [Hops and transfers]
    A hop is a sum or a gather over one process group. Its methods are generators: they start one communication,
    yield its handle, and go on when it is done; the result is the generator's return value. A *transfer* composes
    them into a move. ``InFlight`` runs transfers, one after the other or overlapped: the first hop of a transfer is
    on the wire while the one before it is in its second hop.
"""

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.placement import Placement
from deepspeed_ext.topology import Topology

Transfer = Generator[Any, None, Tensor]  # yields handles with a wait() method


class Hop(ABC):
    """One leg of a move, over one process group of ``size`` ranks.

    ``reduce_scatter`` is the one to replace: a compressed reduction implements it, and gets ``all_reduce`` for it.
    Sums are taken in rank order in fp32, or as the backend does; every rank of the group gets the same bits.
    """

    def __init__(self, group: Any, name: str = "hop") -> None:
        self.group = group
        self.name = name  # in the records of DeepSpeed's comms logger: intra_all_gather, inter_reduce_scatter, ...
        self.size: int = dist.get_world_size(group=group)
        self.rank: int = dist.get_rank(group=group)

    def _options(self, operation: str) -> dict[str, Any]:
        return {"group": self.group, "async_op": True, "log_name": f"{self.name}_{operation}"}

    @abstractmethod
    def reduce_scatter(self, flat: Tensor, splits: Sequence[int]) -> Transfer:
        """Sum of ``flat`` (1D) over the group, of which this rank gets part ``rank``.

        Args:
            flat: 1D, the parts one after the other; may be overwritten.
            splits: length of each part, the same on all ranks; they may differ.

        Returns:
            1D of ``splits[rank]`` elements, dtype of ``flat``.
        """

    def all_reduce(self, flat: Tensor) -> Transfer:
        """Sum of ``flat`` (1D) over the group, on all ranks; ``flat`` may be overwritten."""
        if self.size == 1 or not flat.numel():
            return flat
        part = -(-flat.numel() // self.size)
        padded = torch.nn.functional.pad(flat, (0, part * self.size - flat.numel()))
        mine = yield from self.reduce_scatter(padded, [part] * self.size)
        gathered = yield from self.all_gather(mine)
        return gathered[: flat.numel()]

    def all_gather(self, shard: Tensor) -> Transfer:
        """The ``shard`` (1D) of every rank of the group, in rank order: 1D of ``size * shard.numel()`` elements."""
        if self.size == 1 or not shard.numel():
            return shard
        gathered = shard.new_empty(self.size * shard.numel())
        yield dist.all_gather_into_tensor(gathered, shard.contiguous(), **self._options("all_gather"))
        return gathered


class ExchangeHop(Hop):
    """For gloo: an all-to-all and a local sum.

    gloo's reduce-scatter sends what an all-reduce would, twice the bytes (measured at the interface). Unequal parts
    cost nothing extra here, the sum is taken in fp32, and its order is fixed.
    """

    def reduce_scatter(self, flat: Tensor, splits: Sequence[int]) -> Transfer:
        if self.size == 1 or not flat.numel():
            return flat
        mine = splits[self.rank]
        parts = flat.new_empty(self.size * mine)
        yield dist.all_to_all_single(parts, flat, [mine] * self.size, list(splits), **self._options("reduce_scatter"))
        total = parts[:mine].float()
        for part in range(1, self.size):
            total += parts[part * mine : (part + 1) * mine]
        return total.to(flat.dtype)


class _All:
    """Several started communications as one handle."""

    def __init__(self, handles: Iterable[Any]) -> None:
        self._handles = list(handles)

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()


class NativeHop(Hop):
    """For backends whose reduce-scatter is one (NCCL): equal parts by reduce-scatter, unequal ones as is cheaper."""

    def reduce_scatter(self, flat: Tensor, splits: Sequence[int]) -> Transfer:
        if self.size == 1 or not flat.numel():
            return flat
        longest = max(splits)
        # A rank receives (size-1)*longest by a padded reduce-scatter, and about all of flat by a chain of rooted
        # reduces, one to the owner of each part.
        if (self.size - 1) * longest <= flat.numel():
            return (yield from self._padded(flat, splits, longest))
        parts = flat.split(list(splits))
        yield _All(
            dist.reduce(part, dist.get_global_rank(self.group, owner), **self._options("reduce_scatter"))
            for owner, part in enumerate(parts)
            if part.numel()
        )
        return parts[self.rank]

    def _padded(self, flat: Tensor, splits: Sequence[int], longest: int) -> Transfer:
        if any(split != longest for split in splits):
            rows = flat.new_zeros(self.size, longest)
            for row, part in zip(rows, flat.split(list(splits)), strict=True):
                row[: part.numel()].copy_(part)
            flat = rows.view(-1)
        mine = flat.new_empty(longest)
        yield dist.reduce_scatter_tensor(mine, flat, **self._options("reduce_scatter"))
        return mine[: splits[self.rank]]

    def all_reduce(self, flat: Tensor) -> Transfer:
        if self.size > 1 and flat.numel():
            yield dist.all_reduce(flat, **self._options("all_reduce"))
        return flat


class AllReduceHop(NativeHop):
    """For ``reduce_scatter: false``: an all-reduce of everything, of which a rank keeps its part."""

    def reduce_scatter(self, flat: Tensor, splits: Sequence[int]) -> Transfer:
        flat = yield from self.all_reduce(flat)
        return flat.split(list(splits))[self.rank] if self.size > 1 else flat


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

    def _advance(self) -> None:
        for _ in range(len(self._open)):
            transfer, handle = self._open.popleft()
            handle.wait()
            self._resume(transfer)

    def _resume(self, transfer: Transfer) -> None:
        with contextlib.suppress(StopIteration):
            self._open.append((transfer, next(transfer)))


@dataclass(frozen=True)
class FlatLayout:
    """How a flat buffer of ``numel`` elements is cut into cells; see Note [Flat buffers, cells and slices]."""

    numel: int
    rows: int
    cols: int

    @classmethod
    def of(cls, numel: int, placement: Placement, topology: Topology) -> "FlatLayout":
        """The layout of a buffer whose optimizer states are in ``placement``."""
        rows = topology.cluster.groups if placement == Placement.G else 1
        return cls(numel, rows, topology.cluster.group_size)

    @property
    def chunk(self) -> int:
        """Elements of a cell. The last cells reach over the end where ``numel`` does not divide."""
        return -(-self.numel // (self.rows * self.cols))

    def windows(self, most: int) -> list[tuple[int, int]]:
        """Windows (start, length) over the chunk, such that a window of all rows has at most ``most`` elements."""
        width = max(1, most // self.rows)
        return [(x, min(width, self.chunk - x)) for x in range(0, self.chunk, width)]

    def place(self, flat: Tensor, start: int, cells: Tensor, add: bool = False) -> None:
        """Copy (or add) a window of every cell into the flat buffer.

        Args:
            flat: 1D of ``numel`` elements.
            start: first element of the window within each chunk.
            cells: (cols, rows, width), as a gather inside the group of gathers between groups gives it.
            add: add to what is there.
        """
        width = cells.shape[-1]
        if self.numel == self.rows * self.cols * self.chunk:
            view = flat.view(self.rows, self.cols, self.chunk)[:, :, start : start + width]
            parts = [(view, cells.transpose(0, 1))]
        else:  # cell by cell; the last ones may end early
            parts = []
            for index in range(self.rows * self.cols):
                first = index * self.chunk + start
                length = max(0, min(width, self.numel - first))
                parts.append((flat[first : first + length], cells[index % self.cols, index // self.cols, :length]))
        for target, source in parts:
            target.add_(source) if add else target.copy_(source)


class Range(NamedTuple):
    """Elements ``start`` to ``start + numel`` of flat buffer number ``buffer``."""

    buffer: int
    start: int
    numel: int


class Run(NamedTuple):
    """A stretch of a message that belongs at ``start`` of a rank's shard (slice or chunk) of buffer ``buffer``."""

    buffer: int
    row: int
    start: int  # within the cell
    numel: int


@dataclass(frozen=True)
class BucketPlan:
    """Where the parts of a bucket go, sorted by owner.

    Attributes:
        sources: (offset, numel) in the bucket, in the order of the message.
        col_splits: elements of the message for each number in the group.
        runs: for each column, what its part of the message holds, in order.
    """

    sources: tuple[tuple[int, int], ...]
    col_splits: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]

    def row_splits(self, col: int, rows: int) -> list[int]:
        """Elements of a column's part for each group."""
        splits = [0] * rows
        for run in self.runs[col]:
            splits[run.row] += run.numel
        return splits


@lru_cache(maxsize=4096)  # training repeats the same buckets
def plan_bucket(layouts: tuple[FlatLayout, ...], ranges: tuple[Range, ...]) -> BucketPlan:
    """Cut a bucket that holds ``ranges``, one after the other, along the cells of their buffers."""
    pieces: list[tuple[int, int, int, int, int, int]] = []  # col, row, buffer, start in cell, numel, offset
    offset = 0
    for buffer, start, numel in ranges:
        layout, end = layouts[buffer], start + numel
        while start < end:
            cell, within = divmod(start, layout.chunk)
            length = min(end - start, layout.chunk - within)
            pieces.append((cell % layout.cols, cell // layout.cols, buffer, within, length, offset))
            start, offset = start + length, offset + length
    pieces.sort()
    runs: list[list[Run]] = [[] for _ in range(layouts[0].cols)]
    for col, row, buffer, within, length, _ in pieces:
        last = runs[col][-1] if runs[col] else None
        if last and (last.buffer, last.row, last.start + last.numel) == (buffer, row, within):
            runs[col][-1] = last._replace(numel=last.numel + length)
        else:
            runs[col].append(Run(buffer, row, within, length))
    return BucketPlan(
        sources=tuple((offset, length) for *_, length, offset in pieces),
        col_splits=tuple(sum(run.numel for run in column) for column in runs),
        runs=tuple(tuple(column) for column in runs),
    )


class Moves:
    """The moves of one rank: an intra and an inter hop, composed."""

    def __init__(self, intra: Hop, inter: Hop) -> None:
        self.intra = intra
        self.inter = inter

    def reduce_bucket(self, message: Tensor, plan: BucketPlan, target: Placement) -> Transfer:
        """N -> I or N -> G of the parts of a bucket.

        Args:
            message: 1D, the bucket in the order of ``plan.sources``; may be overwritten.
            plan: from ``plan_bucket``, the same on all ranks.
            target: I or G.

        Returns:
            1D: the sums of this rank's ``bucket_runs(plan, target)``.
        """
        # One name for all: what a hop has consumed is freed while the next is on the wire.
        message = yield from self.intra.reduce_scatter(message, plan.col_splits)
        if target == Placement.G:
            splits = plan.row_splits(self.intra.rank, self.inter.size)
            message = yield from self.inter.reduce_scatter(message, splits)
        return message

    def bucket_runs(self, plan: BucketPlan, target: Placement) -> list[Run]:
        """What ``reduce_bucket`` returns on this rank, in order."""
        runs = plan.runs[self.intra.rank]
        return [run for run in runs if target == Placement.I or run.row == self.inter.rank]

    def sync_slice(self, window: Tensor, target: Placement) -> Transfer:
        """I -> G -> ``target`` of a window of a slice: a reduce, or an all-reduce where the target is coarser than G.

        Args:
            window: (rows, width), contiguous: a window of each chunk of the I-slice; may be overwritten.
            target: G, I or N.

        Returns:
            1D: for G this rank's row, ``width`` elements; for I the sums, ``rows * width``; for N those of every
            column, ``cols * rows * width``.
        """
        if target == Placement.G:
            return (yield from self.inter.reduce_scatter(window.view(-1), [window.shape[1]] * self.inter.size))
        total = yield from self.inter.all_reduce(window.view(-1))
        return (yield from self.gather(total, Placement.I, target))

    def gather(self, shard: Tensor, source: Placement, target: Placement) -> Transfer:
        """G -> I, I -> N or G -> N of a window of this rank's shard: between groups first, while it is smallest.

        Args:
            shard: 1D; for G a window of this rank's chunk (``width`` elements), for I the same of each row of its
                slice (``rows * width``).

        Returns:
            1D: for I ``rows * width`` elements, for N ``cols * rows * width``, in that order.
        """
        if source == Placement.G > target:
            shard = yield from self.inter.all_gather(shard)
        if source > target == Placement.N:
            shard = yield from self.intra.all_gather(shard)
        return shard
