# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Which tests a change concerns, and which of them to run first. Pure functions of a recording.

Changes are numbers of lines in the recorded version of each file. ``touching`` finds the tests of each place that
changed, ``ranked`` puts the quickest and most specific first, in turns of files and functions, and ``fitting`` takes
what fits into a time.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import NamedTuple

from tests.harness.recordings.scopes import scopes, witnesses

COLLECTION = "collection"  # what runs when pytest imports a test file, in place of a fixture's name
_OVERHEAD = 0.05  # seconds of a test that its recorded duration does not show
_TESTS = "tests/unit"


class Recorded(NamedTuple):
    """A test, as recorded."""

    seconds: float  # without fixtures that others share
    lines: int  # that it runs, of all files that are measured
    fixtures: Set[str] = frozenset()


class Place(NamedTuple):
    """A line of the recorded version of a file; 0 is the file."""

    file: str
    line: int


@dataclass(frozen=True)
class Recording:
    """What tests did when they were recorded, by context. See Note [How tests are recorded]."""

    tests: Mapping[str, Recorded]
    lines_of: Callable[[str], Mapping[int, Set[str]]]  # of a file: the contexts in which each line ran
    source_of: Callable[[str], str | None]  # of a file: its text
    importers_of: Callable[[str], Iterable[str]] = lambda file: ()  # of a file: those that import it
    opened: Mapping[str, Set[str]] = field(default_factory=dict)  # files and folders: the contexts that looked at them
    shared: Mapping[str, float] = field(default_factory=dict)  # contexts of several tests, and seconds

    def users(self, contexts: Iterable[str]) -> set[str]:
        """Return the tests that contexts count for."""
        known = set(contexts)
        found = known & self.tests.keys()
        for context in known - found:
            node, _, name = context.rpartition("#")
            below = (test for test in self.tests if test.startswith(node))
            found |= {test for test in below if name == COLLECTION or name in self.tests[test].fixtures}
        return found


Touched = Mapping[Place, Set[str]]  # the tests of each place


def touching(recording: Recording, changes: Mapping[str, Iterable[int]]) -> dict[Place, frozenset[str]]:
    """Return the tests of each changed line, and of each changed file those that open it."""
    found = dict[Place, frozenset[str]]()
    for file, lines in changes.items():
        source = recording.source_of(file) if file.endswith(".py") else None
        if source is not None:
            run, inside = recording.lines_of(file), scopes(source)
            for line in lines:
                seen = witnesses(line, inside, run.keys())
                contexts = set[str]().union(*(run[one] for one in seen)) if seen else _in_importers(recording, file)
                found[Place(file, line)] = frozenset(recording.users(contexts))
        found[Place(file, 0)] = frozenset(recording.users(recording.opened.get(file, ())))
    return found


def _in_importers(recording: Recording, file: str) -> set[str]:
    """The contexts that run functions of files which import one that has none: its constants, its types."""
    found = set[str]()
    for other in recording.importers_of(file):
        if source := recording.source_of(other):
            run = recording.lines_of(other)
            found.update(*(run[line] for line in witnesses(0, scopes(source), run.keys())))
    return found


def ranked(recording: Recording, touched: Touched) -> list[str]:
    """Return the tests, the quickest and most specific first, in turns from each file and each function of tests.

    A test is the more specific, the more of the lines that it runs are in changed files. The files of tests of the
    room that a change is in come first. What one function checks in many cases is found by its first ones.
    """
    files = {place.file for place in touched}
    parts = _parts(recording, files)
    worth = dict[str, float]()
    for test in frozenset[str]().union(*touched.values()):
        known = recording.tests[test]
        share = (1 + parts[test]) / (1 + known.lines)
        worth[test] = share / (known.seconds + _OVERHEAD)
    order = sorted(worth, key=lambda test: (-worth[test], test))
    rooms = {_room(file) for file in files}
    of_files = _grouped(order, _file)
    names = sorted(of_files, key=lambda name: _room(name) not in rooms)
    return _in_turns([_in_turns(list(_grouped(of_files[name], function_of).values())) for name in names])


def _grouped(tests: Iterable[str], by: Callable[[str], str]) -> dict[str, list[str]]:
    groups = dict[str, list[str]]()
    for test in tests:
        groups.setdefault(by(test), []).append(test)
    return groups


def _in_turns(queues: Sequence[Sequence[str]]) -> list[str]:
    return [test for turn in itertools.zip_longest(*queues) for test in turn if test is not None]


def fitting(recording: Recording, touched: Touched, order: Sequence[str], seconds: float) -> list[str]:
    """Return the tests that fit into a time: one of each place that changed, if it fits, then by order."""
    users = {context: recording.users({context}) for context in recording.shared}
    waiting = {tests for tests in map(frozenset, touched.values()) if tests}
    chosen, paid, left = dict[str, None](), set[str](), seconds
    for test in itertools.chain(_of_each(waiting, order), order):
        once = {context for context in users.keys() - paid if test in users[context]}
        cost = recording.tests[test].seconds + sum(recording.shared[context] for context in once)
        if test not in chosen and cost <= left:
            chosen[test] = None
            paid |= once
            left -= cost
    return [test for test in order if test in chosen]


def _of_each(waiting: set[frozenset[str]], order: Sequence[str]) -> Iterator[str]:
    for test in order:
        if any(test in tests for tests in waiting):
            waiting = {tests for tests in waiting if test not in tests}
            yield test


def _parts(recording: Recording, files: Iterable[str]) -> defaultdict[str, int]:
    """How many lines of the files each test runs."""
    count = defaultdict[str, int](int)
    for file in files:
        for contexts in recording.lines_of(file).values():
            for test in contexts & recording.tests.keys():
                count[test] += 1
    return count


def _file(test: str) -> str:
    return test.split("::")[0]


def function_of(test: str) -> str:
    """Return a test without the parameters of its case."""
    return test.partition("[")[0]


def _room(file: str) -> str:
    """The room of a file, or of a file of tests: the folder below the package, the tests or the programs."""
    path = PurePosixPath(file)
    if path.is_relative_to(_TESTS):
        path = path.relative_to(_TESTS)
    elif path.parts[0] == "deepspeed_ext" or path.parts[0] == "tests":
        path = PurePosixPath(*path.parts[1:])
    return path.parts[0].removesuffix(".py").removeprefix("test_")
