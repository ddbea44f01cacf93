# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""From one layout of a flat buffer to another: each rank's chunk, by one all-to-all."""

from collections.abc import Iterator, Sequence

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_ext.comm.layout import FlatLayout
from deepspeed_ext.comm.spans import Span, split_as

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
        self._exchanges = [
            (_shared(source, target, own, span), _shared(target, source, own, span))
            for span in _portions(min(source.numel, target.numel), source.rows * source.cols)
        ]

    def move(self, chunk: Tensor) -> Tensor:
        """Return this rank's chunk of the target, with zeros for padding, on the device of ``chunk``. Collective.

        Args:
            chunk: 1D, this rank's chunk of the source.
        """
        moved = chunk.new_zeros(self._length)
        for sent, received in self._exchanges:
            self._exchange(chunk, sent, moved, received)
        return moved

    def _exchange(
        self, chunk: Tensor, sent: Sequence[Sequence[Span]], moved: Tensor, received: Sequence[Sequence[Span]]
    ) -> None:
        parts = [span.of(chunk) for spans in sent for span in spans]
        packed = torch.cat(parts) if parts else chunk.new_empty(0)
        packed = packed.to(get_accelerator().current_device_name())
        splits = [sum(span.numel for span in spans) for spans in received]
        arrived = packed.new_empty(sum(splits))
        dist.all_to_all_single(
            arrived,
            packed,
            output_split_sizes=splits,
            input_split_sizes=[sum(span.numel for span in spans) for spans in sent],
            group=self._group,
        )
        spans = [span for of_rank in received for span in of_rank]
        for span, part in zip(spans, split_as(arrived, spans), strict=True):
            span.of(moved).copy_(part)


def _portions(numel: int, ranks: int) -> Iterator[Span]:
    """Divide a flat buffer into spans of which no rank sends much at a time."""
    length = _MOST * ranks
    for start in range(0, numel, length):
        yield Span.between(start, min(start + length, numel))


def _shared(mine: FlatLayout, others: FlatLayout, own: int, within: Span) -> list[list[Span]]:
    """Return for each rank which spans of chunk ``own`` of ``mine`` are in its chunk of ``others``, of those within a
    span of the flat buffer."""
    found: list[list[Span]] = [[] for _ in range(mine.rows * mine.cols)]
    for piece in mine.cells_of(*divmod(own, mine.cols)):
        for part in others.pieces(piece.span.common(within)):
            found[part.row * others.cols + part.col].append(part.span.shifted(piece.column - piece.span.start))
    return found
