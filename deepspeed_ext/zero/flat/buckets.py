# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Buckets of gradients with p = N, which are the same on all ranks.

Note [Fixed buckets]
    Ranks may use different parameters in a micro-batch: only some have images for a vision tower, or each drops other
    layers. DeepSpeed fills buckets in the order of gradients, so such ranks would send messages of different sizes.
    Here each trained parameter has a place in a bucket that is fixed for the run. A bucket has neighbors in the model,
    and buckets begin with its last parameters. A bucket is sent once all its members have gradients and all buckets
    before it have been sent; the others are sent when the backward ends, in the same order (``Boundary``). A member
    without a gradient on this rank contributes zeros.

    So a rank that skips parameters holds the gradients of all later buckets until its backward ends. In the first step
    these are all gradients if the last parameters of the model are unused.

    A window of slices (Note [Reduction of flat buffers] in ``gradients.py``) is sent after the last of its buckets. If
    buckets were sent before it was known that they are the last ones of the accumulation, as by a backward inside a
    forward, their windows follow with the next bucket. So windows have one order on all ranks, too.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from deepspeed_ext.comm.layout import BucketPlan, plan_bucket
from deepspeed_ext.comm.spans import BufferSpan, Span, merge_in_buffers
from deepspeed_ext.strategy import full_bucket
from deepspeed_ext.zero.boundary import Boundary
from deepspeed_ext.zero.context import Context
from deepspeed_ext.zero.families import family_of
from deepspeed_ext.zero.flat.buffers import FlatBuffers
from deepspeed_ext.zero.flat.gradients import AllFlatGradients, FlatGradients, wire_dtype
from deepspeed_ext.zero.flat.stage12_view import Stage12View
from deepspeed_ext.zero.micro_steps import MicroSteps
from deepspeed_ext.zero.shards import Window


@dataclass(eq=False)
class Bucket:
    """Trained parameters of one family whose gradients are sent together.

    Attributes:
        gradients: gradients of the family.
        dtype: dtype of messages.
        params: members, in the order of their elements in the flat buffers and in the bucket.
        positions: their positions in the model.
        spans: their elements in the flat buffers.
        contiguous: whether gradients are copied to one buffer as they are computed.
        windows: windows of slices that follow the bucket.
        numel, numels: elements of the bucket, and of each member.
        buffers: numbers of the flat buffers.
        places: numbers of the members, by position in the model.
    """

    gradients: FlatGradients
    dtype: torch.dtype
    params: Sequence[nn.Parameter]
    positions: Sequence[int]
    spans: Sequence[BufferSpan]
    contiguous: bool
    windows: list[Window] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.numels = [span.numel for _, span in self.spans]
        self.numel = sum(self.numels)
        self.buffers = {buffer for buffer, _ in self.spans}
        self.places = {position: place for place, position in enumerate(self.positions)}

    @cached_property
    def plan(self) -> BucketPlan:
        """Owners of the elements. Neighbors in a contiguous bucket are one span, which is packed by fewer copies."""
        spans = merge_in_buffers(self.spans) if self.contiguous else self.spans
        return plan_bucket(self.gradients.layouts, tuple(spans))


@dataclass
class _Filling:
    """Gradients of a bucket that has not been sent.

    Attributes:
        parts: 1D, the gradient of each member, or None.
        buffer: 1D, memory of a contiguous bucket, of which ``parts`` are views.
        views: 1D, each member's part of ``buffer``.
        free: event after which ``buffer`` may be overwritten, if it was used before.
        streams: streams that write gradients.
    """

    parts: list[Tensor | None]
    buffer: Tensor | None = None
    views: Sequence[Tensor] = ()
    free: Any = None
    streams: set[Any] = field(default_factory=set)


