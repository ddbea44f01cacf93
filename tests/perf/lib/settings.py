# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""How programs measure settings on emulated clusters: a launch for each, whose ranks are the same program."""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from scripts.emulation.cluster import collect
from scripts.emulation.launching import start_rank
from tests.perf.lib import records
from tests.perf.lib.cluster_rows import MethodRow

_Row = TypeVar("_Row", bound=MethodRow)


def add_arguments(
    parser: argparse.ArgumentParser, program: str, settings: Mapping[str, Any], methods: Sequence[str]
) -> None:
    """Add what all of these programs take.

    Args:
        parser: of the program.
        program: its name.
        settings: by name; of each ``nodes`` and ``ranks_per_node`` are used.
        methods: that take turns.
    """
    parser.add_argument("--settings", nargs="+", choices=settings, default=list(settings), metavar="NAME")
    parser.add_argument("--methods", nargs="+", choices=methods, default=list(methods), metavar="NAME")
    parser.add_argument("--log", type=Path, default=Path(f"{program}.log"), help="what the ranks print")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that a setting may take")
    parser.add_argument("--csv", type=Path, help="append a row a result here")
    parser.add_argument("--setting", choices=settings, help=argparse.SUPPRESS)  # of a rank
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # a rank, and where it reports


def require_positive(parser: argparse.ArgumentParser, args: argparse.Namespace, *names: str) -> None:
    """End the program if one of these options, or a number in its list, is not positive; None is."""
    for name in names:
        given = getattr(args, name)
        values = given if isinstance(given, list | tuple) else [] if given is None else [given]
        if not all(value > 0 for value in values):
            parser.error(f"--{name} must be positive, got {given}")


def run(
    args: argparse.Namespace,
    module: str,
    settings: Mapping[str, Any],
    row: Callable[..., _Row],
    measure: Callable[[], Iterable[_Row]],
    print_all: Callable[[list[_Row]], bool],
) -> int:
    """Measure as a rank, or launch the ranks of each setting that is asked for.

    Args:
        args: of the program.
        module: the program.
        settings: by name.
        row: makes one of what a rank has reported.
        measure: what a rank does.
        print_all: prints a setting's rows; returns whether something is wrong with them.

    Returns:
        The exit status.
    """
    if args.worker is not None:
        _work(args.worker, measure)
        return 0
    failed = False
    for name in args.settings:
        setting = settings[name]
        more = ["--setting", name]
        found = collect(setting.nodes, setting.ranks_per_node, module, args.log, args.timeout, more)
        rows = [row(**values | {"held": tuple(values["held"])}) for values in found]
        wrong = print_all(rows)
        failed |= wrong
        if args.csv is not None and not wrong:  # what did not train the same, or not as it should, is no result
            records.append_rows(args.csv, [one.to_csv() for one in rows])
    return int(failed)


def run_what_is_promised(
    args: argparse.Namespace,
    module: str,
    settings: Mapping[str, Any],
    row: Callable[..., _Row],
    measure: Callable[[], Iterable[_Row]],
    print_all: Callable[[list[_Row]], bool],
    missed: Callable[[list[_Row]], list[str]],
) -> int:
    """Do as ``run`` does; a setting in which a method is not as fast as it should be makes the exit status 1, too.

    Args:
        args, module, settings, row, measure, print_all: those of ``run``.
        missed: says of a setting's rows which methods are not, and by how much.
    """
    late: list[str] = []

    def look(rows: list[_Row]) -> bool:
        late.extend(missed(rows))
        return print_all(rows)

    status = run(args, module, settings, row, measure, look)
    for line in late:
        print(f"MISSED: {line}")
    return status or int(bool(late))


def _work(report: Path, measure: Callable[[], Iterable[MethodRow]]) -> None:
    """Live as a rank: measure and report."""
    first = start_rank()
    rows = measure()
    if first:
        report.write_text(json.dumps([asdict(row) for row in rows]))
    dist.destroy_process_group()
