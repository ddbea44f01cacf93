# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""One experiment of tests.campaigns.gpu, in a process of its own."""

import argparse
import pkgutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.campaigns.gpu.runs import Report

# Name, title, limit in seconds, variables, and function; the most useful first, should the budget not suffice for all.
# The first builds the kernels.
TABLE: tuple[tuple[str, str, float, dict[str, str], str], ...] = (
    ("T0", "kernels: drawn cases beside the reference and the CPU's kernels", 600, {}, "kernels:drawn"),
    ("T8A", "kernels: their tests", 420, {}, "kernels:bits"),
    ("T1", "a slow optimizer step is waited for", 150, {}, "order:slow_step"),
    ("T2", "results that arrive late are waited for: all strategies, virtual ranks", 300, {}, "order:late_results"),
    ("T6", "gloo ranks that share the GPU: all strategies beside stock DeepSpeed", 300, {}, "ranks:gloo_ranks"),
    ("T10", "gloo ranks that share the GPU: states on the host, few bits, Muon, checkpoints", 300, {}, "ranks:states"),
    ("T11", "gloo ranks that share the GPU: saves beside the training, in memory; exports", 220, {}, "saves:aside"),
    ("T12", "gloo ranks that share the GPU, and NCCL at one rank: reports, the doctor", 220, {}, "reports:all_checks"),
    ("T13", "gloo ranks that share the GPU: MoE layers and AutoEP beside stock DeepSpeed", 220, {}, "experts:experts"),
    ("T7", "NCCL at one rank, without the short cuts", 150, {}, "ranks:nccl_alone"),
    ("T3", "torch's sanitizer over T1 and T2", 420, {"TORCH_CUDA_SANITIZER": "1"}, "order:sanitizer"),
    (
        "T3B",
        "torch's sanitizer: other strategies",
        240,
        {"TORCH_CUDA_SANITIZER": "1"},
        "order:sanitizer_of_others",
    ),
    ("T5", "host synchronizations in micro-steps 5 to 10", 180, {}, "timeline:synchronizations"),
    ("T4", "what overlaps with what", 120, {}, "timeline:timeline"),
    ("T8B", "kernels: their bandwidth beside a copy's", 180, {}, "kernels:bandwidth"),
    ("T9", "memory beside the formulas", 120, {}, "kernels:memory"),
)


@dataclass(frozen=True)
class Place:
    """Where an experiment runs: "cuda" or "cpu", quickly rather than thoroughly if small; and what it reports to."""

    device: str
    small: bool
    report: Any

    @property
    def cuda(self) -> bool:
        """Whether this is a GPU."""
        return self.device == "cuda"


def run(name: str, place: Place) -> None:
    """Run the experiment of this name."""
    import deepspeed_ext  # noqa: F401  it activates itself where it is installed; here may be its sources alone

    place_of = next(row[-1] for row in TABLE if row[0] == name)
    pkgutil.resolve_name(f"tests.campaigns.gpu.{place_of}")(place)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[row[0] for row in TABLE])
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
