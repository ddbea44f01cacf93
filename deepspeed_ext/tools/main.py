# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The command line.

Without a command it shows versions and groups. ``leaf-modules`` shows the leaf modules that ZeRO-3 would use, ``plan``
the predicted cost of each strategy, ``report`` the parts of a step's time, and ``doctor`` the problems of nodes.
``compare`` runs a script under several configurations, ``convert`` makes a universal checkpoint,
and ``verify`` checks the files of one.
"""

import argparse
import os
import platform
import sys
from collections.abc import Callable, Sequence

from deepspeed_ext.comm.process_groups import (
    default_group_size,
    inter_ranks,
    intra_ranks,
    nodes_of_ranks,
    ranks_per_node,
)
from deepspeed_ext.config.keys import LEAF_BYTES, THRESHOLD
from deepspeed_ext.strategy import GroupSizes
from deepspeed_ext.tools import verify
from deepspeed_ext.tools.compare import cli as compare_cli
from deepspeed_ext.tools.doctor import cli as doctor_cli
from deepspeed_ext.tools.plan import cli as plan_cli
from deepspeed_ext.tools.report import cli as report_cli
from deepspeed_ext.version import __version__


def print_versions() -> None:
    """Print the versions that matter."""
    import deepspeed
    import torch

    print(f"deepspeed_ext {__version__}")
    print(f"deepspeed     {deepspeed.__version__}")
    print(f"torch         {torch.__version__}")
    print(f"python        {platform.python_version()}")


def print_groups(ranks: int | None, group_size: int | None) -> None:
    """Print the groups that would be formed, by default for the ranks in the launcher's environment."""
    ranks = ranks or int(os.environ.get("WORLD_SIZE", "1"))
    local_size = 1 if ranks == 1 else ranks_per_node() or 0
    m = group_size or default_group_size(range(ranks), nodes_of_ranks([local_size] * ranks))
    sizes = GroupSizes(ranks, m)
    print(f"\ngroups of {ranks} data-parallel rank(s): {sizes.groups} x {m}")
    print(f"  within groups   {[intra_ranks(range(ranks), m, first) for first in range(0, ranks, m)]}")
    print(f"  between groups  {[inter_ranks(range(ranks), m, first) for first in range(m)]}")


def add_leaf_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``leaf-modules``, without importing DeepSpeed yet."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="PKG:FN",
        help="function that builds the model; on the meta device it takes no memory",
    )
    parser.add_argument("--bytes", type=int, help=f"{LEAF_BYTES} (default: true, a budget without a number)")
    parser.add_argument("--threshold", type=int, help=f"{THRESHOLD} instead")
    for key in ("max_live_parameters", "prefetch_bucket_size", "max_reuse_distance", "param_persistence_threshold"):
        parser.add_argument(f"--{key.replace('_', '-')}", dest=f"stage3_{key}", type=int, help=f"stage3_{key}")
    parser.add_argument(
        "--batch", metavar="PKG:FN", help="function that returns the model's arguments: train with them and measure"
    )


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``convert``: those of DeepSpeed's converter, without importing DeepSpeed yet."""
    parser.add_argument("--input_folder", required=True, help="the checkpoint, D/TAG")
    parser.add_argument("--output_folder", required=True, help="folder of the universal checkpoint")
    parser.add_argument("--num_extract_workers", type=int, default=4, help="processes that read shards")
    parser.add_argument("--num_merge_workers", type=int, default=2, help="processes that merge them")
    parser.add_argument("--keep_temp_folder", action="store_true", help="keep the extracted shards")
    parser.add_argument("--no_strict", dest="strict", action="store_false", help="do not check patterns of parameters")
    parser.add_argument("--trusted", action="store_true", help="accept any class in the files, and run its code")
    parser.add_argument("--inject_missing_state", action="store_true", default=True, help=argparse.SUPPRESS)  # always


def _run(arguments: argparse.Namespace, script: Sequence[str]) -> int:
    """Run a command (for ``report``, the part before its script), and return the exit status."""
    if arguments.command == compare_cli.NAME:
        return compare_cli.run_command(arguments, script)
    if arguments.command == "verify":
        return verify.run(arguments)
    if arguments.command == "plan":
        plan_cli.run(arguments)
    elif arguments.command == report_cli.NAME:
        report_cli.prepare(arguments, script, arguments.local_rank)
    elif arguments.command == "convert":
        from deepspeed_ext.checkpoint.to_universal import convert

        convert(arguments)
    else:
        from deepspeed_ext.tools import leaf

        leaf.run(arguments)
    return 0


def _split(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return our arguments, and the script's after ``--``, in which argparse would look for our options."""
    if not {compare_cli.NAME, report_cli.NAME} & set(words) or compare_cli.SEPARATOR not in words:
        return words, ()
    index = words.index(compare_cli.SEPARATOR)
    return words[:index], words[index + 1 :]


def main(print_patches: Callable[[], None] = lambda: None, patch_problems: Callable[[], list[str]] = list) -> None:
    """Run a command, or print the report.

    Args:
        print_patches: prints which of DeepSpeed's symbols are patched, or have a hook.
        patch_problems: returns the problems of patches and hooks.
    """
    parser = argparse.ArgumentParser(prog="python -m deepspeed_ext", description=__doc__)
    # These names must differ from all commands' arguments, whose defaults would overwrite these values.
    ranks, size = "report_ranks", "report_group_size"
    parser.add_argument("--ranks", dest=ranks, type=int, help="data-parallel ranks (default: WORLD_SIZE, or 1)")
    parser.add_argument("--group-size", dest=size, type=int, help="paro_group_size (default: ranks per node)")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher's; it sets LOCAL_RANK, too
    commands = parser.add_subparsers(dest="command", title="commands")
    for name, add, text in (
        ("leaf-modules", add_leaf_arguments, "show the leaf modules that ZeRO-3 would fetch as one"),
        ("convert", add_convert_arguments, "convert a checkpoint to a universal checkpoint"),
        ("verify", verify.add_arguments, "check the files of a checkpoint"),
        ("plan", plan_cli.add_arguments, "predict the cost of each strategy, and choose one"),
        (report_cli.NAME, report_cli.add_arguments, "run a script, and report where the time of its steps goes"),
        ("doctor", doctor_cli.add_arguments, "check the nodes of a launch"),
        (
            compare_cli.NAME,
            compare_cli.add_arguments,
            "run a script under several configurations, and compare their speed",
        ),
    ):
        add(commands.add_parser(name, help=text))
    our_words, script = _split(sys.argv[1:])
    arguments = parser.parse_args(our_words)
    group_options = arguments.report_ranks, arguments.report_group_size
    if arguments.command:
        if group_options != (None, None):
            parser.error(
                f"--ranks and --group-size are options of the report without a command: put those of "
                f"{arguments.command} after it."
            )
        if arguments.command == "doctor":
            sys.exit(doctor_cli.run(arguments, patch_problems))
        try:
            status = _run(arguments, script)
        except ValueError as error:
            parser.exit(2, f"{error}\n")
        if arguments.command == report_cli.NAME:
            report_cli.run(script[0])  # outside of the try, because the script's own ValueErrors need a traceback
        if status:
            parser.exit(status)
        return
    print_versions()
    print_patches()
    try:
        print_groups(*group_options)
    except ValueError as error:
        parser.exit(2, f"\n{error}\n")
