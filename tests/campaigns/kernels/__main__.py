# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Compares the CUDA kernels, emulated on the CPU, with the reference and with the kernels for the CPU, bit by bit.

    python -m tests.campaigns.kernels --build checked --amount 0.5 --seed 3 --only compress

Cases are drawn; each runs in several orders of blocks and threads, and with a reciprocal that is off. Builds: plain;
checked, which knows who has written and read each byte; address, with the sanitizers of addresses and of undefined
behavior. With ``--device cuda`` the same cases run on a GPU. Exit status: 1 if any case differs, 3 without a GPU.
"""

import argparse
import os
import sys
from pathlib import Path

from scripts import ROOT
from tests.campaigns.gpu.runs import NO_GPU, SAID, has_gpu
from tests.harness.cuda_on_cpu import building

_FAILURES = 20  # after which nothing else runs


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", choices=building.BUILDS, default="plain")
    parser.add_argument("--device", choices=("emulated", "cuda", "cpu"), default="emulated", help="cpu: to test this")
    parser.add_argument("--amount", type=float, default=1.0, help="of cases; 1: some minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=(), metavar="SECTION")
    parser.add_argument("--sources", type=Path, default=ROOT / "csrc" / "loco", help="of the kernels")
    parser.add_argument("--libraries", type=Path, default=building.LIBRARIES, help="where they are built")
    parser.add_argument("--first", action="store_true", help="stop at the first failure")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if arguments.device == "cuda" and not has_gpu():
        print(SAID, file=sys.stderr)
        return NO_GPU
    emulated = arguments.device == "emulated"
    library = building.build_library(arguments.sources, arguments.libraries, arguments.build) if emulated else None
    if emulated and arguments.build == "address" and "libasan" not in os.environ.get("LD_PRELOAD", ""):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | building.sanitizers())
    import torch

    from tests.campaigns.kernels import sections
    from tests.campaigns.kernels.drawing import Drawing
    from tests.harness.cuda_on_cpu.comparing import Comparison
    from tests.harness.cuda_on_cpu.emulator import Emulator
    from tests.harness.cuda_on_cpu.on_device import OnDevice

    torch.set_num_threads(1)
    failures: list[str] = []

    def fail(what: str) -> None:
        failures.append(what)
        print("FAILED", what, flush=True)
        if arguments.first or len(failures) == _FAILURES:
            raise SystemExit(1)

    kernels = Emulator(library) if library else OnDevice(arguments.device)
    compare = Comparison(kernels, arguments.build == "checked", fail)
    location = arguments.build if emulated else arguments.device
    for name in arguments.only or (sections.OF_BUILDS[location] if emulated else sections.ON_DEVICE):
        before = compare.cases.total()
        sections.SECTIONS[name](compare, Drawing(arguments.seed), arguments.amount)
        print(f"{location} {name}: {compare.cases.total() - before} cases", flush=True)
    print(f"{compare.cases.total()} cases, {compare.runs} runs, {compare.emulator.counts()}")
    print(f"{len(failures)} failures" if failures else "all bits equal")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
