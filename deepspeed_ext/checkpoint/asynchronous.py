# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Asynchronous saves, which overlap with training: ``"checkpoint": {"async_save": true}``.

Note [Asynchronous saves]
    A save copies states to host memory (``snapshots.py``) and returns. On each rank, a writer thread exchanges states
    that ZeRO's order assigns to other ranks (p = N), and writes the copies into the staging folder. The threads commit
    it together, as in any save (``commit.py``). They communicate over their own host channel (``host_channel.py``).
    The next save, a load, the end of the engine, and the end of the process wait for them; see Note [Endings] in
    ``comm/worker_thread.py``.

    If a save fails on any rank, it fails on the threads of all ranks. The folder keeps its content, and the first rank
    logs the error immediately. The next step, save, load or ``engine.destroy()`` raises it. A step must raise on all
    ranks or on none, because the other ranks would wait for this rank's gradients. So the threads choose the first
    step that no rank has begun, and all ranks raise in it. A step that raises has changed nothing and can be called
    again. In a pipeline, steps do not raise, since they run in the middle of ``train_batch``.

    Threads that lost their connections cannot choose a step. The next save or load compares the outcomes of all
    threads over the training process group. It raises on all ranks unless the checkpoint was committed. The next
    asynchronous save connects new threads.
"""

import math
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

from deepspeed.utils import logger
from torch import Tensor

from deepspeed_ext.checkpoint.commit import Commit
from deepspeed_ext.checkpoint.folder import CheckpointError, error_text
from deepspeed_ext.checkpoint.snapshots import HostBuffers, Pace, Snapshot
from deepspeed_ext.comm.agreement import (
    bounds,
    printable,
    raise_together,
    run_on_all_or_raise,
    unique_number,
    wait_for_all_ranks,
)
from deepspeed_ext.comm.host_channel import HostChannel
from deepspeed_ext.comm.worker_thread import ExplainedError, Job, WorkerThread

PendingFile = tuple[object, str, str]  # a pending file: content, path in the staging folder, final path
Write = Callable[[object, str, str], Exception | None]
_CONNECTING = "the checkpoint writer threads could not connect"


class SaveFailed(CheckpointError, ExplainedError):
    """An asynchronous save that failed after ``save_checkpoint`` returned. Raised on all ranks."""


class _FailingStep:
    """The step in which all ranks raise the error of a failed save.

    Each rank counts steps from the start of the save. While threads choose the step, a step that begins waits for
    the result, for at most one all-reduce.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = 0
        self._choice: Future[float] | None = None

    def begin(self) -> bool:
        """Count a step, and return whether it must raise."""
        with self._lock:  # counts the step and reads the future atomically: `choose` votes on this count
            self._begun += 1
            step, choice = self._begun, self._choice
        return choice is not None and step >= choice.result()

    def choose(self, channel: HostChannel) -> None:
        """Choose the first step that no rank has begun. Collective over the writer threads."""
        choice: Future[float] = Future()
        with self._lock:
            self._choice, step = choice, self._begun + 1
        last = math.inf
        try:
            last = -channel.all_reduce_min(-step)
        finally:
            choice.set_result(last)  # also after an error: the training thread may be waiting in `begin`


