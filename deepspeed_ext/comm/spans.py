# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Spans: neighboring elements of a tensor. All that says "from here to there" is one, or has one."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor


class Span(NamedTuple):
    """Neighboring elements: ``numel`` of them from ``start`` on."""

    start: int
    numel: int

    @classmethod
    def between(cls, start: int, stop: int) -> "Span":
        """Return the elements from ``start`` on that are before ``stop``; possibly none."""
        return cls(start, max(0, stop - start))

    @property
    def stop(self) -> int:
        """Where the elements after these begin."""
        return self.start + self.numel

    def common(self, other: "Span") -> "Span":
        """Return the elements that are in both; possibly none."""
        return Span.between(max(self.start, other.start), min(self.stop, other.stop))

    def shifted(self, by: int) -> "Span":
        """Return as many elements, from ``start + by`` on: the same ones as something else counts them."""
        return Span(self.start + by, self.numel)

    def of(self, tensor: Tensor) -> Tensor:
        """Return these elements of the last dimension of a tensor, a view."""
        return tensor.narrow(-1, self.start, self.numel)


BufferSpan = tuple[int, Span]  # number of a flat buffer, and elements of it, or of each of some of its chunks


class ShardSpan(NamedTuple):
    """Elements of a bucket: where in this rank's shards they belong. Checkpoints of errors hold its four fields."""

    buffer: int
    row: int
    start: int  # within the row
    numel: int

    @property
    def elements(self) -> Span:
        """The elements of the row."""
        return Span(self.start, self.numel)

    def common(self, other: "ShardSpan") -> "ShardSpan":
        """Return the elements that are in both, which are of one row; possibly none."""
        return ShardSpan(self.buffer, self.row, *self.elements.common(other.elements))

    def without(self, taken: "ShardSpan") -> list["ShardSpan"]:
        """Return what is left without ``taken``, which is a part of it: none, one or two spans."""
        own, other = self.elements, taken.elements
        left = Span.between(own.start, other.start), Span.between(other.stop, own.stop)
        return [ShardSpan(self.buffer, self.row, *span) for span in left if span.numel]


Spans = tuple[ShardSpan, ...]  # what a rank's part of a bucket holds, in order; elements after its spans are padding
Contents = tuple[Spans, ...]  # of a bucket: those of each rank that a part of it goes to


def neighbors_joined(spans: Iterable[Span]) -> list[Span]:
    """Return the same elements in the same order, by as few spans as can be."""
    found: list[Span] = []
    for span in spans:
        if found and found[-1].stop == span.start:
            found[-1] = Span(found[-1].start, found[-1].numel + span.numel)
        else:
            found.append(span)
    return found


def split_as(tensor: Tensor, spans: Sequence[Span]) -> Sequence[Tensor]:
    """Return what belongs to each of some spans out of a tensor that has them side by side in its last dimension,
    possibly with padding after them: views."""
    numels = [span.numel for span in spans]
    return tensor.narrow(-1, 0, sum(numels)).split(numels, dim=-1)


def split_spans(spans: Spans, lengths: Sequence[int]) -> Contents:
    """Return the spans of parts of these lengths."""
    left, parts = list(reversed(spans)), []
    for length in lengths:
        part = []
        while length and left:
            span = left.pop()
            taken = min(length, span.numel)
            part.append(span._replace(numel=taken))
            length -= taken
            if taken < span.numel:
                left.append(span._replace(start=span.start + taken, numel=span.numel - taken))
        parts.append(tuple(part))
    return tuple(parts)
