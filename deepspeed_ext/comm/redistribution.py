# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Redistributes flat buffers: N <-> I <-> G, by at most two hops; see Note [Hops and transfers] in ``hops.py``."""

import functools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.comm.agreement import all_reduce_max
from deepspeed_ext.comm.hops import (
    GatherHop,
    Hop,
    ReduceHop,
    Transfer,
    Update,
    all_gather,
)
from deepspeed_ext.comm.layout import BucketPlan, RowRange
from deepspeed_ext.comm.packing import align, align_rows, fill_up, record_on_current_stream
from deepspeed_ext.comm.spans import BufferSpan, Contents, ShardSpan, Span
from deepspeed_ext.strategy import Placement

# A bucket with more than this many pieces per strided copy is packed by strided copies. With fewer, one ``cat`` of all
# pieces takes less time than several kernels; with more, listing the pieces on the host takes longer.
_PIECES_PER_COPY = 4


class _Redistribution:
    """Composes an intra and an inter hop. This rank is in column ``col`` and row ``row`` of a flat buffer's cells.

    Attributes:
        multiple: elements; parts of buckets are cheapest to send if their lengths are multiples of it.
        pairwise: whether both hops are pairwise.
    """

    def __init__(self, intra: Hop, inter: Hop) -> None:
        self.cols, self.col = intra.size, intra.rank
        self.rows, self.row = inter.size, inter.rank
        self.multiple = max(intra.multiple, inter.multiple)
        self.pairwise = intra.pairwise and inter.pairwise


class ParameterRedistribution(_Redistribution):
    """Gathers parameters: G -> I, I -> N, G -> N.

    Attributes:
        exact: whether both hops are exact.
        differences: encodes updates between groups as differences; None if they are unencoded.
    """

    def __init__(self, intra: GatherHop, inter: GatherHop) -> None:
        super().__init__(intra, inter)
        self.intra = intra
        self.inter = inter
        self.exact = intra.exact and inter.exact
        self.differences = inter.differences

    def gather(self, shard: Tensor, source: Placement, target: Placement, out: Tensor | None = None) -> Transfer:
        """All-gather a window of this rank's shard: between groups first, while it is smallest.

        Args:
            shard: 1D; for G a window of this rank's chunk (``width`` elements), for I that window of each row of its
                slice (``rows * width``).
            source, target: placements.
            out: output of the intra hop; by default a new tensor.

        Returns:
            1D: for I ``rows * width`` elements, for N ``cols * rows * width``, in that order.
        """
        if source == Placement.G > target:
            shard = yield from self.inter.all_gather(shard)
        if source > target == Placement.N:
            shard = yield from self.intra.all_gather(shard, out)
        return shard

    def count_hops(self, source: Placement, target: Placement) -> int:
        """Return the number of communications of that gather."""
        between = source == Placement.G > target and self.rows > 1
        within = source > target == Placement.N and self.cols > 1
        return int(between) + int(within)

    def gather_g_to_i_in_place(self, rows: Tensor) -> Transfer:
        """Redistribute G -> I in place, unencoded: each group has written its own row.

        Args:
            rows: (rows, width), rows without gaps; with gaps between rows, they are copied from a buffer.
        """
        if rows.is_contiguous():
            return (yield from self.inter.all_gather(rows[self.row], out=rows.view(-1)))
        gathered = (yield from self.inter.all_gather(rows[self.row])).view(self.rows, -1)
        # This rank's own row is already complete.
        for other_rows in (slice(self.row), slice(self.row + 1, None)):
            rows[other_rows].copy_(gathered[other_rows])
        return rows

    def gather_encoded_g_to_i(self, code: Tensor, rows: Tensor) -> Transfer:
        """Redistribute G -> I in place, encoded: each group sends the code of its own row.

        Args:
            code: code of this rank's row, from ``encode``.
            rows: (rows, width), rows without gaps; all are written, including this rank's own.
        """
        # Another stream has written the code: its memory must not be reused before the send.
        codes = yield from self.inter.all_gather(record_on_current_stream(code))
        self.write(codes.view(self.rows, -1), rows)
        return rows

    def encode(self, updates: Sequence[Update], target: Placement) -> list[Tensor]:
        """Return codes of updated parameters, for ``gather`` or ``gather_encoded_g_to_i``; see ``Differences.encode``.

        Args:
            target: placement of the parameters; N or I.
        """
        assert self.differences is not None
        hops = (self.inter, self.intra) if target == Placement.N else (self.inter,)
        groups = [hop.collectives.group for hop in hops]
        return self.differences.encode(updates, lambda numbers: functools.reduce(all_reduce_max, groups, numbers))

    def write(self, codes: Tensor, replica: Tensor) -> None:
        """Apply codes that ``gather`` has received; see ``Differences.write``."""
        assert self.differences is not None
        self.differences.write(codes, replica)

    def finish_step(self) -> None:
        """Called at the end of each step."""
        if self.differences is not None:
            self.differences.finish_step()

    def gather_g_to_i(self, shard: Tensor) -> Transfer:
        """Redistribute G -> I, always unencoded, for parameters that no step updates: initial and frozen ones.

        Args:
            shard: 1D of ``width`` elements.

        Returns:
            1D of ``rows * width`` elements.
        """
        return all_gather(self.inter.collectives, shard)


