# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Positions of elements of parameters in shards and messages. Data only."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import nn

from deepspeed_ext.comm.layout import FlatLayout, Stripe
from deepspeed_ext.comm.spans import ShardSpan, Span


class Member(NamedTuple):
    """A parameter of a flat shard."""

    param: nn.Parameter
    shape: tuple[int, ...]  # shape of the full parameter
    stripe: Stripe | None  # rank r of the ranks that share optimizer states has cell r; None: every rank has all cells
    span: Span  # elements of the parameter that this rank has; possibly none
    offset: int  # position of these elements in the shard

    @property
    def in_shard(self) -> Span:
        """Positions of these elements in the shard."""
        return Span(self.offset, self.span.numel)


class FlatShard(NamedTuple):
    """The elements that this rank updates of a parameter group, or of a sub-group of one."""

    number: int  # DeepSpeed's number of the parameter group or sub-group
    group: int  # number of the parameter group
    members: tuple[Member, ...]  # its parameters, even if this rank has no element of a parameter


class Window(NamedTuple):
    """A span of all chunks of a flat buffer, or of all rows of a block, that is sent as one message."""

    buffer: int  # number of the flat buffer or block
    span: Span  # elements of each chunk, or of each row
    members: tuple[int, ...]  # numbers of its parameters, ascending; with stripes, all parameters of its stripe


def in_forward_order(windows: Iterable[Window]) -> list[Window]:
    """Return windows in the order of the model's parameters."""
    return sorted(windows, key=lambda window: (min(window.members, default=0), window.buffer, window.span))


class InterGroupSpan(NamedTuple):
    """A span of a parameter among the gradients that this rank sends between groups, for checkpoints of errors."""

    name: str  # name of the parameter
    start: int  # first element in the parameter
    span: ShardSpan


def inter_group_spans_of(
    name: str, numel: int, layout: FlatLayout, col: int, buffer: int = 0, offset: int = 0, start: int = 0
) -> Iterator[InterGroupSpan]:
    """Return the spans of a parameter that is, or is a part of, a flat buffer.

    Args:
        numel: its elements.
        col: this rank's column.
        buffer: number of the flat buffer in spans.
        start: offset of the flat buffer's chunk in the rank's shard.
    """
    for piece in layout.pieces(Span(offset, numel)):
        if piece.col == col:
            span = ShardSpan(buffer, piece.row, *piece.columns.shifted(start))
            yield InterGroupSpan(name, piece.span.start - offset, span)
