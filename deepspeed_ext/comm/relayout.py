# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Copies a flat buffer from one layout to another: each rank's chunk, by an all-to-all or by messages."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_ext.comm.host_channel import HostChannel
from deepspeed_ext.comm.layout import FlatLayout
from deepspeed_ext.comm.process_groups import data_parallel_ranks
from deepspeed_ext.comm.spans import Span, split_as

_MOST = 1 << 24  # elements that a rank sends at a time, on average


class Relayout:
    """Copies chunks of one layout to those of another one with the same rows and columns.

    Args:
        source, target: layouts; elements at the end that only one of them has are padding.
        group: process group in which rank r has chunk r.

    Attributes:
        numel: elements of a chunk of the target.
    """

    def __init__(self, source: FlatLayout, target: FlatLayout, group: ProcessGroup) -> None:
        self._source, self._target, self._group = source, target, group
        self._own, self._ranks = dist.get_rank(group=group), data_parallel_ranks(group)
        self._common = Span(0, min(source.numel, target.numel))
        self.numel = target.chunk

    def _exchanged(self, within: Span) -> tuple[list[list[Span]], list[list[Span]]]:
        """Return for each rank the spans of this rank's chunk that it sends, and those of the target that it receives.

        Both sides list their spans in the order of the flat buffer.
        """
        source, target = self._source, self._target
        return _shared(source, target, self._own, within), _shared(target, source, self._own, within)

    def move(self, chunk: Tensor) -> Tensor:
        """Return this rank's chunk of the target, with zeros for padding, on the device of ``chunk``. Collective.

        Args:
            chunk: 1D, this rank's chunk of the source.
        """
        moved = chunk.new_zeros(self.numel)
        for portion in _portions(self._common.numel, len(self._ranks)):
            self._exchange(chunk, moved, *self._exchanged(portion))
        return moved

    def _exchange(
        self, chunk: Tensor, moved: Tensor, sent: Sequence[Sequence[Span]], received: Sequence[Sequence[Span]]
    ) -> None:
        parts = [span.of(chunk) for spans in sent for span in spans]
        packed = torch.cat(parts) if parts else chunk.new_empty(0)
        packed = packed.to(get_accelerator().current_device_name())
        splits = [sum(span.numel for span in spans) for spans in received]
        output = packed.new_empty(sum(splits))
        dist.all_to_all_single(
            output,
            packed,
            output_split_sizes=splits,
            input_split_sizes=[sum(span.numel for span in spans) for spans in sent],
            group=self._group,
        )
        spans = [span for of_rank in received for span in of_rank]
        for span, part in zip(spans, split_as(output, spans), strict=True):
            span.of(moved).copy_(part)

    def send(self, chunk: Tensor, moved: Tensor, channel: HostChannel) -> Iterator[None]:
        """Fill this rank's chunk of the target by messages between threads, one round per ``next``. Collective over
        the channels of the group.

        In round d, each rank sends their common elements to the d-th rank after it, and receives from the d-th rank
        before it. So a rank has one sender at a time, and nothing is packed: messages are spans of the chunks.

        Args:
            chunk, moved: 1D, on the host; this rank's chunks of the source and of the target.

        Raises:
            ChannelError: a rank has died, or has not sent its part within the timeout.
        """
        sent, received = self._exchanged(self._common)
        moved.zero_()
        for target_span, source_span in zip(received[self._own], sent[self._own], strict=True):
            target_span.of(moved).copy_(source_span.of(chunk))
        for distance in range(1, len(self._ranks)):
            target, source = (self._own + distance) % len(self._ranks), (self._own - distance) % len(self._ranks)
            parts, outputs = [span.of(chunk) for span in sent[target]], [span.of(moved) for span in received[source]]
            channel.exchange(parts, self._ranks[target], outputs, self._ranks[source])
            yield


class SendsLater(Protocol):
    """Copies chunks to the host at once, and sends them later."""

    def send_later(self, chunk: Tensor, relayout: Relayout) -> Tensor:
        """Return this rank's chunk of the target, 1D, on the host, which is filled later.

        Args:
            chunk: 1D, this rank's chunk of the source.
        """
        ...


def _portions(numel: int, ranks: int) -> Iterator[Span]:
    """Divide a flat buffer into spans of which each rank sends at most ``_MOST`` elements on average."""
    length = _MOST * ranks
    for start in range(0, numel, length):
        yield Span.between(start, min(start + length, numel))


def _shared(mine: FlatLayout, others: FlatLayout, own: int, within: Span) -> list[list[Span]]:
    """Return for each rank the spans of chunk ``own`` of ``mine`` that are in its chunk of ``others``, limited to a
    span of the flat buffer."""
    spans_by_rank: list[list[Span]] = [[] for _ in range(mine.rows * mine.cols)]
    for piece in mine.cells_of(*divmod(own, mine.cols)):
        for part in others.pieces(piece.span.common(within)):
            spans_by_rank[part.row * others.cols + part.col].append(part.span.shifted(piece.column - piece.span.start))
    return spans_by_rank
