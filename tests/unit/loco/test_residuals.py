# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""LoCo's residuals, its unsent gradients, in checkpoints."""

import math
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from deepspeed import comm as dist

from deepspeed_ext.checkpoint.files import HEADER
from deepspeed_ext.checkpoint.folder import RECORD
from deepspeed_ext.checkpoint.residuals import FOLDER
from deepspeed_ext.comm import collectives
from tests.harness import snapshots, training
from tests.harness.logs import logged
from tests.harness.tiers import deep, with_cases

NAMES = ("NNN", "NII", "NIG", "NGG", "INI", "IIG", "IGG", "GGG")


@with_cases(
    "dtype, backend, names",
    *(("fp32", "gloo", ("NGG", "IIG")), ("fp32", "nccl", ("INI",))),
    *deep(("fp32", "gloo", NAMES), ("fp16", "gloo", NAMES), ("fp32", "nccl", NAMES)),
    ids=str,
)
def test_15_resumed_run_matches_uninterrupted_run(
    ranks: Any, names: tuple[str, ...], dtype: str, backend: str, tmp_path: Any
) -> None:
    for name, (weights, errors, steps) in ranks(4).each(resume_case, names, dtype, backend, str(tmp_path)):
        assert weights and errors and steps == 5, name


def resume_case(name: str, dtype: str, backend: str, folder: str) -> tuple[bool, bool, int]:
    """Train with and without a checkpoint in between; return whether weights and errors are equal bit for bit."""
    job, runs = snapshots.job_of(dtype), []
    with mock.patch.object(collectives, "backend_of", lambda group: backend):
        for resumed in (False, True):
            engine, model = training.make_engine(job, training.placed(name, zeropp_loco_param={}))
            steps = snapshots.steps_of(job, 5)
            if resumed:
                engine.load_checkpoint(folder, name)
            else:
                snapshots.run(engine, job, steps[:3], 0)
                engine.save_checkpoint(folder, name)
            snapshots.run(engine, job, steps[3:], 3)
            memory = engine.optimizer.error_state
            errors = [error.committed for error in memory._errors.values()]
            runs.append((training.whole_weights(model), errors, memory.steps))
            engine.destroy()
    (weights, errors, _), (again, resumed_errors, steps) = runs
    equal = len(errors) == len(resumed_errors) > 0 and all(map(torch.equal, errors, resumed_errors))
    return torch.equal(weights, again), equal, steps + (dtype == "fp16")


CROSSINGS = [("NIG", "IIG"), ("NIG", "NGG"), ("IIG", "GGG"), ("IIG", "NNG"), ("NNN", "NIG")]
FEW = [(2, 1, CROSSINGS[::2]), (6, 2, CROSSINGS[3:4])]


@with_cases("loads", FEW, *deep([(2, 1, CROSSINGS), (6, 2, CROSSINGS), (4, 1, CROSSINGS)]), ids=["few", "all"])
def test_15_other_ranks_load_the_sum_of_residuals(ranks: Any, tmp_path: Any, loads: list[Any]) -> None:
    saved = dict(ranks(4).each(save_case, ("NIG", "IIG", "NNN"), str(tmp_path)))  # the same on all ranks
    for world, group, crossings in loads:
        for name, other in crossings:
            loaded = ranks(world).run(load_case, name, other, group, str(tmp_path))[0]
            norm = math.sqrt(sum(value**2 for value in saved[name]))
            off = math.sqrt(sum((a - b) ** 2 for a, b in zip(saved[name], loaded, strict=True)))
            assert norm > 0 and off < 0.02 * norm, (name, other, world, off / norm)


def not_sent(engine: Any) -> list[float]:
    """Return the sum over all ranks of unsent gradients, by parameter and element."""
    totals = {
        name: torch.zeros(getattr(parameter, "ds_numel", parameter.numel()))
        for name, parameter in engine.module.named_parameters()
    }
    memory = engine.optimizer.error_state
    for run, values in memory.errors_in(memory.states()):
        for name, start, crossing in engine.optimizer.inter_group_spans():
            first, end = max(run.start, crossing.start), min(run.start + run.numel, crossing.start + crossing.numel)
            if (run.buffer, run.row) == (crossing.buffer, crossing.row) and first < end:
                at = start + first - crossing.start
                totals[name][at : at + end - first] += values[first - run.start : end - run.start]
    flat = torch.cat([totals[name] for name in sorted(totals)])
    dist.all_reduce(flat)
    return flat.tolist()


