# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Compares LoCo's kernels with the reference, bit for bit, on the current device."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.loco import lossless, ops, reference
from deepspeed_ext.loco.reference import Packing
from deepspeed_ext.tools.doctor.findings import Finding, Level, by_value, ranks_text
from deepspeed_ext.tools.doctor.launch import Answers, Check, Launch

_WIDTH = 4133  # no multiple of a block or of a vector
_BUILD_SECONDS = 600.0  # time limit that includes compilation at first use
_BETA, _FACTOR = 0.8, 1 / 3
_PARTS = {("loco_compress", 1): ": quantized gradients", ("loco_compress", 3): ": error feedback"}  # by argument
_Case = tuple[str, str, Callable[..., Any], tuple[Any, ...]]  # operator, description, reference, arguments


def _examine(launch: Launch) -> dict[str, Any]:
    from deepspeed.accelerator import get_accelerator

    device = "cpu" if get_accelerator().is_synchronized_device() else get_accelerator().current_device_name()
    ops.load_kernels()
    present = ops.has_kernels(device.partition(":")[0].upper())
    wrong = differing_operators(torch.ops.deepspeed_paro, device) if present else []
    return {"device": device, "kernels": present, "wrong": wrong}


def differing_operators(operators: Any, device: str) -> list[str]:
    """Return the names of operators that differ from the reference, each with the first such case.

    Args:
        operators: namespace of the operators, such as ``torch.ops.deepspeed_paro``.
        device: device of the operators; the reference runs on the CPU.
    """
    wrong: dict[str, str] = {}
    for name, case, oracle, arguments in (*_gradients_and_updates(), *_lossless_updates()):
        expected, actual = (
            [value.clone().to(target) if isinstance(value, Tensor) else value for value in arguments]
            for target in ("cpu", device)
        )
        oracle(*expected)  # both write into their arguments, hence the clones
        getattr(operators, name)(*actual)
        for position, pair in enumerate(zip(expected, actual, strict=True)):
            if isinstance(pair[0], Tensor) and not torch.equal(*map(_bits, pair)):
                wrong.setdefault(name + _PARTS.get((name, position), ""), case)
    return [f"{name} ({case})" for name, case in wrong.items()]


def _gradients_and_updates() -> Iterator[_Case]:
    """Yield cases of LoCo's operators. The reference writes their inputs, so no case depends on another operator."""
    for dtype, packing, hadamard in product(ops.DTYPES, (Packing(4, 128), Packing(8, 256)), (False, True)):
        bits, block = sizes = packing.bits, packing.block_size
        case = f"{dtype}, {bits} bits, blocks of {block}{', Hadamard' * hadamard}"
        error = torch.zeros(3, Packing(8, block).row_bytes(_WIDTH), dtype=torch.uint8)
        wire, empty = packing.empty(3, _WIDTH, error), packing.empty(3, _WIDTH, error)
        settings = *sizes, _BETA, 2.0, hadamard
        reference.compress(_numbers(dtype, 2), wire, None, error, *settings)
        gradient, out = _numbers(dtype, 1), torch.zeros(_WIDTH, dtype=dtype)
        yield "loco_compress", case, reference.compress, (gradient, empty, error, torch.zeros_like(error), *settings)
        yield "loco_decompress", case, reference.decompress, (wire, out, *sizes, _FACTOR, hadamard)
        if not hadamard:
            updated, params = _numbers(dtype, 3), _numbers(dtype, 4)
            difference = packing.empty(3, _WIDTH, updated)
            reference.difference(updated, params, difference, *sizes)
            yield "loco_difference", case, reference.difference, (updated, params, empty, *sizes)
            yield "loco_apply", case, reference.apply, (difference, params, *sizes)


def _lossless_updates() -> Iterator[_Case]:
    for dtype in ops.LOSSLESS_DTYPES:
        params = _numbers(dtype, 5).view(1, -1)
        updated = params.clone()
        updated[:, ::3] *= 1 + 2**-7  # most differences are small, as in a training step
        tiles = torch.zeros(lossless.tiles_of(params.shape[-1]), dtype=torch.int32)
        yield "lossless_measure", str(dtype), lossless.measure, (updated, params, tiles.clone())
        lossless.measure(updated, params, tiles)
        header, nbytes = lossless.header_of(tiles)
        wire = torch.zeros(1, int(nbytes) + 16, dtype=torch.uint8)
        yield "lossless_pack", str(dtype), lossless.pack, (updated, params, header, wire.clone())
        lossless.pack(updated, params, header, wire)
        yield (
            "lossless_apply",
            str(dtype),
            lambda _, restored, updated=updated: restored.copy_(updated),
            (wire, params),
        )


def _numbers(dtype: torch.dtype, seed: int) -> Tensor:
    """Return (3, width): random rows of several magnitudes, with zeros, subnormals, maxima, NaN, infinity."""
    numbers = torch.randn(3, _WIDTH, generator=torch.Generator().manual_seed(seed))
    numbers = numbers * torch.tensor([[1.0], [1e-3], [300.0]])
    info = torch.finfo(dtype)
    edges = [0.0, -0.0, info.tiny, info.smallest_normal / 4, info.max, -info.max, 7.0, 6.5, 0.5, -0.5]
    numbers[0, 256 : 256 + len(edges)] = torch.tensor(edges)  # starts at a block boundary of all block sizes
    numbers[1, 512:768] = 0.0
    numbers[2, 1024], numbers[2, 2048] = float("nan"), float("-inf")
    return numbers.to(dtype)


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor on the CPU; all NaN bit patterns are made equal."""
    if tensor.dtype.is_floating_point:
        tensor = torch.where(tensor.isnan(), torch.nan, tensor)
    return tensor.cpu().contiguous().view(torch.uint8)


def judge(answers: Answers, launch: Launch) -> list[Finding]:
    """Return findings on wrong, missing, and correct kernels."""
    findings = []
    wrong = by_value({rank: name for rank, answer in answers.items() for name in answer["wrong"][:1]})
    for first, ranks in wrong.items():
        names = ", ".join(answers[ranks[0]]["wrong"])
        text = f"results differ from the reference on {ranks_text(ranks)} ({launch.hosts[ranks[0]]}): {names}"
        advice = "Train without LoCo there. Rebuild the kernels; if that does not help, suspect the device."
        findings.append(Finding(first.split(" (")[0], Level.WRONG, text, advice))
    absent = [rank for rank, answer in answers.items() if not answer["kernels"]]
    refused = [rank for rank in absent if answers[rank]["device"].startswith("cuda") and ops.has_kernels("CPU")]
    if refused:
        text = f"those of {ranks_text(refused)} were built without nvcc, and are refused on a GPU"
        findings.append(Finding("LoCo's kernels", Level.WRONG, text, ops.BUILD_ADVICE))
    elif absent:
        text = f"none on {ranks_text(absent)}: plain PyTorch computes the same results, more slowly"
        findings.append(Finding("LoCo's kernels", Level.LOOK, text, "See the compiler section above."))
    good = [rank for rank, answer in answers.items() if answer["kernels"] and not answer["wrong"]]
    if good:
        text = f"bitwise equal to the reference on {ranks_text(good)} ({answers[good[0]]['device']})"
        findings.append(Finding("LoCo's kernels", Level.OK, text))
    return findings


KERNELS = Check(_examine, judge, least_seconds=_BUILD_SECONDS)
