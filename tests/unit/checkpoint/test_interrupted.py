# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A save that is interrupted, or fails on one rank, keeps what was there; ranks that disagree are refused."""

from pathlib import Path
from typing import Any

import pytest

from tests.harness.kills import Kill
from tests.harness.kills import run as run_kill
from tests.harness.ranks import RankError
from tests.harness.snapshots import SHARD, after_a_step, error_of


@pytest.mark.parametrize("tag", ["new", "same"])
def test_a_save_that_one_rank_cannot_write_keeps_what_was_there(ranks: Any, tmp_path: Path, tag: str) -> None:
    for message, found, again in ranks(4).run(full_disk_case, str(tmp_path), tag):
        assert message.startswith("CheckpointError: rank 2: ") and "could not be written" in message, message
        assert "No space left on device" in message and SHARD.replace("_1_", "_2_") in message
        assert found == {} and again == {}, (found, again)


def full_disk_case(folder: str, tag: str) -> tuple[str, dict[str, float], dict[str, float]]:
    """The error; what differs in the previous checkpoint; and in that of the next save, when there is space."""
    from unittest import mock

    import torch
    from deepspeed import comm as dist

    from tests.harness import snapshots, training

    job = training.Job(optimizer="Adam", empty=False)
    engine, model = after_a_step(job, "IIG")
    engine.save_checkpoint(folder, tag="same")
    saved, write = snapshots.snapshot(engine, model, job), torch.save

    def fail(state: Any, path: str, **kwargs: Any) -> None:
        write({"a": "part"}, path, **kwargs)
        if dist.get_rank() == 2 and "optim" in path:
            raise OSError(28, "No space left on device")

    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    latest = Path(folder, "latest").read_text()
    with mock.patch.object(torch, "save", fail):
        message = error_of(engine.save_checkpoint, folder, tag=tag)
    assert Path(folder, "latest").read_text() == latest
    engine.load_checkpoint(folder)
    found = snapshots.difference(saved, snapshots.snapshot(engine, model, job))
    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    now = snapshots.snapshot(engine, model, job)
    engine.save_checkpoint(folder, tag=tag)
    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    engine.load_checkpoint(folder)
    again = snapshots.difference(now, snapshots.snapshot(engine, model, job))
    engine.destroy()
    return message, found, again


def test_one_file_is_replaced_as_a_whole(ranks: Any, tmp_path: Path) -> None:
    for before, after, names in ranks(4).run(one_file_case, str(tmp_path)):
        assert before == after and names == ["pytorch_model.bin"]


def one_file_case(folder: str) -> tuple[bytes, bytes, list[str]]:
    """Two calls of save_16bit_model; the second fails half-way on the rank that writes."""
    from unittest import mock

    import torch
    from deepspeed import comm as dist

    from tests.harness import training

    job = training.Job(empty=False)
    engine, _ = after_a_step(job, "NIG")
    engine.save_16bit_model(folder)
    dist.barrier()
    before = Path(folder, "pytorch_model.bin").read_bytes()

    def fail(state: Any, path: str, **kwargs: Any) -> None:
        Path(path).write_bytes(b"a part")
        raise OSError(28, "No space left on device")

    with mock.patch.object(torch, "save", fail):
        try:
            engine.save_16bit_model(folder)
        except OSError:
            assert dist.get_rank() == 0
    dist.barrier()
    engine.destroy()
    names = sorted(path.name for path in Path(folder).iterdir())
    return before, Path(folder, "pytorch_model.bin").read_bytes(), names


def test_tags_that_differ_are_refused(ranks: Any, tmp_path: Path) -> None:
    for answers in ranks(4).run(tags_case, str(tmp_path)):
        assert len(answers) == 2
        for message in answers:
            assert message.startswith("CheckpointError: rank 1: the tag of a checkpoint must be the same"), message


def tags_case(folder: str) -> list[str]:
    """The errors of a save and of a load with another tag on each rank."""
    from deepspeed import comm as dist

    from tests.harness import training

    engine, _ = after_a_step(training.Job(empty=False), "NIG")
    messages = []
    for act in (engine.save_checkpoint, engine.load_checkpoint):
        messages.append(error_of(act, folder, tag=f"of rank {dist.get_rank()}"))
    engine.destroy()
    return messages


