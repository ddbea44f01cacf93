# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The series' fix of zero_quantized_gradients in DeepSpeed's own stage 3: the mean, in any dtype and shape."""

from typing import Any

import pytest

from deepspeed_ext.integration import fork as forks

SHAPES = ((48, 72), (7, 33), (3, 5, 11), (129,), (1, 1), (257, 3))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("world", "local"), [(4, 2), (6, 3), (6, 2)])
def test_the_mean_where_deepspeed_has_the_mean_times_the_ranks_of_a_node(
    ranks: Any, world: int, local: int, dtype: str
) -> None:
    for ours, stock in ranks(world).run(mean_case, local, dtype):
        for shape, projection, numel in ours:
            assert numel == 1 or 0.97 < projection < 1.03, (shape, projection)
        (projection,) = stock  # the fixed functions; a fork has the fix in its own file as well
        if forks.is_installed():
            assert projection == pytest.approx(1, rel=0.05)
        elif dtype == "float16":
            assert projection == pytest.approx(local, rel=0.05)
        elif dtype == "bfloat16":
            assert not 0.9 < projection < 1.1


def mean_case(local: int, dtype_name: str) -> tuple[list[tuple[Any, float, int]], list[float]]:
    """Projections on the mean of what our function gives for each shape, and of what DeepSpeed's own gives."""
    import torch
    from deepspeed import comm as dist
    from deepspeed.runtime.zero import stage3
    from deepspeed.utils import groups

    from deepspeed_ext.loco import qgz
    from tests.harness import quantizers

    world, rank, dtype = dist.get_world_size(), dist.get_rank(), getattr(torch, dtype_name)

    def gradients(r: int) -> list[Any]:
        generator = torch.Generator().manual_seed(r)
        return [torch.randn(*shape, generator=generator).to(dtype) for shape in SHAPES]

    def project(part: Any, all_ranks: list[Any]) -> float:
        mean = torch.stack([g.double().flatten() for g in all_ranks]).mean(0)
        chunk = -(-mean.numel() // world)
        mine = mean[rank * chunk : (rank + 1) * chunk]
        both = torch.stack([part.double() @ mine, mine @ mine])
        dist.all_reduce(both)
        return (both[0] / both[1]).item()

    stock = []
    with quantizers.on_nodes(local):
        all2all = groups._get_local_all_to_all_group()
        parts = qgz.all_to_all_quant_reduce(gradients(rank), all2all)
        found = []
        for i, (shape, part) in enumerate(zip(SHAPES, parts, strict=True)):
            everybody = [gradients(r)[i] for r in range(world)]
            found.append((shape, project(part, everybody), everybody[0].numel()))
        if dtype == torch.float32:
            stock.append(1.0)  # its kernels do not take it
        else:
            reduce: Any = stage3.all_to_all_quant_reduce
            own = reduce.__wrapped__ if forks.is_installed() else reduce  # below our seam
            (part,) = own([gradients(rank)[0]], all2all)
            stock.append(project(part, [gradients(r)[0] for r in range(world)]))
    return found, stock


def test_stage_3_trains_with_it(ranks: Any) -> None:
    for norms, weights in ranks(4).run(training_case):
        assert norms < 0.1 and 1e-4 < weights < 0.06


def training_case() -> tuple[float, float]:
    """Differences of norms and weights to stage 3 without quantized gradients."""
    from unittest import mock

    from deepspeed.runtime.zero import stage3

    from deepspeed_ext.loco import qgz
    from tests.harness import quantizers, training

    job = training.Job(empty=False, zero=training.SMALL)
    plain = training.train(job, {"stage": 3})
    with (
        quantizers.on_nodes(2),
        mock.patch.object(stage3, "all_to_all_quant_reduce", qgz.all_to_all_quant_reduce),
    ):
        quantized = training.train(job, {"stage": 3, "zero_quantized_gradients": True})
    row = training.difference("qgZ", quantized, plain, "")
    return row.norms, row.weights