def save_case(name: str, folder: str) -> list[float]:
    engine, _ = training.make_trained(snapshots.job_of(), training.placed(name, zeropp_loco_param={}), 3)
    engine.save_checkpoint(folder, name)
    unsent = not_sent(engine)
    engine.destroy()
    dist.barrier()
    snapshots.convert(folder)
    assert Path(folder, name, "residuals_rank_00000_mp_rank_00.pt").exists()
    return unsent


def load_case(name: str, other: str, group: int, folder: str) -> list[float]:
    job = snapshots.job_of(checkpoint={"load_universal": True})
    engine, _ = training.make_engine(job, training.placed(other, group, zeropp_loco_param={}))
    engine.load_checkpoint(folder, f"{name}_universal")
    unsent = not_sent(engine)
    assert engine.optimizer.error_state.steps == 3
    snapshots.run(engine, job, snapshots.steps_of(job, 1), 10)
    return unsent


def test_15_missing_residuals_warn_once_and_start_at_zero(ranks: Any, tmp_path: Any) -> None:
    for rank, (forgotten, warnings) in enumerate(ranks(2).run(plain_case, str(tmp_path))):
        assert forgotten
        assert len(warnings) == (1 if rank == 0 else 0), warnings


def plain_case(folder: str) -> tuple[bool, list[str]]:
    """Load a checkpoint of a run without LoCo with LoCo, and vice versa; save without LoCo after a load with it."""
    job = snapshots.job_of()
    engine, _ = training.make_trained(job, training.placed("NIG", 1), 2)
    engine.save_checkpoint(folder, "plain")
    engine.destroy()
    engine, _ = training.make_trained(job, training.placed("NIG", 1, zeropp_loco_param={}), 2)
    engine.save_checkpoint(folder, "loco")
    with logged() as lines:
        engine.load_checkpoint(folder, "plain")
    warnings = [text for level, text in lines if level == "WARNING" and "residuals" in text]
    forgotten = not engine.optimizer.error_state._errors and engine.optimizer.error_state.steps == 0
    engine.destroy()
    engine, _ = training.make_engine(job, training.placed("NIG", 1))
    engine.load_checkpoint(folder, "loco")
    engine.save_checkpoint(folder, "loco")
    return forgotten and not list(Path(folder, "loco").glob("residuals*")), warnings


def test_15_converted_tag_is_saved_again(ranks: Any, tmp_path: Any) -> None:
    assert ranks(2).run(again_case, str(tmp_path)) == [(1, True)] * 2


def again_case(folder: str) -> tuple[int, bool]:
    """Return the steps of a conversion whose source was replaced, and whether it has no residuals."""
    job, loco = snapshots.job_of(), training.placed("NIG", 1, zeropp_loco_param={})
    engine, _ = training.make_trained(job, loco)
    engine.save_checkpoint(folder, "tag")
    dist.barrier()
    snapshots.convert(folder)
    snapshots.run(engine, job, snapshots.steps_of(job, 1), 0)
    engine.save_checkpoint(folder, "tag")
    engine.destroy()
    engine, _ = training.make_engine(snapshots.job_of(checkpoint={"load_universal": True}), loco)
    engine.load_checkpoint(folder, "tag_universal")
    zero = not engine.optimizer.error_state._errors  # they are of another save, which is no reason to refuse the rest
    return engine.global_steps, zero


def test_15_moved_checkpoints_load_only_their_own_residuals(ranks: Any, tmp_path: Any) -> None:
    assert ranks(2).run(moved_case, str(tmp_path)) == [(True, True, False)] * 2


