# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The commit of a save: either all ranks have written their files, or the checkpoint is not replaced."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepspeed_ext.checkpoint import digests
from deepspeed_ext.checkpoint.folder import CheckpointError, CheckpointFolder
from deepspeed_ext.checkpoint.memory_folder import remove_memory_saves
from deepspeed_ext.checkpoint.owned_folder import new_token
from deepspeed_ext.comm.agreement import Channel, raise_together, run_on_all_or_raise

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig

_POLLS = 5
_ACTION = "the checkpoint could not be saved"


@dataclass(frozen=True)
class Commit:
    """The last phase of a save, after files have been written. See ``folder.py``.

    Attributes:
        folder: the prepared folder of the tag.
        is_first: whether this rank does the work that is needed once per file system.
        is_shared: whether all ranks write to the same file system.
        names_latest: whether the file ``latest`` should name the tag.
        memory_config: configuration of the run whose in-memory saves are now outdated and removed; None to keep them.
    """

    folder: CheckpointFolder
    is_first: bool
    is_shared: bool
    names_latest: bool
    memory_config: "DeepSpeedConfig | None" = None

    def run(self, written: int, error: Exception | None, channel: Channel) -> None:
        """Replace the checkpoint, if all ranks have written their files. Collective.

        Args:
            written: the number of files that this rank has written.
            error: the error of a file that it could not write.
            channel: the channel between ranks.

        Raises:
            CheckpointError: on all ranks, if one of them could not write. The previous checkpoint is untouched.
        """
        folder = self.folder
        try:
            raise_together(error, CheckpointError, channel)  # first: the count below assumes that all files exist
            total = channel.all_reduce_sum(written)
            if self.is_shared:
                self._run_on_first(lambda: _wait_for_files(folder, total), channel)
            self._run_on_first(self._publish, channel)
            # Only now: a save that is killed in between leaves ``latest`` naming a complete folder.
            if self.names_latest:
                self._run_on_first(folder.update_latest, channel)
        except CheckpointError as failure:  # on all ranks: no rank may read ``latest`` before it is restored
            self.revert(failure, channel)
            raise
        if self.is_first:  # only now, because `revert` would need the replaced folder
            folder.clear()
        if self.memory_config is not None:
            remove_memory_saves(self.memory_config, folder.save_dir)

    def _publish(self) -> None:
        digests.collect(self.folder.staging, self.folder)
        self.folder.publish()

    def plan_files(self, pending: Sequence[tuple[object, str, str]]) -> None:
        """Called once the content of files is known, before they are written in the background. Collective.

        Args:
            pending: content, staging path and final path of this rank's files.

        Raises:
            CheckpointError: on all ranks, if they cannot be written.
        """

    def prepare(self, channel: Channel) -> None:
        """Create the staging folder. Collective.

        Raises:
            CheckpointError: on all ranks, if it cannot be created.
        """
        self.folder.set_token(channel.broadcast_text(new_token(), 0))  # all ranks must use the same staging folder
        self._run_on_first(self.folder.prepare, channel)

    def revert(self, failure: Exception, channel: Channel) -> None:
        """Restore the previous checkpoint. Collective.

        Raises:
            CheckpointError: on all ranks, if that fails as well.
        """
        self._run_on_first(self.folder.revert, channel, f"{failure}; the previous checkpoint could not be restored")

    def abandon(self) -> None:
        """Restore the previous checkpoint when ranks may no longer communicate. Not collective."""
        if self.is_first:
            self.folder.abandon()

    def _run_on_first(self, act: Callable[[], None], channel: Channel, action: str = _ACTION) -> None:
        """Run ``act`` once per file system, and raise on all ranks if it fails. Collective."""

        def guarded() -> None:
            try:
                act()
            except Exception:
                raise
            except BaseException as error:
                # In the main thread it is raised by the script or by Ctrl-C. In a writer thread, an error that is not
                # shared with the other ranks would make them wait for this rank.
                if threading.current_thread() is threading.main_thread():
                    raise
                raise CheckpointError(f"{action}: {type(error).__name__}: {error}") from error

        run_on_all_or_raise(guarded if self.is_first else lambda: None, action, CheckpointError, channel)


def _wait_for_files(folder: CheckpointFolder, expected: int) -> None:
    """Wait until this rank sees the files of all ranks, which may appear late on a network file system."""
    for _ in range(_POLLS):
        count = folder.count_files()
        if count >= expected:
            return
        time.sleep(1.0)
    raise CheckpointError(
        f"rank 0 sees {count} files in {folder.staging}, expected {expected}, which all ranks have written: "
        f"{folder.save_dir} must be on a file system that all nodes share, or set checkpoint.use_node_local_storage "
        f"to true."
    )
