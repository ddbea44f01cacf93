# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Contents of a recording of tests, and the tests that are selected by it."""

import pytest

from tests.harness.recordings import Recording, lines_in
from tests.harness.tiers import with_cases

pytestmark = pytest.mark.quick

FILE = "deepspeed_ext/zero/norms.py"
SOURCE = """LIMIT = 3

def scale(
    x: int,
) -> int:
    if x > LIMIT:
        return 1

    return 0

class Norm:
    order = 2

    def value(self) -> int:
        return self.order
"""
A, B, C = (f"tests/unit/zero/test_norms.py::test_{name}" for name in ("a[0]", "a[1]", "b"))
D, E = "tests/unit/leaf/test_units.py::test_d", "tests/unit/test_documents.py::test_e"
LINES = {1: {"tests/unit/zero/test_norms.py"}, 6: {A, B}, 7: {A}, 9: {B}, 15: {C, "tests/unit/leaf/test_units.py"}}
RECORDING = Recording(
    about={},
    tests={A: 1.0, B: 2.0, C: 3.0, D: 0.1, E: 0.2},
    lines_of=lambda file: LINES if file in (FILE, "deepspeed_ext/loco/ops.py") else {},
    source_of=lambda file: SOURCE,
)


@with_cases(
    "file, line, tests",
    (FILE, 7, {A}),
    (FILE, 8, {A, B}),  # an empty line: its neighbors
    (FILE, 4, {A, B}),  # a signature: the function
    (FILE, 1, {A, B, C, D}),  # outside of functions: all functions of the file
    (FILE, 15, {C, D}),  # shared by the tests of a file
    ("csrc/loco/block.h", 3, {A, B, C, D}),
    ("deepspeed_ext/leaf/README.md", 3, {D, E}),
)
def test_a_line_concerns_the_tests_that_run_it(file: str, line: int, tests: set[str]) -> None:
    assert RECORDING.concerned(file, [line]) == tests


def test_quick_tests_of_the_room_and_other_functions_run_first() -> None:
    assert RECORDING.fitting(RECORDING.tests, [FILE], 9.0) == [A, C, D, E, B]
    assert RECORDING.fitting(RECORDING.tests, [FILE], 3.5) == [A, D, E, B]


def test_both_sides_of_a_diff_have_their_lines() -> None:
    diff = "@@ -3,2 +3 @@ def f():\n-a\n-b\n+c\n@@ -10,0 +12,3 @@\n+d\n"
    assert (lines_in(diff, "-"), lines_in(diff, "+")) == ({3, 4, 10, 11}, {3, 12, 13, 14})
