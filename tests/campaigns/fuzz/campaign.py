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

from tests.campaigns.fuzz import cases, contradictions, in_ranks, kinds
from tests.campaigns.fuzz.cases import ORACLE, Case, PipeCase
from tests.campaigns.fuzz.contradictions import Contradiction
from tests.harness.ranks import RankError, RankPool, RankTimeout

CONTRADICTION = "contradiction"
KINDS = (*kinds.KINDS, CONTRADICTION)
TIMEOUT = 45.0  # seconds, after which a case on up to four ranks counts as a hang
REFUSALS = 4  # times as many in a batch: each takes a tenth of the time
REFUSAL_TIMEOUT = 40.0  # the same for a contradiction


class Failure(NamedTuple):
    """What was found: the smallest case, and what is wrong with it."""

    case: Any
    problems: list[str]

    def __str__(self) -> str:
        return f"{self.case!r}\n    " + "\n    ".join(self.problems)


class _Failed(Exception):
    """Tells Hypothesis that a case has failed."""


def parse(text: str) -> Any:
    """Return the case of a printed one."""
    return eval(text, {"__builtins__": {}}, _NAMES)


_NAMES = {kind.__name__: kind for kind in (Case, PipeCase, cases.Block, cases.Step, cases.Event, Contradiction)}


def problems_of(pool: RankPool, case: Any, happened: Counter[str] | None = None) -> list[str]:
    """Run a case, a pipeline or a contradiction; what is wrong with it, each once."""
    if isinstance(case, Contradiction):
        problems = _problems_of_refusal(pool, case)
        if happened is not None and not problems:
            happened[f"refused: {case.keys[0]}"] += 1
        return problems
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # pools print what ranks have logged
            limit = TIMEOUT * max(1.0, case.world / 4)
            verdicts = pool(case.world).run(in_ranks.judged, case, timeout=limit)
    except (RankTimeout, RankError) as error:
        what = "hang" if isinstance(error, RankTimeout) else "error"
        if ORACLE in str(error):
            if happened is not None:
                happened[f"stock ends in a {what}"] += 1
            return []
        return [f"{what}: {_told(str(error))}"]
    if happened is not None:
        happened.update({event for _, events in verdicts for event in events})
    return list(dict.fromkeys(problem for found, _ in verdicts for problem in found))


