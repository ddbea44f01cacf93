# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in a save or a load loses nothing that was there, and says on every rank what it was."""

from pathlib import Path
from typing import Any

import pytest

from tests.harness.snapshots import error_of
from tests.harness.training import placed

# Of the folder of a tag, in groups of 2: a file that one rank reads.
MODULE = {"NIG": "mp_rank_00_model_states.pt", "III": "zero_pp_rank_1_mp_rank_00_model_states.pt"}
MODULE["IIG"] = MODULE["III"]
SHARD = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
FAULTS = ("missing", "truncated", "empty", "of another save", "of no checkpoint", "of something else")


def spoil(path: Path, fault: str) -> None:
    """Do this to a file."""
    if fault == "missing":
        path.unlink()
    elif fault == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif fault == "empty":
        path.write_bytes(b"")
    elif fault == "of another save":
        path.write_bytes((path.parents[1] / "before" / path.name).read_bytes())
    elif fault == "of something else":
        import torch

        torch.save({"a": 1}, path)
    else:
        path.write_text("nothing that torch has written")


def make(job: Any, name: str) -> tuple[Any, Any]:
    """An engine after a step."""
    from tests.harness import snapshots, training

    engine, model = training.make_engine(job, placed(name))
    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    return engine, model


@pytest.mark.parametrize("name", ["NIG", "III", "IIG"])
def test_a_spoilt_file_is_named_before_anything_changes(ranks: Any, tmp_path: Path, name: str) -> None:
    answers = ranks(4).run(spoilt_case, str(tmp_path), name)
    for rows in answers:
        assert len(rows) == 2 * len(FAULTS) and rows == answers[0]
        for file, fault, message, changed, again in rows:
            assert message.startswith("CheckpointError: rank ") and file in message, (fault, message)
            reason = {"missing": "is missing", "of another save": "of another save"}.get(fault, "cannot be read")
            assert reason in message, (fault, message)
            assert not changed and again == {}, (fault, changed, again)


def spoilt_case(folder: str, name: str) -> list[tuple[str, str, str, bool, dict[str, float]]]:
    """File, what was done to it, the error, whether a weight or state changed, and what the mended one loads."""
    import shutil

    from deepspeed import comm as dist

    from tests.harness import snapshots, training

    job = training.Job(optimizer="Adam", empty=False, frozen=(1,), network=snapshots.Buffered)
    engine, model = make(job, name)
    engine.save_checkpoint(folder, tag="before")
    snapshots.mark(engine, model)
    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    engine.save_checkpoint(folder, tag="good")
    saved = snapshots.snapshot(engine, model, job)
    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    now = snapshots.snapshot(engine, model, job)
    rows = []
    for file in (MODULE[name], SHARD):
        for fault in FAULTS:
            if dist.get_rank() == 0:
                shutil.copytree(f"{folder}/good", f"{folder}/bad")
                spoil(Path(folder, "bad", file), fault)
            dist.barrier()
            message = error_of(engine.load_checkpoint, folder, tag="bad")
            changed = bool(snapshots.difference(now, snapshots.snapshot(engine, model, job)))
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(f"{folder}/bad")
            rows.append((file, fault, message, changed))
    engine.load_checkpoint(folder, tag="good")
    again = snapshots.difference(saved, snapshots.snapshot(engine, model, job))
    engine.destroy()
    return [(*row, again) for row in rows]


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_alone_are_not_taken_from_a_spoilt_shard(ranks: Any, tmp_path: Path, fault: str) -> None:
    for message, changed in ranks(4).run(spoilt_weights_case, str(tmp_path), fault):
        assert message.startswith("CheckpointError: rank ") and SHARD in message and not changed, message


def spoilt_weights_case(folder: str, fault: str) -> tuple[str, bool]:
    """With parameters cut, weights without optimizer states come from all shards."""
    from deepspeed import comm as dist

    from tests.harness import snapshots, training

    job = training.Job(optimizer="Adam", empty=False)
    engine, model = make(job, "IIG")
    engine.save_checkpoint(folder, tag="before")
    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    engine.save_checkpoint(folder, tag="bad")
    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    if dist.get_rank() == 0:
        spoil(Path(folder, "bad", SHARD), fault)
    dist.barrier()
    now = snapshots.snapshot(engine, model, job)
    message = error_of(engine.load_checkpoint, folder, load_module_only=True)
    changed = bool(snapshots.difference(now, snapshots.snapshot(engine, model, job)))
    engine.destroy()
    return message, changed


