# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What was sent in few bits, and what that took from it, measured on a sample."""

from collections.abc import Callable

import torch
from torch import Tensor

from deepspeed_ext.loco import reference
from deepspeed_ext.loco.packing import Packing

LOOK = 2**20  # elements that are looked at


class Sampling:
    """What was sent since the last report, and a sample of what quantization has taken: the first ``LOOK`` elements of
    a step's first message, of what it has for one group.

    Attributes:
        plain: bytes that it would have had.
        wire: bytes that were sent instead, to this rank itself included.
        look: whether to look at what comes next.
        squares: of what was looked at, two sums, on its device: of what quantization has taken, and of what it was
            given, errors of earlier messages included; None: nothing was.
    """

    def __init__(self) -> None:
        self.look = False
        self.begin()

    def begin(self, look: bool = False) -> None:
        """Begin anew."""
        self.plain = self.wire = 0
        self.squares: Tensor | None = None
        self.look = look

    def count(self, plain: int, wire: int) -> None:
        """Count the bytes of a message."""
        self.plain += plain
        self.wire += wire

    def given(self, width: int, packing: Packing, give: Callable[[range], Tensor]) -> Tensor | None:
        """Return what is given to quantization, if it is to be looked at.

        Args:
            width: elements that there are.
            packing: of what will be sent.
            give: returns those of some blocks, 1D, fp32.
        """
        look, self.look = self.look, False
        return give(_blocks(width, packing)) if look and width else None

    def note(self, given: Tensor, packed: Tensor, width: int, packing: Packing, hadamard: bool = False) -> None:
        """Note what of this was sent: ``packed`` is a row, (1, bytes)."""
        sent = reference.decode(packed, width, packing, hadamard, _blocks(width, packing))
        lost = given - sent[0, : given.numel()]
        self.squares = torch.stack([lost.square().sum(), given.square().sum()])

    @property
    def compression(self) -> float:
        """Return how many times fewer bytes were sent."""
        return self.plain / self.wire if self.wire else 1.0

    @property
    def relative_error(self) -> float:
        """Return what one quantization loses, in the 2-norm; it is sent later. Blocks until it is known."""
        lost, whole = (0.0, 0.0) if self.squares is None else self.squares.tolist()
        return (lost / whole) ** 0.5 if whole else 0.0


def compensated(
    rows: Tensor, error: Tensor | None, unit: float, block_size: int, hadamard: bool, blocks: range
) -> Tensor:
    """Return what is quantized of the first row's first blocks, before the error is overwritten: 1D, fp32.

    Args:
        rows: (rows, width).
        error, unit, block_size, hadamard: see ``ops.compress``.
        blocks: from the first one on.
    """
    given = rows[0, : blocks.stop * block_size].float()
    if error is None:
        return given
    old = reference.decode_error(error[:1], rows.shape[1], block_size, hadamard, blocks)
    return given + unit * old[0, : given.numel()]


def _blocks(width: int, packing: Packing) -> range:
    return range(min(packing.blocks(width), max(1, LOOK // packing.block_size)))
