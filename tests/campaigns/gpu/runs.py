# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs experiments, several at once, each in its own process and within a time limit, and records the results.

While an experiment runs, it writes its report, a JSON object, to a file again and again: ``checks`` (name: whether it
held), ``figures`` (name: a value) and, at its end, ``done``. So its findings are kept if it is killed.
"""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

NO_GPU = 3  # exit status
SAID = "No GPU: nothing was run. torch sees none of NVIDIA's."
PASSED, FAILED, CRASHED, HUNG, NOT_RUN = "passed", "failed", "crashed", "hung", "not run"
KINDS = (PASSED, FAILED, CRASHED, HUNG, NOT_RUN)
LEAST = 15.0  # seconds; with less time left no experiment is begun
_GRACE = 5.0  # seconds between asking a process to end and killing it
_LOOK = 0.1  # seconds between looks at a process
_TAIL = 4000  # characters of the output that are kept


@dataclass(frozen=True)
class Experiment:
    """One of them.

    Attributes:
        name: T1, ...
        title: what it shows.
        limit: seconds.
        command: what to run, given the file for the report.
        environment: variables that it gets beside ours.
        alone: whether it measures time, and so runs beside no other.
    """

    name: str
    title: str
    limit: float
    command: Callable[[Path], Sequence[str]]
    environment: Mapping[str, str] = field(default_factory=dict)
    alone: bool = False


@dataclass
class Outcome:
    """What an experiment came to.

    Attributes:
        name, title: of the experiment.
        kind: one of ``KINDS``.
        seconds: that it took.
        checks: name: whether it held.
        figures: name: what was measured.
        text: why it did not pass; the end of its output if it crashed or hung.
    """

    name: str
    title: str
    kind: str
    seconds: float = 0.0
    checks: dict[str, bool] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    text: str = ""


def has_gpu() -> bool:
    """Return whether torch sees a GPU of NVIDIA's."""
    import torch

    return bool(torch.version.cuda) and torch.cuda.is_available()


def select(experiments: Sequence[Experiment], only: Iterable[str]) -> list[Experiment]:
    """Return those of these names, in their own order; without names all.

    Raises:
        ValueError: there is none of that name.
    """
    names = [name.strip().upper() for name in only if name.strip()]
    known = [one.name for one in experiments]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"expected experiments among {', '.join(known)}, got {', '.join(unknown)}")
    return [one for one in experiments if not names or one.name in names]


def run_all(
    experiments: Sequence[Experiment],
    budget: float,
    folder: Path,
    note: Callable[[list[Outcome]], None],
    environment: Mapping[str, str],
    at_once: int = 1,
) -> list[Outcome]:
    """Run experiments while the budget lasts; one that crashes or hangs does not end the others.

    Args:
        experiments: in this order; those that run alone before the others, where several run at once.
        budget: seconds for all of them.
        folder: for reports and output.
        note: is given all outcomes after each.
        environment: of the processes.
        at_once: how many run at the same time.
    """
    begin, outcomes = time.monotonic(), list[Outcome]()
    noting, over = threading.Lock(), threading.Event()

    def run_one(experiment: Experiment) -> None:
        left = budget - (time.monotonic() - begin)
        if left < min(LEAST, experiment.limit):
            text = f"{max(0.0, left):.0f} s of {budget:.0f} s were left"
            outcome = Outcome(experiment.name, experiment.title, NOT_RUN, text=text)
        else:
            outcome = run(experiment, min(left, experiment.limit), folder, environment, over)
        with noting:
            outcomes.append(outcome)
            note(outcomes)

    alone = [one for one in experiments if one.alone or at_once == 1]
    for some, workers in ((alone, 1), ([one for one in experiments if one not in alone], at_once)):
        with ThreadPoolExecutor(workers) as pool:
            try:
                list(pool.map(run_one, some))
            except BaseException:
                over.set()  # what runs ends, and nothing else begins
                pool.shutdown(cancel_futures=True)
                raise
    order = [one.name for one in experiments]
    return sorted(outcomes, key=lambda one: order.index(one.name))


