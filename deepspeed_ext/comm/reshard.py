# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Moves of flat buffers between placements, made of hops; see Note [Hops and transfers] in ``hops.py``.

Note [Flat buffers, cells and slices]
    A flat buffer is cut into rows x cols *cells* of ``chunk`` elements; cell (row j, column i) starts at element
    (j*cols + i)*chunk. With columns = numbers in the group (m) and rows = groups (k), cell (j, i) is the chunk that
    ZeRO gives to data-parallel rank j*m + i. The I-slice of a rank is its column, the *strided* chunks
    {i, m+i, 2m+i, ...}: a reduce-scatter of it between groups lands on exactly ZeRO's chunk, so checkpoints need no
    permutation. Where the optimizer's states are not cut between groups there is one row, and the slice is
    contiguous.
    With p = N the flat buffer is all parameters of a parameter group, as in ZeRO-1/2; with p = I or G it is each
    parameter, as in ZeRO-3, and the cells of several parameters travel side by side: (cols, rows, width).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.comm.hops import Contents, Hop, Run, Transfer, aligned, fill_up, joined
from deepspeed_ext.comm.process_groups import Topology
from deepspeed_ext.strategy import Placement

# What starts of windows are multiples of, the first of them that fits: whole blocks of LoCo, aligned messages.
_STRIDES = (512, 16)


def windows(numel: int, rows: int, most: int) -> list[tuple[int, int]]:
    """Windows (start, length) over ``numel`` columns, such that ``rows`` of one have at most ``most`` elements."""
    width = max(1, most // rows)
    width -= width % next((stride for stride in _STRIDES if stride <= width), 1)
    return [(start, min(width, numel - start)) for start in range(0, numel, width)]


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
        return windows(self.chunk, self.rows, most)

    def pack(self, flat: Tensor, cells: Tensor) -> None:
        """Copy the flat buffer into its cells, with zeros behind its end.

        Args:
            flat: 1D of ``numel`` elements.
            cells: (cols, rows, chunk), of any dtype and strides.
        """
        missing = self.rows * self.cols * self.chunk - self.numel
        whole = torch.nn.functional.pad(flat, (0, missing)) if missing else flat
        cells.copy_(whole.view(self.rows, self.cols, self.chunk).transpose(0, 1))

    def unpack(self, cells: Tensor) -> Tensor:
        """The flat buffer, 1D of ``numel`` elements, from its cells (cols, rows, chunk); a view where that can be."""
        return cells.transpose(0, 1).reshape(-1)[: self.numel]

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


@dataclass(frozen=True, eq=False)
class BucketPlan:
    """Where the parts of a bucket go, sorted by owner.

    Attributes:
        sources: (offset, numel) in the bucket, in the order of ``runs``.
        runs: for each column, what its part of the message holds, in order.
    """

    sources: tuple[tuple[int, int], ...]
    runs: tuple[tuple[Run, ...], ...]

    def splits(self, col: int, rows: int) -> list[int]:
        """Elements of a column's part for each group."""
        splits = [0] * rows
        for run in self.runs[col]:
            splits[run.row] += run.numel
        return splits

    def rows_of(self, col: int, rows: int) -> Contents:
        """What a column's part holds for each group."""
        parts: list[list[Run]] = [[] for _ in range(rows)]
        for run in self.runs[col]:
            parts[run.row].append(run)
        return tuple(tuple(part) for part in parts)


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
        runs=tuple(tuple(column) for column in runs),
    )


class _BucketMessage(NamedTuple):
    """How the message of a bucket is made. Its parts are filled up as the first hop likes, rows as both can bear.

    Attributes:
        pieces: (offset, numel) in the bucket, in the order of the message; offset -1: zeros.
        splits: elements for each number in the group.
        rows: of this rank's part, elements for each group; None where it stays in the group.
    """

    pieces: list[tuple[int, int]]
    splits: list[int]
    rows: list[int] | None


