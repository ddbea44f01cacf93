# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What tests of DeepSpeed's come to with stock classes and with ours, and what there is to say of it. Runs nothing."""

import fnmatch
import itertools
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

PASSED, SKIPPED, FAILED, ERROR, HUNG, REFUSED = "passed", "skipped", "failed", "error", "hung", "refused"
KINDS = (PASSED, SKIPPED, FAILED, ERROR, HUNG, REFUSED)

# As our refusals are written, with the values that their f-strings have.
_REFUSALS = (
    re.compile(r"([\w.]+ cannot be combined with) zero_optimization\.[^{}:\n]+(: [^{}\n]+?)\. Remove one of the two"),
    re.compile(
        r"zero_optimization\.paro_strategy \w+ (is not supported here)(: [^{}\n]+?)\.(?: [A-Z]|$)", re.MULTILINE
    ),
)


@dataclass(frozen=True)
class Outcome:
    """What one test came to.

    Attributes:
        kind: one of ``KINDS``. An error is one of a fixture; what runs into its limit, or dies, hung.
        text: the traceback, or the reason of a skip or a refusal.
        seconds: how long it took.
        made: optimizers of ours that its ranks made.
    """

    kind: str
    text: str = ""
    seconds: float = 0.0
    made: int = 0

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Outcome":
        """Return the outcome that a record tells; a failure that is a refusal of ours is called that."""
        outcome = cls(**{name: record[name] for name in cls.__dataclass_fields__ if name in record})
        reason = refusal(outcome.text) if outcome.kind in (FAILED, ERROR) else None
        return outcome if reason is None else cls(REFUSED, reason, outcome.seconds, outcome.made)

    def record(self) -> dict[str, Any]:
        """Return what ``of`` reads."""
        return asdict(self)

    @property
    def cause(self) -> str:
        """Return the last line of the traceback that names an exception; of other texts the first line."""
        lines = [line.strip().removeprefix("E ").strip() for line in self.text.splitlines() if line.strip()]
        named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failed)\b", line)]
        return (named[-1] if named else lines[0] if lines else self.kind)[:300]


@dataclass(frozen=True)
class Known:
    """A difference that is understood.

    Attributes:
        test: pattern of test ids, as a shell's.
        cause: regular expression that is found in the outcome's text, so that another fault is not taken for this.
        reason: why it differs.
        sides: pattern of the strategies' names with which it may differ.
    """

    test: str
    cause: str
    reason: str
    sides: str = "*"

    def explains(self, test: str, outcome: Outcome, side: str) -> bool:
        """Whether this is why the test does not pass with these strategies."""
        about = fnmatch.fnmatchcase(test, _literal(self.test)) and fnmatch.fnmatchcase(side, self.sides)
        return about and re.search(self.cause, outcome.text) is not None


@dataclass(frozen=True)
class Difference:
    """A test that passes on stock and not with ours; the reason if it is known."""

    test: str
    ours: Outcome
    reason: str | None


def refusal(text: str) -> str | None:
    """Return the reason of the documented refusal that a traceback shows, if it shows one."""
    for pattern in _REFUSALS:
        found = pattern.search(text)
        if found:
            return "".join(found.groups())
    return None


def differences(
    stock: Mapping[str, Outcome], ours: Mapping[str, Outcome], known: Iterable[Known], side: str
) -> list[Difference]:
    """Return what passes on stock and neither passes with these strategies nor is refused. Refusals are documented."""
    known = list(known)
    found = []
    for test, outcome in sorted(ours.items()):
        if stock[test].kind != PASSED or outcome.kind in (PASSED, REFUSED):
            continue
        reason = next((row.reason for row in known if row.explains(test, outcome, side)), None)
        found.append(Difference(test, outcome, reason))
    return found


def counts(outcomes: Iterable[Outcome]) -> str:
    """Return how many outcomes there are of each kind, in words."""
    counted = Counter(outcome.kind for outcome in outcomes)
    return ", ".join(f"{counted[kind]} {kind}" for kind in KINDS if counted[kind]) or "none"


def file_of(test: str) -> str:
    """Return the file that a test id begins with."""
    return test.partition("::")[0]


def sample(tests: Sequence[str], number: int | None, seed: int) -> list[str]:
    """Choose tests, from every file as many as from the others while it has them; the same for the same seed."""
    if number is None or number >= len(tests):
        return sorted(tests)
    files: dict[str, list[str]] = {}
    for test in sorted(tests):
        files.setdefault(file_of(test), []).append(test)
    for file, of_file in files.items():
        random.Random(f"{seed} {file}").shuffle(of_file)
    rounds = itertools.zip_longest(*(files[file] for file in sorted(files)))
    return sorted(itertools.islice((test for tests in rounds for test in tests if test is not None), number))


def _literal(pattern: str) -> str:
    """Return a pattern in which brackets, which test ids are full of, stand for themselves."""
    return pattern.replace("[", "[[]")