def run(
    experiment: Experiment, limit: float, folder: Path, environment: Mapping[str, str], over: threading.Event
) -> Outcome:
    """Run one experiment, and kill it with all that it has started when its time is over, or that of all is."""
    report, log = (folder / f"{experiment.name}.{end}" for end in ("json", "log"))
    report.unlink(missing_ok=True)
    begin = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(experiment.command(report)),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**environment, **experiment.environment},
            start_new_session=True,
        )
        last = begin + (limit - _GRACE if limit > 2 * _GRACE else limit)
        try:
            while process.poll() is None and time.monotonic() < last and not over.wait(_LOOK):
                pass
            hung = process.poll() is None
        finally:
            _end(process)
    outcome = Outcome(experiment.name, experiment.title, PASSED, round(time.monotonic() - begin, 1))
    found = _read(report)
    outcome.checks, outcome.figures = found.get("checks", {}), found.get("figures", {})
    broken = [name for name, held in outcome.checks.items() if not held]
    if hung:
        outcome.kind, outcome.text = HUNG, f"ended after {outcome.seconds:.0f} s\n{_tail(log)}"
    elif process.returncode or not found.get("done"):
        outcome.kind, outcome.text = CRASHED, f"exit status {process.returncode}\n{_tail(log)}"
    elif found.get("skipped"):
        outcome.kind, outcome.text = NOT_RUN, found["skipped"]
    elif broken:
        outcome.kind, outcome.text = FAILED, f"did not hold: {', '.join(broken)}"
    elif not outcome.checks and not outcome.figures:
        outcome.kind, outcome.text = FAILED, "it checked nothing"
    return outcome


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End what is left of a process and of all that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_GRACE)
            if number == signal.SIGTERM:
                time.sleep(0.2)  # for the others of its group, before they are killed


def _read(report: Path) -> dict[str, Any]:
    try:
        found = json.loads(report.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-_TAIL:].strip()


class Report:
    """What an experiment writes down, seen from within it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._content: dict[str, Any] = {"checks": {}, "figures": {}}

    def check(self, name: str, held: bool) -> None:
        """Note whether something held."""
        self._content["checks"][name] = bool(held)
        self._write()

    def figure(self, name: str, value: Any) -> None:
        """Note what was measured."""
        self._content["figures"][name] = value
        self._write()

    def skip(self, why: str) -> None:
        """Note that this cannot be run here."""
        self._content["skipped"] = why
        self._write()

    def done(self) -> None:
        """Note that all was run."""
        self._content["done"] = True
        self._write()

    def _write(self) -> None:
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(self._content, indent=1), encoding="utf-8")
        part.replace(self._file)


def write_results(stem: Path, about: Mapping[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Write what is known until now: ``stem``.json, and ``stem``.txt to be read."""
    record = {**about, "experiments": [asdict(one) for one in outcomes]}
    for end, text in ((".json", json.dumps(record, indent=1) + "\n"), (".txt", table(about, outcomes))):
        part = stem.with_name(stem.name + end + ".part")
        part.write_text(text, encoding="utf-8")
        part.replace(stem.with_name(stem.name + end))


def table(about: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    """Return a line for each experiment; below it what did not hold, and what was measured."""
    lines = [f"{name}: {value}" for name, value in about.items()] + [""]
    for one in outcomes:
        held = sum(one.checks.values())
        lines.append(f"{one.name:4} {one.kind:8} {one.seconds:7.1f} s  {held}/{len(one.checks)} checks  {one.title}")
    for one in outcomes:
        if one.text or one.figures:
            lines += ["", f"{one.name} {one.title}"]
            lines += [f"  {line}" for line in one.text.splitlines()]
            lines += [f"  {name}: {_shown(value)}" for name, value in one.figures.items()]
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(f"{k} {_shown(v)}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def status_of(outcomes: Sequence[Outcome]) -> int:
    """Return the exit status: 0 if all have passed, else 1; what did not fit into the budget has not passed."""
    return int(any(one.kind != PASSED for one in outcomes))
