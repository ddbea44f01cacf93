# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A run of another size or strategy continues from an ordinary checkpoint, which the load converts."""

import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext.checkpoint import conversion, owned_folder
from tests.harness import calls, snapshots, training
from tests.harness.snapshots import convert, error_of
from tests.harness.tiers import deep

# What saves on 4 ranks in groups of 2; what loads on 2, and in which groups.
RUNS = [("IIG + LoCo", "NIG + LoCo", 1), ("NIG + aside", "GGG", 2)]
RUNS += deep(("2", "III", 2), ("NIG + Muon", "III + Muon", 2))


def names_in(folder: str) -> list[str]:
    """Return the names of checkpoints, and of files that a load has left, in a folder. Collective."""
    results = sorted(path.name for path in Path(folder).iterdir() if path.suffix != ".py")
    dist.barrier()
    return results


def begin(name: str, group_size: int = 2) -> tuple[Any, Any, Any]:
    """Return a job that loads universal checkpoints, and engine and model of a strategy or stage."""
    kind, *more = name.split(" + ")
    checkpoint = {"load_universal": True, **({"async_save": True} if "aside" in more else {})}
    optimizer = "Muon" if "Muon" in more else "Adam"
    job = training.Job(optimizer=optimizer, empty=False, zero=training.SMALL, config={"checkpoint": checkpoint})
    loco = {"zeropp_loco_param": {}} if "LoCo" in more else {}
    return job, *training.make_engine(job, training.placed(kind, group_size, **loco))


def save_case(folder: str, name: str) -> None:
    job, engine, model = begin(name)
    snapshots.run(engine, job, snapshots.steps_of(job, 3))
    engine.save_checkpoint(folder)
    snapshots.on_first_rank(torch.save, snapshots.snapshot(engine, model, job), f"{folder}.pt")


@pytest.mark.parametrize("saved, loaded, group_size", RUNS, ids=str)
def test_a_smaller_run_can_continue(ranks: Any, tmp_path: Path, saved: str, loaded: str, group_size: int) -> None:
    ranks(4).run(save_case, str(tmp_path), saved)
    ranks(2).run(load_case, str(tmp_path), loaded, group_size)


def load_case(folder: str, name: str, group_size: int) -> None:
    """Load twice; the second load converts nothing."""
    job, engine, model = begin(name, group_size)
    times = set()
    for _ in range(2):
        snapshots.run(engine, job, snapshots.steps_of(job, 1))
        with snapshots.converting_here():
            engine.load_checkpoint(folder)
        times.add(Path(folder, "global_step3_converted", "converted_from.json").stat().st_mtime)
    differences = snapshots.difference(torch.load(f"{folder}.pt"), snapshots.snapshot(engine, model, job))
    assert differences.keys() <= {"counters"}, differences  # samples of a step
    assert len(times) == 1 and names_in(folder) == ["global_step3", "global_step3_converted", "latest"]


def test_only_saves_that_do_not_fit_are_converted(ranks: Any, tmp_path: Path) -> None:
    ranks(4).run(save_case, str(tmp_path), "IIG")
    ranks(4).run(again_case, str(tmp_path))


def again_case(folder: str) -> None:
    """Load with the strategy that saved, convert for another one, save under the same tag, and convert again."""
    job, engine, model = begin("IIG")
    engine.load_checkpoint(folder)
    assert names_in(folder) == ["global_step3", "latest"]
    for number in range(2):
        if number:
            snapshots.run(engine, job, snapshots.steps_of(job, 1))
            engine.save_checkpoint(folder, tag="global_step3")
        expected = snapshots.snapshot(engine, model, job)
        _, other, copy = begin("NIG")
        with snapshots.converting_here():
            other.load_checkpoint(folder, tag="global_step3")
        results = snapshots.difference(expected, snapshots.snapshot(other, copy, job))
        assert results == {}, results
        other.destroy()


