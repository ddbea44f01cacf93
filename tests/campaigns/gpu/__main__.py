# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Experiments on one GPU: that nothing is read before it is complete, and the speed of kernels and overlap.

Runs them by itself, within 70 minutes, and writes a dated result: build/gpu/DATE.json, and DATE.txt to read. It ends
with a verdict for each claim of claims.py and, where all of them ran on a GPU, with the sentence for the README.
--write-status writes that sentence into the README, and appends the verdicts to status.csv next to this file; it needs
a clean working tree, since the table names the commit.

  python -m tests.campaigns.gpu                  all of them
  python -m tests.campaigns.gpu --write-status   all of them, to be committed
  python -m tests.campaigns.gpu --only T1,T2     two of them
  python -m tests.campaigns.gpu --at-once 8      all of them within minutes, on a machine with as many cores
  python -m tests.campaigns.gpu --device cpu --small   the same code without a GPU: a test of this script

On a machine that has a copy of the working tree and no git, --commit says which one it is; --verdicts-of FILE.json
--write-status then records in a clone the results of that run.

Each runs in a process of its own and within a limit; one that crashes or hangs does not end the others. Experiments
beyond the time budget are listed as not run. Needs the development dependencies (pip install -e .[test]), and nvcc
where the kernels are to be built.

The status in the README says whether this has run on a GPU, and what it found.

Exit status: 0 if all have passed; 1 if one has not, or did not fit; 2 for wrong arguments; 3 without a GPU.
"""

import argparse
import json
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
from tests.campaigns.gpu.runs import (
    EXPERIMENTS,
    NO_GPU,
    NOT_RUN,
    PASSED,
    SAID,
    Experiment,
    Outcome,
    Report,
    Setup,
    has_gpu,
    run_all,
    run_here,
    table,
    write_results,
)

BUDGET = 70 * 60.0  # seconds, of all of them
UNKNOWN = "unknown"


def environment(device: str) -> dict[str, str]:
    provided = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *([provided] if provided else [])]),
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


def circumstances(device: str) -> dict[str, str]:
    import torch

    results = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "versions": ", ".join(f"{name} {_version(name)}" for name in ("deepspeed_ext", "deepspeed", "torch")),
        "commit": commit(),
        "python": platform.python_version(),
        "device": "the CPU",
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        results |= {
            "device": f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB",
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "cuda": str(torch.version.cuda),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "nvcc": shutil.which("nvcc") or "none",
        }
    return results


def commit() -> str:
    """Return the commit, with "-dirty" if the working tree has changes."""
    return _output("git", "-C", str(ROOT), "describe", "--always", "--dirty")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return UNKNOWN


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    return done.stdout.strip()


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.gpu", description=__doc__, formatter_class=raw)
    parser.add_argument("--only", default="", metavar="T1,T5", help="these experiments (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="fewer strategies and smaller sizes")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="of those that measure no time")
    parser.add_argument("--commit", default="", metavar="REVISION", help="what this is a copy of")
    parser.add_argument("--verdicts-of", type=Path, metavar="FILE", help="run none: take the result of an earlier run")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "gpu", metavar="DIR", help="where results go")
    parser.add_argument("--write-status", action="store_true", help="write the verdicts into README.md and status.csv")
    parser.add_argument("--list", action="store_true", help="name the experiments, and run none")
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)  # run one in this process
    args = parser.parse_args(arguments)
    names = [name.strip().upper() for name in args.only.split(",") if name.strip()]
    args.chosen = [item for item in EXPERIMENTS if item.name in names or not names]
    if args.device == "cpu":
        args.chosen = [item._replace(variables={}) for item in args.chosen]
    if unknown := set(names) - {item.name for item in EXPERIMENTS}:
        parser.error(f"--only: expected some of {', '.join(item.name for item in EXPERIMENTS)}, got {sorted(unknown)}")
    if args.write_status and (names or args.small or args.device == "cpu"):
        parser.error("--write-status: expected a whole run on a GPU, got one of --only, --small and --device cpu")
    if args.write_status and args.verdicts_of is None and commit().endswith("-dirty"):
        parser.error("--write-status: expected a clean working tree, got one with changes")
    return args


def main(arguments: list[str] | None = None) -> int:
    begin = time.monotonic()
    args = parse_arguments(arguments)
    if args.list:
        print("\n".join(f"{item.name:4} {item.limit:4.0f} s  {item.title}" for item in args.chosen))
        return 0
    if args.verdicts_of is not None:
        about = json.loads(args.verdicts_of.read_text(encoding="utf-8"))
        return conclude(about, [Outcome(**item) for item in about.pop("experiments")], args.write_status)
    if args.report is not None:
        report = Report(args.report)
        run_here(args.only, Setup(args.device, args.small, report))
        report.done()
        return 0
    if args.device == "cuda" and not has_gpu():
        print(SAID, file=sys.stderr)
        return NO_GPU
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"ended by signal {number}"))  # and what it runs
    args.results.mkdir(parents=True, exist_ok=True)
    about = circumstances(args.device) | ({"commit": args.commit} if args.commit else {})
    stem = args.results / time.strftime("%Y-%m-%d-%H%M%S", time.gmtime())

    def command(experiment: Experiment, report: Path) -> list[str]:
        options = ["--only", experiment.name, "--device", args.device, "--report", str(report)]
        return [sys.executable, "-m", "tests.campaigns.gpu", *options, *(["--small"] if args.small else [])]

    def note(outcomes: list[Outcome]) -> None:
        write_results(stem, about, outcomes)
        last = outcomes[-1]
        print(f"{last.name:4} {last.kind:8} {last.seconds:6.1f} s  {last.title}", flush=True)

    with tempfile.TemporaryDirectory(prefix="gpu-checks-") as folder:
        remaining = BUDGET - (time.monotonic() - begin)
        outcomes = run_all(args.chosen, command, remaining, Path(folder), note, environment(args.device), args.at_once)
    print("\n" + table(about, outcomes) + f"\nwritten to {stem}.json and {stem}.txt")
    return conclude(about, outcomes, args.write_status)


def conclude(about: dict[str, str], outcomes: list[Outcome], write: bool) -> int:
    """Print the verdicts, write them down if that is wanted, and return the exit status: 0 if all have passed. Only
    verdicts of all experiments, in full, on a GPU, and of a commit are written."""
    results = claims.verdicts(outcomes)
    print("", *(f"{item.kind:13} {item.claim} ({item.experiments})" for item in results), sep="\n")
    missing = {item.name for item in EXPERIMENTS} - {item.name for item in outcomes if item.kind != NOT_RUN}
    why = {
        f"{', '.join(sorted(missing))} did not run": missing,
        "a run on the CPU": about["device"] == "the CPU",
        "a small run": "--small" in about["command"],
        f"of commit {about['commit']}": about["commit"] == UNKNOWN or about["commit"].endswith("-dirty"),
        "without --write-status": not write,
    }
    refused = [reason for reason, holds in why.items() if holds]
    print(f"\n{claims.sentence(about, results)}: {'not written: ' + '; '.join(refused) if refused else 'written'}")
    if not refused:
        claims.write(ROOT, about, results)
    return int((write and bool(refused)) or any(item.kind != PASSED for item in outcomes))


if __name__ == "__main__":
    sys.exit(main())
