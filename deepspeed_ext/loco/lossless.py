# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Lossless updates of parameters in plain PyTorch. Kernels must match it bit for bit.

Note [Lossless updates]
    Parameters have 16 bits (bfloat16 or float16). Their bits b, as a signed integer, are mapped to an integer that
    grows with the number they stand for:

        o(b) = b where the sign is clear, else b ^ 0x7fff               a bijection that is its own inverse
        d = o(updated) - o(replica) modulo 2^16, signed

    -0 and +0 are two numbers, and so are all NaNs: every bit pattern is restored exactly. A row of ``width`` elements
    is split into t tiles of 1024, the last one padded with d = 0. On the wire it is, little-endian,

        header      t words of 32 bits: mode << 30 | offset of the tile's section after the header, in steps of
                    2 bytes; so a row has at most 2^30 elements
        sections    concatenated in the order of tiles
        padding     zeros up to the end of the wire's row; its length is even

    A tile has the mode with the smallest section, the lowest among equals:

        0 same      nothing: all d = 0
        1 bitmap    a bit for each element: d != 0 (element i: bit i % 8 of byte i / 8); for each of these, in order, a
                    nibble, padded with zeros to 2 bytes; for each nibble 15, in order, d in 2 bytes
        2 pairs     2 bits for each element (element i: bits 2 (i % 4) of byte i / 4): d & 3 where d is -1, 0 or 1,
                    else 2; for each 2 a nibble, and for each nibble 15 two bytes, as above
        3 plain     the bits of the updated elements, 2 bytes each, of 1024; zeros for those that are missing

    Nibble k is in byte k / 2, the lower half first. 1 to 7 is d (in pairs 2 to 7), 8 to 14 is d + 16 (d = -8 to -2),
    15 is any other d. The remaining codes are 0 for d = -1 in a bitmap, and in pairs 0 for d = 8 and 1 for d = 9.

    So a row takes at most the elements themselves, 4 bytes for each tile, and the padding of the last tile. Sizes
    depend on the numbers, but shapes do not, so nothing here waits for the device. A tile with a section that would
    end beyond the wire's row is neither written nor applied: the caller that allocates the wire compares sizes first.
"""

import torch
from torch import Tensor

TILE = 1024  # elements
MOST_ELEMENTS = 2**30  # of a row: offsets have 30 bits
SAME, BITMAP, PAIRS, PLAIN = range(4)
PIECE = 2**20  # elements processed at a time: temporaries are about ten times as many 64-bit integers
_SIZE = 2**30 - 1  # the bits of a size or an offset
_NEVER = 2**20  # a size that is never the smallest
_BITMAP_UNITS, _PAIRS_UNITS, _PLAIN_UNITS = TILE // 16, TILE // 8, TILE
_ESCAPE = 15


def tiles_of(width: int) -> int:
    """Return the number of tiles of a row."""
    return -(-width // TILE)


def measure(updated: Tensor, replica: Tensor, tiles: Tensor) -> None:
    """See ``ops.measure``."""
    for tile_range in _pieces(len(tiles), 1):
        difference = _differences(updated, replica, tile_range)
        small = _count(difference, -8, 7)
        bitmap = _section(_BITMAP_UNITS, _count(difference, 0, 0), small)
        pairs = _section(_PAIRS_UNITS, _count(difference, -1, 1), _count(difference, -8, 9))
        same = torch.where(difference.any(-1), _NEVER, 0)
        sizes = torch.stack((same, bitmap, pairs, torch.full_like(same, _PLAIN_UNITS)), dim=-1)
        # The lowest mode of equal sizes: kernels must choose the same.
        best = (sizes * 4 + torch.arange(4, device=sizes.device)).amin(-1).int()
        tiles[tile_range.start : tile_range.stop] = ((best & 3) << 30) | (best >> 2)


def header_of(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Return the header, (tiles,) int32: ``mode << 30 | offset``; and the row's bytes, 0D int64 on the device."""
    sizes = (tiles & _SIZE).long()
    ends = sizes.cumsum(0)
    return (tiles & ~_SIZE) | (ends - sizes).int(), 4 * len(tiles) + 2 * sizes.sum()


