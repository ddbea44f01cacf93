# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Parameters, or their gradients, side by side in a bucket, packed and unpacked by few calls.

Note [Runs of alike parameters]
    A mixture of experts has hundreds of small parameters, and a handful of tensor operations for each of them costs
    more than the operations do. Their sizes repeat: w1, w2, w3 of expert 0, of expert 1, ... So a bucket is taken as
    *runs*, each a pattern of sizes that is repeated: one strided copy serves one size of a pattern, in all
    repetitions. A list without any repetition is one run for each parameter, and is packed one by one.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.comm.layout import FlatLayout

_LONGEST_PATTERN = 16  # parameters of an expert, say
_STACKED_AT_MOST = 1 << 22  # elements copied once more in order to be packed by one call


class _Repeated(NamedTuple):
    """A pattern of layouts that stands ``times`` times in a row."""

    first: int  # number of the first parameter
    start: int  # its first element in the bucket
    pattern: tuple[FlatLayout, ...]
    times: int

    @property
    def width(self) -> int:
        """Elements of one repetition."""
        return sum(layout.chunk for layout in self.pattern)

    def parts(self, cells: Tensor) -> Iterator[tuple[int, FlatLayout, Tensor]]:
        """Return for each place in the pattern its number, its layout and its cells, (cols, rows, times, chunk)."""
        mine = cells[:, :, self.start : self.start + self.times * self.width].unflatten(-1, (self.times, self.width))
        offset = 0
        for place, layout in enumerate(self.pattern):
            yield place, layout, mine[..., offset : offset + layout.chunk]
            offset += layout.chunk


class ParameterBucket:
    """The cells of parameters side by side, (cols, rows, width). See Note [Runs of alike parameters].

    Args:
        layouts: of the parameters, in order; of the same numbers of rows and columns.
        alone: whether parameters that are unpacked must not share memory, as those of a run do.
    """

    def __init__(self, layouts: Sequence[FlatLayout], alone: bool = False) -> None:
        self.cols, self.rows = layouts[0].cols, layouts[0].rows
        self.width = sum(layout.chunk for layout in layouts)
        self._len = len(layouts)
        self._runs = list(_runs(layouts, 0 if alone else _LONGEST_PATTERN))

    def arrived(self, flat: Tensor, parts: int) -> Tensor:
        """Return the cells, out of what all ranks have sent: a view.

        Args:
            flat: 1D: one after the other ``parts`` rows, and padding, of each rank.
            parts: 1 or all rows.
        """
        senders = (self.cols, self.rows // parts)
        sent = flat.view(*senders, flat.numel() // math.prod(senders))[..., : parts * self.width]
        return sent.unflatten(-1, (parts, self.width)).flatten(1, 2)

    def unpack(self, cells: Tensor) -> list[Tensor]:
        """Return the parameters, 1D each."""
        wholes: list[Tensor] = [cells] * self._len
        for run in self._runs:
            for place, layout, part in run.parts(cells):
                many = part.permute(2, 1, 0, 3).reshape(run.times, -1)
                if many.stride(1) != 1:  # of chunks of one element; a parameter is contiguous, and viewed as bytes
                    many = many.clone(memory_format=torch.contiguous_format)
                last = run.first + run.times * len(run.pattern)
                wholes[run.first + place : last : len(run.pattern)] = many[:, : layout.numel].unbind()
        return wholes

    def pack(self, flats: Sequence[Tensor | None], cells: Tensor) -> None:
        """Copy parameters into their cells, with zeros after their ends.

        Args:
            flats: any shape, of the layouts' elements; None stands for zeros.
            cells: of any dtype.
        """
        for run in self._runs:
            for place, layout, part in run.parts(cells):
                last = run.first + run.times * len(run.pattern)
                _pack(flats[run.first + place : last : len(run.pattern)], layout, part)


def _pack(flats: Sequence[Tensor | None], layout: FlatLayout, cells: Tensor) -> None:
    """Copy tensors of one layout into their cells, (cols, rows, times, chunk)."""
    at_once = max(1, _STACKED_AT_MOST // max(1, layout.numel))
    for start in range(0, len(flats), at_once):
        some = flats[start : start + at_once]
        target = cells[:, :, start : start + len(some)]
        if all(flat is None for flat in some):
            target.zero_()
        elif len(some) == 1:
            layout.pack(some[0].reshape(-1), target[:, :, 0])  # type: ignore[union-attr]
        else:
            known = next(flat for flat in some if flat is not None)
            zeros = known.new_zeros(1).expand(layout.numel)
            stacked = torch.stack([zeros if flat is None else flat.reshape(-1) for flat in some])
            missing = layout.rows * layout.cols * layout.chunk - layout.numel
            if missing:
                stacked = torch.nn.functional.pad(stacked, (0, missing))
            whole = stacked.view(len(some), layout.rows, layout.cols, layout.chunk)
            target.permute(2, 1, 0, 3).copy_(whole)


def _runs(layouts: Sequence[FlatLayout], longest: int) -> Iterator[_Repeated]:
    """Divide a list into runs: from the left, the pattern of at most ``longest`` that reaches farthest."""
    numels = [layout.numel for layout in layouts]
    first = start = 0
    while first < len(layouts):
        period, count = 1, 1
        for longer in range(1, min(longest, (len(layouts) - first) // 2) + 1):
            times = _repetitions(numels, first, longer)
            if times > 1 and times * longer > period * count:
                period, count = longer, times
        run = _Repeated(first, start, tuple(layouts[first : first + period]), count)
        yield run
        first += period * count
        start += run.width * count


def _repetitions(numels: Sequence[int], first: int, period: int) -> int:
    """Return how often the pattern at ``first`` stands there in a row."""
    end = first + period
    while end < len(numels) and numels[end] == numels[end - period]:
        end += 1
    return (end - first) // period
