# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Writes a save in memory to disk when a restarted run loads: see Note [Saves in memory] in ``in_memory.py``."""

import functools
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed import comm as dist

from deepspeed_ext.checkpoint import digests
from deepspeed_ext.checkpoint.commit import Commit
from deepspeed_ext.checkpoint.experts import model_hash
from deepspeed_ext.checkpoint.export import finish_last_export
from deepspeed_ext.checkpoint.files import inspect
from deepspeed_ext.checkpoint.folder import LATEST, LATEST_UNIVERSAL, CheckpointError, CheckpointFolder
from deepspeed_ext.checkpoint.memory_folder import RUN, Identity, MemoryFolder, Part, age_text, read_run
from deepspeed_ext.checkpoint.owned_folder import sync
from deepspeed_ext.comm.agreement import WORLD, all_gather_texts, any_rank, broadcast_from_first, run_on_all_or_raise
from deepspeed_ext.console import warn_on_rank_0
from deepspeed_ext.deepspeed_types import Engine


@dataclass(frozen=True)
class _FileLocation:
    """Location of a file: the rank that wrote it, the first rank that can read it, and the folder there."""

    writer: int
    first: int
    folder: str


def restore_from_memory(engine: Engine, load_dir: str) -> None:
    """Write the newest save in memory into ``load_dir``, if it is newer than the checkpoint that ``latest`` names.

    Collective over all ranks. Without any memory folder, it takes only a few small collectives.

    Raises:
        CheckpointError: on all ranks; it could not be written. Existing files are untouched.
    """
    run = broadcast_from_first(lambda: read_run(load_dir), f"{Path(load_dir, RUN)} cannot be read", CheckpointError)
    folder = MemoryFolder(engine._config, load_dir, run)
    others = folder.describe_others(same=True) if dist.get_rank() == 0 else []
    if others:
        warn_on_rank_0(f"ignoring the saves in memory of another run in {load_dir}: {'; '.join(others)}.")
    action = f"{folder.path} cannot be read"
    parts = run_on_all_or_raise(lambda: folder.read_parts() if run else [], action, CheckpointError)
    if not any_rank(bool(parts)):
        return
    on_first = broadcast_from_first(
        lambda: json.dumps(_read_disk(load_dir)), f"{load_dir} cannot be read", CheckpointError
    )
    disk = json.loads(on_first)
    location = run_on_all_or_raise(lambda: folder.location if parts else "", action, CheckpointError)
    locations = all_gather_texts(location)
    first = bool(parts) and locations.index(location) == dist.get_rank()
    texts = all_gather_texts(json.dumps([part.to_json() for part in parts] if first else []))
    saves = _locate_files([[Part.from_json(part) for part in json.loads(text)] for text in texts])
    newer = sorted((save for save in saves if save.step > disk["step"]), key=lambda save: (-save.step, -save.time))
    newest = _newest_complete(engine, load_dir, {save: saves[save] for save in newer}, disk)
    on_disk = f"of step {disk['step']}" if disk["step"] >= 0 else "none"
    if newest is not None:
        warn_on_rank_0(
            f"resuming {newest.tag} from a save in memory of step {newest.step}, {age_text(newest.time)} old, in "
            f"{folder.path}; the last checkpoint on disk is {on_disk}."
        )
        _write(engine, load_dir, folder, newest, saves[newest], locations)
    elif newer:
        warn_on_rank_0(f"no save in memory of {load_dir} can be loaded; the last checkpoint on disk is {on_disk}.")


