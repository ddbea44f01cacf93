# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""How the files of a checkpoint are written and read: a checkpoint engine around DeepSpeed's."""

import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine import FastCheckpointEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.utils import logger

from deepspeed_ext.checkpoint.folder import CheckpointError, CheckpointFolder, sync

HEADER = "deepspeed_ext"
"""Key of each file of a checkpoint, beside DeepSpeed's: what saved it. See ``CheckpointFiles.saving``."""


def wrap(inner: CheckpointEngine) -> CheckpointEngine:
    """DeepSpeed's checkpoint engine in ours; as it is, with a warning, where it writes after ``save`` has returned."""
    if isinstance(inner, TorchCheckpointEngine | FastCheckpointEngine):
        return CheckpointFiles(inner)
    logger.warning(
        f"deepspeed_ext: checkpoints are written by {type(inner).__name__}, which goes on after a save has returned: "
        f"a save that is killed may leave an incomplete checkpoint, and files are not checked before they are loaded. "
        f"The key is checkpoint.writer."
    )
    return inner


class CheckpointFiles(CheckpointEngine):
    """Writes the files of a save into its staging folder, and reads files before anything is changed by them.

    Args:
        inner: DeepSpeed's checkpoint engine; writes and reads.
    """

    def __init__(self, inner: CheckpointEngine) -> None:
        super().__init__()
        self.name = inner.name
        self._inner = inner
        self._folder: CheckpointFolder | None = None
        self._header: Mapping[str, Any] = {}
        self._read: dict[str, Any] = {}  # path: state dict, until the load is over
        self.headers: dict[str, Mapping[str, Any]] = {}  # path: header, of files that have one
        self.error: Exception | None = None

    # Writing ##########################################################################################

    @contextmanager
    def saving(self, folder: CheckpointFolder, header: Mapping[str, Any]) -> Iterator[None]:
        """Meanwhile files of the folder are written to its staging folder, with a header.

        A file that cannot be written leaves its reason in ``error``: the rank goes on, since the others wait for it.
        """
        self._folder, self._header, self.error = folder, header, None
        try:
            yield
        finally:
            self._folder = None

    def save(self, state_dict: Any, path: str) -> None:
        """Write a file: into the staging folder, or in place of what is at ``path`` once it is complete."""
        if self._folder is None:
            new = Path(path).with_name(f".{Path(path).name}.saving.pt")
            try:
                self._write(state_dict, str(new))
                new.replace(path)
            finally:
                new.unlink(missing_ok=True)
            return
        if isinstance(state_dict, dict):
            state_dict = {**state_dict, HEADER: dict(self._header)}
        try:
            self._write(state_dict, self._folder.staged(path))
        except Exception as error:
            self.error = self.error or CheckpointError(f"{path} could not be written: {error}")

    def _write(self, state_dict: Any, path: str) -> None:
        self._inner.save(state_dict, path)
        if os.path.exists(path):  # FastCheckpointEngine leaves it to some of the ranks
            sync(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder, of the staging folder during a save."""
        self._inner.makedirs(path if self._folder is None else self._folder.staged(path), exist_ok=exist_ok)

    # Reading ##########################################################################################

    def read(self, path: str) -> Any:
        """Read a file now; ``load`` hands it out.

        Returns:
            The state dict, which is the one that DeepSpeed will get.

        Raises:
            CheckpointError: it is missing, or cannot be read.
        """
        if path not in self._read:
            self._read[path] = self._taken(path, lambda: self._inner.load(path, map_location="cpu"))
        return self._read[path]

    def load(self, path: str, map_location: Any = None) -> Any:
        """DeepSpeed's, which asks for some files twice: what was read before, or read now."""
        if path in self._read:
            return self._read[path]
        return self._without_header(path, self._inner.load(path, map_location=map_location))

    def inspect(self, path: str) -> Any:
        """Look into a file without reading the content of its tensors.

        Raises:
            CheckpointError: it is missing, or cannot be read.
        """
        return self._taken(
            path,
            # What is no zip archive was saved with checkpoint_serialization false, or is truncated.
            lambda: torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=False),
        )

    @property
    def names(self) -> list[str]:
        """Files that were read before the load."""
        return list(self._read)

    def forget(self) -> None:
        """Drop what was read: the load is over."""
        self._read.clear()
        self.headers.clear()

    def _taken(self, path: str, load: Callable[[], Any]) -> Any:
        try:
            return self._without_header(path, load())
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing.") from error
        except Exception as error:
            raise CheckpointError(
                f"{path} cannot be read: it is truncated, damaged, or no file of a checkpoint "
                f"({type(error).__name__}: {error})"
            ) from error

    def _without_header(self, path: str, state: Any) -> Any:
        if isinstance(state, dict) and HEADER in state:
            self.headers[path] = state.pop(HEADER)
        return state

    # DeepSpeed's, as they are #########################################################################

    def create(self, info: CheckpointCommitInfo) -> None:
        self._inner.create(info)

    def commit(self, info: CheckpointCommitInfo) -> Any:
        return self._inner.commit(info)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return self._inner.is_data_parallel_writer(dp_rank)

    def is_decoupled(self) -> bool:
        return self._inner.is_decoupled()

    def set_commit_info(self, info: CheckpointCommitInfo) -> None:
        self._inner.set_commit_info(info)

    def get_commit_info(self) -> Any:
        return self._inner.get_commit_info()

    def cleanup(self) -> None:
        self._inner.cleanup()

    def preserves_storage_sharing(self) -> bool:
        return self._inner.preserves_storage_sharing()
