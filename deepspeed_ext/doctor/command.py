# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The command: meet, run all checks, print, and agree on the exit status."""

import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

from deepspeed_ext.doctor import printer
from deepspeed_ext.doctor.check import Check
from deepspeed_ext.doctor.checks import all_checks
from deepspeed_ext.doctor.findings import Level, Section, worst
from deepspeed_ext.doctor.meeting import CannotMeet, Meeting, meet
from deepspeed_ext.doctor.place import Options, Place
from deepspeed_ext.doctor.runner import Report, Runner
from deepspeed_ext.version import __version__

COULD_NOT_RUN = 2
_TO_LEAVE = 10.0  # seconds that the first rank, which may hold the store, waits for others to read the status


def run(options: Options, document: Path | None, patch_problems: Callable[[], list[str]]) -> int:
    """Examine this launch. Returns the exit status, the same on all ranks.

    Args:
        options: what was asked for.
        document: where to write the report as JSON; None for nowhere.
        patch_problems: see ``Place``.

    Returns:
        0 if nothing is wrong, 1 if something is, 2 if it could not run.
    """
    environment = dict(os.environ)
    warnings.simplefilter("ignore", FutureWarning)  # of torch, about functions that DeepSpeed calls
    try:
        meeting = meet(environment, options.timeout)
        local = int(environment.get("LOCAL_RANK", "0"))
        place = Place(meeting.rank, local, meeting.hosts, options, environment, patch_problems)
        report = Runner(meeting, place).run(_chosen(meeting, options))
        status = _conclude(meeting, place, report, document)
    except CannotMeet as error:
        print(f"doctor: {error}", file=sys.stderr, flush=True)
        status, report = COULD_NOT_RUN, Report()
    sys.stdout.flush()
    sys.stderr.flush()
    if report.abandoned:
        os._exit(status)
    return status


def _chosen(meeting: Meeting, options: Options) -> list[Check]:
    """Return the checks that are not skipped."""
    return [check for check in all_checks(meeting.store) if check.title not in options.skip]


def _conclude(meeting: Meeting, place: Place, report: Report, document: Path | None) -> int:
    """Print on the first rank; return the status on all."""
    if place.rank:
        status = int(meeting.hear("status", place.options.timeout + _TO_LEAVE))
        meeting.answer("left", "")
        return status
    status = 1 if worst(report.sections) == Level.WRONG else 0
    _show(place, report.sections, status, document)
    meeting.say("status", str(status))
    meeting.answers("left", range(1, place.world), _TO_LEAVE)
    return status


def _show(place: Place, sections: list[Section], status: int, document: Path | None) -> None:
    terminal = sys.stdout.isatty()
    width = min(printer.WIDTH, shutil.get_terminal_size().columns) if terminal else printer.WIDTH
    hosts = place.ranks_of_hosts()
    print(f"deepspeed_ext {__version__} doctor: {place.world} rank(s) on {len(hosts)} host(s)\n")
    print(printer.text(sections, terminal and "NO_COLOR" not in place.environment, max(60, width)), flush=True)
    if document is not None:
        content = {
            "deepspeed_ext": __version__,
            "ranks": place.world,
            "hosts": hosts,
            "status": status,
            "sections": [section.as_dict() for section in sections],
        }
        document.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