def _problems_of_refusal(pool: RankPool, given: Contradiction) -> list[str]:
    """Run it; what is wrong with how it is refused."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # pools print what ranks have logged
            answers = pool(given.world).run(in_ranks.refused, given, timeout=REFUSAL_TIMEOUT)
    except (RankTimeout, RankError) as error:
        return [f"{type(error).__name__}: {str(error)[:1500]}"]
    kind, message, communicated = answers[0]
    if any(answer[:2] != (kind, message) for answer in answers):
        return [f"ranks differ: {answers}"]
    problems = []
    if not message:
        return ["not refused"]
    if not any(re.search(rf"(?<!\w){re.escape(key)}(?!\w)", message) for key in given.keys):
        problems.append(f"{kind} names none of {given.keys}: {message}")
    if communicated and not given.late:
        problems.append(f"{communicated} were called before it was refused")
    return problems


def _told(message: str) -> str:
    """Where the first rank that is named raised, or still is."""
    trace = message.partition("--- rank")[2].partition("--- rank")[0]
    lines = [line.rstrip() for line in trace.splitlines()[1:] if line.strip()]
    # The stack of one that is still running has the innermost frame first; a traceback has it last.
    raised = message.partition("RAISED ")[2].partition("---")[0]
    if raised:
        return "\n      ".join([message.splitlines()[0], *raised.rstrip().splitlines()[-12:]])
    return "\n      ".join([message.splitlines()[0], *(lines[:16] if "still running" in message else lines[-9:])])


def signature(problems: Sequence[str]) -> str:
    """What is the same of two failures with one cause: the first problem, without numbers and names."""
    lines = problems[0].splitlines()
    first = "\n".join(lines[-3:]) if problems[0].startswith(("error", "hang")) else lines[0]
    return re.sub(r"\d[0-9.e+-]*|layers\S*|head\S*", "#", first)[:300]


def _cases_of(kind: str, worlds: tuple[int, ...]) -> Any:
    """What Hypothesis draws for a kind."""
    if kind == CONTRADICTION:
        return contradictions.contradictions(tuple(world for world in worlds if world < 5))
    return kinds.of_kind(kind, worlds)


class Campaign:
    """A run of the fuzzer.

    Args:
        pool: of ranks.
        seed: of what is drawn.
        worlds: numbers of ranks to draw from.
        shrinking: seconds that shrinking a case may take.
        batch: cases of one kind that are drawn together, before those of the next kind.
        first: whether to end with the first failure.

    Attributes:
        counts: cases by kind and number of ranks.
        happened: what the cases were compared with, or refused for, and in how many.
        failures: one for each cause.
        again: cases that failed like one before, by its cause.
    """

    def __init__(
        self,
        pool: RankPool,
        seed: int,
        worlds: tuple[int, ...],
        shrinking: float,
        batch: int = 25,
        first: bool = False,
    ) -> None:
        self.counts, self.happened, self.again = Counter[tuple[str, int]](), Counter[str](), Counter[str]()
        self.failures: dict[str, Failure] = {}
        self._pool, self._seed, self._worlds, self._shrinking = pool, seed, worlds, shrinking
        self._batch, self._first = batch, first
        self._deadline = float("inf")

    def run(self, drawn: Sequence[str], number: int, deadline: float) -> None:
        """Run so many cases, of all kinds in turns, or until the deadline (of ``time.monotonic``)."""
        self._deadline = deadline
        batch = 0
        while sum(self.counts.values()) < number and time.monotonic() < deadline:
            kind = drawn[batch % len(drawn)]
            size = self._batch * (REFUSALS if kind == CONTRADICTION else 1)
            self._run_batch(kind, batch, min(size, number - sum(self.counts.values())))
            batch += 1
            if self._first and self.failures:
                return
            total = sum(self.counts.values())
            print(f"{total} cases, {len(self.failures)} causes of {sum(self.again.values())} failures", flush=True)

    def _run_batch(self, kind: str, batch: int, number: int) -> None:
        found: list[Failure] = []
        shrinking_since: list[float] = []

        def check(case: Any) -> None:
            now = time.monotonic()
            if self._first and self.failures:
                return
            if now > self._deadline or (shrinking_since and now > shrinking_since[0] + self._shrinking):
                return
            problems = problems_of(self._pool, case, self.happened)
            if not shrinking_since:
                self.counts[kind, case.world] += 1
            if not problems:
                return
            cause = signature(problems)
            self.again[cause] += 1
            if cause in self.failures:
                print(f"AGAIN {Failure(case, problems[:1])}", flush=True)
                return
            if not self._shrinking:
                self.failures[cause] = Failure(case, problems)
                print(f"FAILED {Failure(case, problems)}", flush=True)
                return
            if not shrinking_since:
                shrinking_since.append(now)
            if found and signature(found[0].problems) != cause:
                return
            found[:] = [Failure(case, problems)]
            raise _Failed(cause)

        run = hypothesis.seed(self._seed * 100_000 + batch)(
            settings(
                max_examples=number,
                database=None,
                deadline=None,
                phases=(Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
                report_multiple_bugs=False,
                print_blob=False,
            )(hypothesis.given(_cases_of(kind, self._worlds))(check))
        )
        with contextlib.suppress(_Failed, hypothesis.errors.Flaky):
            run()
        for failure in found:
            self.failures[signature(failure.problems)] = failure
            print(f"SMALLEST {failure}", flush=True)

    def report(self) -> str:
        """What was run and found."""
        rows = [f"{count:>7} of {kind} on {world} ranks" for (kind, world), count in sorted(self.counts.items())]
        rows += [f"{count:>7} cases: {what}" for what, count in sorted(self.happened.items())]
        rows += [
            f"\n{number}. failed {self.again[cause]} times: {failure}"
            for number, (cause, failure) in enumerate(self.failures.items(), 1)
        ]
        return "\n".join(rows)
