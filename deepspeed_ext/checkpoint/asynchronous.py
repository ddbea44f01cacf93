# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Saves that go on while the training does: ``"checkpoint": {"async_save": true}``.

Note [Asynchronous saves]
    A save copies states to host memory (``snapshots.py``) and returns. A thread of each rank exchanges states with the
    others where ZeRO's order has them on another rank (p = N), and has the copies written into the staging folder. All
    threads together commit it as any save does (``commit.py``). They communicate over a channel of their own, on the
    host (``host_channel.py``). The next save, a load and the end of the engine wait for them, and so does the end
    of the process; see Note [Endings] in ``comm/background.py``.

    If a save fails on some rank, the threads of all ranks learn it, the folder is left as it was, and the first rank
    logs the error at once. It is raised by the next step, save, load or ``engine.destroy()``. A step must raise on all
    ranks or on none, for the others would wait for this one's gradients. So the threads choose the first step that no
    rank has begun, and all ranks raise in that one. A step that raises has done nothing: called again, it is taken. In
    a pipeline it would be in the middle of ``train_batch``, so there steps do not raise.

    Threads that have lost their connections cannot choose a step. The next save or load compares, over the process
    group that trains, how the threads have ended. It raises on all ranks unless the checkpoint was committed, and the
    next asynchronous save connects new threads.
"""

import math
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

from deepspeed.utils import logger
from torch import Tensor

from deepspeed_ext.checkpoint.commit import Commit
from deepspeed_ext.checkpoint.folder import CheckpointError, told
from deepspeed_ext.checkpoint.snapshots import HostBuffers, Pace, Snapshot
from deepspeed_ext.comm.agreement import (
    bounds,
    printable,
    raise_together,
    run_on_all_or_raise,
    unique_number,
    wait_on_all,
)
from deepspeed_ext.comm.background import Background, Explained, Job
from deepspeed_ext.comm.host_channel import HostChannel

Waiting = tuple[object, str, str]  # a file: what it holds, where it is written, where it will be
Write = Callable[[object, str, str], Exception | None]
_CONNECTING = "threads that write checkpoints could not be connected"


class SaveFailed(CheckpointError, Explained):
    """An asynchronous save that has failed after ``save_checkpoint`` had returned. Raised on all ranks."""


class _FailingStep:
    """The step in which all ranks raise that a save has failed.

    Steps are counted on each rank from the start of the save. Once threads choose one, a step that begins waits for
    their choice, which takes no longer than a vote.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = 0
        self._chosen: Future[float] | None = None

    def begin(self) -> bool:
        """Count a step, and return whether it must raise."""
        with self._lock:
            self._begun += 1
            step, chosen = self._begun, self._chosen
        return chosen is not None and step >= chosen.result()

    def choose(self, over: HostChannel) -> None:
        """Choose the first step that no rank has begun. Collective over the threads."""
        chosen: Future[float] = Future()
        with self._lock:
            self._chosen, step = chosen, self._begun + 1
        last = math.inf
        try:
            last = -over.all_reduce_min(-step)
        finally:
            chosen.set_result(last)


