# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Bytes and 32-byte sectors that each CUDA kernel moves, compared with the minimum, counted in the emulator.

    python -m tests.campaigns.kernels.traffic

As multiples of the minimum, at which each byte of an input is read once, and each byte of an output is written once:

bytes: bytes read and written. Bytes that the lanes of a warp read together count once.
to L1: sectors that accesses of warps touch. Above the bytes are accesses that use parts of sectors.
to L2: of these, the sectors that pass an L1 that caches the reads of a thread block, and writes through.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from deepspeed_ext.loco import lossless, reference
from deepspeed_ext.op_builder import source_folder
from tests.campaigns.kernels.drawing import Drawing
from tests.harness.cuda_on_cpu import building
from tests.harness.cuda_on_cpu.arguments import Placed
from tests.harness.cuda_on_cpu.emulator import Emulator, Use

SECTOR = 32  # bytes
WIDTH = 4 * 4096  # elements: four tiles of gradients
BLOCK = 128
_BOTH = Use.READ | Use.WRITE


class Case(NamedTuple):
    """An operator with arguments of one row; aligned, as the package allocates them."""

    operator: str
    what: str
    arguments: Sequence[Any]

    @property
    def placed(self) -> list[Placed]:
        """The tensors among the arguments, once each."""
        return list({id(argument): argument for argument in self.arguments if isinstance(argument, Placed)}.values())

    def least(self, unit: int) -> int:
        """Return the minimum traffic, in units of this number of bytes."""
        uses = [(item, bool(item.use & Use.READ) + bool(item.use & Use.WRITE)) for item in self.placed]
        return sum(times * -(-item.view.nbytes // unit) for item, times in uses)


class Moved(NamedTuple):
    """Traffic of a case, as multiples of the minimum."""

    bytes: float
    to_l1: float  # sectors
    to_l2: float


def measure_traffic(emulator: Emulator, case: Case) -> Moved:
    """Run a case, which overwrites its outputs, in the checked build, and return its traffic."""
    emulator.set()
    before = emulator.counts()
    for item in case.placed:
        item.allow(emulator)
    try:
        with emulator.counted_traffic():
            emulator.kernels[case.operator](*(arg.view if isinstance(arg, Placed) else arg for arg in case.arguments))
    finally:
        emulator.forget()
    now = emulator.counts()
    moved_bytes = now.read - before.read + now.written - before.written
    stored = now.written_sectors - before.written_sectors
    requested = now.read_sectors - before.read_sectors + stored
    fetched = now.fetched_sectors - before.fetched_sectors + stored
    least, least_sectors = case.least(1), case.least(SECTOR)
    return Moved(moved_bytes / least, requested / least_sectors, fetched / least_sectors)


def cases(draw: Drawing) -> Iterator[Case]:
    """Each operator for each width of its numbers; the kinds of errors; parameters that change little and much."""
    for dtype in (torch.bfloat16, torch.float32):
        yield from _gradients(dtype)
        yield from _differences(dtype)
    for kind in ("few", "most", "any"):
        yield from _lossless(draw, kind)


def _gradients(dtype: torch.dtype) -> Iterator[Case]:
    gradient = torch.randn(1, WIDTH).to(dtype)
    for bits in (4, 8):
        packing, settings = reference.Packing(bits, BLOCK), (bits, BLOCK, 0.8, 1024.0, True)
        sent = (Placed(gradient, Use.READ), _output(packing.empty(1, WIDTH, gradient)))
        yield Case("loco_compress", f"{_name(dtype)} to {bits} bits", (*sent, None, None, *settings))
        for retained in (torch.uint8, torch.float32) if bits == 4 else ():
            size = reference.Packing(8, BLOCK).row_bytes(WIDTH) if retained == torch.uint8 else WIDTH
            error = Placed(torch.zeros(1, size, dtype=retained), _BOTH)
            case = f"{_name(dtype)} to {bits} bits, error in {_name(retained)}"
            yield Case("loco_compress", case, (*sent, error, error, *settings))
        pieces = packing.empty(4, WIDTH, gradient)
        reference.compress(gradient.repeat(4, 1), pieces, None, None, bits, BLOCK, 0.0, 1.0, True)
        arguments = (Placed(pieces, Use.READ), _output(torch.zeros(WIDTH, dtype=dtype)), bits, BLOCK, 0.25, True)
        yield Case("loco_decompress", f"4 pieces of {bits} bits to {_name(dtype)}", arguments)

    numbers = torch.randn(4, WIDTH).to(dtype)
    yield Case("sum_parts", f"4 parts of {_name(dtype)}", (Placed(numbers, Use.READ), _output(numbers[0])))


def _differences(dtype: torch.dtype) -> Iterator[Case]:
    retained = torch.randn(1, WIDTH).to(dtype)
    updated = (retained.float() * 1.01).to(dtype)
    for bits in (4, 8):
        wire = reference.Packing(bits, BLOCK).empty(1, WIDTH, retained)
        reference.difference(updated, retained, wire, bits, BLOCK)
        sent = (Placed(updated, Use.READ), Placed(retained, Use.READ), _output(wire), bits, BLOCK)
        yield Case("loco_difference", f"{_name(dtype)} to {bits} bits", sent)
        arrived = (Placed(wire, Use.READ), Placed(retained, _BOTH), bits, BLOCK)
        yield Case("loco_apply", f"{bits} bits to {_name(dtype)}", arrived)


def _lossless(draw: Drawing, kind: str) -> Iterator[Case]:
    updated, retained = draw.parameters(kind, WIDTH, torch.bfloat16)
    tiles = torch.zeros(lossless.tiles_of(WIDTH), dtype=torch.int32)
    lossless.measure(updated, retained, tiles)
    header, size = lossless.header_of(tiles)
    wire = torch.zeros(1, int(size), dtype=torch.uint8)
    lossless.pack(updated, retained, header, wire)
    registered = Use(0) if kind == "any" else Use.READ  # parameters that change too much cross as they are
    sent = (Placed(updated, Use.READ), Placed(retained, registered))
    case = f"{8 * int(size) / WIDTH:.1f} bits an element"
    if kind == "few":
        yield Case("lossless_measure", "bfloat16", (*sent, _output(tiles)))
    yield Case("lossless_pack", case, (*sent, Placed(header, Use.READ), _output(wire)))
    yield Case("lossless_apply", case, (Placed(wire, Use.READ), Placed(retained, registered | Use.WRITE)))


def _output(values: torch.Tensor) -> Placed:
    return Placed(values, Use.WRITE, known=False)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def table(emulator: Emulator) -> str:
    lines = ["| operator | case | bytes | sectors to L1 | to L2 |", "|---|---|---|---|---|"]
    for case in cases(Drawing(0)):
        figures = " | ".join(f"{figure:.2f}" for figure in measure_traffic(emulator, case))
        lines.append(f"| `{case.operator}` | {case.what} | {figures} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Emulator(building.build_library(source_folder(), building.LIBRARIES, "checked"))))