class AsyncSaves:
    """Runs the asynchronous saves of one engine, one at a time. See Note [Asynchronous saves].

    Attributes:
        buffers: host memory of snapshots.
    """

    def __init__(self) -> None:
        self.buffers = HostBuffers()
        self._channel: HostChannel | None = None
        self._background = _new_worker()
        self._pace = Pace(self._background)
        self._snapshot: Snapshot | None = None
        self._job: Job | None = None
        self._commit: Commit | None = None
        self._failing_step = _FailingStep()
        self._error_raised = False  # whether this rank has raised the error of the save
        self._connected = True  # whether this rank's thread still has its connections

    @property
    def channel(self) -> HostChannel:
        """Return the channel of the writer threads. The main thread may use it while no save is running."""
        assert self._channel is not None
        return self._channel

    def connect(self) -> None:
        """Connect the threads of all ranks, unless already connected. Collective.

        Raises:
            CheckpointError: on all ranks, if one of them fails.
        """
        if self._channel is None:
            number = unique_number()
            self._channel = run_on_all_or_raise(lambda: HostChannel(number), _CONNECTING, CheckpointError)

    def snapshot(self, changed_by_steps: Iterable[Tensor]) -> Snapshot:
        """Return an empty snapshot. See ``Snapshot``."""
        return Snapshot(self.buffers, changed_by_steps)

    def discard(self, snapshot: Snapshot) -> bool:
        """Discard a snapshot unless a thread is writing it; return whether it was discarded."""
        if self._snapshot is snapshot:
            return False
        snapshot.discard()  # waits for the device, which may still write into buffers that would be reused
        self.buffers.reclaim()
        return True

    def start(self, snapshot: Snapshot, pending: list[PendingFile], write: Write, commit: Commit) -> None:
        """Write a snapshot and commit it while training continues. Returns immediately.

        Args:
            snapshot: a sealed snapshot.
            pending: files whose content is in the snapshot; emptied.
            write: writes one file, and returns the error if it fails.
            commit: commits the folder of these files.
        """

        def run() -> None:
            try:
                written, error = 0, self.channel.wait_for(partial(_catch_error, snapshot.complete_copies))
                # Without this vote, ranks with a complete snapshot would wait for messages of a rank without one.
                if self.channel.all_reduce_min(int(error is None)):
                    snapshot.exchange(self.channel, self._pace)
                    written, error = self.channel.wait_for(lambda: _write_all(pending, write))
                self._commit_files(commit, written, error)
            except BaseException as failure:
                raise self._fail(commit, failure) from failure
            finally:
                snapshot.release()  # after an error, the next step would wait forever for copies
                pending.clear()
                self.channel.end_worker()

        self._commit, self._failing_step, self._pace = commit, _FailingStep(), Pace(self._background)
        self._error_raised, self._connected = False, True
        # Set before the thread starts, so that `discard` never reclaims buffers that the thread uses.
        self._snapshot, tag = snapshot, self._background.next_tag()
        try:
            self._job = self._background.add(run, tag)
        except RuntimeError:  # no more threads: write in this one, because those of other ranks wait for this rank
            logger.warning("deepspeed_ext: could not start a checkpoint writer thread; this save is synchronous.")
            self._pace.lift()
            self._job = Job(self._background, run, tag)
            self._job.run()
        except BaseException:  # a signal while the thread starts
            if not self._background.busy:
                self._snapshot = None  # no thread will copy it, so `wait_for_copies` must not wait for it
            raise

    def wait_for_copies(self) -> None:
        """Wait until the snapshot no longer reads the optimizer's states."""
        if self._snapshot is not None:
            self._snapshot.wait_for_copies()
            self._snapshot = None

    def before_step(self, raises: bool = True) -> None:
        """Wait for pending copies before a step, and raise if a save has failed. No communication.

        Args:
            raises: whether the step may raise.

        Raises:
            SaveFailed: on all ranks.
        """
        self.wait_for_copies()
        if self._failing_step.begin() and raises:
            self._raise_error()

    def finish(self) -> None:
        """Wait for the running save. Collective, and must be called after every started save.

        Raises:
            SaveFailed: on all ranks; the save failed, and no step has raised it.
        """
        job, commit, failure = self._job, self._commit, None
        self._pace.lift()  # training waits from here on, so the exchange need not leave the links to it
        if job is not None:
            wait_for_all_ranks(job.wait_within)  # not one collective, because a disk may be slower than its timeout
        self.wait_for_copies()
        if job is None or commit is None:
            return
        try:
            self._raise_error()
        except SaveFailed as error:
            failure = error
        self._release_job(job)
        # If the first rank has committed the checkpoint, a failure on another rank is only a missed last vote.
        (committed, _), (connected, _) = bounds([not (job.failed and commit.is_first), self._connected])
        if connected:
            if failure is not None:
                raise failure
            return
        self._disconnect()
        if not committed:
            commit.abandon()  # again, since only now no thread of any rank writes into the staging folder
            raise_together(failure, SaveFailed)

    def close(self) -> None:
        """Wait for this rank's part of the running save, and close the channel. No save may follow.

        Raises:
            SaveFailed: on all ranks; the save failed, and no step has raised it.
        """
        self._pace.lift()
        self.wait_for_copies()
        try:
            self._raise_error()
        finally:
            if self._job is None or self._job.is_done:  # after a signal, the thread may still be using the channel
                if self._job is not None:
                    self._release_job(self._job)
                self._disconnect()

    def _raise_error(self) -> None:
        """Wait for this rank's part of a save, and raise its error once."""
        if self._job is None or self._error_raised:
            return
        try:
            self._job.wait()
        except SaveFailed:
            self._error_raised = True
            raise

    def _release_job(self, job: Job) -> None:
        self._job = None
        self.buffers.reclaim()
        if job.failed:
            self._background = _new_worker()  # later jobs of a failed worker would all fail

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    # Writer thread ####################################################################################

    def _commit_files(self, commit: Commit, written: int, error: Exception | None) -> None:
        try:
            commit.run(written, error, self.channel)
        except CheckpointError:  # raised on all ranks, so all of them vote
            self._failing_step.choose(self.channel)
            raise

    def _fail(self, commit: Commit, failure: BaseException) -> SaveFailed:
        """Return the error to raise. If ranks can no longer communicate, close this rank's channel and clean up."""
        self._connected = isinstance(failure, CheckpointError)
        if not self._connected:
            self.channel.close()  # first, so that the other ranks fail immediately instead of waiting
            commit.abandon()
        text = printable(
            f"the asynchronous save of the checkpoint {commit.folder.path} failed; existing files are unchanged: "
            f"{error_text(failure)}"
        )
        if self.channel.rank == 0:
            logger.error(f"deepspeed_ext: {text}")
        return SaveFailed(text)


def _new_worker() -> WorkerThread:
    return WorkerThread(
        finish_before_exit=True, description="a checkpoint is still being written by this rank or another rank"
    )


def _write_all(pending: list[PendingFile], write: Write) -> tuple[int, Exception | None]:
    """Write all files; return the number of files and the first error."""
    error: Exception | None = None
    written: set[str] = set()
    while pending:
        file = pending.pop(0)
        error = error or _catch_error(partial(write, *file))
        written.add(file[-1])
    return len(written), error


def _catch_error(act: Callable[[], Exception | None]) -> Exception | None:
    """Return the error that ``act`` returns or raises, because threads of other ranks wait for this one."""
    try:
        return act()
    except BaseException as cause:
        error = CheckpointError(f"the checkpoint writer thread has ended: {type(cause).__name__} {cause}".rstrip())
        error.__cause__ = cause
        return error
