# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Writes and reads the files of a checkpoint: replaces DeepSpeed's ``TorchCheckpointEngine``."""

import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm as dist
from deepspeed.checkpoint.constants import PARAM
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.utils import logger
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor

from deepspeed_ext.checkpoint import digests
from deepspeed_ext.checkpoint.folder import CheckpointError, CheckpointFolder, error_text
from deepspeed_ext.checkpoint.owned_folder import replace_atomically, sync
from deepspeed_ext.checkpoint.trust import load_listed
from deepspeed_ext.zero.checkpoint_ranks import CheckpointWriters

if TYPE_CHECKING:
    from deepspeed_ext.checkpoint.asynchronous import AsyncSaves
    from deepspeed_ext.checkpoint.commit import Commit
    from deepspeed_ext.checkpoint.snapshots import Snapshot

HEADER = "paro"
"""Key of the header in each file of a checkpoint, which identifies the save; ``redirect_to_staging`` adds it."""


STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)
"""Configuration of schemas: without conversions, and with tensors."""


def wrap(engine: CheckpointEngine, async_saves: "Callable[[], AsyncSaves] | None" = None) -> CheckpointEngine:
    """Replace DeepSpeed's torch checkpoint engine; return any other engine unchanged, with a warning.

    Args:
        async_saves: creates the asynchronous saves; None to save synchronously.
    """
    if type(engine) is TorchCheckpointEngine:
        return CheckpointFiles(engine, async_saves and async_saves())
    logger.warning(
        f"deepspeed_ext: {type(engine).__name__} writes checkpoints (checkpoint.writer or datastates_ckpt is set). A "
        f"killed save may leave an incomplete checkpoint, and files are not checked before a load."
    )
    return engine


def holds_parameters_only(path: str) -> bool:
    """Return whether a file is a pipeline's layer, in which DeepSpeed treats every key as a parameter."""
    return Path(path).name.startswith("layer_")


def inspect(path: str | os.PathLike[str]) -> Any:
    """Return the content of a checkpoint's file; its tensors stay on disk. See ``load_listed`` for errors."""
    # A file that is not a zip archive was saved with checkpoint_serialization false, or is truncated.
    return load_listed(torch.load, path, map_location="cpu", mmap=zipfile.is_zipfile(path))


def read_checked(path: str | os.PathLike[str], *keys: str, schema: Any = None) -> Any:
    """Return the content of a checkpoint's file; its tensors stay on disk.

    Args:
        keys: required keys.
        schema: required keys with their types, as a TypedDict.

    Raises:
        CheckpointError: it is missing, cannot be read, lacks a key, or has a type or class that may not be loaded.
    """
    try:
        state = inspect(path)
        missing = [key for key in keys if not isinstance(state, dict) or key not in state]
        if missing:
            raise ValueError(f"has no {' and no '.join(missing)}")
        if schema is not None:
            TypeAdapter(schema).validate_python(state)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing.") from error
    except CheckpointError:
        raise
    except ValidationError as error:
        fields = "; ".join(f"{'.'.join(map(str, row['loc']))}: {row['msg']}" for row in error.errors()[:3])
        raise CheckpointError(f"{path} does not have the fields of this file of a checkpoint: {fields}.") from error
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read: it is truncated, damaged, or not this file of a checkpoint "
            f"({type(error).__name__}: {error}).{digests.explain(path)}"
        ) from error
    return state


def tensor_of(saved: Any) -> Tensor:
    """Return the tensor in the content of a universal checkpoint's parameter file: the content or a dict's value."""
    tensor: Tensor = saved[PARAM] if isinstance(saved, dict) else saved
    return tensor


