# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The operators in plain PyTorch: what kernels must match to the bit, and what runs where none was built.

Note [Arithmetic of a block]
    All in fp32, each operation rounded once (no fused multiply-add), so that every implementation gives the same bits.
    g: the block's gradients, H: the 32-point Hadamard transform or nothing, e: the error that is kept, in units of
    1/unit of the gradient (unit: the loss scale), b: err_beta, Q: 7 or 127.

        h = H g + (unit S_e) q_e                        compensate; e = q_e S_e, in 8 bits
        S = max|h| / Q, rounded up to bfloat16          so that the largest element is not cut off
        q = round to even(h / S), within +-Q;  d = q S  on the wire
        r = h - d                                       at most S/2 in size
        e' = (b S_e) q_e + ((1-b)/unit) r               LoCo, arXiv:2407.04480; kept in 8 bits as d is sent

    The error lives behind H: the transform is linear, so the receiver undoes it once, of the sum. A block whose
    scale would be subnormal is sent as zeros (r = h). A block with something that is not finite is sent with the scale
    NaN, and its error stays what it was.
"""

import torch
from torch import Tensor

from deepspeed_ext.loco.packing import CHUNK, Packing

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_NORMALIZE = 0.17677669529663687  # 1/sqrt(32): H is its own inverse
_NIBBLE = 16
_INFINITY = 0x7F800000
_NOT_FINITE = 0x7FC0  # a NaN of bfloat16
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
    packing = Packing(bits, block_size)
    rows, width = gradient.shape
    h = torch.nn.functional.pad(gradient.float(), (0, packing.padded(width) - width))
    h = h.view(rows, -1, block_size)
    if hadamard:
        h = transform(h)
    old, step = _read(error, h)
    h = h + (unit * step) * old
    q, scales = quantize(h, packing.largest)
    pack(q, scales, wire, bits)
    if new_error is None:
        return
    lost = h - q * scales.float().unsqueeze(-1)
    kept = (beta * step) * old + ((1 - beta) / unit) * lost
    finite = ~scales.isnan().unsqueeze(-1)
    if new_error.dtype != torch.uint8:
        new_error.copy_(torch.where(finite, kept, old).view(new_error.shape))
        return
    q, fresh_scales = quantize(kept, _ERROR.largest)
    scales = torch.where(finite, fresh_scales.unsqueeze(-1), _stored(step)).squeeze(-1)
    pack(torch.where(finite, q, old), scales, new_error, _ERROR.bits)


def decompress(wire: Tensor, out: Tensor, bits: int, block_size: int, factor: float, hadamard: bool) -> None:
    """See ``ops.decompress``."""
    packing = Packing(bits, block_size)
    total: Tensor | None = None
    for piece in wire:  # in the order of ranks
        q, step = unpack(piece.unsqueeze(0), out.numel(), packing)
        numbers = q * step
        total = numbers if total is None else total + numbers
    assert total is not None
    if hadamard:
        total = transform(total)
    out.copy_((total * factor).view(-1)[: out.numel()])


def transform(h: Tensor) -> Tensor:
    """The normalized 32-point Hadamard transform of each chunk; h: (rows, blocks, block_size), fp32."""
    chunks = h.view(-1, CHUNK)
    stride = 1
    while stride < CHUNK:
        pairs = chunks.view(-1, CHUNK // (2 * stride), 2, stride)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        chunks = torch.stack((low + high, low - high), dim=2).view(-1, CHUNK)
        stride *= 2
    return (chunks * _NORMALIZE).view_as(h)


def quantize(h: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Integers (as fp32) and scales (bfloat16) of blocks; h: (rows, blocks, block_size), fp32."""
    # As the bits of |h| compare, NaN is larger than infinity, and both than what is finite.
    most = (h.view(torch.int32) & 0x7FFFFFFF).amax(-1)
    scale = most.view(torch.float32) / largest
    flushed = scale < _SMALLEST_SCALE
    rounded_up = ((scale.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
    visible = (most < _INFINITY) & (rounded_up * largest).isfinite()
    scale = torch.where(flushed, 0.0, rounded_up)
    inverse = torch.where(visible & ~flushed, 1.0 / rounded_up, 0.0)
    q = torch.round(h * inverse.unsqueeze(-1))  # at most ``largest`` and a rounding: no clamp is needed
    q = torch.where(visible.unsqueeze(-1), q, 0.0)
    return q, _stored(torch.where(visible, scale, torch.nan))


def pack(q: Tensor, scales: Tensor, packed: Tensor, bits: int) -> None:
    """Write integers and scales into packed rows. See Note [Packed blocks]."""
    rows, blocks, block_size = q.shape
    packing = Packing(bits, block_size)
    width = blocks * block_size
    integers = q.to(torch.int8)
    if bits == 4:
        low, high = integers.view(rows, -1, 2, _NIBBLE).unbind(2)
        integers = (low & 15) | (high << 4)
    packing.payload(packed, width).copy_(integers.reshape(rows, -1).view(torch.uint8))
    packing.scales(packed, width).copy_(scales)
    packed[:, packing.payload_bytes(width) + 2 * blocks :] = 0


def unpack(packed: Tensor, width: int, packing: Packing) -> tuple[Tensor, Tensor]:
    """Integers (rows, blocks, block_size) and scales (rows, blocks, 1) of packed rows, fp32."""
    payload = packing.payload(packed, width).view(torch.int8)
    if packing.bits == 4:
        chunks = payload.reshape(packed.shape[0], -1, 1, _NIBBLE)
        payload = torch.cat(((chunks << 4) >> 4, chunks >> 4), dim=2)
    q = payload.reshape(packed.shape[0], -1, packing.block_size).float()
    return q, packing.scales(packed, width).float().unsqueeze(-1)


def decode_error(error: Tensor, width: int, block_size: int, hadamard: bool) -> Tensor:
    """What is kept, as numbers: (rows, width), fp32. ``error``: see ``ops.compress``."""
    rows = error.shape[0]
    numbers = error.new_empty(rows, Packing(8, block_size).blocks(width), block_size, dtype=torch.float32)
    old, step = _read(error, numbers)
    numbers = old * step
    return (transform(numbers) if hadamard else numbers).view(rows, -1)[:, :width]


def encode_error(numbers: Tensor, error: Tensor, block_size: int, hadamard: bool) -> None:
    """Keep numbers (rows, width), fp32, that are not the errors of a quantization here and now."""
    rows, width = numbers.shape
    padded = torch.nn.functional.pad(numbers, (0, Packing(8, block_size).padded(width) - width))
    padded = padded.view(rows, -1, block_size)
    padded = transform(padded) if hadamard else padded
    if error.dtype == torch.uint8:
        pack(*quantize(padded, _ERROR.largest), error, _ERROR.bits)
    else:
        error.copy_(padded.view(error.shape))


def _stored(step: Tensor) -> Tensor:
    """Steps as scales are stored; torch has several NaNs, a scale one."""
    bits = torch.where(step.isnan(), _NOT_FINITE, step.to(torch.bfloat16).view(torch.int16))
    return bits.view(torch.bfloat16)


def _read(error: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """What is kept, as numbers and steps whose product it is; like: (rows, blocks, block_size)."""
    rows, blocks, block_size = like.shape
    if error is None:
        return torch.zeros_like(like), like.new_zeros(rows, blocks, 1)
    if error.dtype == torch.uint8:
        return unpack(error, blocks * block_size, Packing(8, block_size))
    return error.float().view_as(like), like.new_ones(rows, blocks, 1)
