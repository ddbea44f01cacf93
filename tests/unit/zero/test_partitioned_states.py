# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What strategies that shard parameters hold between steps: saved, offloaded, under way, incomplete."""

from pathlib import Path
from typing import Any

import pytest

from tests.harness.parity_table import GRADIENT_PATHS, PARAMETER_PATHS, PARTITIONED
from tests.harness.training import SEVERAL_BUCKETS, placed


@pytest.mark.parametrize(
    "dtype, optimizer, names",
    [("fp32", "SGD", PARAMETER_PATHS), ("bf16", "SGD", PARTITIONED), ("bf16", "Muon", ("IIG",))],
)
def test_states_may_be_offloaded_between_micro_steps(
    ranks: Any, dtype: str, optimizer: str, names: tuple[str, ...]
) -> None:
    for rows in ranks(4).run(offload_states_case, dtype, optimizer, names):
        assert rows == [(name, 0.0, True) for name in names]


def offload_states_case(dtype: str, optimizer: str, names: tuple[str, ...]) -> list[tuple[str, float, bool]]:
    """Difference that offloading and reloading after each backward makes, and whether other memory was used."""
    from unittest import mock

    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

    from tests.harness import training

    # The others need DeepSpeed's FusedAdam, or Muon.
    states = None if optimizer == "Muon" else [State.lp_params, State.lp_grads, State.contiguous_grad_buffer]
    details = {"accumulation": 2, "steps": 2, "dtype": dtype, "frozen": (1,), "empty": False, "optimizer": optimizer}
    rows = []
    for name in names:
        job = training.Job(zero={**SEVERAL_BUCKETS, **placed(name)}, **details)
        weights, moved = [], True
        for offload in (False, True):
            engine, model = training.make_engine(job, {})
            data = training.batches(job)
            for number in range(4):
                training.micro_step(engine, job, number, *next(data))
                if offload:
                    optimizer = engine.optimizer
                    # All is host memory here; so see that nothing is left in the memory it was in.
                    before = [optimizer.lp_param_buffer.clone(), optimizer.gradients["dense"].held.clone()]
                    old = of_optimizer(optimizer) if states is None else []
                    with mock.patch.object(get_accelerator(), "pin_memory", torch.clone):
                        engine.offload_states(states, pin_memory=states is None)
                    for one in old:  # not what has been offloaded
                        one.fill_(torch.nan)
                    optimizer.lp_param_buffer, held = optimizer.lp_param_buffer.clone(), optimizer.lp_param_buffer
                    engine.reload_states()
                    held.fill_(torch.nan)
                    moved &= torch.equal(before[0], optimizer.lp_param_buffer)
                    moved &= torch.equal(before[1], optimizer.gradients["dense"].held)
                engine.step()
            weights.append(training.whole_weights(model))
            engine.destroy()
        rows.append((name, (weights[0] - weights[1]).abs().max().item(), moved))
    return rows


def of_optimizer(optimizer: Any) -> list[Any]:
    """Return the tensors in which weights and states are that the optimizer steps with, but for step counts."""
    states = [one for state in optimizer.optimizer.state.values() for one in state.values()]
    return [*(one.data for one in optimizer.fp32_partitioned_groups_flat), *(one for one in states if one.dim())]


@pytest.mark.quick
def test_updates_are_gathered_under_the_next_forward(ranks: Any) -> None:
    for started, first_layer, all_layers, after in ranks(4).run(under_way_case):
        # In buckets, and only what a layer needs is waited for: none by the step, all by the next one.
        assert started > first_layer > all_layers >= after == 0


