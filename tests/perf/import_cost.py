# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of this package for a program that imports torch but not DeepSpeed.

    python -m tests.perf.import_cost

Fresh processes take turns. *importing torch* is user and system time of a process that does nothing else, because wall
time depends on the load of the machine. *of that ours* is the wall time of importing this package alone, in a process
that has imported torch without it.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import trange

from tests.perf.lib import records

LEFT_OUT = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # torch's own switch: it imports no package of this kind
METHODS = {
    "without the package": LEFT_OUT,
    "with the package": {},
    "with it, switched off": {"DEEPSPEED_EXT_DISABLE": "1"},
}
OURS = "import time, torch; t = time.perf_counter(); import deepspeed_ext; print(1e3 * (time.perf_counter() - t))"


def run(code: str, environment: dict[str, str]) -> str:
    env = {"OMP_NUM_THREADS": "1", **os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout


def milliseconds_of_torch(environment: dict[str, str]) -> float:
    """Return the user and system time (ms) of a process that imports torch."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run("import torch", environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1e3 * (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)


def row(method: str, measured: str, samples: Sequence[float]) -> dict[str, object]:
    low, median, high = (round(value, 2) for value in statistics.quantiles(samples, n=4))
    result = {"method": method, "measured": measured, "median_ms": median}
    return result | {"quartile_ms": low, "other_quartile_ms": high, "runs": len(samples)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what the package costs a program that imports torch alone.")
    parser.add_argument("--runs", type=int, default=20, help="processes of each method")
    parser.add_argument("--csv", type=Path, help="append a row a result here")
    args = parser.parse_args()
    torch: dict[str, list[float]] = {method: [] for method in METHODS}
    ours: list[float] = []
    for _ in trange(args.runs):
        for method, environment in METHODS.items():
            torch[method].append(milliseconds_of_torch(environment))
        ours.append(float(run(OURS, LEFT_OUT)))
    rows = [row(method, "importing torch", samples) for method, samples in torch.items()]
    records.report([*rows, row("with the package", "of that ours", ours)], args.csv)


if __name__ == "__main__":
    main()
