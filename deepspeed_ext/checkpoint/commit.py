# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The commit of a save: either all ranks have written their files, or the checkpoint is not replaced."""

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
    """The last phase of a save, after files have been written. See ``folder.py``.

    Attributes:
        folder: the prepared folder of the tag.
        first: whether this rank does the work that is needed once per file system.
        shared: whether all ranks write to the same file system.
        latest: whether the file ``latest`` should name the tag.
        memory_of: configuration of the run whose in-memory saves are now outdated and removed; None to keep them.
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
            error: the error of a file that it could not write.
            over: the channel between ranks.

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
            if self.latest:  # only now: a save that is killed in between leaves ``latest`` naming a complete folder
                self._on_first(folder.point, over)
        except CheckpointError as failure:  # on all ranks: no rank may read ``latest`` before it is restored
            self.revert(failure, over)
            raise
        if self.first:  # only now, because `revert` would need the replaced folder
            folder.clear()
        if self.memory_of is not None:
            forget(self.memory_of, folder.save_dir)

    def expect(self, waiting: Sequence[tuple[object, str, str]]) -> None:
        """Called once the content of files is known, before they are written in the background. Collective.

        Args:
            waiting: content, staging path and final path of this rank's files.

        Raises:
            CheckpointError: on all ranks, if they cannot be written.
        """

    def prepare(self, over: Channel) -> None:
        """Create the staging folder. Collective.

        Raises:
            CheckpointError: on all ranks, if it cannot be created.
        """
        self.folder.use_token(over.broadcast_text(new_token(), 0))  # all ranks must use the same staging folder
        self._on_first(self.folder.prepare, over)

    def revert(self, failure: Exception, over: Channel) -> None:
        """Restore the previous checkpoint. Collective.

        Raises:
            CheckpointError: on all ranks, if that fails as well.
        """
        self._on_first(self.folder.revert, over, f"{failure}; what was there could not be put back")

    def abandon(self) -> None:
        """Restore the previous checkpoint when ranks may no longer communicate. Not collective."""
        if self.first:
            self.folder.abandon()

    def _on_first(self, act: Callable[[], None], over: Channel, doing: str = _DOING) -> None:
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
                raise CheckpointError(f"{doing}: {type(error).__name__}: {error}") from error

        run_on_all_or_raise(guarded if self.first else lambda: None, doing, CheckpointError, over)


def _require_all(folder: CheckpointFolder, expected: int) -> None:
    """Wait until this rank sees the files of all ranks, which may appear late on a network file system."""
    for _ in range(_LOOKS):
        count = folder.files()
        if count >= expected:
            return
        time.sleep(1.0)
    raise CheckpointError(
        f"of {expected} files that all ranks have written rank 0 sees {count} in {folder.staging}: {folder.save_dir} "
        f"must be on a file system that all nodes share, or checkpoint.use_node_local_storage must be true."
    )