class GradientBuckets:
    """The buckets of all trained parameters. See Note [Fixed buckets].

    Args:
        context: shared constants; a strategy with p = N.
        optimizer: the optimizer that has the gradients. Its own buckets are not used.
        buffers: its flat buffers.
        gradients: gradients that are being reduced.
        micro_steps: backwards of an accumulation.
    """

    def __init__(
        self,
        context: Context,
        *,
        optimizer: Stage12View,
        buffers: FlatBuffers,
        gradients: AllFlatGradients,
        micro_steps: MicroSteps,
    ) -> None:
        self._context, self._optimizer, self._gradients = context, optimizer, gradients
        self._micro_steps, self._reductions = micro_steps, context.reductions
        self._has_streams = not get_accelerator().is_synchronized_device()
        self._contiguous, optimizer.contiguous_gradients = optimizer.contiguous_gradients, False
        buckets = self._divide(buffers)
        self._positions = buffers.positions
        self._bucket_at = {position: bucket for bucket in buckets for position in bucket.positions}
        names = list(optimizer.param_names.values())
        self._boundary = Boundary(
            buckets,
            lambda bucket: bucket.positions,
            early=True,
            name=names.__getitem__,
            advice=(
                ". This happens after an interrupted backward, unless optimizer.zero_grad() drops it, or if modules "
                "share it and are checkpointed; then checkpoint with use_reentrant false."
            ),
        )
        self._assign_windows()
        # A bit more than a packed bucket: once glibc has freed such a buffer, it reuses the memory of packed buckets,
        # instead of mapping new memory for each.
        self._buffer_numel = max((bucket.numel for bucket in buckets if bucket.contiguous), default=0) + 1024
        self._filling: dict[Bucket, _Filling] = {}
        self._free: list[tuple[Tensor, Any]] = []  # buffers, each with an event after its last use
        self._owed: list[Bucket] = []  # buckets of this backward whose windows have not been sent

    def _divide(self, buffers: FlatBuffers) -> list[Bucket]:
        """Return the buckets, in the reverse order of the model."""
        params = sorted((p for p in buffers.params() if p.numel()), key=lambda p: -buffers.positions[id(p)])
        most = self._context.reduce_bucket
        if self._context.overlap:  # otherwise smaller buckets hide nothing
            most = full_bucket(most, sum(param.numel() for param in params))
        filled: dict[tuple[str, torch.dtype], tuple[list[nn.Parameter], float]] = {}
        lists: list[tuple[tuple[str, torch.dtype], list[nn.Parameter]]] = []
        for param in params:
            key = family_of(param), self._context.message_dtype(param)
            members, numel = filled.get(key, ([], math.inf))
            if numel + param.numel() > most:
                members, numel = [], 0
                lists.append((key, members))
            members.append(param)
            filled[key] = members, numel + param.numel()
        # By the member that is complete last in a backward.
        lists.sort(key=lambda item: -buffers.positions[id(item[1][-1])])
        return [self._bucket(buffers, family, dtype, members) for (family, dtype), members in lists]

    def _bucket(self, buffers: FlatBuffers, family: str, dtype: torch.dtype, params: Iterable[nn.Parameter]) -> Bucket:
        owners = [(buffers.buffer_of(param), param) for param in params]
        owners.sort(key=lambda owner: (owner[0].number, owner[0].offset(owner[1])))
        return Bucket(
            self._gradients[family],
            dtype,
            params=[param for _, param in owners],
            positions=[buffers.positions[id(param)] for _, param in owners],
            spans=[(buffer.number, Span(buffer.offset(param), param.numel())) for buffer, param in owners],
            contiguous=self._contiguous and len(owners) > 1,  # a single gradient needs no copy
        )

    def _assign_windows(self) -> None:
        """Let each window follow the last of its buckets, and order windows as buckets."""
        order = {bucket: number for number, bucket in enumerate(self._boundary.buckets)}
        for bucket in order:
            bucket.windows = []
        for gradients in self._gradients.values():
            last = {
                window: max((self._bucket_at[at] for at in window.members), key=order.__getitem__)
                for window in gradients.windows
            }
            gradients.windows.sort(key=lambda window: order[last[window]])
            for window in gradients.windows:
                last[window].windows.append(window)

    def learn_order(self, max_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Sort the buckets after the first step; see ``Boundary.learn_order``. Collective, once."""
        before = self._boundary.buckets
        self._boundary.learn_order(max_over_ranks)
        if self._boundary.buckets is not before:
            self._assign_windows()

    # A backward #######################################################################################

    def add(self, param: nn.Parameter) -> None:
        """Store a gradient, and send the buckets that it completes.

        Raises:
            RuntimeError: the parameter's bucket has already been sent in this backward.
        """
        in_backward = self._optimizer._backward_active_depth > 0
        buckets = self._boundary.mark_ready([self._positions[id(param)]], is_timed=in_backward)
        self._store(param)
        self._send(buckets)

    def flush(self) -> None:
        """Send the remaining buckets: the backward has ended."""
        buckets = self._boundary.pop_remaining()
        for param in (param for bucket in buckets for param in bucket.params):
            # Stage 1 has accumulated gradients of parameters that the last micro-batch did not use.
            if self._optimizer.get_gradient_for_reduction(param) is not None:
                self._store(param)
        self._send(buckets)
        self._owed.clear()

    def free(self) -> None:
        """Free buffers at the accumulation boundary, where the current stream has waited for all buckets. Between the
        micro-steps they are kept, or a host would get and clear their memory again each time."""
        self._free.clear()

    def drop(self) -> None:
        """Drop the gradients of an interrupted backward."""
        self._boundary.clear()
        self._filling.clear()
        self._owed.clear()
        self.free()

    def _store(self, param: nn.Parameter) -> None:
        position = self._positions[id(param)]
        bucket = self._bucket_at[position]
        filling, place = self._filling_of(bucket), bucket.places[position]
        gradient = self._optimizer.get_gradient_for_reduction(param)
        if filling.parts[place] is None:
            self._optimizer._maybe_reduce_autoep_folding_tp_gradient(param, gradient)
        self._write_on_current_stream(filling)
        part = gradient.reshape(-1)
        if filling.buffer is not None:
            part = filling.views[place]
            if gradient.data_ptr() != part.data_ptr():  # another gradient was added in place
                part.copy_(gradient.reshape(-1))
                gradient.data = part.view_as(gradient)  # frees the gradient's own memory
        filling.parts[place] = part

    def _filling_of(self, bucket: Bucket) -> _Filling:
        if bucket not in self._filling:
            self._filling[bucket] = self._begin(bucket)
        return self._filling[bucket]

    def _begin(self, bucket: Bucket) -> _Filling:
        filling = _Filling([None] * len(bucket.params))
        if not bucket.contiguous:
            return filling
        # Packing may still read the latest free buffer.
        if len(self._free) > (self._reductions.stream is not None):
            filling.buffer, filling.free = self._free.pop(0)
        else:  # the first two can be used for other buckets afterwards
            filling.buffer = self._new(torch.empty, self._buffer_numel if len(self._filling) < 2 else bucket.numel)
        filling.views = filling.buffer[: bucket.numel].split(bucket.numels)
        return filling

    def _new(self, make: Callable[..., Tensor], numel: int) -> Tensor:
        dtype, device = self._optimizer._gradient_reduction_buffer_dtype(), get_accelerator().current_device_name()
        return make(numel, dtype=dtype, device=device)

    def _write_on_current_stream(self, filling: _Filling) -> None:
        """Let the current stream wait until a buffer may be overwritten, and record that it has written to it."""
        if not self._has_streams or (stream := get_accelerator().current_stream()) in filling.streams:
            return
        filling.streams.add(stream)
        if filling.free is not None:
            stream.wait_event(filling.free)  # or gradients would overwrite a bucket that is being packed

    def _send(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            last, gradients = self._micro_steps.is_last, bucket.gradients
            for other in self._gradients.values() if last else ():
                other.allocate_for_early_reduction()
            for number in bucket.buffers:
                gradients.allocate(number)
            self._owed.append(bucket)
            windows = self._pop_owed(gradients) if last and gradients.sends_early else []
            self._reduce(bucket, windows)
            for param in bucket.params:
                self._optimizer.clear_grad_attribute(param)

    def _pop_owed(self, gradients: FlatGradients) -> list[Window]:
        """Return the windows of the family's buckets that were sent, unless they have been returned."""
        own = [bucket for bucket in self._owed if bucket.gradients is gradients]
        self._owed = [bucket for bucket in self._owed if bucket.gradients is not gradients]
        return [window for bucket in own for window in bucket.windows]

    def _reduce(self, bucket: Bucket, windows: Sequence[Window]) -> None:
        filling = self._filling_of(bucket)
        del self._filling[bucket]
        tensors = self._complete(bucket, filling)
        # Buffers are kept, but gradients are freed before the bucket has been waited for.
        freed = tensors if filling.buffer is None else ()
        with self._reductions.after_current(filling.streams, freed):
            dtype = wire_dtype(self._context, bucket.dtype)
            bucket.gradients.reduce(tensors, bucket.plan, dtype, windows)
        if filling.buffer is not None:
            self._free.append((filling.buffer, self._reductions.event()))
            if filling.buffer.numel() < self._buffer_numel:
                self._reductions.record(self._free.pop()[0])
            elif len(self._free) > 2:  # more were needed because a bucket was late
                self._reductions.record(self._free.pop(0)[0])

    def _complete(self, bucket: Bucket, filling: _Filling) -> list[Tensor]:
        """Return the contents of a bucket, 1D: a buffer, or a tensor for each member. Missing gradients are zeros."""
        missing = [place for place, part in enumerate(filling.parts) if part is None]
        if missing:
            self._write_on_current_stream(filling)
        if filling.buffer is not None:
            for place in missing:
                filling.views[place].zero_()
            return [filling.buffer[: bucket.numel]]
        for place in missing:
            filling.parts[place] = self._new(torch.zeros, bucket.numels[place])
        return [part for part in filling.parts if part is not None]
