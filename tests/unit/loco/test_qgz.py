# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""zero_quantized_gradients of DeepSpeed's own stage 3: the mean, in any dtype and shape."""

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
        (projection,) = stock  # what is mended; a fork has the fix in its own file as well
        if forks.is_installed():
            assert projection == pytest.approx(1, rel=0.05)
        elif dtype == "float16":
            assert projection == pytest.approx(local, rel=0.05)
        elif dtype == "bfloat16":
            assert not 0.9 < projection < 1.1


class Quantizer:
    """DeepSpeed's CUDA kernels as far as its Python needs them: nothing is rounded, and dtypes are not looked at."""

    Symmetric = 0

    def swizzle_quant(self, tensor: Any, groups: int, *_: int) -> tuple[Any, Any]:
        """The bits, taken for float16 whatever they are; (nodes, ranks of a node, chunk) to ranks first."""
        import torch

        *_, nodes, local = _
        values = tensor.view(-1).view(torch.float16).float()
        swizzled = values.view(nodes, local, -1).transpose(0, 1).reshape(-1)
        return swizzled, torch.ones(groups)

    def quantized_reduction(self, pieces: Any, scales: Any, *rest: int) -> tuple[Any, Any]:
        """The sum over the ranks of a node, not divided."""
        local = rest[-1]
        return pieces.view(local, -1).sum(0), scales[: len(scales) // local]

    def dequantize(self, values: Any, *_: Any) -> Any:
        """As they are."""
        return values


def mean_case(local: int, dtype_name: str) -> tuple[list[tuple[Any, float, int]], list[float]]:
    """Projections on the mean of what the patched function gives for each shape, and of what the original gives."""
    from unittest import mock

    import torch
    from deepspeed import comm as dist
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.comm import coalesced_collectives
    from deepspeed.runtime.zero import stage3
    from deepspeed.utils import groups

    world, rank, dtype = dist.get_world_size(), dist.get_rank(), getattr(torch, dtype_name)
    accelerator = get_accelerator()

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

    with mock.patch.object(type(accelerator), "device_count", lambda self: local):
        all2all = groups._get_local_all_to_all_group()
        parts = stage3.all_to_all_quant_reduce(gradients(rank), all2all)
        found = []
        for i, (shape, part) in enumerate(zip(SHAPES, parts, strict=True)):
            everybody = [gradients(r)[i] for r in range(world)]
            found.append((shape, project(part, everybody), everybody[0].numel()))
        original = stage3.all_to_all_quant_reduce.__wrapped__
        stock = []
        with mock.patch.object(coalesced_collectives, "quantizer_module", Quantizer()):
            if dtype == torch.float32:
                stock.append(1.0)  # its kernels do not take it
            else:
                (part,) = original([gradients(rank)[0]], all2all)
                stock.append(project(part, [gradients(r)[0] for r in range(world)]))
    groups._ALL_TO_ALL_GROUP.clear()
    return found, stock


def test_stage_3_trains_with_it(ranks: Any) -> None:
    for norms, weights in ranks(4).run(training_case):
        assert norms < 0.1 and 1e-4 < weights < 0.06


def training_case() -> tuple[float, float]:
    """Differences of norms and weights to stage 3 without quantized gradients."""
    from unittest import mock

    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import groups

    from tests.harness import training

    job = training.Job(empty=False, zero=training.SMALL)
    plain = training.train(job, {"stage": 3})
    with mock.patch.object(type(get_accelerator()), "device_count", lambda self: 2):
        quantized = training.train(job, {"stage": 3, "zero_quantized_gradients": True})
    groups._ALL_TO_ALL_GROUP.clear()
    row = training.difference("qgZ", quantized, plain, "")
    return row.norms, row.weights
