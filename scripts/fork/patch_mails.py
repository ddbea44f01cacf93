# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The patches of the series, as the mails that ``git format-patch`` writes."""

import email
import re
from pathlib import Path
from typing import NamedTuple

from scripts import ROOT
from scripts.fork.deepspeed_source import Failed
from scripts.fork.translated_sources import sources, target

PATCHES = ROOT / "patches"
SERIES = PATCHES / "series"
GENERATED = "Generated-From"  # a glob of our files that the patch brings
ALONE = "Standalone-Test"  # a file of tests, relative to DeepSpeed's root, of a patch that needs no other one
REQUIRED = ("Signed-off-by", "Upstream-Status", "Remove-When")
STATUSES = ("pending", "submitted", "merged", "not-applicable")  # submitted and merged with an address

_TRAILER = re.compile(r"^([A-Z][A-Za-z]*(?:-[A-Za-z]+)+): (\S.*)$")


class Mail(NamedTuple):
    """A patch.

    Attributes:
        path: its file.
        date: of its author, as in the mail.
        subject: without ``[PATCH]``.
        body: why, without the trailers.
        trailers: names and values, in order.
    """

    path: Path
    date: str
    subject: str
    body: str
    trailers: tuple[tuple[str, str], ...]

    def values(self, name: str) -> list[str]:
        """Return the values of all trailers with this name."""
        return [value for found, value in self.trailers if found == name]

    @property
    def generated(self) -> list[str]:
        """Return our files that it brings.

        Raises:
            Failed: a glob matches none.
        """
        known, found = set(sources()), []
        for glob in self.values(GENERATED):
            names = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(glob))
            names = [name for name in names if name in known]
            if not names:
                raise Failed(f"{self.path.name}: {GENERATED}: {glob} matches no file that a fork has")
            found += names
        return found

    @property
    def tests(self) -> list[str]:
        """Return the files of tests that it brings; empty unless it is a fix that applies alone."""
        return self.values(ALONE)

    def problems(self) -> list[str]:
        """Return what its header lacks."""
        found = [f"no trailer {name}" for name in REQUIRED if not self.values(name)]
        found += [
            f"Upstream-Status {value!r}, expected one of {', '.join(STATUSES)}"
            for value in self.values("Upstream-Status")
            if value.split(" ")[0] not in STATUSES
        ]
        found += [
            f"Upstream-Status {value!r} without an address"
            for value in self.values("Upstream-Status")
            if value in ("submitted", "merged")
        ]
        if self.tests and self.values(GENERATED):
            found.append(f"it has {GENERATED} and {ALONE}: a fix that applies alone brings nothing of ours")
        if len(self.body.split()) < 15:
            found.append("its body does not say why")
        if len(self.subject) > 72:
            found.append(f"its subject has {len(self.subject)} characters, at most 72 fit")
        return [f"{self.path.name}: {problem}" for problem in found]


def read(path: Path) -> Mail:
    """Read a patch.

    Raises:
        Failed: it is not such a mail.
    """
    message = email.message_from_string(path.read_text(encoding="utf-8"))
    subject, date = (" ".join((message[name] or "").split()) for name in ("Subject", "Date"))
    text, separator, _ = str(message.get_payload()).partition("\n---\n")
    if not (subject.startswith("[PATCH] ") and date and separator):
        raise Failed(f"{path} is not a mail of git format-patch")
    lines = text.rstrip().splitlines()
    trailers: list[tuple[str, str]] = []
    while lines and (found := _TRAILER.match(lines[-1])):
        trailers.insert(0, (found[1], found[2]))
        lines.pop()
    return Mail(path, date, subject.removeprefix("[PATCH] "), "\n".join(lines).strip(), tuple(trailers))


def series() -> list[Mail]:
    """Read all patches, in order.

    Raises:
        Failed: ``series`` and the patches in its folder differ.
    """
    lines = [line.split("#")[0].strip() for line in SERIES.read_text(encoding="utf-8").splitlines()]
    names = [line for line in lines if line]
    present = sorted(path.name for path in PATCHES.glob("*.patch"))
    if sorted(names) != present:
        raise Failed(f"{SERIES} lists {names}, its folder has {present}")
    return [read(PATCHES / name) for name in names]


def unplaced(mails: list[Mail]) -> list[str]:
    """Return files of ours that are in no patch, or in several."""
    counts = dict.fromkeys(sources(), 0)
    for mail in mails:
        for name in mail.generated:
            counts[name] += 1
    return [f"{name} is in {count} patches: see {GENERATED}" for name, count in counts.items() if count != 1]


def targets(mail: Mail) -> dict[str, str]:
    """Return, of the files that it brings, where a fork has each, and ours."""
    return {target(source): source for source in mail.generated}
