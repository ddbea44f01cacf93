# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Cases of the operators that send numbers in few bits, gradients with their errors and differences; and of sums."""

import itertools
from collections.abc import Iterator

import torch

from deepspeed_ext.loco import ops, reference
from deepspeed_ext.loco.reference import Packing
from tests.campaigns.kernels.drawing import Drawing, garbage
from tests.harness.cuda_on_cpu.arguments import Placed
from tests.harness.cuda_on_cpu.comparing import Comparison
from tests.harness.cuda_on_cpu.emulator import Use

BITS = (4, 8)
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
KEPT = (None, torch.uint8, torch.bfloat16, torch.float32)
_UNITS = (1.0, 1.0, 1024.0, 65536.0, 3.0, 0.1, 2.0**-20, 1e-30, 1e30)
_BETAS = (0.0, 0.8, 0.9375, 1.0, 0.3)
_FACTORS = (1.0, 1 / 3, 2.0**-10, 1e-3, 1e30, 0.0)
_INPLACE = 2  # steps


def compress(compare: Comparison, draw: Drawing, amount: float) -> None:
    """Some steps with the error that each leaves, for each dtype, bits, block, kind of error, and rotation."""
    cases = list(itertools.product(ops.DTYPES, BITS, BLOCKS, KEPT, (False, True)))
    for dtype, bits, block, retained, hadamard in _repeated(cases, 8 * amount, draw):
        _Steps(compare, draw, dtype, Packing(bits, block), retained, hadamard).run()


class _Steps:
    """Steps of one gradient: without an error, with one in another buffer, in place, and one that is read only."""

    def __init__(
        self,
        compare: Comparison,
        draw: Drawing,
        dtype: torch.dtype,
        packing: Packing,
        kept: torch.dtype | None,
        hadamard: bool,
    ) -> None:
        self._compare, self._draw = compare, draw
        self._dtype, self._packing, self._kept, self._hadamard = dtype, packing, kept, hadamard
        choice = draw.random.choice
        self._rows, self._width = choice((1, 1, 2, 3)), draw.width()
        self._aligned = draw.random.random() < 0.7
        self._unit, self._beta = choice(_UNITS), choice(_BETAS)

    def run(self) -> None:
        if self._kept is None:
            self._step(None, None, "no error")
            return
        size = Packing(8, self._packing.block_size).row_bytes(self._width)
        shape = (self._rows, size if self._kept == torch.uint8 else self._packing.padded(self._width))
        first = self._room(garbage(shape, self._kept), Use.WRITE, known=False)
        if not self._step(None, first, "first"):
            return
        second = self._room(garbage(shape, self._kept), Use.WRITE, known=False)
        if not self._step(self._room(first.view, Use.READ), second, "second"):
            return
        both = Use.READ | Use.WRITE
        if not self._step(self._room(second.view, both), None, "read only"):
            return
        error = self._room(second.view, both)
        if all(self._step(error, error, f"in place, {number}") for number in range(_INPLACE)):
            strange = self._room(self._any_error(shape), both)
            self._step(strange, strange, "any error")

    def _any_error(self, shape: tuple[int, int]) -> torch.Tensor:
        assert self._kept is not None
        if self._kept == torch.uint8:
            return self._draw.wire(Packing(8, self._packing.block_size), self._rows, self._width)
        return self._draw.numbers(*shape, self._kept, self._packing.block_size)

    def _room(self, values: torch.Tensor, use: Use, known: bool = True) -> Placed:
        if values.dtype == torch.uint8:
            return self._draw.packed(values, use, self._aligned, known)
        return Placed(values, use, 0 if self._aligned else self._draw.random.choice((1, 2, 3)), known=known)

    def _step(self, error: Placed | None, new: Placed | None, what: str) -> bool:
        packing, shape = self._packing, (self._rows, self._packing.row_bytes(self._width))
        numbers = self._draw.numbers(self._rows, self._width, self._dtype, packing.block_size)
        gradient = self._draw.placed(numbers, Use.READ)
        wire = self._draw.packed(garbage(shape, torch.uint8), Use.WRITE, self._aligned, known=False)
        settings = (packing.bits, packing.block_size, self._beta, self._unit, self._hadamard)
        case = f"{self._dtype} {self._rows} x {self._width}, {settings}, kept {self._kept}, aligned {self._aligned}"
        return self._compare("loco_compress", (gradient, wire, error, new, *settings), f"{case}, {what}")


