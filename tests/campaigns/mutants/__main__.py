# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Changes the package at random, in one place at a time, and counts what the tests of that place, or the fuzzer, find.

    python -m tests.campaigns.mutants --number 240               after scripts/test record
    python -m tests.campaigns.mutants --number 40 --fuzz 10      minutes of the fuzzer, in rooms that training uses

A change swaps a comparison, an operator or a constant, or drops a statement, within a function of the package or of a
kernel for the CPU. Each is made in a copy of the repository, where the tests then run that ran its line when they were
recorded, those of the same room and the quickest first, until one fails. Some changes make no difference to any
caller, so look at what survives. Rows are appended to a file, and what has a row there is not tried again unless
``--again``.
"""

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

from scripts import ROOT
from tests.campaigns.mutants import running
from tests.campaigns.mutants.changes import Mutant, drawn
from tests.campaigns.mutants.running import Outcome
from tests.harness import recordings

TRAINED = ("checkpoint", "comm", "config", "leaf", "loco", "model_bytes.py", "pipeline", "strategy.py", "zero")
TRAINED += ("csrc", "planner")  # the rooms that the fuzzer's cases pass through
_AT_ONCE = 400  # tests of a command
# What any change fails, since these compare the sources with what was made of them; and what needs a clone.
_NO_TESTS = ("tests/unit/fork/", "tests/unit/campaigns/test_mutants.py", "tests/unit/harness/test_recordings.py")

Commands = Callable[[Mutant], list[list[str]]]


def tests_of(recording: recordings.Recording, most: float, collected: Set[str]) -> Commands:
    """What runs the tests of a change, as many as fit into so many seconds as recorded.

    Args:
        recording: which may know tests that are gone.
        most: seconds.
        collected: the tests that there are.
    """

    def commands(mutant: Mutant) -> list[list[str]]:
        file = mutant.path.as_posix()
        there = {
            test for test in recording.concerned(file, [mutant.line]) & collected if not test.startswith(_NO_TESTS)
        }
        chosen = recording.fitting(there, [file], most)
        return [[*running.TESTS, *chosen[at : at + _AT_ONCE]] for at in range(0, len(chosen), _AT_ONCE)]

    return commands


def fuzzer(minutes: float) -> Commands:
    """What runs the fuzzer until its first failure."""
    options = ("--minutes", str(minutes), "--first", "--batch", "5", "--worlds", "2", "2", "4")
    return lambda mutant: [["-m", "tests.campaigns.fuzz", *options]]


def table(rows: Sequence[tuple[Mutant, Outcome]]) -> str:
    """How many changes of each room were found, and each that was not."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for mutant, outcome in rows:
        if outcome.kind != "no code":
            found[mutant.room]["killed" if outcome.kind in ("killed", "hangs") else "survived"] += 1
    lines = [f"{'room':<20}{'killed':>8}{'of':>6}"]
    for room, counts in sorted(found.items()):
        lines.append(f"{room:<20}{counts['killed']:>8}{counts.total():>6}")
    killed = sum(counts["killed"] for counts in found.values())
    lines.append(f"{'all':<20}{killed:>8}{sum(counts.total() for counts in found.values()):>6}")
    return "\n".join(lines + [f"SURVIVED {mutant}" for mutant, outcome in rows if outcome.kind == "survived"])


def known(path: Path) -> dict[str, Outcome]:
    """What has been tried, by the change as it is printed."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {row["change"]: Outcome(*row["outcome"]) for row in map(json.loads, lines)}


def tried(
    chosen: Sequence[Mutant], commands: Commands, limit: float, at_once: int
) -> Iterator[tuple[Mutant, Outcome]]:
    """Try changes, each in one of several copies of the repository, and tell what became of each, in their order."""
    free: SimpleQueue[Path] = SimpleQueue()

    def one(mutant: Mutant) -> Outcome:
        copy = free.get()
        try:
            return running.tried(mutant, copy, commands(mutant), limit)
        finally:
            free.put(copy)

    with ExitStack() as stack:
        for _ in range(at_once):
            free.put(stack.enter_context(running.copied()))
        workers = stack.enter_context(ThreadPoolExecutor(at_once))
        stack.callback(workers.shutdown, wait=True, cancel_futures=True)
        yield from zip(chosen, workers.map(one, chosen), strict=True)


def parsed() -> argparse.Namespace:
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
    arguments = parsed()
    if arguments.fuzz:
        commands, limit = fuzzer(arguments.fuzz), 60 * arguments.fuzz + 300
    elif recording := recordings.load():
        commands, limit = tests_of(recording, arguments.most, running.collected()), 2 * arguments.most + 200
    else:
        sys.exit("expected a recording of which tests run which lines: run scripts/test record first")
    rooms = tuple(arguments.rooms) or (TRAINED if arguments.fuzz else ())
    chosen = drawn(arguments.number, arguments.seed, rooms)
    end, before = time.monotonic() + 60 * arguments.minutes, known(arguments.rows)
    arguments.rows.parent.mkdir(parents=True, exist_ok=True)
    over = {change for change, outcome in before.items() if not (arguments.again and outcome.kind == "survived")}
    new = [mutant for mutant in chosen if str(mutant) not in over]
    for mutant, outcome in tried(new, commands, limit, arguments.at_once):
        with arguments.rows.open("a", encoding="utf-8") as file:
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
