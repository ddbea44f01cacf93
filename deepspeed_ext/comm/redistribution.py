# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""From one layout of a flat buffer to another: each rank's chunk, by one all-to-all."""

from collections.abc import Iterator

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_ext.comm.layout import FlatLayout, Piece


class Redistribution:
    """Takes chunks of one layout to those of another, of the same rows and columns.

    Args:
        source, target: layouts; what only one of them has, at the end of the flat buffer, is padding.
        group: process group whose rank number r has chunk r.
    """

    def __init__(self, source: FlatLayout, target: FlatLayout, group: ProcessGroup) -> None:
        self._group = group
        self._length = target.chunk
        own = dist.get_rank(group=group)
        numel = min(source.numel, target.numel)
        # Both sides list what they exchange in the order of the flat buffer.
        self._sent = _shared(source, target, own, numel)
        self._received = _shared(target, source, own, numel)

    def move(self, chunk: Tensor) -> Tensor:
        """Return this rank's chunk of the target, with zeros for padding, on the device of ``chunk``. Collective.

        Args:
            chunk: 1D, this rank's chunk of the source.
        """
        on_device = chunk.to(get_accelerator().current_device_name())
        sent = [on_device.narrow(0, *place) for places in self._sent for place in places]
        packed = torch.cat(sent) if sent else on_device.new_empty(0)
        splits = [sum(numel for _, numel in places) for places in self._received]
        arrived = on_device.new_empty(sum(splits))
        dist.all_to_all_single(
            arrived,
            packed,
            output_split_sizes=splits,
            input_split_sizes=[sum(numel for _, numel in places) for places in self._sent],
            group=self._group,
        )
        moved = on_device.new_zeros(self._length)
        offset = 0
        for start, numel in (place for places in self._received for place in places):
            moved.narrow(0, start, numel).copy_(arrived.narrow(0, offset, numel))
            offset += numel
        return moved.to(chunk.device)


def _shared(mine: FlatLayout, others: FlatLayout, own: int, numel: int) -> list[list[tuple[int, int]]]:
    """Return for each rank which parts (start, numel) of chunk ``own`` of ``mine`` are in its chunk of ``others``."""
    places: list[list[tuple[int, int]]] = [[] for _ in range(mine.rows * mine.cols)]
    for piece in mine.cells_of(*divmod(own, mine.cols)):
        for part in _clipped(others, piece, numel):
            column = piece.column + part.start - piece.start
            places[part.row * others.cols + part.col].append((column, part.numel))
    return places


def _clipped(layout: FlatLayout, piece: Piece, numel: int) -> Iterator[Piece]:
    return layout.pieces(piece.start, max(0, min(piece.numel, numel - piece.start)))