def under_way_case() -> list[int]:
    """IIG: gathers under way after the step, when the first layer runs, when all have, and before the next step."""
    from tests.harness import training

    job = training.Job(zero={"stage3_prefetch_bucket_size": 0, **SEVERAL_BUCKETS})
    engine, model = training.make_engine(job, {"paro_strategy": "IIG", "paro_group_size": 2})
    data = training.batches(job)
    counts: list[int] = []
    slices = engine.optimizer.slices["dense"]

    def count(*_: Any) -> None:
        counts.append(len(slices._update_of))

    training.micro_step(engine, job, 0, *next(data))
    engine.step()
    count()
    hook = model.layers[0].register_forward_hook(count)
    training.micro_step(engine, job, 1, *next(data))
    hook.remove()
    count()
    engine.optimizer._pre_step()
    count()
    engine.destroy()
    return counts


@pytest.mark.quick
def test_a_model_of_one_sub_group_crosses_in_windows(ranks: Any, kernels: bool) -> None:
    for sub_groups, total, waited, different in ranks(4).run(windows_case):
        assert sub_groups == {1}  # as in checkpoints of versions that knew no windows
        assert 0 < waited[0] <= total / 16 * 1.1 + LAYER  # in one window it would be all of them
        assert total / 2 < waited[-1] <= total + 4  # with padding
        assert not different


LAYER = 16 * 17  # elements


def windows_case() -> tuple[set[int], int, list[int], list[str]]:
    """IIG with default sizes: numbers of sub-groups; elements of the model; those that must have arrived before each
    layer runs; and what ends with other bits than in one window."""
    from unittest import mock

    from deepspeed_ext import strategy
    from tests.harness import training

    small = {"stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0}
    job = training.Job(sizes=(16,) * 33, dtype="bf16", empty=False, steps=3, zero=small)
    exact = {"paro_quantized_updates": {"bits": "exact"}}
    sub_groups, waited, weights = set[int](), list[int](), dict[str, Any]()
    for name, windows, extra in (("one", 1, {}), ("many", 16, {}), ("many, exact", 16, exact)):
        with mock.patch.multiple(strategy, _LEAST_BUCKET=1, _BUCKETS=windows):  # windows of a small model, too
            engine, model = training.make_engine(job, placed("IIG", **extra))
            data = training.batches(job)
            for number in range(job.steps):
                training.micro_step(engine, job, number, *next(data))
                engine.step()
        sub_groups.add(len(engine.optimizer.fp16_groups))
        total = sum(param.ds_numel for param in model.parameters())
        if name == "many":
            note_waits(engine, model, waited)
            engine(next(data)[0])
        weights[name] = training.whole_weights(model)
        engine.destroy()
    return sub_groups, total, waited, [name for name, found in weights.items() if not found.equal(weights["one"])]


def note_waits(engine: Any, model: Any, waited: list[int]) -> None:
    """Note before each layer of the next forward how many elements have been waited for."""
    slices = engine.optimizer.slices["dense"]
    finish = slices._updates.finish
    numbers = {id(started): number for number, started in slices._update_of.items()}
    ranks = slices.topology.sizes.ranks
    arrived = [0]

    def finishing(started: Any) -> Any:
        before = slices._windows[: numbers[id(started)] + 1]
        arrived.append(max(arrived[-1], ranks * sum(window.span.numel for window in before)))
        return finish(started)

    slices._updates.finish = finishing
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: waited.append(arrived[-1]))


def test_frozen_parameters_are_loaded_whole(ranks: Any, tmp_path: Path) -> None:
    for rows in ranks(4).run(frozen_case, str(tmp_path)):
        assert rows == [(name, 0.0, True) for name in PARAMETER_PATHS]


def frozen_case(folder: str) -> list[tuple[str, float, bool]]:
    """Frozen weights changed before a save: difference after a load into a fresh engine; whether one rank a file."""
    import deepspeed
    import torch
    from deepspeed import comm as dist

    from tests.harness import training

    job = training.Job(dtype="bf16", frozen=(1,), empty=False, zero={"stage3_param_persistence_threshold": 0})
    rows = []
    for name in PARAMETER_PATHS:
        zero = {"paro_strategy": name, "paro_group_size": 2}
        engine, model = training.make_engine(job, zero)
        frozen = list(model.layers[1].parameters())
        with deepspeed.zero.GatheredParameters(frozen, modifier_rank=0):
            for param in frozen:
                param.data.add_(5)
        writes = torch.tensor([float(engine.save_non_zero_checkpoint)])
        dist.all_reduce(writes)
        engine.save_checkpoint(f"{folder}/{name}")
        whole = training.whole_weights(model)
        engine.destroy()
        engine, model = training.make_engine(job, zero)
        engine.load_checkpoint(f"{folder}/{name}")
        difference = (training.whole_weights(model) - whole).abs().max().item()
        rows.append((name, difference, writes.item() == engine.optimizer.partition_count))
        engine.destroy()
    return rows


