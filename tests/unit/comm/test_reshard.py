# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Moves: layouts and plans by property, hops by what arrives, whatever the backend's way."""

import itertools
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed_ext.comm import backends, collectives, reshard
from deepspeed_ext.comm.hops import Contents, Part, ReduceHop, Span
from deepspeed_ext.comm.layout import FlatLayout, Range, plan_bucket
from deepspeed_ext.comm.packing import joined as join
from deepspeed_ext.comm.reshard import GradientReshard
from deepspeed_ext.comm.schedule import Schedule, Started
from deepspeed_ext.strategy import Placement

LAYOUTS = some.builds(FlatLayout, numel=some.integers(1, 300), rows=some.integers(1, 4), cols=some.integers(1, 4))


@settings(deadline=None)  # the machine may be busy
@given(LAYOUTS, some.data())
def test_a_plan_sends_each_element_to_its_cell_once(layout: FlatLayout, data: some.DataObject) -> None:
    starts = data.draw(some.lists(some.integers(0, layout.numel - 1), min_size=1, max_size=6, unique=True).map(sorted))
    ends = [data.draw(some.integers(a + 1, b)) for a, b in zip(starts, [*starts[1:], layout.numel], strict=True)]
    ranges = data.draw(some.permutations([Range(0, a, b - a) for a, b in zip(starts, ends, strict=True)]))
    bucket = [position for r in ranges for position in range(r.start, r.start + r.numel)]  # values = flat positions
    plan = plan_bucket((layout,), tuple(ranges))

    message = [bucket[offset + i] for offset, numel in plan.sources for i in range(numel)]
    expected = []
    for col, spans in enumerate(plan.spans):
        for span in spans:
            first = (span.row * layout.cols + col) * layout.chunk + span.start
            expected += range(first, first + span.numel)
        rows = plan.rows_of(col, layout.rows)
        assert sorted(span for part in rows for span in part) == sorted(spans)
        assert all(span.row == row for row, part in enumerate(rows) for span in part)
        assert plan.splits(col, layout.rows) == [sum(span.numel for span in part) for part in rows]
    assert message == expected and sorted(message) == sorted(bucket)
    assert all(span.start + span.numel <= layout.chunk for spans in plan.spans for span in spans)


def test_a_plan_over_two_buffers_keeps_them_apart() -> None:
    layouts = (FlatLayout(8, 2, 2), FlatLayout(12, 2, 2))
    plan = plan_bucket(layouts, (Range(1, 2, 5), Range(0, 0, 8)))
    assert [plan.splits(col, 2) for col in range(2)] == [[3, 3], [5, 2]]
    columns = [[tuple(span) for span in spans] for spans in plan.spans]
    assert columns == [
        [(0, 0, 0, 2), (1, 0, 2, 1), (0, 1, 0, 2), (1, 1, 0, 1)],
        [(0, 0, 0, 2), (1, 0, 0, 3), (0, 1, 0, 2)],
    ]


@settings(deadline=None)  # the machine may be busy
@given(LAYOUTS, some.integers(1, 400), some.booleans())
def test_windows_cover_the_chunk_and_place_puts_cells_where_they_belong(
    layout: FlatLayout, most: int, add: bool
) -> None:
    flat = torch.zeros(layout.numel)
    positions = torch.arange(layout.rows * layout.cols * layout.chunk).view(layout.rows, layout.cols, layout.chunk)
    windows = layout.windows(most)
    assert sum(width for _, width in windows) == layout.chunk
    for start, width in windows:
        assert width == 1 or width * layout.rows <= most
        cells = positions[:, :, start : start + width].transpose(0, 1).float()
        layout.place(flat, start, cells, add=add)
    assert torch.equal(flat, torch.arange(layout.numel).float())


@settings(deadline=None)  # the machine may be busy
@given(LAYOUTS, some.sampled_from([torch.float32, torch.bfloat16]), some.integers(0, 3))
def test_pack_and_unpack_are_inverse_and_cells_are_where_they_are_defined(
    layout: FlatLayout, dtype: torch.dtype, before: int
) -> None:
    flat = torch.arange(1, layout.numel + 1).to(torch.bfloat16).float()  # no zeros, exact in both dtypes
    # A window of a message that other buffers share; every element of it must be written.
    message = torch.full((layout.cols, layout.rows, before + layout.chunk + 1), torch.nan, dtype=dtype)
    cells = message[:, :, before : before + layout.chunk]
    layout.pack(flat, cells)
    assert message[:, :, :before].isnan().all() and message[:, :, before + layout.chunk :].isnan().all()
    for col in range(layout.cols):
        for row in range(layout.rows):
            start = (row * layout.cols + col) * layout.chunk
            held = flat[start : start + layout.chunk]
            assert torch.equal(cells[col, row, : held.numel()].float(), held)
            assert not cells[col, row, held.numel() :].any()
    placed = torch.full((layout.numel,), torch.nan)
    layout.place(placed, 0, cells.float())
    assert torch.equal(layout.unpack(cells).float(), flat) and torch.equal(placed, flat)


