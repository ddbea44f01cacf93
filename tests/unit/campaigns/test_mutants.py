# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Random changes that tests must find: they are in all rooms, each in one place, and change code, not text."""

import ast
from pathlib import Path

import pytest

from tests.campaigns.mutants import choosing, cpp, python
from tests.campaigns.mutants.mutant import Mutant

pytestmark = pytest.mark.quick

CPP = """\
int first(int a) {
  // a < b is no code
  const int two = a < 2 ? 1 : std::vector<int>(4)[a];
  check(a);
}
"""
PYTHON = """\
LIMIT = 3


def first(a):
    \"\"\"Below 2.\"\"\"
    note(a)
    return a < 2 or not zip(a, a, strict=True)
"""


def of(text: str, path: Path) -> list[str]:
    """The changed lines of a file with this text."""
    path.write_text(text)
    changes = python.changes(path) if path.suffix == ".py" else list(cpp.changes(path))
    return [str(one).partition("  ->  ")[2] for one in changes]


def test_python_is_changed_within_functions(tmp_path: Path) -> None:
    assert of(PYTHON, tmp_path / "a.py") == [
        "pass",
        "return a < 2 and not zip(a, a, strict=True)",
        "return a <= 2 or not zip(a, a, strict=True)",
        "return a < 2 or zip(a, a, strict=True)",
        "return a < 3 or not zip(a, a, strict=True)",
    ]


def test_cpp_is_changed_where_it_is_code(tmp_path: Path) -> None:
    found = of(CPP, tmp_path / "a.h")
    assert found[0] == "const int two = a <= 2 ? 1 : std::vector<int>(4)[a];"
    assert found[-1] == ";" and len(found) == 5


def test_each_room_has_its_share_and_each_change_is_one() -> None:
    everything = choosing.changes()
    drawn = choosing.drawn(240, seed=1)
    assert {one.room for one in drawn} == {one.room for one in everything} >= {"zero", "csrc", "cli", "strategy.py"}
    assert len(drawn) >= 240 and drawn == choosing.drawn(240, seed=1) != choosing.drawn(240, seed=2)
    assert choosing.shares(240)["zero"] > 2 * choosing.shares(240)["loco"] > choosing.shares(240)["cli"]
    for one in drawn:
        assert_makes_a_difference(one)


def assert_makes_a_difference(one: Mutant) -> None:
    text = (choosing.ROOT / one.path).read_bytes()
    changed = one.applied(text)
    assert changed != text
    if one.path.suffix == ".py":
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text)), str(one)
