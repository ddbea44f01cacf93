# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of sharded parameters: accumulated in placement g, reduced to the placement of os at the boundary.

Note [Gradient rows]
    Gradients that are reduced to the placement of os, or to I, are added to ``accumulator``, (rows, elements of the
    optimizer's shard): the chunks of the parameters, in the order of the shard. It has one row if gradients are
    reduced to os directly. With g = I and os = G it is the I-slice, one row for each group. The result of a
    reduce-scatter between groups is written to row j, and the optimizer reads a view of that row. With g = N,
    ``accumulator`` exists from the boundary to the next micro-step only. At other times a placeholder of one repeated
    element replaces it.

With p = I and g = G a bucket is first reduced N -> I inside the group: Note [Pending gradients].

At the boundary, gradients are reduced in buckets. Most of these are sent during the last micro-batch's backward; see
Note [Early reduction] in ``boundary.py``. With g = I a parameter is complete when its last gradient has been added to
``accumulator``; a bucket is packed from its columns. With g = N it is complete when its last gradient has been stored
unreduced. With os = I a bucket that is in I is then reduced between groups as with g = I.

Note [Pending gradients]
    With p = I groups may get gradients in different orders, and not all of them, but sums between groups must be the
    same in all. With g = G they are computed in every micro-step. So a bucket is reduced inside its group first. The
    result is kept in *pieces*, one for each parameter. They are reduced between groups in the buckets and the order of
    Note [Early reduction] in ``boundary.py``, with zeros for parameters that a group has not used. Here each
    micro-step ends at a boundary.

    A piece waits for the other members of its bucket, and for the buckets before it. Waiting pieces use the memory of
    about one bucket if modules are used in the order in which they were created: 0.03 to 0.19 of the I-slice, in the
    dtype on the wire, were counted for 24 layers of a transformer, with buckets of 1/146 to 1/19 of the model. All
    gradients of a backward wait if the model's last parameter gets its gradient last, or if one parameter in each
    bucket gets none: 0.57, with every other layer unused. If nothing were sent early in the first step, pieces would
    fill the full I-slice with any model. Buffers of full buckets would need 1.04 instead of 0.57.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.comm.hops import ReduceHop, Transfer
from deepspeed_ext.comm.layout import windows
from deepspeed_ext.comm.packing import add_to, align_rows, fill_up, record_on_current_stream
from deepspeed_ext.comm.spans import Span, merge_neighbors, split_as
from deepspeed_ext.comm.transfer_queue import TransferQueue
from deepspeed_ext.deepspeed_types import ZeroParameter
from deepspeed_ext.strategy import Placement
from deepspeed_ext.zero.boundary import Boundary
from deepspeed_ext.zero.context import Context
from deepspeed_ext.zero.families import family_of
from deepspeed_ext.zero.sharded.slices import Slices
from deepspeed_ext.zero.sharded.stage3_view import Stage3View
from deepspeed_ext.zero.shards import InterGroupSpan, inter_group_spans_of

Bucket = list[ZeroParameter]  # parameters that are reduced together at the boundary


def boundary_buckets(
    params: Iterable[ZeroParameter], max_numel: int, dtype_of: Callable[[ZeroParameter], torch.dtype]
) -> list[Bucket]:
    """Divide parameters into buckets of one dtype, in the order in which they are sent: the model's last ones first.

    Args:
        params: all parameters; each bucket keeps this order.
        max_numel: maximum number of elements (of full parameters) of a bucket, unless one parameter has more.
        dtype_of: dtype on the wire.
    """
    order = {param.ds_id: number for number, param in enumerate(params)}
    buckets: list[Bucket] = []
    open_buckets: dict[torch.dtype, tuple[Bucket, float]] = {}
    for param in sorted(params, key=lambda param: -param.ds_id):
        bucket, numel = open_buckets.get(dtype_of(param), ([], math.inf))
        if numel + param.ds_numel > max_numel:
            bucket, numel = [], 0
            buckets.append(bucket)
        bucket.append(param)
        open_buckets[dtype_of(param)] = bucket, numel + param.ds_numel
    buckets.sort(key=lambda bucket: -bucket[-1].ds_id)  # completed first, sent first: a backward runs last to first
    return [sorted(bucket, key=lambda param: order[param.ds_id]) for bucket in buckets]


class _PendingGradient(NamedTuple):
    """A parameter's columns of a received bucket."""

    received: Tensor
    span: Span


class PendingGradients:
    """Gradients that are reduced inside the group and not yet between groups. See Note [Pending gradients].

    Args:
        rows: number of rows of the I-slice.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._pending: dict[int, _PendingGradient] = {}  # by ds_id

    def clear(self) -> None:
        """Drop all pieces."""
        self._pending.clear()

    def add(self, params: Sequence[ZeroParameter], received: Tensor) -> None:
        """Add the pieces of a received bucket, on the current stream.

        Args:
            params: side by side in ``received``.
            received: (rows, columns) or flat; padding follows the parameters.
        """
        received, start = received.view(self._rows, -1), 0
        for param in params:
            piece = _PendingGradient(received, Span(start, param.ds_tensor.ds_numel))
            earlier = self._pending.setdefault(param.ds_id, piece)
            if earlier is not piece:  # another gradient of this backward
                record_on_current_stream(earlier.received)  # memory of the stream that received it
                earlier.span.of(earlier.received).add_(piece.span.of(received))
            start = piece.span.stop

    def pop(self, params: Sequence[ZeroParameter]) -> list[Tensor]:
        """Remove and return pieces of parameters, (rows, columns) each, neighbors joined; zeros for missing ones."""
        pieces = [self._pop_piece(param) for param in params]
        views: list[Tensor] = []
        for _, neighbors in groupby(pieces, key=lambda piece: id(piece.received)):
            run = list(neighbors)
            views += [span.of(run[0].received) for span in merge_neighbors(piece.span for piece in run)]
        return views

    def _pop_piece(self, param: ZeroParameter) -> _PendingGradient:
        """Remove and return the piece of a parameter; zeros if there is none."""
        piece = self._pending.pop(param.ds_id, None)
        if piece is not None:
            return piece
        zero, numel = torch.zeros(1, 1, device=get_accelerator().current_device_name()), param.ds_tensor.ds_numel
        return _PendingGradient(zero.expand(self._rows, numel), Span(0, numel))


class ShardedGradients:
    """Gradients of the trainable parameters of one family. See Note [Gradient rows].

    Args:
        bucket: number of elements (of full parameters) in a full bucket.
    """

    def __init__(self, context: Context, *, family: str, optimizer: Stage3View, slices: Slices, bucket: int) -> None:
        strategy, redistribution = context.strategy, context.families[family].reduce
        self._redistribution, self._os = redistribution, strategy.os
        self._keeps_full = strategy.g == Placement.N
        self._reduces_via_i = (strategy.p, strategy.g) == (Placement.I, Placement.G) and redistribution.rows > 1
        self._bucket_placement = (
            Placement.I if self._reduces_via_i else strategy.os if self._keeps_full else strategy.g
        )
        overlap, side_streams, pairwise = context.overlap, context.side_streams, redistribution.pairwise
        self._queue = TransferQueue(overlap, side_streams, pairwise and self._keeps_full, pairwise)
        self._inter_queue = TransferQueue(overlap, side_streams, pairwise)
        self._params = [param for group in optimizer.fp16_groups for param in group if family_of(param) == family]
        self._context, self._slices, self._bucket = context, slices, bucket
        self._number = list(context.families).index(family)
        self._pending_gradients = PendingGradients(redistribution.rows)
        self._wire_dtype = context.mixed_dtype(param for group in optimizer.fp16_groups for param in group)
        self._pending_buckets: list[Bucket] = []  # with g = N and os = I: buckets reduced N -> I
        self.rows = redistribution.rows if (strategy.g, strategy.os) == (Placement.I, Placement.G) else 1
        self._is_on_host = context.offload and context.reductions.stream is not None and self.rows == 1
        self._sends_early = self._reduces_via_i or (self._inter_queue.unattended and not self._is_on_host)
        self._boundary = self._make_boundary(
            optimizer.param_names, self._params if self._reduces_via_i or strategy.g != Placement.G else []
        )
        self._columns: dict[int, Span] = {}  # ds_id: columns in ``accumulator``
        self._columns_of = lru_cache(maxsize=4096)(self._merge_columns)  # training repeats the same buckets
        self.numel = 0  # columns
        for param in self._params:
            self._columns[param.ds_id] = Span(self.numel, param.ds_tensor.ds_numel)
            self.numel += param.ds_tensor.ds_numel
        self.accumulator = torch.empty(self.rows, 0)
        self._full_gradients: dict[int, Tensor] = {}  # ds_id: full gradient, kept until the boundary with g = N
        self.has_gradients = False  # whether ``accumulator`` has gradients of this accumulation ...
        self._is_complete = False  # ... which are complete in the placement of os

    def _make_boundary(self, names: Mapping[Any, str], params: Sequence[ZeroParameter]) -> Boundary[Bucket]:
        """Divide parameters into the buckets of the boundary; errors name parameters."""

        def dtype_of(param: ZeroParameter) -> torch.dtype:
            return self._context.message_dtype(param) if self._keeps_full or self._reduces_via_i else self._wire_dtype

        name_of = {param.ds_id: names[param] for param in params}
        return Boundary(
            boundary_buckets(params, self._bucket, dtype_of),
            lambda bucket: [param.ds_id for param in bucket if param.ds_numel],
            early=self._queue.unattended if self._keeps_full else self._sends_early,
            single_gradient=False,
            name=lambda ds_id: name_of[ds_id],
            advice=(
                " between groups; in the first step of this run it got only one. Set zero_optimization.overlap_comm "
                "to false to allow this."
            ),
            resend="never"
            if not self._reduces_via_i
            else "in the first step"
            if self._inter_queue.unattended
            else "always",
        )

    def tensors(self) -> list[Tensor]:
        """Return the tensors that hold gradients now."""
        return [self.accumulator, *self._full_gradients.values()]

    def set_accumulator(self, accumulator: Tensor) -> dict[int, Tensor]:
        """Accumulate in this tensor, 1D of ``rows * numel`` elements.

        Returns:
            For each ds_id the optimizer's chunk of the gradient, 1D, a view.
        """
        self.accumulator = accumulator.view(self.rows, self.numel)
        return dict(zip(self._columns, split_as(self.shard, list(self._columns.values())), strict=True))

    @property
    def is_placeholder(self) -> bool:
        """Whether ``accumulator`` is one repeated element, to which nothing can be added."""
        return self.numel > 1 and self.accumulator.stride(1) == 0

    @property
    def shard(self) -> Tensor:
        """The optimizer's shard, 1D."""
        return self.accumulator[self._own_row]

    def shard_of(self, params: Sequence[ZeroParameter]) -> Tensor:
        """Return the optimizer's shard of neighboring parameters, 1D, a view."""
        (span,) = self._spans(params)
        return span.of(self.shard)

    @property
    def _own_row(self) -> int:
        return self._redistribution.row if self.rows > 1 else 0

    def inter_group_spans(self, param: ZeroParameter, name: str) -> Iterator[InterGroupSpan]:
        """Yield the spans of a parameter that this rank reduces between groups."""
        layout, col = self._slices.layout(param), self._redistribution.col
        return inter_group_spans_of(
            name, param.ds_numel, layout, col, self._number, start=self._columns[param.ds_id].start
        )

    def clear(self) -> None:
        """Drop accumulated gradients."""
        if self._boundary.has_sent:  # a backward was interrupted
            self.drain()
        self._boundary.clear()
        self._pending_buckets.clear()
        self._pending_gradients.clear()
        self._full_gradients.clear()
        self.has_gradients = False

    def learn_order(self, max_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Record parameter usage in the first step; see ``Boundary``. Collective, once."""
        self._boundary.learn_order(max_over_ranks)

    # In a micro-step: N -> g ##########################################################################

    @property
    def has_sent(self) -> bool:
        """Whether gradients of this accumulation have been sent as if they were complete."""
        return self._boundary.has_sent

    def keep_full_gradient(self, param: ZeroParameter, last: bool) -> list[Bucket]:
        """Accumulate a parameter's full gradient until the boundary, with g = N.

        Args:
            param: a trained parameter with a full gradient.
            last: whether this is the last micro-batch.

        Returns:
            Buckets to reduce now (``reduce_buckets``).
        """
        assert param.grad is not None
        gradient = param.grad.detach().to(self._context.accumulation_dtype)
        if param.ds_id in self._full_gradients:
            self._full_gradients[param.ds_id].add_(gradient)
        else:
            self._full_gradients[param.ds_id] = gradient
        return self._boundary.mark_ready([param.ds_id]) if last else []

    def reduce(
        self,
        gradients: Sequence[tuple[Any, Tensor | None]],
        dtype: torch.dtype,
        sequence_parallel_size: int = 1,
        last: bool = False,
    ) -> None:
        """Start to reduce a bucket, and to add the result.

        Args:
            gradients: parameters and their gradients; None means zeros. They are copied at once.
            dtype: dtype on the wire.
            sequence_parallel_size: number of ranks that count as one rank in the mean.
            last: whether this is the last micro-batch.
        """
        self.submit(
            [param for param, _ in gradients], self._bucket_transfer(gradients, dtype, sequence_parallel_size), last
        )

    @property
    def intra(self) -> ReduceHop:
        """The hop inside the group."""
        return self._redistribution.intra

    def submit(self, params: Sequence[ZeroParameter], transfer: Transfer, last: bool, adds: bool = True) -> None:
        """Start a transfer of gradients, or of a part of them; with ``adds`` its result is added."""
        self._prepare_accumulator()
        self._queue.submit(transfer, partial(self._add_bucket, last, params) if adds else lambda _: None)

    def reduce_sums(self, params: Sequence[ZeroParameter], sums: Tensor) -> Transfer:
        """Reduce parameters' I-slices, (rows, elements of their chunks), to the placement in which buckets arrive."""
        if self._bucket_placement == Placement.G:
            return (yield from self._redistribution.reduce_i_to_g(sums, self._spans(params), self._number))
        return sums.view(-1)

    def _add_bucket(self, last: bool, params: Sequence[ZeroParameter], received: Tensor) -> None:
        """Add a received bucket; start boundary buckets that it completes in the last backward."""
        if self._reduces_via_i:
            self._pending_gradients.add(params, received)
        else:
            self._accumulate(params, received)
        if self._reduces_via_i or (last and self._bucket_placement == Placement.I):
            for bucket in self._boundary.mark_ready(param.ds_id for param in params):
                self._reduce_between_groups(bucket)

    def _bucket_transfer(
        self, gradients: Sequence[tuple[Any, Tensor | None]], dtype: torch.dtype, sequence_parallel_size: int
    ) -> Transfer:
        params = [param for param, _ in gradients]
        cells = [self._pack(params, [gradient for _, gradient in gradients], dtype, sequence_parallel_size)]
        del gradients  # gradients, and packed cells, are freed as soon as a hop has read them
        return (
            yield from self._redistribution.reduce_cells(
                cells.pop(), self._bucket_placement, self._spans(params), self._number
            )
        )

    def _pack(
        self,
        params: Sequence[ZeroParameter],
        gradients: Sequence[Tensor | None],
        dtype: torch.dtype,
        sequence_parallel_size: int,
    ) -> Tensor:
        bucket = self._slices.layout_of(params)
        device = get_accelerator().current_device_name()
        width = fill_up(bucket.width, self._redistribution.multiple)
        cells = torch.empty(bucket.cols, bucket.rows, width, dtype=dtype, device=device)
        bucket.pack(gradients, cells)
        # Divided before the sum, as in ZeRO-3, so that 16-bit sums do not overflow.
        return cells.div_(self._context.ranks / sequence_parallel_size)

    def end_backward(self, max_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Called when all gradients of a backward have been passed to ``reduce``. Argument: see ``learn_order``."""
        if self._reduces_via_i:
            self._queue.drain()  # or pieces in flight would be sent as zeros
            self._prepare_accumulator()
            for bucket in self._boundary.pop_remaining():
                self._reduce_between_groups(bucket)
            if self._boundary.may_resend:
                self._inter_queue.drain()  # or the host would wait for ranks that wait for these buckets
                for bucket in self._boundary.buckets_to_resend(max_over_ranks):
                    self._reduce_between_groups(bucket)

    def drain(self) -> None:
        """Wait for all buckets."""
        self._queue.drain()
        self._inter_queue.drain()

    def drop(self) -> None:
        """Drop gradients that are accumulated or in flight."""
        self._queue.drop()
        self._inter_queue.drop()
        self._boundary.clear()
        self.clear()

    def _prepare_accumulator(self) -> None:
        """Prepare ``accumulator`` for additions."""
        if not self.has_gradients:
            self.accumulator.zero_()
        elif self._is_complete and self._bucket_placement == Placement.I:
            # Another backward at the boundary: the complete gradients must count once in the next sum between groups.
            duplicate = self._os == Placement.I and self._redistribution.row != 0
            for row in range(self.rows):
                if row != self._own_row or duplicate:
                    self.accumulator[row].zero_()
        self.has_gradients, self._is_complete = True, False

    def _accumulate(self, params: Sequence[ZeroParameter], received: Tensor) -> None:
        """Add the reduced gradients of these parameters."""
        spans = self._spans(params)
        for span, part in zip(spans, split_as(received.view(self.rows, -1), spans), strict=True):
            add_to(span.of(self.accumulator), part)

    def _spans(self, params: Sequence[ZeroParameter]) -> tuple[Span, ...]:
        """Return the columns of parameters in ``accumulator``, in their order, neighbors joined."""
        return self._columns_of(tuple([param.ds_id for param in params]))

    def _merge_columns(self, ds_ids: tuple[int, ...]) -> tuple[Span, ...]:
        return tuple(merge_neighbors(self._columns[ds_id] for ds_id in ds_ids))

    # At the accumulation boundary: g -> os ############################################################

    def reduce_remaining(self) -> None:
        """Reduce the remaining buckets, with g = N, including unused parameters: ranks may have used different
        ones."""
        self.reduce_buckets(self._boundary.pop_remaining())

    def reduce_buckets(self, buckets: Iterable[Bucket]) -> None:
        """Reduce full gradients of buckets, in order, to the placement of os; with os = I inside the group only."""
        for bucket in buckets:
            self._prepare_accumulator()
            gradients = [(param, self._full_gradients.pop(param.ds_id, None)) for param in bucket]
            transfer = self._bucket_transfer(gradients, self._context.message_dtype(bucket[0]), 1)
            self._queue.submit(transfer, partial(self._add_full_bucket, bucket))
            if not get_accelerator().is_synchronized_device():
                for _, gradient in gradients:
                    if gradient is not None:  # memory of the compute stream, which would reuse it too early
                        gradient.record_stream(get_accelerator().current_stream())

    def _add_full_bucket(self, bucket: Bucket, received: Tensor) -> None:
        self._accumulate(bucket, received)
        if self._bucket_placement == Placement.I:
            if self._sends_early:
                self._reduce_between_groups(bucket)
            else:
                self._pending_buckets.append(bucket)

    def finish(self) -> None:
        """Complete the optimizer's shard: reduce gradients in I to os."""
        self._queue.drain()  # buckets must be in ``accumulator`` before its columns are packed
        if not self.has_gradients:
            self._prepare_accumulator()
        if self._bucket_placement == Placement.I and not (self._reduces_via_i or self._is_complete):
            for bucket in self._pending_buckets if self._keeps_full else self._boundary.pop_remaining():
                self._reduce_between_groups(bucket)
        self._pending_buckets.clear()
        self.drain()  # until then, sums are missing in the shard
        self._is_complete = True
        if not self._redistribution.inter.keeps_zeros:
            self._clear_padding()

    def _reduce_between_groups(self, bucket: Bucket) -> None:
        """Start to reduce a bucket I -> os: its pieces together, or a large parameter in parts."""
        if self._reduces_via_i:
            transfer = self._pieces_transfer(bucket, self._pending_gradients.pop(bucket))
            # The pieces were popped, so nothing else uses their memory.
            self._inter_queue.submit(transfer, partial(self._accumulate, bucket), reuses=False)
            return
        columns = self._spans(bucket)
        parts: list[Sequence[Span]] = [columns]
        if len(columns) == 1 or self._is_on_host:  # spans in host memory are copied to the device separately
            parts = [[window] for span in columns for window in windows(span, self.rows, self._bucket)]
        for spans in parts:
            pieces = [span.of(self.accumulator) for span in spans]
            transfer = self._redistribution.sync_spans(pieces, self._wire_dtype, self._os, spans, self._number)
            # The columns that it reads do not change until all buckets are complete.
            self._inter_queue.submit(transfer, partial(self._store_sums, spans), reuses=False)

    def _pieces_transfer(self, bucket: Bucket, pieces: list[Tensor]) -> Transfer:
        device = get_accelerator().current_device_name()
        packed = [
            align_rows(
                list(map(record_on_current_stream, pieces)),
                self._context.message_dtype(bucket[0]),
                device,
                self._redistribution.multiple,
            )
        ]
        pieces.clear()  # frees their memory before the hop
        return (yield from self._redistribution.reduce_i_to_g(packed.pop(), self._spans(bucket), self._number))

    def _store_sums(self, spans: Sequence[Span], total: Tensor) -> None:
        """Write the sums of these columns to the shard: (parts, width), as ``sync_spans`` returns them."""
        for span, part in zip(spans, split_as(total[0], spans), strict=True):
            span.of(self.shard).copy_(part)

    def _clear_padding(self) -> None:
        """Zero the padding: chunks of the last ranks may extend past the end of their parameter."""
        cols = self._redistribution.cols
        rank = self._redistribution.col + (self._redistribution.row * cols if self._os == Placement.G else 0)
        for param in self._params:
            chunk = param.ds_tensor.ds_numel
            present = min(chunk, max(0, param.ds_numel - rank * chunk))
            start = self._columns[param.ds_id].start
            self.shard[start + present : start + chunk].zero_()
