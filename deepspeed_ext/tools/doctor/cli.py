# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``python -m deepspeed_ext doctor`` examines the nodes of a launch on the nodes themselves.

It connects all ranks, runs all checks, prints the report, and exits with the same status on all ranks. All ranks run
the same checks in the same order. Each rank examines itself, and rank 0 judges all answers. A check that raises or
hangs on a rank is a finding. If it communicates over process groups, later checks that communicate are skipped.
"""

import argparse
import json
import os
import pkgutil
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from deepspeed_ext.strategy import parse_strategy
from deepspeed_ext.tools.arguments import count, number
from deepspeed_ext.tools.doctor.findings import WIDTH, Finding, Level, Section, by_value, report_text, worst_level
from deepspeed_ext.tools.doctor.launch import Check, Launch, Options, RendezvousError, connect
from deepspeed_ext.version import __version__

GROUPS = "process groups"
CHECKS = {  # title -> module (which may import torch) and check; checks that communicate are last
    "versions": "checks:VERSIONS",
    "environment": "environment:ENVIRONMENT",
    "groups": "checks:GROUPS",
    "memory and disks": "checks:MEMORY",
    "pinned memory": "checks:PINNED",
    "compiler": "checks:COMPILER",
    "LoCo's kernels": "kernels:KERNELS",
    GROUPS: "links:PROCESS_GROUPS",
    "links": "links:LINKS",
    "nodes and links": "links:PAIRS",
    "clocks": "links:CLOCKS",
}
COULD_NOT_RUN = 2
_GRACE = 5.0  # seconds that another rank may exceed its own time limit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``doctor``, without importing DeepSpeed yet."""
    parser.add_argument("--group-size", type=number(int), help="paro_group_size (default: ranks per node)")
    late = "seconds to wait for a rank, and for a message (default: 60)"
    parser.add_argument("--timeout", type=number(float), default=60.0, metavar="S", help=late)
    written = "file in which rank 0 writes the report with all measurements"
    parser.add_argument("--json", type=Path, metavar="FILE", help=written)
    skip = f"title of a check to skip, may be repeated: {', '.join(CHECKS)}"
    parser.add_argument("--skip", action="append", choices=CHECKS, default=[], metavar="TITLE", help=skip)
    model = parser.add_argument_group("the model whose states must fit into memory, without activations")
    model.add_argument("--params", type=number(count), metavar="N", help="number of parameters, such as 7e9 or 7B")
    model.add_argument("--strategy", type=_strategy, default="NIG", help="such as I-I-G (default: N-I-G)")
    dtypes = ("bf16", "fp16", "fp32")
    model.add_argument(
        "--dtype", choices=dtypes, default="bf16", help="dtype of parameters and gradients (default: bf16)"
    )
    model.add_argument("--offload-optimizer", action="store_true", help="optimizer states in host memory")


def _strategy(text: str) -> str:
    try:
        return parse_strategy(text).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


@dataclass
class Report:
    """The result of all checks.

    Attributes:
        sections: sections of all checks on rank 0; empty on other ranks.
        abandoned: whether a check is still running on this rank, so that the process must end by ``os._exit``.
    """

    sections: list[Section] = field(default_factory=list)
    abandoned: bool = False


def run(arguments: argparse.Namespace, patch_problems: Callable[[], list[str]]) -> int:
    """Examine this launch.

    Args:
        arguments: arguments from ``add_arguments``.
        patch_problems: returns the patches of DeepSpeed that are not as expected.

    Returns:
        The exit status, the same on all ranks: 0 if nothing is wrong, 1 if something is, 2 if it could not run or
        could not write the document.
    """
    options = Options(**{option.name: getattr(arguments, option.name) for option in fields(Options)})
    warnings.simplefilter("ignore", FutureWarning)  # torch's, about functions that DeepSpeed calls
    report = Report()
    try:
        launch = connect(dict(os.environ), options, patch_problems)
        checks = {title: _load(title) for title in CHECKS if title not in options.skip}
        status = examine(launch, checks, arguments.json, report)
    except RendezvousError as error:
        _print_error(str(error))
        status = COULD_NOT_RUN
    # ``os._exit`` does not flush buffers.
    sys.stdout.flush()
    sys.stderr.flush()
    if report.abandoned:
        os._exit(status)
    return status


def _load(title: str) -> Check:
    check: Check = pkgutil.resolve_name(f"{__package__}.{CHECKS[title]}")
    return check


def examine(launch: Launch, checks: Mapping[str, Check], document: Path | None, report: Report) -> int:
    """Fill the report and print it on rank 0. Returns the exit status, the same on all ranks; see ``run``."""
    problem = ""
    if launch.rank == 0 and document is not None and not document.absolute().parent.is_dir():
        problem = f"there is no folder for {document} on {launch.hosts[0]}, where rank 0 writes it."
        _print_error(problem)
    # Only rank 0 needs the folder, but without it all ranks must stop: the others would wait for rank 0.
    if launch.broadcast_and_confirm("error", problem):
        return COULD_NOT_RUN
    run_checks(launch, checks, report)
    status = 1 if worst_level(report.sections) == Level.WRONG else 0
    if launch.rank == 0:
        try:
            _show(launch, report.sections, status, document)
        except OSError as error:  # do not raise: the other ranks wait for the status
            _print_error(f"the report could not be written: {error}")
            status = COULD_NOT_RUN
    return int(launch.broadcast_and_confirm("status", str(status)))


