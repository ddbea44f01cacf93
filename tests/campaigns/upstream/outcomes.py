# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Outcomes of DeepSpeed's tests with stock classes and with ours, and the known differences. Runs nothing."""

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

PASSED, SKIPPED, FAILED, ERROR, HUNG, REFUSED = "passed", "skipped", "failed", "error", "hung", "refused"

# As our refusals are written, with the values that their f-strings have.
_REFUSALS = (
    re.compile(r"([\w.]+ cannot be combined with) zero_optimization\.[^{}:\n]+(: [^{}\n]+?)\. Remove one of the two"),
    re.compile(r"zero_optimization\.paro_strategy \w+ (is not supported here)(: [^{}\n]+?)\.(?: [A-Z]|$)", re.M),
)


class Outcome(NamedTuple):
    """The outcome of a test."""

    kind: str  # passed, ...; an error is one of a fixture; what runs into its limit, or dies, hung
    text: str = ""  # the traceback, or the reason of a skip or a refusal
    seconds: float = 0.0  # how long it took
    made: int = 0  # optimizers of ours that its ranks made

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Outcome":
        """Return the outcome of a record; a failure that is a documented refusal of ours is called that."""
        outcome = cls(*(record[name] for name in cls._fields))
        printed = [results for pattern in _REFUSALS if (results := pattern.search(outcome.text))]
        if outcome.kind not in (FAILED, ERROR) or not printed:
            return outcome
        return outcome._replace(kind=REFUSED, text="".join(printed[0].groups()))

    @property
    def cause(self) -> str:
        """Return the last line of the traceback that names an exception; of other texts the first line."""
        lines = [line.strip().removeprefix("E ").strip() for line in self.text.splitlines() if line.strip()]
        named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failed)\b", line)]
        return (named[-1] if named else lines[0] if lines else self.kind)[:300]


class Known(NamedTuple):
    """A difference that is understood."""

    test: str  # pattern of test ids, as a shell's
    cause: str  # regular expression that is found in the outcome's text, so that another fault is not taken for this
    reason: str  # why it differs
    sides: str = "*"  # pattern of the strategies' names with which it may differ

    def explains(self, test: str, outcome: Outcome, side: str) -> bool:
        """Whether this is why the test does not pass with these strategies."""
        # Brackets, which test ids are full of, stand for themselves.
        about = fnmatch.fnmatchcase(test, self.test.replace("[", "[[]")) and fnmatch.fnmatchcase(side, self.sides)
        return about and re.search(self.cause, outcome.text) is not None


def counts(outcomes: Iterable[Outcome]) -> str:
    counted = Counter(outcome.kind for outcome in outcomes)
    return ", ".join(f"{number} {kind}" for kind, number in sorted(counted.items())) or "none"


def file_of(test: str) -> str:
    return test.partition("::")[0]
