# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Registers and memory that each CUDA kernel takes, as nvcc compiles it, and the warps that a multiprocessor holds.

    python -m tests.campaigns.kernels.resources                    sm_80, 90, 100 and 120: some minutes
    python -m tests.campaigns.kernels.resources --only 8.0 9.0     two of them

Exit status: 1 if a kernel spills registers or uses local memory, 2 without nvcc.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.harness import nvcc

CAPABILITIES = ("8.0", "9.0", "10.0", "12.0")
THREADS = 256  # of a thread block, of all kernels
_WARP = 32
# Of registers, by warp, and of shared memory, by thread block: what is given out at once, and what CUDA keeps itself.
_REGISTERS_AT_ONCE, _WARPS_AT_ONCE, _SHARED_AT_ONCE, _SHARED_OF_CUDA = 256, 4, 128, 1024


class Multiprocessor(NamedTuple):
    """Resources of a multiprocessor, from the table of compute capabilities in CUDA's programming guide."""

    warps: int
    blocks: int
    shared: int  # bytes
    registers: int = 65536


MULTIPROCESSORS = {
    80: Multiprocessor(64, 32, 164 << 10),
    90: Multiprocessor(64, 32, 228 << 10),
    100: Multiprocessor(64, 32, 228 << 10),
    120: Multiprocessor(48, 24, 100 << 10),
}


def occupancy(kernel: nvcc.Taken) -> tuple[int, str]:
    """Return how many warps of a kernel a multiprocessor holds, and the resource that limits it."""
    has, warps = MULTIPROCESSORS[kernel.architecture], THREADS // _WARP
    registers = _up(kernel.registers * _WARP, _REGISTERS_AT_ONCE)
    by_registers = has.registers // registers // _WARPS_AT_ONCE * _WARPS_AT_ONCE // warps
    by_shared = has.shared // (_up(kernel.shared, _SHARED_AT_ONCE) + _SHARED_OF_CUDA)
    limits = {"warps": has.warps // warps, "blocks": has.blocks, "registers": by_registers, "shared": by_shared}
    least = min(limits, key=lambda name: limits[name])
    return limits[least] * warps, least


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def all_taken(capabilities: Sequence[str]) -> list[nvcc.Taken]:
    """Compile all sources for these architectures, and return the resources of each instantiation."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        jobs = [(source, capability) for capability in capabilities for source in nvcc.SOURCES]

        def one(job: tuple[str, str]) -> list[nvcc.Taken]:
            return nvcc.compile_source(job[0], [job[1]], Path(folder, "-".join(job)), "-fatbin")[0]

        return [kernel for results in pool.map(one, jobs) for kernel in results]


def in_local_memory(kernels: Iterable[nvcc.Taken]) -> list[str]:
    """Return those that spill registers or have arrays in local memory, which is as slow as global memory."""
    return [f"{taken.symbol} of sm_{taken.architecture}: {taken}" for taken in kernels if taken.stack or taken.spilled]


def table(kernels: Sequence[nvcc.Taken]) -> str:
    """Return a row for each kernel, in Markdown: its least and most registers, and the warps that follow."""
    architectures = sorted({item.architecture for item in kernels})
    head = "".join(f" sm_{number} |" for number in architectures)
    lines = [f"| kernel | instances | shared |{head}", "|---|---|---|" + "---|" * len(architectures)]
    for source, name in sorted({(item.source, item.kernel) for item in kernels}):
        own = [item for item in kernels if (item.source, item.kernel) == (source, name)]
        number = len({item.symbol for item in own if item.architecture == architectures[0]})
        cells = "".join(f" {_cell([item for item in own if item.architecture == a])} |" for a in architectures)
        lines.append(f"| `{name}`, `{source}` | {number} | {max(item.shared for item in own)} |{cells}")
    return "\n".join(lines)


def _cell(kernels: Sequence[nvcc.Taken]) -> str:
    registers = sorted({kernel.registers for kernel in kernels})
    span = f"{registers[0]} to {registers[-1]}" if len(registers) > 1 else f"{registers[0]}"
    warps = min(occupancy(kernel)[0] for kernel in kernels)
    return f"{span}: {warps} of {MULTIPROCESSORS[kernels[0].architecture].warps}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CAPABILITIES, default=CAPABILITIES, metavar="CAPABILITY")
    arguments = parser.parse_args()
    if nvcc.NVCC is None:
        print("No nvcc: nothing was compiled.", file=sys.stderr)
        return 2
    kernels = all_taken(arguments.only)
    print(f"nvcc {nvcc.version()}. Registers of a thread: warps of a multiprocessor, by the most registers\n")
    print(table(kernels))
    local = in_local_memory(kernels)
    print("\n" + ("\n".join(local) or f"no spills and no local memory in {len(kernels)} kernels"))
    return bool(local)


if __name__ == "__main__":
    sys.exit(main())