class RowContents(NamedTuple):
    """Contents of neighboring rows of this rank's part of a bucket: ``times`` rows from ``first`` on.

    Attributes:
        spans: spans of each row, side by side.
        numels: number of elements of each span.
        lengths: number of elements of each view of the bucket, as few as possible: the spans of one row, or all rows.
    """

    first: int
    times: int
    spans: list[BufferSpan]
    numels: list[int]
    lengths: list[int]

    @classmethod
    def of(cls, rows: RowRange) -> "RowContents":
        """Return the contents of neighboring rows."""
        spans = rows.spans()
        numels = [span.numel for _, span in spans]
        return cls(rows.first, rows.times, spans, numels, numels if rows.times == 1 else [rows.times * rows.numel])


def sums_of(contents: Sequence[RowContents], reduced: Tensor) -> list[Tensor]:
    """Return the sums of each span of a reduced bucket as views: (rows, numel), or (numel,) for a single row.

    Args:
        contents: contents of the bucket.
        reduced: 1D, with padding after the contents.
    """
    lengths = [numel for row in contents for numel in row.lengths]
    parts = iter(reduced.split_with_sizes([*lengths, reduced.numel() - sum(lengths)]))
    sums: list[Tensor] = []
    for row in contents:
        if row.times == 1:
            sums += islice(parts, len(row.numels))
        else:
            sums += next(parts).view(row.times, -1).split_with_sizes(row.numels, -1)
    return sums


class _BucketParts:
    """Layout of a packed bucket, and the order of its pieces. Computed once, because training repeats its buckets.

    Args:
        blocks: (offset of the first row, elements from row to row, rows), in the order of the parts. Parts are padded
            to suit the first hop, rows to suit both hops.
        splits: elements for each rank of the group.
        rows: elements of this rank's part for each group; None if it is not sent between groups.
        contents: contents of this rank's part, or of its row.
    """

    def __init__(
        self,
        blocks: list[tuple[int, int, RowRange]],
        splits: list[int],
        rows: list[int] | None,
        contents: Sequence[RowRange],
    ) -> None:
        self._blocks, self.splits, self.rows = blocks, splits, rows
        self.contents = list(map(RowContents.of, contents))
        pieces = sum(row_range.times * len(row_range.cuts) for *_, row_range in blocks)
        self._strided = pieces > _PIECES_PER_COPY * sum(len(row_range.cuts) for *_, row_range in blocks)
        if not self._strided:
            self._order_pieces()

    def _order_pieces(self) -> None:
        """Number the pieces in the order of the bucket, then paddings; list these numbers in the packed order."""
        packed = sorted(self._pieces())
        by_offset = sorted((offset, numel) for _, offset, numel in packed)
        numbers = {offset: number for number, (offset, _) in enumerate(by_offset)}
        self._numels = [numel for _, numel in by_offset]
        self._numels_by_tensor: list[list[int]] = []
        self._paddings, self._order, end = list[int](), list[int](), 0
        for packed_offset, offset, numel in packed:
            self._pad(packed_offset - end)
            self._order.append(numbers[offset])
            end = packed_offset + numel
        self._pad(sum(self.splits) - end)

    def _pad(self, numel: int) -> None:
        if numel > 0:
            self._order.append(len(self._numels) + len(self._paddings))
            self._paddings.append(numel)

    def _pieces(self) -> Iterator[tuple[int, int, int]]:
        """Yield (offset in the packed bucket, offset in the bucket, numel) of each piece."""
        for start, pitch, rows in self._blocks:
            for row in range(rows.times):
                packed_offset = start + row * pitch
                for cut in rows.cuts:
                    yield packed_offset, cut.offset + row * cut.stride, cut.span.numel
                    packed_offset += cut.span.numel

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the packed bucket. ``tensors``: 1D each, the bucket, or one tensor for each of its spans."""
        if self._strided:
            return self._pack_by_rows(tensors)
        # One ``split`` makes all views of a tensor. A ``narrow`` for each took a third of the host's time of a bucket.
        pieces: list[Tensor] = []
        for tensor, numels in zip(tensors, self._numels_of(tensors), strict=True):
            pieces += tensor.split_with_sizes(numels)
        if self._paddings:
            pieces += tensors[0].new_zeros(sum(self._paddings)).split_with_sizes(self._paddings)
        return torch.cat([pieces[number] for number in self._order])

    def _numels_of(self, tensors: Sequence[Tensor]) -> list[list[int]]:
        """Return the elements of the pieces of each tensor. Computed once: a bucket's tensors have the same sizes."""
        if len(tensors) == 1:
            return [self._numels]
        if not self._numels_by_tensor:
            numels = iter(self._numels)
            for tensor in tensors:
                missing, own = tensor.numel(), list[int]()
                while missing:
                    own.append(next(numels))
                    missing -= own[-1]
                self._numels_by_tensor.append(own)
        return self._numels_by_tensor

    def _pack_by_rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """Pack a bucket by one strided copy for each cut, over all rows that have it."""
        starts = [0, *accumulate(tensor.numel() for tensor in tensors)]
        packed = tensors[0].new_zeros(sum(self.splits))
        for start, pitch, rows in self._blocks:
            for cut in rows.cuts:
                number = bisect_right(starts, cut.offset) - 1
                source, first = tensors[number], cut.offset - starts[number]
                shape = rows.times, cut.span.numel
                packed.as_strided(shape, (pitch, 1), start).copy_(
                    source.as_strided(shape, (cut.stride, 1), source.storage_offset() + first)
                )
                start += cut.span.numel
        return packed


