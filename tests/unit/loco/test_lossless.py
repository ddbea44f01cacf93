# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Lossless updates restore every bit, have the documented format, and match the reference."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deepspeed_ext.loco import lossless, ops

WIDTHS = (1, 31, 1023, 1024, 1025, 5000)
ALL_BITS = 2**16
KERNEL = torch.ops.deepspeed_paro
Operators = tuple[Callable[..., None], ...]
OF_REFERENCE: Operators = (lossless.measure, lossless.pack, lossless.apply)
OF_KERNELS: Operators = (KERNEL.lossless_measure, KERNEL.lossless_pack, KERNEL.lossless_apply)


def parameters(kind: str, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return updated parameters and their replica, unaligned and inside longer rows; ``kind``: how they differ."""
    replica = (torch.randn(1, width + 5) * 0.02).to(dtype)
    steps = torch.zeros(1, width + 5)
    if kind == "random":  # half of them far away
        replica = torch.randint(-(2**15), 2**15, replica.shape, dtype=torch.int16).view(dtype)
        steps = torch.randint(-(2**15), 2**15, replica.shape) * (torch.rand(replica.shape) < 0.5)
    elif kind == "few":
        steps = torch.randn(replica.shape) * 8 * (torch.rand(replica.shape) < 0.1)
    elif kind == "most":
        steps = torch.randn(replica.shape) * 2
    elif kind == "edges":  # of nibbles, in bitmaps and pairs by turns
        near = torch.randint(-1, 2, replica.shape) * (torch.arange(width + 5) // lossless.TILE % 2)
        steps = torch.where(torch.rand(replica.shape) < 0.3, torch.randint(-11, 13, replica.shape), near)
    elif kind == "mixed":  # nothing, about 1, 4, 16 and 64
        tiles = (torch.arange(width + 5) - 2) // lossless.TILE  # as they lie in what is returned
        steps = torch.randn(replica.shape) * 4.0 ** (tiles - 1) * (tiles > 0)
    ordinals = lossless._ordinal(replica.view(torch.int16)) + steps.to(torch.int16)
    updated = lossless._ordinal(ordinals).roll(1, dims=1).view(dtype)
    return updated[:, 3 : 3 + width], replica[:, 2 : 2 + width]


def packed(updated: Tensor, replica: Tensor, spare: int = 0) -> Tensor:
    header, size = lossless.header_of(ops.measure(updated, replica))
    wire = torch.full((1, int(size) + spare), 7, dtype=torch.uint8)
    ops.pack(updated, replica, header, wire)
    return wire


def bits(numbers: Tensor) -> Tensor:
    return numbers.view(torch.int16)


def modes(updated: Tensor, replica: Tensor) -> list[int]:
    return ((ops.measure(updated, replica) >> 30) & 3).tolist()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["same", "few", "most", "edges", "mixed", "random"])
@pytest.mark.parametrize("dtype", ops.LOSSLESS_DTYPES, ids=str)
def test_lossless_kernels_match_reference_bytes(dtype: torch.dtype, kind: str, width: int) -> None:
    assert ops.has_kernels("CPU"), "conftest.py has built them"
    torch.manual_seed(width)
    updated, replica = parameters(kind, width, dtype)
    count = lossless.tiles_of(width)
    if kind == "mixed" and count > 4:
        assert set(modes(updated, replica)) == {lossless.SAME, lossless.BITMAP, lossless.PAIRS, lossless.PLAIN}
    results = []
    for measure, pack, apply in (OF_REFERENCE, OF_KERNELS):
        tiles = torch.full((count,), 7, dtype=torch.int32)
        measure(updated, replica, tiles)
        header, size = lossless.header_of(tiles)
        assert size <= (2 * lossless.TILE + 4) * count  # plain, with what fills the last tile, and the header
        wire = torch.full((1, int(size) + 6), 7, dtype=torch.uint8)
        pack(updated, replica, header, wire)
        assert not wire[:, int(size) :].any()
        buffer = torch.full((1, width + 2 * lossless.TILE), 3, dtype=dtype)
        arrived = buffer[:, 1 : 1 + width]
        arrived.copy_(replica)
        apply(wire, arrived)
        assert torch.equal(bits(arrived), bits(updated))
        assert (buffer[:, :1] == 3).all() and (buffer[:, 1 + width :] == 3).all()
        results.append((tiles, wire))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("run", [OF_REFERENCE, OF_KERNELS], ids=["reference", "kernels"])
@pytest.mark.parametrize("dtype", ops.LOSSLESS_DTYPES, ids=str)
def test_all_bit_patterns_are_restored(dtype: torch.dtype, run: Operators) -> None:
    """NaNs, infinities, both zeros: each pattern is an updated and a previous value, with near and far partners."""
    everything = torch.arange(ALL_BITS).to(torch.int16)
    neighbors = [lossless._ordinal(lossless._ordinal(everything) + step) for step in range(-11, 12)]
    for previous in (*neighbors, everything[torch.randperm(ALL_BITS)], everything.flip(0)):
        updated, replica = everything.view(1, -1).view(dtype), previous.clone().view(1, -1).view(dtype)
        tiles = torch.empty(ALL_BITS // lossless.TILE, dtype=torch.int32)
        run[0](updated, replica, tiles)
        header, size = lossless.header_of(tiles)
        wire = torch.empty(1, int(size), dtype=torch.uint8)
        run[1](updated, replica, header, wire)
        run[2](wire, replica)
        assert torch.equal(bits(replica), bits(updated))


def test_format_bytes() -> None:
    """One tile of each mode, written out from the docstring, not from the code."""
    ordinals = torch.zeros(4, lossless.TILE, dtype=torch.int16)
    ordinals[1, :9] = torch.tensor([1, -1, 0, 7, -8, 8, 0, 0, -2])
    ordinals[2] = torch.tensor([0, 1, -1, 1]).repeat(256)
    ordinals[2, :8] = torch.tensor([0, 1, -1, 2, 8, 9, 10, -8])
    ordinals[3] = torch.arange(1000, 1000 + lossless.TILE)
    of_negative = torch.tensor(-(2**15), dtype=torch.int16) | (-ordinals)  # the sign, and the size
    updated = torch.where(ordinals < 0, of_negative - 1, ordinals).view(1, -1).view(torch.bfloat16)
    replica = torch.zeros_like(updated)
    assert modes(updated, replica) == [lossless.SAME, lossless.BITMAP, lossless.PAIRS, lossless.PLAIN]
    wire = packed(updated, replica)[0].tolist()
    # 1, -1, 7, -8, 8 and -2 are 1, 0, 7, 8, escape and 14; 6 nibbles take 4 bytes
    bitmap = [0b00111011, 0b1, *[0] * 126, 0x01, 0x87, 0xEF, 0x00, 8, 0]
    # 0, 1, 3, 2 and four times 2; then 0, 1, 3, 1. 2, 8, 9, 10, -8 are 2, 0, 1, escape, 8
    pairs = [0b10110100, 0b10101010, *[0b01110100] * 254, 0x02, 0xF1, 0x08, 0x00, 10, 0]
    plain = [byte for number in range(1000, 2024) for byte in (number & 255, number >> 8)]
    starts = [0, 0, len(bitmap) // 2, (len(bitmap) + len(pairs)) // 2]
    header = [byte for mode, start in enumerate(starts) for byte in (start & 255, start >> 8, 0, mode << 6)]
    assert wire == [*header, *bitmap, *pairs, *plain]


@pytest.mark.parametrize("measure", [OF_REFERENCE[0], OF_KERNELS[0]], ids=["reference", "kernels"])
def test_lowest_of_equally_small_modes_is_used(measure: Callable[..., None]) -> None:
    updated = torch.zeros(1, 2 * lossless.TILE, dtype=torch.bfloat16)
    bits(updated)[0, :256] = 1  # a bitmap and 64 units of nibbles, or pairs alone
    bits(updated)[0, lossless.TILE :] = torch.tensor([1000] * 716 + [2] * 4 + [1] * 304)  # plain, or pairs as large
    tiles = torch.empty(2, dtype=torch.int32)
    measure(updated, torch.zeros_like(updated), tiles)
    assert ((tiles >> 30) & 3).tolist() == [lossless.BITMAP, lossless.PAIRS]
    assert (tiles & (2**30 - 1)).tolist() == [128, 1024]


@pytest.mark.parametrize("run", [OF_REFERENCE, OF_KERNELS], ids=["reference", "kernels"])
def test_rows_are_applied_in_order(run: Operators) -> None:
    rows, width = 3, 2500
    pairs = [parameters(kind, width, torch.bfloat16) for kind in ("few", "mixed", "random")]
    rows_bytes = [packed(*pair) for pair in pairs]
    longest = max(row.shape[1] for row in rows_bytes) + 2
    wire = torch.cat([torch.nn.functional.pad(row, (0, longest - row.shape[1]), value=9) for row in rows_bytes])
    buffer = torch.full((rows, width + 2 * lossless.TILE), 3, dtype=torch.bfloat16)
    replica = buffer[:, 4 : 4 + width]
    replica.copy_(torch.cat([pair[1] for pair in pairs]))
    run[2](wire, replica)
    assert torch.equal(bits(replica), bits(torch.cat([pair[0] for pair in pairs])))
    assert (buffer[:, :4] == 3).all() and (buffer[:, 4 + width :] == 3).all()


@pytest.mark.parametrize("kind", ["few", "mixed", "random"])
def test_tiles_beyond_the_wire_are_omitted(kind: str) -> None:
    updated, replica = parameters(kind, 4 * lossless.TILE, torch.bfloat16)
    complete_wire = packed(updated, replica)
    header, size = lossless.header_of(ops.measure(updated, replica))
    starts = 4 * len(header) + 2 * (header & (2**30 - 1)).long()
    for cut in (2, 400, int(size) // 2 // 2 * 2, int(size) - 16):
        length = int(size) - cut
        wires = [torch.full((length + 20,), 7, dtype=torch.uint8) for _ in range(2)]
        for wire, (_, pack, _) in zip(wires, (OF_REFERENCE, OF_KERNELS), strict=True):
            pack(updated, replica, header, wire[:length].view(1, -1))
        assert torch.equal(*wires) and (wires[0][length:] == 7).all()
        fitting = int((torch.cat((starts[1:], size.view(1))) <= length).sum())
        end = int(starts[fitting])
        assert torch.equal(wires[0][: min(end, length)], complete_wire[0, : min(end, length)])
        assert not wires[0][end:length].any()
        for _, _, apply in (OF_REFERENCE, OF_KERNELS):
            arrived = replica.clone()
            apply(complete_wire[:, :length].contiguous(), arrived)
            fitting_elements = fitting * lossless.TILE
            assert torch.equal(bits(arrived[:, :fitting_elements]), bits(updated[:, :fitting_elements]))
            assert torch.equal(bits(arrived[:, fitting_elements:]), bits(replica[:, fitting_elements:]))


def test_opcheck() -> None:
    updated, replica = parameters("most", 1500, torch.bfloat16)
    tiles = ops.measure(updated, replica)
    header, _ = lossless.header_of(tiles)
    wire = packed(updated, replica)
    torch.library.opcheck(KERNEL.lossless_measure.default, (updated, replica, torch.zeros_like(tiles)))
    torch.library.opcheck(KERNEL.lossless_pack.default, (updated, replica, header, torch.zeros_like(wire)))
    torch.library.opcheck(KERNEL.lossless_apply.default, (wire, replica.clone()))


def test_unsuitable_tensors_are_refused() -> None:
    updated, replica = parameters("most", 1500, torch.bfloat16)
    header, _ = lossless.header_of(ops.measure(updated, replica))
    wire = packed(updated, replica)
    for numbers in (updated.float(), bits(updated)):
        for call in (lambda x: ops.measure(x, x), lambda x: ops.pack(x, x, header, wire)):
            with pytest.raises(TypeError, match=r"in torch\.bfloat16 or torch\.float16, got torch"):
                call(numbers)
        with pytest.raises(TypeError, match=r"in torch\.bfloat16 or torch\.float16, got torch"):
            ops.apply_lossless(wire, numbers)
    for other in (replica[:, 1:], replica.half(), replica.repeat(2, 1)):
        with pytest.raises(RuntimeError, match="the shape and the dtype of the updated parameters"):
            ops.measure(updated, other)
    with pytest.raises(RuntimeError, match="must be one row, got 2"):
        ops.measure(updated.repeat(2, 1), replica.repeat(2, 1))
    with pytest.raises(RuntimeError, match="rows without gaps"):
        ops.measure(updated[:, ::2], replica[:, ::2])
    for words in (header[1:], header.long()):
        with pytest.raises(RuntimeError, match=r"header must be contiguous int32 of \(2,\)"):
            ops.pack(updated, replica, words, wire)
    for length in (6, 9, 101):
        with pytest.raises(RuntimeError, match=r"wire must be contiguous uint8 of \(1, an even number from 8 on"):
            ops.pack(updated, replica, header, wire[:, :length].contiguous())
    with pytest.raises(RuntimeError, match="at an even address"):
        ops.apply_lossless(wire.repeat(1, 2)[:, 1 : wire.shape[1] + 1], replica)
    with pytest.raises(RuntimeError, match=r"wire must be contiguous uint8 of \(2, an even"):
        ops.apply_lossless(wire, replica.repeat(2, 1))
