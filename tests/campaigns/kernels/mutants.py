# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Faults of the CUDA kernels, one at a time: each must be found, or the emulator proves nothing.

    python -m tests.campaigns.kernels.mutants             all of them, some minutes
    python -m tests.campaigns.kernels.mutants 0 5         two of them

Exit status: 1 if one is not found.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from scripts import ROOT
from tests.harness.cuda_on_cpu.building import LIBRARIES

SOURCES = ROOT / "csrc" / "loco"
# Of a case that differs, of a sanitizer, and of a launch that fails where no comparison catches it.
_FOUND = re.compile(
    r"FAILED .*|.*ERROR: AddressSanitizer.*|.*runtime error: .*|RuntimeError: (CUDA error |\w+_tile, block ).*"
)
_LIMIT = 600.0  # seconds of one


class Fault(NamedTuple):
    """A text that occurs once in a source, and its replacement; the build and section that must find it."""

    file: str
    old: str
    new: str
    build: str
    section: str


_BARRIER = "  __syncthreads();\n"
_TILES = (
    "  if (aligned && left >= (kCount - 1) * kHalfChunk + kRun) {\n"
    "#pragma unroll\n    for (int r = 0; r < kCount; ++r) runs[r]"
)
# By file, build and section: barriers and guards that are missing, threads that leave early, wrong lanes, indices,
# roundings and orders of sums, and launches with wrong bounds, devices, streams or checks.
_FAULTS: dict[tuple[str, str, str], list[tuple[str, str]]] = {
    ("cuda_block.h", "plain", "compress"): [
        (_BARRIER + "#pragma unroll 1", "#pragma unroll 1"),
        (
            "for (int apart = 1; apart < kWarp; apart *= 2) {\n    if (apart < threads)",
            "for (int apart = 2; apart < kWarp; apart *= 2) {\n    if (apart < threads)",
        ),
        ("at.element < at.padded;", "at.element <= at.padded;"),
        ("  inverse = __fmaf_rn(-__fmaf_rn(as_float(step), inverse, -1.0f), inverse, inverse);\n", ""),
        ("(as_bits(exact) + 0xffffu) & 0xffff0000u", "(as_bits(exact) + 0x8000u) & 0xffff0000u"),
        ("__fmaf_rn(__fmaf_rn(-kLargest<kBits>, near, value), kInverse, near)", "near"),
    ],
    ("cuda_block.h", "checked", "differences"): [(_BARRIER + "#pragma unroll 1", "#pragma unroll 1")],
    ("loco_cuda.cu", "checked", "compress"): [("    __syncwarp();\n", ""), ("shared[1]));", "shared[0]));")],
    ("lossless_cuda.cu", "plain", "modes"): [
        (_BARRIER + "  const int own", "  const int own"),
        (_BARRIER + "  for (int unit", "  for (int unit"),
        (_BARRIER + "  if (threadIdx.x != 0)", "  if (threadIdx.x != 0)"),
        ("  if (threadIdx.x < kNibbleUnits / 2) nibbles[threadIdx.x] = 0;", ""),
        (
            "  uint32_t changed = 0, far = 0;",
            "  if (element_of(0) >= count) return;\n  uint32_t changed = 0, far = 0;",
        ),
        ("if (lane() >= apart) sum += before;", "if (lane() > apart) sum += before;"),
        ("__shfl_sync(kAllLanes, sum, kSegments - 1)", "__shfl_sync(kAllLanes, sum, kSegments - 2)"),
        ("const int half = lane() / 2 % 2 * 16;", "const int half = lane() % 2 * 16;"),
        ("(1u << lane()) - 1", "(2u << lane()) - 1"),
        ("  STD_CUDA_CHECK(cudaMemsetAsync(job.wire, 0, job.units * sizeof(job.wire[0]), stream));\n", ""),
        ("  const torch::stable::accelerator::DeviceGuard guard(held.get_device_index());\n", ""),
    ],
    ("lossless_cuda.cu", "checked", "modes"): [
        (
            "escapes = rank_all(escaped, escape, escaped_of);\n  const int behind",
            "escapes = rank_all(escaped, escape, picked_of);\n  const int behind",
        ),
        (
            "atomicOr(&nibbles[place[i] / 8], static_cast<uint32_t>(nibble_of<kInPairs>(d[i])) << (place[i] % 8 * 4))",
            "nibbles[place[i] / 8] |= static_cast<uint32_t>(nibble_of<kInPairs>(d[i])) << (place[i] % 8 * 4)",
        ),
        ("element_of(i) < count ? from", "element_of(i) <= count ? from"),
        ("if (behind + escapes > room) return;", ""),
        ("if (element_of(i) >= count) continue;", "if (element_of(i) > count) continue;"),
    ],
    ("loco_cuda.cu", "plain", "decompress"): [
        ("  float total[kRuns][kRun];\n", "  if (!at.inside) return;\n  float total[kRuns][kRun];\n"),
        ("const uint32_t minus = threadIdx.x << 31;", "const uint32_t minus = threadIdx.x << 30;"),
        ("first + i < pieces) batch[i].add_to(total)", "first + i < pieces) batch[kBatch - 1 - i].add_to(total)"),
        ("= -0.0f;  // what", "= 0.0f;  // what"),
    ],
    ("loco_cuda.cu", "plain", "compress"): [
        ("__shfl_xor_sync(kAllLanes, own, 1)", "__shfl_xor_sync(kAllLanes, own, 2)"),
        (
            "__fmaf_rn(sum(kRounding, -grid[i]), scale.step, h[r][i])",
            "sum(product(sum(kRounding, -grid[i]), scale.inverse), h[r][i])",
        ),
        ("  STD_CUDA_KERNEL_LAUNCH_CHECK();\n}\n\nvoid decompress", "}\n\nvoid decompress"),
    ],
    ("cuda_block.h", "checked", "compress"): [
        ("shared[(warp & -warps) + i]", "shared[warp + i]"),
        ("% kAlignment == 0; }", "% 8 == 0; }"),
    ],
    ("cuda_block.h", "plain", "differences"): [
        ("  for (int i = 1; i <= padding; ++i)", "  for (int i = 1; i < padding; ++i)"),
        ("at.begin >> log_block;", "(at.begin >> log_block) + 1;"),
        ("(width + kTile - 1) / kTile", "width / kTile"),
    ],
    ("lossless_cuda.cu", "address", "strange"): [
        ("if (room < behind + escapes) return false;", "if (room < behind - escapes) return false;")
    ],
    ("cuda_runs.h", "address", "differences"): [(_TILES, _TILES.replace("(kCount - 1) * kHalfChunk + ", ""))],
    ("cuda_runs.h", "checked", "differences"): [(_TILES, _TILES.replace("(kCount - 1) * kHalfChunk + ", ""))],
    ("cuda_block.h", "address", "compress"): [("% kAlignment == 0; }", "% 8 == 0; }")],
    ("loco_cuda.cu", "plain", "rows"): [
        ("  if (at.row >= job.rows) return;  // the same for the whole thread block\n", "")
    ],
    ("difference_cuda.cu", "plain", "rows"): [
        ("  if (at.row >= job.rows) return;  // the same for the whole thread block\n", ""),
        ("at.row >= job.rows || !at.inside", "!at.inside"),
    ],
    ("cuda_block.h", "plain", "rows"): [
        ("constexpr int64_t kMostRows = 65535;", "constexpr int64_t kMostRows = 1 << 20;")
    ],
    ("lossless_cuda.cu", "plain", "rows"): [
        ("constexpr int64_t kMostRows = 65535;", "constexpr int64_t kMostRows = 65536;"),
        ("  if (row >= job.rows) return;  // the same for the whole thread block\n", ""),
    ],
    ("cuda_block.h", "plain", "large"): [
        ("static_cast<int64_t>(blockIdx.x) * kTile", "static_cast<int>(blockIdx.x * kTile)")
    ],
    ("lossless_cuda.cu", "plain", "large"): [
        ("job.wire + row * job.units;", "job.wire + static_cast<int>(row * job.units);")
    ],
    ("sum_cuda.cu", "plain", "sums"): [
        ("sum(to, number<kType>(parts[i][", "sum(to, number<kType>(parts[kLoaded<kType> - 1 - i]["),
        ("= -0.0f;  // what", "= 0.0f;  // what"),
        ("if (first + i >= job.count) break;", "if (first + i > job.count) break;"),
        ("is_aligned(job.out) && ", ""),
    ],
    ("difference_cuda.cu", "plain", "differences"): [("= current_stream(updated);", "= nullptr;")],
    ("difference_cuda.cu", "plain", "devices"): [('  check_device(held, updated, "what is held");\n', "")],
}
FAULTS = tuple(
    Fault(file, old, new, build, section) for (file, build, section), faults in _FAULTS.items() for old, new in faults
)


