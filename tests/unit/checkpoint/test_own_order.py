# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in the order in which ranks hold their states: put into ZeRO's order, converted and read otherwise."""

import contextlib
import io
import secrets
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from deepspeed_ext.checkpoint import saving
from deepspeed_ext.tools import main
from tests.harness import snapshots, training
from tests.harness.tiers import deep

OWN = {"checkpoint": {"zero_order": False}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
# (strategy, group size, optimizer or expert-parallel size and optimizer, dtype, keys)
SAVES = [
    ("NIG", 2, "Adam", "fp32", {}),
    *deep(("NNI", 2, "Adam", "bf16", {}), ("NGG", 4, "Muon", "fp16", {}), ("NIG", 2, "Muon", "fp32", OFFLOAD)),
    *deep(*((name, 2, f"{size} Adam", "fp32", {}) for name, size in (("NIG", 2), ("NII", 4), ("NGG", 1)))),
    *deep(("NNG", 2, "2 Muon", "bf16", {})),
]


def plain(value: Any) -> Any:
    """Return the content of a file as values that compare: keys in order, types, dtypes, shapes and bits."""
    if isinstance(value, torch.Tensor):
        return (
            value.dtype,
            value.shape,
            value.requires_grad,
            value.detach().flatten().view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, dict):
        return [(plain(key), plain(one)) for key, one in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [plain(one) for one in value]
    return (type(value), plain(vars(value))) if hasattr(value, "__dict__") else (type(value), value)


def files_that_differ(one: Path, two: Path) -> list[str]:
    """Return the names of files that differ in two folders, or that only one of them has."""

    def contents(folder: Path) -> dict[str, Any]:
        paths = [path for path in sorted(folder.rglob("*.pt")) if path.is_file()]
        return {str(path.relative_to(folder)): plain(torch.load(path, weights_only=False)) for path in paths}

    ours, theirs = contents(one), contents(two)
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


def command(folder: Path | str) -> tuple[int, str]:
    """The exit status of the command in this process, and what it says."""
    said = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["deepspeed_ext", "zero-order", "--folder", str(folder)]),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        try:
            main.main()
        except SystemExit as error:
            return int(error.code or 0), said.getvalue()
    return 0, said.getvalue()


def save_both(engine: Any, folder: str) -> None:
    """Save in own order and in ZeRO's at once, as one save: into ``own`` and ``zeros``. Collective."""
    with mock.patch.object(secrets, "randbits", lambda bits: bits):
        engine.save_checkpoint(f"{folder}/own", tag="tag")
        with mock.patch.object(saving, "saves_in_zeros_order", lambda config: True):
            engine.save_checkpoint(f"{folder}/zeros", tag="tag")
    dist.barrier()


@pytest.mark.parametrize("name, group, kind, dtype, zero", SAVES)
def test_all_readers_find_what_is_in_zeros_order(
    ranks: Any, tmp_path: Path, name: str, group: int, kind: str, dtype: str, zero: dict[str, Any]
) -> None:
    found = ranks(4).run(readers_case, str(tmp_path), name, group, kind, dtype, zero)[0]
    assert found.pop("in own order") == found.pop("files") >= 2
    assert found == {key: [] for key in found} and len(found) >= 2, found


def readers_case(folder: str, name: str, group: int, kind: str, dtype: str, zero: dict[str, Any]) -> dict[str, Any]:
    """What differs between readings of own order, by several readers, and of ZeRO's."""
    job = snapshots.job_of_kind(kind, dtype, **OWN)
    engine, _ = training.make_engine(job, training.placed(name, group, **zero))
    snapshots.run(engine, job, snapshots.steps_of(job, 2))
    save_both(engine, folder)
    engine.destroy()
    found: dict[str, Any] = {}
    for order in ("own", "zeros"):
        snapshots.convert(f"{folder}/{order}", ours=True)
    if dist.get_rank() == 0:
        own, zeros = Path(folder, "own", "tag"), Path(folder, "zeros", "tag")
        found["in own order"] = sum("optim_states" in name for name in files_that_differ(own, zeros))
        found["files"] = len(list(own.glob("*zero_pp_rank_*_optim_states.pt")))
        if kind[0] in "12":  # of other experts each rank has all
            found["experts"] = ["in ZeRO's order"] * (not experts_in_own_order(own))
        found["universal"] = files_that_differ(Path(f"{own}_universal"), Path(f"{zeros}_universal"))
        found["zero_to_fp32"] = [] if weights_of(own) == weights_of(zeros) else ["differs"]
        real = Path(folder, "elsewhere")
        shutil.copytree(own, real)
        (real / "notes").write_text("kept")
        (real / "link").symlink_to("notes")
        shutil.rmtree(own)
        own.symlink_to(real)
        first, again = command(own), command(f"{own}/")
        found["command"] = [one for one in (first, again) if one[0]]
        found["what it says"] = [first] * ("order now" not in first[1]) + [again] * ("already" not in again[1])
        kept = own.is_symlink() and (own / "link").is_symlink() and (real / "link").read_text() == "kept"
        left = [*Path(folder).glob(".*"), *Path(folder, "own").glob(".*")]
        (real / "notes").unlink(), (real / "link").unlink()
        found["left"] = [] if kept and not left else [kept, left]
        found["put in order"] = files_that_differ(real, zeros)
    dist.barrier()
    return found


def experts_in_own_order(folder: Path) -> bool:
    """Whether experts are among what is in own order."""
    state = torch.load(next(folder.glob("*zero_pp_rank_0_*_optim_states.pt")), weights_only=False)
    places = state["optimizer_state_dict"]["paro_own_order"]
    return any(place["experts"] >= 0 for place in places if place)


def weights_of(folder: Path) -> Any:
    """What DeepSpeed's zero_to_fp32 makes of a checkpoint at once and lazily, as ``plain`` values, or a refusal."""
    found = []
    for lazy in (False, True):
        try:
            weights = get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), folder.name, lazy_mode=lazy)
            found.append(plain({name: weight.contiguous() for name, weight in weights.items()}))
        except (ValueError, RuntimeError):
            found.append("refused")
    return found


