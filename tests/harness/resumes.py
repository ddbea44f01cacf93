# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs that save at every step, and are resumed from every save; everything here runs inside rank processes."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from deepspeed import comm as dist
from torch import Tensor

from tests.harness import snapshots, training

SAVES = 12  # 11 steps are enough for a lost error to change the weights, 7 are not
BF16_MASTERS = {
    "bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
    "data_types": {"grad_accum_dtype": "bf16"},
}


class Row(NamedTuple):
    """What is trained and saved.

    Attributes:
        names: of strategies.
        zero: further keys of the section.
        optimizer: of DeepSpeed's.
        every: steps between two saves of a run; there are as many runs, so that each step is saved in one of them.
        dtype: of ``training.DTYPES``, or "bf16 masters": weights and states of the optimizer, too.
        starts: saves from which it is resumed, by their steps.
    """

    names: tuple[str, ...]
    zero: dict[str, Any]
    optimizer: str
    every: int
    dtype: str
    starts: Collection[int]


def differences(folder: str, row: Row) -> tuple[int, list[tuple[str, int, Any, Any]]]:
    """Resume a run from its saves, of which every other one is asynchronous.

    Returns:
        How many runs were resumed. Of each that differs from the uninterrupted one its strategy, the step of the save,
        and what differs after the load and at the end.
    """
    config = BF16_MASTERS if row.dtype == "bf16 masters" else {}
    config = config | {"checkpoint": {"async_save": True}}
    job = snapshots.job_of(row.dtype.split()[0], row.zero, row.optimizer, **config)
    count, found = 0, []
    batches = snapshots.steps_of(job, SAVES + 1)
    for name in row.names:
        for first in range(1, row.every + 1):
            saves = range(first, SAVES + 1, row.every)
            where = f"{folder}/{name}/{first}"
            seen = _train_and_save(where, name, job, batches, saves)
            for step, *resumed in _resume(where, name, job, batches, saves, row.starts):
                pairs = zip((seen[step], seen[len(batches)]), resumed, strict=True)
                found.append((name, step, *(snapshots.difference(*pair) for pair in pairs)))
                count += 1
    return count, [one for one in found if one[2] or one[3]]


def _train_and_save(
    folder: str, name: str, job: Any, batches: Sequence[tuple[Tensor, Tensor]], saves: range
) -> dict[int, dict[str, Tensor]]:
    """Return what the uninterrupted run has at each save and at the end."""
    engine, model = training.make_engine(job, training.placed(name))
    aside, seen = engine.checkpoint_engine.aside, {}
    for step, batch in enumerate(batches, 1):
        snapshots.run(engine, job, [batch], step - 1)
        if step in saves:
            engine.checkpoint_engine.finish()
            engine.checkpoint_engine.aside = aside if step % 2 else None
            engine.save_checkpoint(folder, tag=str(step))
            engine.checkpoint_engine.aside = aside
        if step in saves or step == len(batches):
            seen[step] = snapshots.snapshot(engine, model, job)
    engine.destroy()
    dist.barrier()
    return seen


def _resume(
    folder: str, name: str, job: Any, batches: Sequence[tuple[Tensor, Tensor]], saves: range, starts: Collection[int]
) -> list[tuple[int, dict[str, Tensor], dict[str, Tensor]]]:
    """Return each step of a save, with what a resumed run has after the load and at the end.

    The first load is into a new engine, later ones into one that has trained.
    """
    engine, model = training.make_engine(job, training.placed(name))
    seen = []
    for step in (one for one in saves if one in starts):
        engine.load_checkpoint(folder, tag=str(step))
        loaded = snapshots.snapshot(engine, model, job)
        for number, batch in enumerate(batches[step:], step + 1):
            snapshots.run(engine, job, [batch], number - 1)
            if number in saves:
                engine.optimizer.send_whole()  # what a save changes in the training
        seen.append((step, loaded, snapshots.snapshot(engine, model, job)))
    engine.destroy()
    return seen
