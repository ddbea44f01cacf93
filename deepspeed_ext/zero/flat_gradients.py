# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Gradients with p = N: flat buffers, one for each parameter group, as in ZeRO-1/2.

Note [Where buckets of flat buffers arrive]
    - g = G: in the optimizer's shard, and they are added there.
    - g = I or N: in this rank's I-slice, and they are added there; at the boundary the slice moves on to ``os`` once.
      Slices are dropped then.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.comm.hops import Transfer
from deepspeed_ext.comm.layout import BucketPlan, FlatLayout, Range, plan_bucket
from deepspeed_ext.comm.reshard import GradientReshard
from deepspeed_ext.strategy import Placement, Strategy
from deepspeed_ext.zero.gradients import Gradients, add_to


@dataclass(frozen=True)
class Mean:
    """How a sum over all data-parallel ranks becomes a mean, whatever ZeRO's optimizer is sharded over.

    Attributes:
        before: what gradients are divided by before the sum, so that 16-bit sums keep their range; None for nothing.
        after: what sums are multiplied with, where ``before`` has taken only a part of the mean; None for nothing.
    """

    before: float | None = None
    after: float | None = None

    def divide(self, packed: Tensor) -> Tensor:
        """Scale what is to be summed, in place."""
        return packed if self.before is None else packed.div_(self.before)

    def multiply(self, sums: Tensor) -> Tensor:
        """Scale what was summed, in place."""
        return sums if self.after is None else sums.mul_(self.after)


class FlatGradients(Gradients):
    """See Note [Where buckets of flat buffers arrive].

    Args:
        reshard: hops of the data-parallel group.
        strategy: one with p = N.
        layouts: of each flat buffer.
        mean: how sums become means.
        dtype: in which slices are accumulated.
        shard: gives the optimizer's gradients of a flat buffer, 1D, by its number.
        overlap, relayed: see ``Gradients``.
        added: called when something has been added to a shard.
    """

    def __init__(
        self,
        reshard: GradientReshard,
        strategy: Strategy,
        layouts: Sequence[FlatLayout],
        mean: Mean,
        dtype: torch.dtype,
        shard: Callable[[int], Tensor],
        overlap: bool,
        relayed: bool = True,
        added: Callable[[], None] = lambda: None,
    ) -> None:
        arrives = Placement.G if strategy.g == Placement.G else Placement.I
        super().__init__(reshard, strategy.os, arrives, overlap, relayed)
        self.layouts = tuple(layouts)
        self._mean = mean
        self._dtype = dtype
        self._shard = shard
        self._added = added
        self.slices: dict[int, Tensor] = {}  # buffer: (rows, chunk), this rank's I-slice

    def reduce(self, tensors: Sequence[Tensor], ranges: tuple[Range, ...], dtype: torch.dtype) -> None:
        """Move a bucket to where it arrives, and add it there.

        Args:
            tensors: 1D each: the bucket, or one for each range of it. They are copied at once.
            ranges: what it holds.
            dtype: on the wire.
        """
        plan = plan_bucket(self.layouts, ranges)
        self._schedule.submit(self._move(tensors, plan, dtype), partial(self._accumulate, plan))

    def _move(self, tensors: Sequence[Tensor], plan: BucketPlan, dtype: torch.dtype) -> Transfer:
        packed = [self._mean.divide(self._reshard.pack_bucket(tensors, plan, self._arrives)).to(dtype)]
        del tensors  # nothing of full size waits for hops that do not need it, what was packed neither
        return (yield from self._reshard.reduce_bucket(packed.pop(), plan, self._arrives))

    def prepare(self, buffer: int) -> None:
        """Make what buckets of this flat buffer are added to, on the current stream, where it is used last."""
        if self._arrives == Placement.G:
            self._shard(buffer)
        elif buffer not in self.slices:
            layout, device = self.layouts[buffer], get_accelerator().current_device_name()
            self.slices[buffer] = torch.zeros(layout.rows, layout.chunk, dtype=self._dtype, device=device)

    def prepare_all(self) -> None:
        """Make what the boundary needs: of all flat buffers, for ranks may have used different parameters."""
        for buffer in range(len(self.layouts)):
            self._shard(buffer)
            self.prepare(buffer)

    def drop(self) -> None:
        """Drop what has been accumulated, and what is on the wire."""
        super().drop()
        self.slices.clear()

    def to(self, device: str) -> None:
        """Move the slices to a device."""
        self.slices = {buffer: held.to(device) for buffer, held in self.slices.items()}

    def _accumulate(self, plan: BucketPlan, mine: Tensor) -> None:
        """Add what a bucket brings."""
        offset = 0
        for span in self._reshard.bucket_spans(plan, self._arrives):
            part = mine.narrow(0, offset, span.numel)
            offset += span.numel
            if self._arrives == Placement.G:
                self._add_to_shard(span.buffer, span.start, self._mean.multiply(part))
            else:
                self.slices[span.buffer][span.row].narrow(0, span.start, span.numel).add_(part)

    def _windows(self, bucket: int) -> Iterator[tuple[int, int, Tensor]]:
        # With one row a window may be a view, which hops overwrite: slices are dropped after this.
        for buffer, held in sorted(self.slices.items(), key=lambda item: item[0]):
            for start, width in self.layouts[buffer].windows(held.shape[0], bucket):
                yield buffer, start, held[:, start : start + width]

    def _deliver(self, buffer: int, start: int, total: Tensor) -> None:
        total, layout = self._mean.multiply(total), self.layouts[buffer]
        if self._os == Placement.N:
            shard = self._shard(buffer)
            layout.place(shard, start, total.unflatten(0, (layout.cols, layout.rows)).to(shard.device), add=True)
        else:
            self._add_to_shard(buffer, start, total[0])

    def _add_to_shard(self, buffer: int, start: int, part: Tensor) -> None:
        add_to(self._shard(buffer).narrow(0, start, part.numel()), part)
        self._added()
