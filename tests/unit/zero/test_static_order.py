# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""One order in which units leave, whatever is complete first."""

import itertools

import pytest

from deepspeed_ext.zero.static_order import StaticOrder

pytestmark = pytest.mark.quick


def test_units_leave_in_one_order_whatever_is_complete_first() -> None:
    units = ["ab", "b", "cd", "", "e"]
    for used in (members for count in range(6) for members in itertools.permutations("abcde", count)):
        order = StaticOrder(units)
        left: list[int] = []
        for number, member in enumerate(used):
            left += order.ready(member)
            complete = [set(unit) <= set(used[: number + 1]) for unit in units]
            assert left == list(range(complete.index(False) if False in complete else len(units)))
            assert order.begun == bool(left)
        assert left + order.rest() == list(range(len(units)))
        assert order.ready("a") == []  # begun anew


def test_a_member_that_is_complete_twice_counts_once() -> None:
    order = StaticOrder(["ab", "c"])
    assert [order.ready("a"), order.ready("a"), order.ready("x")] == [[], [], []]
    assert not order.has_left("a")
    assert order.ready("b") == [0]
    assert order.has_left("a") and not order.has_left("c") and not order.has_left("x")
    assert order.ready("b") == []
    order.clear()
    assert not order.begun and not order.has_left("a")
    assert order.ready("a") == [] and order.rest() == [0, 1]
