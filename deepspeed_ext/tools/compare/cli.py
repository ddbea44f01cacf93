# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``python -m deepspeed_ext compare`` runs a script under several configurations in turns and compares speeds."""

import argparse
import json
import math
import platform
import random
import string
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hjson

from deepspeed_ext.console import progress_bar
from deepspeed_ext.tools.arguments import new_file, number
from deepspeed_ext.tools.compare import launching
from deepspeed_ext.tools.compare.launching import PLACEHOLDER, Launcher, RunFailed, environment, exit_on_signals, run
from deepspeed_ext.tools.compare.run_spec import AUTO, UNFINISHED, VARIABLE, RunSpec
from deepspeed_ext.tools.compare.verdict import Comparison, ConfigRuns, compare, table

NAME = "compare"
SEPARATOR = "--"  # before the script
_READ_EARLY = (
    "tensor_parallel",
    "sequence_parallel_size",
    "data_parallel_size",
)  # read before a configuration is parsed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``compare``; the script and its arguments follow ``--``."""
    positive_int = number(int)
    parser.usage = f"%(prog)s A.json B.json [options] {SEPARATOR} script.py [arguments, with {PLACEHOLDER}]"
    parser.add_argument("configs", nargs="+", type=Path, metavar="CONFIG", help="configurations; A is the first one")
    turns = parser.add_argument_group("turns")
    turns.add_argument("--rounds", type=positive_int, default=3, help="turns of each configuration (default: 3)")
    turns.add_argument(
        "--steps", type=positive_int, default=10, help="optimizer steps to time in a turn (default: 10)"
    )
    turns.add_argument("--warm-up", type=positive_int, default=3, help="optimizer steps before them (default: 3)")
    order = "in each round as given, or shuffled (default: given)"
    turns.add_argument("--order", choices=("given", "random"), default="given", help=order)
    turns.add_argument("--seed", type=int, default=0, help="of --order random (default: 0)")
    limit = "seconds that a turn may take (default: 3600)"
    turns.add_argument("--timeout", type=number(float), default=3600.0, metavar="S", help=limit)
    launch = parser.add_argument_group("how the script is launched")
    launchers = launching.LAUNCHERS
    launch.add_argument("--launcher", choices=launchers, default=launchers[0], help="(default: deepspeed)")
    launch.add_argument(
        "--ranks", type=positive_int, dest="turn_ranks", help="on each node (default: one for each device)"
    )
    hosts = "several nodes, by DeepSpeed's runner and ssh; start the command on the first one"
    launch.add_argument("--hostfile", metavar="FILE", help=hosts)
    prefix = 'command that launches the script instead, such as "torchrun --nnodes 4 ..." on each node'
    launch.add_argument("--launch", metavar="PREFIX", help=prefix)
    output = parser.add_argument_group("output")
    bound = "largest relative difference of losses (default: 1e-05 in fp32, 0.005 in fp16, 0.02 in bf16)"
    output.add_argument("--loss-bound", type=number(float, zero=True), metavar="X", help=bound)
    output.add_argument("--ignore-losses", action="store_true", help="exit with 0 even if losses differ")
    output.add_argument("--json", type=new_file, metavar="FILE", help="write all figures")
    logs = "for logs and reports of turns (default: deepspeed_compare)"
    output.add_argument("--folder", type=Path, default=Path("deepspeed_compare"), help=logs)


def run_command(arguments: argparse.Namespace, script: Sequence[str]) -> int:
    """Run all turns and print the verdict; return the exit status: 1 if losses differ or a turn failed.

    Args:
        arguments: arguments from ``add_arguments``.
        script: the script's path, or -m and a module, and its arguments.

    Raises:
        ValueError: nothing could be run.
    """
    contents = _check(arguments, script)
    folder = arguments.folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--folder {folder} cannot be created: {error}.") from error
    # Without this, a signal would end the command and leave its ranks running.
    exit_on_signals()
    reports: list[list[dict[str, Any]]] = [[] for _ in contents]
    with progress_bar(arguments.rounds * len(contents), "turns", "turn") as progress:
        for round_, index in _order(arguments):
            letter = string.ascii_uppercase[index]
            progress.set_postfix_str(letter)
            try:
                reports[index].append(_take_turn(arguments, script, folder, round_, index, contents[index]))
            except RunFailed as failure:
                print(f"{failure}\n\n{letter} ({arguments.configs[index]}) failed in round {round_}.", file=sys.stderr)
                return 1
            progress.update()
    return _conclude(arguments, reports)


def _check(arguments: argparse.Namespace, script: Sequence[str]) -> list[dict[str, Any]]:
    """Return the content of each configuration.

    Raises:
        ValueError: an argument contradicts another, or names a missing file.
    """
    placeholder = any(PLACEHOLDER in word for word in script)
    if len(arguments.configs) not in range(2, len(string.ascii_uppercase) + 1):
        raise ValueError(f"expected two configurations or more, got {len(arguments.configs)}.")
    if list(script) in ([], [launching.MODULE]):
        raise ValueError(f"expected the script after {SEPARATOR}, such as {SEPARATOR} train.py --config {PLACEHOLDER}")
    if arguments.launch is None and script[0] != launching.MODULE and not Path(script[0]).is_file():
        raise ValueError(
            f"there is no script {script[0]}. After {SEPARATOR} its path comes first, then its arguments."
        )
    if arguments.hostfile and not Path(arguments.hostfile).is_file():
        raise ValueError(f"there is no --hostfile {arguments.hostfile}.")
    chosen = {"--ranks": arguments.turn_ranks, "--hostfile": arguments.hostfile}
    if arguments.launch is not None and any(chosen.values()):
        raise ValueError(f"--launch replaces the launcher; remove {' and '.join(k for k, v in chosen.items() if v)}.")
    if arguments.hostfile and arguments.launcher != launching.LAUNCHERS[0]:
        raise ValueError("--hostfile is read by DeepSpeed's runner; with torchrun use --launch on each node.")
    contents = [_read(path) for path in arguments.configs]
    if not placeholder:
        for path, content in zip(arguments.configs, contents, strict=True):
            _require_replaceable(path, content)
    return contents


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(hjson.dumpsJSON(hjson.loads(path.read_text())))  # parse as DeepSpeed does
    except OSError as error:
        raise ValueError(f"the configuration {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"the configuration {path} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"the configuration {path} must be a dictionary, got {type(content).__name__}.")
    return content


