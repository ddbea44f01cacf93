# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Writes a save in memory to disk, when a restarted run loads: see Note [Saves in memory] in ``in_memory.py``."""

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed import comm as dist
from deepspeed.utils import log_dist

from deepspeed_ext.checkpoint.commit import Commit
from deepspeed_ext.checkpoint.exporting import finish_last
from deepspeed_ext.checkpoint.files import inspect
from deepspeed_ext.checkpoint.folder import LATEST, LATEST_UNIVERSAL, CheckpointError, CheckpointFolder, sync
from deepspeed_ext.checkpoint.in_memory import RUN
from deepspeed_ext.checkpoint.memory_folder import Identity, MemoryFolder, Part
from deepspeed_ext.checkpoint.model_key import model_key
from deepspeed_ext.comm.agreement import WORLD, all_gather_texts, any_rank, broadcast_text, run_on_all_or_raise
from deepspeed_ext.deepspeed_types import Engine

_SHOWN = 8  # missing files that a warning names


@dataclass(frozen=True)
class _Place:
    """Where a file is: the rank that wrote it, the first of the ranks that see it, and in which folder there."""

    writer: int
    first: int
    folder: str


def bring_back(engine: Engine, load_dir: str) -> None:
    """Write the newest save in memory into ``load_dir``, if it is newer than the one that ``latest`` names.

    Collective over all ranks. Without a folder of memory anywhere, it is two small all-reduces.

    Raises:
        CheckpointError: on all ranks; it could not be written. What was there is untouched.
    """
    folder = MemoryFolder(engine._config, load_dir)
    parts = run_on_all_or_raise(folder.parts, f"{folder.path} cannot be read", CheckpointError)
    if not any_rank(bool(parts)):
        return
    disk = json.loads(broadcast_text(json.dumps(_disk(engine, load_dir)) if dist.get_rank() == 0 else "", 0))
    model = model_key(engine)
    places = all_gather_texts(folder.place if parts else "")
    first = bool(parts) and places.index(folder.place) == dist.get_rank()
    texts = all_gather_texts(json.dumps([part.to_json() for part in parts] if first else []))
    saves = _gathered([[Part.from_json(one) for one in json.loads(text)] for text in texts])
    newer = sorted((save for save in saves if save.step > disk["step"]), key=lambda save: (-save.step, -save.time))
    whole: Identity | None = None
    for save in newer:
        if (save.run, save.model) != (disk["run"], model):
            _warn(
                f"the save in memory of {save.tag} is of another {'model' if save.run == disk['run'] else 'run'} than "
                f"the one that is loaded from {load_dir}, and is left alone."
            )
        elif len(saves[save]) == save.files:
            whole = save
            break
        else:
            _tell_missing(folder, save, saves[save], texts)
    if whole is not None:
        _write(engine, load_dir, folder, whole, saves[whole], places)
    elif newer:
        found = f"the last save on disk, of step {disk['step']}, is loaded" if disk["step"] >= 0 else "none is on disk"
        _warn(f"no save in memory can be loaded from {load_dir}: {found}.")


def _disk(engine: Engine, load_dir: str) -> dict[str, Any]:
    """Return the run in a folder, and the step of the checkpoint that a load takes from it; -1 if there is none."""
    run = Path(load_dir, RUN)
    step: float = -1
    try:
        tag = Path(load_dir, LATEST).read_text().strip()
        saved = Path(load_dir, CheckpointFolder(load_dir, tag).present_tag())
        models = (path for path in sorted(saved.glob("*mp_rank_*_model_states.pt")) if "layer_" not in path.name)
        step = int(inspect(next(models))["global_steps"])
        if engine.load_universal_checkpoint() and Path(load_dir, LATEST_UNIVERSAL).is_file():
            step = 2**62  # the user's own takes precedence
    except Exception as error:
        if not isinstance(error, FileNotFoundError):
            _warn(f"the step of the latest checkpoint in {load_dir} cannot be read: {type(error).__name__}: {error}")
    return {"run": run.read_text().strip() if run.is_file() else "", "step": step}


def _gathered(parts: list[list[Part]]) -> dict[Identity, dict[str, _Place]]:
    """Return where each file of each save is: the one of the first rank, if several have written it.

    Args:
        parts: of the first rank of each node what is there; of other ranks nothing.
    """
    found: dict[Identity, dict[str, _Place]] = {}
    for rank, there in enumerate(parts):
        for part in there:
            files = found.setdefault(part.save, {})
            for name, writer in part.files.items():
                place = _Place(writer, rank, part.folder)
                if name not in files or writer < files[name].writer:
                    files[name] = place
    return found


def _tell_missing(folder: MemoryFolder, save: Identity, found: Mapping[str, _Place], texts: list[str]) -> None:
    """Warn that files of a save are gone. Collective."""
    has = next(rank for rank, text in enumerate(texts) if str(save.number) in text)
    names = json.loads(broadcast_text(json.dumps(folder.names(save.number)) if dist.get_rank() == has else "", has))
    missing = sorted(set(names) - found.keys())
    more = ", ..." if len(missing) > _SHOWN else ""
    _warn(
        f"of the save in memory of {save.tag} {len(missing)} of {save.files} files are missing, since nodes with all "
        f"their copies are gone, or it was never completed: {', '.join(missing[:_SHOWN])}{more}."
    )


def _write(
    engine: Engine, load_dir: str, folder: MemoryFolder, save: Identity, files: Mapping[str, _Place], places: list[str]
) -> None:
    """Write a save into ``load_dir``, each file once, as ``engine.save_checkpoint`` would have done. Collective."""
    finish_last(engine)
    target = CheckpointFolder(load_dir, save.tag)
    commit = Commit(target, dist.get_rank() == 0, True, True, after=folder.forget)
    commit.prepare(WORLD)
    written, error = 0, None
    try:
        for number, (name, place) in enumerate(sorted(files.items())):
            there = [rank for rank, other in enumerate(places) if other == places[place.first]]
            if there[number % len(there)] == dist.get_rank():
                _copy(folder.path / place.folder / name, Path(target.staged(str(target.path / name))))
                written += 1
    except Exception as failure:
        error = CheckpointError(f"the save in memory of {save.tag} could not be written to {load_dir}: {failure}")
    commit.run(written, error, WORLD)
    log_dist(f"deepspeed_ext: {target.path} was written from memory of the nodes.", ranks=[0])


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    sync(target)


def _warn(text: str) -> None:
    log_dist(f"deepspeed_ext: {text}", ranks=[0], level=logging.WARNING)
