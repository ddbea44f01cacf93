# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Cases at the bounds: nothing to do, more rows than a grid has, more elements than 32 bits count, other devices. Of
cases that are too large, only some blocks run. Memory that no block touches is never allocated."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.comm import backends
from deepspeed_ext.loco import lossless, ops, reference
from deepspeed_ext.loco.reference import Packing
from tests.campaigns.kernels.drawing import Drawing
from tests.harness.cuda_on_cpu.arguments import Placed
from tests.harness.cuda_on_cpu.comparing import Comparison
from tests.harness.cuda_on_cpu.emulator import Order, Use, Variant, bits_of

BOTH = Use.READ | Use.WRITE
_TILE = 4096  # elements of a thread block of gradients
_ALONG = 65535  # rows of one dimension of a grid
_GRID = 3 * _ALONG  # rows of a grid that is three deep
_SHUFFLED = Variant(Order.SHUFFLED, Order.SHUFFLED)


def empty(compare: Comparison, draw: Drawing, amount: float) -> None:
    """No rows, no elements: nothing is launched or written. And rows that are one and the same, or one column."""
    for dtype, bits, (rows, width) in itertools.product(ops.DTYPES, (4, 8), ((0, 5), (3, 0), (0, 0), (1, 0))):
        wire = Placed(torch.zeros(rows, Packing(bits, 64).row_bytes(width), dtype=torch.uint8), BOTH)
        numbers = Placed(torch.zeros(rows, width, dtype=dtype), BOTH)
        error = Placed(torch.zeros(rows, Packing(8, 64).row_bytes(width), dtype=torch.uint8), BOTH)
        for retained in (None, error):
            _nothing(compare, "loco_compress", (numbers, wire, retained, retained, bits, 64, 0.8, 1.0, True))
        _nothing(compare, "loco_difference", (numbers, numbers, wire, bits, 64))
        _nothing(compare, "loco_apply", (wire, numbers, bits, 64))
        out = Placed(torch.zeros(0, dtype=dtype), Use.WRITE)
        pieces = Placed(torch.zeros(2, 0, dtype=torch.uint8), Use.READ)
        _nothing(compare, "loco_decompress", (pieces, out, bits, 64, 1.0, True))
    for dtype, length in itertools.product(ops.LOSSLESS_DTYPES, (0, 8)):
        none, words = Placed(torch.zeros(1, 0, dtype=dtype), BOTH), Placed(torch.zeros(0, dtype=torch.int32), BOTH)
        wire = Placed(torch.full((1, length), 7, dtype=torch.uint8), BOTH)
        _nothing(compare, "lossless_measure", (none, none, words))
        _nothing(compare, "lossless_pack", (none, none, words, wire))
        _nothing(compare, "lossless_apply", (wire, none))
        _nothing(compare, "sum_parts", (Placed(torch.zeros(2, 0, dtype=dtype), BOTH), Placed(none.view[0], BOTH)))
    for dtype in ops.DTYPES:
        row = draw.numbers(1, 100, dtype).expand(3, -1)
        column = draw.numbers(5, 7, dtype).t().contiguous().t()[:, 2:3]  # strides of 1 and 5
        for numbers_of in (row, column):
            _compressed(compare, numbers_of, f"strides {numbers_of.stride()} of {dtype}")


def _nothing(compare: Comparison, name: str, arguments: Sequence[Any]) -> None:
    launches = compare.emulator.counts().launches
    placed = [item for item in arguments if isinstance(item, Placed)]
    before = [item.buffer.clone() for item in placed]
    compare.emulator.kernels[name](*(item.view if isinstance(item, Placed) else item for item in arguments))
    is_same = all(torch.equal(bits_of(item.buffer), bits_of(old)) for item, old in zip(placed, before, strict=True))
    shapes = [tuple(item.view.shape) for item in placed]
    compare.check(is_same and compare.emulator.counts().launches == launches, f"{name} of nothing, {shapes}")


