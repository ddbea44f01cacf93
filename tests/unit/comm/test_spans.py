# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Spans are sets of neighboring elements: what they have in common, what is left, and what is joined."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from deepspeed_ext.comm.spans import ShardSpan, Span, neighbors_joined, split_as, split_spans

pytestmark = pytest.mark.quick

SPANS = some.builds(Span, some.integers(0, 30), some.integers(0, 20))


def elements(*spans: Span) -> list[int]:
    """Those of spans, in order."""
    return [element for span in spans for element in range(span.start, span.stop)]


@given(SPANS, SPANS)
def test_common_elements_and_those_that_are_left(one: Span, other: Span) -> None:
    both = one.common(other)
    assert elements(both) == sorted({*elements(one)} & {*elements(other)}) and both.numel >= 0
    if both.numel:
        mine, taken = ShardSpan(2, 1, *one), ShardSpan(2, 1, *other)
        assert mine.common(taken) == ShardSpan(2, 1, *both)
        left = mine.without(mine.common(taken))
        assert elements(*(span.elements for span in left)) == sorted({*elements(one)} - {*elements(other)})
        assert all(span.numel and (span.buffer, span.row) == (2, 1) for span in left)


@given(some.lists(SPANS))
def test_neighbors_are_joined_in_their_order(spans: list[Span]) -> None:
    joined = neighbors_joined(spans)
    assert elements(*joined) == elements(*spans)
    assert all(before.stop != after.start for before, after in pairwise(joined))


@given(some.lists(SPANS), some.integers(0, 3))
def test_what_is_side_by_side_is_split_as_its_spans(spans: list[Span], padding: int) -> None:
    source = torch.arange(50).expand(2, 50)
    packed = torch.cat([*(span.of(source) for span in spans), torch.zeros(2, padding)], dim=1)
    parts = split_as(packed, spans)
    assert [part[1].tolist() for part in parts] == [elements(span) for span in spans]


def test_spans_of_a_part_are_cut_where_it_is() -> None:
    spans = ShardSpan(0, 1, 5, 7), ShardSpan(3, 1, 2, 4)
    first, second, third, fourth = split_spans(spans, [3, 0, 6, 9])
    assert first == (ShardSpan(0, 1, 5, 3),) and second == ()
    assert third == (ShardSpan(0, 1, 8, 4), ShardSpan(3, 1, 2, 2)) and fourth == (ShardSpan(3, 1, 4, 2),)
