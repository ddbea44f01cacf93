# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Spans of elements, layouts of flat buffers, bucket plans, and owners of full matrices."""

import itertools
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.comm.layout import FlatLayout, Stripe, plan_bucket
from deepspeed_ext.comm.owners import Job, assign_owners, rounds
from deepspeed_ext.comm.parameter_bucket import _runs
from deepspeed_ext.comm.spans import ShardSpan, Span, merge_neighbors, split_as, split_spans
from deepspeed_ext.zero.flat.buffers import stripe_starts

pytestmark = pytest.mark.quick

ONE_STRIPE = st.builds(FlatLayout, numel=st.integers(1, 300), rows=st.integers(1, 4), cols=st.integers(1, 4))
SEVERAL = st.builds(
    lambda numels, rows, cols: FlatLayout(sum(numels), rows, cols, (0, *itertools.accumulate(numels[:-1]))),
    st.lists(st.integers(1, 90), min_size=2, max_size=5),
    st.integers(1, 4),
    st.integers(1, 4),
)
LAYOUTS = st.one_of(ONE_STRIPE, SEVERAL)


def positions(layout: FlatLayout) -> torch.Tensor:
    """Return the element of the flat buffer at each position, (rows, cols, chunk); -1 for padding."""
    elements_at = torch.full((layout.rows, layout.cols, layout.chunk), -1)
    for stripe in layout.stripes:
        for cell in range(layout.rows * layout.cols):
            first = stripe.span.start + cell * stripe.width
            cell_elements = torch.arange(first, max(first, min(first + stripe.width, stripe.span.stop)))
            row, col = divmod(cell, layout.cols)
            elements_at[row, col, stripe.column : stripe.column + len(cell_elements)] = cell_elements
    return elements_at


def test_parameter_lists_are_divided_into_runs() -> None:
    layouts = [FlatLayout(numel, 2, 2) for numel in (40, 60, 40, 60, 50, 50, 50, 70)]
    assert [(run.first, len(run.pattern), run.times) for run in _runs(layouts, 4)] == [(0, 2, 2), (4, 1, 3), (7, 1, 1)]


@given(LAYOUTS)
def test_each_element_is_in_one_cell(layout: FlatLayout) -> None:
    where = positions(layout)
    assert sorted(where[where >= 0].tolist()) == list(range(layout.numel))
    for row, col in itertools.product(range(layout.rows), range(layout.cols)):
        for piece in layout.cells_of(row, col):
            assert piece.columns.of(where[row, col]).tolist() == list(range(piece.span.start, piece.span.stop))
    for stripe in layout.stripes:
        pieces = list(layout.pieces(stripe.span))
        assert len({(piece.row, piece.col) for piece in pieces}) == len(pieces)  # as DeepSpeed's fragments need
        assert sum(piece.span.numel for piece in pieces) == stripe.span.numel


def test_stripes_have_complete_parameters_and_are_balanced() -> None:
    numels = [10**6] * 40
    offsets = [0, *itertools.accumulate(numels[:-1])]
    starts = stripe_starts(offsets, numels, 5 * 10**8, 8)
    assert len(starts) == 20 and set(starts) <= set(offsets)  # a 16th would begin within a parameter
    layout = FlatLayout(sum(numels), 2, 4, starts)
    assert all(8 * stripe.width <= 1.02 * stripe.span.numel for stripe in layout.stripes)
    assert stripe_starts(offsets, numels, 10**6, 8) == tuple(offsets)
    assert stripe_starts(range(40), [1] * 40, 5 * 10**8, 8) == (0,)  # too small to be worth messages


