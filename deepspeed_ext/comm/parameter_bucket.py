# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Buckets of parameters, or of their gradients, side by side, packed and unpacked by few calls.

Note [Runs of parameters]
    A mixture of experts has hundreds of small parameters, and launching a few tensor operations for each costs more
    than the operations themselves. Their sizes repeat: w1, w2, w3 of expert 0, of expert 1, ... So a bucket is divided
    into *runs*, each a repeated pattern of sizes: one strided copy packs one size of a pattern, in all repetitions.
    Without repetition, each parameter is one run, and is packed separately.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.comm.layout import FlatLayout

_LONGEST_PATTERN = 16  # parameters, for example of an expert
_MOST_STACKED_NUMEL = 1 << 22  # elements that take an extra copy to be packed by one call


class _Run(NamedTuple):
    """A pattern of layouts that is repeated ``times`` times."""

    first: int  # number of the first parameter
    start: int  # its first element in the bucket
    pattern: tuple[FlatLayout, ...]
    times: int

    @property
    def width(self) -> int:
        """Elements of one repetition."""
        return sum(layout.chunk for layout in self.pattern)

    def parts(self, cells: Tensor) -> Iterator[tuple[int, FlatLayout, Tensor]]:
        """Yield (index, layout, cells) of each position in the pattern; cells: (cols, rows, times, chunk)."""
        run = cells[:, :, self.start : self.start + self.times * self.width].unflatten(-1, (self.times, self.width))
        offset = 0
        for index, layout in enumerate(self.pattern):
            yield index, layout, run[..., offset : offset + layout.chunk]
            offset += layout.chunk


class ParameterBucket:
    """The cells of parameters side by side, (cols, rows, width). See Note [Runs of parameters].

    Args:
        layouts: layouts of the parameters, in order, with the same numbers of rows and columns.
        separate: whether unpacked parameters must not share memory, as those of a run do.
    """

    def __init__(self, layouts: Sequence[FlatLayout], separate: bool = False) -> None:
        self.cols, self.rows = layouts[0].cols, layouts[0].rows
        self.width = sum(layout.chunk for layout in layouts)
        self._len = len(layouts)
        self._runs = list(_runs(layouts, 0 if separate else _LONGEST_PATTERN))

    def received_cells(self, flat: Tensor, parts: int) -> Tensor:
        """Return the cells received from all ranks: a view.

        Args:
            flat: 1D: for each rank in order, ``parts`` rows followed by padding.
            parts: number of rows per rank: 1 or all.
        """
        senders = (self.cols, self.rows // parts)
        sent = flat.view(*senders, flat.numel() // math.prod(senders))[..., : parts * self.width]
        return sent.unflatten(-1, (parts, self.width)).flatten(1, 2)

    def unpack(self, cells: Tensor) -> list[Tensor]:
        """Return the parameters, 1D each."""
        flats: list[Tensor] = [cells] * self._len
        for run in self._runs:
            for index, layout, part in run.parts(cells):
                params = part.permute(2, 1, 0, 3).reshape(run.times, -1)
                if params.stride(1) != 1:  # chunks of one element; parameters must be contiguous to be viewed as bytes
                    params = params.clone(memory_format=torch.contiguous_format)
                last = run.first + run.times * len(run.pattern)
                flats[run.first + index : last : len(run.pattern)] = params[:, : layout.numel].unbind()
        return flats

    def pack(self, flats: Sequence[Tensor | None], cells: Tensor) -> None:
        """Copy parameters into their cells, with zeros after their ends.

        Args:
            flats: tensors of any shape, with the layouts' numbers of elements; None for zeros.
            cells: cells of any dtype.
        """
        for run in self._runs:
            for index, layout, part in run.parts(cells):
                last = run.first + run.times * len(run.pattern)
                _pack(flats[run.first + index : last : len(run.pattern)], layout, part)


def _pack(flats: Sequence[Tensor | None], layout: FlatLayout, cells: Tensor) -> None:
    """Copy tensors of one layout into their cells, (cols, rows, times, chunk)."""
    at_once = max(1, _MOST_STACKED_NUMEL // max(1, layout.numel))
    for start in range(0, len(flats), at_once):
        batch = flats[start : start + at_once]
        target = cells[:, :, start : start + len(batch)]
        if all(flat is None for flat in batch):
            target.zero_()
        elif len(batch) == 1:
            layout.pack(batch[0].reshape(-1), target[:, :, 0])  # type: ignore[union-attr]
        else:
            example = next(flat for flat in batch if flat is not None)
            zeros = example.new_zeros(1).expand(layout.numel)
            stacked = torch.stack([zeros if flat is None else flat.reshape(-1) for flat in batch])
            missing = layout.rows * layout.cols * layout.chunk - layout.numel
            if missing:
                stacked = torch.nn.functional.pad(stacked, (0, missing))
            stacked_cells = stacked.view(len(batch), layout.rows, layout.cols, layout.chunk)
            target.permute(2, 1, 0, 3).copy_(stacked_cells)


def _runs(layouts: Sequence[FlatLayout], longest: int) -> Iterator[_Run]:
    """Divide a list into runs: from the left, the pattern of at most ``longest`` layouts that covers the most."""
    numels = [layout.numel for layout in layouts]
    first = start = 0
    while first < len(layouts):
        period, count = 1, 1
        for longer in range(1, min(longest, (len(layouts) - first) // 2) + 1):
            times = _repetitions(numels, first, longer)
            if times > 1 and times * longer > period * count:
                period, count = longer, times
        run = _Run(first, start, tuple(layouts[first : first + period]), count)
        yield run
        first += period * count
        start += run.width * count


def _repetitions(numels: Sequence[int], first: int, period: int) -> int:
    """Return the number of repetitions of the pattern at ``first``."""
    end = first + period
    while end < len(numels) and numels[end] == numels[end - period]:
        end += 1
    return (end - first) // period
