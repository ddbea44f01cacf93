# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Draws numbers of all kinds, rows as senders make them, and places in memory."""

import random

import torch
from torch import Tensor

from deepspeed_ext.loco import lossless
from deepspeed_ext.loco.reference import Packing
from tests.harness.cuda_on_cpu.arguments import Placed
from tests.harness.cuda_on_cpu.emulator import INTEGERS, Use

WIDTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 23, 24, 25, 31, 32, 33, 39, 40, 41, 47, 48, 49, 63, 64, 65, 127, 128, 129)
WIDTHS += (500, 511, 512, 513, 1000, 1023, 1024, 1025, 2047, 2048, 2049, 4064, 4072, 4080, 4088, 4095, 4096, 4097)
WIDTHS += (4104, 4112, 4128, 5000, 8191, 8192, 8193, 8200, 12288, 12289, 16385)
_MOST_WIDTH = 9000  # of those that are not in the list
_ALIGNED = 16  # bytes of the widest access
KINDS = ("same", "few", "most", "edges", "mixed", "random", "pairs", "escapes", "any")


class Drawing:
    """A source of random cases, the same for the same seed, also of torch's global generator."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)

    def width(self) -> int:
        """Elements of a row: at the edges of threads, blocks and tiles more often than not."""
        likely = self.random.random() < 0.7
        return self.random.choice(WIDTHS) if likely else self.random.randint(1, _MOST_WIDTH)

    def any_bits(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Numbers of any pattern."""
        size = torch.empty(0, dtype=dtype).element_size()
        return torch.randint(-(2 ** (8 * size - 1)), 2 ** (8 * size - 1), shape).to(INTEGERS[size]).view(dtype)

    def numbers(self, rows: int, width: int, dtype: torch.dtype, block: int = 32) -> Tensor:
        """Numbers of a kind that is drawn for each block: (rows, width)."""
        if not rows * width:
            return torch.zeros(rows, width, dtype=dtype)
        shape = (rows, -(-width // block), block)
        chosen = self.any_bits(shape, dtype)
        kinds = _kinds(shape, dtype)
        kind = torch.randint(len(kinds) + 1, (*shape[:2], 1))
        for number, values in enumerate(kinds):
            chosen = torch.where(kind == number, values.to(dtype), chosen)
        return chosen.view(rows, -1)[:, :width].contiguous()

    def wire(self, packing: Packing, rows: int, width: int) -> Tensor:
        """Rows of any integers that a sender makes, and of any scales that it makes, or is NaN: (rows, row bytes)."""
        wire = torch.randint(0, 256, (rows, packing.row_bytes(width)), dtype=torch.uint8)
        if packing.bits == 8:
            wire[wire == 0x80] = 0x7F
        else:
            wire = torch.where(wire & 15 == 8, wire + 1, wire)
            wire = torch.where(wire >> 4 == 8, wire | 0x10, wire)
        scales = packing.scales(wire, width)
        largest = 0x7E12 if packing.bits == 4 else 0x7C01
        bits = torch.randint(0, largest + 1, scales.shape)
        ordinary = torch.randint(0x3000, 0x4000, scales.shape)
        for values, share in ((ordinary, 0.6), (torch.tensor(0x7FC0), 0.05), (torch.tensor(0), 0.05)):
            bits = torch.where(torch.rand(scales.shape) < share, values, bits)
        scales.copy_(bits.to(torch.int16).view(torch.bfloat16))
        packing.padding(wire, width).zero_()
        return wire

    def parameters(self, kind: str, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return updated parameters and the receivers' values, (1, width), with a ``kind`` of difference."""
        shape, tile = (1, width), torch.arange(width) // lossless.TILE
        if kind == "any":
            return self.any_bits(shape, dtype), self.any_bits(shape, dtype)
        retained = self.any_bits(shape, dtype) if kind == "random" else (torch.randn(shape) * 0.02).to(dtype)
        ordinals = lossless._ordinal(retained.view(torch.int16)) + self._steps(kind, shape, tile).to(torch.int16)
        return lossless._ordinal(ordinals).view(dtype), retained

    def _steps(self, kind: str, shape: tuple[int, int], tile: Tensor) -> Tensor:
        """By how many representable numbers they differ."""
        choice, share = self.random.choice, torch.rand(shape)
        if kind == "few":
            return torch.randn(shape) * 8 * (share < choice((0.01, 0.1, 0.4)))
        if kind == "most":
            return torch.randn(shape) * choice((1, 2, 4, 8))
        if kind == "edges":  # of nibbles, in bitmaps and pairs by turns
            return torch.where(share < 0.3, torch.randint(-11, 13, shape), torch.randint(-1, 2, shape) * (tile % 2))
        if kind == "mixed":  # nothing, and about 1, 4, 16, 64, 256
            return torch.randn(shape) * 4.0 ** (tile % 6 - 1) * (tile % 6 > 0)
        if kind == "random":
            return torch.randint(-(2**15), 2**15, shape) * (share < 0.5)
        if kind == "pairs":
            return torch.where(share < 0.1, torch.randint(-9, 11, shape), torch.randint(-1, 2, shape))
        if kind == "escapes":
            return torch.randint(200, 3000, shape) * (share < torch.rand(len(tile.unique()))[tile])
        return torch.zeros(shape)

    def placed(self, values: Tensor, use: Use) -> Placed:
        """Numbers at any address, in rows of any distance; half of them where the widest accesses may."""
        if self.random.random() < 0.5:
            unit = _ALIGNED // values.element_size()
            gap = -values.shape[-1] % unit + unit * self.random.randint(0, 2)
            return Placed(values, use, unit * self.random.randint(0, 2), gap)
        return Placed(values, use, self.random.randint(0, 9), self.random.randint(0, 9))

    def packed(self, values: Tensor, use: Use, aligned: bool, known: bool = True) -> Placed:
        """Packed rows, where the widest accesses may, or at another even address."""
        return Placed(values, use, 0 if aligned else 2 * self.random.randint(1, 7), known=known)


def _kinds(shape: tuple[int, int, int], dtype: torch.dtype) -> list[Tensor]:
    """Ordinary numbers, zeros, subnormal ones, ones that are not finite, ties, the largest, and mixtures of these."""
    of_blocks, most = (*shape[:2], 1), torch.finfo(dtype).max
    normal, sign = torch.randn(shape), torch.where(torch.rand(shape) < 0.5, -1.0, 1.0)
    location = torch.nn.functional.one_hot(torch.randint(shape[2], shape[:2]), shape[2]).bool()
    tie = torch.randint(-254, 255, shape) / 2 * torch.exp2(torch.randint(-20, 8, of_blocks).float())
    subnormal = torch.randint(-(2**23), 2**23, shape) * 2.0**-149
    if dtype == torch.float16:
        subnormal = torch.randint(-1023, 1024, shape) * 2.0**-24
    wide = normal * torch.exp2(torch.randint(-140, 127, of_blocks).float())
    ordinary = [normal * 1e-3, normal, wide, normal * 2.0**-120, normal * (most / 8)]
    special = [torch.where(location, value, normal) for value in (torch.nan, torch.inf * sign)]
    large = [sign * most, torch.rand(shape) * sign * most, torch.where(location, sign * most, normal * 1e-20)]
    return [*ordinary, torch.zeros(shape), sign * 0.0, subnormal, subnormal * 8, *special, tie, *large, sign * 0.37]


def garbage(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, dtype=torch.uint8)
    return torch.full(shape, 777.0, dtype=dtype)
