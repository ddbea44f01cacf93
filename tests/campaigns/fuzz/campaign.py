# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Many cases, one after the other: drawn, run, counted, and shrunk where they fail."""

import contextlib
import io
import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import hypothesis
from hypothesis import HealthCheck, Phase, settings

from tests.campaigns.fuzz import cases, in_ranks
from tests.campaigns.fuzz.drawing import of_kind
from tests.harness.ranks import RankError, RankPool, RankTimeout

TIMEOUT = 45.0  # seconds, after which a case on up to four ranks counts as a hang
_NAMES = {kind.__name__: kind for kind in (cases.Case, cases.PipeCase, cases.Block, cases.Step, cases.Event)}


class Failure(NamedTuple):
    """The smallest failing case, and its problems."""

    case: Any
    problems: list[str]

    def __str__(self) -> str:
        return f"{self.case!r}\n    " + "\n    ".join(self.problems)


class _Failed(Exception):
    """Tells Hypothesis that a case has failed."""


def parse(text: str) -> Any:
    return eval(text, {"__builtins__": {}}, _NAMES)


def run_case(pool: RankPool, case: Any, happened: Counter[str] | None = None) -> list[str]:
    """Run a case; return its problems, each once, and count its events."""
    happened = Counter() if happened is None else happened
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # pools print what ranks have logged
            verdicts = pool(case.world).run(in_ranks.judge_case, case, timeout=TIMEOUT * max(1.0, case.world / 4))
    except (RankTimeout, RankError) as error:
        subject = "hang" if isinstance(error, RankTimeout) else "error"
        if cases.ORACLE not in str(error):
            return [f"{subject}: {_told(str(error))}"]
        happened[f"stock ends in a {subject}"] += 1
        return []
    happened.update({event for _, events in verdicts for event in events})
    return list(dict.fromkeys(problem for results, _ in verdicts for problem in results))


def _told(message: str) -> str:
    """Return where the first rank that is named raised, or still is."""
    trace = message.partition("RAISED ")[2] or message.partition("--- rank")[2].partition("\n")[2]
    lines = [line.rstrip() for line in trace.partition("---")[0].splitlines() if line.strip()]
    # The stack of one that is still running has the innermost frame first; a traceback has it last.
    return "\n      ".join([message.splitlines()[0], *(lines[:16] if "still running" in message else lines[-12:])])


def signature(problems: Sequence[str]) -> str:
    """Return the text that failures with one cause share: the first problem, without numbers and names."""
    lines = problems[0].splitlines()
    first = "\n".join(lines[-3:]) if problems[0].startswith(("error", "hang")) else lines[0]
    return re.sub(r"\d[0-9.e+-]*|layers\S*|head\S*", "#", first)[:300]


class Campaign:
    """A run of the fuzzer. Shrinking a case may take ``shrinking`` seconds; 0 to end with the first failure instead.
    Of each kind, ``batch`` cases are drawn together. ``counts`` are cases by kind and number of ranks; ``happened``,
    those of each oracle; ``failures`` has one for each cause."""

    def __init__(self, pool: RankPool, seed: int, worlds: tuple[int, ...], shrinking: float, batch: int = 25) -> None:
        self.counts, self.happened = Counter[tuple[str, int]](), Counter[str]()
        self.failures: dict[str, Failure] = {}
        self._pool, self._seed, self._worlds, self._shrinking, self._batch = pool, seed, worlds, shrinking, batch

    def run(self, drawn: Sequence[str], number: int, deadline: float) -> None:
        """Run this number of cases, of all kinds in turns, or until the deadline (of ``time.monotonic``)."""
        batch = 0
        while (remaining := number - self.counts.total()) > 0 and time.monotonic() < deadline:
            self._run_batch(drawn[batch % len(drawn)], batch, min(self._batch, remaining), deadline)
            batch += 1
            if self.failures and not self._shrinking:
                return
            print(f"{self.counts.total()} cases, {len(self.failures)} failures", flush=True)

    def _run_batch(self, kind: str, batch: int, number: int, deadline: float) -> None:
        smallest: Failure | None = None

        def check(case: Any) -> None:
            nonlocal smallest, deadline
            if time.monotonic() > deadline:
                return
            problems = run_case(self._pool, case, self.happened)
            if smallest is None:
                self.counts[kind, case.world] += 1
            cause = signature(problems) if problems else ""
            if not problems or cause in self.failures or (smallest and signature(smallest.problems) != cause):
                return
            if smallest is None:
                deadline = min(deadline, time.monotonic() + self._shrinking)
            smallest = Failure(case, problems)
            raise _Failed(cause)

        options: dict[str, Any] = {"max_examples": number, "database": None, "deadline": None, "print_blob": False}
        options |= {"phases": (Phase.generate, Phase.shrink), "suppress_health_check": list(HealthCheck)}
        drawn = settings(**options, report_multiple_bugs=False)(hypothesis.given(of_kind(kind, self._worlds))(check))
        run = hypothesis.seed(self._seed * 100_000 + batch)(drawn)
        with contextlib.suppress(_Failed, hypothesis.errors.Flaky):
            run()
        if smallest is not None:
            self.failures[signature(smallest.problems)] = smallest
            print(f"FAILED {smallest}", flush=True)

    def report(self) -> str:
        rows = [f"{count:>7} of {kind} on {world} ranks" for (kind, world), count in sorted(self.counts.items())]
        rows += [f"{count:>7} cases: {case}" for case, count in sorted(self.happened.items())]
        return "\n".join([*rows, *(f"\nFAILED {failure}" for failure in self.failures.values())])