def pack(updated: Tensor, replica: Tensor, header: Tensor, wire: Tensor) -> None:
    """See ``ops.pack``."""
    units = wire.zero_().view(torch.int16)[0]  # sections are added to zeros
    begin = 2 * len(header)
    units[:begin].copy_(header.view(torch.int16))
    column = torch.arange(TILE, device=wire.device)
    for tile_range in _pieces(len(header), 1):
        words = header[tile_range.start : tile_range.stop].unsqueeze(-1)
        mode, first = (words >> 30) & 3, begin + (words & _SIZE).long()
        sections, sizes = _encode(_differences(updated, replica, tile_range), _tiles(updated, tile_range), mode)
        # A section that would end beyond the wire is omitted.
        fits = (column < sizes) & (first + sizes <= len(units))
        positions = (first + column).clamp(max=len(units) - 1)  # beyond the section, zeros are added
        units.index_add_(0, positions.view(-1), torch.where(fits, sections, 0).to(torch.int16).view(-1))


def apply(wire: Tensor, replica: Tensor) -> None:
    """See ``ops.apply_lossless``."""
    units, (rows, width) = wire.view(torch.int16), replica.shape
    tiles = tiles_of(width)
    words = units[:, : 2 * tiles].int() & 0xFFFF  # undo the sign extension
    low, high = words[:, 0::2], words[:, 1::2]
    modes, offsets = high >> 14, ((high & 0x3FFF) << 16) | low
    column = torch.arange(TILE, device=wire.device)
    for tile_range in _pieces(tiles, rows):
        first = 2 * tiles + offsets[:, tile_range.start : tile_range.stop, None].long()
        positions = (first + column).clamp(max=units.shape[1] - 1)
        sections = units.gather(1, positions.view(rows, -1)).view(positions.shape).int() & 0xFFFF
        mode = modes[:, tile_range.start : tile_range.stop, None]
        difference, sizes = _decode(sections, mode)
        old = _tiles(replica, tile_range).view(positions.shape)
        new = torch.where(mode == PLAIN, sections.to(torch.int16), _ordinal(_ordinal(old) + difference))
        new = torch.where(first + sizes <= units.shape[1], new, old)  # a tile that does not fit is not applied
        part = _elements(replica, tile_range)
        part.copy_(new.view(rows, -1)[:, : part.shape[1]])


