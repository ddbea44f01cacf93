# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Random changes of the package are in all rooms, and of code."""

import ast

import pytest

from scripts import ROOT
from tests.campaigns.mutants.changes import drawn

pytestmark = pytest.mark.quick


def test_changes_are_drawn_from_all_rooms_and_parse() -> None:
    found = drawn(240, seed=1)
    of_cli = [drawn(240, seed, ("cli",)) for seed in (1, 1, 2)]
    assert len(found) >= 240 and set(of_cli[0]) <= set(found) and of_cli[0] == of_cli[1] != of_cli[2]
    assert {one.room for one in found} >= {"zero", "cli", "strategy.py"}
    for one in found[:80]:
        text = (ROOT / one.path).read_bytes()
        assert ast.dump(ast.parse(one.applied(text))) != ast.dump(ast.parse(text)), str(one)
