# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The packed format of quantized numbers, both on the wire and for errors that are kept in 8 bits.

Note [Packed blocks]
    A row of ``width`` elements is split into blocks of ``block_size``, the last one padded with zeros. Packed, it is

        payload   blocks * block_size * bits / 8 bytes
        scales    blocks * 2 bytes: bfloat16, rounded up
        padding   up to a multiple of 16 bytes, zeros

    With 8 bits, the payload is a signed byte for each element. With 4 bits, each 32 elements take 16 bytes; byte i
    holds element i in its lower half and element i + 16 in its upper half. A number is q * scale, where q is an
    integer with |q| at most 7 or 127. The scale NaN marks a block with a number that was not finite. Bytes are
    little-endian, as on all machines that torch runs on.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 32  # elements that share bytes of a 4-bit payload, and one Hadamard transform
ALIGNMENT = 16  # bytes: rows start where the widest loads may


@dataclass(frozen=True)
class Packing:
    """Rows of ``bits`` per element in blocks of ``block_size``; see Note [Packed blocks]."""

    bits: int
    block_size: int

    @property
    def largest(self) -> int:
        """Return the largest integer. Being symmetric, levels clip nothing; 16 levels converge worse (SDP4Bit)."""
        return 2 ** (self.bits - 1) - 1

    def blocks(self, width: int) -> int:
        """Return the number of blocks of a row."""
        return -(-width // self.block_size)

    def padded(self, width: int) -> int:
        """Return the number of elements of a row, padding included."""
        return self.blocks(width) * self.block_size

    def payload_bytes(self, width: int) -> int:
        """Return the bytes of a row's payload, which comes before the scales."""
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
        """Return the padding after the scales of packed rows: (rows, bytes), a view."""
        return packed[:, self.payload_bytes(width) + 2 * self.blocks(width) :]

    def empty(self, rows: int, width: int, like: Tensor) -> Tensor:
        """Return an uninitialized tensor for packed rows: (rows, row bytes), uint8, on the device of ``like``."""
        return torch.empty(rows, self.row_bytes(width), dtype=torch.uint8, device=like.device)