class AsyncSaves:
    """The saves of one engine, one after the other. See Note [Asynchronous saves].

    Attributes:
        buffers: host memory of snapshots.
    """

    def __init__(self) -> None:
        self.buffers = HostBuffers()
        self._channel: HostChannel | None = None
        self._background = _thread()
        self._pace = Pace(self._background)
        self._snapshot: Snapshot | None = None
        self._job: Job | None = None
        self._commit: Commit | None = None
        self._failing = _FailingStep()
        self._told = False  # whether it was raised that the save has failed
        self._connected = True  # whether this rank's thread has kept its connections

    @property
    def channel(self) -> HostChannel:
        """Return the channel of the threads. While none of them runs, the main thread may use it."""
        assert self._channel is not None
        return self._channel

    def connect(self) -> None:
        """Connect the threads of all ranks, unless they are. Collective.

        Raises:
            CheckpointError: on all ranks, if one of them cannot.
        """
        if self._channel is None:
            number = unique_number()
            self._channel = run_on_all_or_raise(lambda: HostChannel(number), _CONNECTING, CheckpointError)

    def snapshot(self, changed_by_steps: Iterable[Tensor]) -> Snapshot:
        """Return an empty snapshot. See ``Snapshot``."""
        return Snapshot(self.buffers, changed_by_steps)

    def give_up(self, snapshot: Snapshot) -> bool:
        """Forget a snapshot that will not be written; one that a thread has is left to it. Return which it is."""
        if self._snapshot is snapshot:
            return False
        snapshot.give_up()  # a device may still write what would be lent again
        self.buffers.take_back()
        return True

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
                written, error = 0, self.channel.wait_for(partial(_error_of, snapshot.complete))
                if self.channel.all_reduce_min(int(error is None)):
                    snapshot.exchange(self.channel, self._pace)
                    written, error = self.channel.wait_for(lambda: _write_all(waiting, write))
                self._run(commit, written, error)
            except BaseException as failure:
                raise self._failed(commit, failure) from failure
            finally:
                snapshot.let_go()  # or a step would wait for copies that nobody makes
                waiting.clear()
                self.channel.rest()

        self._commit, self._failing, self._pace = commit, _FailingStep(), Pace(self._background)
        self._told, self._connected = False, True
        self._snapshot, tag = snapshot, self._background.next_tag()
        try:
            self._job = self._background.add(run, tag)
        except RuntimeError:  # the system has no more threads; those of other ranks wait for this one
            logger.warning("deepspeed_ext: a checkpoint is written at once, since no thread could be started.")
            self._pace.lift()
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
        """Called before a step: let it change states, and raise if a save has failed. It communicates nothing.

        Args:
            raises: whether the step may raise.

        Raises:
            SaveFailed: on all ranks.
        """
        self.settle()
        if self._failing.begin() and raises:
            self._tell()

    def finish(self) -> None:
        """Wait for the save that runs. Collective, after each save that was started.

        Raises:
            SaveFailed: on all ranks; it has failed, and no step has raised that.
        """
        job, commit, failure = self._job, self._commit, None
        self._pace.lift()
        if job is not None:
            wait_on_all(job.wait_within)
        self.settle()
        if job is None or commit is None:
            return
        try:
            self._tell()
        except SaveFailed as error:
            failure = error
        self._forget(job)
        # Once the first rank has committed the checkpoint, another one may only have missed the last vote.
        (kept, _), (connected, _) = bounds([not (job.failed and commit.first), self._connected])
        if connected:
            if failure is not None:
                raise failure
            return
        self._disconnect()
        if not kept:
            commit.abandon()  # again: now no thread of any rank writes into the staging folder
            raise_together(failure, SaveFailed)

    def close(self) -> None:
        """Wait for this rank's part of the save that runs, and end the process groups: no save may follow.

        Raises:
            SaveFailed: on all ranks; it has failed, and no step has raised that.
        """
        self._pace.lift()
        self.settle()
        try:
            self._tell()
        finally:
            if self._job is None or self._job.over:  # a signal may have ended the wait, and the thread still votes
                if self._job is not None:
                    self._forget(self._job)
                self._disconnect()

    def _tell(self) -> None:
        """Wait for this rank's part of a save, and raise, once, that it has failed."""
        if self._job is None or self._told:
            return
        try:
            self._job.wait()
        except SaveFailed:
            self._told = True
            raise

    def _forget(self, job: Job) -> None:
        self._job = None
        self.buffers.take_back()
        if job.failed:
            self._background = _thread()  # what comes after a job that has failed would fail as it did

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    # In the thread ####################################################################################

    def _run(self, commit: Commit, written: int, error: Exception | None) -> None:
        try:
            commit.run(written, error, self.channel)
        except CheckpointError:  # on all ranks
            self._failing.choose(self.channel)
            raise

    def _failed(self, commit: Commit, failure: BaseException) -> SaveFailed:
        """Return what to raise. If the ranks can no longer vote, this one closes its connections and cleans up."""
        self._connected = isinstance(failure, CheckpointError)
        if not self._connected:
            self.channel.close()
            commit.abandon()
        text = printable(
            f"the checkpoint {commit.folder.path}, which was saved beside the training, could not be written, and "
            f"what was there is untouched: {told(failure)}"
        )
        if self.channel.rank == 0:
            logger.error(f"deepspeed_ext: {text}")
        return SaveFailed(text)


def _thread() -> Background:
    return Background(owed=True, what="a checkpoint is still being written by this rank or another one")


def _write_all(waiting: list[Waiting], write: Write) -> tuple[int, Exception | None]:
    """Write all files; return how many there are, and the first error."""
    error: Exception | None = None
    written: set[str] = set()
    while waiting:
        file = waiting.pop(0)
        error = error or _error_of(partial(write, *file))
        written.add(file[-1])
    return len(written), error


def _error_of(act: Callable[[], Exception | None]) -> Exception | None:
    """Return the error that an act returns, or what it raises: other threads wait for this one."""
    try:
        return act()
    except BaseException as cause:
        error = CheckpointError(f"the thread that writes has ended: {type(cause).__name__} {cause}".rstrip())
        error.__cause__ = cause
        return error