class Handle:
    """A communication that notes when it is waited for."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait(self) -> None:
        self.log.append(f"wait {self.name}")


def transfer(log: list[str], name: str) -> Any:
    """Two hops."""
    for hop in (1, 2):
        log.append(f"start {name}{hop}")
        yield Handle(log, f"{name}{hop}")
    log.append(f"done {name}")
    return torch.empty(0)


def test_overlapped_transfers_are_one_hop_apart() -> None:
    log: list[str] = []
    schedule = Schedule(overlap=True)
    for name in "ab":
        schedule.submit(transfer(log, name))
    schedule.drain()
    # The first hop of b is on the wire together with the second of a.
    assert log == [
        *("start a1", "wait a1", "start a2", "start b1", "wait a2", "done a"),
        *("wait b1", "start b2", "wait b2", "done b"),
    ]


def test_without_overlap_a_transfer_ends_before_the_next_starts() -> None:
    log: list[str] = []
    schedule = Schedule(overlap=False)
    for name in "ab":
        schedule.submit(transfer(log, name))
    assert log == [
        f"{what}" for n in "ab" for what in (f"start {n}1", f"wait {n}1", f"start {n}2", f"wait {n}2", f"done {n}")
    ]


def test_rooted_reduces_are_one_launch() -> None:
    log: list[str] = []

    @contextmanager
    def launch(group: Any, device: Any, requests: Any, asynchronous: bool) -> Any:
        log.append("open")
        yield Handle(log, "launch")
        log.append("close")

    def reduce(part: torch.Tensor, owner: int, async_op: bool, **_: Any) -> Handle:
        log.append(f"reduce {part.numel()} to {owner}")
        return Handle(log, str(owner))

    group = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(supports_coalescing=True))
    ranks = {"get_world_size": lambda group: 4, "get_rank": lambda group: 2, "get_global_rank": lambda _, rank: rank}
    with (
        mock.patch.object(collectives, "backend_of", lambda group: "nccl"),
        mock.patch.object(collectives, "get_coalescing_manager", launch),
        mock.patch.multiple(collectives.dist, reduce=reduce, **ranks),
    ):
        move = backends.NativeReduce(group).reduce_scatter(torch.arange(127.0), [100, 0, 7, 20])
        next(move).wait()
        assert log == ["open", "reduce 112 to 0", "reduce 16 to 2", "reduce 32 to 3", "close", "wait launch"]
        with pytest.raises(StopIteration) as done:
            next(move)
        assert done.value.value.tolist() == [100.0 + i for i in range(7)]


@pytest.mark.parametrize("kind", [backends.NativeReduce, backends.AllReduceReduce])
@pytest.mark.parametrize("spread", [False, True], ids=["rooted", "even"])
@pytest.mark.parametrize("together", [False, True], ids=["gradients", "buffer"])
def test_a_bucket_is_copied_once_and_freed_before_the_second_hop(kind: Any, spread: bool, together: bool) -> None:
    layout = FlatLayout(1200, 3, 4)
    ranges = (Range(0, 5, 700), Range(0, 900, 250)) if spread else (Range(0, 103, 90), Range(0, 410, 85))
    numels = [numel for *_, numel in ranges]
    gradients = [torch.rand(numel) for numel in numels]
    expected = torch.zeros(3, 4, 100)  # of this rank alone, as nothing is sent
    for (_, start, numel), gradient in zip(ranges, gradients, strict=True):
        expected.view(-1)[start : start + numel] = gradient
    alive: list[bool] = []
    copies: list[int] = []

    def start(group: Any, operation: str, collective: Any, *tensors: Any) -> Any:
        alive.append(not message.expired())
        if collective is collectives.dist.reduce_scatter_tensor:
            tensors[0].copy_(tensors[1].view(group.size, -1)[group.rank])
        return Handle([], operation)

    def joined(pieces: Any, lengths: Any) -> torch.Tensor:
        copies.append(len(alive))
        return join(pieces, lengths)

    sizes = {"intra": 4, "inter": 3}
    group_of = {"get_world_size": lambda group: sizes[group], "get_rank": lambda group: 1}
    with (
        mock.patch.object(collectives, "backend_of", lambda group: "nccl"),
        mock.patch.object(collectives, "_launches_together", lambda group, device: False),
        mock.patch.object(backends, "joined", joined),
        mock.patch.object(collectives.Collectives, "start", start),
        mock.patch.multiple(collectives.dist, get_global_rank=lambda group, rank: rank, **group_of),
    ):
        mine = GradientReshard(kind("intra"), kind("inter"))
        plan = plan_bucket((layout,), ranges)
        packed = mine.pack_bucket([torch.cat(gradients)] if together else gradients, plan, Placement.G)
        message, move = StorageWeakRef(packed.untyped_storage()), mine.reduce_bucket(packed, plan, Placement.G)
        del packed
        found = result(move)
    spans = mine.bucket_spans(plan, Placement.G)
    assert [v for span in spans for v in expected[1, 1, span.start : span.start + span.numel].tolist()] == found[
        : sum(span.numel for span in spans)
    ]
    first = next((number for number, name in enumerate(alive) if not name), len(alive))
    assert alive[0] and not alive[-1] and not any(alive[first:])
    assert 0 not in copies  # none before the first hop


def test_started_has_one_hop_on_the_wire_until_it_is_finished() -> None:
    log: list[str] = []
    started = Started(transfer(log, "a"))
    assert log == ["start a1"]
    result = started.finish()
    assert log == ["start a1", "wait a1", "start a2", "wait a2", "done a"]
    assert started.finish() is result and log[-1] == "done a"


def test_started_has_all_hops_on_the_wire_where_waiting_does_not_block_the_host() -> None:
    log: list[str] = []
    with mock.patch("deepspeed_ext.comm.schedule.get_accelerator") as accelerator:
        accelerator().is_synchronized_device.return_value = False
        started = Started(transfer(log, "a"), hops=2)
        assert log == ["start a1", "wait a1", "start a2"]
        assert started.finish().numel() == 0
    assert log == ["start a1", "wait a1", "start a2", "wait a2", "done a"]


def test_started_without_hops_is_finished_at_once() -> None:
    """As in a group of one rank."""
    kept = torch.ones(3)

    def nothing() -> Any:
        return kept
        yield

    assert Started(nothing()).finish() is kept


@pytest.mark.parametrize("keeps_errors", [False, True])
def test_only_hops_that_keep_errors_are_told_what_buckets_hold(keeps_errors: bool) -> None:
    class Noting(backends.NativeReduce):
        """Two ranks; sends nothing, and notes the contents."""

        size, rank, multiple, errors = 2, 0, 1, SimpleNamespace(keeps_errors=keeps_errors)

        def __init__(self, told: list[Contents]) -> None:
            self.told = told

        def reduce_scatter(self, flat: Any, splits: Any, contents: Contents = ()) -> Any:
            self.told.append(contents)
            return flat[: splits[0]]
            yield

        def all_reduce(self, flat: Any, spans: Part = ()) -> Any:
            self.told.append((spans,) if spans else ())
            return flat
            yield

    told: list[Contents] = []
    mine = GradientReshard(Noting([]), Noting(told))
    plan = plan_bucket((FlatLayout(40, 2, 2),), (Range(0, 3, 30),))
    made: list[Span] = []

    def span(*fields: int) -> Span:
        made.append(Span(*fields))
        return made[-1]

    with mock.patch.object(reshard, "Span", span):
        for move in (
            mine.reduce_bucket(mine.pack_bucket([torch.ones(30)], plan, Placement.G), plan, Placement.G),
            mine.reduce_cells(torch.ones(2, 2, 5), Placement.G, [(0, 3), (7, 2)]),
            mine.reduce_rows(torch.ones(2, 5), [(0, 3), (7, 2)]),
            mine.sync_slice(torch.ones(2, 5), torch.float32, Placement.G, 7),
            mine.sync_slice(torch.ones(1, 5), torch.float32, Placement.I, 7),
        ):
            result(move)
    two = tuple((Span(0, row, 0, 3), Span(0, row, 7, 2)) for row in range(2))
    one = tuple((Span(0, row, 7, 5),) for row in range(2))
    expected = [((Span(0, 0, 3, 7),), (Span(0, 1, 0, 10),)), two, two, one, one[:1]]
    assert told == (expected if keeps_errors else [()] * 5)
    assert bool(made) == keeps_errors


class Echo(ReduceHop):
    """Two ranks, of which the other has zeros; keeps what it is given."""

    size, multiple = 2, 1

    def __init__(self) -> None:
        pass

    def reduce_scatter(self, flat: torch.Tensor, splits: Any, contents: Any = ()) -> Any:
        self.given = flat
        return flat[: splits[0]].clone()
        yield

    def gather_sums(self, sums: torch.Tensor) -> Any:
        return torch.cat([sums, sums])
        yield


def test_an_all_reduce_copies_only_what_has_to_be_padded() -> None:
    for numel in (6, 7):
        hop, flat = Echo(), torch.arange(numel)
        assert Started(hop.all_reduce(flat)).finish().numel() == numel
        assert (hop.given.data_ptr() == flat.data_ptr()) == (numel == 6)
        assert hop.given[:numel].tolist() == flat.tolist() and not hop.given[numel:].any()


@settings(max_examples=10, deadline=None)
@given(splits=some.lists(some.integers(0, 40), min_size=4, max_size=4), numel=some.integers(0, 50))
def test_hops_agree_whatever_way_they_take(ranks: Any, splits: list[int], numel: int) -> None:
    for rank, answers in enumerate(ranks(4).run(hops_case, splits, numel)):
        assert len(answers) == 4
        for kind, part, whole, gathered in answers:
            start = sum(splits[:rank])
            assert part == [4.0 * i + 6 for i in range(start, start + splits[rank])], kind
            assert whole == [4.0 * i + 6 for i in range(numel)], kind
            assert gathered == [float(r) for r in range(4) for _ in range(splits[0])], kind


def result(move: Any) -> list[float]:
    """Run a transfer and return what it gives."""
    kept: list[torch.Tensor] = []

    def keep() -> Any:
        kept.append((yield from move))
        return kept[0]

    Schedule(overlap=False).submit(keep())
    return kept[0].tolist()


def hops_case(splits: list[int], numel: int) -> list[tuple[str, list[float], list[float], list[float]]]:
    """Element i of rank r is i + r: sums over four ranks are 4 i + 6."""
    from deepspeed import comm as dist

    from deepspeed_ext.comm.backends import AllReduceReduce, AllToAllReduce, NativeReduce, make_reduce

    group, rank = dist.get_world_group(), dist.get_rank()
    hops = [AllToAllReduce(group), NativeReduce(group), AllReduceReduce(group), make_reduce(group, "hop")]
    assert type(hops[3]) is AllToAllReduce and type(make_reduce(group, "hop", reduce_scatter=False)) is AllReduceReduce

    def data(size: int) -> torch.Tensor:
        return torch.arange(size, dtype=torch.float32) + rank

    return [
        (
            type(hop).__name__,
            result(hop.reduce_scatter(data(sum(splits)), splits)),
            result(hop.all_reduce(data(numel))),
            result(hop.gather_sums(torch.full((splits[0],), float(rank)))),
        )
        for hop in hops
    ]


def test_sums_of_16_bit_gradients_are_taken_in_fp32_and_in_rank_order(ranks: Any) -> None:
    answers = ranks(4).run(precision_case)
    assert all(answer == answers[0] for answer in answers)
    exact, summed = answers[0]
    assert summed == exact


def precision_case() -> tuple[float, float]:
    """256 + 1 + 1 + 0 is 258 in bf16, but 256 when each partial sum is rounded to bf16."""
    from deepspeed import comm as dist

    from deepspeed_ext.comm.backends import AllToAllReduce

    value = torch.full((3,), (256.0, 1.0, 1.0, 0.0)[dist.get_rank()], dtype=torch.bfloat16)
    return 258.0, result(AllToAllReduce(dist.get_world_group()).all_reduce(value))[0]


def test_gathers_follow_the_placements(ranks: Any) -> None:
    for rank, answers in enumerate(ranks(6).run(gathers_case)):
        number = rank % 3  # in the group; ranks 0..2 are one group, 3..5 the other; rank r holds [r, r + 0.5]
        column = [float(number), number + 0.5, number + 3.0, number + 3.5]
        everything = [v for i in range(3) for v in (i, i + 0.5, i + 3.0, i + 3.5)]
        assert answers == {
            "GI": column,
            "GN": everything,
            "IN": [v for i in range(3) for v in (rank - number + i, rank - number + i + 0.5)],
            **{same: [float(rank), rank + 0.5] for same in ("GG", "II", "NN")},
        }


def gathers_case() -> dict[str, list[float]]:
    """What each gather gives on 6 ranks in groups of 3."""
    from deepspeed import comm as dist

    from deepspeed_ext.comm.hops import GatherHop
    from deepspeed_ext.comm.process_groups import get_topology
    from deepspeed_ext.comm.reshard import ParameterReshard
    from deepspeed_ext.strategy import Placement

    topology = get_topology(None, 3)
    mine = ParameterReshard(GatherHop(topology.intra, "intra"), GatherHop(topology.inter, "inter"))
    shard = torch.tensor([float(dist.get_rank()), dist.get_rank() + 0.5])
    pairs = [(source, target) for source in Placement for target in Placement if source >= target]
    for pair in pairs:
        assert mine.hops(*pair) == communications(mine.gather(shard, *pair)), pair
    return {source.name + target.name: result(mine.gather(shard, source, target)) for source, target in pairs}


def communications(move: Any) -> int:
    """Run a transfer; how many communications it started."""
    count = 0
    for handle in move:
        handle.wait()
        count += 1
    return count


@settings(max_examples=10, deadline=None)
@given(numels=some.lists(some.integers(1, 40), min_size=1, max_size=4))
def test_cells_are_reduced_to_what_zero_holds(ranks: Any, numels: list[int]) -> None:
    for answers in ranks(4).run(reduce_cells_case, numels):
        for what, plain, chunks in answers:
            assert plain and chunks is not False, (what, numels)


def reduce_cells_case(numels: list[int]) -> list[tuple[str, bool, bool | None]]:
    """For each layout and target: whether this rank gets its part of the plain sum, and whether that is ZeRO's chunk.

    ZeRO cuts over all ranks or over a group; what is held in I of a layout cut over all is neither, hence None.
    """
    import deepspeed
    from deepspeed import comm as dist

    from deepspeed_ext.comm.backends import make_reduce
    from deepspeed_ext.comm.process_groups import get_topology
    from deepspeed_ext.strategy import Placement

    topology = get_topology(None, 2)
    mine = GradientReshard(make_reduce(topology.intra, "intra"), make_reduce(topology.inter, "inter"))
    everybody = [
        [torch.randint(-9, 9, (numel,), generator=torch.Generator().manual_seed(rank)).float() for numel in numels]
        for rank in range(4)
    ]
    group, number = divmod(dist.get_rank(), 2)
    answers = []
    for placement, target in ((Placement.G, Placement.G), (Placement.G, Placement.I), (Placement.I, Placement.I)):
        layouts = [FlatLayout.of(numel, placement, topology) for numel in numels]
        width = sum(layout.chunk for layout in layouts)
        cells = torch.empty(2, layouts[0].rows, width)
        ends = list(itertools.accumulate(layout.chunk for layout in layouts))
        starts = [end - layout.chunk for end, layout in zip(ends, layouts, strict=True)]
        for flat, layout, start, end in zip(everybody[dist.get_rank()], layouts, starts, ends, strict=True):
            layout.pack(flat, cells[:, :, start:end])
        arrived = Started(mine.reduce_cells(cells, target, [(0, width)])).finish().view(-1, width)
        rows = [group] if target == Placement.G else range(layouts[0].rows)
        # Over the ranks that reduce together: N -> I stays in the group.
        summed = range(4) if target == Placement.G else range(2 * group, 2 * group + 2)
        plain, chunks = True, True
        for index, (layout, start, end) in enumerate(zip(layouts, starts, ends, strict=True)):
            total = torch.stack([everybody[rank][index] for rank in summed]).sum(0)
            padded = torch.cat([total, torch.zeros(2 * layout.rows * layout.chunk - layout.numel)])
            expected = padded.view(layout.rows, 2, layout.chunk)[rows, number]
            plain = plain and torch.equal(arrived[:, start:end], expected)
            if placement == target:
                module = torch.nn.ParameterList([total.clone()])
                deepspeed.zero.Init(module=module, data_parallel_group=topology.shard_group(target))
                held = module[0].ds_tensor[
                    : max(0, layout.numel - (dist.get_rank() if len(summed) == 4 else number) * layout.chunk)
                ]
                chunks = chunks and torch.equal(arrived[0, start : start + held.numel()], held)
        answers.append((f"{placement.name} to {target.name}", plain, chunks if placement == target else None))
    return answers
