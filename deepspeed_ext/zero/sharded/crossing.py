# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Gradients that cross between groups in every micro-step, where groups may use modules in different orders: IGG.

Note [One order between groups]
    Buckets fill in the order in which gradients get ready, and with p = I groups may differ in it. What is summed
    between groups must be the same in all of them, in one order. So a bucket moves inside its group first, and what
    arrives are *pieces*: these cross in an order that all groups know, the model's parameters last to first, in
    buckets that are filled in that order. Which these are depends on nothing but the parameters that are used.

    A piece waits for those before it; that is about a bucket where modules are used in the order in which they were
    made, and at most what a rank of IIG holds of gradients. A parameter that was made last and gets its gradient last
    holds all others up: then nothing crosses under the backward. When the backward ends what is left crosses. A
    parameter that the last backward has not used is not waited for, nor is a second gradient of one: those cross at
    the end.

    No communication is needed for that, and no byte is added. Groups must use the same parameters in a backward.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from deepspeed.runtime.torch_autocast import sort_dtypes
from torch import Tensor

from deepspeed_ext.comm.packing import fill_up
from deepspeed_ext.comm.transfer_queue import StreamEvent
from deepspeed_ext.deepspeed_types import ZeroParameter


class _Piece(NamedTuple):
    """A parameter's part of what has arrived: ``numel`` columns of it, from ``start``; complete from a point on."""

    param: ZeroParameter
    arrived: Tensor
    ready: StreamEvent
    start: int
    numel: int


@dataclass
class CrossingBucket:
    """What crosses together.

    Attributes:
        params: side by side, in the order of most buckets, so that neighbors are copied together.
    """

    params: list[ZeroParameter]
    _pieces: list[_Piece]
    _multiple: int

    def pack(self) -> Tensor:
        """Return (rows, columns and padding) of the parameters, on the current stream; once."""
        pieces, self._pieces = self._pieces, []
        for ready, arrived in {id(piece.ready): (piece.ready, piece.arrived) for piece in pieces}.values():
            ready.wait(arrived)
        stretches: list[_Piece] = []
        for piece in pieces:
            last = stretches[-1] if stretches else None
            if last is not None and last.arrived is piece.arrived and last.start + last.numel == piece.start:
                stretches[-1] = last._replace(numel=last.numel + piece.numel)
            else:
                stretches.append(piece)
        parts = [one.arrived[:, one.start : one.start + one.numel] for one in stretches]
        width = sum(one.numel for one in stretches)
        missing = fill_up(width, self._multiple) - width
        if missing:
            parts.append(parts[0].new_zeros(1, 1).expand(parts[0].shape[0], missing))
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=1)


class Crossing:
    """Puts what has arrived in a group into buckets that are the same in all groups. See Note [One order between
    groups].

    Args:
        params: all that may arrive.
        rows: of the I-slice.
        bucket: elements (of whole parameters) of a bucket at most, unless one parameter has more.
        multiple: what the columns of a bucket are filled up to with zeros.
    """

    def __init__(self, params: Iterable[ZeroParameter], rows: int, bucket: int, multiple: int = 1) -> None:
        self._order = sorted(params, key=lambda param: -param.ds_id)
        self._position = {param.ds_id: number for number, param in enumerate(self._order)}
        self._rows = rows
        self._bucket = bucket
        self._multiple = multiple
        self._expect(self._order)
        self.clear()

    def clear(self) -> None:
        """Forget everything, as at the beginning of a backward."""
        self._next = 0  # number of the expected parameter that crosses next
        self._used: set[int] = set()
        self._waiting: dict[int, _Piece] = {}
        self._late: list[_Piece] = []
        self._open: dict[torch.dtype, list[_Piece]] = {}

    def add(self, params: Sequence[ZeroParameter], arrived: Tensor) -> None:
        """Take parameters that have arrived.

        Args:
            params: side by side in ``arrived``.
            arrived: (rows, columns) or flat: their parts of this rank's I-slice; padding follows.
                Complete on the current stream.
        """
        arrived, ready = arrived.view(self._rows, -1), StreamEvent()
        start = 0
        for param in params:
            piece = _Piece(param, arrived, ready, start, param.ds_tensor.ds_numel)
            start += piece.numel
            first = param.ds_id in self._expected_ids and param.ds_id not in self._used
            self._used.add(param.ds_id)
            if first:
                self._waiting[param.ds_id] = piece
            else:
                self._late.append(piece)

    def buckets(self, last: bool = False) -> Iterator[CrossingBucket]:
        """Return what can cross by now, in order.

        Args:
            last: whether the backward has ended.
        """
        while self._next < len(self._expected):
            piece = self._waiting.pop(self._expected[self._next].ds_id, None)
            if piece is None and not last:
                return
            self._next += 1
            if piece is not None:
                after = self._expected[self._next].ds_numel if self._next < len(self._expected) else 0
                yield from self._fill(piece, after)
        if last:
            for piece in sorted(self._late, key=lambda piece: self._position[piece.param.ds_id]):
                yield from self._fill(piece, 0)
            for dtype in sort_dtypes(self._open):
                yield self._bucket_of(self._open[dtype])
            if self._used:
                self._expect([param for param in self._order if param.ds_id in self._used])
            self.clear()

    def _expect(self, params: list[ZeroParameter]) -> None:
        self._expected = params
        self._expected_ids = {param.ds_id for param in params}

    def _bucket_of(self, pieces: Iterable[_Piece]) -> CrossingBucket:
        pieces = sorted(pieces, key=lambda piece: piece.param.ds_id)
        return CrossingBucket([piece.param for piece in pieces], pieces, self._multiple)

    def _fill(self, piece: _Piece, after: int) -> Iterator[CrossingBucket]:
        """Add a piece to the open bucket of its dtype; that is complete where neither it nor ``after`` elements more
        would fit."""
        dtype = piece.arrived.dtype
        some = self._open.setdefault(dtype, [])
        numel = sum(other.param.ds_numel for other in some) + piece.param.ds_numel
        if some and (numel > self._bucket or any(other.param is piece.param for other in some)):
            yield self._bucket_of(some)
            some, numel = [], piece.param.ds_numel
        some.append(piece)
        self._open[dtype] = some
        if numel + after > self._bucket:
            yield self._bucket_of(self._open.pop(dtype))