def run_checks(launch: Launch, checks: Mapping[str, Check], report: Report) -> None:
    """Add a section for each check, by title, to the report. Collective over all ranks.

    Raises:
        RendezvousError: rank 0 is lost.
    """
    responsive = set(range(launch.world))
    obstacle: Finding | None = None  # reason to skip all later checks that communicate over process groups
    if GROUPS in launch.options.skip:
        obstacle = _skipped_finding(f"it needs {GROUPS}, which are skipped", "Do not skip them")
    limits = {title: max(launch.options.timeout, check.least_seconds) for title, check in checks.items()}
    # Rank 0 may use up the limits of all earlier checks before it reaches the next one.
    patience = 2 * sum(limit + _GRACE for limit in limits.values())
    for title, check in checks.items():
        reason = obstacle.found if obstacle else ""
        if check.collective and launch.broadcast(f"{title}/obstacle", reason, patience):
            if obstacle and launch.rank == 0:
                report.sections.append(Section(title, (obstacle,), {}))
            continue
        outcome = _run_limited(check, launch, limits[title])
        report.abandoned |= not outcome
        # If the check still runs, this text is the rank's answer.
        late = json.dumps({"answer": None, "error": f"it did not end within {limits[title]:g} s"})
        outcomes = launch.gather(title, outcome or late, responsive, limits[title] + _GRACE)
        if launch.rank:
            continue
        findings, answers, failed = _judge(check, launch, outcomes, responsive - set(outcomes))
        report.sections.append(Section(title, tuple(findings), answers))
        # A rank without an answer may still be in a collective, and would block all others.
        if (failed and check.collective) or responsive - set(outcomes):
            obstacle = obstacle or _skipped_finding(f"{title} failed", "Fix that")
        responsive = set(outcomes)


def _run_limited(check: Check, launch: Launch, seconds: float) -> str:
    """Run a check for a limited time. Returns its answer or error as JSON; empty if it is still running.

    A call that blocks in C cannot be interrupted. Its thread is abandoned, and the process must end by ``os._exit``,
    because the interpreter would not shut down while the thread runs.
    """
    outcomes: list[str] = []

    def run() -> None:
        try:
            from deepspeed.accelerator import get_accelerator

            if not get_accelerator().is_synchronized_device():
                get_accelerator().set_device(launch.local_rank)  # the current device is per thread
            outcomes.append(json.dumps({"answer": check.examine(launch), "error": ""}))
        except BaseException as error:  # includes SystemExit, which DeepSpeed's builders raise
            text = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
            outcomes.append(json.dumps({"answer": None, "error": text}))

    thread = threading.Thread(target=run, name="doctor", daemon=True)
    thread.start()
    thread.join(seconds)
    return outcomes[0] if outcomes else ""


def _judge(
    check: Check, launch: Launch, texts: Mapping[int, str], lost: Collection[int]
) -> tuple[list[Finding], dict[int, object], bool]:
    """Return the findings from all ranks' outcomes, the answers, and whether the check failed on a rank."""
    outcomes = {rank: json.loads(text) for rank, text in sorted(texts.items())}
    answers = {rank: outcome["answer"] for rank, outcome in outcomes.items() if not outcome["error"]}
    errors = by_value({rank: outcome["error"] for rank, outcome in outcomes.items() if outcome["error"]})
    findings = [_failure(launch, ranks, error) for error, ranks in errors.items()]
    if lost:
        advice = "Check the output of these ranks, and whether their processes and hosts still run."
        findings.append(
            Finding(launch.ranks_with_hosts(lost), Level.WRONG, "no answer: it died or cannot be reached", advice)
        )
    if answers and not (check.collective and findings):
        try:
            # An error of one check must not lose the report of the others.
            findings += check.judge(answers, launch)
        except Exception as error:
            findings.append(_failure(launch, [0], f"{type(error).__name__}: {error}"))
    return findings, answers, bool(errors)


def _failure(launch: Launch, ranks: list[int], error: str) -> Finding:
    text = f"the check itself failed: {' '.join(error.split())[:600]}"
    return Finding(launch.ranks_with_hosts(ranks), Level.WRONG, text)


def _skipped_finding(reason: str, advice: str) -> Finding:
    return Finding("skipped", Level.LOOK, reason, f"{advice}, and run the doctor again.")


def _print_error(problem: str) -> None:
    print(f"doctor: {problem}", file=sys.stderr, flush=True)


def _show(launch: Launch, sections: list[Section], status: int, document: Path | None) -> None:
    terminal, hosts = sys.stdout.isatty(), launch.ranks_of_hosts()
    width = max(60, min(WIDTH, shutil.get_terminal_size().columns)) if terminal else WIDTH
    print(f"deepspeed_ext {__version__} doctor: {launch.world} rank(s) on {len(hosts)} host(s)\n")
    print(report_text(sections, terminal and "NO_COLOR" not in launch.environment, width), flush=True)
    if document is not None:
        content = {"deepspeed_ext": __version__, "ranks": launch.world, "hosts": hosts, "status": status}
        content |= {"sections": [section.as_dict() for section in sections]}
        document.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