def test_a_checkpoint_that_is_not_there(ranks: Any, tmp_path: Path) -> None:
    for nothing, message in ranks(4).run(nothing_case, str(tmp_path)):
        assert nothing == (None, None), "DeepSpeed's answer where there is no file latest"
        assert message == f"CheckpointError: rank 0: there is no checkpoint {tmp_path}/some_tag."


def nothing_case(folder: str) -> tuple[Any, str]:
    """Loads without a file latest, and of a tag that does not exist."""
    from tests.harness import training

    engine, _ = after_a_step(training.Job(empty=False), "IIG")
    nothing = engine.load_checkpoint(folder)
    message = error_of(engine.load_checkpoint, folder, tag="some_tag")
    engine.destroy()
    return nothing, message


# What the killed rank was about to do: (function, its n-th call there), of a save under the same tag.
KILLS = [(2, "torch.save", 0), (0, "torch.save", 1), (0, "exchange", 0), (0, "Path.replace", 0), (3, "barrier", 1)]


@pytest.mark.parametrize("rank, function, call", KILLS)
def test_a_rank_killed_in_a_save(ranks: Any, tmp_path: Path, rank: int, function: str, call: int) -> None:
    """A real SIGKILL."""

    with pytest.raises(RankError, match=f"rank {rank} of 4 died .killed by SIGKILL."):
        ranks(4).run(killed_case, str(tmp_path), rank, function, call)
    published = function == "Path.replace"  # only the file latest is still to be written, and names the same tag
    for before, after in ranks(4).run(survivor_case, str(tmp_path)):
        assert ((after if published else before) == {}) and (before != {} or after != {}), (before, after)


# Of a save beside the training: before copies, between files and their commit, and when only ``latest`` is left.
ASIDE = [
    (Kill("NIG", True, 2, call="Snapshot.complete"), 0),
    (Kill("IIG", True, 0, call="exchange"), 0),
    (Kill("NII", True, 0, all=True, call="replace", after=True), 1),
]


@pytest.mark.parametrize("kill, loaded", ASIDE, ids=lambda value: str(value))
def test_a_rank_killed_in_a_save_beside_the_training(ranks: Any, tmp_path: Path, kill: Kill, loaded: int) -> None:
    assert run_kill(ranks, str(tmp_path / "it"), kill) == (loaded, "")


def killed_case(folder: str, rank: int, function: str, call: int) -> None:
    """Save, train on, save again, and be killed during that save."""
    import os
    import signal

    import deepspeed
    import torch
    from deepspeed import comm as dist

    from deepspeed_ext.checkpoint import owned
    from tests.harness import snapshots, training

    owner, name = {
        "torch.save": (torch, "save"),
        "barrier": (deepspeed.comm, "barrier"),
        "exchange": (owned, "_exchange"),
        "Path.replace": (Path, "replace"),
    }[function]
    job = training.Job(optimizer="Adam", empty=False)
    engine, model = after_a_step(job, "IIG")
    for number in range(2):
        seen = snapshots.snapshot(engine, model, job)
        if dist.get_rank() == 0:
            torch.save(seen, f"{folder}/seen{number}.pt")
        dist.barrier()
        if number and dist.get_rank() == rank:
            original, count = getattr(owner, name), 0

            def kill(*args: Any, original: Any = original, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                if count > call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **kwargs)

            setattr(owner, name, kill)
        engine.save_checkpoint(folder, tag="last")
        snapshots.run(engine, job, snapshots.steps_of(job, 1))


def survivor_case(folder: str) -> tuple[dict[str, float], dict[str, float]]:
    """What differs from the first and from the second save, after a load into a new engine."""
    import torch

    from tests.harness import snapshots, training

    job = training.Job(optimizer="Adam", empty=False)
    engine, model = after_a_step(job, "IIG")
    engine.load_checkpoint(folder)
    seen = snapshots.snapshot(engine, model, job)
    found = [snapshots.difference(torch.load(f"{folder}/seen{number}.pt"), seen) for number in range(2)]
    engine.destroy()
    return found[0], found[1]
