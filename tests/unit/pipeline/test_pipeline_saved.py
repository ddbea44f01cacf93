# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of pipelines: for resuming, for DeepSpeed's ZeRO-1, and for another number of stages."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from tests.harness import pipelines, snapshots
from tests.harness.tiers import deep
from tests.harness.training import SMALL, placed

SOME, OTHERS = ("NIG", "IIG"), ("NNG", "III")


@pytest.mark.parametrize(
    "tied, experts, names",
    [(True, 0, SOME), (True, 2, ("NIG",)), *deep((True, 0, OTHERS), (True, 2, ("NNI",)), (False, 0, SOME + OTHERS))],
)
def test_a_resumed_pipeline_matches_an_uninterrupted_run(
    ranks: Any, tmp_path: Path, tied: bool, experts: int, names: tuple[str, ...]
) -> None:
    for name, (same_weights, same_losses) in ranks(4).each(resume_case, names, str(tmp_path), tied, experts):
        assert same_weights and same_losses, (name, same_weights, same_losses)


def resume_case(name: str, folder: str, tied: bool, experts: int) -> tuple[bool, bool]:
    """Return strategies, and whether weights and losses after a load are bitwise equal to the saved run's."""
    pipe = pipelines.Pipe(2, 2, optimizer="Adam", tied=tied, zero=SMALL, frozen=(2,), groups=2, experts=experts)
    engine, data = pipelines.start(pipe, placed(name, 1))
    engine.train_batch(data)
    engine.save_checkpoint(f"{folder}/{name}", client_state={"epoch": 5})
    losses = [float(engine.train_batch(data)) for _ in range(2)]
    weights, _ = pipelines.everybodys_weights(engine.module)
    engine.destroy()
    engine, data = pipelines.start(pipe, placed(name, 1))
    engine.train_batch(pipelines.batches(7))  # something to be overwritten
    for _ in range(pipe.micro_batches):
        next(data)
    path, client_state = engine.load_checkpoint(f"{folder}/{name}")
    assert path and client_state["epoch"] == 5
    again = [float(engine.train_batch(data)) for _ in range(2)]
    resumed, equal = pipelines.everybodys_weights(engine.module)
    equal = equal and all(torch.equal(resumed[key], value) for key, value in weights.items())
    return equal, again == losses


@pytest.mark.parametrize("saved, loaded", [("NIG", "1"), ("IIG", "GGG"), *deep(("1", "NIG"), ("NIG", "NNG"))])
def test_equal_sharding_loads_without_conversion(ranks: Any, tmp_path: Path, saved: str, loaded: str) -> None:
    for differing, losses in ranks(4).run(other_stages_case, str(tmp_path), saved, loaded):
        assert differing == {} and abs(losses[0] - losses[1]) < 1e-6, (differing, losses)


@pytest.mark.parametrize(
    "saved, loaded, stages",
    [
        *(("NIG", "IIG", 4), ("1", "NIG", 4)),
        *deep(("NNI", "NIG", 1), ("NIG", "1", 1)),
        *deep(("NIG", "IIG", 1), ("NNI", "NIG", 4), ("1", "NIG", 1), ("NIG", "1", 4)),
    ],
)
def test_universal_checkpoints_change_stages(ranks: Any, tmp_path: Path, saved: str, loaded: str, stages: int) -> None:
    for differing, _ in ranks(4).run(other_stages_case, str(tmp_path), saved, loaded, stages):
        assert differing == {}