class GradientRedistribution(_Redistribution):
    """Reduces gradients: N -> I, I -> G, N -> G; and gathers sums to the optimizer states' placement.

    Attributes:
        inter: the hop between groups, which may keep errors.
    """

    def __init__(self, intra: ReduceHop, inter: ReduceHop) -> None:
        super().__init__(intra, inter)
        self.intra = intra
        self.inter = inter
        # Weak keys: callers keep a limited number of plans.
        self._parts: WeakKeyDictionary[BucketPlan, dict[Placement, _BucketParts]] = WeakKeyDictionary()

    def pack_bucket(self, tensors: Sequence[Tensor], plan: BucketPlan, target: Placement) -> Tensor:
        """Sort a bucket by owners, for ``reduce_bucket``, in one copy.

        Args:
            tensors: 1D each: the bucket, or one tensor for each span of it.
            plan: from ``plan_bucket``, the same on all ranks.
            target: I or G.
        """
        return self._bucket_parts(plan, target).pack(tensors)

    def reduce_bucket(self, packed: Tensor, plan: BucketPlan, target: Placement) -> Transfer:
        """Redistribute the parts of a bucket: N -> I or N -> G.

        Args:
            packed: 1D, from ``pack_bucket``; may be overwritten.
            plan: from ``plan_bucket``, the same on all ranks.
            target: I or G.

        Returns:
            1D: the sums of this rank's ``bucket_contents(plan, target)``, followed by padding.
        """
        parts = self._bucket_parts(plan, target)
        splits, rows = parts.splits, parts.rows
        # Listing contents takes host time for each row, so only hops with errors get them.
        needs_contents = rows is not None and self.inter.keeps_errors
        return self._reduce(packed, splits, rows, plan.rows_of(self.col, self.rows) if needs_contents else ())

    def bucket_contents(self, plan: BucketPlan, target: Placement) -> Sequence[RowContents]:
        """Return the contents of ``reduce_bucket``'s result on this rank, row by row."""
        return self._bucket_parts(plan, target).contents

    def reduce_cells(self, cells: Tensor, target: Placement, spans: Sequence[Span], buffer: int = 0) -> Transfer:
        """Redistribute buffers that are sharded separately: N -> I or N -> G.

        Args:
            cells: (cols, rows, width), the cells of all buffers side by side; may be overwritten. Cheapest if the
                width is a multiple of ``multiple``.
            target: I or G.
            spans: contents of a row, as spans of the rank's shard; padding follows.
            buffer: number of their flat buffer.

        Returns:
            1D: for I this rank's column, ``rows * width`` elements; for G its cell, ``width``.
        """
        cols, rows, width = cells.shape
        splits = [width] * rows if target == Placement.G else None
        contents = self._contents(rows, spans, buffer) if target == Placement.G else ()
        return self._reduce(cells.view(-1), [rows * width] * cols, splits, contents)

    def reduce_i_to_g(self, window: Tensor, spans: Sequence[Span], buffer: int = 0) -> Transfer:
        """Redistribute a part of a slice: I -> G.

        Args:
            window: (rows, width), contiguous; may be overwritten. Cheapest if the width is a multiple of ``multiple``.
            spans: contents of a row, as spans of the rank's shard; padding follows.
            buffer: number of the flat buffer.

        Returns:
            1D: this rank's row, ``width`` elements.
        """
        rows, width = window.shape
        return self.inter.reduce_scatter(window.view(-1), [width] * rows, self._contents(rows, spans, buffer))

    def sync_slice(
        self, window: Tensor, dtype: torch.dtype, target: Placement, start: int, buffer: int = 0
    ) -> Transfer:
        """Redistribute a window of a slice: I -> G -> ``target``; see ``sync_spans``.

        Args:
            window: (rows, width): a window of each chunk of the I-slice, on any device; may be overwritten.
            dtype: dtype on the wire.
            target: G or I.
            start: start of the window in each chunk.
            buffer: number of the flat buffer.
        """
        return self.sync_spans([window], dtype, target, [Span(start, window.shape[1])], buffer)

    def sync_spans(
        self,
        windows: Sequence[Tensor],
        dtype: torch.dtype,
        target: Placement,
        spans: Sequence[Span],
        buffer: int = 0,
    ) -> Transfer:
        """Redistribute windows of a slice: I -> G -> ``target``; an all-reduce if the target is coarser than G.

        Args:
            windows: (rows, numel) of each span: windows of each chunk of the I-slice, on any device; may be
                overwritten.
            dtype: dtype on the wire.
            target: G or I.
            spans: spans of each chunk, one for each window.
            buffer: number of the flat buffer.

        Returns:
            (parts, width), the windows side by side: for G this rank's row, for I the sums of every row.
        """
        width = sum(span.numel for span in spans)
        padded = align_rows(windows, dtype, get_accelerator().current_device_name(), self.multiple)
        if target == Placement.G:
            total = yield from self.reduce_i_to_g(padded, spans, buffer)
        else:
            contents = self._contents(1, spans, buffer)  # contents of one row
            total = yield from self.inter.all_reduce(padded.view(-1), *contents)
        return total.view(-1, padded.shape[1])[:, :width]

    def gather_i_to_n(self, sums: Tensor) -> Transfer:
        """Redistribute a window of sums that all groups have: I -> N.

        Args:
            sums: 1D.

        Returns:
            (cols, numel of ``sums``).
        """
        gathered = yield from self.intra.gather_sums(align(sums, self.multiple))
        return gathered.view(self.cols, -1)[:, : sums.numel()]

    def _reduce(
        self, packed: Tensor, splits: Sequence[int], rows: Sequence[int] | None, contents: Contents = ()
    ) -> Transfer:
        """Redistribute N -> I or, with ``rows``, N -> G.

        Args:
            packed: 1D, a part for each rank of the group; may be overwritten.
            splits: elements of each part, the same on all ranks.
            rows: elements of this rank's part for each group.
            contents: contents of this rank's part for each group.

        Returns:
            1D: the sum of this rank's part, or of its row of that part.
        """
        # Reuse one name, so that the input of a hop is freed while the next hop is in flight.
        packed = yield from self.intra.reduce_scatter(packed, splits)
        if rows is not None:
            packed = yield from self.inter.reduce_scatter(packed[: sum(rows)], rows, contents)
        return packed

    def _contents(self, rows: int, spans: Sequence[Span], buffer: int = 0) -> Contents:
        """Return the contents of an inter bucket whose rows hold the same spans of each chunk.

        They take rows x spans objects for each bucket, so the result is empty for hops that keep no errors.
        """
        if not self.inter.keeps_errors:
            return ()
        return tuple(tuple(ShardSpan(buffer, row, *span) for span in spans) for row in range(rows))

    def _bucket_parts(self, plan: BucketPlan, target: Placement) -> _BucketParts:
        parts_by_target = self._parts.setdefault(plan, {})
        if target not in parts_by_target:
            parts_by_target[target] = self._lay_out(plan, target)
        return parts_by_target[target]

    def _lay_out(self, plan: BucketPlan, target: Placement) -> _BucketParts:
        def padded(numel: int) -> int:
            return fill_up(numel, self.multiple) if target == Placement.G else numel

        lengths = self.intra.lengths(
            [
                fill_up(sum(rows.times * padded(rows.numel) for rows in column), self.multiple)
                for column in plan.columns
            ]
        )
        blocks: list[tuple[int, int, RowRange]] = []
        for start, column in zip(accumulate(lengths, initial=0), plan.columns, strict=False):
            for rows in column:
                blocks.append((start, padded(rows.numel), rows))
                start += rows.times * padded(rows.numel)
        own_splits = [padded(split) for split in plan.splits(self.col, self.rows)] if target == Placement.G else None
        contents = plan.columns[self.col] if target == Placement.I else plan.row(self.col, self.row)
        return _BucketParts(blocks, lengths, own_splits, contents)
