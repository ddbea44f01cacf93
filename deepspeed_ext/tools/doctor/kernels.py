# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""LoCo's kernels give the reference's bits on the device at hand, on random numbers and on those at the edge."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.loco import lossless, ops, reference
from deepspeed_ext.loco.packing import Packing
from deepspeed_ext.tools.doctor.check import Answers, Check
from deepspeed_ext.tools.doctor.findings import Finding, Level, by_value, ranks_text
from deepspeed_ext.tools.doctor.place import Place

_WIDTH = 4133  # no multiple of a block or of a vector
_BUILD_SECONDS = 600.0  # a compile at first use
_BETA, _FACTOR = 0.8, 1 / 3
_KINDS = tuple((packing, hadamard) for packing in (Packing(4, 128), Packing(8, 256)) for hadamard in (False, True))


def examine(place: Place) -> dict[str, Any]:
    """Load the kernels, which builds them if need be, and return which of them differ from the reference."""
    from deepspeed.accelerator import get_accelerator

    device = "cpu" if get_accelerator().is_synchronized_device() else get_accelerator().current_device_name()
    ops.load_kernels()
    if not ops.has_kernels(device.partition(":")[0].upper()):
        return {"device": device, "kernels": False, "wrong": []}
    return {"device": device, "kernels": True, "wrong": differing(torch.ops.deepspeed_paro, device)}


def differing(operators: Any, device: str) -> list[str]:
    """Return the names of operators that differ from the reference, with the case in which they first did.

    Args:
        operators: has them as attributes, as ``torch.ops.deepspeed_paro``.
        device: on which they run; the reference runs on the CPU.
    """
    wrong: dict[str, str] = {}
    for dtype in ops.DTYPES:
        for packing, hadamard in _KINDS:
            case = f"{dtype}, {packing.bits} bits, blocks of {packing.block_size}{', Hadamard' if hadamard else ''}"
            for name in _of_loco(operators, device, dtype, packing, hadamard):
                wrong.setdefault(name, case)
    for dtype in ops.LOSSLESS_DTYPES:
        for name in _of_lossless(operators, device, dtype):
            wrong.setdefault(name, str(dtype))
    return [f"{name} ({case})" for name, case in wrong.items()]


def judge(answers: Answers, place: Place) -> list[Finding]:
    """Return a finding for each way in which kernels are."""
    found = []
    wrong = by_value({rank: name for rank, answer in answers.items() for name in answer["wrong"][:1]})
    for first, ranks in wrong.items():
        names = ", ".join(answers[ranks[0]]["wrong"])
        said = f"other bits than the reference on {ranks_text(ranks)} ({place.hosts[ranks[0]]}): {names}"
        advice = "Train without LoCo there. Build the kernels anew; if that changes nothing, suspect the device."
        found.append(Finding(first.split(" (")[0], Level.WRONG, said, advice))
    absent = [rank for rank, answer in answers.items() if not answer["kernels"]]
    refused = [rank for rank in absent if answers[rank]["device"].startswith("cuda") and ops.has_kernels("CPU")]
    if refused:
        said = f"those of {ranks_text(refused)} were built without nvcc, and are refused on a GPU"
        found.append(Finding("LoCo's kernels", Level.WRONG, said, ops.BUILD_THEM))
    elif absent:
        said = f"none on {ranks_text(absent)}: plain PyTorch computes the same bits, more slowly"
        found.append(Finding("LoCo's kernels", Level.LOOK, said, "See what the compiler is missing above."))
    good = [rank for rank, answer in answers.items() if answer["kernels"] and not answer["wrong"]]
    if good:
        said = f"the reference's bits on {ranks_text(good)} ({answers[good[0]]['device']})"
        found.append(Finding("LoCo's kernels", Level.OK, said))
    return found


def numbers(dtype: torch.dtype, seed: int) -> Tensor:
    """Return (3, width): random rows of several sizes, with zeros, subnormals, the largest numbers, NaN, infinity."""
    found = torch.randn(3, _WIDTH, generator=torch.Generator().manual_seed(seed))
    found = found * torch.tensor([[1.0], [1e-3], [300.0]])
    info = torch.finfo(dtype)
    edges = [0.0, -0.0, info.tiny, info.smallest_normal / 4, info.max, -info.max, 7.0, 6.5, 0.5, -0.5]
    found[0, 256 : 256 + len(edges)] = torch.tensor(edges)  # in a block of their own
    found[1, 512:768] = 0.0
    found[2, 1024], found[2, 2048] = float("nan"), float("-inf")
    return found.to(dtype)