class CheckpointFiles(TorchCheckpointEngine):
    """Writes the files of a save into its staging folder, and inspects files before a load changes anything.

    Args:
        engine: DeepSpeed's checkpoint engine, whose settings are copied, without logging them again.
        async_saves: asynchronous saves; None to save synchronously.

    Attributes:
        async_saves: the asynchronous saves of the engine; None if saves are synchronous.
        memory_commit: commit of an in-memory save, which also chooses the staging folder; None for a save to disk.
    """

    memory_commit: "Commit | None" = None

    def __init__(self, engine: TorchCheckpointEngine, async_saves: "AsyncSaves | None" = None) -> None:
        self.__dict__.update(vars(engine))
        self.async_saves = async_saves
        self._folder: CheckpointFolder | None = None
        self._header: Mapping[str, Any] = {}
        self._writers: CheckpointWriters | None = None
        self.written_paths: set[str] = set()  # files that this rank has written in this save
        self.error: Exception | None = None
        self._snapshot: Snapshot | None = None
        self._pending: list[tuple[object, str, str]] = []  # content, staging path and path of files in the snapshot
        self.headers: dict[str, Mapping[str, Any]] = {}  # path: header; empty for files saved without the extension
        self.amendments: dict[str, Mapping[str, Any]] = {}  # path: entries that replace the file's in a load

    # Writing ##########################################################################################

    @contextmanager
    def redirect_to_staging(
        self,
        folder: CheckpointFolder,
        header: Mapping[str, Any],
        writers: CheckpointWriters | None = None,
        snapshot: "Snapshot | None" = None,
    ) -> Iterator[None]:
        """Redirect files of the folder to its staging folder within this context, and add a header to them.

        If a file cannot be written, ``error`` is set and the rank continues, because the others wait for it.

        Args:
            header: the header that all files of one save share.
            writers: chooses the ranks that write files which several could write; None for all.
            snapshot: copies the content of files instead of writing them; see ``pop_pending``.
        """
        self._folder, self._header, self.written_paths, self.error = folder, header, set(), None
        self._writers, self._snapshot = writers, snapshot
        self._pending = []
        try:
            yield
        finally:
            self._folder = self._snapshot = None

    def pop_pending(self) -> list[tuple[object, str, str]]:
        """Return content, staging path and path of the pending files, and clear the list."""
        pending, self._pending = self._pending, []
        return pending

    def save(self, state_dict: object, path: str) -> None:
        """Write a file into the staging folder during a save, otherwise to ``path``, atomically."""
        if self._folder is None:
            with replace_atomically(Path(path)) as new:
                super().save(state_dict, str(new))
            return
        if self._writers is not None and self._writers.is_written_elsewhere(path):
            return
        if isinstance(state_dict, dict) and not holds_parameters_only(path):
            state_dict = {**state_dict, HEADER: dict(self._header)}
        staged_path = self._folder.staging_path(path)
        if self._snapshot is None:
            self.error = self.error or self.write(state_dict, staged_path, path)
            self.written_paths.add(path)
            return
        try:
            self._pending.append((self._snapshot.copy_content(state_dict), staged_path, path))
        except Exception as error:
            self.error = self.error or CheckpointError(
                f"{path} could not be copied to host memory: {error_text(error)}"
            )

    def write(self, state_dict: object, staging_path: str, path: str) -> CheckpointError | None:
        """Write a file; return the error if it cannot be written.

        Args:
            state_dict: its content.
            path: its final path.
        """
        try:
            self._write(state_dict, staging_path)
        except Exception as error:
            return CheckpointError(f"{path} could not be written: {error_text(error)}")
        return None

    def _write(self, state_dict: object, path: str) -> None:
        with digests.recording(path, dist.get_rank()):
            super().save(state_dict, path)
            sync(path)  # before the commit renames the folder, or a crash could leave a complete-looking checkpoint

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Create a folder; during a save, inside the staging folder."""
        super().makedirs(path if self._folder is None else self._folder.staging_path(path), exist_ok=exist_ok)

    # Asynchronous saves ###############################################################################

    def is_decoupled(self) -> bool:
        """Return whether DeepSpeed must call ``cleanup`` when the engine is destroyed."""
        return self.async_saves is not None

    def cleanup(self) -> None:
        """Wait for the running save; no save may follow. DeepSpeed calls it when the engine is destroyed.

        Raises:
            SaveFailed: on all ranks; the save has failed.
        """
        if self.async_saves is not None:
            self.async_saves.close()

    def finish(self) -> None:
        """Wait for the running save, if there is one.

        Raises:
            SaveFailed: on all ranks; the save has failed.
        """
        if self.async_saves is not None:
            self.async_saves.finish()

    # Reading ##########################################################################################

    def inspect(self, path: str | os.PathLike[str], *keys: str, schema: Any = None) -> Any:
        """Return the content of a file, and keep its header; see ``read_checked``."""
        state = read_checked(path, *keys, schema=schema)
        if not holds_parameters_only(str(path)):
            self.headers[str(path)] = state.pop(HEADER, {}) if isinstance(state, dict) else {}
        return state

    def read_header(self, folder: Path) -> Mapping[str, Any]:
        """Return the header of a checkpoint's model states; empty if there is none.

        Raises:
            CheckpointError: the file cannot be read.
        """
        experts = set(folder.glob("layer_*_expert_*"))  # excluded, since other ranks have written them
        models = sorted(set(folder.glob("*mp_rank_*_model_states.pt")) - experts)[:1]
        for path in models:
            if str(path) not in self.headers:  # not inspected yet
                self.inspect(path)
        return self.headers[str(models[0])] if models else {}

    def belongs_to_save(self, path: Path, header: Mapping[str, Any]) -> bool:
        """Return whether an inspected file belongs to the same save as a file with this header."""
        return self.headers[str(path)].get("save_id") == header.get("save_id")

    def load(self, path: str, map_location: object = None) -> Any:
        """Load a file as DeepSpeed does, without the header, and with amendments."""
        state = super().load(path, map_location=map_location)
        if isinstance(state, dict):
            state.pop(HEADER, None)
            state.update(self.amendments.get(path, {}))
        return state

    def clear_headers(self) -> None:
        """Drop headers and amendments. Called after a load."""
        self.headers.clear()
        self.amendments.clear()
