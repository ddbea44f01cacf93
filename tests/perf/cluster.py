# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Compares training methods on clusters that this machine emulates.

    python -m tests.perf.cluster                    # all strategies and peers, a model of blocks
    python -m tests.perf.cluster --overlap          # overlap with compute, which is emulated
    python -m tests.perf.cluster --paper            # ratios that the PaRO paper published; compute is emulated
    python -m tests.perf.cluster --offload          # parameters in host memory
    python -m tests.perf.cluster --network          # seconds per step over the rate of the link
    python -m tests.perf.cluster --collectives      # two hops and a flat ring, without a model
    python -m tests.perf.cluster --outer            # an outer optimizer between nodes
    python -m tests.perf.cluster --speeds           # a node at half speed; equal, own, and measured micro-batches
    python -m tests.perf.cluster --save             # synchronous and asynchronous saves
    python -m tests.perf.cluster --record           # a report of steps, compared with measured steps
    python -m tests.perf.cluster --what-if          # predictions from reports at other link rates
    python -m tests.perf.cluster --model gpt2       # GPT-2 with 124 M parameters, which takes 16 GB of free memory
    python -m tests.perf.cluster --model mixture    # a mixture of experts, with and without AutoEP
    python -m tests.perf.cluster --model pipeline   # two stages, and the same model without a pipeline

A node is a network namespace with some CPU ranks (``scripts/emulation``). Messages to other nodes use a link with a
limited rate, which counts their bytes. All methods train the same model on the same data from the same seed, and take
turns. A step's time is that of the slowest rank. The *floor* is the time of compute alone (forward and backward of all
micro-batches on all ranks at once, and an update of 1/n of the parameters), and of a method's bytes over the link.

Needs root, and ``ip`` and ``tc`` of iproute2. One launch for each setting.

Exit status 0 if methods train the same, send the bytes of the formulas, and reach their required speed relative to the
stock method; 1 if not; 2 if it could not run. Rows of methods that train differently, or send other bytes, are not
kept.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from deepspeed_ext.strategy import plain_name
from scripts.emulation.cluster import collect
from scripts.emulation.launching import start_rank
from tests.perf.lib import records
from tests.perf.lib.measurements import Measurement

MEASUREMENTS = {  # by option or model: where its class is
    "blocks": "measurements.BlocksMeasurement",
    "overlap": "measurements.OverlapMeasurement",
    "paper": "measurements.PaperMeasurement",
    "network": "measurements.NetworkMeasurement",
    "collectives": "collectives.CollectivesMeasurement",
    "offload": "offload.OffloadMeasurement",
    "outer": "measurements.OuterMeasurement",
    "save": "saves.SavesMeasurement",
    "record": "recorded.RecordedMeasurement",
    "speeds": "speeds.SpeedsMeasurement",
    "what_if": "recorded.WhatIfMeasurement",
    "gpt2": "gpt2.Gpt2Measurement",
    "mixture": "mixture.MixtureMeasurement",
    "pipeline": "pipelines.PipelineMeasurement",
}
OPTIONS = (
    *("--overlap", "--paper", "--network", "--collectives", "--offload", "--outer", "--save", "--record"),
    *("--what-if", "--speeds"),
)


def measurement(name: str) -> type[Measurement]:
    """Return the class of the measurement. Mixtures need transformers, so only the requested class is imported."""
    module, _, kind = MEASUREMENTS[name].partition(".")
    measurement_class: type[Measurement] = getattr(importlib.import_module(f"tests.perf.lib.{module}"), kind)
    return measurement_class


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments, and add the measurement's name as ``name``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("blocks", "gpt2", "mixture", "pipeline"), default="blocks")
    kinds = parser.add_mutually_exclusive_group()
    for option in OPTIONS:
        kinds.add_argument(option, dest="name", action="store_const", const=option[2:].replace("-", "_"))
    parser.add_argument("--settings", nargs="+", metavar="NAME")
    parser.add_argument("--methods", nargs="+", type=plain_name, metavar="NAME")
    parser.add_argument("--rounds", type=int, help="turns of each method, at least")
    parser.add_argument("--steps", type=int, help="of a turn that are timed; undisturbed ones before a save")
    parser.add_argument("--ratios", nargs="+", type=float, help="of W to a micro-batch's compute: --overlap, --record")
    parser.add_argument("--pcie", type=float, default=25.0, help="GB/s between host and device: --offload")
    parser.add_argument("--every", type=int, default=30, help="H, at least 15: --outer")
    parser.add_argument("--pause", type=float, default=0.08, help="seconds of sleep: --outer, --speeds")
    parser.add_argument("--log", type=Path, default=Path("cluster.log"), help="what the ranks print")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that a setting may take")
    parser.add_argument("--csv", type=Path, help="append a row a result here")
    parser.add_argument("--setting", help=argparse.SUPPRESS)  # of a rank
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # a rank, and where it reports
    args = parser.parse_args(words)
    if args.name and args.model != "blocks":
        parser.error(f"--{args.name} is measured with --model blocks, got --model {args.model}")
    args.name = args.name or args.model
    kind = measurement(args.name)
    for option, names in (("settings", kind.settings), ("methods", kind.methods)):
        if unknown := set(getattr(args, option) or ()) - set(names):
            parser.error(f"--{option} must be among {', '.join(names)}, got {', '.join(sorted(unknown))}")
    args.settings = args.settings or list(kind.usual or kind.settings)
    args.rounds, args.steps = args.rounds or kind.rounds, args.steps or kind.steps
    if args.name == "record":
        args.ratios = args.ratios or [1.0]
    if min(args.rounds, args.steps, args.pcie, args.pause, *(args.ratios or [1])) <= 0 or args.every < 15:
        parser.error("--rounds, --steps, --pcie, --pause and --ratios must be positive, and --every at least 15")
    return args


def main() -> int:
    args = parse_arguments()
    kind, failed = measurement(args.name), False
    if args.worker is not None:  # a rank
        first = start_rank()
        rows = kind(kind.settings[args.setting], args).measure()
        if first:
            args.worker.write_text(json.dumps([asdict(row) for row in rows]))
        dist.destroy_process_group()
        return 0
    for name in args.settings:
        setting = kind.settings[name]
        more = ["--setting", name]
        results = collect(setting.nodes, setting.ranks_per_node, __spec__.name, args.log, args.timeout, more)
        rows = [records.Row(**values) for values in results]
        print(f"\n{name}: compute alone {rows[0].compute:.3f} s\n{records.markdown(kind.table(rows))}")
        problems, missed = kind.problems(rows), kind.missed(rows)
        print("".join(f"FAIL: {line}\n" for line in problems) + "".join(f"MISSED: {line}\n" for line in missed))
        failed |= bool(problems or missed)
        if args.csv is not None and not problems:
            records.append_rows(args.csv, [row.to_csv() for row in rows])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
