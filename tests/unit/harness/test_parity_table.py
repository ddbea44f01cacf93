# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The rows of the parity table have what they promise: all pairs with each strategy, and the deep ones all triples."""

import pytest

from tests.harness import parity_table
from tests.harness.covering import Excluded, Option, Table
from tests.harness.parity_table import STRATEGIES, TABLES

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("kind", STRATEGIES)
def test_values_of_two_options_meet_in_the_first_tier(kind: str) -> None:
    """With at least one of the strategies that can have them."""
    table, missing = TABLES[kind], {}
    for strategy in STRATEGIES[kind]:
        run = [name for of, name, names in parity_table.cases("first") if of == kind and strategy in names]
        missing[strategy] = set(table.missing([parity_table.named_row(kind, name) for name in run], strategy))
    for values in set().union(*missing.values()):
        excluded = [one for one in table.excluded if one.strategies and one.found(dict(values))]
        possible = [name for name in missing if not any(name in one.strategies for one in excluded)]
        assert any(values not in missing[name] for name in possible), values


@pytest.mark.deep
@pytest.mark.parametrize("kind, strategy", [(kind, name) for kind, names in STRATEGIES.items() for name in names])
def test_values_of_three_options_meet_each_strategy(kind: str, strategy: str) -> None:
    rows = [parity_table.named_row(kind, name) for name in parity_table.rows_of(kind, "deep")]
    assert not TABLES[kind].missing(rows, strategy, 3)


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
    table = Table(options, (never, Excluded("not with Y", {"c": ("c2",)}, ("Y",))))
    rows = table.rows()
    assert rows == table.rows() and not any(never.found(row) for row in rows) and len(rows) < 3**4 / 2
    assert not table.missing(rows, "X") and not table.missing(rows, "Y")
    without = [row for row in rows if (row["c"], row["d"]) != ("c1", "d1")]
    assert (("c", "c1"), ("d", "d1")) in table.missing(without, "X")
