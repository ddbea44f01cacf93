# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""From one layout of a flat buffer to another: each rank's chunk, by one all-to-all."""

from collections.abc import Iterator

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_ext.comm.layout import FlatLayout

_Places = list[list[tuple[int, int]]]  # for each rank (start, numel) in a chunk
_MOST = 1 << 24  # elements that a rank sends at a time, on average


class Relayout:
    """Takes chunks of one layout to those of another, of the same rows and columns.

    Args:
        source, target: layouts; what only one of them has, at the end of the flat buffer, is padding.
        group: process group whose rank number r has chunk r.
    """

    def __init__(self, source: FlatLayout, target: FlatLayout, group: ProcessGroup) -> None:
        self._group = group
        self._length = target.chunk
        own = dist.get_rank(group=group)
        # Both sides list what they exchange in the order of the flat buffer.
        self._stretches = [
            (_shared(source, target, own, *stretch), _shared(target, source, own, *stretch))
            for stretch in _stretches(min(source.numel, target.numel), source.rows * source.cols)
        ]

    def move(self, chunk: Tensor) -> Tensor:
        """Return this rank's chunk of the target, with zeros for padding, on the device of ``chunk``. Collective.

        Args:
            chunk: 1D, this rank's chunk of the source.
        """
        moved = chunk.new_zeros(self._length)
        for sent, received in self._stretches:
            self._exchange(chunk, sent, moved, received)
        return moved

    def _exchange(self, chunk: Tensor, sent: _Places, moved: Tensor, received: _Places) -> None:
        parts = [chunk.narrow(0, *place) for places in sent for place in places]
        packed = torch.cat(parts) if parts else chunk.new_empty(0)
        packed = packed.to(get_accelerator().current_device_name())
        splits = [sum(numel for _, numel in places) for places in received]
        arrived = packed.new_empty(sum(splits))
        dist.all_to_all_single(
            arrived,
            packed,
            output_split_sizes=splits,
            input_split_sizes=[sum(numel for _, numel in places) for places in sent],
            group=self._group,
        )
        offset = 0
        for start, numel in (place for places in received for place in places):
            moved.narrow(0, start, numel).copy_(arrived.narrow(0, offset, numel))
            offset += numel


def _stretches(numel: int, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield stretches (start, end) of a flat buffer, of which no rank sends much at a time."""
    length = _MOST * ranks
    for start in range(0, numel, length):
        yield start, min(start + length, numel)


def _shared(mine: FlatLayout, others: FlatLayout, own: int, start: int, end: int) -> _Places:
    """Return for each rank which parts of chunk ``own`` of ``mine`` are in its chunk of ``others``, in a stretch."""
    places: _Places = [[] for _ in range(mine.rows * mine.cols)]
    for piece in mine.cells_of(*divmod(own, mine.cols)):
        first = max(piece.start, start)
        for part in others.pieces(first, max(0, min(piece.start + piece.numel, end) - first)):
            column = piece.column + part.start - piece.start
            places[part.row * others.cols + part.col].append((column, part.numel))
    return places
