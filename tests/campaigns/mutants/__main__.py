# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Changes the package at random, in one place at a time, and counts the changes that tests of that code, or the
fuzzer, find.

    python -m tests.campaigns.mutants --number 240               after scripts/test record, which runs if it has not
    python -m tests.campaigns.mutants --number 40 --fuzz 10      minutes of the fuzzer, in rooms that training uses

A change swaps a comparison, an operator or a constant, or drops a statement, within a function of the package or of a
kernel for the CPU. Each is made in a copy of the repository, where the tests then run that ran its line when they were
recorded, those of the same room and the quickest first, until one fails. Some changes make no difference to any
caller, so review the survivors. Rows are appended to a file, and changes with a row are not tried again unless
``--again``.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from scripts import ROOT
from tests.campaigns.mutants.changes import Mutant, draw_changes
from tests.harness import recordings

TRAINED = ("checkpoint", "comm", "config", "leaf", "loco", "model_bytes.py", "pipeline", "strategy.py", "zero")
TRAINED += ("csrc", "planner")  # the rooms that the fuzzer's cases pass through
# What any change fails, since these compare the sources with what was made of them; and what needs a clone.
_NO_TESTS = ("tests/unit/fork/", "tests/unit/campaigns/test_mutants.py", "tests/unit/harness/test_recordings.py")
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", "*.egg-info")
_KERNELS = ("-c", "from deepspeed_ext.loco import ops; assert ops.load_kernels()")
_TESTS = ("-m", "pytest", "-x", "-p", "no:cacheprovider", "-o", "addopts=-q --strict-markers", "--timeout=100")
_FUZZER = ("-m", "tests.campaigns.fuzz", "--first", "--batch", "5", "--worlds", "2", "2", "4", "--minutes")

Command = Callable[[Mutant], Sequence[str]]  # arguments of Python; none if nothing may find a change


class Outcome(NamedTuple):
    """The outcome of a change: "killed", "survived", "hangs", or "no code" if it does not compile."""

    kind: str
    by: str  # the test, or the problem
    seconds: float


def tests_of(recording: recordings.Recording, most: float) -> Command:
    """Return the command that runs the tests of a change, as many as fit into the recorded seconds."""
    status, printed = _run(ROOT, [*_TESTS, "-m", "not deep", "--collect-only"], 300.0)
    if status:
        raise RuntimeError("\n".join(printed[-20:]))
    registered = {line for line in printed if "::" in line and not line.startswith(_NO_TESTS)}

    def command(mutant: Mutant) -> Sequence[str]:
        file = mutant.path.as_posix()
        chosen = recording.fitting(recording.concerned(file, [mutant.line]) & registered, [file], most)
        return [*_TESTS, *chosen] if chosen else []

    return command


def outcome_of(mutant: Mutant, copy: Path, command: Sequence[str], limit: float) -> Outcome:
    """Make a change in a copy of the repository, run a command of Python there, and take the change back."""
    path, begin = copy / mutant.path, time.monotonic()
    text = path.read_bytes()
    path.write_bytes(mutant.applied(text))
    try:
        kind, by = "survived", ""
        if mutant.room == "csrc" and _run(copy, _KERNELS, 300.0)[0]:
            kind = "no code"
        elif command:
            status, printed = _run(copy, command, limit)
            if status != 0:
                kind, by = ("hangs", "") if status is None else ("killed", _first_failure(printed))
        return Outcome(kind, by, time.monotonic() - begin)
    finally:
        path.write_bytes(text)


def _run(copy: Path, command: Sequence[str], limit: float) -> tuple[int | None, list[str]]:
    """Return the exit status of Python, None if it was killed, and its output."""
    environment = os.environ | {"PYTHONPATH": str(copy), "TORCH_EXTENSIONS_DIR": str(copy / ".extensions")}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # a change within a second, of the same length, would not be seen
    with tempfile.TemporaryFile("w+") as output:
        pipes = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
        process = subprocess.Popen([sys.executable, "-W", "ignore", *command], cwd=copy, env=environment, **pipes)
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = None
        output.seek(0)
        return status, output.read().splitlines()


def _first_failure(printed: Sequence[str]) -> str:
    """Return the first test that failed, or the line below the first case of the fuzzer that did."""
    failed = [at for at, line in enumerate(printed) if line.startswith(("FAILED", "ERROR"))]
    if not failed:
        return "the session"
    first = printed[failed[0]].split(" - ")[0]
    return first if "::" in first else printed[min(failed[0] + 1, len(printed) - 1)].strip()[:100]


