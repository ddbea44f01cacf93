# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``python -m deepspeed_ext doctor`` examines the nodes of a launch on the nodes themselves."""

import argparse
from collections.abc import Callable
from pathlib import Path

from deepspeed_ext.strategy import parse_strategy
from deepspeed_ext.tools.arguments import count, number

TITLES = (
    "versions",
    "environment",
    "groups",
    "memory and disks",
    "pinned memory",
    "compiler",
    "LoCo's kernels",
    "process groups",
    "links",
    "nodes and links",
    "clocks",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``doctor``, without importing DeepSpeed yet."""
    parser.add_argument("--group-size", type=number(int), help="paro_group_size (default: ranks per node)")
    late = "seconds to wait for a rank, and for a message (default: 60)"
    parser.add_argument("--timeout", type=number(float), default=60.0, metavar="S", help=late)
    written = "rank 0 writes the report, with all that was measured"
    parser.add_argument("--json", type=Path, metavar="FILE", help=written)
    skip = f"leave out a check, once for each: {', '.join(TITLES)}"
    parser.add_argument("--skip", action="append", choices=TITLES, default=[], metavar="TITLE", help=skip)
    model = parser.add_argument_group("a model whose states shall fit, without activations")
    model.add_argument("--params", type=number(count), metavar="N", help="its parameters, such as 7e9 or 7B")
    model.add_argument("--strategy", type=_strategy, default="NIG", help="(default: NIG)")
    dtypes = ("bf16", "fp16", "fp32")
    model.add_argument("--dtype", choices=dtypes, default="bf16", help="of parameters and gradients (default: bf16)")
    model.add_argument("--offload-optimizer", action="store_true", help="optimizer states in host memory")


def run(arguments: argparse.Namespace, patch_problems: Callable[[], list[str]]) -> int:
    """Examine this launch; return the exit status.

    Args:
        arguments: those of ``add_arguments``.
        patch_problems: returns the patches of DeepSpeed that are not as expected.
    """
    from deepspeed_ext.tools.doctor.cluster import Options
    from deepspeed_ext.tools.doctor.command import examine

    names = ("group_size", "timeout", "params", "strategy", "dtype", "offload_optimizer", "skip")
    options = Options(**{name: getattr(arguments, name) for name in names})
    return examine(options, arguments.json, patch_problems)


def _strategy(text: str) -> str:
    try:
        return parse_strategy(text).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
