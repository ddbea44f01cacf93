# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Experiments on one GPU: that nothing is read before it is complete, and what the kernels and the overlap come to.

Runs them by itself, within an hour, and writes a dated result: build/gpu/DATE.json, and DATE.txt to be read. It ends
with a verdict for each claim of claims.py; a run of all of them on a GPU appends these to status.csv beside this file,
and says in the README how many hold.

  python -m tests.campaigns.gpu                  all of them
  python -m tests.campaigns.gpu --only T1,T2     two of them
  python -m tests.campaigns.gpu --device cpu --small   the same code without a GPU: a test of this script

Each runs in a process of its own and within a limit; one that crashes or hangs does not end the others. What the
budget leaves no time for is listed as not run. Needs the development dependencies (pip install -e .[dev]), and nvcc
where the kernels are to be built.

THIS HAS NOT RUN ON A GPU YET: the code paths were tested on a CPU only.

Exit status: 0 if all have passed; 1 if one has not, or did not fit; 2 for wrong arguments; 3 without a GPU.
"""

import argparse
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from scripts import ROOT
from tests.campaigns.gpu import claims
from tests.campaigns.gpu.runs import Experiment, Outcome, run_all, select, status_of, table, write_results

NO_GPU = 3
BUDGET = 60 * 60.0
# Name, title, limit in seconds, variables; in the order of their worth, should the budget not suffice for all. The
# first builds the kernels.
TABLE = (
    ("T0", "kernels: drawn cases beside the reference and the CPU's kernels", 1200, {}),
    ("T8A", "kernels: their tests", 420, {}),
    ("T1", "a slow optimizer step is waited for", 150, {}),
    ("T2", "results that arrive late are waited for: all strategies, virtual ranks", 300, {}),
    ("T6", "gloo ranks that share the GPU: all strategies beside stock DeepSpeed", 300, {}),
    ("T7", "NCCL at one rank, without the short cuts", 150, {}),
    ("T3", "torch's CUDA sanitizer over T1 and T2", 240, {"TORCH_CUDA_SANITIZER": "1"}),
    ("T5", "host synchronizations in micro-steps 5 to 10", 180, {}),
    ("T4", "what overlaps with what", 120, {}),
    ("T8B", "kernels: their bandwidth beside a copy's", 180, {}),
    ("T9", "memory beside the formulas", 180, {}),
)


def experiments(device: str, small: bool) -> list[Experiment]:
    """Return all experiments for a device."""

    def made(name: str, title: str, limit: float, more: dict[str, str]) -> Experiment:
        command = [
            sys.executable,
            "-m",
            "tests.campaigns.gpu.child",
            name,
            "--device",
            device,
            *(["--small"] if small else []),
        ]
        on_gpu = more if device == "cuda" else {}
        return Experiment(name, title, limit, lambda report: [*command, "--report", str(report)], on_gpu)

    return [made(*row) for row in TABLE]


def environment(device: str) -> dict[str, str]:
    """Return the variables of the processes: where modules are, and what a single rank is told by a launcher."""
    paths = [ROOT, ROOT / "tests" / "unit"]
    given = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *([given] if given else [])]),
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions")),
        "DS_ACCELERATOR": device,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # the same bits each time
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",  # DeepSpeed wants it set; ranks meet over a file
    }


def has_gpu() -> bool:
    """Return whether torch sees a GPU of NVIDIA's."""
    import torch

    return bool(torch.version.cuda) and torch.cuda.is_available()


def circumstances(device: str) -> dict[str, str]:
    """Return what a result depends on and does not say by itself."""
    import torch

    found = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "versions": ", ".join(f"{name} {_version(name)}" for name in ("deepspeed_ext", "deepspeed", "torch")),
        "commit": _output("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
        "python": platform.python_version(),
        "device": "the CPU",
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB",
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "cuda": str(torch.version.cuda),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "nvcc": shutil.which("nvcc") or "none",
        }
    return found


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.gpu", description=__doc__, formatter_class=raw)
    parser.add_argument("--only", default="", metavar="T1,T5", help="these experiments (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="fewer strategies and smaller sizes")
    parser.add_argument("--budget", type=float, default=BUDGET, metavar="SECONDS", help="for all (%(default)s)")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "gpu", metavar="DIR", help="where results go")
    parser.add_argument("--list", action="store_true", help="name the experiments, and run none")
    args = parser.parse_args(arguments)
    try:
        args.chosen = select(experiments(args.device, args.small), args.only.split(","))
    except ValueError as error:
        parser.error(str(error))
    return args


def main(arguments: list[str] | None = None) -> int:
    begin = time.monotonic()
    args = parse_arguments(arguments)
    if args.list:
        print("\n".join(f"{one.name:4} {one.limit:4.0f} s  {one.title}" for one in args.chosen))
        return 0
    if args.device == "cuda" and not has_gpu():
        print("No GPU: nothing was run. torch sees none of NVIDIA's.", file=sys.stderr)
        return NO_GPU
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"ended by signal {number}"))  # and what it runs
    args.results.mkdir(parents=True, exist_ok=True)
    about = circumstances(args.device)
    stem = args.results / time.strftime("%Y-%m-%d-%H%M%S", time.gmtime())

    def note(outcomes: list[Outcome]) -> None:
        write_results(stem, about, outcomes)
        last = outcomes[-1]
        print(f"{last.name:4} {last.kind:8} {last.seconds:6.1f} s  {last.title}", flush=True)

    with tempfile.TemporaryDirectory(prefix="gpu-checks-") as folder:
        left = args.budget - (time.monotonic() - begin)
        outcomes = run_all(args.chosen, left, Path(folder), note, environment(args.device))
    print("\n" + table(about, outcomes) + f"\nwritten to {stem}.json and {stem}.txt")
    found = claims.verdicts(outcomes)
    print("\n" + claims.told(found))
    if args.device == "cuda" and not args.small and len(args.chosen) == len(TABLE):
        claims.write(ROOT, about, found)
        print(f"written to {claims.TABLE} and README.md")
    return status_of(outcomes)


if __name__ == "__main__":
    sys.exit(main())
