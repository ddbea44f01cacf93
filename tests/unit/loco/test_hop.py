# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The LoCo hop between groups: the mean for every shape and number of ranks, and error feedback."""

from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext.comm.transfer_queue import ActiveTransfer
from deepspeed_ext.config.settings import LocoSettings
from deepspeed_ext.loco.hop import LocoHop
from tests.harness import snapshots, training
from tests.harness.tiers import deep

LOCO = {"zeropp_loco_param": {}}
SKIPS = ("NNN", "NIG", "NGG", "IIG", "GGG")
RESETS = ("NNN", "NNG", "NIG", "NGG", "ING", "IIG", "GGG")


@pytest.mark.parametrize("world, bits", [(3, 4), (2, 8), *deep((2, 4), (5, 4), (6, 4), (3, 8), (5, 8), (6, 8))])
def test_06_hop_computes_mean_for_all_shapes_and_ranks(ranks: Any, world: int, bits: int) -> None:
    for case, projection, excess in ranks(world).rows(mean_case, bits):
        assert 0.97 < projection < 1.03, (case, projection)
        assert excess <= 1, (case, excess)


def mean_case(bits: int) -> list[tuple[str, float, float]]:
    """Return shape and dtype, the projection on the fp64 mean, and the largest error relative to its bound."""
    world, rank = dist.get_world_size(), dist.get_rank()
    hop = LocoHop(dist.get_world_group(), "hop", LocoSettings(bits=bits))
    rows = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for kind, numels in (
            ("equal", [700] * world),
            ("unequal", [531 * i for i in range(world)]),
            ("one", [1] * world),
        ):
            for same_data in (False, True):
                data = [
                    torch.randn(sum(numels), generator=torch.Generator().manual_seed(0 if same_data else r)).to(dtype)
                    for r in range(world)
                ]
                part = slice(sum(numels[:rank]), sum(numels[: rank + 1]))
                mean = torch.stack([d.double() for d in data]).mean(0)[part]
                own_part = ActiveTransfer(hop.reduce_scatter(data[rank] / world, numels)).finish().double()
                all_parts = ActiveTransfer(hop.all_reduce(data[rank] / world)).finish().double()
                if own_part.numel():
                    steps = max(d.abs().max().item() for d in data) / (2 ** (bits - 1) - 1) * (1 + 2.0**-7)
                    bound = steps / 2 + 2 * torch.finfo(dtype).eps * mean.abs().max().item() + 1e-6
                    projection = 1.0 if kind == "one" else ((own_part @ mean) / (mean @ mean)).item()
                    rows.append((f"{kind} {dtype}", projection, ((own_part - mean).abs().max() / bound).item()))
                mean = torch.stack([d.double() for d in data]).mean(0)
                projection = 1.0 if kind == "one" else ((all_parts @ mean) / (mean @ mean)).item()
                rows.append((f"all-reduce {kind} {dtype}", projection, 0.0))
    return rows


@pytest.mark.quick
@pytest.mark.parametrize(
    "dtype, names",
    [("fp16", ("NIG", "IIG")), ("fp32", ("NGG", "GGG")), *deep(*((dtype, SKIPS) for dtype in ("fp16", "fp32")))],
)
def test_09_skipped_step_keeps_errors(ranks: Any, names: tuple[str, ...], dtype: str) -> None:
    for name, (applied, restored, count, moved, scales) in ranks(4).each(skip_case, names, dtype):
        assert applied == [True, False, True], name
        assert restored and moved, name
        assert count == 2, name
        assert scales[0] == 2 * scales[-1] if dtype == "fp16" else scales[0] == scales[-1], name


