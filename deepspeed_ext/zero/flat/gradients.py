# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Gradients with p = N: flat buffers, one for each parameter group, as in ZeRO-1/2.

Note [Where buckets of flat buffers arrive]
    - g = G: in the optimizer's shard, and they are added there.
    - g = I or N: in this rank's I-slice, and they are added there; at the boundary the slice moves on to ``os`` once.
      Slices are dropped then.

    What crosses at the boundary are windows of slices, each a part of a stripe, and each as soon as the last
    micro-batch's backward is done with the parameters of its stripe: Note [Leaving early] in ``boundary.py``. With
    os = N what has crossed is gathered inside the group when all of it has: there buckets of gradients are on their
    way meanwhile, and what goes over one communicator must have one order.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.comm.hops import Transfer
from deepspeed_ext.comm.layout import BucketPlan, FlatLayout, parts_of, plan_bucket
from deepspeed_ext.comm.packing import add_to
from deepspeed_ext.comm.redistribution import GradientRedistribution
from deepspeed_ext.comm.spans import BufferSpan, Span, split_as
from deepspeed_ext.comm.transfer_queue import TransferQueue
from deepspeed_ext.strategy import Placement, Strategy
from deepspeed_ext.zero.boundary import Boundary
from deepspeed_ext.zero.shards import Window


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


