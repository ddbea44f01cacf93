# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""One experiment of scripts/checks/gpu.py, in a process of its own."""

import argparse
import importlib
import sys
from pathlib import Path

from gpu_runs import Report

# Name: module beside this one, and the function in it.
FUNCTIONS = {
    "T1": ("gpu_order", "slow_step"),
    "T2": ("gpu_order", "late_results"),
    "T3": ("gpu_order", "sanitizer"),
    "T4": ("gpu_timeline", "timeline"),
    "T5": ("gpu_timeline", "synchronizations"),
    "T6": ("gpu_ranks", "gloo_ranks"),
    "T7": ("gpu_ranks", "nccl_alone"),
    "T8A": ("gpu_kernels", "bits"),
    "T8B": ("gpu_kernels", "bandwidth"),
    "T9": ("gpu_kernels", "memory"),
}


class Place:
    """Where an experiment runs, and what it reports to.

    Attributes:
        device: "cuda" or "cpu".
        small: whether to be quick rather than thorough.
        report: what was found.
    """

    def __init__(self, device: str, small: bool, report: Report) -> None:
        self.device = device
        self.small = small
        self.report = report

    @property
    def cuda(self) -> bool:
        """Whether this is a GPU."""
        return self.device == "cuda"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(FUNCTIONS))
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--report", type=Path, required=True)
    args = parser.parse_args()
    module, function = FUNCTIONS[args.name]
    report = Report(args.report)
    getattr(importlib.import_module(module), function)(Place(args.device, args.small, report))
    report.done()
    return 0


if __name__ == "__main__":
    sys.exit(main())
