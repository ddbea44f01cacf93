# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Gradients with p = N of all families of parameters: each has flat buffers, hops and schedules of its own."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from deepspeed_ext.comm.bucket_plan import Range
from deepspeed_ext.zero.flat_gradients import FlatGradients


class FamilyGradients:
    """What the optimizer sees of them; each method is that of ``FlatGradients`` for every family it concerns.

    All ranks have all families, so they start what each needs in one order.

    Args:
        members: of each family, by its name.
        families: of each flat buffer the name of its family.

    Attributes:
        members: the same.
    """

    def __init__(self, members: Mapping[str, FlatGradients], families: Sequence[str]) -> None:
        self.members = dict(members)
        self._of = [self.members[name] for name in families]

    def reduce(
        self, tensors: Sequence[Tensor], ranges: tuple[Range, ...], dtype: torch.dtype, complete: Sequence[int] = ()
    ) -> None:
        """Move a bucket to where it arrives: what it has of each family by itself.

        Args:
            tensors: 1D each: the bucket, or one for each range of it. They are copied at once.
            ranges: what it holds.
            dtype: on the wire.
            complete: of each range, the place of its parameter, of which nothing more comes; empty: more comes.
        """
        for family in self.members.values():
            mine = [number for number, one in enumerate(ranges) if self._of[one.buffer] is family]
            if len(mine) == len(ranges):
                family.reduce(tensors, ranges, dtype, complete)
                return
            if mine:
                parts = list(_parts(tensors, ranges))
                places = [complete[number] for number in mine] if complete else []
                family.reduce([parts[n] for n in mine], tuple(ranges[n] for n in mine), dtype, places)

    def prepare(self, buffer: int) -> None:
        """Make what buckets of this flat buffer are added to, on the current stream."""
        self._of[buffer].prepare(buffer)

    def prepare_crossing(self) -> None:
        """Make what windows need that cross before the boundary, on the current stream."""
        for family in self.members.values():
            family.prepare_crossing()

    def prepare_all(self) -> None:
        """Make what the boundary needs, of all flat buffers."""
        for family in self.members.values():
            family.prepare_all()

    @property
    def has_left(self) -> bool:
        """Whether something of this accumulation is on its way as if it were complete."""
        return any(family.has_left for family in self.members.values())

    def learn(self, largest: Callable[[Tensor], Tensor]) -> None:
        """Learn which parameters rest. Collective, once."""
        for family in self.members.values():
            family.learn(largest)

    def finish(self, dtype: torch.dtype, bucket: int) -> None:
        """Complete the optimizer's shards at the boundary; slices are dropped."""
        for family in self.members.values():
            family.finish(dtype, bucket)

    @property
    def slices(self) -> dict[int, Tensor]:
        """This rank's I-slices, by flat buffer; see ``FlatGradients``."""
        return {buffer: held for family in self.members.values() for buffer, held in family.slices.items()}

    def drop_slices(self) -> None:
        """Drop the slices, which have been moved on."""
        for family in self.members.values():
            family.slices.clear()

    def drain(self) -> None:
        """Wait for all buckets."""
        for family in self.members.values():
            family.drain()

    def drop(self) -> None:
        """Drop what has been accumulated, and what is on the wire."""
        for family in self.members.values():
            family.drop()

    def to(self, device: str) -> None:
        """Move the slices to a device."""
        for family in self.members.values():
            family.to(device)


def _parts(tensors: Sequence[Tensor], ranges: Sequence[Range]) -> Iterator[Tensor]:
    """Return of each range of a bucket its part, 1D."""
    if len(tensors) == len(ranges):
        yield from tensors
        return
    (bucket,) = tensors
    offset = 0
    for one in ranges:
        yield bucket.narrow(0, offset, one.numel)
        offset += one.numel
