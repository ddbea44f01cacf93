# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Random changes of the package are in all rooms, each in one place, and of code."""

import ast
from pathlib import Path

import pytest

from scripts import ROOT
from tests.campaigns.mutants.changes import changes, draw_changes

pytestmark = pytest.mark.quick

TEXTS = {
    "a.py": """\
LIMIT = 3
def first(a):
    \"\"\"Below 2.\"\"\"
    note(a)
    return a < 2 or not zip(a, a, strict=True)
""",
    "a.h": """\
int first(int a) {
  // a < b is no code
  return a < two ? std::vector<int>(b)[a] : a;
  check(a);
}
""",
}
CHANGED = {
    "a.py": [
        "pass",
        "return a < 2 and not zip(a, a, strict=True)",
        "return a <= 2 or not zip(a, a, strict=True)",
        "return a < 2 or zip(a, a, strict=True)",
        "return a < 3 or not zip(a, a, strict=True)",
    ],
    "a.h": ["return a <= two ? std::vector<int>(b)[a] : a;", ";"],
}


@pytest.mark.parametrize("name", TEXTS)
def test_code_is_changed_within_functions(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(TEXTS[name])
    assert [str(one).partition("  ->  ")[2] for one in changes(path)] == CHANGED[name]


@pytest.mark.deep
def test_changes_are_drawn_from_all_rooms_and_parse() -> None:
    found = draw_changes(240, seed=1)
    of_cli = [draw_changes(240, seed, ("tools",)) for seed in (1, 1, 2)]
    assert len(found) >= 240 and set(of_cli[0]) <= set(found) and of_cli[0] == of_cli[1] != of_cli[2]
    assert {one.room for one in found} >= {"zero", "csrc", "tools", "strategy.py"}
    for one in found[:80]:
        text = (ROOT / one.path).read_bytes()
        assert one.applied(text) != text
        if one.path.suffix == ".py":
            assert ast.dump(ast.parse(one.applied(text))) != ast.dump(ast.parse(text)), str(one)
