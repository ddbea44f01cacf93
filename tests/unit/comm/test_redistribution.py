# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Results of redistributions, and the memory that they copy and free."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed_ext.comm import backends, collectives, redistribution
from deepspeed_ext.comm.hops import GatherHop
from deepspeed_ext.comm.layout import FlatLayout, plan_bucket
from deepspeed_ext.comm.packing import concat_padded as join
from deepspeed_ext.comm.process_groups import get_topology
from deepspeed_ext.comm.redistribution import GradientRedistribution, ParameterRedistribution
from deepspeed_ext.comm.relayout import Relayout
from deepspeed_ext.comm.spans import Span
from deepspeed_ext.strategy import Placement
from tests.harness.transfers import Handle, result

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("kind", [backends.NativeReduce, backends.AllReduceReduce])
@pytest.mark.parametrize("spread", [False, True], ids=["rooted", "even"])
@pytest.mark.parametrize("together", [False, True], ids=["gradients", "buffer"])
def test_bucket_is_copied_once_and_freed_before_second_hop(kind: Any, spread: bool, together: bool) -> None:
    layout = FlatLayout(1200, 3, 4)
    spans = (Span(5, 700), Span(900, 250)) if spread else (Span(103, 90), Span(410, 85))
    gradients = [torch.rand(span.numel) for span in spans]
    expected = torch.zeros(3, 4, 100)  # of this rank alone, as nothing is sent
    for span, gradient in zip(spans, gradients, strict=True):
        span.of(expected.view(-1)).copy_(gradient)
    alive: list[bool] = []
    copies: list[int] = []

    def start(group: Any, operation: str, collective: Any, *tensors: Any) -> Any:
        alive.append(not message.expired())
        if collective is collectives.dist.reduce_scatter_tensor:
            tensors[0].copy_(tensors[1].view(group.size, -1)[group.rank])
        return Handle([], operation)

    def concat_padded(pieces: Any, lengths: Any) -> torch.Tensor:
        copies.append(len(alive))
        return join(pieces, lengths)

    sizes = {"intra": 4, "inter": 3}
    group_of = {"get_world_size": lambda group: sizes[group], "get_rank": lambda group: 1}
    with (
        mock.patch.object(collectives, "backend_of", lambda group: "nccl"),
        mock.patch.object(collectives, "_can_coalesce", lambda group, device: False),
        mock.patch.object(backends, "concat_padded", concat_padded),
        mock.patch.object(collectives.Collectives, "start", start),
        mock.patch.multiple(collectives.dist, **group_of),
        mock.patch.object(collectives, "get_process_group_ranks", lambda group: range(sizes[group])),
        mock.patch.object(backends, "_ELEMENTS_PER_STEP", 0),
    ):
        reduction = GradientRedistribution(kind("intra"), kind("inter"))
        plan = plan_bucket((layout,), tuple((0, span) for span in spans))
        packed = reduction.pack_bucket([torch.cat(gradients)] if together else gradients, plan, Placement.G)
        message, move = (StorageWeakRef(packed.untyped_storage()), reduction.reduce_bucket(packed, plan, Placement.G))
        del packed
        packed_values = result(move)
    contents = reduction.bucket_contents(plan, Placement.G)
    values = [value for row in contents for _, span in row.spans for value in span.of(expected[1, 1]).tolist()]
    assert values == packed_values[: len(values)]
    first = next((number for number, name in enumerate(alive) if not name), len(alive))
    assert alive[0] and not alive[-1] and not any(alive[first:])
    assert 0 not in copies  # none before the first hop


@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("target", [Placement.I, Placement.G])
def test_packing_by_pieces_equals_packing_by_rows(target: Placement, multiple: int) -> None:
    layouts = (FlatLayout(10_007, 7, 4, (0, 4_000)), FlatLayout(997, 7, 4))
    spans = ((0, Span(3_500, 6_507)), (1, Span(5, 900)), (0, Span(3, 3_497)))
    tensors = [torch.randn(span.numel + 1)[1:] for _, span in spans]
    plan = plan_bucket(layouts, spans)
    packed = []
    for more in (0, 10**9):
        hops = [backends.NativeReduce.__new__(backends.NativeReduce) for _ in range(2)]
        for hop, size in zip(hops, (4, 7), strict=True):
            hop.collectives, hop.multiple = SimpleNamespace(size=size, rank=1), multiple
        with mock.patch.object(redistribution, "_PIECES_PER_COPY", more):
            reduction = GradientRedistribution(*hops)
            packed += [reduction.pack_bucket(inputs, plan, target) for inputs in (tensors, [torch.cat(tensors)])]
    assert all(torch.equal(packed[0], bucket) for bucket in packed[1:])
    assert packed[0].sum().item() == pytest.approx(torch.cat(tensors).sum().item(), abs=1e-3)


def test_a_rank_with_padding_only_sends_nothing(ranks: Any) -> None:
    assert ranks(2).run(padding_case) == [[1.0], [0.0]]


def padding_case() -> list[float]:
    layout = FlatLayout(1, 1, 2)
    return Relayout(layout, layout, get_topology(None, 2).world).exchange(torch.ones(1)).tolist()


def test_gathers_use_hops_of_their_placements(ranks: Any) -> None:
    for rank, answers in enumerate(ranks(6).run(gathers_case)):
        number = rank % 3  # in the group; ranks 0..2 are one group, 3..5 the other; rank r holds [r, r + 0.5]
        column = [float(number), number + 0.5, number + 3.0, number + 3.5]
        assert answers == {
            "GI": column,
            "GN": [v for i in range(3) for v in (i, i + 0.5, i + 3.0, i + 3.5)],
            "IN": [v for i in range(3) for v in (rank - number + i, rank - number + i + 0.5)],
            **{same: [float(rank), rank + 0.5] for same in ("GG", "II", "NN")},
        }


def gathers_case() -> dict[str, list[float]]:
    topology = get_topology(None, 3)
    gathers = ParameterRedistribution(GatherHop(topology.intra, "intra"), GatherHop(topology.inter, "inter"))
    shard = torch.tensor([float(dist.get_rank()), dist.get_rank() + 0.5])
    pairs = [(source, target) for source in Placement for target in Placement if source >= target]
    for pair in pairs:
        assert gathers.count_hops(*pair) == communications(gathers.gather(shard, *pair)), pair
    return {source.name + target.name: result(gathers.gather(shard, source, target)) for source, target in pairs}


def communications(move: Any) -> int:
    """Run a transfer, and return the number of communications that it started."""
    count = 0
    for handle in move:
        handle.wait()
        count += 1
    return count