def _compressed(compare: Comparison, numbers: Tensor, what: str) -> None:
    packing = Packing(4, 32)
    results, expected = (
        torch.full((len(numbers), packing.row_bytes(numbers.shape[1])), 7, dtype=torch.uint8) for _ in range(2)
    )
    settings = (None, None, 4, 32, 0.0, 1.0, numbers.shape[1] > 1)
    reference.compress(numbers, expected, *settings)
    compare.emulator.set()
    compare.emulator.kernels["loco_compress"](numbers, results, *settings)
    compare.same(results, expected, what)


def rows(compare: Comparison, draw: Drawing, amount: float) -> None:
    """More rows than one and than two dimensions of a grid have."""
    emulator, count, width = compare.emulator, 2 * _ALONG + 3000, 3
    edges = (0, 1, 2, *range(_ALONG - 2, _ALONG + 2), *range(2 * _ALONG - 1, 2 * _ALONG + 2), count - 1)
    subset = sorted({*edges, *draw.random.sample(range(count), 100)})
    packing = Packing(4, 32)
    # As many rows as the grid has: memory after the last one is ours, so a write to it is found wherever it is.
    buffers = [torch.randn(_GRID, width), torch.randn(_GRID, width)]
    buffers += [torch.full((_GRID, size), 0x3F, dtype=torch.uint8) for size in (packing.row_bytes(width), 48)]
    after = [buffer[count:].clone() for buffer in buffers]
    gradient, retained, wire, remaining = (buffer[:count] for buffer in buffers)
    remaining.zero_()
    sent, saved_part, arrived = torch.zeros_like(wire[subset]), torch.zeros_like(remaining[subset]), retained[subset]
    emulator.set(_SHUFFLED)
    with emulator.only([*subset, count, count + 1, _GRID - 1]):  # the last ones are after the last row
        reference.compress(gradient[subset], sent, None, saved_part, 4, 32, 0.0, 1.0, False)
        emulator.kernels["loco_compress"](gradient, wire, None, remaining, 4, 32, 0.0, 1.0, False)
        compare.same(wire[subset], sent, "many rows, loco_compress")
        compare.same(remaining[subset], saved_part, "many rows, what is kept")
        reference.difference(gradient[subset], retained[subset], sent, 4, 32)
        emulator.kernels["loco_difference"](gradient, retained, wire.fill_(7), 4, 32)
        compare.same(wire[subset], sent, "many rows, loco_difference")
        reference.apply(wire[subset], arrived, 4, 32)
        emulator.kernels["loco_apply"](wire, retained, 4, 32)
        compare.same(retained[subset], arrived, "many rows, loco_apply")
        _lossless_rows(compare, draw, count, subset)
    for buffer, before in zip(buffers, after, strict=True):
        compare.same(buffer[count:], before, "many rows, after the last one")


def _lossless_rows(compare: Comparison, draw: Drawing, count: int, some: Sequence[int]) -> None:
    packed = torch.zeros(_GRID, 4 + 2 * lossless.TILE, dtype=torch.uint8)
    retained = torch.zeros(_GRID, 2, dtype=torch.bfloat16)
    pairs = [draw.parameters("any", 2, torch.bfloat16) for _ in some]
    for row, (updated, before) in zip(some, pairs, strict=True):
        tiles = torch.empty(1, dtype=torch.int32)
        lossless.measure(updated, before, tiles)
        lossless.pack(updated, before, lossless.header_of(tiles)[0], packed[row : row + 1])
        retained[row] = before[0]
    packed[count] = packed[some[1]]  # would change that row
    compare.emulator.kernels["lossless_apply"](packed[:count], retained[:count])
    compare.same(
        retained[count:].view(torch.int16),
        torch.zeros(_GRID - count, 2, dtype=torch.int16),
        "many rows, after the last one",
    )
    compare.same(
        retained[list(some)].view(torch.int16),
        torch.cat([updated for updated, _ in pairs]).view(torch.int16),
        "many rows, lossless_apply",
    )


