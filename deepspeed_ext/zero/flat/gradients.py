# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Gradients with p = N: flat buffers, one for each parameter group, as in ZeRO-1/2.

Note [Reduction of flat buffers]
    - g = G: buckets are reduced to G, and added to the optimizer's shard.
    - g = I or N: buckets are reduced to I, and added to this rank's I-slice. At the boundary the slice is reduced to
      ``os`` once, and dropped.

    At the boundary, windows of slices are reduced between groups, each a part of a stripe. A window is sent once the
    last micro-batch's buckets with the parameters of its stripe have been added: Note [Fixed buckets] in
    ``buckets.py``. With os = N the sums are gathered inside the group only after all windows: buckets are in flight
    there until then, and operations on one communicator must have one order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.comm.hops import Transfer
from deepspeed_ext.comm.layout import BucketPlan
from deepspeed_ext.comm.packing import add_to
from deepspeed_ext.comm.redistribution import sums_of
from deepspeed_ext.comm.spans import Span
from deepspeed_ext.comm.transfer_queue import TransferQueue
from deepspeed_ext.strategy import Placement
from deepspeed_ext.zero.context import Context
from deepspeed_ext.zero.flat.buffers import FlatBuffers
from deepspeed_ext.zero.flat.shard_gradients import ShardGradients
from deepspeed_ext.zero.flat.stage12_view import Stage12View
from deepspeed_ext.zero.shards import Window


@dataclass(frozen=True)
class Mean:
    """Factors that turn a sum over all data-parallel ranks into a mean, independent of the sharding group.

    Attributes:
        before: divisor of gradients before the sum, so that 16-bit sums keep their range; None for 1.
        after: factor of sums, if ``before`` is only a part of the mean; None for 1.
    """

    before: float | None = None
    after: float | None = None

    @classmethod
    def from_optimizer(cls, context: Context, optimizer: Stage12View) -> "Mean":
        """Return the factors for all data-parallel ranks, split as the optimizer's keys select."""
        if not optimizer.gradient_average:
            return cls()
        if optimizer.reduce_scatter or not optimizer.postscale_gradients:
            return cls(before=context.ranks / context.sequence_parallel_size)
        before = optimizer.gradient_predivide_factor
        return cls(before, before * context.sequence_parallel_size / context.ranks)

    def divide(self, packed: Tensor) -> Tensor:
        """Scale gradients before the sum, in place."""
        return packed if self.before is None else packed.div_(self.before)

    def multiply(self, sums: Tensor) -> Tensor:
        """Scale sums, in place."""
        return sums if self.after is None else sums.mul_(self.after)


