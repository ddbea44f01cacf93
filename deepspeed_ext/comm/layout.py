# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""How flat buffers are divided into cells, and where the parts of a bucket belong.

Note [Flat buffers, cells and slices]
    A flat buffer is divided into rows x cols *cells* of ``chunk`` elements; cell (row j, column i) starts at element
    (j*cols + i)*chunk. With columns = numbers in the group (m) and rows = groups (k), cell (j, i) is the chunk that
    ZeRO gives to data-parallel rank j*m + i. The I-slice of a rank is its column, the *strided* chunks
    {i, m+i, 2m+i, ...}: a reduce-scatter of it between groups lands on exactly ZeRO's chunk, so checkpoints need no
    permutation. Where the optimizer's states are not sharded between groups there is one row, and the slice is
    contiguous.
    With p = N the flat buffer is all parameters of a parameter group, as in ZeRO-1/2; with p = I or G it is each
    parameter, as in ZeRO-3, and the cells of several parameters travel side by side: (cols, rows, width).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.comm.hops import Contents, Span
from deepspeed_ext.comm.process_groups import Topology
from deepspeed_ext.strategy import Placement

# What starts of windows are multiples of, the first of them that fits: whole blocks of LoCo, aligned buckets.
_STRIDES = (512, 16)


def windows(numel: int, rows: int, most: int) -> list[tuple[int, int]]:
    """Return windows (start, length) over ``numel`` columns; ``rows`` of one have at most ``most`` elements."""
    width = max(1, most // rows)
    width -= width % next((stride for stride in _STRIDES if stride <= width), 1)
    return [(start, min(width, numel - start)) for start in range(0, numel, width)]


@dataclass(frozen=True)
class FlatLayout:
    """How a flat buffer of ``numel`` elements is divided into cells; see Note [Flat buffers, cells and slices]."""

    numel: int
    rows: int
    cols: int

    @classmethod
    def of(cls, numel: int, placement: Placement, topology: Topology) -> "FlatLayout":
        """Return the layout of a buffer whose optimizer states are in ``placement``."""
        rows = topology.sizes.groups if placement == Placement.G else 1
        return cls(numel, rows, topology.sizes.group_size)

    @property
    def chunk(self) -> int:
        """Elements of a cell. The last cells reach over the end where ``numel`` does not divide."""
        return -(-self.numel // (self.rows * self.cols))

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
        """Return the flat buffer (1D) from its cells (cols, rows, chunk); a view where that can be."""
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
        sources: (offset, numel) in the bucket, in the order of ``spans``.
        spans: for each column, what its part of the packed bucket holds, in order.
    """

    sources: tuple[tuple[int, int], ...]
    spans: tuple[tuple[Span, ...], ...]

    def splits(self, col: int, rows: int) -> list[int]:
        """Return the elements of a column's part for each group."""
        splits = [0] * rows
        for span in self.spans[col]:
            splits[span.row] += span.numel
        return splits

    def rows_of(self, col: int, rows: int) -> Contents:
        """Return what a column's part holds for each group."""
        parts: list[list[Span]] = [[] for _ in range(rows)]
        for span in self.spans[col]:
            parts[span.row].append(span)
        return tuple(tuple(part) for part in parts)


@lru_cache(maxsize=4096)  # training repeats the same buckets
def plan_bucket(layouts: tuple[FlatLayout, ...], ranges: tuple[Range, ...]) -> BucketPlan:
    """Divide a bucket that holds ``ranges``, one after the other, along the cells of their buffers."""
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
    spans: list[list[Span]] = [[] for _ in range(layouts[0].cols)]
    for col, row, buffer, within, length, _ in pieces:
        last = spans[col][-1] if spans[col] else None
        if last and (last.buffer, last.row, last.start + last.numel) == (buffer, row, within):
            spans[col][-1] = last._replace(numel=last.numel + length)
        else:
            spans[col].append(Span(buffer, row, within, length))
    return BucketPlan(
        sources=tuple((offset, length) for *_, length, offset in pieces),
        spans=tuple(tuple(column) for column in spans),
    )
