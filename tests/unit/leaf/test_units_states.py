# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Parameters in units are read, changed, saved, and released like others, and like stock's leaf modules."""

import copy
import re
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from deepspeed_ext.leaf.modules import Settings, choose, numel_of
from deepspeed_ext.leaf.setup import LiveLimits, predicted_live
from tests.harness import mixtures, snapshots, training
from tests.harness.mixtures import AUTO, CHUNKS, SMALL, WINDOWS, job_of
from tests.harness.tiers import deep, with_cases

TIGHT = {**SMALL, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
WHOLE = {**AUTO, **training.placed("GGG", paro_modules={"layers.0.mixture.*": "N", "layers.1.*": "N"})}


@pytest.mark.parametrize("keys", [AUTO, CHUNKS, {"stage3_leaf_bytes": 25_000}], ids=["layers", "chunks", "blocks"])
def test_peak_of_gathered_elements(ranks: Any, keys: dict[str, Any]) -> None:
    router = 44 if keys == CHUNKS else 0  # is used while a chunk is
    for budget, most, largest, predicted in ranks(2).run(live_case, keys):
        assert (most - router) * 12 <= budget, (most, budget)
        assert most == largest + router and most <= predicted, (most, largest, predicted)


def live_case(keys: dict[str, Any]) -> tuple[int, int, int, int]:
    """Return the budget, the elements gathered at a time, the largest unit, and the report's prediction."""
    job = job_of(mixtures.Mixtures, zero=TIGHT)
    most: list[int] = []

    def look(engine: Any) -> None:
        most.append(engine.optimizer.gathers["dense"].live.peak)

    training.train(job, {"stage": 3, **keys}, look)
    budget = 10**9 if keys == AUTO else keys["stage3_leaf_bytes"]
    model = mixtures.Mixtures((13, 7))
    choices = choose(model, Settings(budget, 0, 10**9))
    sizes = [choice.numel for choice in choices if choice.kind.value == "coarse"]
    sizes += [sum(numel_of(p) for e in chunk for p in e.parameters()) for choice in choices for chunk in choice.chunks]
    return (budget, most[0], max(sizes), predicted_live(choices, model, LiveLimits(10**9, 0, 0, 0)))


def test_persistent_parameters_stay_during_first_step(ranks: Any) -> None:
    ours = {"paro_strategy": "GGG"}
    units = {**ours, "stage3_module_granularity_threshold": 60}
    for keys, available in ranks(2).each(persistent_case, (ours, units, {"stage": 3})):
        assert not available[0] if "stage" in keys else available == [True] * 3, (keys, available)


def persistent_case(keys: dict[str, Any]) -> list[bool]:
    """Return whether small parameters are available after each of three forwards."""
    job = job_of(mixtures.Mixtures, zero={"stage3_param_persistence_threshold": 100})
    engine, model = training.make_engine(job, keys)
    available = []
    for x, _ in (next(training.batches(job)) for _ in range(3)):
        engine(x)
        small = [p for p in model.parameters() if p.ds_persist]
        available.append(all(p.ds_status == ZeroParamStatus.AVAILABLE for p in small) and len(small) > 20)
    return available


@with_cases(
    "world, network, strategy, keys",
    (2, "Mixtures", "IIG", CHUNKS),
    *deep((4, "Packed", "IIG", WINDOWS), (4, "Packed", "GGG", WINDOWS)),
    *deep((4, "Mixtures", "IIG", CHUNKS), (4, "Mixtures", "GGG", AUTO)),
)
def test_checkpoints_do_not_depend_on_units_or_windows(
    ranks: Any, tmp_path: Path, world: int, network: str, strategy: str, keys: dict[str, Any]
) -> None:
    for losses, differences, off in ranks(world).run(checkpoint_case, str(tmp_path), network, keys, strategy):
        assert losses == losses[:1] * 4 and differences == [{}] * 3, (losses, differences)
        assert off in (None, 0.0)


def checkpoint_case(
    folder: str, network: str, keys: dict[str, Any], strategy: str
) -> tuple[list[list[float]], list[dict[str, float]], float | None]:
    """Return the losses of a run, after a load from units or windows, after a resume with these, and after a load into
    them; the differences after these three; and the distance of zero_to_fp32's weights."""
    job = job_of(getattr(mixtures, network))
    leaf_section = {"leaf_module": {"classes": ["PackedMixture"]}} if network == "Packed" else {}
    plain, ours = training.placed(strategy, **leaf_section), training.placed(strategy, **keys)
    snaps: list[dict[str, Any]] = []
    losses = []
    for number, (zero, loads) in enumerate(((ours, (None,)), (plain, (0,)), (ours, (0, 1)))):
        engine, model = training.make_trained(job, zero, 1 if number else 2, number)
        for source in loads:
            if source is not None:
                engine.load_checkpoint(f"{folder}/{source}")
            if number < 2:
                engine.save_checkpoint(f"{folder}/{number}")
            snaps.append(snapshots.snapshot(engine, model, job))
            losses.append(snapshots.run(engine, job, snapshots.steps_of(job, 1, 2)))
        engine.destroy()
    dist.barrier()
    off = None
    if dist.get_rank() == 0:
        weights = get_fp32_state_dict_from_zero_checkpoint(f"{folder}/0")
        saved = {name: snaps[0][f"{name} fp32"] for name in weights if f"{name} fp32" in snaps[0]}
        off = max((weights[name] - value).abs().max().item() for name, value in saved.items())
        assert len(weights) == len(dict(getattr(mixtures, network)((13, 7)).named_parameters()))
    return losses, [snapshots.difference(snaps[0], other) for other in snaps[1:]], off


@pytest.mark.parametrize("keys", [CHUNKS, *deep(AUTO)], ids=["chunks", "layers"])
def test_unit_parameters_are_read_and_changed_alone(ranks: Any, keys: dict[str, Any]) -> None:
    for same_inside, forwards in ranks(2).run(gathered_case, keys):
        assert same_inside and forwards == [True] * 3, (same_inside, forwards)


def gathered_case(keys: dict[str, Any]) -> tuple[bool, list[bool]]:
    """Return whether a change of one of a unit's parameters inside GatheredParameters is visible in a forward there,
    and in later forwards, which gather the complete unit again; and the same with small persistent parameters."""
    forwards = []
    for persistence in (0, 100, 10**6):
        job = job_of(mixtures.Mixtures, zero={**SMALL, "stage3_param_persistence_threshold": persistence})
        engine, model = training.make_engine(job, training.placed("IIG", **keys))
        x, y = next(training.batches(job))
        for _ in range(2):
            training.micro_step(engine, job, 0, x, y)
            engine.step()
        expected = mixtures.Mixtures(job.sizes)
        expert = model.layers[1].mixture.experts[2]
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            expected.load_state_dict(model.state_dict())
        with deepspeed.zero.GatheredParameters([expert.up.weight, expert.up.bias], modifier_rank=0), torch.no_grad():
            expert.up.weight.mul_(2.0)
        with torch.no_grad():
            expected.layers[1].mixture.experts[2].up.weight.mul_(2.0)
            forwards.append(torch.equal(engine(x), expected(x)))
    with deepspeed.zero.GatheredParameters(list(expert.parameters())), torch.no_grad():
        same_inside = torch.equal(expert.up.weight, expected.layers[1].mixture.experts[2].up.weight)
    return same_inside, forwards


@pytest.mark.parametrize("keys", [CHUNKS, *deep(AUTO)], ids=["chunks", "layers"])
def test_units_without_optimizer_or_gradients(ranks: Any, keys: dict[str, Any]) -> None:
    assert ranks(2).run(inference_case, keys) == [[True] * 4] * 2


def inference_case(keys: dict[str, Any]) -> list[bool]:
    """Return whether an engine without an optimizer gives the model's output in several forwards, and a training
    engine in eval mode between two steps."""
    job = job_of(mixtures.Mixtures)
    torch.manual_seed(3)
    model = mixtures.Mixtures(job.sizes)
    expected, x = copy.deepcopy(model), next(training.batches(job))[0]
    config = training.configuration(job, {"stage": 3, **keys})
    del config["optimizer"]
    engine, *_ = deepspeed.initialize(model=model, config=config)
    with torch.no_grad():
        equal = [torch.equal(engine(x), expected(x)) for _ in range(3)]
    engine.destroy()
    engine, model = training.make_engine(job, {"stage": 3, **keys})
    for _ in range(2):
        training.step(engine, job)
        engine.eval()
        with torch.no_grad():
            out = engine(x)
        engine.train()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        expected.load_state_dict(model.state_dict())
    with torch.no_grad():
        equal.append(torch.equal(engine(x), expected(x)) and bool(torch.isfinite(out).all()))
    return equal


def test_experts_out_of_order_raise_instead_of_hanging(ranks: Any) -> None:
    for error in ranks(2).run_expect_error(backwards_case):
        assert error.type == "RuntimeError" and "does not run its experts in their order" in error.message
        (numbers,) = re.findall(r"window (\d+) of (\d+) after window (\d+)\.", error.message)
        entered, chunks, last = map(int, numbers)
        assert (entered, last) == (chunks - 2, chunks - 1), error.message
        assert "raise zero_optimization.stage3_leaf_bytes" in error.message


def backwards_case() -> None:
    """Enter experts that are fetched in windows from last to first."""
    training.train(job_of(mixtures.Backwards), {"stage": 3, **CHUNKS})


def test_second_engine_makes_its_own_choice(ranks: Any) -> None:
    for hooks in ranks(2).run(second_engine_case):
        assert hooks[1:] == [252, 28, 252] and hooks[0] < 252, hooks


def second_engine_case() -> list[int]:
    """Return the hooks of four engines for one model: with windows of experts, no key, layers, and no key again."""
    job = job_of(mixtures.Mixtures)
    model = mixtures.Mixtures(job.sizes)
    hooks = []
    for keys in (CHUNKS, {}, AUTO, {}):
        config = training.configuration(job, {"stage": 3, **keys})
        engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
        training.step(engine, job)
        offload = engine.optimizer.parameter_offload
        hooks.append(len(offload.forward_hooks) + len(offload.backward_hooks))
        engine.destroy()
    return hooks


@pytest.mark.parametrize("keys", [CHUNKS, *deep(AUTO)], ids=["chunks", "layers"])
def test_gradients_are_freed_after_evaluation_and_recompute(ranks: Any, keys: dict[str, Any]) -> None:
    for checkpointing, most in ranks(2).each(gradients_case, (None, False), keys):
        assert most <= 1.3 * 1936, (checkpointing, most)  # a layer and what is beside it, not all three


def gradients_case(checkpointing: bool | None, keys: dict[str, Any]) -> int:
    """Return the most gradient elements in two steps, before the second a forward on one rank and an evaluation."""
    job = job_of(mixtures.Deep, checkpointing=checkpointing, zero={**SMALL, "reduce_bucket_size": 100})
    engine, model = training.make_engine(job, {"stage": 3, **keys})
    params = list(model.parameters())
    peak = [0]

    def count(_: Any) -> None:
        peak[0] = max(peak[0], sum(p.grad.numel() for p in params if p.grad is not None))

    hooks = [p.register_post_accumulate_grad_hook(count) for p in params]
    outputs = []
    data = training.batches(job)
    for step in range(2):
        if step == 1:
            with torch.no_grad():
                engine(next(data)[0])
            out = engine(next(data)[0])
            outputs += [out] if dist.get_rank() == 0 else []
        training.step(engine, job, 0, data)
    for hook in hooks:
        hook.remove()
    return peak[0]


@pytest.mark.parametrize("keys", [AUTO, WHOLE, *deep(CHUNKS)], ids=["layers", "whole", "chunks"])
def test_frozen_thawed_and_unused_parameters(ranks: Any, keys: dict[str, Any]) -> None:
    for off in ranks(2).run(frozen_case, keys):
        assert max(off) <= 1e-5, off


def frozen_case(keys: dict[str, Any]) -> list[float]:
    """Return the distance to stock weights if parameters are frozen later, thawed later, or not in the optimizer."""

    def train(zero: dict[str, Any], how: str) -> torch.Tensor:
        job = job_of(mixtures.Mixtures, clipping=0.0)
        torch.manual_seed(2)
        model = mixtures.Mixtures(job.sizes)
        changed_params = [*model.layers[0].mixture.experts[1].parameters(), model.layers[1].mixer.first.weight]
        for param in changed_params:
            param.requires_grad_(how != "thawed")
        optimizer_params = [
            p for p in model.parameters() if how != "left out" or all(p is not excluded for excluded in changed_params)
        ]
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=[p for p in optimizer_params if p.requires_grad],
            config=training.configuration(job, {"stage": 3, **zero}),
        )
        data = training.batches(job)
        for step in range(3):
            if step == 1 and how != "left out":
                for param in changed_params:
                    param.requires_grad_(how == "thawed")
            training.step(engine, job, 0, data)
        copy.deepcopy(model)
        weights = training.whole_weights(model)
        engine.destroy()
        return weights

    return [(train(keys, how) - train({}, how)).abs().max().item() for how in ("frozen", "thawed", "left out")]