class FlatGradients:
    """Gradients of one family that are being reduced. See Note [Reduction of flat buffers].

    Args:
        context: shared constants; a strategy with p = N.
        family: name of the family.
        buffers: all flat buffers, including other families' buffers.
        shards: gradients of the optimizer's shards.
        mean: factors of the mean.

    Attributes:
        layouts: layouts of all flat buffers.
        sends_early: whether windows may be sent before the boundary.
        slices: this rank's I-slice of each flat buffer, by number: (rows, chunk).
        windows: windows of the family's flat buffers, in the order in which they are sent.
    """

    def __init__(
        self, context: Context, *, family: str, buffers: FlatBuffers, shards: ShardGradients, mean: Mean
    ) -> None:
        self._redistribution, self._os = context.families[family].reduce, context.strategy.os
        self._bucket_placement = Placement.G if context.strategy.g == Placement.G else Placement.I
        pairwise, streams = self._redistribution.pairwise, context.side_streams
        self._queue = TransferQueue(context.overlap, streams, thread_completes=pairwise)
        self._inter_queue = TransferQueue(context.overlap, streams, on_thread=pairwise)
        self.layouts = tuple(buffer.layout for buffer in buffers)
        self._buffers = tuple(buffer.number for buffer in buffers if buffer.family.name == family)
        self._shards, self._mean, self._context = shards, mean, context
        self._slice_dtype = wire_dtype(context, context.mixed_dtype(buffers.params()))
        windows = buffers.windows([layout.rows for layout in self.layouts], context.reduce_bucket)
        self.windows = [window for window in reversed(windows) if window.buffer in self._buffers]
        self.sends_early = self._bucket_placement == Placement.I and self._inter_queue.unattended
        self._sent: set[Window] = set()  # windows of this accumulation
        self.slices: dict[int, Tensor] = {}
        self._slice_views: dict[BucketPlan, list[Tensor]] = {}  # of each bucket that was added to the slices

    def reduce(
        self, tensors: Sequence[Tensor], plan: BucketPlan, dtype: torch.dtype, windows: Sequence[Window] = ()
    ) -> None:
        """Reduce a bucket, and add it to slices or shards.

        Args:
            tensors: 1D each: the bucket, or one tensor for each of its spans. They are copied at once.
            plan: plan of the bucket.
            dtype: dtype of messages.
            windows: windows to send once the bucket has been added, because nothing is added to them afterwards.
        """
        self._queue.submit(self._bucket_transfer(tensors, plan, dtype), partial(self._accumulate, plan, windows))

    def _bucket_transfer(self, tensors: Sequence[Tensor], plan: BucketPlan, dtype: torch.dtype) -> Transfer:
        packed = [self._mean.divide(self._redistribution.pack_bucket(tensors, plan, self._bucket_placement)).to(dtype)]
        del tensors  # frees full-size memory before the hops; ``pop`` does so for the packed bucket
        return (yield from self._redistribution.reduce_bucket(packed.pop(), plan, self._bucket_placement))

    def allocate(self, buffer: int) -> None:
        """Allocate the destination of this flat buffer's buckets on the current stream, where its last use is."""
        if self._bucket_placement == Placement.G:
            self._shards.gradient_of(buffer)
        elif buffer not in self.slices:
            layout, device = self.layouts[buffer], get_accelerator().current_device_name()
            self.slices[buffer] = torch.zeros(
                layout.rows, layout.chunk, dtype=self._context.accumulation_dtype, device=device
            )

    def allocate_for_early_reduction(self) -> None:
        """Allocate memory for windows that are sent before the boundary, on the current stream."""
        if self.sends_early:
            for buffer in self._buffers:
                self.allocate(buffer)
                if self._os != Placement.N:
                    self._shards.gradient_of(buffer)

    def allocate_all(self) -> None:
        """Allocate memory of all flat buffers for the boundary, because ranks may have used different parameters."""
        for buffer in self._buffers:
            self._shards.gradient_of(buffer)
            self.allocate(buffer)

    @property
    def has_sent(self) -> bool:
        """Whether a window of this accumulation has been sent."""
        return bool(self._sent)

    def drain(self, windows: bool = False) -> None:
        """Wait for all buckets, and with ``windows`` for the windows that they have started."""
        for queue in (self._queue, self._inter_queue) if windows else (self._queue,):
            queue.drain()

    def drop(self) -> None:
        """Drop accumulated gradients and transfers."""
        self._queue.drop()
        self._inter_queue.drop()
        self.drop_slices()

    def drop_slices(self) -> None:
        """Drop accumulated gradients."""
        self._sent.clear()
        self._slice_views.clear()
        self.slices.clear()

    def tensors(self) -> list[Tensor]:
        """Return current gradient memory, without the optimizer's shards."""
        return list(self.slices.values())

    def to(self, device: str) -> None:
        """Move the slices to a device."""
        self._slice_views.clear()
        self.slices = {buffer: i_slice.to(device) for buffer, i_slice in self.slices.items()}

    def _accumulate(self, plan: BucketPlan, windows: Sequence[Window], reduced: Tensor) -> None:
        """Add a reduced bucket, and start to reduce windows between groups."""
        contents = self._redistribution.bucket_contents(plan, self._bucket_placement)
        sums = sums_of(contents, reduced)
        if self._bucket_placement == Placement.G:
            for (buffer, span), part in zip((item for row in contents for item in row.spans), sums, strict=True):
                self._add_to_shard(buffer, span, self._mean.multiply(part))
        elif sums:
            if plan not in self._slice_views:  # kept, because making them takes the host longer than the sum
                self._slice_views[plan] = [
                    span.of(self.slices[buffer][row.first : row.first + row.times].squeeze(0))
                    for row in contents
                    for buffer, span in row.spans
                ]
            torch._foreach_add_(self._slice_views[plan], sums)
        self._reduce_between_groups(windows)

    def finish(self) -> None:
        """Complete the optimizer's shards at the boundary: reduce the remaining windows."""
        if self._bucket_placement == Placement.G:
            return
        self._reduce_between_groups([window for window in self.windows if window not in self._sent])
        self._inter_queue.drain()  # gathers read the sums of these windows
        if self._os == Placement.N:
            # Sorted: slices are allocated in the order of local gradients, which may differ between ranks.
            for buffer, i_slice in sorted(self.slices.items(), key=lambda item: item[0]):
                for span in self.layouts[buffer].windows(self._redistribution.cols, self._context.reduce_bucket):
                    transfer = self._gather_transfer(span.of(i_slice))
                    self._queue.submit(transfer, partial(self._store_gathered, buffer, span.start))
            self._queue.drain()

    def _gather_transfer(self, sums: Tensor) -> Transfer:
        """Gather a window of slices inside the group. The message is allocated here, on the stream of the hops, so its
        memory is not reused before they end."""
        return (yield from self._redistribution.gather_i_to_n(sums.to(self._slice_dtype).view(-1)))

    def _reduce_between_groups(self, windows: Sequence[Window]) -> None:
        self._sent.update(windows)
        for buffer, span, _ in windows:
            # With one row the window may be a view that hops overwrite, because slices are dropped afterwards.
            window = span.of(self.slices[buffer])
            target = Placement.G if self._os == Placement.G else Placement.I
            transfer = self._redistribution.sync_slice(window, self._slice_dtype, target, span.start, buffer)
            # Not waited for: a complete window is neither written nor freed before ``finish`` drains the queue.
            self._inter_queue.submit(transfer, partial(self._store_sums, buffer, span), reuses=False)

    def _store_sums(self, buffer: int, span: Span, total: Tensor) -> None:
        if self._os == Placement.N:
            window = span.of(self.slices[buffer])
            if window.data_ptr() != total.data_ptr():  # with one group the sum is the window itself
                window.copy_(total)
        else:
            self._add_to_shard(buffer, span, self._mean.multiply(total)[0])

    def _store_gathered(self, buffer: int, start: int, sums: Tensor) -> None:
        layout, shard = self.layouts[buffer], self._shards.gradient_of(buffer)
        cells = self._mean.multiply(sums).unsqueeze(1)
        layout.unpack_window(shard, start, cells.to(shard.device), add=True)

    def _add_to_shard(self, buffer: int, span: Span, part: Tensor) -> None:
        add_to(span.of(self._shards.gradient_of(buffer)), part)
        self._shards.note_addition()


