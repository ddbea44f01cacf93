# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Arguments of operators in memory of their own, with a record of the accesses that kernels may make."""

import torch
from torch import Tensor

from tests.harness.cuda_on_cpu.emulator import Emulator, Use, bits_of, integers_of

_FILL = 0xA5  # what lies around a view


class Placed:
    """A tensor of (width,) or (rows, width) in memory of its own, at any address: ``offset`` elements after the start,
    ``gap`` elements between rows. ``known``: it has been written to, and may be read first."""

    def __init__(self, values: Tensor, use: Use, offset: int = 0, gap: int = 0, known: bool = True) -> None:
        self.use = use | Use.KNOWN if known else use
        rows, width = (1, len(values)) if values.dim() == 1 else values.shape
        self._row, self._stride = width, width + gap
        size = offset + (rows - 1) * self._stride + width if rows else offset
        self.buffer = torch.full((size * values.element_size(),), _FILL, dtype=torch.uint8).view(values.dtype)
        strides = (1,) if values.dim() == 1 else (self._stride, 1)
        self.view = self.buffer.as_strided(values.shape, strides, offset)
        self.view.copy_(values)
        self._outside = torch.ones(self.buffer.numel(), dtype=torch.bool)
        self._outside.as_strided(values.shape, strides, offset).fill_(False)

    def allow(self, emulator: Emulator) -> None:
        """Let kernels use its rows, and nothing around them."""
        size, rows = self.view.element_size(), 1 if self.view.dim() == 1 else len(self.view)
        for row in range(rows if self._row else 0):
            emulator.allow(self.view.data_ptr() + row * self._stride * size, self._row * size, self.use)

    def compare(self, before: Tensor, expected: Tensor) -> None:
        """Raise AssertionError if it is not as expected, or, where it is only read or around it, not as ``before``."""
        bits, old = integers_of(self.buffer), integers_of(before)
        assert torch.equal(bits[self._outside], old[self._outside]), "written outside of a row"
        if not self.use & Use.WRITE:
            assert torch.equal(bits, old), "an input was written"
            return
        different = (bits_of(self.view) != bits_of(expected)).nonzero()
        if len(different):
            first = tuple(different[0].tolist())
            values = [f"{integers_of(tensor)[first].item():#x}" for tensor in (self.view, expected)]
            kind = f"{len(different)} of {self.view.numel()} {self.view.dtype}"
            raise AssertionError(f"{kind} differ, first at {first}: {values[0]}, expected {values[1]}")
