# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Saves that go on while the training does: ``"checkpoint": {"async_save": true}``.

Note [Asynchronous saves]
    A save copies states to host memory (``snapshots.py``) and returns. A thread of each rank writes the copies into
    the staging folder, and all threads together commit it as any save does (``commit.py``): they agree over a process
    group of their own, on the host. The next save, a load and the end of the engine wait for them, and so does the
    end of the process; see Note [Endings] in ``comm/endings.py``.

    If a save fails on some rank, the threads of all ranks learn it, the folder is left as it was, and the first rank
    logs the error at once. It is raised by the next step, save, load or ``engine.destroy()``. A step must raise on all
    ranks or on none, for the others would wait for this one's gradients: so in each step, while a save runs, ranks
    begin to ask one another whether all threads have ended, and read the answer in the next step, which waits for
    nothing. A step that raises has done nothing: called again, it is taken. In a pipeline it would be in the middle of
    ``train_batch``, so there steps do not raise.
"""

from collections.abc import Callable, Iterable

from deepspeed.utils import logger
from torch import Tensor

from deepspeed_ext.checkpoint.commit import Commit
from deepspeed_ext.checkpoint.folder import CheckpointError, told
from deepspeed_ext.checkpoint.snapshots import HostBuffers, Snapshot
from deepspeed_ext.comm.background import Background, Explained, Job
from deepspeed_ext.comm.host_channel import HostChannel, Vote

Waiting = tuple[object, str, str]  # a file: what it holds, where it is written, where it will be
Write = Callable[[object, str, str], Exception | None]


class SaveFailed(CheckpointError, Explained):
    """An asynchronous save that has failed after ``save_checkpoint`` had returned. Raised on all ranks."""


class AsyncSaves:
    """The saves of one engine, one after the other. See Note [Asynchronous saves].

    Making one is collective over all ranks.

    Attributes:
        buffers: host memory of snapshots.
    """

    def __init__(self) -> None:
        self.buffers = HostBuffers()
        self._of_threads, self._of_steps = HostChannel(), HostChannel()
        self._background = _thread()
        self._snapshot: Snapshot | None = None
        self._job: Job | None = None
        self._vote: Vote | None = None

    def snapshot(self, changed_by_steps: Iterable[Tensor]) -> Snapshot:
        """Return an empty snapshot. See ``Snapshot``."""
        return Snapshot(self.buffers, changed_by_steps)

    def give_up(self, snapshot: Snapshot) -> None:
        """Forget a snapshot that will not be written; one that a thread has is left to it."""
        if self._snapshot is not snapshot:
            snapshot.give_up()  # a device may still write what would be lent again
            self.buffers.take_back()

    def start(self, snapshot: Snapshot, waiting: list[Waiting], write: Write, commit: Commit) -> None:
        """Write a snapshot and commit it, beside the training. Returns at once.

        Args:
            snapshot: sealed.
            waiting: files that have been taken into it; emptied.
            write: writes one, and returns why it could not be written, if so.
            commit: of their folder.
        """

        def run() -> None:
            try:
                written, error = _written(snapshot, waiting, write)
                commit.run(written, error, self._of_threads)
            except BaseException as failure:
                if self._of_threads.rank == 0:
                    logger.error(f"deepspeed_ext: {_says(commit, failure)}")
                raise SaveFailed(_says(commit, failure)) from failure
            finally:
                snapshot.let_go()  # or a step would wait for copies that nobody makes
                waiting.clear()

        self._snapshot, tag = snapshot, self._background.next_tag()
        try:
            self._job = self._background.add(run, tag)
        except RuntimeError:  # the system has no more threads; those of other ranks wait for this one
            logger.warning("deepspeed_ext: a checkpoint is written at once, since no thread could be started.")
            self._job = Job(self._background, run, tag)
            self._job.do()
        except BaseException:  # a signal, as the thread begins
            if not self._background.busy:
                self._snapshot = None  # nobody will copy it
            raise

    def settle(self) -> None:
        """Let states of the optimizer be changed or moved from now on."""
        if self._snapshot is not None:
            self._snapshot.settle()
            self._snapshot = None

    def at_step(self, raises: bool = True) -> None:
        """Called before a step: let it change states, and raise if a save has failed. Collective while one runs.

        Args:
            raises: whether the step may raise.

        Raises:
            SaveFailed: on all ranks.
        """
        self.settle()
        if self._job is None or not raises:
            return
        if self._vote is not None and self._vote.result():
            self.finish()
            return
        self._vote = self._of_steps.start_min(int(self._job.over))

    def finish(self) -> None:
        """Wait for the save that runs. On all ranks or on none.

        Raises:
            SaveFailed: on all ranks; it has failed.
        """
        self.settle()
        if self._job is None:
            return
        if self._vote is not None:
            self._vote.result()
            self._vote = None
        try:
            self._job.wait()
        except SaveFailed:
            self._background = _thread()  # what comes after a job that has failed would fail as it did
            raise
        finally:
            if self._job.over:  # a signal may have ended the wait, and the thread still writes from the buffers
                self._job = None
                self.buffers.take_back()

    def close(self) -> None:
        """Wait for the save that runs, and end the process groups: no save may follow.

        Raises:
            SaveFailed: on all ranks; it has failed.
        """
        try:
            self.finish()
        finally:
            if self._job is None:  # a signal may have ended the wait, and the thread still agrees with the others
                self._of_threads.close()
                self._of_steps.close()


def _thread() -> Background:
    return Background(owed=True, what="a checkpoint is still being written by this rank or another one")


def _written(snapshot: Snapshot, waiting: list[Waiting], write: Write) -> tuple[int, Exception | None]:
    """Write all files; return how many there are, and the first error. It never raises: other threads would wait."""
    error: Exception | None = None
    written: set[str] = set()
    try:
        snapshot.complete()
        while waiting:
            content, place, path = waiting.pop(0)
            error = error or write(content, place, path)
            written.add(path)
    except BaseException as found:
        error = CheckpointError(f"the thread that writes has ended: {type(found).__name__} {found}".rstrip())
        error.__cause__ = found
    return len(written), error


def _says(commit: Commit, failure: BaseException) -> str:
    return (
        f"the checkpoint {commit.folder.path}, which was saved beside the training, could not be written, and what "
        f"was there is untouched: {told(failure)}"
    )
