# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Random changes of the package are in all rooms, and of code."""

import ast

import pytest

from scripts import ROOT
from tests.campaigns.mutants.changes import draw_changes


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
