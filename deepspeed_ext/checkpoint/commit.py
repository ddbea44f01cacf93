# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The end of a save: all ranks have written their files, or none of them counts."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepspeed_ext.checkpoint.folder import CheckpointError, CheckpointFolder
from deepspeed_ext.checkpoint.memory_folder import forget
from deepspeed_ext.checkpoint.owned import new_token
from deepspeed_ext.comm.agreement import Channel, raise_together, run_on_all_or_raise

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig

_LOOKS = 5
_DOING = "the checkpoint could not be saved"


@dataclass(frozen=True)
class Commit:
    """What is left of a save when files have been written. See ``folder.py``.

    Attributes:
        folder: of the tag, prepared.
        first: whether this rank does the work that is done once per file system.
        shared: whether all ranks write to the same file system.
        latest: whether the file ``latest`` is to name the tag.
        memory_of: configuration of the run, whose saves in memory are older then, and removed; None to keep them.
    """

    folder: CheckpointFolder
    first: bool
    shared: bool
    latest: bool
    memory_of: "DeepSpeedConfig | None" = None

    def run(self, written: int, error: Exception | None, over: Channel) -> None:
        """Replace the checkpoint, if all ranks have written their files. Collective.

        Args:
            written: the number of files that this rank has written.
            error: why it could not write one.
            over: how ranks agree.

        Raises:
            CheckpointError: on all ranks, if one of them could not write. The previous checkpoint is untouched.
        """
        folder = self.folder
        try:
            raise_together(error, CheckpointError, over)
            total = over.all_reduce_sum(written)
            if self.shared:
                self._on_first(lambda: _require_all(folder, total), over)
            self._on_first(folder.publish, over)
            if self.latest:
                self._on_first(folder.point, over)
        except CheckpointError as failure:  # on all ranks: none may go on and read ``latest`` before it is restored
            self.revert(failure, over)
            raise
        if self.first:
            folder.clear()
        if self.memory_of is not None:
            forget(self.memory_of, folder.save_dir)

    def expect(self, waiting: Sequence[tuple[object, str, str]]) -> None:
        """Called when it is known what files will hold, before they are written beside the training. Collective.

        Args:
            waiting: content, place and path of the files of this rank.

        Raises:
            CheckpointError: on all ranks, if they cannot be written.
        """

    def prepare(self, over: Channel) -> None:
        """Make the staging folder. Collective.

        Raises:
            CheckpointError: on all ranks, if it cannot be made.
        """
        self.folder.use_token(over.broadcast_text(new_token(), 0))
        self._on_first(self.folder.prepare, over)

    def revert(self, failure: Exception, over: Channel) -> None:
        """Put back what was there. Collective.

        Raises:
            CheckpointError: on all ranks, if that fails, too.
        """
        self._on_first(self.folder.revert, over, f"{failure}; what was there could not be put back")

    def abandon(self) -> None:
        """Put back what was there, where ranks may no longer communicate, whatever has failed. Not collective."""
        if self.first:
            self.folder.abandon()

    def _on_first(self, act: Callable[[], None], over: Channel, doing: str = _DOING) -> None:
        """Do what is done once per file system, or raise on all ranks. Collective."""

        def guarded() -> None:
            try:
                act()
            except Exception:
                raise
            except BaseException as error:
                # Of the main thread it is the script's own, or Ctrl-C. Another one must not leave ranks that wait.
                if threading.current_thread() is threading.main_thread():
                    raise
                raise CheckpointError(f"{doing}: {type(error).__name__}: {error}") from error

        run_on_all_or_raise(guarded if self.first else lambda: None, doing, CheckpointError, over)


def _require_all(folder: CheckpointFolder, expected: int) -> None:
    """Wait until this rank sees all files that ranks have written; a network file system may show them late."""
    for _ in range(_LOOKS):
        found = folder.files()
        if found >= expected:
            return
        time.sleep(1.0)
    raise CheckpointError(
        f"of {expected} files that all ranks have written rank 0 sees {found} in {folder.staging}: {folder.save_dir} "
        f"must be on a file system that all nodes share, or checkpoint.use_node_local_storage must be true."
    )
