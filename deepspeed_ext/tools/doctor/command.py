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

from deepspeed_ext.tools.doctor import printer
from deepspeed_ext.tools.doctor.check import Check
from deepspeed_ext.tools.doctor.checks import all_checks
from deepspeed_ext.tools.doctor.findings import Level, Section, worst
from deepspeed_ext.tools.doctor.meeting import CannotMeet, Meeting, meet
from deepspeed_ext.tools.doctor.place import Options, Place
from deepspeed_ext.tools.doctor.runner import Report, Runner
from deepspeed_ext.version import __version__

COULD_NOT_RUN = 2
_TO_LEAVE = 10.0  # seconds that the first rank, which may hold the store, waits for others to hear what it says


def run(options: Options, document: Path | None, patch_problems: Callable[[], list[str]]) -> int:
    """Examine this launch. Returns the exit status, the same on all ranks.

    Args:
        options: what was asked for.
        document: where the first rank writes the report as JSON; None for nowhere.
        patch_problems: see ``Place``.

    Returns:
        0 if nothing is wrong, 1 if something is, 2 if it could not run, or not write the document.
    """
    environment = dict(os.environ)
    warnings.simplefilter("ignore", FutureWarning)  # of torch, about functions that DeepSpeed calls
    try:
        meeting = meet(environment, options.timeout)
        local = int(environment.get("LOCAL_RANK", "0"))
        place = Place(meeting.rank, local, meeting.hosts, options, environment, patch_problems)
        status, report = _examine(meeting, place, document)
    except CannotMeet as error:
        _complain(error)
        status, report = COULD_NOT_RUN, Report()
    sys.stdout.flush()
    sys.stderr.flush()
    if report.abandoned:
        os._exit(status)
    return status


def _examine(meeting: Meeting, place: Place, document: Path | None) -> tuple[int, Report]:
    """Return the status, the same on all ranks, and what was found."""
    # Checked here, since only rank 0's node needs the folder, and all ranks are to end without it.
    refused = place.rank == 0 and document is not None and not document.absolute().parent.is_dir()
    if refused:
        _complain(f"there is no folder for {document} on {place.hosts[0]}, where rank 0 writes it.")
    if _heard(meeting, "refused", str(refused), place) == str(True):
        return COULD_NOT_RUN, Report()
    report = Runner(meeting, place).run(_chosen(meeting, place.options))
    return _conclude(meeting, place, report, document), report


def _complain(problem: object) -> None:
    print(f"doctor: {problem}", file=sys.stderr, flush=True)


def _heard(meeting: Meeting, name: str, text: str, place: Place) -> str:
    """Return on all ranks the text that the first one says; it waits until the others have heard it."""
    if place.rank:
        text = meeting.hear(name, place.options.timeout + _TO_LEAVE)
        meeting.answer(f"{name} heard", "")
        return text
    meeting.say(name, text)
    meeting.answers(f"{name} heard", range(1, place.world), _TO_LEAVE)
    return text


def _chosen(meeting: Meeting, options: Options) -> list[Check]:
    """Return the checks that are not skipped."""
    return [check for check in all_checks(meeting.store) if check.title not in options.skip]


def _conclude(meeting: Meeting, place: Place, report: Report, document: Path | None) -> int:
    """Print on the first rank; return the status on all."""
    status = 1 if worst(report.sections) == Level.WRONG else 0
    if place.rank == 0:
        try:
            _show(place, report.sections, status, document)
        except OSError as error:  # others wait for the status
            _complain(f"the report could not be written: {error}")
            status = COULD_NOT_RUN
    return int(_heard(meeting, "status", str(status), place))


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
