# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""One experiment of tests.campaigns.gpu, in a process of its own."""

import argparse
import importlib
import sys
from pathlib import Path

import deepspeed_ext  # noqa: F401 - it activates itself where it is installed; here there may be the sources alone
from tests.campaigns.gpu.runs import Report

# Name: module beside this one, and the function in it.
FUNCTIONS = {
    "T0": ("kernels", "drawn"),
    "T1": ("order", "slow_step"),
    "T2": ("order", "late_results"),
    "T3": ("order", "sanitizer"),
    "T3B": ("order", "sanitizer_of_others"),
    "T4": ("timeline", "timeline"),
    "T5": ("timeline", "synchronizations"),
    "T6": ("ranks", "gloo_ranks"),
    "T7": ("ranks", "nccl_alone"),
    "T8A": ("kernels", "bits"),
    "T8B": ("kernels", "bandwidth"),
    "T9": ("kernels", "memory"),
    "T10": ("ranks", "states"),
    "T11": ("saves", "saves_aside"),
    "T12": ("reports", "report_and_doctor"),
    "T13": ("experts", "experts"),
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


def run(name: str, place: Place) -> None:
    """Run the experiment of this name."""
    module, function = FUNCTIONS[name]
    getattr(importlib.import_module(f"tests.campaigns.gpu.{module}"), function)(place)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(FUNCTIONS))
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--report", type=Path, required=True)
    args = parser.parse_args()
    report = Report(args.report)
    run(args.name, Place(args.device, args.small, report))
    report.done()
    return 0


if __name__ == "__main__":
    sys.exit(main())
