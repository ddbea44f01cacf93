# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Spans: contiguous elements of a tensor. All other interval types contain one."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from torch import Tensor


class Span(NamedTuple):
    """Contiguous elements: ``numel`` of them from ``start`` on."""

    start: int
    numel: int

    @classmethod
    def between(cls, start: int, stop: int) -> "Span":
        """Return the elements from ``start`` to before ``stop``; possibly none."""
        return cls(start, max(0, stop - start))

    @property
    def stop(self) -> int:
        """The first element after the span."""
        return self.start + self.numel

    def common(self, other: "Span") -> "Span":
        """Return the intersection; possibly empty."""
        return Span.between(max(self.start, other.start), min(self.stop, other.stop))

    def shifted(self, by: int) -> "Span":
        """Return the span with its elements renumbered by ``by``."""
        return Span(self.start + by, self.numel)

    def of(self, tensor: Tensor) -> Tensor:
        """Return these elements of the last dimension of a tensor, a view."""
        return tensor.narrow(-1, self.start, self.numel)


BufferSpan = tuple[int, Span]  # number of a flat buffer, and elements of it or of several of its chunks


class ShardSpan(NamedTuple):
    """Position of bucket elements in this rank's shards. Checkpoints of errors store its four fields."""

    buffer: int
    row: int
    start: int  # within the row
    numel: int

    @property
    def elements(self) -> Span:
        """The elements of the row."""
        return Span(self.start, self.numel)

    def common(self, other: "ShardSpan") -> "ShardSpan":
        """Return the intersection with a span of the same row; possibly empty."""
        return ShardSpan(self.buffer, self.row, *self.elements.common(other.elements))

    def without(self, removed: "ShardSpan") -> list["ShardSpan"]:
        """Return the remainder without ``removed``, a part of this span: none, one, or two spans."""
        elements, other = self.elements, removed.elements
        remainders = Span.between(elements.start, other.start), Span.between(other.stop, elements.stop)
        return [ShardSpan(self.buffer, self.row, *span) for span in remainders if span.numel]


Spans = tuple[ShardSpan, ...]  # contents of a rank's part of a bucket, in order; elements after its spans are padding
Contents = tuple[Spans, ...]  # contents of a bucket: the spans for each rank that receives a part of it


def merge_neighbors(spans: Iterable[Span]) -> list[Span]:
    """Return the same elements in the same order, by as few spans as possible."""
    merged: list[Span] = []
    for span in spans:
        if merged and merged[-1].stop == span.start:
            merged[-1] = Span(merged[-1].start, merged[-1].numel + span.numel)
        else:
            merged.append(span)
    return merged


def merge_in_buffers(spans: Iterable[BufferSpan]) -> list[BufferSpan]:
    """Return spans of buffers with neighbors joined, as ``merge_neighbors``."""
    by_buffer = groupby(spans, key=lambda item: item[0])
    return [(buffer, span) for buffer, own in by_buffer for span in merge_neighbors(span for _, span in own)]


def split_as(tensor: Tensor, spans: Sequence[Span]) -> Sequence[Tensor]:
    """Split a tensor that has spans side by side in its last dimension, possibly followed by padding, into views."""
    numels = [span.numel for span in spans]
    return tensor.narrow(-1, 0, sum(numels)).split(numels, dim=-1)


def split_spans(spans: Spans, lengths: Sequence[int]) -> Contents:
    """Split spans into parts of these lengths."""
    remaining, parts = list(reversed(spans)), []
    for length in lengths:
        part = []
        while length and remaining:
            span = remaining.pop()
            taken_numel = min(length, span.numel)
            part.append(span._replace(numel=taken_numel))
            length -= taken_numel
            if taken_numel < span.numel:
                remaining.append(span._replace(start=span.start + taken_numel, numel=span.numel - taken_numel))
        parts.append(tuple(part))
    return tuple(parts)