def _newest_complete(
    engine: Engine, load_dir: str, saves: Mapping[Identity, Mapping[str, _FileLocation]], disk: Mapping[str, Any]
) -> Identity | None:
    """Return the first complete save that continues the checkpoint on disk; warn of skipped ones. Collective.

    Args:
        saves: the newest first, each with its files.
        disk: from ``_read_disk``.
    """
    model = model_hash(engine)
    for save, files in saves.items():
        reason = _mismatch(save, model, disk["latest"])
        if engine.load_universal_checkpoint() and disk["universal"]:
            reason = f"{LATEST_UNIVERSAL} takes precedence"
        if reason:
            warn_on_rank_0(f"this load from {load_dir} ignores the save in memory of {save.tag}: {reason}.")
        elif len(files) == save.files:
            return save
        else:
            warn_on_rank_0(
                f"the save in memory of {save.tag} lacks {save.files - len(files)} of {save.files} files: nodes with "
                f"all their copies were lost, or the save was not completed."
            )
    return None


def _mismatch(save: Identity, model: str, latest: str) -> str:
    """Return why a save in memory does not continue the checkpoint on disk; empty if it does."""
    if save.model != model:
        return "it belongs to another model"
    if save.latest != latest:
        return (
            f"{LATEST} named {save.latest or 'nothing'} at the time of the save, and names {latest or 'nothing'} now"
        )
    return ""


def _read_disk(load_dir: str) -> dict[str, Any]:
    """Return the tag in a folder's file ``latest``, and the checkpoint's step; -1 if there is none."""
    latest, step = "", -1
    try:
        latest = Path(load_dir, LATEST).read_text().strip()
        saved = Path(load_dir, CheckpointFolder(load_dir, latest).actual_tag())
        models = (path for path in sorted(saved.glob("*mp_rank_*_model_states.pt")) if "layer_" not in path.name)
        step = int(inspect(next(models))["global_steps"])
    except Exception as error:
        if not isinstance(error, FileNotFoundError):
            warn_on_rank_0(
                f"the step of the latest checkpoint in {load_dir} cannot be read: {type(error).__name__}: {error}"
            )
    return {"latest": latest, "step": step, "universal": Path(load_dir, LATEST_UNIVERSAL).is_file()}


def _locate_files(parts: list[list[Part]]) -> dict[Identity, dict[str, _FileLocation]]:
    """Return the location of each file of each save. If several ranks wrote a file, the lowest rank's is chosen.

    Args:
        parts: for each rank, its node's parts; empty except for the first rank of each node.
    """
    saves: dict[Identity, dict[str, _FileLocation]] = {}
    for rank, node_parts in enumerate(parts):
        for part in node_parts:
            files = saves.setdefault(part.save, {})
            for name, writer in part.files.items():
                location = _FileLocation(writer, rank, part.folder)
                if name not in files or writer < files[name].writer:
                    files[name] = location
    return saves


def _write(
    engine: Engine,
    load_dir: str,
    folder: MemoryFolder,
    save: Identity,
    files: Mapping[str, _FileLocation],
    locations: list[str],
) -> None:
    """Write a save into ``load_dir``, each file once, as ``engine.save_checkpoint`` would have. Collective."""
    finish_last_export(engine)
    target = CheckpointFolder(load_dir, save.tag)
    commit = Commit(target, dist.get_rank() == 0, True, True, engine._config)
    commit.prepare(WORLD)
    written, error, digests_of = 0, None, functools.cache(folder.saved_digests)
    try:
        for number, (name, location) in enumerate(sorted(files.items())):
            # Each file is copied by one of the ranks that can read it; files take turns among these ranks.
            readers = [rank for rank, other in enumerate(locations) if other == locations[location.first]]
            if readers[number % len(readers)] == dist.get_rank():
                staged = Path(target.staging_path(str(target.path / name)))
                _copy(folder.path / location.folder / name, staged, digests_of(location.folder).get(name))
                written += 1
    except Exception as failure:  # raised by the commit, because the other ranks wait there
        error = CheckpointError(f"the save in memory of {save.tag} could not be written to {load_dir}: {failure}")
    commit.run(written, error, WORLD)


def _copy(source: Path, target: Path, digest: str | None) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with digests.recording(str(target), dist.get_rank()):
        shutil.copyfile(source, target)
        sync(target)
    if digest not in (None, digests.written_digest(target)):
        raise CheckpointError(f"{source} has changed since the save: its digest differs")
