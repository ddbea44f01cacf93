# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Where the elements of parameters are among the gradients that cross between groups: for checkpoints of errors."""

from collections.abc import Iterator
from typing import NamedTuple

from deepspeed_ext.comm.hops import Span
from deepspeed_ext.comm.layout import FlatLayout


class CrossingSpan(NamedTuple):
    """Where elements of a parameter are among the gradients of this rank that cross between groups."""

    name: str  # of the parameter
    start: int  # within the parameter
    span: Span


def crossing_spans_of(
    name: str, numel: int, layout: FlatLayout, col: int, buffer: int = 0, offset: int = 0, start: int = 0
) -> Iterator[CrossingSpan]:
    """Return the spans of a parameter that is, or is a part of, a flat buffer.

    Args:
        name: of the parameter.
        numel: its elements.
        layout: of the flat buffer.
        col: this rank's column.
        buffer: the flat buffer's number in spans.
        offset: of the parameter in the flat buffer.
        start: of the flat buffer's chunk in the rank's shard.
    """
    for piece in layout.pieces(offset, numel):
        if piece.col == col:
            span = Span(buffer, piece.row, start + piece.column, piece.numel)
            yield CrossingSpan(name, piece.start - offset, span)
