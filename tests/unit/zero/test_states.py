# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Where model states are held, and that DeepSpeed's own tools still find them."""

from pathlib import Path
from typing import Any

import pytest
from training import PARTITIONED, REPLICATED

from deepspeed_ext.placement import STRATEGIES

SEVERAL_BUCKETS = {"reduce_bucket_size": 300, "allgather_bucket_size": 300, "sub_group_size": 100}
BOTH = pytest.mark.parametrize("names", [REPLICATED, PARTITIONED], ids=["p=N", "p-cut"])


@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_is_in_flight_when_a_backward_has_returned(ranks: Any, overlap: bool) -> None:
    assert ranks(4).run(in_flight_case, overlap) == [[0] * 3 * len(REPLICATED)] * 4


def in_flight_case(overlap: bool) -> list[int]:
    """Open transfers after each of three micro-steps, of which the last is the boundary."""
    import training

    zero = {"overlap_comm": overlap, "reduce_bucket_size": 300}
    job = training.Job(accumulation=3)
    counts = []
    for name in REPLICATED:
        engine, _ = training.make_engine(job, {"paro_strategy": name, "paro_group_size": 2, **zero})
        data = training.batches(job)
        for number in range(3):
            training.micro_step(engine, job, number, *next(data))
            counts.append(len(engine.optimizer._in_flight._open))
            engine.step()
        engine.destroy()
    return counts


@BOTH
def test_stock_accessors_see_whole_states(ranks: Any, names: tuple[str, ...]) -> None:
    for rows in ranks(4).run(accessors_case, names):
        for name, weights, gradients, momenta in rows:
            assert max(weights, gradients, momenta) <= 1e-6, (name, weights, gradients, momenta)


def accessors_case(names: tuple[str, ...]) -> list[tuple[str, float, float, float]]:
    """Largest differences to stock of what safe_get_full_* returns after the backward of a second step."""
    import torch
    import training
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state

    job = training.Job(accumulation=2, zero=SEVERAL_BUCKETS)

    def look(zero: dict[str, Any]) -> list[list[torch.Tensor]]:
        engine, model = training.make_engine(job, zero)
        data = training.batches(job)
        for number in range(4):
            training.micro_step(engine, job, number, *next(data))
            if number < 3:
                engine.step()
        used = [p for layer in model.layers for p in layer.parameters()]
        seen = [
            [safe_get_full_fp32_param(p) for p in used],
            [safe_get_full_grad(p) for p in used],
            [safe_get_full_optimizer_state(p, "momentum_buffer") for p in used],
        ]
        engine.destroy()
        return seen

    stock = look({"stage": 2})
    rows = []
    for name in names:
        ours = look({"paro_strategy": name, "paro_group_size": 2})
        a, b, c = (
            max((x - y).abs().max().item() for x, y in zip(mine, theirs, strict=True))
            for mine, theirs in zip(ours, stock, strict=True)
        )
        rows.append((name, a, b, c))
    return rows


@BOTH
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_checkpoint_resumes_and_converts(ranks: Any, tmp_path: Path, dtype: str, names: tuple[str, ...]) -> None:
    for rows in ranks(4).run(checkpoint_case, str(tmp_path), dtype, names):
        for name, resumed, exported in rows:
            assert resumed == 0.0 and exported == 0.0, (name, resumed, exported)