class Moves:
    """The moves of one rank: an intra and an inter hop, composed.

    Attributes:
        multiple: of which parts of messages are multiples, in elements; see ``Hop``.
    """

    def __init__(self, intra: Hop, inter: Hop) -> None:
        self.intra = intra
        self.inter = inter
        self.multiple = max(intra.multiple, inter.multiple)
        self._messages: WeakKeyDictionary[BucketPlan, dict[Placement, _BucketMessage]] = WeakKeyDictionary()

    def _reduce(
        self, message: Tensor, splits: Sequence[int], rows: Sequence[int] | None, contents: Contents = ()
    ) -> Transfer:
        """N -> I or, with ``rows``, N -> G.

        Args:
            message: 1D, a part for each number in the group; may be overwritten.
            splits: elements of each part, the same on all ranks.
            rows: elements of this rank's part for each group.
            contents: what these hold.

        Returns:
            1D: the sum of this rank's part, or of its row of that part.
        """
        # One name for all: what a hop has consumed is freed while the next is on the wire.
        message = yield from self.intra.reduce_scatter(message, splits)
        if rows is not None:
            message = yield from self.inter.reduce_scatter(message[: sum(rows)], rows, contents)
        return message

    def pack_bucket(self, tensors: Sequence[Tensor], plan: BucketPlan, target: Placement) -> Tensor:
        """The message of ``reduce_bucket``, in one copy.

        Args:
            tensors: 1D each: the bucket, or one for each range of it.
            plan: from ``plan_bucket``, the same on all ranks.
            target: I or G.
        """
        zero = tensors[0].new_zeros(1)
        starts = [0, *accumulate(tensor.numel() for tensor in tensors)]

        def piece(offset: int, numel: int) -> Tensor:
            if offset < 0:
                return zero.expand(numel)
            number = bisect_right(starts, offset) - 1
            return tensors[number].narrow(0, offset - starts[number], numel)

        return torch.cat([piece(*place) for place in self._bucket_message(plan, target).pieces])

    def _bucket_message(self, plan: BucketPlan, target: Placement) -> _BucketMessage:
        made = self._messages.setdefault(plan, {})
        if target not in made:
            made[target] = self._lay_out(plan, target)
        return made[target]

    def _lay_out(self, plan: BucketPlan, target: Placement) -> _BucketMessage:
        splits = [plan.splits(col, self.inter.size) for col in range(self.intra.size)]
        if target == Placement.I:
            splits = [[sum(rows)] for rows in splits]
        filled = [[fill_up(split, self.multiple) for split in rows] for rows in splits]
        lengths = self.intra.lengths([sum(rows) for rows in filled])
        pieces: list[tuple[int, int]] = []
        sources = iter(plan.sources)
        for rows, filled_rows, length in zip(splits, filled, lengths, strict=True):
            for split, full in zip(rows, filled_rows, strict=True):
                missing = full - split
                while split:
                    pieces.append(next(sources))
                    split -= pieces[-1][1]
                pieces += [(-1, missing)] if missing else []
            missing = length - sum(filled_rows)
            pieces += [(-1, missing)] if missing else []
        return _BucketMessage(pieces, lengths, filled[self.intra.rank] if target == Placement.G else None)

    def reduce_bucket(self, message: Tensor, plan: BucketPlan, target: Placement) -> Transfer:
        """N -> I or N -> G of the parts of a bucket.

        Args:
            message: 1D, as ``pack_bucket`` makes it; may be overwritten.
            plan: from ``plan_bucket``, the same on all ranks.
            target: I or G.

        Returns:
            1D: the sums of this rank's ``bucket_runs(plan, target)``; what is behind them is padding.
        """
        _, splits, rows = self._bucket_message(plan, target)
        remembered = rows is not None and self.inter.memory.remembers
        contents = plan.rows_of(self.intra.rank, self.inter.size) if remembered else ()
        return self._reduce(message, splits, rows, contents)

    def reduce_cells(self, cells: Tensor, target: Placement, runs: Sequence[tuple[int, int]]) -> Transfer:
        """N -> I or N -> G of buffers that are cut each by itself.

        Args:
            cells: (cols, rows, width), the cells of all buffers side by side; may be overwritten. Cheapest if the
                width is a multiple of ``multiple``.
            target: I or G.
            runs: (start, numel) in the rank's shard of what a row holds; behind them is padding.

        Returns:
            1D: for I this rank's column, ``rows * width`` elements; for G its cell, ``width``.
        """
        cols, rows, width = cells.shape
        splits = [width] * rows if target == Placement.G else None
        contents = self._contents(rows, runs) if target == Placement.G else ()
        return self._reduce(cells.view(-1), [rows * width] * cols, splits, contents)

    def reduce_rows(self, window: Tensor, runs: Sequence[tuple[int, int]], buffer: int = 0) -> Transfer:
        """I -> G of a part of a slice.

        Args:
            window: (rows, width), contiguous; may be overwritten. Cheapest if the width is a multiple of ``multiple``.
            runs: (start, numel) in the rank's shard of what a row holds; behind them is padding.
            buffer: whose slice it is.

        Returns:
            1D: this rank's row, ``width`` elements.
        """
        rows, width = window.shape
        return self.inter.reduce_scatter(window.view(-1), [width] * rows, self._contents(rows, runs, buffer))

    def _contents(self, rows: int, runs: Sequence[tuple[int, int]], buffer: int = 0) -> Contents:
        """What a message between groups holds, whose rows hold the same of each chunk. Nobody else asks for it than
        hops that remember: it takes rows x runs objects for each message."""
        if not self.inter.memory.remembers:
            return ()
        return tuple(tuple(Run(buffer, row, *run) for run in runs) for row in range(rows))

    def bucket_runs(self, plan: BucketPlan, target: Placement) -> list[Run]:
        """What ``reduce_bucket`` returns on this rank, in order."""
        runs = plan.runs[self.intra.rank]
        return [run for run in runs if target == Placement.I or run.row == self.inter.rank]

    def sync_slice(
        self, window: Tensor, dtype: torch.dtype, target: Placement, start: int, buffer: int = 0
    ) -> Transfer:
        """I -> G -> ``target`` of a window of a slice: a reduce, or an all-reduce where the target is coarser than G.

        Args:
            window: (rows, width): a window of each chunk of the I-slice, on any device; may be overwritten.
            dtype: on the wire.
            target: G, I or N.
            start: of the window in each chunk.
            buffer: whose slice it is.

        Returns:
            (parts, width): for G this rank's row, for I the sums of every row, for N those of every column and row.
        """
        width = window.shape[1]
        message = self._message(window, dtype)
        if target == Placement.G:
            total = yield from self.reduce_rows(message, [(start, width)], buffer)
        else:
            contents = self._contents(1, [(start, width)], buffer)  # of one row
            total = yield from self.inter.all_reduce(message.view(-1), *contents)
            total = yield from self.gather(total, Placement.I, target)
        return total.view(-1, message.shape[1])[:, :width]

    def _message(self, window: Tensor, dtype: torch.dtype) -> Tensor:
        """(rows, width and padding), contiguous; a view where that can be."""
        rows, width = window.shape
        device = get_accelerator().current_device_name()
        if not width % self.multiple:
            message = window.to(device=device, dtype=dtype).contiguous()
            if not message.storage_offset() % self.multiple:
                return message
        message = torch.empty(rows, fill_up(width, self.multiple), dtype=dtype, device=device)
        message[:, :width].copy_(window)
        message[:, width:].zero_()
        return message

    def align(self, shard: Tensor) -> Tensor:
        """A shard (1D) filled up, so that a gather of it is as fast as can be; as it is where that can be."""
        return aligned(shard, self.multiple)

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Pieces of a shard (1D each) one after the other, filled up likewise."""
        lengths = [piece.numel() for piece in pieces]
        lengths[-1] += fill_up(sum(lengths), self.multiple) - sum(lengths)
        return joined(pieces, lengths)

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

    def gather_hops(self, source: Placement, target: Placement) -> int:
        """Of how many communications that gather is made at most."""
        between = source == Placement.G > target and self.inter.size > 1
        within = source > target == Placement.N and self.intra.size > 1
        return int(between) + int(within)