def large(compare: Comparison, draw: Drawing, amount: float) -> None:
    """More elements than 32 bits can count: in a gradient, after other rows, on the wire."""
    for dtype, width, bits, retained in (
        (torch.bfloat16, 2**31 + 4104, 4, torch.uint8),
        (torch.bfloat16, 2**32 + 72, 8, torch.uint8),
        (torch.float16, 2**31 + 72, 4, torch.bfloat16),
        (torch.float32, 2**31 + 5, 8, torch.float32),
    ):
        _LargeGradient(draw, dtype, width, Packing(bits, 128), retained).run(compare)
    _large_rows(compare, draw, torch.bfloat16, 3, 2**30 + 8)
    _large_lossless(compare, draw)
    _large_sum(compare, draw)


class _Part(NamedTuple):
    """Of a large row: where it is, its numbers, and the error that it has."""

    first: int
    numbers: Tensor
    error: Tensor

    @property
    def width(self) -> int:
        return self.numbers.shape[1]


class _LargeGradient:
    """A gradient, its wire and its error; only some tiles have numbers."""

    def __init__(self, draw: Drawing, dtype: torch.dtype, width: int, packing: Packing, kept: torch.dtype) -> None:
        self._packing, self._form, self._kept, self._width = packing, Packing(8, packing.block_size), kept, width
        self._gradient = torch.empty(1, width, dtype=dtype)
        self._wire = packing.empty(1, width, self._gradient)
        self._error = torch.empty(self._error_shape(width), dtype=kept)
        self._out = torch.empty(width, dtype=dtype)
        edges = [0, 2**30, 2**31, 2**32, width - 1, *(draw.random.randrange(width) for _ in range(2))]
        near = {edge // _TILE + off for edge in edges for off in (-1, 0)}
        self._tiles = sorted(tile for tile in near if 0 <= tile * _TILE < width)
        self._parts = [self._part(draw, tile * _TILE) for tile in self._tiles]

    def _error_shape(self, width: int) -> tuple[int, int]:
        return 1, self._form.row_bytes(width) if self._kept == torch.uint8 else self._packing.padded(width)

    def _part(self, draw: Drawing, first: int) -> _Part:
        size, packing, dtype = min(self._width - first, _TILE), self._packing, self._gradient.dtype
        numbers, before = (draw.numbers(1, size, dtype, packing.block_size) for _ in range(2))
        error = torch.zeros(self._error_shape(size), dtype=self._kept)
        wire = packing.empty(1, size, numbers)
        reference.compress(before, wire, None, error, packing.bits, packing.block_size, 0.0, 1.0, True)
        self._gradient[:, first : first + size] = numbers
        for full, subset in self._pieces(self._error, error, self._form, first, size):
            full.copy_(subset)
        return _Part(first, numbers, error)

    def _pieces(
        self, whole: Tensor, part: Tensor, form: Packing, first: int, size: int
    ) -> list[tuple[Tensor, Tensor]]:
        if part.dtype != torch.uint8:
            return [(whole[:, first : first + part.shape[1]], part)]
        start = first // form.block_size
        blocks = range(start, start + form.blocks(size))
        payloads = (form.payload(whole, self._width, blocks), form.payload(part, size))
        return [payloads, (form.scales(whole, self._width, blocks), form.scales(part, size))]

    def run(self, compare: Comparison) -> None:
        packing, kernels = self._packing, compare.emulator.kernels
        settings = (packing.bits, packing.block_size, 0.8, 1024.0, True)
        compare.emulator.set(_SHUFFLED)
        with compare.emulator.only(self._tiles):
            kernels["loco_compress"](self._gradient, self._wire, self._error, self._error, *settings)
            kernels["loco_decompress"](self._wire, self._out, *settings[:2], 1 / 3, True)
        for part in self._parts:
            sent, arrived = packing.empty(1, part.width, part.numbers), part.numbers[0].clone()
            reference.compress(part.numbers, sent, part.error, part.error, *settings)
            reference.decompress(sent, arrived, *settings[:2], 1 / 3, True)
            case = f"large {self._gradient.dtype} {self._width} {packing} {self._kept} at {part.first}"
            for full, subset in self._pieces(self._wire, sent, packing, part.first, part.width):
                compare.same(full, subset, f"{case}, wire")
            for full, subset in self._pieces(self._error, part.error, self._form, part.first, part.width):
                compare.same(full, subset, f"{case}, error")
            compare.same(self._out[part.first : part.first + part.width], arrived, f"{case}, result")
        padding = packing.padding(self._wire, self._width)
        compare.same(padding, torch.zeros_like(padding), "large, padding")


def _large_rows(compare: Comparison, draw: Drawing, dtype: torch.dtype, count: int, width: int) -> None:
    """Rows; the last ones begin after 2^31 elements, in memory and on the wire."""
    packing, along = Packing(8, 512), -(-width // _TILE)
    updated, retained = torch.empty(count, width, dtype=dtype), torch.empty(count, width, dtype=dtype)
    wire, parts = packing.empty(count, width, retained), []
    for row, tile in itertools.product(range(count), (0, along // 2, along - 1)):
        subset = slice(tile * _TILE, min(width, (tile + 1) * _TILE))
        now, before = (draw.numbers(1, subset.stop - subset.start, dtype, 512) for _ in range(2))
        updated[row, subset], retained[row, subset] = now[0], before[0]
        parts.append((row, tile, subset, now, before))
    compare.emulator.set(_SHUFFLED)
    with compare.emulator.only([row * along + tile for row, tile, *_ in parts]):
        compare.emulator.kernels["loco_difference"](updated, retained, wire, 8, 512)
        compare.emulator.kernels["loco_apply"](wire, retained, 8, 512)
    for row, tile, subset, now, before in parts:
        size, first = subset.stop - subset.start, tile * _TILE // 512
        sent = packing.empty(1, size, now)
        reference.difference(now, before, sent, 8, 512)
        reference.apply(sent, before, 8, 512)
        case = f"row {row} of {width} {dtype} at {subset.start}"
        own, blocks = wire[row : row + 1], range(first, first + packing.blocks(size))
        compare.same(packing.payload(own, width, blocks), packing.payload(sent, size), f"{case}, payload")
        compare.same(packing.scales(own, width, blocks), packing.scales(sent, size), f"{case}, scales")
        compare.same(retained[row, subset], before[0], f"{case}, what is held")


def _large_lossless(compare: Comparison, draw: Drawing) -> None:
    """The longest rows: a section after 2^31 bytes of the wire, and rows after 2^31 elements."""
    width, count, size = lossless.MOST_ELEMENTS, 3, lossless.TILE
    tiles = lossless.tiles_of(width)
    edges = (0, 1, tiles // 2 - 1, tiles // 2, tiles - 2, tiles - 1)
    chosen = sorted({*edges, *(draw.random.randrange(tiles) for _ in range(4))})
    updated, retained = torch.empty(1, width, dtype=torch.bfloat16), torch.empty(count, width, dtype=torch.bfloat16)
    measured, header = torch.empty(tiles, dtype=torch.int32), torch.empty(tiles, dtype=torch.int32)
    wire, parts = torch.empty(count, (4 + 2 * size) * tiles, dtype=torch.uint8), []
    for number, tile in enumerate(chosen):
        subset = slice(tile * size, (tile + 1) * size)
        kind = ("few", "pairs", "any", "most", "escapes")[number % 5]
        updated[:, subset], retained[:, subset] = now, before = draw.parameters(kind, size, torch.bfloat16)
        word = torch.empty(1, dtype=torch.int32)
        lossless.measure(now, before, word)
        header[tile] = (int(word) & ~(2**30 - 1)) | size * tile  # at the place that it has where all are plain
        parts.append((tile, subset, now, before, word))
    kernels = compare.emulator.kernels
    compare.emulator.set(_SHUFFLED)
    with compare.emulator.only(chosen):
        kernels["lossless_measure"](updated, retained[:1], measured)
        kernels["lossless_pack"](updated, retained[:1], header, wire[:1])
    for tile, _, now, before, word in parts:
        case, units, begin = f"large lossless, tile {tile}", int(word) & (2**30 - 1), 4 * tiles + 2 * size * tile
        compare.same(measured[tile : tile + 1], word, f"{case}, measured")
        row = torch.empty(1, 4 + 2 * units, dtype=torch.uint8)
        lossless.pack(now, before, lossless.header_of(word)[0], row)
        section, places = wire[:, begin : begin + 2 * units], wire[:, 4 * tile : 4 * tile + 4]
        compare.same(section[:1], row[:, 4:], f"{case}, section")
        compare.same(places[0], header[tile : tile + 1].view(torch.uint8), f"{case}, header")
        section[1:], places[1:] = section[0], places[0]
    with compare.emulator.only([row * tiles + tile for row in range(count) for tile in chosen]):
        kernels["lossless_apply"](wire, retained)
    for (tile, subset, now, *_), row in itertools.product(parts, range(count)):
        compare.same(
            retained[row : row + 1, subset].view(torch.int16),
            now.view(torch.int16),
            f"large lossless, row {row}, tile {tile}",
        )


def _large_sum(compare: Comparison, draw: Drawing) -> None:
    """Parts of more elements than 31 bits count; the last one begins after 2^32."""
    width = 2**31 + 4104
    parts, out = (torch.empty(*shape, dtype=torch.bfloat16) for shape in ((3, width), (width,)))
    slices = {tile: slice(tile * _TILE, min(width, (tile + 1) * _TILE)) for tile in (0, 2**19 - 1, 2**19, 2**19 + 1)}
    for own in slices.values():
        parts[:, own] = draw.numbers(3, own.stop - own.start, torch.bfloat16)
    compare.emulator.set(_SHUFFLED)
    with compare.emulator.only(list(slices)):
        compare.emulator.kernels["sum_parts"](parts, out)
    for own in slices.values():
        expected = torch.empty(own.stop - own.start, dtype=torch.bfloat16)
        backends.sum_reference(parts[:, own], expected)
        compare.same(out[own], expected, f"large sum at {own.start}")


def devices(compare: Comparison, draw: Drawing, amount: float) -> None:
    """Each argument on another device than the others: the CPU, the current one, another one."""
    packing = Packing(4, 32)
    gradient, retained, out = torch.randn(2, 100), torch.randn(2, 100), torch.empty(100)
    wire = packing.empty(2, 100, gradient)
    error, new = (Packing(8, 32).empty(2, 100, gradient).zero_() for _ in range(2))
    now, before = (torch.randn(1, 100).bfloat16() for _ in range(2))
    tiles, row = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 3000, dtype=torch.uint8)
    cases: dict[str, tuple[tuple[Tensor, ...], tuple[Any, ...]]] = {
        "loco_compress": ((gradient, wire, error, new), (4, 32, 0.8, 1.0, False)),
        "loco_decompress": ((wire, out), (4, 32, 1.0, False)),
        "loco_difference": ((gradient, retained, wire), (4, 32)),
        "loco_apply": ((wire, retained), (4, 32)),
        "lossless_measure": ((now, before, tiles), ()),
        "lossless_pack": ((now, before, tiles, row), ()),
        "lossless_apply": ((row, now), ()),
        "sum_parts": ((gradient, out), ()),
    }
    for device, (name, (tensors, scalars)) in itertools.product((-1, 0, 2), cases.items()):
        for number, tensor in enumerate(tensors):
            with compare.emulator.placed(tensor, device):
                compare.check(
                    _refused(compare, name, (*tensors, *scalars)), f"{name}: argument {number} on {device} is taken"
                )
    compare.check(compare.emulator.current_device() == 0, "another device is the current one afterwards")


def _refused(compare: Comparison, name: str, arguments: Sequence[Any]) -> bool:
    try:
        compare.emulator.kernels[name](*arguments)
    except RuntimeError as error:
        return "must be on the device" in str(error)
    return False
