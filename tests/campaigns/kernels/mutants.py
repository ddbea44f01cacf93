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
    """A text of a source, once in it, and what stands in its place; which build and section must find it."""

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
FAULTS = (
    # A barrier, or what it orders, is left out.
    Fault("cuda_block.h", _BARRIER + "#pragma unroll 1", "#pragma unroll 1", "plain", "compress"),
    Fault("cuda_block.h", _BARRIER + "#pragma unroll 1", "#pragma unroll 1", "checked", "differences"),
    Fault("loco_cuda.cu", "    __syncwarp();\n", "", "checked", "compress"),
    Fault("loco_cuda.cu", "shared[1]));", "shared[0]));", "checked", "compress"),
    Fault("lossless_cuda.cu", _BARRIER + "  const int own", "  const int own", "plain", "modes"),
    Fault("lossless_cuda.cu", _BARRIER + "  for (int unit", "  for (int unit", "plain", "modes"),
    Fault("lossless_cuda.cu", _BARRIER + "  if (threadIdx.x != 0)", "  if (threadIdx.x != 0)", "plain", "modes"),
    Fault("lossless_cuda.cu", "  if (threadIdx.x < kNibbleUnits / 2) nibbles[threadIdx.x] = 0;", "", "plain", "modes"),
    Fault(
        "lossless_cuda.cu",
        "escapes = rank_all(escaped, escape, escaped_of);\n  const int behind",
        "escapes = rank_all(escaped, escape, picked_of);\n  const int behind",
        "checked",
        "modes",
    ),
    Fault(
        "lossless_cuda.cu",
        "atomicOr(&nibbles[place[i] / 8], static_cast<uint32_t>(nibble_of<kInPairs>(d[i])) << (place[i] % 8 * 4));",
        "nibbles[place[i] / 8] |= static_cast<uint32_t>(nibble_of<kInPairs>(d[i])) << (place[i] % 8 * 4);",
        "checked",
        "modes",
    ),
    # Some threads leave before others wait for them.
    Fault(
        "loco_cuda.cu",
        "  float total[kRuns][kRun];\n",
        "  if (!at.inside) return;\n  float total[kRuns][kRun];\n",
        "plain",
        "decompress",
    ),
    Fault(
        "lossless_cuda.cu",
        "  uint32_t changed = 0, far = 0;",
        "  if (element_of(0) >= count) return;\n  uint32_t changed = 0, far = 0;",
        "plain",
        "modes",
    ),
    # A wrong lane, or a wrong one of its neighbors.
    Fault(
        "cuda_block.h",
        "for (int apart = 1; apart < kWarp; apart *= 2) {\n    if (apart < threads)",
        "for (int apart = 2; apart < kWarp; apart *= 2) {\n    if (apart < threads)",
        "plain",
        "compress",
    ),
    Fault(
        "loco_cuda.cu", "__shfl_xor_sync(kAllLanes, own, 1)", "__shfl_xor_sync(kAllLanes, own, 2)", "plain", "compress"
    ),
    Fault(
        "loco_cuda.cu",
        "const uint32_t minus = threadIdx.x << 31;",
        "const uint32_t minus = threadIdx.x << 30;",
        "plain",
        "decompress",
    ),
    Fault(
        "lossless_cuda.cu",
        "if (lane() >= apart) sum += before;",
        "if (lane() > apart) sum += before;",
        "plain",
        "modes",
    ),
    Fault(
        "lossless_cuda.cu",
        "__shfl_sync(kAllLanes, sum, kSegments - 1)",
        "__shfl_sync(kAllLanes, sum, kSegments - 2)",
        "plain",
        "modes",
    ),
    Fault(
        "lossless_cuda.cu",
        "const int half = lane() / 2 % 2 * 16;",
        "const int half = lane() % 2 * 16;",
        "plain",
        "modes",
    ),
    # A wrong index, or one more or less.
    Fault("cuda_block.h", "shared[(warp & -warps) + i]", "shared[warp + i]", "checked", "compress"),
    Fault(
        "cuda_block.h",
        "  for (int i = 1; i <= padding; ++i)",
        "  for (int i = 1; i < padding; ++i)",
        "plain",
        "differences",
    ),
    Fault("cuda_block.h", "at.element < at.padded;", "at.element <= at.padded;", "plain", "compress"),
    Fault("cuda_block.h", "at.begin >> log_block;", "(at.begin >> log_block) + 1;", "plain", "differences"),
    Fault("cuda_block.h", "(width + kTile - 1) / kTile", "width / kTile", "plain", "differences"),
    Fault("lossless_cuda.cu", "element_of(i) < count ? from", "element_of(i) <= count ? from", "checked", "modes"),
    Fault("lossless_cuda.cu", "(1u << lane()) - 1", "(2u << lane()) - 1", "plain", "modes"),
    Fault(
        "lossless_cuda.cu",
        "if (room < behind + escapes) return false;",
        "if (room < behind - escapes) return false;",
        "address",
        "strange",
    ),
    Fault("lossless_cuda.cu", "if (behind + escapes > room) return;", "", "checked", "modes"),
    Fault(
        "lossless_cuda.cu",
        "if (element_of(i) >= count) continue;",
        "if (element_of(i) > count) continue;",
        "checked",
        "modes",
    ),
    Fault("cuda_runs.h", _TILES, _TILES.replace("(kCount - 1) * kHalfChunk + ", ""), "address", "differences"),
    Fault("cuda_runs.h", _TILES, _TILES.replace("(kCount - 1) * kHalfChunk + ", ""), "checked", "differences"),
    Fault("cuda_block.h", "% kAlignment == 0; }", "% 8 == 0; }", "address", "compress"),
    Fault("cuda_block.h", "% kAlignment == 0; }", "% 8 == 0; }", "checked", "compress"),
    # A wrong rounding, or another order of sums.
    Fault(
        "cuda_block.h",
        "  inverse = __fmaf_rn(-__fmaf_rn(as_float(step), inverse, -1.0f), inverse, inverse);\n",
        "",
        "plain",
        "compress",
    ),
    Fault(
        "cuda_block.h",
        "(as_bits(exact) + 0xffffu) & 0xffff0000u",
        "(as_bits(exact) + 0x8000u) & 0xffff0000u",
        "plain",
        "compress",
    ),
    Fault(
        "cuda_block.h",
        "__fmaf_rn(__fmaf_rn(-kLargest<kBits>, near, value), kInverse, near)",
        "near",
        "plain",
        "compress",
    ),
    Fault(
        "loco_cuda.cu",
        "__fmaf_rn(sum(kRounding, -grid[i]), scale.step, h[r][i])",
        "sum(product(sum(kRounding, -grid[i]), scale.inverse), h[r][i])",
        "plain",
        "compress",
    ),
    Fault(
        "loco_cuda.cu",
        "first + i < pieces) batch[i].add_to(total)",
        "first + i < pieces) batch[kBatch - 1 - i].add_to(total)",
        "plain",
        "decompress",
    ),
    Fault("loco_cuda.cu", "= -0.0f;  // what", "= 0.0f;  // what", "plain", "decompress"),
    # Launches: rows and elements that are too many, devices, streams, errors that nobody asks for.
    Fault(
        "loco_cuda.cu",
        "  if (at.row >= job.rows) return;  // the same for the whole thread block\n",
        "",
        "plain",
        "rows",
    ),
    Fault(
        "cuda_block.h",
        "constexpr int64_t kMostRows = 65535;",
        "constexpr int64_t kMostRows = 1 << 20;",
        "plain",
        "rows",
    ),
    Fault(
        "lossless_cuda.cu",
        "constexpr int64_t kMostRows = 65535;",
        "constexpr int64_t kMostRows = 65536;",
        "plain",
        "rows",
    ),
    Fault(
        "cuda_block.h",
        "static_cast<int64_t>(blockIdx.x) * kTile",
        "static_cast<int>(blockIdx.x * kTile)",
        "plain",
        "large",
    ),
    Fault(
        "lossless_cuda.cu",
        "job.wire + row * job.units;",
        "job.wire + static_cast<int>(row * job.units);",
        "plain",
        "large",
    ),
    Fault(
        "lossless_cuda.cu",
        "  STD_CUDA_CHECK(cudaMemsetAsync(job.wire, 0, job.units * sizeof(job.wire[0]), stream));\n",
        "",
        "plain",
        "modes",
    ),
    Fault(
        "lossless_cuda.cu",
        "  const torch::stable::accelerator::DeviceGuard guard(held.get_device_index());\n",
        "",
        "plain",
        "modes",
    ),
    Fault(
        "loco_cuda.cu",
        "  STD_CUDA_KERNEL_LAUNCH_CHECK();\n}\n\nvoid decompress",
        "}\n\nvoid decompress",
        "plain",
        "compress",
    ),
    Fault("difference_cuda.cu", "= current_stream(updated);", "= nullptr;", "plain", "differences"),
    Fault("difference_cuda.cu", '  check_device(held, updated, "what is held");\n', "", "plain", "devices"),
)