class FlatGradients:
    """See Note [Where buckets of flat buffers arrive].

    Args:
        redistribution: hops of the data-parallel group.
        strategy: one with p = N.
        layouts: of each flat buffer, also of those that are not of this family.
        buffers: numbers of those that are.
        mean: how sums become means.
        dtype: in which slices are accumulated.
        shard: gives the optimizer's gradients of a flat buffer, 1D, by its number.
        windows: what crosses at the boundary, in the order of the backward.
        crosses_in: dtype of what crosses at the boundary, on the wire.
        overlap: whether the hops of two buckets may overlap.
        side_streams: whether they may on streams of their own, on which nothing makes the host wait.
        added: called when something has been added to a shard.
    """

    def __init__(
        self,
        redistribution: GradientRedistribution,
        strategy: Strategy,
        layouts: Sequence[FlatLayout],
        buffers: Sequence[int],
        mean: Mean,
        dtype: torch.dtype,
        shard: Callable[[int], Tensor],
        windows: Sequence[Window],
        crosses_in: torch.dtype,
        overlap: bool,
        side_streams: bool = True,
        added: Callable[[], None] = lambda: None,
    ) -> None:
        self._redistribution, self._os = redistribution, strategy.os
        self._arrives = Placement.G if strategy.g == Placement.G else Placement.I
        self._queue = TransferQueue(overlap, side_streams, completed=redistribution.pairwise)
        self.layouts = tuple(layouts)
        self._buffers = tuple(buffers)
        self._mean = mean
        self._dtype = dtype
        self._shard = shard
        self._added = added
        self._crosses_in = crosses_in
        self._crosses = TransferQueue(overlap, side_streams, background=redistribution.pairwise)
        early = self._arrives == Placement.I and self._crosses.unattended
        self._boundary = Boundary(windows, lambda window: window.members, early)
        self.slices: dict[int, Tensor] = {}  # buffer: (rows, chunk), this rank's I-slice

    def reduce(
        self,
        tensors: Sequence[Tensor],
        spans: tuple[BufferSpan, ...],
        dtype: torch.dtype,
        complete: Iterable[int] = (),
    ) -> None:
        """Move a bucket to where it arrives, and add it there.

        Args:
            tensors: 1D each: the bucket, or one for each span of it. They are copied at once.
            spans: what it holds.
            dtype: on the wire.
            complete: parameters of which nothing more comes before the boundary; as in ``windows``.
        """
        plan = plan_bucket(self.layouts, spans)
        self._queue.submit(self._move(tensors, plan, dtype), partial(self._accumulate, plan, complete))

    def _move(self, tensors: Sequence[Tensor], plan: BucketPlan, dtype: torch.dtype) -> Transfer:
        packed = [self._mean.divide(self._redistribution.pack_bucket(tensors, plan, self._arrives)).to(dtype)]
        del tensors  # nothing of full size waits for hops that do not need it, what was packed neither
        return (yield from self._redistribution.reduce_bucket(packed.pop(), plan, self._arrives))

    def has(self, buffer: int) -> bool:
        """Whether a flat buffer is of this family."""
        return buffer in self._buffers

    def prepare(self, buffer: int) -> None:
        """Make what buckets of this flat buffer are added to, on the current stream, where it is used last."""
        if self._arrives == Placement.G:
            self._shard(buffer)
        elif buffer not in self.slices:
            layout, device = self.layouts[buffer], get_accelerator().current_device_name()
            self.slices[buffer] = torch.zeros(layout.rows, layout.chunk, dtype=self._dtype, device=device)

    def prepare_crossing(self) -> None:
        """Make what windows need that cross before the boundary, on the current stream."""
        if self._arrives == Placement.I and self._crosses.unattended:
            for buffer in self._buffers:
                self.prepare(buffer)
                if self._os != Placement.N:
                    self._shard(buffer)

    def prepare_all(self) -> None:
        """Make what the boundary needs: of all flat buffers, for ranks may have used different parameters."""
        for buffer in self._buffers:
            self._shard(buffer)
            self.prepare(buffer)

    @property
    def has_left(self) -> bool:
        """Whether something of this accumulation is on its way as if it were complete."""
        return self._boundary.begun

    def learn(self, largest: Callable[[Tensor], Tensor]) -> None:
        """Learn from the first step; see ``Boundary``. Collective, once."""
        self._boundary.learn(largest)

    def drain(self) -> None:
        """Wait for all buckets."""
        self._queue.drain()

    def drop(self) -> None:
        """Drop what has been accumulated, and what is on the wire."""
        self._queue.drop()
        self._crosses.drop()
        self._boundary.clear()
        self.slices.clear()

    def tensors(self) -> list[Tensor]:
        """Return what is held of gradients now, beside the optimizer's shards."""
        return list(self.slices.values())

    def to(self, device: str) -> None:
        """Move the slices to a device."""
        self.slices = {buffer: held.to(device) for buffer, held in self.slices.items()}

    def _accumulate(self, plan: BucketPlan, complete: Iterable[int], mine: Tensor) -> None:
        """Add what a bucket brings, and start to move what is complete between groups."""
        for rows in self._redistribution.bucket_rows(plan, self._arrives):
            arrived, mine = mine.tensor_split([rows.times * rows.numel])
            spans = rows.spans()
            parts = split_as(arrived.view(rows.times, -1), [span for _, span in spans])
            for (buffer, span), part in zip(spans, parts, strict=True):
                if self._arrives == Placement.G:
                    self._add_to_shard(buffer, span, self._mean.multiply(part)[0])
                else:
                    span.of(self.slices[buffer][rows.first : rows.first + rows.times]).add_(part)
        self._cross(self._boundary.ready(complete))

    def finish(self, dtype: torch.dtype, bucket: int) -> None:
        """Complete the optimizer's shards at the boundary: what is left of slices crosses.

        Args:
            dtype, bucket: of windows inside the group, with os = N: on the wire, elements.
        """
        if self._arrives == Placement.G:
            return
        self._cross(self._boundary.rest())
        self._crosses.drain()
        if self._os == Placement.N:
            for buffer, held in sorted(self.slices.items(), key=lambda item: item[0]):
                for span in self.layouts[buffer].windows(self._redistribution.cols, bucket):
                    transfer = self._gather(span.of(held), dtype)
                    self._queue.submit(transfer, partial(self._place, buffer, span.start))
            self._queue.drain()

    def _gather(self, sums: Tensor, dtype: torch.dtype) -> Transfer:
        """Gather a window of slices inside the group. What it is sent as is made in here, where hops run: there its
        memory waits for them."""
        return (yield from self._redistribution.gather_slice(sums.to(dtype).view(-1)))

    def _cross(self, windows: Iterable[Window]) -> None:
        for buffer, span, _ in windows:
            # With one row a window may be a view, which hops overwrite: slices are dropped after this.
            window = span.of(self.slices[buffer])
            target = Placement.G if self._os == Placement.G else Placement.I
            transfer = self._redistribution.sync_slice(window, self._crosses_in, target, span.start, buffer)
            self._crosses.submit(transfer, partial(self._deliver, buffer, span), reuses=False)

    def _deliver(self, buffer: int, span: Span, total: Tensor) -> None:
        if self._os == Placement.N:
            window = span.of(self.slices[buffer])
            if window.data_ptr() != total.data_ptr():  # of one group what crosses is the window itself
                window.copy_(total)
        else:
            self._add_to_shard(buffer, span, self._mean.multiply(total)[0])

    def _place(self, buffer: int, start: int, sums: Tensor) -> None:
        layout, shard = self.layouts[buffer], self._shard(buffer)
        cells = self._mean.multiply(sums).unsqueeze(1)
        layout.place(shard, start, cells.to(shard.device), add=True)

    def _add_to_shard(self, buffer: int, span: Span, part: Tensor) -> None:
        add_to(span.of(self._shard(buffer)), part)
        self._added()


def reduce_by_family(
    gradients: Sequence[FlatGradients],
    tensors: Sequence[Tensor],
    spans: tuple[BufferSpan, ...],
    dtype: torch.dtype,
    complete: Sequence[int],
) -> None:
    """Move a bucket to where it arrives: what it has of each family by itself.

    Args:
        gradients: of all families.
        tensors, spans, dtype: see ``FlatGradients.reduce``.
        complete: for each span the parameter, if nothing more of it comes before the boundary; else empty.
    """
    for family in gradients:
        mine = [number for number, (buffer, _) in enumerate(spans) if family.has(buffer)]
        if len(mine) == len(spans):
            family.reduce(tensors, spans, dtype, complete)
        elif mine:
            parts, places = list(parts_of(tensors, spans)), [complete[n] for n in mine] if complete else []
            family.reduce([parts[n] for n in mine], tuple(spans[n] for n in mine), dtype, places)
