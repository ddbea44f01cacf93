# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Without kernels, a message is processed in pieces: the bits are the same, and temporaries as small as a piece."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepspeed_ext.loco import reference
from deepspeed_ext.loco.packing import Packing

pytestmark = pytest.mark.quick

BLOCK = 64


class Largest(TorchDispatchMode):
    """Bytes of the largest storage that operations make, those of the given tensors left out."""

    def __init__(self, *given: Tensor | None) -> None:
        super().__init__()
        self._given = {tensor.untyped_storage().data_ptr() for tensor in given if tensor is not None}
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchDispatchMode."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self._given:
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return result


def message(bits: int, kept: torch.dtype, rows: int, width: int, hadamard: bool) -> tuple[list[Tensor], int]:
    """What two steps and a sum of three pieces write, and bytes of the largest temporary."""
    generator = torch.Generator().manual_seed(0)
    packing, errors = Packing(bits, BLOCK), Packing(8, BLOCK)
    size = errors.row_bytes(width) if kept == torch.uint8 else errors.padded(width)
    written, largest, old = [], 0, None
    for dtype in (torch.float32, torch.bfloat16):
        gradient = torch.randn(rows, width, generator=generator).to(dtype)
        gradient[0, width // 2] = float("nan")
        wire = torch.full((rows, packing.row_bytes(width)), 7, dtype=torch.uint8)
        new, out = torch.full((rows, size), 7, dtype=kept), torch.empty(width, dtype=dtype)
        with Largest(gradient, wire, old, new, out) as found:
            reference.compress(gradient, wire, old, new, bits, BLOCK, 0.8, 3.0, hadamard)
            reference.decompress(wire, out, bits, BLOCK, 1 / 3, hadamard)
        written, largest, old = [*written, wire, new, out], max(largest, found.nbytes), new
    return written, largest


@pytest.mark.parametrize("hadamard", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("kept", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_pieces_have_the_bits_of_the_whole(bits: int, kept: torch.dtype, hadamard: bool) -> None:
    for rows, width in ((3, 1000), (2, 1024), (3, 20)):
        whole, _ = message(bits, kept, rows, width, hadamard)
        for piece in (1, 5 * BLOCK):
            with mock.patch.object(reference, "PIECE", piece):
                cut, _ = message(bits, kept, rows, width, hadamard)
            assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(whole, cut, strict=True))


def test_temporaries_are_of_the_size_of_a_piece() -> None:
    with mock.patch.object(reference, "PIECE", 2**14):
        for rows, width in ((2, 2**14), (2, 2**18), (16, 2**15)):
            _, largest = message(4, torch.uint8, rows, width, hadamard=True)
            assert 0 < largest <= 4 * 2**14, (rows, width, largest)
