# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The one packed format of quantized numbers: on the wire, and of errors that are kept in 8 bits.

Note [Packed blocks]
    A row of ``width`` elements is split into blocks of ``block_size``, the last one filled up with zeros. Packed it is

        payload   blocks * block_size * bits / 8 bytes
        scales    blocks * 2 bytes: bfloat16, rounded up
        padding   up to a multiple of 16 bytes, zeros

    With 8 bits the payload is a signed byte for each element. With 4 bits each chunk of 32 elements takes 16 bytes, of
    which byte i holds element i in its lower half and element i + 16 in its upper. A number is q * scale, q an integer
    of at most 7 or 127 in size. A scale of NaN marks a block in which something was not finite. Little-endian, as all
    machines are that torch runs on.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 32  # elements of which 4-bit payloads and the Hadamard transform are made
ALIGNMENT = 16  # bytes: rows start where the widest loads may


@dataclass(frozen=True)
class Packing:
    """Rows of ``bits`` per element in blocks of ``block_size``; see Note [Packed blocks]."""

    bits: int
    block_size: int

    @property
    def largest(self) -> int:
        """Return the largest integer: symmetric, so that nothing is clipped; 16 levels converge worse (SDP4Bit)."""
        return 2 ** (self.bits - 1) - 1

    def blocks(self, width: int) -> int:
        """Return the blocks of a row."""
        return -(-width // self.block_size)

    def padded(self, width: int) -> int:
        """Return the elements of a row with the zeros after its end."""
        return self.blocks(width) * self.block_size

    def payload_bytes(self, width: int) -> int:
        """Return the bytes before the scales."""
        return self.padded(width) * self.bits // 8

    def row_bytes(self, width: int) -> int:
        """Return the bytes of a packed row."""
        used = self.payload_bytes(width) + 2 * self.blocks(width)
        return -(-used // ALIGNMENT) * ALIGNMENT

    def payload(self, packed: Tensor, width: int, blocks: range | None = None) -> Tensor:
        """Return the payload of packed rows, or of some of their blocks: (rows, bytes), uint8, a view."""
        blocks = range(self.blocks(width)) if blocks is None else blocks
        size = self.block_size * self.bits // 8
        return packed[:, size * blocks.start : size * blocks.stop]

    def scales(self, packed: Tensor, width: int, blocks: range | None = None) -> Tensor:
        """Return the scales of packed rows, or of some of their blocks: (rows, blocks), bfloat16, a view."""
        blocks = range(self.blocks(width)) if blocks is None else blocks
        start = self.payload_bytes(width)
        return packed[:, start + 2 * blocks.start : start + 2 * blocks.stop].view(torch.bfloat16)

    def padding(self, packed: Tensor, width: int) -> Tensor:
        """Return what follows the scales of packed rows: (rows, bytes), a view."""
        return packed[:, self.payload_bytes(width) + 2 * self.blocks(width) :]

    def empty(self, rows: int, width: int, like: Tensor) -> Tensor:
        """Return room for packed rows: (rows, row bytes), uint8, on the device of ``like``."""
        return torch.empty(rows, self.row_bytes(width), dtype=torch.uint8, device=like.device)