def test_a_failed_conversion_raises_and_leaves_no_files(ranks: Any, tmp_path: Path) -> None:
    """The converter runs in the current folder, and imports nothing from there."""
    directory = tmp_path / "here"
    directory.mkdir()
    for name in ("statistics", "queue", "argparse"):
        (directory / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    ranks(4).run(save_case, str(tmp_path), "IIG")
    next(tmp_path.glob("global_step3/*_optim_states.pt")).write_bytes(b"no checkpoint")
    (tmp_path / "global_step3" / "digests.json").unlink()
    for message, changed, names in ranks(2).run(failing_case, str(tmp_path)):
        assert message.startswith("CheckpointError: rank 0: ") and not changed
        assert "cannot be loaded without conversion" in message and " failed: " in message, message
        assert f"python -m deepspeed_ext convert --input_folder {tmp_path}/global_step3 " in message, message
        assert names == ["global_step3", "here", "latest"]


def failing_case(folder: str) -> tuple[str, bool, list[str]]:
    job, engine, model = begin("NIG")
    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    before = snapshots.snapshot(engine, model, job)
    base = Path.cwd()
    os.chdir(f"{folder}/here")
    try:
        message = snapshots.error_of(engine.load_checkpoint, folder)
    finally:
        os.chdir(base)
    return message, bool(snapshots.difference(before, snapshots.snapshot(engine, model, job))), names_in(folder)


def test_a_killed_conversion_leaves_no_output(ranks: Any, tmp_path: Path) -> None:
    ranks(4).run(save_case, str(tmp_path), "NIG + Muon")
    ((message, refused, results),) = ranks(1).run(interrupted_case, str(tmp_path))
    assert message == "OSError: killed" and "exists, and is not a universal checkpoint" in refused
    saved, created = ["global_step3", "latest"], ["global_step3_universal", "latest_universal"]
    assert results == [saved, sorted((*saved, *created)), ["global_step3_universal"]]


def interrupted_case(folder: str) -> tuple[str, str, list[list[str]]]:
    """Return the errors of a conversion that is interrupted while it renames momentum, and of a conversion over
    another folder; the names in the folder before and after a third conversion, which replaces a universal checkpoint;
    and the latest universal tag."""
    target = Path(folder, "global_step3_universal")

    def stop(path: Path, target: Path) -> None:
        if target.name == "momentum_buffer.pt":
            raise OSError("killed")

    with calls.before(Path, "rename", stop):
        message = error_of(convert, folder, ours=True)
    results = [names_in(folder)]
    (target / "something else").mkdir(parents=True)
    refused = error_of(convert, folder, ours=True)
    (target / "something else").rename(target / "zero")  # as if another conversion had been there
    convert(folder, ours=True)
    assert any(target.glob("zero/*/momentum_buffer.pt"))
    results += [names_in(folder), Path(folder, "latest_universal").read_text().split()]
    return message, refused, results


def test_no_rank_hangs_if_the_first_rank_fails(ranks: Any, tmp_path: Path) -> None:
    location = tmp_path / "one"
    location.mkdir()
    (location / "file").write_text("")
    (tmp_path / "two").mkdir()
    (tmp_path / "two_converted").mkdir()
    hidden = r"\.one_converted\.[0-9a-f]{8}\.saving"
    failed = rf"CheckpointError: rank 0: {location} cannot be loaded without conversion \(another strategy\), and its "
    failed += "conversion failed: "
    given_up = (
        rf"CheckpointError: {location} was not converted: the first rank, which converts it, has not updated "
        rf"{tmp_path}/{hidden}/at_work for 1 s, so it has died or cannot write\."
    )
    apart = (
        rf"CheckpointError: rank 1: {tmp_path}/1/{hidden}/at_work, which the first rank has created, is not visible "
        r"to rank 1: a conversion requires a checkpoint folder that all nodes share\."
    )
    expected = {
        "late": rf"{failed}python -m deepspeed_ext convert .* failed: so",
        "broken": rf"{failed}ValueError: no text",
        "full": rf"CheckpointError: rank 0: .*/{hidden} cannot be written: OSError: .*No space left on device",
        "taken": rf"CheckpointError: rank 0: {tmp_path}/two_converted exists, and was not created by a load.*",
        "apart": apart,
    }
    for rank, results in enumerate(ranks(2).run(ends_case, str(tmp_path))):
        unwritable = rf"CheckpointError: {location} was not converted: ValueError: no text"
        requested = {**expected, "gone": given_up if rank else "gone", "unwritable": given_up if rank else unwritable}
        for case, message in results.items():
            assert re.fullmatch(requested.pop(case), message), (case, message)
        assert not requested
    assert list((tmp_path / "two_converted").iterdir()) == []


def ends_case(folder: str) -> dict[str, str]:
    """Return the errors of a converter that fails late or raises, a full disk, an existing name, a first rank that has
    died or can no longer write, and ranks with separate folders."""

    class Gone(BaseException):
        """As if the process were no more."""

    def fail_late(*_: Any, **__: Any) -> Any:
        time.sleep(1.6)
        return subprocess.CompletedProcess([], 1, "so")

    def error(tag: str = "one", inside: str = folder) -> str:
        return error_of(conversion.convert_for_load, inside, tag, "another strategy")

    def fail(path: Path, *_: Any, **__: Any) -> None:
        if path.name == "at_work":
            raise OSError(28, "No space left on device")

    results = {}
    with mock.patch.multiple(conversion, _DEAD_SECONDS=1.0, _BEAT_SECONDS=0.05, _POLL_SECONDS=0.05):
        with mock.patch.object(subprocess, "run", side_effect=fail_late):
            results["late"] = error()
        with mock.patch.object(subprocess, "run", side_effect=ValueError("no text")):
            results["broken"] = error()
            with calls.before(Path, "touch", fail):
                results["full"] = error()
            results["taken"] = error("two")
            with calls.before(Path, "unlink", fail):
                results["unwritable"] = error()
        with mock.patch.object(subprocess, "run", side_effect=Gone()):
            try:
                results["gone"] = error()
            except Gone:
                results["gone"] = "gone"
    own = Path(folder, str(dist.get_rank()))
    (own / "one").mkdir(parents=True)
    with mock.patch.multiple(conversion, _VISIBLE_SECONDS=0.1, _POLL_SECONDS=0.05):
        results["apart"] = error(inside=str(own))
    return results


def test_two_jobs_convert_one_checkpoint(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "file").write_text("")
    for name in ("older_converted", "foreign_converted", "used_converted"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "converted_from.json").write_text("[]")
    for first, second, results, remaining in ranks(2).run(jobs_case, str(tmp_path)):
        assert first == second == "one_converted" and results == ["by job 2"]
        assert remaining == ["foreign_converted", "one", "one_converted", "used_converted"]


def jobs_case(folder: str) -> tuple[str, str, list[str], list[str]]:
    """Convert in two jobs; the second starts and ends while the first converts. Three earlier conversions belong to a
    dead process, have no marker, or are loaded by another job. Return the tags that the jobs load, the files in the
    conversion, and the names next to it."""
    first = dist.get_rank() == 0
    second: list[str] = []
    jobs = iter((1, 2))

    def convert(command: list[str], **_: Any) -> Any:
        job = next(jobs)
        if job == 1:
            second.append(conversion.convert_for_load(folder, "one", "another strategy")[0])
        created = Path(command[-1])
        created.mkdir()
        (created / f"by job {job}").touch()
        return subprocess.CompletedProcess([], 0, "")

    def start_second(*_: Any) -> None:
        if not second:
            second.append("")
            second[0] = conversion.convert_for_load(folder, "one", "another strategy")[0]

    if first:
        owned_folder.create_marker(Path(folder, "older_converted"), shared=True).close()
        used = owned_folder.create_marker(Path(folder, "used_converted"), shared=True)
    with (
        mock.patch.object(subprocess, "run", side_effect=convert),
        calls.before(conversion, "_wait_for_conversion", start_second),
    ):
        tag, lease = conversion.convert_for_load(folder, "one", "another strategy")
    dist.barrier()
    names = names_in(folder)
    results = [path.name for path in Path(folder, tag).glob("by*")]
    if first and lease is not None:
        lease.close()
        used.close()
    return tag, second[0], results, names