def _require_replaceable(path: Path, content: dict[str, Any]) -> None:
    """Refuse keys and values that cannot be replaced in a script's own configuration.

    Raises:
        ValueError: the configuration has such a key or value.
    """
    use = f"Write {PLACEHOLDER} where the script takes the path of its configuration."
    if early := [key for key in _READ_EARLY if key in content]:
        raise ValueError(f"{path} has {early[0]}, which DeepSpeed reads before it can be replaced. {use}")
    if any(AUTO in section.values() for section in content.values() if isinstance(section, dict)):
        raise ValueError(f'{path} has a value "{AUTO}", which a framework replaces in its own configuration. {use}')


def _order(arguments: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Yield the number of the round, from 1, and the index of the configuration, identically on all nodes."""
    shuffled = random.Random(arguments.seed)
    for round_ in range(1, arguments.rounds + 1):
        indices = list(range(len(arguments.configs)))
        if arguments.order == "random":
            shuffled.shuffle(indices)
        yield from ((round_, index) for index in indices)


def _take_turn(
    arguments: argparse.Namespace,
    script: Sequence[str],
    folder: Path,
    round_: int,
    index: int,
    content: dict[str, Any],
) -> dict[str, Any]:
    """Run the script once, and return its ranks' report.

    Raises:
        RunFailed: it failed, or took too few steps.
    """
    stem = f"{round_}-{string.ascii_uppercase[index]}"
    # With a prefix, each node runs this command, possibly with a shared folder: the log needs the node's name.
    node = "" if arguments.launch is None else f"-{platform.node()}"
    report, log = folder / f"{stem}.json", folder / f"{stem}{node}.log"
    report.unlink(missing_ok=True)  # a report of an earlier comparison would hide a failure
    replaced = None if any(PLACEHOLDER in word for word in script) else content
    turn = RunSpec(arguments.steps, arguments.warm_up, str(report), replaced)
    launcher = Launcher(arguments.launcher, arguments.turn_ranks, arguments.hostfile, arguments.launch)
    command = launcher.command(script, arguments.configs[index].absolute())
    with environment(turn) as env:
        run(command, env, log, arguments.timeout)
    written: dict[str, Any] = json.loads(report.read_text()) if report.is_file() else {}
    problem, expected_steps = "", arguments.warm_up + arguments.steps
    if not written:
        problem = (
            f"the script ended without a report in {report}: no DeepSpeed engine was built where deepspeed_ext is "
            f"active (python -m deepspeed_ext shows that; {VARIABLE} must reach all ranks), or the first node does "
            f"not have that folder (--folder on a file system that all nodes share)."
        )
    elif UNFINISHED in written:
        count = written[UNFINISHED]
        problem = f"the script ended after {count} optimizer steps, expected --warm-up + --steps = {expected_steps}."
    if problem:
        raise RunFailed(f"{launching.tail(log)}\n\n{problem}\nwhole log: {log}")
    return written


def _conclude(arguments: argparse.Namespace, reports: list[list[dict[str, Any]]]) -> int:
    """Print and write the verdict; return the exit status."""
    config_runs = [
        ConfigRuns(string.ascii_uppercase[index], path.name, reports[index])
        for index, path in enumerate(arguments.configs)
    ]
    first, *others = config_runs
    comparisons = [compare(first, other, arguments.loss_bound) for other in others]
    info = first.first
    print(
        f"{info['ranks']} rank(s) of {info['device']}, {info['dtype']}, DeepSpeed {info['versions']['deepspeed']}; "
        f"{arguments.rounds} round(s) of {arguments.steps} steps, after {arguments.warm_up} of warm-up\n"
    )
    print(table(config_runs, comparisons), "", *(comparison.sentence for comparison in comparisons), sep="\n")
    if arguments.json:
        document = _document(arguments, config_runs, comparisons)
        arguments.json.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
    return int(any(comparison.problem for comparison in comparisons) and not arguments.ignore_losses)


def _document(
    arguments: argparse.Namespace, config_runs: Sequence[ConfigRuns], comparisons: Sequence[Comparison]
) -> dict[str, Any]:
    options = {name: getattr(arguments, name) for name in ("rounds", "steps", "warm_up", "order", "seed")}
    return {
        **options,
        "configs": [
            {"letter": config.letter, "file": config.file, "turns": [_finite(report) for report in config.reports]}
            for config in config_runs
        ],
        "comparisons": [comparison.as_dict() for comparison in comparisons],
        "losses_agree": not any(comparison.problem for comparison in comparisons),
    }


def _finite(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report with None for losses that are not finite, which JSON does not have."""
    losses = {
        name: [None if loss is None or not math.isfinite(loss) else loss for loss in values]
        for name, values in report.items()
        if name.startswith("losses")
    }
    return {**report, **losses}
