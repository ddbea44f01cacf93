# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Tries the arithmetic of a thread of the CUDA kernels with every number that it can meet.

    python -m tests.campaigns.kernels.numbers --step 10007     every 10,007th number, for seconds instead of a minute

Scales of each magnitude are compared with the reference's, with reciprocals that are off by up to 8 units in the last
place, where PTX allows 1; conversions of each float and of each number of 16 and 8 bits. Exit status: 1 if one is
wrong.
"""

import argparse
import subprocess
import sys

from scripts import ROOT
from tests.harness.cuda_on_cpu import building


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=int, default=1, help="from one number to the next one that is tried")
    step = parser.parse_args().step
    if step < 1:
        parser.error(f"expected a step of at least 1, got {step}")
    program = building.program(ROOT / "csrc" / "loco", building.LIBRARIES)
    return subprocess.run([str(program), str(step)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
