# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs all checks on all ranks: each rank examines, the first one judges.

All ranks go through the same checks in the same order. A check that raises or hangs on one rank is a finding; checks
that communicate over process groups are left out from then on. If process groups are skipped, all these are.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed_ext.tools.doctor.check import Check
from deepspeed_ext.tools.doctor.findings import Finding, Level, Section, by_value, ranks_text
from deepspeed_ext.tools.doctor.limited import within
from deepspeed_ext.tools.doctor.meeting import Meeting
from deepspeed_ext.tools.doctor.place import Place
from deepspeed_ext.tools.doctor.process_group import TITLE as PROCESS_GROUPS

_GRACE = 5.0  # seconds that another rank may be later than its own limit
_GO = "go"


@dataclass
class Report:
    """What all checks have found.

    Attributes:
        sections: on the first rank; empty on others.
        abandoned: whether something still runs on this rank, so that the process must end by ``os._exit``.
    """

    sections: list[Section] = field(default_factory=list)
    abandoned: bool = False


class Runner:
    """Runs checks.

    Args:
        meeting: how ranks tell one another what they found.
        place: this rank.
    """

    def __init__(self, meeting: Meeting, place: Place) -> None:
        self._meeting, self._place = meeting, place
        self._left = set(range(place.world))  # ranks that have answered so far
        self._obstacle: Finding | None = None  # why nothing more is communicated over process groups
        if PROCESS_GROUPS in place.options.skip:
            self._obstacle = _left_out(f"it needs {PROCESS_GROUPS}, which are skipped", "Do not skip them")

    def run(self, checks: Sequence[Check]) -> Report:
        """Run all checks. Collective over all ranks.

        Raises:
            CannotMeet: the first rank is lost.
        """
        report = Report()
        patience = 2 * sum(check.seconds(self._place) + _GRACE for check in checks)
        for check in checks:
            if self._place.rank == 0:
                if check.together:
                    self._meeting.say(f"{check.title}/go", self._obstacle.found if self._obstacle else _GO)
            elif check.together and self._meeting.hear(f"{check.title}/go", patience) != _GO:
                continue
            if check.together and self._obstacle:
                report.sections.append(Section(check.title, (self._obstacle,), {}))
                continue
            outcome = within(check.seconds(self._place), lambda check=check: self._examine(check))  # type: ignore[misc]
            report.abandoned |= outcome.abandoned
            self._meeting.answer(check.title, json.dumps({"answer": outcome.answer, "error": outcome.error}))
            if self._place.rank == 0:
                report.sections.append(self._section(check))
        return report

    def _examine(self, check: Check) -> Any:
        from deepspeed.accelerator import get_accelerator

        device = get_accelerator()
        if not device.is_synchronized_device():
            device.set_device(self._place.local_rank)  # each thread has its own
        answer = check.examine(self._place)
        json.dumps(answer)  # here: what cannot be told is an error of the check
        return answer

    def _section(self, check: Check) -> Section:
        """Return what all ranks' answers mean; on the first rank."""
        texts = self._meeting.answers(check.title, self._left, check.seconds(self._place) + _GRACE)
        told = {rank: json.loads(text) for rank, text in sorted(texts.items())}
        lost, self._left = sorted(self._left - set(told)), set(told)
        answers = {rank: one["answer"] for rank, one in told.items() if not one["error"]}
        errors = by_value({rank: one["error"] for rank, one in told.items() if one["error"]})
        findings = [_failed(ranks, error, self._place) for error, ranks in errors.items()]
        findings += [_lost(lost, self._place)] if lost else []
        if (errors and check.together) or lost:
            self._obstacle = self._obstacle or _left_out(f"{check.title} failed", "Mend that")
        if answers and not (check.together and findings):
            try:
                findings += check.judge(answers, self._place)
            except Exception as error:
                findings.append(_failed([0], f"{type(error).__name__}: {error}", self._place))
        return Section(check.title, tuple(findings), answers)


def _failed(ranks: list[int], error: str, place: Place) -> Finding:
    hosts = ", ".join(dict.fromkeys(place.hosts[rank] for rank in ranks))
    found = f"the check itself failed: {' '.join(error.split())[:600]}"
    return Finding(f"{ranks_text(ranks)} on {hosts}", Level.WRONG, found)


def _lost(ranks: list[int], place: Place) -> Finding:
    hosts = ", ".join(dict.fromkeys(place.hosts[rank] for rank in ranks))
    advice = "See what these ranks have printed, and whether their processes and hosts are still there."
    return Finding(f"{ranks_text(ranks)} on {hosts}", Level.WRONG, "no answer: dead, or out of reach", advice)


def _left_out(why: str, advice: str) -> Finding:
    return Finding("left out", Level.LOOK, why, f"{advice}, and run the doctor again.")
