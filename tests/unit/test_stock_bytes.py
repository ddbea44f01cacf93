# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's own ZeRO-1 and ZeRO-2 communicate as shipped: the documents compare strategies with that."""

from collections import Counter
from typing import Any

import pytest

from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates, Placement, redistribution_volume
from tests.harness.documents import page

SIZES = GroupSizes(4, 2)  # of the formulas; the elements that collectives are given depend on no number of ranks
ACCUMULATION = 4
WIDTHS = (32, 64, 64, 32)
SMALL = 100  # elements of norms, losses and barriers; every layer has more
KEY = "use_multi_rank_bucket_allreduce"
# How often each collective moves its elements between N (whole on each rank) and G (a shard on each rank), whatever
# the algorithm: a reduce to one root and, of many roots in turn, a part of a reduce-scatter, are one such move.
MOVES = {"all_reduce": 2, "reduce": 1, "reduce_scatter_tensor": 1, "all_gather_into_tensor": 1, "all_gather": 1}
Found = dict[tuple[int, bool], tuple[int, Counter[str]]]  # by stage, and whether it is as shipped
COLLECTIVES = (*MOVES, "reduce_scatter", "all_gather_coalesced", "all_reduce_coalesced")
COLLECTIVES += ("all_to_all_single", "broadcast")


@pytest.fixture(scope="module")
def moved(ranks: Any) -> Found:
    """What steps of each stage move, as shipped and with the key set to false."""
    kinds = [(stage, shipped) for stage in (1, 2) for shipped in (True, False)]
    zeros = [{"stage": stage} | ({} if shipped else {KEY: False}) for stage, shipped in kinds]
    return {kind: found for kind, (_, found) in zip(kinds, ranks(2).each(case, zeros), strict=False)}


@pytest.mark.quick
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("shipped", [True, False])
def test_stock_zero_reduces_by_all_reduces_as_shipped(moved: Found, stage: int, shipped: bool) -> None:
    elements, found = moved[stage, shipped]
    reductions = ACCUMULATION if stage == 2 else 1
    by = "all_reduce" if shipped else "reduce"
    assert found.keys() == {by, "all_gather_into_tensor"}, found
    assert found[by] == pytest.approx(reductions * elements, rel=0.01)
    assert found["all_gather_into_tensor"] == pytest.approx(elements, rel=0.01)


def times_fewer(moved: Found, shipped: bool, stage: int, name: str) -> float:
    """How many times fewer bytes than a stage a strategy moves between groups: the least that any algorithm needs."""
    elements, found = moved[stage, shipped]
    states = ModelStates.of(elements, parameter_bytes=4, gradient_bytes=4)
    stock = sum(
        redistribution_volume(SIZES, Placement.N, Placement.G, 4 * count).inter * MOVES[collective]
        for collective, count in found.items()
    )
    return stock / STRATEGIES[name].volume(SIZES, states, ACCUMULATION).inter


@pytest.mark.quick
def test_how_many_times_fewer_bytes_move_between_groups(moved: Found) -> None:
    pairs = [(1, "NNG"), (2, "NIG"), (2, "NGG")]
    shipped, rooted = ([times_fewer(moved, one, *pair) for pair in pairs] for one in (True, False))
    assert shipped == pytest.approx([1.5, 4.5, 1.8], rel=0.01)
    assert rooted == pytest.approx([1.0, 2.5, 1.0], rel=0.01)
    text = " ".join(page("deepspeed_ext/zero/README.md").text.split())
    assert (
        "N-N-G receives {:.1f} times fewer bytes than ZeRO-1; at accumulation 4, N-I-G receives {:.1f} times and "
        "N-G-G {:.1f} times fewer than ZeRO-2. With the key set to false, N-N-G and N-G-G receive as many bytes as "
        "ZeRO-1 and ZeRO-2, and N-I-G receives {:.1f} times fewer than ZeRO-2."
    ).format(*shipped, rooted[1]) in text


def case(zero: dict[str, Any]) -> tuple[int, Counter[str]]:
    """The model's parameters, and the elements that a step has given to each collective, small ones left out."""
    import contextlib
    import functools

    import torch
    from deepspeed import comm

    from tests.harness import calls, training

    job = training.Job(sizes=WIDTHS, empty=False, accumulation=ACCUMULATION)
    moved: Counter[str] = Counter()

    def count(name: str, *args: Any, **kwargs: Any) -> None:
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        elements = max((tensor.numel() for tensor in tensors), default=0)
        if elements > SMALL:
            whole = torch.distributed.get_world_size() if name == "all_gather" else 1  # it takes a list of shards
            moved[name] += elements * whole

    engine, model, data = training.begin(job, zero)
    with contextlib.ExitStack() as patches:
        for name in COLLECTIVES:
            patches.enter_context(calls.before(comm.comm.cdb, name, functools.partial(count, name)))
        for number in range(ACCUMULATION):
            training.step(engine, job, number, data)
    engine.destroy()
    return sum(p.numel() for p in model.parameters()), moved
