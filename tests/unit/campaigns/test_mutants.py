# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Random changes of the package are in all rooms, each in one place, and of code."""

import ast
from pathlib import Path

import pytest

from scripts import ROOT
from tests.campaigns.mutants.changes import changes, drawn

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
    return [str(one).partition("  ->  ")[2] for one in changes(path)]


def test_python_is_changed_within_functions(tmp_path: Path) -> None:
    assert of(PYTHON, tmp_path / "a.py") == [
        "pass",
        "return a < 2 and not zip(a, a, strict=True)",
        "return a <= 2 or not zip(a, a, strict=True)",
        "return a < 2 or zip(a, a, strict=True)",
        "return a < 3 or not zip(a, a, strict=True)",
    ]


def test_cpp_is_changed_in_code(tmp_path: Path) -> None:
    found = of(CPP, tmp_path / "a.h")
    assert found[0] == "const int two = a <= 2 ? 1 : std::vector<int>(4)[a];"
    assert found[-1] == ";" and len(found) == 5


def test_changes_are_drawn_from_all_rooms_and_parse() -> None:
    found = drawn(240, seed=1)
    of_cli = [drawn(240, seed, ("cli",)) for seed in (1, 1, 2)]
    assert len(found) >= 240 and set(of_cli[0]) <= set(found) and of_cli[0] == of_cli[1] != of_cli[2]
    assert {one.room for one in found} >= {"zero", "csrc", "cli", "strategy.py"}
    for one in found[:80]:
        text = (ROOT / one.path).read_bytes()
        assert one.applied(text) != text
        if one.path.suffix == ".py":
            assert ast.dump(ast.parse(one.applied(text))) != ast.dump(ast.parse(text)), str(one)
