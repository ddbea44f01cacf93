# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Which tests a change concerns and which run first, by recordings that are written here."""

from dataclasses import replace

import pytest

from tests.harness.recordings.selection import Place, Recorded, Recording, fitting, ranked, touching

pytestmark = pytest.mark.quick

FILE, USER, CONSTANTS = "deepspeed_ext/zero/norms.py", "deepspeed_ext/zero/user.py", "deepspeed_ext/zero/limits.py"
SOURCE = '''"""Norms."""

LIMIT = 3


def scale(
    x: int,
) -> int:
    if x > LIMIT:
        return 1

    return 0


class Norm:
    order: int = 2

    def value(self) -> int:
        return self.order

    def reset(self) -> None:
        # Back to where it was.
        self.order = 2


def unused() -> None:
    print()
'''
A, B, C, D = (f"tests/unit/zero/test_norms.py::test_{name}" for name in "abcd")
LINES = {
    FILE: {9: {A, D}, 10: {A}, 12: {B}, 19: {B, C}, 23: {C}},
    USER: {2: {D}},
}
SOURCES = {FILE: SOURCE, USER: "def use():\n    return 1\n", CONSTANTS: "LIMIT = 3\n"}
RECORDING = Recording(
    tests={name: Recorded(1.0, 10) for name in (A, B, C, D)},
    lines_of=lambda file: LINES.get(file, {}),
    source_of=SOURCES.get,
    importers_of=lambda file: [USER] if file == CONSTANTS else [],
)


@pytest.mark.parametrize(
    "lines, tests",
    [
        ({10}, {A}),
        ({10, 23}, {A, C}),
        ({11}, {A, B}),  # an empty line: what runs before and after it
        ({22}, {C}),  # a comment that begins a function
        ({7}, {A, B, D}),  # a signature: the function
        ({16}, {B, C}),  # in a class: its methods
        ({18}, {B, C}),
        ({3}, {A, B, C, D}),  # runs when the module is imported: all functions of the file
        ({26}, {A, B, C, D}),  # no test is known to run it
        (set(), set()),
    ],
)
def test_tests_of_lines(lines: set[int], tests: set[str]) -> None:
    touched = touching(RECORDING, {FILE: lines})
    assert touched.keys() == {Place(FILE, line) for line in lines | {0}}
    assert set().union(*touched.values()) == tests


def test_constants_concern_those_who_import_them() -> None:
    assert touching(RECORDING, {CONSTANTS: [1]})[Place(CONSTANTS, 1)] == {D}


def test_opened_files_and_what_several_tests_share() -> None:
    elsewhere = "tests/unit/zero/test_states.py::test_e"
    tests = {A: Recorded(1.0, 10, {"model"}), B: Recorded(1.0, 10), elsewhere: Recorded(1.0, 10, {"model"})}
    lines = {FILE: {10: {"tests/unit/zero/test_norms.py#model"}, 12: {"#model"}}}
    opened = {"README.md": {B}, "table.csv": {"tests/unit/zero/test_norms.py#collection"}}
    recording = replace(RECORDING, tests=tests, lines_of=lambda file: lines.get(file, {}), opened=opened)
    touched = touching(recording, {FILE: [10, 12], "README.md": [5], "table.csv": [], "unknown.md": [1]})
    assert touched == {
        Place(FILE, 10): {A},
        Place(FILE, 12): {A, elsewhere},
        Place(FILE, 0): set(),
        Place("README.md", 0): {B},
        Place("table.csv", 0): {A, B},
        Place("unknown.md", 0): set(),
    }


def test_quick_and_specific_tests_of_the_room_come_first_in_turns_of_files_and_functions() -> None:
    tests = {
        "tests/unit/leaf/test_x.py::test_quickest": Recorded(0.01, 3),
        "tests/unit/zero/test_y.py::test_a_slow_one": Recorded(9.0, 3),
        "tests/unit/zero/test_y.py::test_broad": Recorded(1.0, 300),
        "tests/unit/zero/test_y.py::test_quick[0]": Recorded(1.0, 3),
        "tests/unit/zero/test_y.py::test_quick[1]": Recorded(1.1, 3),
        "tests/unit/zero/test_z.py::test_of_much_else": Recorded(1.0, 300),
    }
    lines = {FILE: {9: set(tests)}}
    recording = replace(RECORDING, tests=tests, lines_of=lambda file: lines.get(file, {}))
    order = ranked(recording, touching(recording, {FILE: [9]}))
    names = ["quick[0]", "of_much_else", "quickest", "a_slow_one", "broad", "quick[1]"]
    assert [test.split("::test_")[1] for test in order] == names


def test_a_test_of_each_place_and_then_as_many_as_fit() -> None:
    order = [A, B, C, D]
    touched = {Place(FILE, 1): frozenset({A, B}), Place(FILE, 2): frozenset({D}), Place(FILE, 3): frozenset({A, C})}
    assert fitting(RECORDING, touched, order, 2.5) == [A, D]
    assert fitting(RECORDING, touched, order, 3.5) == [A, B, D]
    assert fitting(RECORDING, touched, order, 9.0) == order
    long = replace(RECORDING, tests={**RECORDING.tests, A: Recorded(5.0, 10)})
    assert fitting(long, touched, order, 3.5) == [B, C, D]


def test_what_tests_share_is_paid_once() -> None:
    tests = {A: Recorded(1.0, 10, {"model"}), B: Recorded(1.0, 10, {"model"}), C: Recorded(1.0, 10)}
    recording = replace(RECORDING, tests=tests, shared={"#model": 4.0})
    touched = {Place(FILE, 1): frozenset({A, B, C})}
    assert fitting(recording, touched, [A, B, C], 4.0) == [C]
    assert fitting(recording, touched, [A, B, C], 6.0) == [A, B]
