# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The rows of the parity table have what they promise: all pairs with each strategy, and the deep ones all triples."""

import pytest

from tests.harness import parity_table
from tests.harness.covering import Excluded, Option, Table
from tests.harness.parity_table import STRATEGIES, TABLES
from tests.harness.tiers import deep

pytestmark = pytest.mark.quick


EACH_TIER = pytest.mark.parametrize("tier, strength", [("first", 2), *deep(("deep", 3))])


@EACH_TIER
@pytest.mark.parametrize("kind, strategy", [(kind, name) for kind, names in STRATEGIES.items() for name in names])
def test_pairs_of_values_meet_each_strategy(kind: str, strategy: str, tier: str, strength: int) -> None:
    """Of three options in the deep tier."""
    rows = [parity_table.named_row(kind, name) for name in parity_table.rows_of(kind, tier)]
    assert not TABLES[kind].missing(rows, strategy, strength)


@pytest.mark.parametrize("tier", ["first", "deep"])
@pytest.mark.parametrize("kind", TABLES)
def test_rows_have_names_and_nothing_excluded(kind: str, tier: str) -> None:
    table, names = TABLES[kind], parity_table.rows_of(kind, tier)
    values = [value for option in table.options for value in option.values]
    assert len(set(values)) == len(values) and not any("-" in value for value in values)
    assert len(set(names)) == len(names)
    for row in (parity_table.named_row(kind, name) for name in names):
        with_all = [row] if table.possible(row) else [table.with_strategy(row, name) for name in STRATEGIES[kind]]
        assert any(table.possible(one) for one in with_all)
    assert parity_table.row_name(kind, table.everything()) in names


def test_a_covering_array_leaves_no_pair_out() -> None:
    options = tuple(Option(name, "", {f"{name}{i}": {} for i in range(3)}) for name in "abcd")
    never = Excluded("they contradict", {"a": ("a1",), "b": ("b1", "b2")})
    table = Table(options, (never, Excluded("not with Y", {"c": ("c2",)}, ("Y",))), (("b", "c", "d"),))
    rows = table.rows()
    assert rows == table.rows() and not any(never.found(row) for row in rows) and len(rows) < 3**4 / 2
    assert not table.missing(rows, "X") and not table.missing(rows, "Y")
    without = [row for row in rows if (row["c"], row["d"]) != ("c1", "d1")]
    assert (("c", "c1"), ("d", "d1")) in table.missing(without, "X")