def decompress(compare: Comparison, draw: Drawing, amount: float) -> None:
    """Pieces of ranks, sent by the reference or drawn."""
    cases = list(itertools.product(ops.DTYPES, BITS, BLOCKS, (False, True)))
    for dtype, bits, block, hadamard in _repeated(cases, 12 * amount, draw):
        packing, pieces, width = Packing(bits, block), draw.random.choice((1, 2, 3, 4, 5, 7, 8, 9)), draw.width()
        wire = draw.wire(packing, pieces, width)
        if draw.random.random() < 0.5:
            sent = draw.numbers(pieces, width, dtype, block)
            reference.compress(sent, wire, None, None, bits, block, 0.0, 1.0, hadamard)
        aligned, factor = draw.random.random() < 0.7, draw.random.choice(_FACTORS)
        out = Placed(garbage((width,), dtype), Use.WRITE, draw.random.choice((0, 0, 8, 1, 3)), known=False)
        arguments = (draw.packed(wire, Use.READ, aligned), out, bits, block, factor, hadamard)
        compare("loco_decompress", arguments, f"{dtype} {pieces} x {width}, {arguments[2:]}, aligned {aligned}")


def differences(compare: Comparison, draw: Drawing, amount: float) -> None:
    """Compare updated parameters with the receivers' values, near and far; then apply the differences."""
    for dtype, bits, block in _repeated(list(itertools.product(ops.DTYPES, BITS, BLOCKS)), 12 * amount, draw):
        packing, rows, width = Packing(bits, block), draw.random.choice((1, 1, 2, 3)), draw.width()
        retained = draw.numbers(rows, width, dtype, block)
        updated = draw.numbers(rows, width, dtype, block)
        if draw.random.random() < 0.6:
            updated = (retained.float() * (1 + torch.randn(rows, width) * 0.01)).to(dtype)
        aligned = draw.random.random() < 0.7
        wire = draw.packed(garbage((rows, packing.row_bytes(width)), torch.uint8), Use.WRITE, aligned, known=False)
        case = f"{dtype} {rows} x {width}, {packing}, aligned {aligned}"
        sent = (draw.placed(updated, Use.READ), draw.placed(retained, Use.READ), wire, bits, block)
        if compare("loco_difference", sent, case):
            arrived = draw.wire(packing, rows, width) if draw.random.random() < 0.4 else wire.view
            into = draw.placed(retained, Use.READ | Use.WRITE)
            compare("loco_apply", (draw.packed(arrived, Use.READ, aligned), into, bits, block), case)


def sums(compare: Comparison, draw: Drawing, amount: float) -> None:
    """Parts of ranks, of any number, width, address, and distance."""
    cases = list(itertools.product(ops.DTYPES, (1, 2, 3, 4, 5, 8, 9, 64)))
    for dtype, count in _repeated(cases, 24 * amount, draw):
        parts = draw.placed(draw.numbers(count, draw.width(), dtype), Use.READ)
        width = parts.view.shape[1]
        out = Placed(garbage((width,), dtype), Use.WRITE, draw.random.choice((0, 0, 8, 1, 3)), known=False)
        compare("sum_parts", (parts, out), f"{dtype} {count} x {width}")


def _repeated(cases: list, times: float, draw: Drawing) -> Iterator:  # type: ignore[type-arg]  of any tuples
    """Yield each case this number of times; for a fraction, a random part of the cases."""
    for _ in range(int(times)):
        yield from cases
    yield from draw.random.sample(cases, round(len(cases) * (times - int(times))))