def other_stages_case(folder: str, saved: str, loaded: str, stages: int = 0) -> tuple[dict[str, float], list[float]]:
    """Return what differs after a load, and the next losses: the weights with the same number of stages; with another
    one, from a universal checkpoint, also the moments."""
    pipes = [pipelines.Pipe(optimizer="Adam", micro_batches=2, tied=not stages)] * 2
    if stages:
        pipes[1] = replace(pipes[0], stages=stages, config={"checkpoint": {"load_universal": True}})
    states, losses = [], []
    for pipe, name in zip(pipes, (saved, loaded), strict=True):
        engine = pipelines.make_pipeline(pipe, placed(name, 1))
        engine.train_batch(pipelines.batches(engine.grid.get_data_parallel_rank(), seed=len(states)))
        if states:  # the load overwrites other weights
            engine.load_checkpoint(folder)
        else:
            engine.save_checkpoint(folder)
        states.append(full_states(engine) if stages else pipelines.everybodys_weights(engine.module)[0])
        losses.append(float(engine.train_batch(pipelines.batches(engine.grid.get_data_parallel_rank()))))
        engine.destroy()
        if stages and len(states) == 1:
            snapshots.convert(folder)
    return snapshots.difference(*states), losses


def full_states(engine: Any) -> dict[str, Any]:
    own_states = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            own_states[f"{name} fp32"] = safe_get_full_fp32_param(param).clone()
            for moment in ("exp_avg", "exp_avg_sq"):
                own_states[f"{name} {moment}"] = safe_get_full_optimizer_state(param, moment).clone()
    everybody: list[dict[str, Any]] = [{}] * dist.get_world_size()
    torch.distributed.all_gather_object(everybody, own_states)
    return {name: value for states in everybody for name, value in states.items()}


def test_weights_load_without_optimizer_states(ranks: Any, tmp_path: Path) -> None:
    for name, loaded, trained in ranks(4).rows(weights_case, str(tmp_path)):
        assert loaded == 0.0, name
        assert trained < 1e-6, name  # from the weights that were loaded


def weights_case(folder: str) -> list[tuple[str, float, float]]:
    """Return strategies, and the distance of weights from the saved ones, and after a step from NIG's, for two ways to
    load no optimizer states."""
    pipe, rows, stepped = pipelines.Pipe(clipping=0.0, optimizer="Adam", micro_batches=2), [], {}
    for name in ("NIG", "IIG"):
        engine = pipelines.make_pipeline(pipe, placed(name, 1))
        engine.train_batch(pipelines.batches(engine.grid.get_data_parallel_rank()))
        engine.save_checkpoint(f"{folder}/{name}")
        saved, _ = pipelines.everybodys_weights(engine.module)
        engine.destroy()
        engine = pipelines.make_pipeline(pipe, placed(name, 1))
        for part in ("load_module_only", "load_optimizer_states"):
            engine.load_checkpoint(f"{folder}/{name}", **{part: part == "load_module_only"})
            loaded, equal = pipelines.everybodys_weights(engine.module)
            assert equal
            engine.train_batch(pipelines.batches(engine.grid.get_data_parallel_rank()))
            stepped[name, part], _ = pipelines.everybodys_weights(engine.module)
            gap = max(float((loaded[key] - saved[key]).abs().max()) for key in saved)
            after = max(float((stepped[name, part][key] - stepped["NIG", part][key]).abs().max()) for key in saved)
            rows.append((f"{name}, {part}", gap, after))
        engine.destroy()
    return rows


def test_a_missing_layer_is_named_before_anything_changes(ranks: Any, tmp_path: Path) -> None:
    for message, changed in ranks(4).run(missing_case, str(tmp_path)):
        assert "layer_03" in message and "is missing; it has the weights of layer 3" in message, message
        assert not changed


def missing_case(folder: str) -> tuple[str, bool]:
    """Return the error of a load without one layer's file, and whether it has changed anything."""
    engine, data = pipelines.start(pipelines.Pipe(), {"paro_strategy": "IIG", "paro_group_size": 1})
    engine.train_batch(data)
    engine.save_checkpoint(folder, tag="a")
    engine.train_batch(data)
    before, _ = pipelines.everybodys_weights(engine.module)
    snapshots.on_first_rank(next(Path(folder, "a").glob("layer_03-*")).unlink)
    message = snapshots.error_of(engine.load_checkpoint, folder, tag="a")
    after, _ = pipelines.everybodys_weights(engine.module)
    return message, not all(torch.equal(after[key], before[key]) for key in before)
