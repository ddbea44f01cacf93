# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Windows of packed experts: gathers from the parameters' shards, and reductions of their gradients.

Note [Windows of slices]
    A window is some spans of each parameter, and ZeRO's chunks divide a parameter without regard to experts. So
    ranks hold unequal pieces of a window. Inside a group they exchange exactly these, by an all-to-all of unequal
    parts; gradients are reduced in the same unequal parts. All persistent data keeps ZeRO's layout.

    Between groups the full I-slice is sent, as without windows: with p = G it is gathered once for each pass of the
    module, with g = G it is reduced after all its windows are added. If groups have one rank and p = G, a slice would
    be the full parameter, so windows are gathered between groups.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import get_allgather_dtype
from torch import Tensor

from deepspeed_ext.comm.hops import Transfer
from deepspeed_ext.comm.layout import FlatLayout, Piece
from deepspeed_ext.comm.packing import concat_aligned
from deepspeed_ext.comm.spans import Span, split_as
from deepspeed_ext.comm.transfer_queue import ActiveTransfer, TransferQueue
from deepspeed_ext.leaf.units import LiveElements
from deepspeed_ext.leaf.windows import WindowedModule
from deepspeed_ext.strategy import Placement
from deepspeed_ext.zero.context import Context
from deepspeed_ext.zero.micro_steps import MicroSteps
from deepspeed_ext.zero.sharded.gradients import ShardedGradients
from deepspeed_ext.zero.sharded.slices import Slices
from deepspeed_ext.zero.sharded.stage3_view import Stage3View

_Pieces = list[list[tuple[int, Piece]]]  # by rank: number of a parameter, and the rank's piece of the window in it


def _pieces_by_rank(
    layouts: Sequence[FlatLayout], experts: int, window: Sequence[int], between: bool = False
) -> _Pieces:
    """Return the pieces of a window that each rank of a group holds, in the order in which it sends them. Their spans
    are relative to the window in the parameter. With ``between`` each piece is in row 0, the only row.

    Args:
        layouts: layouts of the parameters.
        experts: number of experts in each.
        window: numbers of the window's experts.
        between: whether the ranks are an inter group, in which each rank is a group.
    """
    layout = layouts[0]
    pieces: _Pieces = [[] for _ in range(layout.rows if between else layout.cols)]
    for number, layout in enumerate(layouts):
        numel_each = layout.numel // experts
        for position, expert in enumerate(window):
            for piece in layout.pieces(Span(expert * numel_each, numel_each)):
                rank, row = (piece.row, 0) if between else (piece.col, piece.row)
                span = piece.span.shifted((position - expert) * numel_each)
                pieces[rank].append((number, piece._replace(row=row, span=span)))
    return pieces


class _Window:
    """A window in flight, or in use."""

    def __init__(self, queue: TransferQueue, started: ActiveTransfer, pieces: _Pieces, live: LiveElements) -> None:
        self._queue = queue
        self._started: ActiveTransfer | None = started
        self._pieces = [piece for rank_pieces in pieces for piece in rank_pieces]
        self._numel = sum(piece.span.numel for _, piece in self._pieces)
        self._live = live
        live.add(self._numel)

    def wait(self, weights: Sequence[Tensor]) -> None:
        """Wait for the window, and write it to these weights."""
        assert self._started is not None
        flat, self._started = self._queue.finish(self._started), None
        parts = split_as(flat, [piece.span for _, piece in self._pieces])
        for (number, piece), part in zip(self._pieces, parts, strict=True):
            piece.span.of(weights[number].view(-1)).copy_(part)

    def release(self) -> None:
        """Count its elements as released."""
        self._live.add(-self._numel)