@settings(deadline=None)  # the machine may be busy
@given(LAYOUTS, st.data())
def test_plan_sends_each_element_to_its_cell_once(layout: FlatLayout, data: st.DataObject) -> None:
    starts = data.draw(st.lists(st.integers(0, layout.numel - 1), min_size=1, max_size=6, unique=True).map(sorted))
    ends = [data.draw(st.integers(a + 1, b)) for a, b in zip(starts, [*starts[1:], layout.numel], strict=True)]
    spans = data.draw(st.permutations([Span.between(a, b) for a, b in zip(starts, ends, strict=True)]))
    bucket = [position for span in spans for position in range(span.start, span.stop)]  # values = flat positions
    plan = plan_bucket((layout,), tuple((0, span) for span in spans))

    where = positions(layout)
    message, expected = [], []
    for col, column in enumerate(plan.columns):
        numbers = [row for rows in column for row in range(rows.first, rows.first + rows.times)]
        assert numbers == sorted(set(numbers))
        of_groups = plan.rows_of(col, layout.rows)
        for row, part in enumerate(of_groups):
            for span in part:
                assert span.row == row and span.start + span.numel <= layout.chunk
                expected += where[row, col, span.start : span.start + span.numel].tolist()
            for rows in plan.row(col, row):
                step = row - next(r.first for r in column if r.first <= row < r.first + r.times)
                for cut in rows.cuts:
                    first = cut.offset + step * cut.stride
                    message += bucket[first : first + cut.span.numel]
        assert plan.splits(col, layout.rows) == [sum(span.numel for span in part) for part in of_groups]
    assert message == expected and sorted(message) == sorted(bucket)


def test_plan_size_does_not_depend_on_ranks() -> None:
    sizes = []
    for groups in (16, 512):
        layout = FlatLayout(10**9, groups, 8, (0, 4 * 10**8))
        plan = plan_bucket((layout,), ((0, Span(10**8 + 7, 5 * 10**8)), (0, Span(3, 10**8))))
        sizes.append(sum(len(rows.cuts) for column in plan.columns for rows in column))
        assert sum(sum(plan.splits(col, groups)) for col in range(8)) == 6 * 10**8
    assert sizes[0] == pytest.approx(sizes[1], abs=8) and sizes[1] < 100, sizes


def test_plan_separates_two_buffers() -> None:
    plan = plan_bucket((FlatLayout(8, 2, 2), FlatLayout(12, 2, 2)), ((1, Span(2, 5)), (0, Span(0, 8))))
    assert [plan.splits(col, 2) for col in range(2)] == [[3, 3], [5, 2]]
    assert [[tuple(span) for part in plan.rows_of(col, 2) for span in part] for col in range(2)] == [
        [(0, 0, 0, 2), (1, 0, 2, 1), (0, 1, 0, 2), (1, 1, 0, 1)],
        [(0, 0, 0, 2), (1, 0, 0, 3), (0, 1, 0, 2)],
    ]


@settings(deadline=None)  # the machine may be busy
@given(LAYOUTS, st.integers(1, 400), st.booleans())
def test_windows_cover_the_chunk_and_are_unpacked(layout: FlatLayout, most: int, add: bool) -> None:
    flat = torch.zeros(layout.numel)
    where = positions(layout)
    windows = layout.windows(layout.rows, most)
    assert sum(width for _, width in windows) == layout.chunk
    for start, width in windows:
        assert width == 1 or width * layout.rows <= most
        layout.unpack_window(flat, start, where[:, :, start : start + width].transpose(0, 1).float(), add=add)
    assert torch.equal(flat, torch.arange(layout.numel).float())


@settings(deadline=None)  # the machine may be busy
@given(ONE_STRIPE, st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 3))
def test_unpack_inverts_pack(layout: FlatLayout, dtype: torch.dtype, before: int) -> None:
    flat = torch.arange(1, layout.numel + 1).to(torch.bfloat16).float()  # no zeros, exact in both dtypes
    # A window of a message that other buffers share; every element of it must be written.
    message = torch.full((layout.cols, layout.rows, before + layout.chunk + 1), torch.nan, dtype=dtype)
    cells = message[:, :, before : before + layout.chunk]
    layout.pack(flat, cells)
    assert message[:, :, :before].isnan().all() and message[:, :, before + layout.chunk :].isnan().all()
    for col in range(layout.cols):
        for row in range(layout.rows):
            start = (row * layout.cols + col) * layout.chunk
            chunk = flat[start : start + layout.chunk]
            assert torch.equal(cells[col, row, : chunk.numel()].float(), chunk)
            assert not cells[col, row, chunk.numel() :].any()
    placed = torch.full((layout.numel,), torch.nan)
    layout.unpack_window(placed, 0, cells.float())
    assert torch.equal(layout.unpack(cells).float(), flat) and torch.equal(placed, flat)


SPANS = st.builds(Span, st.integers(0, 30), st.integers(0, 20))


def elements(*spans: Span) -> list[int]:
    return [element for span in spans for element in range(span.start, span.stop)]