def test_a_checkpoint_that_is_not_whole_is_left_alone(ranks: Any, tmp_path: Path) -> None:
    for said, before, after in ranks(2).run(torn_case, str(tmp_path))[0]:
        assert before == after and said[0] == 2, (said, before.keys() ^ after.keys())
        assert "zero_pp_rank_1_mp_rank_00_optim_states.pt" in said[1] or "disk is full" in said[1], said
        assert "Traceback" not in said[1]


def torn_case(folder: str) -> list[tuple[tuple[int, str], dict[str, int], dict[str, int]]]:
    """Of a missing file, one of another save, and a full disk: what the command says, and times of files before and
    after it."""
    engine, _ = snapshots.after_a_step(snapshots.job_of(**OWN), "NIG")
    engine.save_checkpoint(f"{folder}/one", tag="tag")
    engine.save_checkpoint(f"{folder}/other", tag="tag")
    engine.destroy()
    rows = []
    full = mock.patch.object(torch, "save", side_effect=OSError("the disk is full"))
    for number in range(3) if dist.get_rank() == 0 else ():
        own = Path(folder, str(number), "tag")
        shutil.copytree(f"{folder}/one/tag", own)
        if number == 0:
            (own / snapshots.SHARD).unlink()
        elif number == 1:
            shutil.copy(f"{folder}/other/tag/{snapshots.SHARD}", own)
        before = {str(path): path.stat().st_mtime_ns for path in own.parent.rglob("*")}
        with full if number == 2 else contextlib.nullcontext():
            said = command(own)
        rows.append((said, before, {str(path): path.stat().st_mtime_ns for path in own.parent.rglob("*")}))
    dist.barrier()
    return rows


# What loads: (strategy or stage, group size, keys of zero_optimization, arguments of the load)
LOADS = [
    ("NGG", 4, {"reduce_bucket_size": 1000}, {}),
    ("NNG", 2, {"round_robin_gradients": True}, {}),
    ("NIG", 2, {}, {"load_optimizer_states": False}),
    ("2", 2, {}, {}),
]
MORE_LOADS = [("NNG", 1, {"reduce_bucket_size": 10**8}, {}), ("NGG", 2, OFFLOAD, {}), ("NII", 4, {}, {})]
MORE_LOADS += [("NIG", 2, {}, {"load_module_only": True}), ("NII", 2, {}, {}), ("IIG", 2, {}, {})]


@pytest.mark.parametrize("loads", [LOADS, *deep(MORE_LOADS)], ids=["some", "more"])
def test_others_load_it_right_or_say_why_not(ranks: Any, tmp_path: Path, loads: list[Any]) -> None:
    for rows in ranks(4).run(loads_case, str(tmp_path), loads):
        for (name, group, zero, given), error, changed, different in rows:
            if name in "12":
                assert error.startswith("CheckpointError") and "-m deepspeed_ext zero-order --folder" in error, error
            elif (name, group) in (("NII", 2), ("IIG", 2)) or "round_robin_gradients" in zero:
                assert error.startswith("CheckpointError") and not changed, (name, error, changed)
            elif given:
                assert not error and different and all("model" not in one for one in different), (name, different)
            else:
                assert not error and different == [], (name, zero, error, different)


def loads_case(folder: str, loads: list[Any]) -> list[tuple[Any, str, list[str], list[str]]]:
    """Of each load its error, what it has changed, and what is not as it was saved."""

    class Alike(training.Network):
        """What it trains are matrices of one shape, whose order nobody sees by their sizes."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            for parameter in self.parameters():
                parameter.requires_grad_(parameter.dim() == 2)

    job = training.Job(sizes=(24,) * 9, optimizer="Adam", empty=False, zero=training.SMALL, network=Alike, config=OWN)
    engine, model = training.make_engine(job, training.placed("NIG"))
    snapshots.run(engine, job, snapshots.steps_of(job, 2))
    engine.save_checkpoint(folder)
    wanted = snapshots.snapshot(engine, model, job)
    engine.destroy()
    rows = []
    for load in loads:
        name, group, zero, given = load
        other = job if name not in "12" else training.Job(**{**vars(job), "config": {}})
        engine, model = training.make_engine(other, training.placed(name, group, **zero))
        snapshots.run(engine, job, snapshots.steps_of(job, 1, skip=5))
        before = snapshots.snapshot(engine, model, job)
        error = snapshots.error_of(engine.load_checkpoint, folder, **given)
        after = snapshots.snapshot(engine, model, job)
        engine.destroy()
        rows.append(
            (load, error, list(snapshots.difference(before, after)), list(snapshots.difference(wanted, after)))
        )
    return rows