def found(fault: Fault, libraries: Path) -> str:
    """Return the line that tells of a fault; empty: nobody finds it.

    Args:
        libraries: where objects are kept.

    Raises:
        ValueError: its text is not once in its file.
    """
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder, "loco")
        shutil.copytree(SOURCES, sources)
        path = sources / fault.file
        text = path.read_text(encoding="utf-8")
        if text.count(fault.old) != 1:
            raise ValueError(f"expected {fault.old!r} once in {fault.file}, got it {text.count(fault.old)} times")
        path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "tests.campaigns.kernels",
            "--sources",
            str(sources),
            "--libraries",
            str(libraries),
        ]
        command += ["--build", fault.build, "--only", fault.section, "--amount", "0.02", "--first"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=_LIMIT)
    told = [line for line in (done.stdout + done.stderr).splitlines() if _FOUND.fullmatch(line)]
    if done.returncode < 0:  # an address that nothing is at
        told.append(f"ended by signal {-done.returncode}")
    if done.returncode and not told:
        raise RuntimeError(done.stderr[-3000:])
    return told[0] if done.returncode else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, help="of the faults; default: all")
    parser.add_argument("--libraries", type=Path, default=LIBRARIES, help="where objects are kept")
    arguments = parser.parse_args()
    numbers = arguments.numbers or range(len(FAULTS))
    missed = []
    for number in numbers:
        try:
            told = found(FAULTS[number], arguments.libraries)
        except (RuntimeError, ValueError) as error:  # it does not compile, or its text is not there: no fault
            print(error)
            told = ""
        missed += [] if told else [number]
        print(f"{number:3} {FAULTS[number].file:18} {FAULTS[number].build:8} {told[:200] or 'NOT FOUND'}", flush=True)
    print(f"{len(numbers) - len(missed)} of {len(numbers)} found" + "".join(f", not {number}" for number in missed))
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
