# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Clocks of hosts: whether they agree, by ping-pong with the first rank."""

from deepspeed_ext.tools.doctor.check import Answers, Check
from deepspeed_ext.tools.doctor.findings import Finding, Level
from deepspeed_ext.tools.doctor.place import Place

_APART = 1.0  # seconds


def examine(place: Place) -> dict[str, float] | None:
    """Return how far the clock of each other host's first rank is ahead of ours, in seconds; on the first rank."""
    from deepspeed_ext.tools.doctor.wire import offset

    found = {}
    for first in (team[0] for team in place.teams()[1:]):
        if place.rank == 0:
            found[str(first)] = offset(first, asks=True)
        elif place.rank == first:
            offset(0, asks=False)
    return None if place.rank else found


def judge(answers: Answers, place: Place) -> list[Finding]:
    """Return hosts whose clocks are apart."""
    offsets: dict[int, float] = {int(rank): seconds for rank, seconds in answers[0].items()}
    apart = {rank: seconds for rank, seconds in offsets.items() if abs(seconds) > _APART}
    if apart:
        said = ", ".join(f"{place.hosts[rank]} (rank {rank}) {seconds:+.1f} s" for rank, seconds in apart.items())
        advice = "Run an NTP client. Logs do not line up, and files that are newer seem older on shared disks."
        return [Finding("clocks", Level.LOOK, f"compared with {place.hosts[0]}: {said}", advice)]
    most = max((abs(seconds) for seconds in offsets.values()), default=0.0)
    return [Finding("clocks", Level.OK, f"of {len(offsets) + 1} node(s), at most {most * 1e3:.1f} ms apart")]


CHECK = Check("clocks", examine, judge, together=True)