class AllFlatGradients(dict[str, FlatGradients]):
    """Gradients of all families of one optimizer, by family.

    Args:
        context: shared constants; a strategy with p = N.
        buffers: all flat buffers.
        shards: gradients of the optimizer's shards.
        mean: factors of the mean.
    """

    def __init__(self, context: Context, *, buffers: FlatBuffers, shards: ShardGradients, mean: Mean) -> None:
        super().__init__(
            (name, FlatGradients(context, family=name, buffers=buffers, shards=shards, mean=mean))
            for name in context.families
        )
        self._context = context

    def complete_shards(self) -> None:
        """Reduce slices to ``os`` at the accumulation boundary, in order on the current stream, and drop them.

        All parameter groups on all ranks, with or without gradients: ranks may have used different parameters.
        """
        for gradients in self.values():
            gradients.allocate_all()
        with self._context.reductions.after_current():
            for gradients in self.values():
                gradients.finish()
        self._context.reductions.wait()  # before their memory is freed on the current stream
        for gradients in self.values():
            gradients.drop_slices()

    def reset(self) -> None:
        """Drop accumulated gradients once everything that was sent has been received."""
        with self._context.reductions.after_current():
            for gradients in self.values():
                gradients.drain(windows=True)
        self._context.reductions.wait()
        self.drop()

    def drop(self) -> None:
        """Drop accumulated gradients and transfers."""
        for gradients in self.values():
            gradients.drop()

    def to(self, device: str) -> None:
        """Move slices to a device."""
        for gradients in self.values():
            gradients.to(device)


def wire_dtype(context: Context, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients are sent: fp32 with sequence parallelism, as in DeepSpeed."""
    return torch.float32 if context.sequence_parallel_size > 1 else dtype