@contextmanager
def _copied() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(shutil.copytree(ROOT, Path(folder, "copy"), ignore=_LEFT_OUT, symlinks=True))


def try_changes(chosen: list[Mutant], command: Command, limit: float, copies: int) -> Iterator[tuple[Mutant, Outcome]]:
    """Try changes, each in one of several copies of the repository, and yield the outcome of each, in their order."""
    free: SimpleQueue[Path] = SimpleQueue()

    def one(mutant: Mutant) -> Outcome:
        copy = free.get()
        try:
            return outcome_of(mutant, copy, command(mutant), limit)
        finally:
            free.put(copy)

    with ExitStack() as stack:
        for _ in range(copies):
            free.put(stack.enter_context(_copied()))
        workers = stack.enter_context(ThreadPoolExecutor(copies))
        stack.callback(workers.shutdown, wait=True, cancel_futures=True)
        yield from zip(chosen, workers.map(one, chosen), strict=True)


def table(rows: Sequence[tuple[Mutant, Outcome]]) -> str:
    """How many changes of each room were found, and each that was not."""
    results: defaultdict[str, Counter[bool]] = defaultdict(Counter)
    for mutant, outcome in rows:
        for room in (mutant.room, "all") if outcome.kind != "no code" else ():
            results[room][outcome.kind in ("killed", "hangs")] += 1
    lines = [f"{room:<20}{counts[True]:>8}{counts.total():>6}" for room, counts in sorted(results.items())]
    survived = [f"SURVIVED {mutant}" for mutant, outcome in rows if outcome.kind == "survived"]
    return "\n".join([f"{'room':<20}{'killed':>8}{'of':>6}", *lines, *survived])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=240, help="of changes, of all rooms together")
    parser.add_argument("--seed", type=int, default=0, help="of their choice")
    parser.add_argument("--rooms", nargs="*", default=(), help="of the package, or csrc; default: all")
    parser.add_argument("--fuzz", type=float, default=0.0, metavar="MINUTES", help="of the fuzzer, in place of tests")
    parser.add_argument("--most", type=float, default=600.0, help="seconds of tests, as recorded, for each change")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no other change is tried")
    parser.add_argument("--at-once", type=int, default=1, help="changes that are tried at a time")
    parser.add_argument("--again", action="store_true", help="try what has survived, as with more seconds")
    parser.add_argument("--rows", type=Path, default=ROOT / "build" / "mutants.jsonl", help="the file of rows")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.fuzz:
        command, limit = (lambda mutant: [*_FUZZER, str(args.fuzz)]), 60 * args.fuzz + 300
    else:
        recording = recordings.load()
        if recording is None:
            print("recording which tests run which lines", flush=True)
            subprocess.run([ROOT / "scripts" / "test", "record"], cwd=ROOT, check=False)  # some may fail
            recording = recordings.load()
        assert recording is not None
        command, limit = tests_of(recording, args.most), 2 * args.most + 200
    chosen = draw_changes(args.number, args.seed, tuple(args.rooms) or (TRAINED if args.fuzz else ()))
    args.rows.parent.mkdir(parents=True, exist_ok=True)
    args.rows.touch()
    registered = map(json.loads, args.rows.read_text(encoding="utf-8").splitlines())
    before = {row["change"]: Outcome(*row["outcome"]) for row in registered}
    over = {change for change, outcome in before.items() if not (args.again and outcome.kind == "survived")}
    end, new = time.monotonic() + 60 * args.minutes, [mutant for mutant in chosen if str(mutant) not in over]
    for mutant, outcome in try_changes(new, command, limit, args.at_once):
        with args.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"change": str(mutant), "outcome": outcome}) + "\n")
        print(f"{outcome.kind:<9}{outcome.seconds:5.0f} s  {mutant}  {outcome.by}", flush=True)
        before[str(mutant)] = outcome
        if time.monotonic() > end:
            break
    rows = [(mutant, before[str(mutant)]) for mutant in chosen if str(mutant) in before]
    print(table(rows))
    sys.exit(any(outcome.kind == "survived" for _, outcome in rows))


if __name__ == "__main__":
    main()