@given(SPANS, SPANS)
def test_span_intersection_and_remainder(first: Span, second: Span) -> None:
    both = first.common(second)
    assert elements(both) == sorted({*elements(first)} & {*elements(second)}) and both.numel >= 0
    if both.numel:
        span, other_span = ShardSpan(2, 1, *first), ShardSpan(2, 1, *second)
        assert span.common(other_span) == ShardSpan(2, 1, *both)
        remainder = span.without(span.common(other_span))
        assert elements(*(part.elements for part in remainder)) == sorted({*elements(first)} - {*elements(second)})
        assert all(part.numel and (part.buffer, part.row) == (2, 1) for part in remainder)


@given(st.lists(SPANS))
def test_neighboring_spans_are_merged_in_order(spans: list[Span]) -> None:
    joined = merge_neighbors(spans)
    assert elements(*joined) == elements(*spans)
    assert all(before.stop != after.start for before, after in itertools.pairwise(joined))


@given(st.lists(SPANS), st.integers(0, 3))
def test_tensor_is_split_by_spans(spans: list[Span], padding: int) -> None:
    source = torch.arange(50).expand(2, 50)
    packed = torch.cat([*(span.of(source) for span in spans), torch.zeros(2, padding)], dim=1)
    parts = split_as(packed, spans)
    assert [part[1].tolist() for part in parts] == [elements(span) for span in spans]


def test_spans_are_split_at_part_boundaries() -> None:
    first, second, third, fourth = split_spans((ShardSpan(0, 1, 5, 7), ShardSpan(3, 1, 2, 4)), [3, 0, 6, 9])
    assert first == (ShardSpan(0, 1, 5, 3),) and second == ()
    assert third == (ShardSpan(0, 1, 8, 4), ShardSpan(3, 1, 2, 2)) and fourth == (ShardSpan(3, 1, 4, 2),)


@pytest.mark.parametrize("origin, width", [(0, 7), (-5, 7), (-40, 16), (0, 1000)])
def test_rank_parts_add_up_to_the_span(origin: int, width: int) -> None:
    job = Job(Span(11, 90), Stripe(Span(origin, 200), 0, width), 1.0)
    covered: list[int] = []
    for rank in job.holders(20):
        local_span = job.local_span(rank)
        assert local_span.numel
        covered += range(local_span.start, local_span.stop)
    assert covered == list(range(11, 101))
    assert sum(local_span.numel for local_span in map(job.local_span, range(200))) == 90  # others have nothing


def test_owners_balance_costs_and_spread_jobs_over_groups() -> None:
    generator = random.Random(5)
    ranks, group = 12, 4
    costs = [generator.uniform(1, 9) for _ in range(200)]
    jobs = [Job(Span(0, 120), Stripe(Span(0, 120), 0, 10), cost) for cost in costs]
    loads = Counter[int]()
    for owner, cost in zip(assign_owners(jobs, ranks, group), costs, strict=True):
        loads[owner] += cost
    assert len(loads) == ranks and max(loads.values()) < 1.05 * sum(costs) / ranks
    assert Counter(owner // group for owner in assign_owners(jobs[:6], ranks, group)) == {0: 2, 1: 2, 2: 2}


def test_owners_hold_elements_and_local_jobs_stay_local() -> None:
    stripe = Stripe(Span(0, 400), 0, 100)
    jobs = [
        Job(Span(0, 90), stripe, 5.0),  # all of it is rank 0's
        Job(Span(90, 20), stripe, 1.0),  # of ranks 0 and 1
        Job(Span(110, 80), stripe, 1.0),  # rank 1's
        Job(Span(190, 150), stripe, 3.0),  # of ranks 1, 2 and 3
    ]
    assert [job.is_local for job in jobs] == [True, False, True, False]
    assert assign_owners(jobs, 4, 2) == [0, 1, 1, 2]
    assert not Job(Span(0, 5), None, 1.0).is_local


def test_rounds_are_filled_per_owner() -> None:
    stripe = Stripe(Span(0, 120), 0, 10)
    jobs = [Job(Span(0, numel), stripe, 1.0) for numel in (50, 30, 30, 20, 20, 8)]
    owners = [0, 1, 1, 1, 0, 0]
    assert rounds(jobs, owners, most_numel=50) == [[0, 1], [2, 3, 4], [5]]  # what stays comes last
    assert sorted(number for numbers in rounds(jobs, owners, most_numel=1) for number in numbers) == list(range(6))
    for numbers in rounds(jobs, owners, most_numel=1):
        assert max(Counter(owners[number] for number in numbers).values()) == 1
