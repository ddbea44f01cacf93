# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The packed format of quantized numbers, on the wire and for 8-bit errors, and the operators in plain PyTorch.
Kernels must match them bit for bit; they run if no kernels were built.

Note [Packed blocks]
    A row of ``width`` elements is split into blocks of ``block_size``, the last one padded with zeros. Packed, it is

        payload   blocks * block_size * bits / 8 bytes
        scales    blocks * 2 bytes: bfloat16, rounded up
        padding   up to a multiple of 16 bytes, zeros

    With 8 bits, the payload is a signed byte for each element. With 4 bits, each 32 elements take 16 bytes; byte i
    holds element i in its lower half and element i + 16 in its upper half. A number is q * scale, where q is an
    integer with |q| at most 7 or 127. The scale NaN marks a block with a number that was not finite. Bytes are
    little-endian, as on all machines that torch runs on.

Note [Arithmetic of a block]
    All operations are in fp32 and are rounded once (no fused multiply-add), so that all implementations give the same
    bits. g: the block's gradients. H: the 32-point Hadamard transform, or the identity. e: the kept error,
    which is 1/unit of the gradient's (unit: the loss scale). b: err_beta. Q: 7 or 127.

        h = H g + (unit S_e) q_e                        compensate; e = q_e S_e, in 8 bits
        S = max|h| / Q, rounded up to bfloat16          so that the largest element is not clipped
        q = round to even(h / S), within +-Q;  d = q S  on the wire
        r = h - d                                       at most S/2 in size
        e' = (b S_e) q_e + ((1-b)/unit) r               LoCo, arXiv:2407.04480; kept in 8 bits in the format of d

    The error is kept transformed. Since H is linear, the receiver undoes it only once, on the sum. A block with a
    scale that would be subnormal is sent as zeros (r = h). A block with a number that is not finite is sent with the
    scale NaN, and its error stays as it was.

Note [Differences]
    Updated parameters are sent as their difference to the receivers' values. p: the values of all receivers. u: the
    fp32 weights of their owner, rounded to the parameters' dtype, which is p's, too. With S and q of a block as above,

        h = u - p
        d = q S                                         on the wire
        p' = p + d, rounded to that dtype               by all ranks, the sender included

    No error is kept: the quantization error is part of the next h (SDP4Bit, arXiv:2410.15526). As u is a number of
    that dtype, |p' - u| is at most S; and p' is u if S is below the distance of u's neighbors.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 32  # elements that share bytes of a 4-bit payload, and one Hadamard transform