def _of_loco(operators: Any, device: str, dtype: torch.dtype, packing: Packing, hadamard: bool) -> Iterator[str]:
    """Yield operators with other bits. Each is given what the reference made, so none is blamed for another."""
    bits, block = packing.bits, packing.block_size
    gradient, old = numbers(dtype, 1), torch.zeros(3, Packing(8, block).row_bytes(_WIDTH), dtype=torch.uint8)
    reference.compress(numbers(dtype, 2), packing.empty(3, _WIDTH, old), None, old, bits, block, _BETA, 2.0, hadamard)
    wires, errors = _twice(packing.empty(3, _WIDTH, old)), _twice(torch.zeros_like(old))
    reference.compress(gradient, wires[0], old, errors[0], bits, block, _BETA, 2.0, hadamard)
    wire, error = wires[1].to(device), errors[1].to(device)
    operators.loco_compress(gradient.to(device), wire, old.to(device), error, bits, block, _BETA, 2.0, hadamard)
    if not _alike(wires[0], wire):
        yield "loco_compress: quantized gradients"
    if not _alike(errors[0], error):
        yield "loco_compress: error feedback"
    outs = _twice(torch.zeros(_WIDTH, dtype=dtype))
    reference.decompress(wires[0], outs[0], bits, block, _FACTOR, hadamard)
    out = outs[1].to(device)
    operators.loco_decompress(wires[0].to(device), out, bits, block, _FACTOR, hadamard)
    if not _alike(outs[0], out):
        yield "loco_decompress"
    if not hadamard:
        yield from _of_updates(operators, device, dtype, packing)


def _of_updates(operators: Any, device: str, dtype: torch.dtype, packing: Packing) -> Iterator[str]:
    updated, held = numbers(dtype, 3), numbers(dtype, 4)
    wires, afters = _twice(packing.empty(3, _WIDTH, updated)), _twice(held)
    reference.difference(updated, held, wires[0], packing.bits, packing.block_size)
    wire, after = wires[1].to(device), afters[1].to(device)
    operators.loco_difference(updated.to(device), held.to(device), wire, packing.bits, packing.block_size)
    if not _alike(wires[0], wire):
        yield "loco_difference"
    reference.apply(wires[0], afters[0], packing.bits, packing.block_size)
    operators.loco_apply(wires[0].to(device), after, packing.bits, packing.block_size)
    if not _alike(afters[0], after):
        yield "loco_apply"


def _of_lossless(operators: Any, device: str, dtype: torch.dtype) -> Iterator[str]:
    held = numbers(dtype, 5).view(1, -1)
    updated = held.clone()
    updated[:, ::3] *= 1 + 2**-7  # most differences are small, as those of a step
    count = lossless.tiles_of(held.shape[-1])
    tiles = _twice(torch.zeros(count, dtype=torch.int32))
    lossless.measure(updated, held, tiles[0])
    found = tiles[1].to(device)
    operators.lossless_measure(updated.to(device), held.to(device), found)
    if not _alike(tiles[0], found):
        yield "lossless_measure"
    header, nbytes = lossless.header_of(tiles[0])
    wires = _twice(torch.zeros(1, int(nbytes) + 16, dtype=torch.uint8))
    lossless.pack(updated, held, header, wires[0])
    wire = wires[1].to(device)
    operators.lossless_pack(updated.to(device), held.to(device), header.to(device), wire)
    if not _alike(wires[0], wire):
        yield "lossless_pack"
    after = held.clone().to(device)
    operators.lossless_apply(wires[0].to(device), after)
    if not _alike(updated, after):
        yield "lossless_apply"


def _twice(tensor: Tensor) -> tuple[Tensor, Tensor]:
    return tensor.clone(), tensor.clone()


def _alike(expected: Tensor, found: Tensor) -> bool:
    """Return whether all bits are; NaNs, of which torch has several, count as one."""
    pair = [_one_nan(tensor.cpu()).contiguous().view(torch.uint8) for tensor in (expected, found)]
    return torch.equal(*pair)


def _one_nan(tensor: Tensor) -> Tensor:
    return torch.where(tensor.isnan(), torch.nan, tensor) if tensor.dtype.is_floating_point else tensor


CHECK = Check("LoCo's kernels", examine, judge, least_seconds=_BUILD_SECONDS)
