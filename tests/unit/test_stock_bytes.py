# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's own ZeRO-1 and ZeRO-2 communicate as shipped: the documents compare strategies with that."""

from collections import Counter
from typing import Any

import pytest

from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates, Placement, Volume, redistribution_volume
from tests.harness.documents import page

RANKS, GROUP = 4, 2
SIZES = GroupSizes(RANKS, GROUP)
WIDTHS = (32, 64, 64, 32)
SMALL = 100  # elements of norms, losses and barriers; every layer has more
KEY = "use_multi_rank_bucket_allreduce"
# How often each collective moves its elements between N (whole on each rank) and G (a shard on each rank), whatever
# the algorithm: a reduce to one root and, of many roots in turn, a part of a reduce-scatter, are one such move.
MOVES = {"all_reduce": 2, "reduce": 1, "reduce_scatter_tensor": 1, "all_gather_into_tensor": 1, "all_gather": 1}
COLLECTIVES = (
    *MOVES,
    "reduce_scatter",
    "all_gather_coalesced",
    "all_reduce_coalesced",
    "all_to_all_single",
    "broadcast",
)


@pytest.mark.quick
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("as_shipped", [True, False])
def test_stock_zero_reduces_gradients_by_all_reduces_as_shipped(
    ranks: Any, accumulation: int, stage: int, as_shipped: bool
) -> None:
    zero = {"stage": stage} | ({} if as_shipped else {KEY: False})
    elements, moved = ranks(RANKS).run(case, zero, accumulation)[0]
    reductions = accumulation if stage == 2 else 1
    by = "all_reduce" if as_shipped else "reduce"
    assert moved.keys() == {by, "all_gather_into_tensor"}, moved
    assert moved[by] == pytest.approx(reductions * elements, rel=0.01)
    assert moved["all_gather_into_tensor"] == pytest.approx(elements, rel=0.01)


def volume(moved: dict[str, int]) -> Volume:
    """What a rank receives by collectives that know of groups: the least that any algorithm needs."""
    moves = (
        redistribution_volume(SIZES, Placement.N, Placement.G, 4 * count) * MOVES[name]
        for name, count in moved.items()
    )
    return sum(moves, Volume())


def times_fewer(ranks: Any, zero: dict[str, Any], pairs: list[tuple[int, str]]) -> list[float]:
    """How many times fewer bytes than a stage with these keys strategies move between groups, at accumulation 4."""
    accumulation, found = 4, []
    for stage, name in pairs:
        elements, moved = ranks(RANKS).run(case, {"stage": stage, **zero}, accumulation)[0]
        states = ModelStates.of(elements, parameter_bytes=4, gradient_bytes=4)
        found.append(volume(moved).inter / STRATEGIES[name].volume(SIZES, states, accumulation).inter)
    return found


@pytest.mark.quick
def test_how_many_times_fewer_bytes_move_between_groups(ranks: Any) -> None:
    pairs = [(1, "NNG"), (2, "NIG"), (2, "NGG")]
    shipped, rooted = (times_fewer(ranks, zero, pairs) for zero in ({}, {KEY: False}))
    assert shipped == pytest.approx([1.5, 4.5, 1.8], rel=0.01)
    assert rooted == pytest.approx([1.0, 2.5, 1.0], rel=0.01)
    text = " ".join(page("deepspeed_ext/zero/README.md").text.split())
    assert (
        "NNG has {:.1f} times fewer bytes than ZeRO-1, and at accumulation 4 NIG has {:.1f} times and NGG {:.1f} "
        "times fewer than ZeRO-2. With the key set to false, NNG and NGG have no fewer than ZeRO-1 and ZeRO-2, and "
        "NIG has {:.1f} times fewer than ZeRO-2."
    ).format(*shipped, rooted[1]) in text
    assert f"{shipped[1]:.1f} times fewer than [ZeRO-2 as shipped]" in " ".join(page("README.md").text.split())


def case(zero: dict[str, Any], accumulation: int) -> tuple[int, Counter[str]]:
    """The model's parameters, and the elements that a step has given to each collective, small ones left out."""
    import contextlib
    from unittest import mock

    import torch
    from deepspeed import comm

    from tests.harness import training

    job = training.Job(sizes=WIDTHS, empty=False, accumulation=accumulation)
    moved: Counter[str] = Counter()

    def counted(name: str) -> Any:
        original = getattr(comm.comm.cdb, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
            elements = max((tensor.numel() for tensor in tensors), default=0)
            if elements > SMALL:
                moved[name] += elements * (RANKS if name == "all_gather" else 1)  # which takes a list of shards
            return original(*args, **kwargs)

        return mock.patch.object(comm.comm.cdb, name, call)

    engine, model = training.make_engine(job, zero)
    data = training.batches(job)
    with contextlib.ExitStack() as patches:
        for name in COLLECTIVES:
            patches.enter_context(counted(name))
        for number in range(accumulation):
            training.micro_step(engine, job, number, *next(data))
            engine.step()
    engine.destroy()
    return sum(p.numel() for p in model.parameters()), moved
