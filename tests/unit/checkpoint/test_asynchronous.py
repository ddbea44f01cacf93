# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Saves that go on beside the training have what saves at once have, and fail as these do."""

from pathlib import Path
from typing import Any

import pytest

ASIDE = {"checkpoint": {"async_save": True}}
IN_ORDER = {"checkpoint": {"async_save": True, "zero_order": True}}


def files_below(folder: str) -> dict[str, bytes]:
    """Content of each file, by its path."""
    found = (path for path in sorted(Path(folder).rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.mark.parametrize("name, zero, dtype", [("NIG", {}, "fp32"), ("IIG", {}, "bf16")])
def test_it_has_the_bytes_of_a_save_at_once(
    ranks: Any, tmp_path: Path, name: str, zero: dict[str, Any], dtype: str
) -> None:
    for different, files, changed, same, outside in ranks(4).run(same_bytes_case, str(tmp_path), name, zero, dtype):
        assert different == [] and files >= 5 and changed == {} and same, (different, files, changed, same)
        assert outside == 0  # all that steps alone change is copied into host buffers


def same_bytes_case(
    folder: str, name: str, zero: dict[str, Any], dtype: str, optimizer: str = "Adam"
) -> tuple[list[str], int, dict[str, float], bool, int]:
    """Names of files that differ, the number of files, what a load does not restore, whether losses after it are
    those of the run that goes on, and bytes of optimizer states that are not in host buffers. Slices of parameters
    are not gathered for a save."""
    import secrets
    from unittest import mock

    from deepspeed import comm as dist

    from deepspeed_ext.checkpoint.saving import _changed_by_steps
    from deepspeed_ext.zero.sharded.slices import Slices
    from tests.harness import snapshots, training

    job = snapshots.job_of(dtype, zero, optimizer, **ASIDE)
    engine, model = training.make_engine(job, training.placed(name))
    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    snapshots.mark(engine, model)
    saved = snapshots.snapshot(engine, model, job)
    files = engine.checkpoint_engine
    without_gathers = mock.patch.object(Slices, "complete", side_effect=AssertionError)
    with mock.patch.object(secrets, "randbits", lambda bits: bits), without_gathers:
        with mock.patch.object(files, "aside", None):
            engine.save_checkpoint(f"{folder}/at_once")
        with mock.patch.object(files.aside, "start", wraps=files.aside.start) as started:
            engine.save_checkpoint(f"{folder}/aside")
    copied = started.call_args.args[0]._copies
    states = [one for one in _changed_by_steps(engine) if one.untyped_storage().data_ptr() not in copied]
    losses = snapshots.run(engine, job, snapshots.steps_of(job, 3, 1))
    engine.load_checkpoint(f"{folder}/aside")
    changed = snapshots.difference(saved, snapshots.snapshot(engine, model, job))
    again = snapshots.run(engine, job, snapshots.steps_of(job, 3, 1))
    dist.barrier()
    one, two = files_below(f"{folder}/at_once"), files_below(f"{folder}/aside")
    engine.destroy()
    return (
        [name for name in one.keys() | two.keys() if one.get(name) != two.get(name)],
        len(one),
        changed,
        losses == again,
        sum(one.nbytes for one in states),
    )