class WindowGathers:
    """Gathers windows out of the shards of parameters. See Note [Windows of slices]."""

    def __init__(self, slices: Slices, queue: TransferQueue, live: LiveElements) -> None:
        self._slices, self._queue, self._live = slices, queue, live
        self._uses_full_slices = slices.strategy.p == Placement.G and slices.topology.sizes.groups > 1
        self._between = self._uses_full_slices and slices.topology.sizes.group_size == 1
        # id of the module: its passes
        self._gathered: dict[int, list[tuple[ActiveTransfer | None, list[Tensor]]]] = {}
        self._plans: dict[tuple[int, int], _Pieces] = {}

    def begin_pass(self, module: WindowedModule) -> None:
        """With p = G, start to gather the I-slices between groups, once per pass."""
        started = None
        if self._uses_full_slices and not self._between:
            started = self._queue.start(self._gather_slices(module))
        self._gathered.setdefault(id(module), []).append((started, []))

    def end_pass(self, module: WindowedModule) -> None:
        """Free the I-slices that the pass has gathered."""
        self._gathered[id(module)].pop()

    def _gather_slices(self, module: WindowedModule) -> Transfer:
        dtype = get_allgather_dtype(module.params[0], module.params[0].ds_tensor)
        device = get_accelerator().current_device_name()
        pieces = [
            param.ds_tensor.to(device=device, dtype=dtype, non_blocking=True).view(1, -1) for param in module.params
        ]
        shard = concat_aligned(pieces, self._slices.redistribution.multiple)
        return (yield from self._slices.redistribution.gather(shard, Placement.G, Placement.I))

    def fetch(self, module: WindowedModule, number: int) -> _Window:
        """Start to gather a window."""
        passes = self._gathered[id(module)]
        started, rows = passes[-1]
        if started is not None:
            flat = self._queue.finish(started)
            numels = [param.ds_tensor.ds_numel for param in module.params]
            slices = flat.view(self._slices.topology.sizes.groups, -1)[:, : sum(numels)].split(numels, dim=1)
            rows = list(slices)
            passes[-1] = None, rows
        key = id(module), number
        if key not in self._plans:
            layouts = [self._slices.layout(param) for param in module.params]
            experts = sum(len(window) for window in module.windows)
            self._plans[key] = _pieces_by_rank(layouts, experts, module.windows[number], self._between)
        pieces = self._plans[key]
        return _Window(self._queue, self._queue.start(self._window_transfer(module, pieces, rows)), pieces, self._live)

    def _window_transfer(self, module: WindowedModule, pieces: _Pieces, rows: list[Tensor]) -> Transfer:
        redistribution, params = self._slices.redistribution, module.params
        collectives = (redistribution.inter if self._between else redistribution.intra).collectives
        self._slices.wait_for_updates(params)
        shards = rows or [self._slices.shard_of(param) for param in params]
        dtype = get_allgather_dtype(params[0], params[0].ds_tensor)
        device = get_accelerator().current_device_name()
        parts = [piece.columns.of(shards[number][piece.row]) for number, piece in pieces[collectives.rank]]
        sent = torch.cat(
            [part.to(device, non_blocking=True).to(dtype) for part in parts]  # host conversions have no order
            or [torch.empty(0, dtype=dtype, device=device)]
        )
        if collectives.size == 1:
            return sent
        splits = [sum(piece.span.numel for _, piece in rank_pieces) for rank_pieces in pieces]
        received = torch.empty(sum(splits), dtype=dtype, device=device)
        copies = sent.repeat(collectives.size)  # every rank needs the full window
        yield collectives.all_to_all(received, copies, [sent.numel()] * collectives.size, "all_gather", splits)
        return received


