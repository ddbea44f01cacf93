# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs the tests that a change concerns: ``scripts/test changed [BASE]``.

A change is the difference from BASE, a revision of git (by default HEAD), including uncommitted changes. Further
arguments go to pytest.
"""

import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from scripts import ROOT
from tests.harness.recordings import selection, store
from tests.harness.recordings.differences import git, hunks, lines_before, tree_of_files
from tests.harness.recordings.selection import Place, Recording

SECONDS = 150.0  # of tests as recorded; with the start of everything, a change takes less than 4 minutes
_ALL_FILES = ("pyproject.toml", "scripts/development.txt", "scripts/environment", "scripts/test", "setup.py")
_SCRATCH = ROOT / "build" / "changed"


class Choice(NamedTuple):
    """What pytest runs, and why."""

    run: list[str]
    changed: dict[str, list[str]]  # files of tests that changed, and the tests in them that are known
    why: list[str]


def concerns_all(file: str) -> bool:
    """Whether any test may depend on a file."""
    return file in _ALL_FILES or file.startswith("tests/harness/") or Path(file).name == "conftest.py"


def is_tests(file: str) -> bool:
    """Whether pytest collects a file."""
    return file.startswith("tests/unit/") and Path(file).name.startswith("test_") and file.endswith(".py")


def choose(recording: Recording, changes: dict[str, set[int]], seconds: float = SECONDS) -> Choice:
    """Return the tests to run for changes of lines of the recorded version."""
    touched = concerned(recording, changes)
    order = selection.ranked(recording, touched)
    run = selection.fitting(recording, touched, order, seconds)
    known = {file: [test for test in recording.tests if test.startswith(f"{file}::")] for file in changes}
    changed = {file: tests for file, tests in known.items() if is_tests(file) and (ROOT / file).exists()}
    why = [f"  {file}: {_count(tests)}" for file, tests in _by_file(touched).items()]
    minutes = sum(recording.tests[test].seconds for test in order) / 60
    if not order:
        why.append("no recorded test runs these lines, or reads these files")
    elif len(run) < len(order):
        part = f"the {len(run)} that fit into {seconds:.0f} s run; scripts/test runs all"
        why.append(f"{_count(order)} touch these lines ({minutes:.1f} minutes); {part}")
    else:
        why.append(f"{_count(order)} touch these lines ({minutes:.1f} minutes), and all of them run")
    return Choice(run, changed, why)


def concerned(recording: Recording, changes: Mapping[str, Iterable[int]]) -> selection.Touched:
    """Return the tests of changed lines and files; of sources that are compiled, those that may run the kernels."""
    compiled = {Place(file, 0): of_kernels(recording) for file in changes if file.startswith("csrc/")}
    return selection.touching(recording, changes) | compiled


def of_kernels(recording: Recording) -> frozenset[str]:
    """Return the tests that may run what ``csrc`` is compiled to."""
    tests = recording.tests
    return frozenset(
        name for name in tests if name.startswith("tests/unit/loco/") or "kernels" in tests[name].fixtures
    )


def differing(base: str, recorded: str, now: str) -> dict[str, set[int]]:
    """Return the files that differ from BASE now, and in which lines of the recorded version."""
    found = dict[str, set[int]]()
    for entry in git("diff", "--name-status", "--no-renames", base, now).splitlines():
        status, file = entry.split("\t")
        lines = {line for hunk in hunks(base, now, file) for line in hunk.lines()}
        found[file] = lines_before(lines, hunks(recorded, base, file))
        if status in "AD":  # who looked into the folder finds another list
            found.setdefault(str(Path(file).parent), set())
    return found


def main() -> int:
    has_base = len(sys.argv) > 1 and not sys.argv[1].startswith("-")
    base, of_pytest = sys.argv[1] if has_base else "HEAD", sys.argv[1 + has_base :]
    _SCRATCH.mkdir(parents=True, exist_ok=True)
    now = tree_of_files(_SCRATCH / "index")
    files = git("diff", "--name-only", "--no-renames", base, now).splitlines()
    if not files:
        print(f"nothing differs from {base}")
        return 0
    if for_all := [file for file in files if concerns_all(file)]:
        print(f"all tests run, because any may depend on {', '.join(for_all)}", flush=True)
        return pytest.main(of_pytest)
    if (loaded := store.load()) is None:
        print("all tests run, because there is no recording here: `scripts/test record` makes one", flush=True)
        return pytest.main(of_pytest)
    origin, recording = loaded
    print(_age(origin, len(recording.tests)))
    return _run(choose(recording, differing(base, origin.tree, now)), of_pytest)


def _run(choice: Choice, of_pytest: Sequence[str]) -> int:
    print("\n".join(choice.why), flush=True)
    files = sorted({test.split("::")[0] for test in choice.run} | choice.changed.keys())
    files = [file for file in files if (ROOT / file).exists()]
    if not files:
        return 0
    path = _SCRATCH / "chosen.json"
    path.write_text(json.dumps({"run": choice.run, "changed": choice.changed}), encoding="utf-8")
    code = pytest.main(["-p", "tests.harness.recordings.chosen", f"--chosen={path}", *of_pytest, *files])
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code


def _age(origin: store.Origin, tests: int) -> str:
    commits = git("rev-list", "--count", f"{origin.commit}..HEAD").strip()
    of_what = f", of {' '.join(origin.arguments)} only" if origin.arguments else ""
    return f"recording: {tests} tests{of_what}; {origin.commit[:8]}, {origin.date}, {commits} commits ago"


def _count(tests: Collection[str]) -> str:
    return f"{len(tests)} test{'s' if len(tests) != 1 else ''}"


def _by_file(touched: selection.Touched) -> dict[str, frozenset[str]]:
    found = dict[str, frozenset[str]]()
    for place, tests in touched.items():
        found[place.file] = found.get(place.file, frozenset()) | tests
    return found


if __name__ == "__main__":
    sys.exit(main())
