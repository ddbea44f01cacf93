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
from typing import NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.comm.packing import record_on_current_stream
from deepspeed_ext.deepspeed_types import ZeroParameter


class _Piece(NamedTuple):
    """A parameter's part of what has arrived: ``numel`` columns of it, from ``start``."""

    arrived: Tensor
    start: int
    numel: int

    @property
    def columns(self) -> Tensor:
        """(rows, numel), a view."""
        return self.arrived[:, self.start : self.start + self.numel]


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
            piece = _Piece(arrived, start, param.ds_tensor.ds_numel)
            earlier = self._held.setdefault(param.ds_id, piece)
            if earlier is not piece:  # another gradient of this backward
                record_on_current_stream(earlier.arrived)
                earlier.columns.add_(piece.columns)
            start += piece.numel

    def take(self, params: Sequence[ZeroParameter]) -> list[Tensor]:
        """Return the pieces of parameters, (rows, columns) each, side by side, neighbors joined; zeros for others."""
        taken: list[_Piece] = []
        for param in params:
            piece = self._held.pop(param.ds_id, None) or self._zeros(param.ds_tensor.ds_numel)
            last = taken[-1] if taken else None
            if last is not None and last.arrived is piece.arrived and last.start + last.numel == piece.start:
                taken[-1] = last._replace(numel=last.numel + piece.numel)
            else:
                taken.append(piece)
        return [piece.columns for piece in taken]

    def _zeros(self, numel: int) -> _Piece:
        zero = torch.zeros(1, 1, device=get_accelerator().current_device_name())
        return _Piece(zero.expand(self._rows, numel), 0, numel)