ALIGNMENT = 16  # bytes: start of rows, so that the widest loads are aligned
PIECE = 2**22  # elements processed at a time: temporaries are about ten times as many fp32 numbers
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_NORMALIZE = 0.17677669529663687  # 1/sqrt(32): H is its own inverse
_NIBBLE = 16
_INFINITY = 0x7F800000
_NOT_FINITE = 0x7FC0  # a NaN of bfloat16


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
        used_bytes = self.payload_bytes(width) + 2 * self.blocks(width)
        return -(-used_bytes // ALIGNMENT) * ALIGNMENT

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

    def empty(self, rows: int, width: int, example: Tensor) -> Tensor:
        """Return an uninitialized tensor for packed rows: (rows, row bytes), uint8, on the device of ``example``."""
        return torch.empty(rows, self.row_bytes(width), dtype=torch.uint8, device=example.device)


_ERROR = Packing(8, CHUNK)


def compress(
    gradient: Tensor,
    wire: Tensor,
    error: Tensor | None,
    new_error: Tensor | None,
    bits: int,
    block_size: int,
    beta: float,
    unit: float,
    hadamard: bool,
) -> None:
    """See ``ops.compress``."""
    packing, error_packing = Packing(bits, block_size), Packing(_ERROR.bits, block_size)
    rows, width = gradient.shape
    for blocks in pieces(packing.blocks(width), rows * block_size):
        piece = gradient[:, blocks.start * block_size : blocks.stop * block_size].float()
        h = _blocks(piece, block_size)
        if hadamard:
            h = transform(h)
        old, step = _read_error(error, h, width, blocks)  # before the write: ``new_error`` may be ``error``
        h = h + (unit * step) * old
        q, scales = quantize(h, packing.largest)
        pack(q, scales, wire, packing, width=width, blocks=blocks)
        if new_error is None:
            continue
        quantization_error = h - q * scales.float().unsqueeze(-1)
        numbers = (beta * step) * old + ((1 - beta) / unit) * quantization_error
        finite = ~scales.isnan().unsqueeze(-1)  # a block that is not finite keeps its old error
        if new_error.dtype != torch.uint8:
            _numbers(new_error, block_size)[:, blocks.start : blocks.stop] = torch.where(finite, numbers, old)
            continue
        q, new_scales = quantize(numbers, error_packing.largest)
        scales = torch.where(finite, new_scales.unsqueeze(-1), _to_stored_scale(step)).squeeze(-1)
        pack(torch.where(finite, q, old), scales, new_error, error_packing, width=width, blocks=blocks)
    packing.padding(wire, width).zero_()
    if new_error is not None and new_error.dtype == torch.uint8:
        error_packing.padding(new_error, width).zero_()


def decompress(wire: Tensor, out: Tensor, bits: int, block_size: int, factor: float, hadamard: bool) -> None:
    """See ``ops.decompress``."""
    packing, width = Packing(bits, block_size), out.numel()
    for blocks in pieces(packing.blocks(width), block_size):
        total: Tensor | None = None
        for piece in wire:  # in rank order, as the kernels sum
            q, step = unpack(piece.unsqueeze(0), width, packing, blocks)
            numbers = q * step
            total = numbers if total is None else total + numbers
        assert total is not None
        if hadamard:
            total = transform(total)
        part = out[blocks.start * block_size : blocks.stop * block_size]
        part.copy_((total * factor).view(-1)[: part.numel()])


def difference(updated: Tensor, replica: Tensor, wire: Tensor, bits: int, block_size: int) -> None:
    """See ``ops.difference``."""
    packing, (rows, width) = Packing(bits, block_size), updated.shape
    for blocks in pieces(packing.blocks(width), rows * block_size):
        columns = slice(blocks.start * block_size, blocks.stop * block_size)
        h = _blocks(updated[:, columns].float() - replica[:, columns].float(), block_size)
        pack(*quantize(h, packing.largest), wire, packing, width=width, blocks=blocks)
    packing.padding(wire, width).zero_()


def apply(wire: Tensor, replica: Tensor, bits: int, block_size: int) -> None:
    """See ``ops.apply``."""
    packing, (rows, width) = Packing(bits, block_size), replica.shape
    for blocks in pieces(packing.blocks(width), rows * block_size):
        q, step = unpack(wire, width, packing, blocks)
        part = replica[:, blocks.start * block_size : blocks.stop * block_size]
        part.copy_(part.float() + (q * step).view(rows, -1)[:, : part.shape[1]])


def pieces(blocks: int, size: int) -> list[range]:
    """Return ranges of blocks of ``size`` elements; in all rows together, a range has about ``PIECE`` elements."""
    length = max(1, PIECE // size)
    return [range(first, min(first + length, blocks)) for first in range(0, blocks, length)]


def transform(h: Tensor) -> Tensor:
    """Return the normalized Hadamard transform of each 32 elements; h: (rows, blocks, block_size), fp32."""
    chunks = h.reshape(-1, CHUNK)
    stride = 1  # the kernels add in the same order of strides
    while stride < CHUNK:
        pairs = chunks.view(-1, CHUNK // (2 * stride), 2, stride)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        chunks = torch.stack((low + high, low - high), dim=2).view(-1, CHUNK)
        stride *= 2
    return (chunks * _NORMALIZE).view_as(h)


def quantize(h: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Return integers (as fp32) and scales (bfloat16) of blocks; h: (rows, blocks, block_size), fp32."""
    # Compared as bits of |h|, NaN is larger than infinity, and both are larger than all finite numbers.
    largest_bits = (h.view(torch.int32) & 0x7FFFFFFF).amax(-1)
    scale = largest_bits.view(torch.float32) / largest
    is_subnormal = scale < _SMALLEST_SCALE
    # Rounded up to bfloat16: with a smaller scale, the largest element would be clipped.
    rounded_up = ((scale.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
    is_finite = (largest_bits < _INFINITY) & (rounded_up * largest).isfinite()
    scale = torch.where(is_subnormal, 0.0, rounded_up)
    inverse = torch.where(is_finite & ~is_subnormal, 1.0 / rounded_up, 0.0)
    q = torch.round(h * inverse.unsqueeze(-1))  # rounding cannot exceed ``largest``: no clamp is needed
    q = torch.where(is_finite.unsqueeze(-1), q, 0.0)
    return q, _to_stored_scale(torch.where(is_finite, scale, torch.nan))


def pack(q: Tensor, scales: Tensor, packed: Tensor, packing: Packing, *, width: int, blocks: range) -> None:
    """Write integers and scales into some blocks of packed rows. See Note [Packed blocks]."""
    rows = q.shape[0]
    integers = q.to(torch.int8)
    if packing.bits == 4:
        low, high = integers.view(rows, -1, 2, _NIBBLE).unbind(2)
        integers = (low & 15) | (high << 4)  # the mask removes sign bits
    packing.payload(packed, width, blocks).copy_(integers.reshape(rows, -1).view(torch.uint8))
    packing.scales(packed, width, blocks).copy_(scales)


def unpack(packed: Tensor, width: int, packing: Packing, blocks: range | None = None) -> tuple[Tensor, Tensor]:
    """Return integers (rows, blocks, block_size) and scales (rows, blocks, 1) of packed rows, fp32."""
    payload = packing.payload(packed, width, blocks).view(torch.int8)
    if packing.bits == 4:
        chunks = payload.reshape(packed.shape[0], -1, 1, _NIBBLE)
        payload = torch.cat(((chunks << 4) >> 4, chunks >> 4), dim=2)  # arithmetic shifts extend signs
    q = payload.reshape(packed.shape[0], -1, packing.block_size).float()
    return q, packing.scales(packed, width, blocks).float().unsqueeze(-1)


def decode(packed: Tensor, width: int, packing: Packing, hadamard: bool, blocks: range | None = None) -> Tensor:
    """Return the numbers of packed rows: (rows, width), fp32; or of some of their blocks, padding included."""
    q, step = unpack(packed, width, packing, blocks)
    numbers = q * step
    return (transform(numbers) if hadamard else numbers).view(packed.shape[0], -1)[:, : None if blocks else width]


def decode_error(error: Tensor, width: int, block_size: int, hadamard: bool, blocks: range | None = None) -> Tensor:
    """Return a kept error as numbers, in the shape that ``decode`` returns. ``error``: see ``ops.compress``."""
    if error.dtype == torch.uint8:
        return decode(error, width, Packing(_ERROR.bits, block_size), hadamard, blocks)
    numbers = _numbers(error, block_size)
    numbers = (numbers[:, blocks.start : blocks.stop] if blocks else numbers).float()
    return (transform(numbers) if hadamard else numbers).view(error.shape[0], -1)[:, : None if blocks else width]


def encode_error(numbers: Tensor, error: Tensor, block_size: int, hadamard: bool) -> None:
    """Write numbers (rows, width), fp32, as an error to keep: for errors that move between buckets."""
    width = numbers.shape[1]
    padded = _blocks(numbers, block_size)
    padded = transform(padded) if hadamard else padded
    if error.dtype == torch.uint8:
        packing = Packing(_ERROR.bits, block_size)
        pack(*quantize(padded, packing.largest), error, packing, width=width, blocks=range(packing.blocks(width)))
        packing.padding(error, width).zero_()
    else:
        error.copy_(padded.view(error.shape))


def _blocks(numbers: Tensor, block_size: int) -> Tensor:
    """Return (rows, width) as (rows, blocks, block_size), padded with zeros."""
    missing = -numbers.shape[1] % block_size  # zeros do not change the scale of the last block
    padded = torch.nn.functional.pad(numbers, (0, missing)) if missing else numbers
    return padded.reshape(numbers.shape[0], -1, block_size)


def _numbers(error: Tensor, block_size: int) -> Tensor:
    """Return bf16 or fp32 errors as (rows, blocks, block_size), a view."""
    return error.view(error.shape[0], -1, block_size)


def _to_stored_scale(step: Tensor) -> Tensor:
    """Return steps as scales are stored: torch has several NaNs, a scale has one."""
    bits = torch.where(step.isnan(), _NOT_FINITE, step.to(torch.bfloat16).view(torch.int16))
    return bits.view(torch.bfloat16)


def _read_error(error: Tensor | None, example: Tensor, width: int, blocks: range) -> tuple[Tensor, Tensor]:
    """Return the kept error of some blocks as numbers and steps to multiply; like: (rows, blocks, block_size)."""
    rows, number, block_size = example.shape
    if error is None:
        return torch.zeros_like(example), example.new_zeros(rows, number, 1)
    if error.dtype == torch.uint8:
        return unpack(error, width, Packing(_ERROR.bits, block_size), blocks)
    old = _numbers(error, block_size)[:, blocks.start : blocks.stop].float()
    return old, example.new_ones(rows, number, 1)