def skip_case(name: str, dtype: str) -> tuple[list[bool], bool, int, bool, list[float]]:
    """Take three steps, of which the second overflows on one rank."""
    # Norms that are not finite skip a step of stage 3 in any dtype; of stages 1 and 2 in fp32, too.
    job = training.Job(steps=3, accumulation=2, dtype=dtype, overflow=[(2, 1)], empty=False, zero=training.SMALL)
    engine, _ = training.make_engine(job, training.placed(name, **LOCO))
    data, kept, applied, scales = training.batches(job), [], [], []
    for number in range(6):
        training.step(engine, job, number, data)
        if number % 2:
            applied.append(engine.was_step_applied())
            scales.append(float(engine.optimizer.loss_scale))
            memory = engine.optimizer.error_state
            assert all(error.updated is None for error in memory._errors.values())
            kept.append([e.committed.clone() for e in memory._errors.values() if e.committed is not None])
    restored = all(torch.equal(a, b) for a, b in zip(kept[0], kept[1], strict=True))
    moved = any(not torch.equal(a, b) for a, b in zip(kept[1], kept[2], strict=True))
    return applied, restored, memory.steps, moved, scales


def test_09_dropped_gradients_keep_errors(ranks: Any) -> None:
    assert all(kept for _, kept in ranks(4).each(dropped_case, ("IIG", "ING")))


def dropped_case(name: str) -> bool:
    """Return whether zero_grad before a step restores the errors. With p = N it drops no reduced gradients."""
    job = training.Job(empty=False)
    engine, _ = training.make_engine(job, training.placed(name, **LOCO))
    data, memory = training.batches(job), engine.optimizer.error_state
    training.step(engine, job, 0, data)
    before = [error.committed.clone() for error in memory._errors.values()]
    training.micro_step(engine, job, 1, *next(data))
    updated = any(error.updated is not None for error in memory._errors.values())
    engine.optimizer.zero_grad()
    after = [error.committed for error in memory._errors.values()]
    return updated and memory.steps == 1 and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.quick
@pytest.mark.parametrize("accumulation, names", [(1, ("NNN",)), (2, ("NGG", "IIG")), *deep((1, RESETS), (3, RESETS))])
def test_14_resets_count_steps_and_cover_all_parameters(ranks: Any, accumulation: int, names: tuple[str, ...]) -> None:
    for name, (has_errors, messages) in ranks(4).each(reset_case, names, accumulation):
        assert has_errors == [True, True, False, True, True, False, True], name
        # Once a step where the strategy crosses between groups once; in each micro-batch with g = G.
        assert messages == (accumulation if name[1] == "G" else 1), name


def reset_case(name: str, accumulation: int) -> tuple[list[bool], float]:
    """Return after which of seven steps, with resets after three, there are errors; and updates of each a step."""
    job = training.Job(accumulation=accumulation, groups=2, empty=False, zero=training.SMALL)
    engine, _ = training.make_engine(job, training.placed(name, zeropp_loco_param={"reset_T": 3}))
    memory, data, has_errors, updates = engine.optimizer.error_state, training.batches(job), [], []
    memory.store = lambda contents, updated, updates=updates: updates.append(contents)
    for number in range(7 * accumulation):
        training.step(engine, job, number, data)
        if (number + 1) % accumulation == 0:
            (state,) = {error.committed is not None for error in memory._errors.values()}  # all alike
            has_errors.append(state)
    return has_errors, len(updates) / 7 / len(memory._errors)


def test_all_ranks_refuse_cpu_only_kernels(ranks: Any) -> None:
    for rank, (error, lacking) in enumerate(ranks(2).run(lacking_case)):
        assert not error
        where = "CPU only on another rank, but" if rank == 0 else "CPU only, but"
        assert f"The kernels of LoCo were built for the {where} the model is on cuda." in lacking
        assert "DS_BUILD_LOCO=1" in lacking and "zero_optimization.zeropp_loco_param" in lacking


def lacking_case() -> tuple[str, str]:
    """Return the errors if every rank has CUDA kernels, and if the second one has none."""
    from deepspeed_ext.loco import hop, ops

    device = mock.Mock(device_name=lambda: "cuda", current_device_name=lambda: "cpu")
    errors = []
    for lacking in (False, dist.get_rank() == 1):
        kernels = ("CPU",) if lacking else ("CPU", "CUDA")
        with (
            mock.patch.object(hop, "get_accelerator", lambda: device),
            mock.patch.object(ops, "has_kernels", kernels.__contains__),
        ):
            errors.append(snapshots.error_of(hop.LocoHop, None, "hop", LocoSettings()))
    return errors[0], errors[1]
