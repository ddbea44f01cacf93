# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Cases of the lossless coder: all of its modes, sections that are cut, and rows that no sender makes."""

import torch
from torch import Tensor, nn

from deepspeed_ext.loco import lossless, ops
from tests.campaigns.kernels.drawing import KINDS, Drawing
from tests.harness.cuda_on_cpu.arguments import Placed
from tests.harness.cuda_on_cpu.comparing import Comparison
from tests.harness.cuda_on_cpu.emulator import Use

BOTH = Use.READ | Use.WRITE
_IMPOSSIBLE = 2**20  # units that no section has


def modes(compare: Comparison, draw: Drawing, amount: float) -> None:
    """Measure, pack and apply parameters that differ in each way: whole rows, and rows that are cut."""
    choice = draw.random.choice
    for _ in range(max(1, round(14 * amount))):
        for dtype in ops.LOSSLESS_DTYPES:
            for kind in KINDS:
                few, edge = choice((1, 2, 31, 32, 33, 255, 256, 257, 1000)), choice((1023, 1024, 1025, 6144))
                for width in (few, edge, choice((2047, 2048, 3000, 4097)), draw.random.randint(1, 7000)):
                    _mode(compare, draw, kind, width, dtype)


def _mode(compare: Comparison, draw: Drawing, kind: str, width: int, dtype: torch.dtype) -> None:
    updated, retained = draw.parameters(kind, width, dtype)
    count, case, choice = lossless.tiles_of(width), f"{kind} {width} {dtype}", draw.random.choice
    tiles = Placed(torch.full((count,), 7, dtype=torch.int32), Use.WRITE, draw.random.randint(0, 3), known=False)
    sent = (draw.placed(updated, Use.READ), draw.placed(retained, Use.READ))
    if not compare("lossless_measure", (*sent, tiles), case):
        return
    results = tiles.view if draw.random.random() < 0.6 else drawn_header(draw, updated, retained, 1024)
    header, size = lossless.header_of(results)
    spare = choice((0, 0, 2, 6, 16, 500, -2, -100, -int(size) // 2 // 2 * 2))  # below 0: it is cut
    row = torch.full((1, max(4 * count, int(size) + spare)), 7, dtype=torch.uint8)
    wire = Placed(row, BOTH, choice((0, 2, 4, 8, 16)), known=False)
    case += f", {spare} bytes to spare"
    if not compare("lossless_pack", (*sent, Placed(header, Use.READ), wire), case):
        return
    arrived = draw.placed(retained, BOTH)
    if compare("lossless_apply", (Placed(wire.view, Use.READ, choice((0, 2, 4, 8))), arrived), case) and spare >= 0:
        compare.check(torch.equal(_bits(arrived.view), _bits(updated)), f"lossless_apply {case}: a number has changed")


def rows(compare: Comparison, draw: Drawing, amount: float) -> None:
    """Rows of different kinds, of one length, some cut where they end."""
    choice = draw.random.choice
    for _ in range(max(1, round(60 * amount))):
        dtype, width = choice(ops.LOSSLESS_DTYPES), choice((1, 31, 1023, 1024, 1025, 2500, 5000))
        pairs = [draw.parameters(choice(KINDS), width, dtype) for _ in range(draw.random.randint(1, 5))]
        packed = [_packed(*pair) for pair in pairs]
        sizes, least = [row.shape[1] for row in packed], 4 * lossless.tiles_of(width)
        length = max(sizes) + choice((0, 2, 8)) if draw.random.random() < 0.7 else max(least, min(sizes))
        padded = [nn.functional.pad(row, (0, max(0, length - row.shape[1])), value=9)[:, :length] for row in packed]
        retained = torch.cat([pair[1] for pair in pairs])
        arguments = (Placed(torch.cat(padded), Use.READ, choice((0, 2))), draw.placed(retained, BOTH))
        compare("lossless_apply", arguments, f"{len(pairs)} rows of {width}, {length} bytes")


def strange(compare: Comparison, draw: Drawing, amount: float) -> None:
    """Headers and rows of any bytes, which no sender makes; the kernels for the CPU are the reference."""
    pack, apply = torch.ops.deepspeed_paro.lossless_pack.default, torch.ops.deepspeed_paro.lossless_apply.default
    choice = draw.random.choice
    for _ in range(max(1, round(150 * amount))):
        dtype, width = choice(ops.LOSSLESS_DTYPES), choice((1, 31, 1023, 1024, 1025, 2500, 5000))
        updated, retained = draw.parameters(choice(KINDS), width, dtype)
        header, size = lossless.header_of(drawn_header(draw, updated, retained, 2000))  # larger than any best one
        wire = Placed(torch.full((1, int(size)), 7, dtype=torch.uint8), BOTH, choice((0, 2)), known=False)
        case = f"large sections, {width}"
        arguments = (Placed(updated, Use.READ), Placed(retained, Use.READ), Placed(header, Use.READ), wire)
        compare("lossless_pack", arguments, case, oracle=pack)
        arrived = Placed(retained, BOTH)
        compare("lossless_apply", (Placed(wire.view, Use.READ), arrived), case, oracle=apply)
        compare.check(torch.equal(_bits(arrived.view), _bits(updated)), f"{case}: a number has changed")
        bytes_of_rows = _any_rows(draw, draw.random.randint(1, 3), lossless.tiles_of(width))
        into = draw.placed(retained.repeat(len(bytes_of_rows), 1), BOTH)
        arguments = (Placed(bytes_of_rows, Use.READ, choice((0, 2))), into)
        compare("lossless_apply", arguments, f"any rows {tuple(bytes_of_rows.shape)} of {width}", oracle=apply)
        updated, retained = draw.parameters("pairs", lossless.TILE, dtype)
        cut = _packed(updated, retained)[:, : -choice((2, 4))]
        compare("lossless_apply", (Placed(cut, Use.READ), Placed(retained, BOTH)), "cut in its escapes", oracle=apply)


def drawn_header(draw: Drawing, updated: Tensor, held: Tensor, limit: int) -> Tensor:
    """Drawn modes with the units that their sections have, of those with at most ``limit``: (tiles,), int32."""
    d = lossless._differences(updated, held, range(lossless.tiles_of(updated.shape[1]))).int()
    bitmap = 64 + ((d != 0).sum(-1) + 3) // 4 + ((d < -8) | (d > 7)).sum(-1)
    pairs = 128 + ((d.abs() > 1).sum(-1) + 3) // 4 + ((d < -8) | (d > 9)).sum(-1)
    is_same = torch.where(d.any(-1), _IMPOSSIBLE, 0)
    sizes = torch.stack((is_same, bitmap, pairs, torch.full_like(pairs, lossless.TILE)), dim=-1)
    sizes = torch.where(sizes > limit, _IMPOSSIBLE, sizes)
    chosen = [
        draw.random.choice([mode for mode, size in enumerate(tile) if size < _IMPOSSIBLE]) for tile in sizes.tolist()
    ]
    mode = torch.tensor(chosen, dtype=torch.int32)
    return (mode << 30) | sizes.gather(1, mode.long().view(-1, 1)).view(-1).int()


def _any_rows(draw: Drawing, rows: int, tiles: int) -> Tensor:
    """Rows of any bytes, most with offsets that are inside of them."""
    wire = torch.randint(0, 256, (rows, 4 * tiles + 2 * draw.random.randint(0, 3000)), dtype=torch.uint8)
    if draw.random.random() < 0.8:
        words = torch.randint(0, 2**16, (rows, tiles, 2))
        words[..., 1] &= 0xC000
        words[..., 0] %= draw.random.choice((16, 1000, 4000))
        wire[:, : 4 * tiles] = words.to(torch.int16).view(torch.uint8).view(rows, -1)
    density = draw.random.choice((None, 0, 1, 0x11, 0xFF))
    if density is not None:
        wire[:, 4 * tiles :] = density
    return wire


def _packed(updated: Tensor, held: Tensor) -> Tensor:
    tiles = torch.empty(lossless.tiles_of(updated.shape[1]), dtype=torch.int32)
    lossless.measure(updated, held, tiles)
    header, size = lossless.header_of(tiles)
    wire = torch.empty(1, int(size), dtype=torch.uint8)
    lossless.pack(updated, held, header, wire)
    return wire


def _bits(numbers: Tensor) -> Tensor:
    return numbers.view(torch.int16)
