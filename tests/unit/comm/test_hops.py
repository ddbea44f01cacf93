# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Results of hops are the same with the collectives of every backend."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext.comm import backends, collectives
from deepspeed_ext.comm.backends import AllReduceReduce, AllToAllReduce, NativeReduce, make_reduce
from deepspeed_ext.comm.hops import ReduceHop
from deepspeed_ext.comm.transfer_queue import ActiveTransfer
from tests.harness.transfers import Handle, result

pytestmark = pytest.mark.quick


def test_rooted_reduces_are_coalesced() -> None:
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
    ranks = {"get_world_size": lambda group: 4, "get_rank": lambda group: 2}
    with (
        mock.patch.object(collectives, "backend_of", lambda group: "nccl"),
        mock.patch.object(collectives, "get_coalescing_manager", launch),
        mock.patch.object(collectives, "get_process_group_ranks", lambda group: range(4)),
        mock.patch.multiple(collectives.dist, reduce=reduce, **ranks),
        mock.patch.object(backends, "_ELEMENTS_PER_STEP", 0),
    ):
        move = backends.NativeReduce(group).reduce_scatter(torch.arange(127.0), [100, 0, 7, 20])
        next(move).wait()
        assert log == ["open", "reduce 112 to 0", "reduce 16 to 2", "reduce 32 to 3", "close", "wait launch"]
        with pytest.raises(StopIteration) as done:
            next(move)
        assert done.value.value.tolist() == [100.0 + i for i in range(7)]


@pytest.mark.parametrize(
    "present, numel, rooted",
    [(512, 1000, False), (300, 1000, False), (1, 1000, True), (4, 1 << 20, True), (300, 1 << 20, False)],
)
def test_parts_use_rooted_reduces_if_these_are_faster(present: int, numel: int, rooted: bool) -> None:
    with (
        mock.patch.object(collectives, "backend_of", lambda group: "nccl"),
        mock.patch.multiple(collectives.dist, get_world_size=lambda group: 512, get_rank=lambda group: 0),
    ):
        lengths = backends.NativeReduce("group").lengths([numel] * present + [0] * (512 - present))  # type: ignore
    assert (min(lengths) == 0) == rooted, lengths


class Echo(ReduceHop):
    """A process group of two ranks, of which the other one has zeros. Records its inputs."""

    size, multiple = 2, 1

    def __init__(self) -> None:
        pass

    def reduce_scatter(self, flat: torch.Tensor, splits: Any, contents: Any = ()) -> Any:
        self.given = flat
        return flat[: splits[0]].clone()
        yield

    def gather_sums(self, sums: torch.Tensor, spans: Any = ()) -> Any:
        return torch.cat([sums, sums])
        yield


def test_all_reduce_copies_only_if_it_pads() -> None:
    for numel in (6, 7):
        hop, flat = Echo(), torch.arange(numel)
        assert ActiveTransfer(hop.all_reduce(flat)).finish().numel() == numel
        assert (hop.given.data_ptr() == flat.data_ptr()) == (numel == 6)
        assert hop.given[:numel].tolist() == flat.tolist() and not hop.given[numel:].any()


SIZES = [([0, 3, 0, 0], 7), ([0, 0, 0, 0], 0), ([5, 5, 5, 5], 50), ([40, 0, 17, 1], 1), ([1, 2, 3, 33], 40)]


def test_all_hops_give_the_same_sums(ranks: Any) -> None:
    for rank, results in enumerate(ranks(4).run(hops_case)):
        for (splits, numel), answers in zip(SIZES, results, strict=True):
            assert len(answers) == 5
            start = sum(splits[:rank])
            for kind, part, sums, gathered in answers:
                assert part == [4.0 * i + 6 for i in range(start, start + splits[rank])], kind
                assert sums == [4.0 * i + 6 for i in range(numel)], kind
                assert gathered == [float(r) for r in range(4) for _ in range(splits[0])], kind


def ordered_hop() -> ReduceHop:
    """Return the ordered reduction of all ranks, with collectives as on NCCL."""
    with mock.patch.object(collectives, "backend_of", lambda group: "nccl"):
        return make_reduce(dist.get_world_group(), "hop", ordered=True)


def hops_case() -> list[list[tuple[str, list[float], list[float], list[float]]]]:
    """Element i of rank r is i + r: sums over four ranks are 4 i + 6."""
    group, rank = dist.get_world_group(), dist.get_rank()
    hops = [AllToAllReduce(group), NativeReduce(group), AllReduceReduce(group), make_reduce(group, "hop")]
    hops.append(ordered_hop())
    assert type(hops[3]) is type(hops[4]) is AllToAllReduce
    assert type(make_reduce(group, "hop", reduce_scatter=False)) is AllReduceReduce

    def sums(hop: Any, splits: list[int], numel: int) -> Any:
        data, scattered = (torch.arange(size, dtype=torch.float32) + rank for size in (numel, sum(splits)))
        gathered = hop.gather_sums(torch.full((splits[0],), float(rank)))
        moves = (hop.reduce_scatter(scattered, splits), hop.all_reduce(data), gathered)
        return type(hop).__name__, *map(result, moves)

    return [[sums(hop, *sizes) for hop in hops] for sizes in SIZES]


@pytest.mark.parametrize("as_on_nccl", [False, True])
def test_16_bit_gradients_are_summed_in_fp32_in_rank_order(ranks: Any, as_on_nccl: bool) -> None:
    answers = ranks(4).run(precision_case, as_on_nccl)
    assert all(answer == answers[0] for answer in answers)
    assert answers[0] == [258.0] * 64


def precision_case(as_on_nccl: bool) -> list[float]:
    """256 + 1 + 1 + 0 is 258 in bf16, but 256 when each partial sum is rounded to bf16."""
    value = torch.full((64,), (256.0, 1.0, 1.0, 0.0)[dist.get_rank()], dtype=torch.bfloat16)
    hop = ordered_hop() if as_on_nccl else AllToAllReduce(dist.get_world_group())
    return result(hop.all_reduce(value))
