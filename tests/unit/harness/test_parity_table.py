# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The rows of the parity table cover all pairs with each strategy, and the deep rows all triples."""

import pytest

from tests.harness.parity_table import STRATEGIES, TABLES, cases, named_row, rows_of

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("kind", STRATEGIES)
def test_values_of_two_options_meet_in_the_first_tier(kind: str) -> None:
    """With at least one of the strategies that can have them."""
    table, missing = TABLES[kind], {}
    for strategy in STRATEGIES[kind]:
        run = [name for of, name, names in cases("first") if of == kind and strategy in names]
        missing[strategy] = set(table.missing([named_row(kind, name) for name in run], strategy))
    for values in set().union(*missing.values()):
        excluded = [one for one in table.excluded if one.strategies and one.found(dict(values))]
        possible = [name for name in missing if not any(name in one.strategies for one in excluded)]
        assert any(values not in missing[name] for name in possible), values


@pytest.mark.deep
@pytest.mark.parametrize("kind, strategy", [(kind, name) for kind, names in STRATEGIES.items() for name in names])
def test_values_of_three_options_meet_each_strategy(kind: str, strategy: str) -> None:
    rows = [named_row(kind, name) for name in rows_of(kind, "deep")]
    assert not TABLES[kind].missing(rows, strategy, 3)
