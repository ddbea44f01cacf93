# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Compares LoCo's operators with the time of their memory traffic, and with plain PyTorch.

The floor is the necessary traffic: each argument is read once, each result written once. In bytes for each element,
with gradients or parameters of g bytes, b bits on the wire and blocks of n, an error in 8 bits, and k pieces:

    compress    g + b/8 + 1 + 1 + (2 + 2 + 2)/n     gradient, wire, old and new error, and their scales
    decompress  k (b/8 + 2/n) + g                   wire with its scales, result
    difference  2 g + b/8 + 2/n                     updated parameter, replica, wire with its scales
    apply       b/8 + 2/n + 2 g                     wire with its scales, replica, read and written

Each operator takes turns with a copy of the same number of bytes, and with the same arithmetic in plain PyTorch
(``deepspeed_ext.loco.reference``), which is slow and has fewer turns. Each number is the median of the repetitions.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepspeed_ext.loco import ops, reference
from tests.perf.lib import records

BLOCK = 128
PIECES = 4
CHANGE = 1e-2  # of a parameter in a step
BETA = 0.8
MIB = 2**20
PYTORCH_TURNS = 3
CALLS = 10  # of one sample on a GPU: launches take longer than a small kernel
CALLS_HEAD_START = 5_000_000  # cycles of the GPU, in which the host launches them
ERROR = reference.Packing(8, BLOCK)


@dataclass(frozen=True)
class Case:
    """One operator with one set of options."""

    operator: str
    dtype: torch.dtype
    bits: int
    hadamard: bool = False

    @property
    def packing(self) -> reference.Packing:
        return reference.Packing(self.bits, BLOCK)

    @property
    def name(self) -> str:
        options = " hadamard" if self.hadamard else ""
        return f"{self.operator} {str(self.dtype).removeprefix('torch.')} int{self.bits}{options}"

    def floor(self, numel: int) -> int:
        """Return the bytes that must be read and written, see above, with padding of the last block and the row."""
        own, wire = numel * self.dtype.itemsize, self.packing.row_bytes(numel)
        if self.operator in ("difference", "apply"):
            rows = PIECES if self.operator == "apply" else 1
            return 2 * own + rows * self.packing.row_bytes(numel // rows)
        return own + wire + 2 * ERROR.row_bytes(numel) if self.operator == "compress" else PIECES * wire + own


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BF16 = torch.bfloat16
_GRADIENTS = (*((dtype, 4, False) for dtype in DTYPES), (_BF16, 8, False), (_BF16, 4, True))
CASES = (
    *(Case(operator, *options) for operator in ("compress", "decompress") for options in _GRADIENTS),
    *(Case(name, dtype, bits) for name in ("difference", "apply") for bits in (4, 8) for dtype in DTYPES),
)


def calls_of(case: Case, numel: int, device: str) -> dict[str, Callable[[], Any]]:
    """Return the timed functions: the operator, plain PyTorch on the same arguments, and the copy."""
    packing, rotate = case.packing, case.hadamard
    half = torch.empty(case.floor(numel) // 2, dtype=torch.uint8, device=device).zero_()
    other_half = half.clone()
    calls: dict[str, Callable[[], Any]] = {"copy": lambda: other_half.copy_(half)}
    numbers = torch.randn(1, numel, device=device).to(case.dtype)
    if case.operator == "compress":
        wire, error = packing.empty(1, numel, numbers), ERROR.empty(1, numel, numbers).zero_()
        options = {"error": error, "new_error": error, "beta": BETA, "hadamard": rotate}
        arguments = (numbers, wire, error, error, case.bits, BLOCK, BETA, 1.0, rotate)
        calls["operator"] = lambda: ops.compress(numbers, wire, packing, **options)
        calls["pytorch"] = lambda: reference.compress(*arguments)
    elif case.operator == "difference":
        wire, updated = packing.empty(1, numel, numbers), numbers + CHANGE * torch.randn_like(numbers)
        calls["operator"] = lambda: ops.difference(updated, numbers, wire, packing)
        calls["pytorch"] = lambda: reference.difference(updated, numbers, wire, case.bits, BLOCK)
    elif case.operator == "apply":
        replica = numbers.view(PIECES, -1)
        wire = packing.empty(PIECES, replica.shape[1], numbers)
        ops.difference(replica + CHANGE * torch.randn_like(replica), replica, wire, packing)
        calls["operator"] = lambda: ops.apply(wire, replica, packing)
        calls["pytorch"] = lambda: reference.apply(wire, replica, case.bits, BLOCK)
    else:
        wire, out = packing.empty(PIECES, numel, numbers), torch.empty_like(numbers[0])
        for piece in wire:
            ops.compress(numbers, piece.view(1, -1), packing, hadamard=rotate)
        calls["operator"] = lambda: ops.decompress(wire, out, packing, 1 / PIECES, rotate)
        calls["pytorch"] = lambda: reference.decompress(wire, out, case.bits, BLOCK, 1 / PIECES, rotate)
    return calls


def seconds_of(call: Callable[[], Any], device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(CALLS_HEAD_START)
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / CALLS


def measure(case: Case, mib: int, device: str, repetitions: int) -> dict[str, Any]:
    numel = mib * MIB // case.dtype.itemsize
    calls = calls_of(case, numel, device)
    for call in calls.values():
        call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repetitions):
        for name, call in calls.items():
            if name != "pytorch" or turn < PYTORCH_TURNS:
                samples[name].append(seconds_of(call, device))
    median = {name: statistics.median(times) for name, times in samples.items()}
    floor = case.floor(numel)
    return {
        **({"hardware": torch.cuda.get_device_name()} if device == "cuda" else {}),
        "threads": torch.get_num_threads(),
        "kernels": ops.has_kernels(device.upper()),
        "case": case.name,
        "mib": mib,
        "elements": numel,
        "floor_bytes": floor,
        "repetitions": repetitions,
        **{
            f"{prefix}seconds{suffix}": of(samples[name])
            for name, prefix in (("operator", ""), ("copy", "copy_"), ("pytorch", "pytorch_"))
            for suffix, of in (("", statistics.median), ("_min", min), ("_max", max))
        },
        "gb_per_s": floor / median["operator"] / 1e9,
        "copy_gb_per_s": floor / median["copy"] / 1e9,
        "of_copy_bandwidth": median["copy"] / median["operator"],
        "times_faster_than_pytorch": median["pytorch"] / median["operator"],
    }


SHOWN = ("case", "mib", "seconds", "copy_seconds", "gb_per_s", "of_copy_bandwidth", "times_faster_than_pytorch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 256], help="sizes of the gradient or the result")
    parser.add_argument("--operators", nargs="+", default=sorted({case.operator for case in CASES}), metavar="NAME")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    parser.add_argument("--csv", type=Path, help="file to append the rows to")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    ops.load_kernels()
    cases = [(case, mib) for mib in arguments.mib for case in CASES if case.operator in arguments.operators]
    rows = [measure(case, mib, arguments.device, arguments.repetitions) for case, mib in cases]
    records.report(rows, arguments.csv, SHOWN)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
