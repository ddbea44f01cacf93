# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The patches of the series, as the mails that ``git format-patch`` writes."""

import email
import re
from pathlib import Path
from typing import NamedTuple

from scripts import ROOT
from scripts.fork.deepspeed_source import Failed

PATCHES = ROOT / "patches"
SERIES = PATCHES / "series"
ALONE = "Standalone-Test"  # a test file, relative to DeepSpeed's root: the patch is a fix that applies alone
REQUIRED = ("Signed-off-by", "Upstream-Status", "Remove-When")
STATUSES = ("pending", "submitted", "merged", "not-applicable")  # submitted and merged with an address

_TRAILER = re.compile(r"^([A-Z][A-Za-z]*(?:-[A-Za-z]+)+): (\S.*)$")


class Mail(NamedTuple):
    """A patch.

    Attributes:
        path: its file.
        subject: without ``[PATCH]``.
        body: without the trailers.
        trailers: names and values, in order.
    """

    path: Path
    subject: str
    body: str
    trailers: tuple[tuple[str, str], ...]

    def values(self, name: str) -> list[str]:
        """Return the values of all trailers with this name."""
        return [value for trailer, value in self.trailers if trailer == name]

    @property
    def tests(self) -> list[str]:
        """The test files of a fix; none for hooks."""
        return self.values(ALONE)

    def problems(self) -> list[str]:
        """Return the problems of the header."""
        results = [f"no trailer {name}" for name in REQUIRED if not self.values(name)]
        for status in self.values("Upstream-Status"):
            if status.split(" ")[0] not in STATUSES:
                results.append(f"Upstream-Status {status!r}, expected one of {', '.join(STATUSES)}")
            elif status in ("submitted", "merged"):
                results.append(f"Upstream-Status {status!r} without an address")
        if len(self.body.split()) < 15:
            results.append("the body does not explain the patch")
        if len(self.subject) > 72:
            results.append(f"the subject has {len(self.subject)} characters, at most 72 fit")
        return [f"{self.path.name}: {problem}" for problem in results]


def read(path: Path) -> Mail:
    """Read a patch.

    Raises:
        Failed: it is not such a mail.
    """
    message = email.message_from_string(path.read_text(encoding="utf-8"))
    subject = " ".join((message["Subject"] or "").split())
    text, separator, _ = str(message.get_payload()).partition("\n---\n")
    if not (subject.startswith("[PATCH] ") and separator):
        raise Failed(f"{path} is not a mail of git format-patch")
    lines = text.rstrip().splitlines()
    trailers: list[tuple[str, str]] = []
    while lines and (results := _TRAILER.match(lines[-1])):
        trailers.insert(0, (results[1], results[2]))
        lines.pop()
    return Mail(path, subject.removeprefix("[PATCH] "), "\n".join(lines).strip(), tuple(trailers))


def series() -> list[Mail]:
    """Read all patches, in order: the fixes, then the hooks.

    Raises:
        Failed: ``series`` differs from the patches in its folder, or a fix comes after hooks.
    """
    names = SERIES.read_text(encoding="utf-8").split()
    present = sorted(path.name for path in PATCHES.glob("*.patch"))
    if sorted(names) != present:
        raise Failed(f"{SERIES} lists {names}, its folder has {present}")
    mails = [read(PATCHES / name) for name in names]
    if mails != sorted(mails, key=lambda mail: not mail.tests):
        raise Failed(f"{SERIES}: every fix (a patch with {ALONE}) must come before the hooks")
    return mails


def fixes() -> list[Mail]:
    """Return the patches that apply alone."""
    return [mail for mail in series() if mail.tests]
