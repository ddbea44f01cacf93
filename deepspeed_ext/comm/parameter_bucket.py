# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Buckets of parameters, or of their gradients, side by side, packed and unpacked by few calls.

Note [Runs of parameters]
    A mixture of experts has hundreds of small parameters, and launching a few tensor operations for each costs more
    than the operations themselves. Their sizes repeat: w1, w2, w3 of expert 0, of expert 1, ... So a bucket is divided
    into *runs*, each a repeated pattern of sizes: one strided copy packs one size of a pattern, in all repetitions.
    Without repetition, each parameter is one run, and is packed separately.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.comm.layout import FlatLayout

_LONGEST_PATTERN = 16  # parameters, for example of an expert
_MOST_STACKED_NUMEL = 1 << 22  # elements that take an extra copy to be packed by one call


class _Run(NamedTuple):
    """A pattern of layouts that is repeated ``times`` times."""

    first: int  # number of the first parameter
    pattern: tuple[FlatLayout, ...]
    chunks: list[int]  # elements of the pattern's chunks
    times: int

    def parts(self, cells: Tensor) -> Iterator[tuple[slice, FlatLayout, Tensor]]:
        """Yield the numbers of the parameters at each position in the pattern, their layout, and their cells.

        Args:
            cells: cells of the run, (cols, rows, elements); those of a position are (cols, rows, times, chunk).
        """
        cols, rows, _ = cells.shape
        repetitions = cells.view(cols, rows, self.times, -1)
        period = len(self.pattern)
        parts = repetitions.split_with_sizes(self.chunks, -1) if period > 1 else (repetitions,)
        for index, (layout, part) in enumerate(zip(self.pattern, parts, strict=True), self.first):
            yield slice(index, self.first + self.times * period, period), layout, part


class ParameterBucket:
    """The cells of parameters side by side, (cols, rows, width). See Note [Runs of parameters].

    Args:
        layouts: layouts of the parameters, in order, with the same numbers of rows and columns.
        separate: whether unpacked parameters must not share memory, as those of a run do.
    """

    def __init__(self, layouts: Sequence[FlatLayout], separate: bool = False) -> None:
        self.cols, self.rows = layouts[0].cols, layouts[0].rows
        self._len = len(layouts)
        self._runs = list(_runs(layouts, 0 if separate else _LONGEST_PATTERN))
        self._widths = [run.times * sum(run.chunks) for run in self._runs]
        self.width = sum(self._widths)

    def _parts(self, cells: Tensor) -> Iterator[tuple[slice, FlatLayout, Tensor]]:
        """Yield the ``parts`` of all runs. ``cells``: of the bucket, possibly with padding in the last dimension."""
        widths = [*self._widths, cells.shape[-1] - self.width]
        for run, run_cells in zip(self._runs, cells.split_with_sizes(widths, -1), strict=False):
            yield from run.parts(run_cells)

    def received_cells(self, flat: Tensor, parts: int) -> Tensor:
        """Return the cells received from all ranks: a view.

        Args:
            flat: 1D: for each rank in order, ``parts`` rows followed by padding.
            parts: number of rows per rank: 1, with whose cells padding is returned, too, or all.
        """
        sent = flat.view(self.cols, self.rows // parts, -1)
        return sent if parts == 1 else sent[..., : parts * self.width].unflatten(-1, (parts, -1)).flatten(1, 2)

    def unpack(self, cells: Tensor) -> list[Tensor]:
        """Return the parameters, 1D each."""
        flats: list[Tensor] = [cells] * self._len
        for numbers, layout, part in self._parts(cells):
            params = part.permute(2, 1, 0, 3).reshape(part.shape[2], -1)
            if params.stride(1) != 1:  # chunks of one element; parameters must be contiguous to be viewed as bytes
                params = params.clone(memory_format=torch.contiguous_format)
            flats[numbers] = (params if params.shape[1] == layout.numel else params[:, : layout.numel]).unbind()
        return flats

    def pack(self, flats: Sequence[Tensor | None], cells: Tensor) -> None:
        """Copy parameters into their cells, with zeros after their ends.

        Args:
            flats: tensors of any shape, with the layouts' numbers of elements; None for zeros.
            cells: cells of any dtype, possibly with padding in the last dimension, which is set to zero.
        """
        for numbers, layout, part in self._parts(cells):
            _pack(flats[numbers], layout, part)
        if cells.shape[-1] > self.width:
            cells[..., self.width :].zero_()  # padding is zero in every sum


@lru_cache(maxsize=4096)  # layouts recur in every step, and equal layers share one
def bucket_of(rows: int, cols: int, numels: tuple[int, ...], separate: bool = False) -> ParameterBucket:
    """Return the bucket of parameters of these sizes; see ``ParameterBucket``."""
    return ParameterBucket([FlatLayout(numel, rows, cols) for numel in numels], separate)


def _pack(flats: Sequence[Tensor | None], layout: FlatLayout, cells: Tensor) -> None:
    """Copy tensors of one layout into their cells, (cols, rows, times, chunk)."""
    at_once = max(1, _MOST_STACKED_NUMEL // max(1, layout.numel))
    for start in range(0, len(flats), at_once):
        batch = flats[start : start + at_once]
        target = cells if len(batch) == len(flats) else cells[:, :, start : start + len(batch)]
        if all(flat is None for flat in batch):
            target.zero_()
        elif len(batch) == 1:
            layout.pack(batch[0].reshape(-1), target.select(2, 0))  # type: ignore[union-attr]
        else:
            present = [flat for flat in batch if flat is not None]
            zeros = present[0].new_zeros(1).expand(layout.numel) if len(present) < len(batch) else None
            stacked = torch.stack([zeros if flat is None else flat.reshape(-1) for flat in batch])  # type: ignore[misc]
            missing = layout.rows * layout.cols * layout.chunk - layout.numel
            if missing:
                stacked = torch.nn.functional.pad(stacked, (0, missing))
            stacked_cells = stacked.view(len(batch), layout.rows, layout.cols, layout.chunk)
            target.permute(2, 1, 0, 3).copy_(stacked_cells)


def _runs(layouts: Sequence[FlatLayout], longest: int) -> Iterator[_Run]:
    """Divide a list into runs: from the left, the pattern of at most ``longest`` layouts that covers the most."""
    numels = [layout.numel for layout in layouts]
    first = 0
    while first < len(layouts):
        period, count = 1, 1
        for longer in range(1, min(longest, (len(layouts) - first) // 2) + 1):
            times = _repetitions(numels, first, longer)
            if times > 1 and times * longer > period * count:
                period, count = longer, times
        pattern = tuple(layouts[first : first + period])
        yield _Run(first, pattern, [layout.chunk for layout in pattern], count)
        first += period * count


def _repetitions(numels: Sequence[int], first: int, period: int) -> int:
    """Return the number of repetitions of the pattern at ``first``."""
    end = first + period
    while end < len(numels) and numels[end] == numels[end - period]:
        end += 1
    return (end - first) // period