def checkpoint_case(folder: str, dtype: str, names: tuple[str, ...]) -> list[tuple[str, float, float]]:
    """Differences of a resumed run to an uninterrupted one, and of zero_to_fp32's weights to the optimizer's."""
    import training
    from deepspeed import comm as dist
    from deepspeed.utils import safe_get_full_fp32_param
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    job = training.Job(dtype=dtype, groups=2, frozen=(1,), empty=False, zero=SEVERAL_BUCKETS)
    rows = []
    for name in names:
        zero = {"paro_strategy": name, "paro_group_size": 2}
        engine, model = training.make_engine(job, zero)
        data = training.batches(job)
        steps = [next(data) for _ in range(4)]

        def run(engine: Any, batches: list[Any]) -> None:
            for x, y in batches:
                training.micro_step(engine, job, 0, x, y)
                engine.step()

        run(engine, steps[:2])
        engine.save_checkpoint(f"{folder}/{name}")
        trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
        saved = {key: safe_get_full_fp32_param(p).clone() for key, p in trained.items()}
        run(engine, steps[2:])
        whole = training.whole_weights(model)
        engine.destroy()

        engine, model = training.make_engine(job, zero)
        run(engine, steps[2:])  # something to be overwritten
        engine.load_checkpoint(f"{folder}/{name}")
        run(engine, steps[2:])
        resumed = training.whole_weights(model)
        engine.destroy()
        dist.barrier()
        exported = get_fp32_state_dict_from_zero_checkpoint(f"{folder}/{name}")
        gap = max((exported[key] - saved[key]).abs().max().item() for key in saved)
        rows.append((name, (whole - resumed).abs().max().item(), gap))
    return rows


@pytest.mark.parametrize("saved, loaded", [({"stage": 2}, "NII"), ("NIG", "NNN"), ("NII", "NNI"), ("NIG", "NGG")])
def test_a_checkpoint_cut_otherwise_is_refused_and_one_cut_alike_loads(
    ranks: Any, tmp_path: Path, saved: Any, loaded: str
) -> None:
    if isinstance(saved, str) and STRATEGIES[saved].os == STRATEGIES[loaded].os:
        assert ranks(4).run(foreign_checkpoint_case, str(tmp_path), saved, loaded) == [0.0] * 4
        return
    for error in ranks(4).run_expect_error(foreign_checkpoint_case, str(tmp_path), saved, loaded):
        assert error.type == "ValueError" and "are cut over [4] ranks" in error.message, error
        assert f"paro_strategy {loaded} in groups of 2 cuts them over" in error.message


def foreign_checkpoint_case(folder: str, saved: Any, loaded: str) -> float:
    """Save with one strategy, load with another; the difference of the weights after it."""
    import torch
    import training

    job = training.Job(dtype="bf16", config={"optimizer": {"params": {"momentum": 0.0}}})
    weights = []
    for zero in (saved, loaded):
        zero = {"paro_strategy": zero, "paro_group_size": 2} if isinstance(zero, str) else zero
        engine, model = training.make_engine(job, zero)
        if weights:
            engine.load_checkpoint(folder)
        else:
            training.micro_step(engine, job, 0, *next(training.batches(job)))
            engine.step()
            engine.save_checkpoint(folder)
        weights.append(torch.cat([p.detach().float().flatten() for p in model.parameters()]))
        engine.destroy()
    return (weights[0] - weights[1]).abs().max().item()


@pytest.mark.parametrize("name", ["NIG", "NNG"])
def test_states_may_be_offloaded_between_micro_steps(ranks: Any, name: str) -> None:
    assert ranks(4).run(offload_states_case, name) == [(0.0, 0)] * 4


def offload_states_case(name: str) -> tuple[float, int]:
    """Difference that offloading and reloading all states after each backward makes, and what destroy leaves."""
    import torch
    import training

    job = training.Job(accumulation=2, steps=2, zero={"paro_strategy": name, "paro_group_size": 2})
    weights = []
    for offload in (False, True):
        engine, model = training.make_engine(job, {})
        data = training.batches(job)
        for number in range(4):
            training.micro_step(engine, job, number, *next(data))
            if offload:
                engine.offload_states(pin_memory=False)
                engine.reload_states()
            engine.step()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        training.micro_step(engine, job, 0, *next(data))
        optimizer = engine.optimizer
        engine.destroy()
    return (weights[0] - weights[1]).abs().max().item(), len(optimizer._slices)