def find_fault(fault: Fault, libraries: Path) -> str:
    """Return the line that reports a fault; empty if it is not found. ``libraries``: the folder of objects."""
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder, "loco")
        shutil.copytree(SOURCES, sources)
        path = sources / fault.file
        text = path.read_text(encoding="utf-8")
        if text.count(fault.old) != 1:
            raise ValueError(f"expected {fault.old!r} once in {fault.file}, got it {text.count(fault.old)} times")
        path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
        command = [sys.executable, "-m", "tests.campaigns.kernels"]
        command += ["--sources", str(sources), "--libraries", str(libraries)]
        command += ["--build", fault.build, "--only", fault.section, "--amount", "0.02", "--first"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=_LIMIT)
    messages = [line for line in (done.stdout + done.stderr).splitlines() if _FOUND.fullmatch(line)]
    if done.returncode < 0:  # an address that nothing is at
        messages.append(f"ended by signal {-done.returncode}")
    if done.returncode and not messages:
        raise RuntimeError(done.stderr[-3000:])
    return messages[0] if done.returncode else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, help="of the faults; default: all")
    parser.add_argument("--libraries", type=Path, default=LIBRARIES, help="where objects are kept")
    arguments = parser.parse_args()
    numbers = arguments.numbers or range(len(FAULTS))
    missed = []
    for number in numbers:
        fault = FAULTS[number]
        try:
            messages = find_fault(fault, arguments.libraries)
        except (RuntimeError, ValueError) as error:  # it does not compile, or its text is not there: no fault
            print(error)
            messages = ""
        missed += [] if messages else [number]
        print(f"{number:3} {fault.file:18} {fault.build:8} {messages[:200] or 'NOT FOUND'}", flush=True)
    print(f"{len(numbers) - len(missed)} of {len(numbers)} found" + "".join(f", not {number}" for number in missed))
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
