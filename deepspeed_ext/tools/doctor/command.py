# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The command: connects all ranks, runs all checks, prints the report, and ends with one status on all ranks.

All ranks run the same checks in the same order; each rank examines, and rank 0 judges all answers. A check that
raises or hangs on a rank is a finding. After one that communicates over process groups, those that follow it and
communicate are left out.
"""

import json
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deepspeed_ext.tools.doctor import checks, environment, findings, kernels, links
from deepspeed_ext.tools.doctor.cluster import Check, Launch, Options, RendezvousError, connect
from deepspeed_ext.tools.doctor.findings import Finding, Level, Section, by_value, worst
from deepspeed_ext.version import __version__

CHECKS = (  # what communicates comes last, after the process groups
    checks.VERSIONS,
    environment.ENVIRONMENT,
    checks.GROUPS,
    checks.MEMORY,
    checks.PINNED,
    checks.COMPILER,
    kernels.KERNELS,
    links.PROCESS_GROUPS,
    links.LINKS,
    links.PAIRS,
    links.CLOCKS,
)
COULD_NOT_RUN = 2
_GRACE = 5.0  # seconds that another rank may exceed its own time limit


@dataclass
class Report:
    """The result of all checks.

    Attributes:
        sections: on rank 0; empty on other ranks.
        abandoned: whether a check is still running on this rank, so that the process must end by ``os._exit``.
    """

    sections: list[Section] = field(default_factory=list)
    abandoned: bool = False


def examine(options: Options, document: Path | None, patch_problems: Callable[[], list[str]]) -> int:
    """Examine this launch.

    Args:
        options: of the command line.
        document: file to which rank 0 writes the report as JSON; None for no file.
        patch_problems: see ``Launch``.

    Returns:
        The exit status, the same on all ranks: 0 if nothing is wrong, 1 if something is, 2 if it could not run, or
        not write the document.
    """
    warnings.simplefilter("ignore", FutureWarning)  # of torch, about functions that DeepSpeed calls
    report = Report()
    try:
        status = examine_launch(connect(dict(os.environ), options, patch_problems), CHECKS, document, report)
    except RendezvousError as error:
        _print_error(str(error))
        status = COULD_NOT_RUN
    sys.stdout.flush()
    sys.stderr.flush()
    if report.abandoned:
        os._exit(status)
    return status


def examine_launch(launch: Launch, checks: Sequence[Check], document: Path | None, report: Report) -> int:
    """Fill the report and print it on rank 0. Returns the exit status, the same on all ranks; see ``examine``."""
    error = ""
    if launch.rank == 0 and document is not None and not document.absolute().parent.is_dir():
        error = f"there is no folder for {document} on {launch.hosts[0]}, where rank 0 writes it."
        _print_error(error)
    # Only rank 0's node needs the folder, but all ranks have to stop without it.
    if launch.agree("error", error):
        return COULD_NOT_RUN
    run_checks(launch, [check for check in checks if check.title not in launch.options.skip], report)
    status = 1 if worst(report.sections) == Level.WRONG else 0
    if launch.rank == 0:
        try:
            _show(launch, report.sections, status, document)
        except OSError as error:  # not raised, since the other ranks wait for the status
            _print_error(f"the report could not be written: {error}")
            status = COULD_NOT_RUN
    return int(launch.agree("status", str(status)))


def run_checks(launch: Launch, checks: Sequence[Check], report: Report) -> None:
    """Add a section for each check to the report. Collective over all ranks.

    Raises:
        RendezvousError: rank 0 is lost.
    """
    present = set(range(launch.world))
    obstacle: Finding | None = None  # why nothing more may communicate over process groups
    if links.PROCESS_GROUPS.title in launch.options.skip:
        obstacle = _left_out(f"it needs {links.PROCESS_GROUPS.title}, which are skipped", "Do not skip them")
    patience = 2 * sum(_time_limit(check, launch) + _GRACE for check in checks)
    for check in checks:
        reason = obstacle.found if obstacle else ""
        if check.together and launch.broadcast(f"{check.title}/obstacle", reason, patience):
            if obstacle and launch.rank == 0:
                report.sections.append(Section(check.title, (obstacle,), {}))
            continue
        outcome, abandoned = _run_limited(check, launch)
        report.abandoned |= abandoned
        outcomes = launch.gather(check.title, outcome, present, _time_limit(check, launch) + _GRACE)
        if launch.rank:
            continue
        section, failed = _judge(check, launch, outcomes, present - set(outcomes))
        report.sections.append(section)
        if (failed and check.together) or present - set(outcomes):
            obstacle = obstacle or _left_out(f"{check.title} failed", "Fix that")
        present = set(outcomes)


def _time_limit(check: Check, launch: Launch) -> float:
    return max(launch.options.timeout, check.least_seconds)


def _run_limited(check: Check, launch: Launch) -> tuple[str, bool]:
    """Run a check for a limited time. Returns its answer or error as JSON, and whether it is still running.

    A call that blocks in C can be neither interrupted nor raised from. So a late thread is abandoned, and the process
    has to end by ``os._exit``, since the interpreter could not be shut down around it.
    """
    outcomes: list[str] = []

    def run() -> None:
        try:
            from deepspeed.accelerator import get_accelerator

            if not get_accelerator().is_synchronized_device():
                get_accelerator().set_device(launch.local_rank)  # each thread has its own
            outcomes.append(json.dumps({"answer": check.examine(launch), "error": ""}))
        except BaseException as error:  # also SystemExit: DeepSpeed's builders raise it
            text = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
            outcomes.append(json.dumps({"answer": None, "error": text}))

    thread = threading.Thread(target=run, name="doctor", daemon=True)
    thread.start()
    thread.join(_time_limit(check, launch))
    late = f"it did not end within {_time_limit(check, launch):g} s"
    return (outcomes[0], False) if outcomes else (json.dumps({"answer": None, "error": late}), True)


def _judge(check: Check, launch: Launch, texts: dict[int, str], lost: Collection[int]) -> tuple[Section, bool]:
    """Return the findings from all ranks' outcomes, and whether the check failed on a rank."""
    outcomes = {rank: json.loads(text) for rank, text in sorted(texts.items())}
    answers = {rank: outcome["answer"] for rank, outcome in outcomes.items() if not outcome["error"]}
    errors = by_value({rank: outcome["error"] for rank, outcome in outcomes.items() if outcome["error"]})
    results = [_failure(launch, ranks, error) for error, ranks in errors.items()]
    if lost:
        advice = "See what these ranks have printed, and whether their processes and hosts still run."
        results.append(Finding(launch.located(lost), Level.WRONG, "no answer: dead, or out of reach", advice))
    if answers and not (check.together and results):
        try:
            results += check.judge(answers, launch)
        except Exception as error:
            results.append(_failure(launch, [0], f"{type(error).__name__}: {error}"))
    return Section(check.title, tuple(results), answers), bool(errors)


def _failure(launch: Launch, ranks: list[int], error: str) -> Finding:
    found = f"the check itself failed: {' '.join(error.split())[:600]}"
    return Finding(launch.located(ranks), Level.WRONG, found)


def _left_out(reason: str, advice: str) -> Finding:
    return Finding("left out", Level.LOOK, reason, f"{advice}, and run the doctor again.")


def _print_error(problem: str) -> None:
    print(f"doctor: {problem}", file=sys.stderr, flush=True)


def _show(launch: Launch, sections: list[Section], status: int, document: Path | None) -> None:
    terminal = sys.stdout.isatty()
    width = max(60, min(findings.WIDTH, shutil.get_terminal_size().columns)) if terminal else findings.WIDTH
    hosts = launch.ranks_of_hosts()
    print(f"deepspeed_ext {__version__} doctor: {launch.world} rank(s) on {len(hosts)} host(s)\n")
    print(findings.report_text(sections, terminal and "NO_COLOR" not in launch.environment, width), flush=True)
    if document is not None:
        content = {
            "deepspeed_ext": __version__,
            "ranks": launch.world,
            "hosts": hosts,
            "status": status,
            "sections": [section.as_dict() for section in sections],
        }
        document.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
