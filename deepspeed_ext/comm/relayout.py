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

_MOST_NUMEL = 1 << 24  # elements that a rank sends at a time, on average


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
        self._rank, self._ranks = dist.get_rank(group=group), data_parallel_ranks(group)
        self._common = Span(0, min(source.numel, target.numel))
        self.numel = target.chunk

    def _spans_to_exchange(self, within: Span) -> tuple[list[list[Span]], list[list[Span]]]:
        """Return for each rank the spans of this rank's chunk that it sends, and those of the target that it receives.

        Both sides list their spans in the order of the flat buffer.
        """
        source, target = self._source, self._target
        return _common_spans(source, target, self._rank, within), _common_spans(target, source, self._rank, within)

    def exchange(self, chunk: Tensor) -> Tensor:
        """Return this rank's chunk of the target, with zeros for padding, on the device of ``chunk``. Collective.

        Args:
            chunk: 1D, this rank's chunk of the source.
        """
        target_chunk = chunk.new_zeros(self.numel)  # padding must be zero
        # Portions are the same on all ranks: each is one collective.
        for portion in _portions(self._common.numel, len(self._ranks)):
            self._exchange_portion(chunk, target_chunk, *self._spans_to_exchange(portion))
        return target_chunk

    def _exchange_portion(
        self, chunk: Tensor, target_chunk: Tensor, sent: Sequence[Sequence[Span]], received: Sequence[Sequence[Span]]
    ) -> None:
        parts = [span.of(chunk) for spans in sent for span in spans]
        packed = torch.cat(parts) if parts else chunk.new_empty(0)
        packed = packed.to(get_accelerator().current_device_name())  # the chunk may be on the host
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
            span.of(target_chunk).copy_(part)

    def exchange_on_host(self, chunk: Tensor, target_chunk: Tensor, channel: HostChannel) -> Iterator[None]:
        """Fill this rank's chunk of the target by messages between threads, one round per ``next``. Collective over
        the channels of the group.

        In round d, each rank sends their common elements to the d-th rank after it, and receives from the d-th rank
        before it. So a rank has one sender at a time, and nothing is packed: messages are spans of the chunks.

        Args:
            chunk, target_chunk: 1D, on the host; this rank's chunks of the source and of the target.

        Raises:
            ChannelError: a rank has died, or has not sent its part within the timeout.
        """
        sent, received = self._spans_to_exchange(self._common)
        target_chunk.zero_()
        for target_span, source_span in zip(received[self._rank], sent[self._rank], strict=True):
            target_span.of(target_chunk).copy_(source_span.of(chunk))
        for distance in range(1, len(self._ranks)):
            target, source = (self._rank + distance) % len(self._ranks), (self._rank - distance) % len(self._ranks)
            parts, outputs = (
                [span.of(chunk) for span in sent[target]],
                [span.of(target_chunk) for span in received[source]],
            )
            channel.exchange(parts, self._ranks[target], outputs, self._ranks[source])
            yield


class DeferredExchange(Protocol):
    """Copies chunks to the host at once, and sends them later."""

    def exchange_later(self, chunk: Tensor, relayout: Relayout) -> Tensor:
        """Return this rank's chunk of the target, 1D, on the host, which is filled later.

        Args:
            chunk: 1D, this rank's chunk of the source.
        """
        ...


def _portions(numel: int, ranks: int) -> Iterator[Span]:
    """Divide a flat buffer into spans of which each rank sends at most ``_MOST_NUMEL`` elements on average."""
    length = _MOST_NUMEL * ranks
    for start in range(0, numel, length):
        yield Span.between(start, min(start + length, numel))


def _common_spans(source: FlatLayout, target: FlatLayout, rank: int, within: Span) -> list[list[Span]]:
    """Return for each rank the spans of chunk ``rank`` of ``source`` that are in its chunk of ``target``, limited to a
    span of the flat buffer."""
    spans_by_rank: list[list[Span]] = [[] for _ in range(source.rows * source.cols)]
    for piece in source.cells_of(*divmod(rank, source.cols)):
        for part in target.pieces(piece.span.common(within)):
            spans_by_rank[part.row * target.cols + part.col].append(part.span.shifted(piece.column - piece.span.start))
    return spans_by_rank