def test_a_boundary_declared_after_the_last_backward(ranks: Any) -> None:
    for rows in ranks(4).run(late_boundary_case):
        for name, difference in rows:
            assert difference <= 1e-6, (name, difference)


def late_boundary_case() -> list[tuple[str, float]]:
    """The boundary set by the caller before the last backward or right before the step: difference of the weights."""
    from tests.harness import training

    job = training.Job(accumulation=2)
    rows = []
    for name in GRADIENT_PATHS:
        weights = []
        for late in (False, True):
            engine, model = training.make_engine(job, {"paro_strategy": name, "paro_group_size": 2})
            data = training.batches(job)
            for number in range(6):
                engine.set_gradient_accumulation_boundary(number % 2 == 1 and not late)
                training.micro_step(engine, job, number, *next(data))
                if number % 2:
                    engine.set_gradient_accumulation_boundary(True)
                    engine.step()
            weights.append(training.whole_weights(model))
            engine.destroy()
        rows.append((name, (weights[0] - weights[1]).abs().max().item()))
    return rows


def test_gradients_are_not_shown_before_they_are_complete(ranks: Any) -> None:
    for rows in ranks(4).run(unfinished_case):
        for name, early, late in rows:
            if name in ("III", "IGG", "GGG"):  # g = os
                assert early is None, (name, early)
            else:
                assert early is not None and f"paro_strategy {name}" in early and "boundary only" in early
            assert late is None, (name, late)


def unfinished_case() -> list[tuple[str, str | None, str | None]]:
    """What safe_get_full_grad raises after the first and after the last of two micro-steps."""
    from deepspeed.utils import safe_get_full_grad

    from tests.harness import training

    job = training.Job(accumulation=2)
    rows = []
    for name in PARTITIONED:
        engine, model = training.make_engine(job, {"paro_strategy": name, "paro_group_size": 2})
        data = training.batches(job)
        errors: list[str | None] = []
        for number in range(2):
            training.micro_step(engine, job, number, *next(data))
            try:
                safe_get_full_grad(model.layers[0].weight)
                errors.append(None)
            except RuntimeError as error:
                errors.append(str(error))
            engine.step()
        rows.append((name, *errors))
        engine.destroy()
    return rows


def test_offloaded_parameters_leave_their_memory(ranks: Any) -> None:
    assert ranks(4).run(leave_case) == [[(name, True) for name in PARAMETER_PATHS]] * 4


def leave_case() -> list[tuple[str, bool]]:
    """Whether the flat parameter buffer is freed by offload_states; pinning makes a copy here."""
    from unittest import mock

    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State
    from torch.multiprocessing.reductions import StorageWeakRef

    from tests.harness import training

    rows = []
    for name in PARAMETER_PATHS:
        engine, _ = training.make_engine(training.Job(), {"paro_strategy": name, "paro_group_size": 2})
        optimizer = engine.optimizer
        buffers = [
            StorageWeakRef(t.untyped_storage()) for t in (optimizer.lp_param_buffer, optimizer.gradients["dense"].held)
        ]
        held = [buffer.expired() for buffer in buffers]
        with mock.patch.object(get_accelerator(), "pin_memory", torch.clone):
            engine.offload_states([State.lp_params, State.lp_grads])
        rows.append((name, not any(held) and all(buffer.expired() for buffer in buffers)))
        engine.reload_states()
        engine.destroy()
    return rows