class WindowGradients:
    """Reduces the gradients of windows into gradients of dense parameters. See Note [Windows of slices].

    While DeepSpeed's ``coalesce_grad_reduction`` combines several backwards, gradients are stored unreduced until
    DeepSpeed passes them on.
    """

    def __init__(
        self,
        context: Context,
        *,
        optimizer: Stage3View,
        micro_steps: MicroSteps,
        gradients: ShardedGradients,
        slices: Slices,
    ) -> None:
        self._micro_steps = micro_steps
        self._optimizer, self._gradients, self._slices = optimizer, gradients, slices
        self._context, self._reductions = context, context.reductions
        self._keeps_full = context.strategy.g == Placement.N
        # As ZeRO-3, which counts sequence parallelism only without reduce-scatter.
        self._scale = context.ranks / (1 if optimizer.reduce_scatter else context.sequence_parallel_size)
        self._sums: dict[int, Tensor] = {}  # id of the module: (rows, elements of its parameters' chunks)
        self._unreduced_modules: set[int] = set()  # ids of modules with incomplete gradients that are stored unreduced
        self._plans: dict[tuple[int, int], _Pieces] = {}

    def reduce_window(
        self, module: WindowedModule, number: int, gradients: Sequence[Tensor | None], last: bool
    ) -> None:
        """Reduce or keep the gradients of a window; window 0 of a backward's last pass completes them."""
        if self._keeps_full or self._optimizer._coalesce_grad_reduction:
            if not self._optimizer._coalesce_grad_reduction:
                self._unreduced_modules.add(id(module))
            self._add_to_full(module, number, gradients)
        else:
            self._reduce(module, number, gradients, last and not number)
        if last and not number:
            self._pass_to_optimizer(module)

    def _pass_to_optimizer(self, module: WindowedModule) -> None:
        """Pass complete gradients that were stored unreduced, if any, to the optimizer."""
        self._sums.pop(id(module), None)
        self._unreduced_modules.discard(id(module))
        if self._optimizer._coalesce_grad_reduction:
            return
        for param in module.params:
            if param.grad is not None and self._keeps_full:
                self._optimizer.reduce_ready_partitions_and_remove_grads(param)

    def end_windows(self, module: WindowedModule) -> None:
        """Complete gradients that wait for a further pass of the module, at the end of a backward."""
        if id(module) in self._sums:
            self._reduce(module, 0, [None] * len(module.params), True)
        self._pass_to_optimizer(module)

    def drop_window_gradients(self, module: WindowedModule) -> None:
        """Drop gradients of an interrupted backward."""
        self._sums.pop(id(module), None)
        if id(module) in self._unreduced_modules:
            self._unreduced_modules.discard(id(module))
            for param in module.params:
                param.grad = None

    def _add_to_full(self, module: WindowedModule, number: int, gradients: Sequence[Tensor | None]) -> None:
        """Add a window to full gradients."""
        window = module.windows[number]
        for param, gradient in zip(module.params, gradients, strict=True):
            if not param.requires_grad:
                continue
            if param.grad is None:
                zeros = torch.zeros(param.ds_shape, dtype=param.dtype, device=get_accelerator().current_device_name())
                data, param.data = param.data, zeros  # a released parameter has no shape that fits
                param.grad, param.data = zeros, data
            if gradient is not None:
                experts = torch.tensor(window, device=gradient.device)
                param.grad.index_add_(0, experts, gradient.to(param.grad.dtype))

    def _reduce(self, module: WindowedModule, number: int, gradients: Sequence[Tensor | None], complete: bool) -> None:
        params = [param for param in module.params if param.requires_grad]
        flats = [grad for param, grad in zip(module.params, gradients, strict=True) if param.requires_grad]
        key = id(module), number
        layouts = [self._slices.layout(param) for param in params]
        if key not in self._plans:
            experts = sum(len(window) for window in module.windows)
            self._plans[key] = _pieces_by_rank(layouts, experts, module.windows[number])
        with self._reductions.after_current():
            dtype = self._context.message_dtype(params[0])
            if id(module) not in self._sums:
                device = get_accelerator().current_device_name()
                width = sum(layout.chunk for layout in layouts)
                self._sums[id(module)] = torch.zeros(layouts[0].rows, width, dtype=dtype, device=device)
            sums = self._sums[id(module)]
            transfer = self._window_transfer(flats, self._plans[key], layouts, sums)
            if complete:
                transfer = _chain(transfer, partial(self._gradients.reduce_sums, params, sums))
            self._gradients.submit(params, transfer, self._micro_steps.is_last, complete)
            if not get_accelerator().is_synchronized_device():
                for gradient in flats:
                    if gradient is not None:
                        gradient.record_stream(get_accelerator().current_stream())  # packing still reads it

    def _window_transfer(
        self, flats: Sequence[Tensor | None], pieces: _Pieces, layouts: Sequence[FlatLayout], sums: Tensor
    ) -> Transfer:
        """Reduce a window N -> I, and add it to its module's sums."""
        hop = self._gradients.intra
        splits = [sum(piece.span.numel for _, piece in rank_pieces) for rank_pieces in pieces]
        order = [piece for rank_pieces in pieces for piece in rank_pieces]
        if all(flat is None for flat in flats):
            packed = torch.zeros(sum(splits), dtype=sums.dtype, device=sums.device)
        else:
            zero = torch.zeros(1, dtype=sums.dtype, device=sums.device)
            packed = torch.cat(
                [
                    zero.expand(piece.span.numel)
                    if flats[number] is None
                    else piece.span.of(cast(Tensor, flats[number]).reshape(-1)).to(sums.dtype)
                    for number, piece in order
                ]
            )
        packed.div_(self._scale)
        part = yield from hop.reduce_scatter(packed, splits)
        if not get_accelerator().is_synchronized_device():
            sums.record_stream(get_accelerator().current_stream())  # allocated on another stream
        starts = [sum(layout.chunk for layout in layouts[:number]) for number in range(len(layouts))]
        local = pieces[hop.rank]
        for (number, piece), values in zip(local, split_as(part, [piece.span for _, piece in local]), strict=True):
            piece.columns.shifted(starts[number]).of(sums[piece.row]).add_(values)
        return sums


def _chain(first: Transfer, second: Any) -> Transfer:
    """Run one transfer after the other."""
    yield from first
    return (yield from second())