def moved_case(folder: str) -> tuple[bool, ...]:
    """Return whether a converted checkpoint finds residuals: after a move, with an old path, with another's path."""
    job, loco = snapshots.job_of(), training.placed("NIG", 1, zeropp_loco_param={})
    engine, _ = training.make_trained(job, loco)
    engine.save_checkpoint(f"{folder}/first", "tag")
    engine.destroy()
    snapshots.convert(f"{folder}/first")
    universal = snapshots.job_of(checkpoint={"load_universal": True})
    moves = (
        ("first", "second", None),
        ("second", "third", f"{folder}/first/tag"),
        ("third/tag", "tag", f"{folder}/tag"),
    )
    has_residuals = []
    for source, target, saved_path in moves:
        if dist.get_rank() == 0:
            Path(folder, source).rename(Path(folder, target))
            (states,) = Path(folder).glob("*/tag_universal/mp_rank_00_model_states.pt")
            content = torch.load(states, weights_only=False)
            content[HEADER][FOLDER] = saved_path or content[HEADER][FOLDER]
            torch.save(content, states)
        dist.barrier()
        engine, _ = training.make_engine(universal, loco)
        engine.load_checkpoint(str(next(Path(folder).glob("*/tag_universal")).parent), "tag_universal")
        has_residuals.append(any(not_sent(engine)))
        engine.destroy()
        dist.barrier()
    return tuple(has_residuals)


def test_15_residuals_on_node_local_disks(ranks: Any, tmp_path: Any) -> None:
    assert ranks(4).run(disks_case, str(tmp_path)) == [True] * 4


def disks_case(folder: str) -> bool:
    """Return whether each rank finds its residuals if disks have only the files of their node."""
    node, local = divmod(dist.get_rank(), 2)
    disk = str(Path(folder, str(node)))
    job = snapshots.job_of(checkpoint={"use_node_local_storage": True})
    with mock.patch.dict(os.environ, {"LOCAL_RANK": str(local)}):
        engine, _ = training.make_trained(job, training.placed("NGG", zeropp_loco_param={}), 2)
        engine.save_checkpoint(disk, "tag")
        before = [error.committed for error in engine.optimizer.error_state._errors.values()]
        snapshots.run(engine, job, snapshots.steps_of(job, 1), 0)
        engine.load_checkpoint(disk, "tag")
        after = [error.committed for error in engine.optimizer.error_state._errors.values()]
        engine.destroy()
    return len(before) > 0 and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


DAMAGES = {"missing": "has 1 files", "truncated": "100 bytes, expected", "other save": "another save"}
DAMAGES["other types"] = "00.pt does not have the fields of this file of a checkpoint: whereabouts.0: Input should be"


def test_15_damaged_residuals_are_refused_before_loading(ranks: Any, tmp_path: Any) -> None:
    for outcomes in ranks(2).run(damage_case, str(tmp_path)):
        for expected, (message, unchanged) in zip(DAMAGES.values(), outcomes, strict=True):
            assert unchanged and expected in message, (expected, message)


def damage_case(folder: str) -> list[tuple[str, bool]]:
    """Return for each damage the error of a load, and whether states are unchanged."""
    job = snapshots.job_of()
    engine, model = training.make_engine(job, training.placed("NIG", 1, zeropp_loco_param={}))
    for tag in ("first", "second"):
        snapshots.run(engine, job, snapshots.steps_of(job, 1), 0)
        engine.save_checkpoint(folder, tag)
    path = Path(folder, "second", "residuals_rank_00001_mp_rank_00.pt")
    dist.barrier()
    content = path.read_bytes()
    before, errors = snapshots.snapshot(engine, model, job), engine.optimizer.error_state.states()["messages"]
    outcomes = []
    dist.barrier()
    for damage in DAMAGES:
        if dist.get_rank() == 0:
            if damage == "missing":
                path.unlink()
            elif damage == "truncated":
                path.write_bytes(content[:100])
            elif damage == "other types":
                path.with_name(RECORD).unlink()
                torch.save(torch.load(path, weights_only=False) | {"whereabouts": [3]}, path)
            else:
                shutil.copy(Path(folder, "first", path.name), path)
        dist.barrier()
        message = snapshots.error_of(engine.load_checkpoint, folder, "second")
        changes = snapshots.difference(before, snapshots.snapshot(engine, model, job))
        messages = engine.optimizer.error_state.states()["messages"]
        unchanged = all((a[2] == b[2]).all() for a, b in zip(errors, messages, strict=True))
        outcomes.append((message, unchanged and not any(changes.values())))
        snapshots.on_first_rank(path.write_bytes, content)
    return outcomes
