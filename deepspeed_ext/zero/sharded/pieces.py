# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What has arrived in a group and moves on between groups in the same micro-step.

Note [Pieces]
    With p = I groups may get gradients in different orders, and not all of them, while what is summed between groups
    must be the same in all. With g = G it crosses in every micro-step. So a bucket moves inside its group first, and
    what arrives stays where it is, in *pieces*, one for each parameter. It crosses in the buckets and in the order of
    Note [Leaving early] in ``boundary.py``, with zeros for what a group has not used: here each micro-step ends at a
    boundary.

    A piece waits for the other members of its bucket, and for the buckets before it. That is about one bucket where
    modules are used in the order in which they were made: 0.03 to 0.19 of the I-slice, in the dtype on the wire, were
    counted for 24 layers of a transformer, with buckets of 1/146 to 1/19 of the model. It is all that a backward uses
    where the model's last parameter gets its gradient last, or a parameter in each bucket gets none: 0.57, where every
    other layer was unused. If nothing left early in the first step that would take the whole I-slice, with any model;
    and a buffer for each bucket, in place of pieces, whole buckets for those that lack a member: 1.04 for 0.57.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.comm.packing import record_on_current_stream
from deepspeed_ext.comm.spans import Span, neighbors_joined
from deepspeed_ext.deepspeed_types import ZeroParameter


class _Piece(NamedTuple):
    """A parameter's part of what has arrived: a span of its columns."""

    arrived: Tensor
    span: Span


class Pieces:
    """Those that wait. See Note [Pieces].

    Args:
        rows: of the I-slice.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._held: dict[int, _Piece] = {}  # by ds_id

    def clear(self) -> None:
        """Drop all."""
        self._held.clear()

    def add(self, params: Sequence[ZeroParameter], arrived: Tensor) -> None:
        """Take parameters that have arrived, on the current stream.

        Args:
            params: side by side in ``arrived``.
            arrived: (rows, columns) or flat; padding follows the parameters.
        """
        arrived, start = arrived.view(self._rows, -1), 0
        for param in params:
            piece = _Piece(arrived, Span(start, param.ds_tensor.ds_numel))
            earlier = self._held.setdefault(param.ds_id, piece)
            if earlier is not piece:  # another gradient of this backward
                record_on_current_stream(earlier.arrived)
                earlier.span.of(earlier.arrived).add_(piece.span.of(arrived))
            start = piece.span.stop

    def take(self, params: Sequence[ZeroParameter]) -> list[Tensor]:
        """Return the pieces of parameters, (rows, columns) each, side by side, neighbors joined; zeros for others."""
        pieces = [self._pop(param) for param in params]
        taken: list[Tensor] = []
        for _, together in groupby(pieces, key=lambda piece: id(piece.arrived)):
            some = list(together)
            taken += [span.of(some[0].arrived) for span in neighbors_joined(piece.span for piece in some)]
        return taken

    def _pop(self, param: ZeroParameter) -> _Piece:
        """Return the piece of a parameter, which is not held any more; zeros if there is none."""
        piece = self._held.pop(param.ds_id, None)
        if piece is not None:
            return piece
        zero, numel = torch.zeros(1, 1, device=get_accelerator().current_device_name()), param.ds_tensor.ds_numel
        return _Piece(zero.expand(self._rows, numel), Span(0, numel))