@pytest.mark.parametrize("name", ["NIG", "IIG"])
@pytest.mark.parametrize("file", ["fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "optimizer_state.pt"])
def test_a_spoilt_file_of_a_universal_checkpoint_is_named(ranks: Any, tmp_path: Path, name: str, file: str) -> None:
    for rows in ranks(4).run(spoilt_universal_case, str(tmp_path), name, file):
        for fault, message, changed in rows:
            assert message.startswith("CheckpointError: rank ") and file in message and not changed, (fault, message)


def spoilt_universal_case(folder: str, name: str, file: str) -> list[tuple[str, str, bool]]:
    """What is done to a file, the error, whether a weight or state changed."""
    from deepspeed import comm as dist

    from tests.harness import snapshots, training

    job = training.Job(optimizer="Adam", empty=False, config={"checkpoint": {"load_universal": True}})
    engine, model = make(job, name)
    engine.save_checkpoint(folder)
    snapshots.convert(folder)
    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    now = snapshots.snapshot(engine, model, job)
    zero = Path(folder, "global_step1_universal", "zero")
    path = zero / ("" if file == "optimizer_state.pt" else "layers.2.weight") / file
    good, rows = path.read_bytes(), []
    dist.barrier()
    for fault in ("missing", "truncated", "of no checkpoint"):
        if dist.get_rank() == 0:
            path.write_bytes(good)
            spoil(path, fault)
        dist.barrier()
        message = error_of(engine.load_checkpoint, folder)
        rows.append((fault, message, bool(snapshots.difference(now, snapshots.snapshot(engine, model, job)))))
        dist.barrier()
    engine.destroy()
    return rows


# (saved by, keys then; loaded by, keys now; what the error says)
MISFITS = [
    ("GGG", {}, "III", {}, "of stage 3 and cut over 4 ranks, but those of this run are of stage 3 and cut over 2"),
    ("NIG", {}, "NNN", {}, "of stage 2 and cut over [4] ranks"),
    ("NIG", {}, "IIG", {}, "zero_pp_rank_0_mp_rank_00_model_states.pt is missing"),
    ("IIG", {}, "NIG", {}, "mp_rank_00_model_states.pt is missing"),
    ("NIG", {}, "NIG", {"round_robin_gradients": True}, "order"),
]


@pytest.mark.parametrize("saved, then, loaded, now, reason", MISFITS)
def test_states_that_are_cut_otherwise_are_refused(
    ranks: Any, tmp_path: Path, saved: str, then: Any, loaded: str, now: Any, reason: str
) -> None:
    for message, changed in ranks(4).run(
        misfit_case, str(tmp_path), {**placed(saved), **then}, {**placed(loaded), **now}
    ):
        assert message.startswith("CheckpointError: rank 0: ") and reason in message, message
        if saved != loaded:
            assert f"saved with paro_strategy {saved} in groups of 2, by 4 ranks" in message, message
            assert f"loaded with paro_strategy {loaded} in groups of 2, by 4 ranks" in message, message
            assert "python -m deepspeed.checkpoint.ds_to_universal" in message
        assert not changed


def misfit_case(folder: str, saved: dict[str, Any], loaded: dict[str, Any]) -> tuple[str, bool]:
    """The error of a load, of the class that scripts catch with stock, and whether a weight changed."""
    from deepspeed.runtime.zero.utils import ZeRORuntimeException

    from tests.harness import training

    job = training.Job(empty=False)
    engine, _ = training.make_engine(job, saved)
    training.micro_step(engine, job, 0, *next(training.batches(job)))
    engine.step()
    engine.save_checkpoint(folder)
    engine.destroy()
    engine, model = training.make_engine(job, loaded)
    before = training.whole_weights(model)
    message = ""
    try:
        engine.load_checkpoint(folder)
    except ZeRORuntimeException as error:
        message = f"{type(error).__name__}: {error}"
    changed = bool((training.whole_weights(model) - before).any())
    engine.destroy()
    return message, changed


def test_another_model_is_refused(ranks: Any, tmp_path: Path) -> None:
    for rows in ranks(4).run(another_model_case, str(tmp_path)):
        assert len(rows) == 8
        for name, sizes, message, changed in rows:
            assert message.startswith("CheckpointError: rank 0: ") and not changed, (name, message)
            names = {(13, 37, 31, 7): (6, 3), (13, 38, 7): (4, 3)}[sizes]
            assert f"does not fit the model: of {names[0]} names {names[1]} are missing" in message, (name, message)
            assert "the first is 'layers.2.bias'" in message or "the first is 'layers.0.bias'" in message


def another_model_case(folder: str) -> list[tuple[str, tuple[int, ...], str, bool]]:
    """The error where a model has another layer, or a layer of another width, and whether a weight changed."""
    from tests.harness import training

    rows = []
    for name in ("NIG", "IIG"):
        for sizes in ((13, 37, 7), (13, 38, 7), (13, 37, 31, 7)):
            engine, model = make(training.Job(sizes=sizes, empty=False), name)
            if sizes == (13, 37, 7):
                engine.save_checkpoint(f"{folder}/{name}")
            for only in (True, False) if sizes != (13, 37, 7) else ():
                before = training.whole_weights(model)
                message = error_of(engine.load_checkpoint, f"{folder}/{name}", load_module_only=only)
                rows.append((name, sizes, message, bool((training.whole_weights(model) - before).any())))
            if name == "NIG":  # a function of the user's may know what to do
                engine.load_checkpoint(f"{folder}/{name}", load_module_only=True, custom_load_fn=lambda src, dst: None)
            engine.destroy()
    return rows


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
    engine, model = make(job, "IIG")
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
    """save_16bit_model, of which the second fails half-way on the rank that writes."""
    from unittest import mock

    import torch
    from deepspeed import comm as dist

    from tests.harness import training

    job = training.Job(empty=False)
    engine, _ = make(job, "NIG")
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

    engine, _ = make(training.Job(empty=False), "NIG")
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

    engine, _ = make(training.Job(empty=False), "IIG")
    nothing = engine.load_checkpoint(folder)
    message = error_of(engine.load_checkpoint, folder, tag="some_tag")
    engine.destroy()
    return nothing, message


# What the killed rank was about to do: (function, its n-th call there), of a save under the same tag.
KILLS = [(2, "torch.save", 0), (0, "torch.save", 1), (0, "exchange", 0), (0, "Path.replace", 0), (3, "barrier", 1)]


@pytest.mark.parametrize("rank, function, call", KILLS)
def test_a_rank_killed_in_a_save(ranks: Any, tmp_path: Path, rank: int, function: str, call: int) -> None:
    """A real SIGKILL; scripts/crashes.py does it at random moments."""
    from tests.harness.ranks import RankError

    with pytest.raises(RankError, match=f"rank {rank} of 4 died .killed by SIGKILL."):
        ranks(4).run(killed_case, str(tmp_path), rank, function, call)
    published = function == "Path.replace"  # only the file latest is still to be written, and names the same tag
    for before, after in ranks(4).run(survivor_case, str(tmp_path)):
        assert ((after if published else before) == {}) and (before != {} or after != {}), (before, after)


def killed_case(folder: str, rank: int, function: str, call: int) -> None:
    """Save, go on, save again, and be killed there."""
    import os
    import signal

    import deepspeed
    import torch
    from deepspeed import comm as dist

    from deepspeed_ext.checkpoint import folder as folders
    from tests.harness import snapshots, training

    owner, name = {
        "torch.save": (torch, "save"),
        "barrier": (deepspeed.comm, "barrier"),
        "exchange": (folders, "_exchange"),
        "Path.replace": (Path, "replace"),
    }[function]
    job = training.Job(optimizer="Adam", empty=False)
    engine, model = make(job, "IIG")
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
    engine, model = make(job, "IIG")
    engine.load_checkpoint(folder)
    seen = snapshots.snapshot(engine, model, job)
    found = [snapshots.difference(torch.load(f"{folder}/seen{number}.pt"), seen) for number in range(2)]
    engine.destroy()
    return found[0], found[1]
