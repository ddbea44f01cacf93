# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Differences of updated parameters: arithmetic, and kernels that give the reference's bits."""

import pytest
import torch
from torch import Tensor

from deepspeed_ext.loco import ops, reference
from deepspeed_ext.loco.packing import Packing


def parameters(rows: int, width: int, dtype: torch.dtype, step: float = 1e-3) -> tuple[Tensor, Tensor]:
    """Updated ones and what is held of them, both as rows of a longer one."""
    held = (torch.randn(rows, width + 5) * 0.02).to(dtype)
    updated = (held.float() + step * torch.randn(rows, width + 5)).to(dtype)
    return updated[:, 3 : 3 + width], held[:, 2 : 2 + width]


@pytest.mark.parametrize("block", [32, 128, 4096])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", ops.DTYPES, ids=str)
def test_kernels_give_the_bits_of_the_reference(dtype: torch.dtype, bits: int, block: int) -> None:
    assert ops.has_kernels("CPU"), "conftest.py has built them"
    torch.manual_seed(0)
    packing = Packing(bits, block)
    for width in (1, 31, 129, 4100):
        updated, held = parameters(3, width, dtype)
        updated[1, 0] = float("nan")
        if width > 32:
            updated[2] = held[2]
        wires = [torch.full((3, packing.row_bytes(width)), 7, dtype=torch.uint8) for _ in range(2)]
        reference.difference(updated, held, wires[0], bits, block)
        torch.ops.deepspeed_paro.loco_difference(updated, held, wires[1], bits, block)
        assert torch.equal(*wires)
        both = [parameters(3, width, dtype)[1] for _ in range(2)]
        for target, run in zip(both, (reference.apply, torch.ops.deepspeed_paro.loco_apply), strict=True):
            target.copy_(held)
            run(wires[0], target, bits, block)
        assert torch.equal(both[0].isnan(), both[1].isnan()) and both[0].isnan().any()
        assert torch.equal(both[0].nan_to_num(), both[1].nan_to_num())
        assert width < 32 or torch.equal(both[1][2], held[2])


def test_nothing_is_written_behind_a_row() -> None:
    packing = Packing(4, 128)
    buffer = torch.randn(4, 1000)
    before, held = buffer.clone(), buffer[:, 10:310]
    wire = packing.empty(4, 300, held)
    ops.difference(held + 0.1, held, wire, packing)
    ops.apply(wire, held, packing)
    assert torch.equal(buffer[:, :10], before[:, :10]) and torch.equal(buffer[:, 310:], before[:, 310:])
    assert (held - before[:, 10:310] - 0.1).abs().max() < 0.01


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", ops.DTYPES, ids=str)
def test_what_is_not_sent_is_sent_later(dtype: torch.dtype, bits: int) -> None:
    """Nothing drifts: what is held is within a step of the last difference, and a pause brings it home."""
    torch.manual_seed(1)
    packing, width = Packing(bits, 128), 1000
    master = torch.randn(1, width) * 0.02
    held = master.to(dtype)
    wire = packing.empty(1, width, held)
    for number in range(200):
        master += 1e-3 * torch.randn(1, width) if number < 190 else 0.0
        updated = master.to(dtype)
        ops.difference(updated, held, wire, packing)
        ops.apply(wire, held, packing)
        steps = packing.scales(wire, width).float().repeat_interleave(128, dim=1)[:, :width]
        assert ((held.float() - updated.float()).abs() <= steps).all()
    assert torch.equal(held, updated)


def test_opcheck() -> None:
    packing = Packing(4, 128)
    updated, held = parameters(2, 300, torch.bfloat16)
    wire = packing.empty(2, 300, held).zero_()
    torch.library.opcheck(torch.ops.deepspeed_paro.loco_difference.default, (updated, held, wire, 4, 128))
    torch.library.opcheck(torch.ops.deepspeed_paro.loco_apply.default, (wire, held, 4, 128))


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "message"),
    [
        (2, 300, torch.bfloat16, "the shape and the dtype of the updated parameters"),
        (2, 299, torch.float32, "the shape and the dtype of the updated parameters"),
        (1, 300, torch.float32, "the shape and the dtype of the updated parameters"),
    ],
)
def test_what_does_not_fit_is_refused(rows: int, width: int, dtype: torch.dtype, message: str) -> None:
    packing, updated = Packing(4, 128), torch.zeros(2, 300)
    wire, held = packing.empty(2, 300, updated), torch.zeros(rows, width, dtype=dtype)
    with pytest.raises(RuntimeError, match=message):
        ops.difference(updated, held, wire, packing)
    with pytest.raises(RuntimeError, match="wire must be contiguous uint8"):
        ops.apply(wire[:, 1:], updated, packing)