def _pieces(tiles: int, rows: int) -> list[range]:
    """Return ranges of a row's tiles; in all rows together, a range has about ``PIECE`` elements."""
    length = max(1, PIECE // (TILE * rows))
    return [range(first, min(first + length, tiles)) for first in range(0, tiles, length)]


def _elements(numbers: Tensor, tile_range: range) -> Tensor:
    """Return the bits of a range of tiles: (rows, at most their elements), int16, a view."""
    return numbers.view(torch.int16)[:, tile_range.start * TILE : tile_range.stop * TILE]


def _tiles(numbers: Tensor, tile_range: range) -> Tensor:
    """Return the bits of a range of tiles, padded with zeros: (rows * tiles, TILE), int16."""
    bits = _elements(numbers, tile_range)
    return torch.nn.functional.pad(bits, (0, len(tile_range) * TILE - bits.shape[1])).reshape(-1, TILE)


def _ordinal(bits: Tensor) -> Tensor:
    """Map 16-bit patterns to their ordered integers, or such integers to their bits; see Note [Lossless updates]."""
    return bits ^ ((bits >> 15) & 0x7FFF)


def _differences(updated: Tensor, replica: Tensor, tile_range: range) -> Tensor:
    """Return d of a range of tiles: (tiles, TILE), int16."""
    return _ordinal(_tiles(updated, tile_range)) - _ordinal(_tiles(replica, tile_range))


def _count(difference: Tensor, low: int, high: int) -> Tensor:
    """Return the number of elements of each tile outside of a range."""
    return ((difference < low) | (difference > high)).sum(-1)


def _section(base: int, nibbles: Tensor, escapes: Tensor) -> Tensor:
    """Return the size of sections, in steps of 2 bytes."""
    return base + (nibbles + 3) // 4 + escapes


def _encode(difference: Tensor, plain: Tensor, mode: Tensor) -> tuple[Tensor, Tensor]:
    """Return sections (tiles, TILE), int32 of which the lower half counts, and their sizes (tiles, 1), in units."""
    d, pairs = difference.int(), mode == PAIRS
    near = (d >= -1) & (d <= 1)
    has_nibble = torch.where(pairs, ~near, d != 0)
    nibble = torch.where(pairs, torch.where(d >= 8, d - 8, d & 15), torch.where(d == -1, 0, d & 15))
    escape = has_nibble & ((d < -8) | (d > torch.where(pairs, 9, 7)))
    nibble = torch.where(escape, _ESCAPE, nibble)
    codes = _pack_codes(torch.where(near, d & 3, 2), 2)
    bitmap = torch.nn.functional.pad(_pack_codes((d != 0).int(), 1), (0, _PAIRS_UNITS - _BITMAP_UNITS))
    sections = torch.zeros_like(d)
    sections[:, :_PAIRS_UNITS] = torch.where(pairs, codes, bitmap)
    base = torch.where(pairs, _PAIRS_UNITS, _BITMAP_UNITS)
    rank = (has_nibble.cumsum(-1) - 1).clamp(min=0)
    position = (base + rank // 4).clamp(max=TILE - 1)  # exceeded only if another mode is used
    sections.scatter_add_(-1, position, torch.where(has_nibble, nibble << (rank % 4 * 4).int(), 0))
    escapes_start = base + (has_nibble.sum(-1, keepdim=True) + 3) // 4
    position = (escapes_start + escape.cumsum(-1) - 1).clamp(max=TILE - 1)
    sections.scatter_add_(-1, position, torch.where(escape, d & 0xFFFF, 0))
    sizes = torch.where(mode == PLAIN, _PLAIN_UNITS, escapes_start + escape.sum(-1, keepdim=True))
    return torch.where(mode == PLAIN, plain.int(), sections), torch.where(mode == SAME, 0, sizes)


def _decode(sections: Tensor, mode: Tensor) -> tuple[Tensor, Tensor]:
    """Return d (rows, tiles, TILE), int16, and sizes in units; sections: units as int32, mode: (rows, tiles, 1)."""
    pairs = mode == PAIRS
    codes, bitmap = _unpack_codes(sections[..., :_PAIRS_UNITS], 2), _unpack_codes(sections[..., :_BITMAP_UNITS], 1)
    has_nibble = torch.where(pairs, codes == 2, bitmap == 1)
    base = torch.where(pairs, _PAIRS_UNITS, _BITMAP_UNITS)
    rank = (has_nibble.cumsum(-1) - 1).clamp(min=0)
    units = sections.gather(-1, (base + rank // 4).clamp(max=TILE - 1))
    nibble = (units >> (rank % 4 * 4).int()) & 15
    escape = has_nibble & (nibble == _ESCAPE)
    escapes_start = base + (has_nibble.sum(-1, keepdim=True) + 3) // 4
    large = sections.gather(-1, (escapes_start + escape.cumsum(-1) - 1).clamp(max=TILE - 1))
    signed = torch.where(nibble >= 8, nibble - 16, nibble)
    signed = torch.where(pairs & (nibble < 2), nibble + 8, torch.where(nibble == 0, -1, signed))
    near = torch.where(pairs, torch.where(codes == 3, -1, codes), 0)
    d = torch.where(escape, large, torch.where(has_nibble, signed, near))
    sizes = torch.where(mode == PLAIN, _PLAIN_UNITS, escapes_start + escape.sum(-1, keepdim=True))
    return torch.where(mode == SAME, 0, d).to(torch.int16), torch.where(mode == SAME, 0, sizes)


def _pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of ``bits`` bits, int32, into units of 2 bytes, the first one lowest."""
    codes = codes.view(*codes.shape[:-1], -1, 16 // bits)
    return (codes << torch.arange(0, 16, bits, dtype=torch.int32, device=codes.device)).sum(-1, dtype=torch.int32)


def _unpack_codes(units: Tensor, bits: int) -> Tensor:
    """Unpack units of 2 bytes into codes of ``bits`` bits."""
    shifts = torch.arange(0, 16, bits, dtype=torch.int32, device=units.device)
    return ((units.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)
