# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A host thread that runs transfers on devices without streams; see Note [Side streams] in ``transfer_queue.py``.

gloo cannot test whether a message has been received: a second hop can start only after a wait for the first.

Note [Endings]
    After its last step, a rank may have nothing left to do while another one has not taken that step yet. The late
    rank will wait for updated parameters, and their transfer needs both ranks. So a rank that ends first completes the
    transfers that it *owes*: the updates of its completed steps. It does so on every exit path that Python sees:
    ``destroy_process_group``, which closes the connections, and otherwise ``atexit``, which runs after the end of the
    script, ``sys.exit``, an exception, and SIGINT. A ``multiprocessing`` process uses its finalizers instead, because
    a forked process ends without ``atexit``.

    An asynchronous save is owed as well: the other ranks wait for this rank's files. No timeout applies to a slow
    disk, only to votes between the ranks.

    These waits are bounded. This rank has started all that it owes, and the others only have to take the same step. If
    a rank dies, its connections are closed, which raises an error here; if it hangs, the process group's timeout does.
    Stock's step would have waited for the same ranks, and as long. A device cannot detect that a peer has died, and
    stock's host does not wait for it: after an exception, transfers on a device get some seconds.

    Gradients are not owed, because a rank that ends does not take their step. After a script that ends normally, other
    ranks may be in the backward that has sent them, so they get some seconds. After an exception they get none: the
    other ranks wait for data that this one will not send, and would do so until it has exited.

    No thread may be left when the interpreter shuts down. Until Python 3.14, a thread that returns to it then is ended
    by ``pthread_exit``, which unwinds through functions of torch that must not throw: the process aborts. So the
    connections that threads wait on are closed, and the threads are joined.

    If owed data is not received, the run has failed. If no caller has seen that error, ``destroy_process_group``
    raises it. ``atexit`` cannot raise, so the process exits with status 1, and functions that were registered with
    ``atexit`` before the engine was created do not run.
"""

import atexit
import itertools
import logging
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from deepspeed.utils import logger

from deepspeed_ext.comm import observers
from deepspeed_ext.comm.collectives import close_all_connections, tagged

# Ranks create their worker threads in one order, so the threads of a world have the same numbers on all ranks.
_worker_numbers: "weakref.WeakKeyDictionary[object, Iterator[int]]" = weakref.WeakKeyDictionary()
_workers: "weakref.WeakSet[WorkerThread]" = weakref.WeakSet()  # a running thread keeps its own alive
_failed_workers: "set[WorkerThread]" = set()  # threads with a failure that no wait has raised
THREAD_NAME = "deepspeed_ext transfers"
_UPDATED_PARAMETERS = "updated parameters of its last step are still being exchanged with ranks that take it later"
_WORKERS = 2**15 - 1  # number of threads, and of jobs of each, with distinct tags
_JOBS_PER_WORKER = 2**16
_START_TIMEOUT = 10.0  # seconds that a thread may take to start on a loaded machine
_POLL = 0.001  # seconds between polls
# Seconds that a thread waits for its next job: starting another thread blocks the training thread until it runs.
_IDLE_TIMEOUT = 0.2

_WARN_AFTER = 10.0  # seconds after which a rank logs what it waits for
_GRACE_PERIOD = 10.0  # seconds for gradients, and after an exception for transfers on a device
_JOIN_TIMEOUT = 10.0  # seconds for threads whose connections have been closed


class ExitTask(Protocol):
    """An object with transfers that other ranks need."""

    def synchronize(self, limit: float | None = None) -> None:
        """Make the host wait for transfers that no thread completes, at most ``limit`` seconds."""


_exit_tasks: "weakref.WeakSet[ExitTask]" = weakref.WeakSet()
_finalizers: list[multiprocessing.util.Finalize] = []  # of this process, if it is one of multiprocessing


class ExplainedError(Exception):
    """An error whose message is complete."""


class Job:
    """A job of a ``WorkerThread``.

    Args:
        worker: the thread that runs it.
        run: the function to call.
        tag: tag of its messages.
    """

    def __init__(self, worker: "WorkerThread", run: Callable[[], None], tag: int) -> None:
        self._worker = worker
        self._run: Callable[[], None] | None = run
        self._tag = tag
        self._done = threading.Event()
        self._failure: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether it is done, or has failed."""
        return self._done.is_set()

    @property
    def failed(self) -> bool:
        """Whether it has raised an exception."""
        return self._failure is not None

    def wait_within(self, seconds: float | None) -> bool:
        """Wait at most ``seconds`` until it is done; return whether it is done or has failed."""
        if not self.is_done:
            with observers.on_wait():
                self._done.wait(seconds)
        return self.is_done

    def wait(self) -> None:
        """Wait until it is done; raises its exception."""
        self.wait_within(None)
        if self._failure is not None:
            self._worker.mark_failure_raised()
            raise self._failure

    def run(self) -> None:
        """Run the job."""
        assert self._run is not None
        try:
            with tagged(self._tag):
                self._run()
        except BaseException as error:  # even KeyboardInterrupt: waits for the job must return
            self._failure = error
            self._worker.fail(error)  # before ``_end``: a waiter marks the failure as raised
        self._end()

    def fail_with(self, failure: BaseException) -> None:
        """Fail with ``failure``, without running."""
        self._failure = failure
        self._end()

    def _end(self) -> None:
        self._run = None  # free the objects that it references
        self._done.set()


class WorkerThread:
    """Runs jobs one at a time on a thread, in the order in which they were added.

    The thread ends when it has had no job for a moment, or when it is joined and no job is left.

    Messages of its jobs have tags that are the same on all ranks and differ from those of other threads: messages
    match whichever thread starts first.

    Jobs after a failed one fail with the same exception, because other ranks would wait for another message.

    Args:
        finish_before_exit: whether other ranks need the jobs' messages, even if this rank's script has ended; see
            Note [Endings].
        description: description of these jobs, for log messages.
    """

    def __init__(self, finish_before_exit: bool = False, description: str = _UPDATED_PARAMETERS) -> None:
        self.finish_before_exit, self.description = finish_before_exit, description
        # A separate lock: a signal between lines of a condition's own ``with`` would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._jobs: deque[Job] = deque()
        self._last_job: Job | None = None
        self._thread: threading.Thread | None = None  # the last thread
        self._earlier_threads: list[threading.Thread] = []  # earlier threads that have not ended
        self._accepts_jobs = False  # whether the thread will run jobs that are added
        self._runs_job = False  # whether the thread is running a job
        self._ends_when_idle = False  # whether the thread ends as soon as there are no jobs
        self._failure: BaseException | None = None  # of the first job that failed
        self._first_tag = 1 + _next_worker_number() * _JOBS_PER_WORKER  # tag 0 is for messages outside of jobs
        self._added = itertools.count()
        _workers.add(self)

    @property
    def busy(self) -> bool:
        """Whether a thread runs jobs, and has not completed all of them."""
        with self._lock:
            return self._accepts_jobs and (self._runs_job or bool(self._jobs))

    @property
    def joined(self) -> bool:
        """Whether a caller waits for the end of the thread, for example at the end of the process."""
        return self._ends_when_idle

    def next_tag(self) -> int:
        """Return a tag for messages of a job, the same on all ranks."""
        return self._first_tag + next(self._added) % _JOBS_PER_WORKER

    def add(self, run: Callable[[], None], tag: int | None = None) -> Job:
        """Add a job; returns at once.

        Args:
            run: the function to call.
            tag: from ``next_tag``, if communications with it have been started; by default a new tag.
        """
        job = Job(self, run, self.next_tag() if tag is None else tag)
        with self._lock:
            try:
                self._jobs.append(job)
                self._last_job = job
                if self._accepts_jobs:
                    self._changed.notify()
                else:
                    self._start_thread()
            except BaseException:
                if not self._accepts_jobs:  # a wait for a job without a thread would never end
                    self._jobs.clear()
                    self._last_job = None
                raise
        return job

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run_jobs, name=THREAD_NAME, daemon=True)
        self._earlier_threads = [
            other for other in (*self._earlier_threads, self._thread) if other is not None and other.is_alive()
        ]
        try:
            self._accepts_jobs, self._ends_when_idle, self._thread = True, False, thread
            thread.start()
        except BaseException:  # the system has no more threads, or a signal while ``start`` waits for the thread
            if not _has_started(thread):
                self._accepts_jobs, self._thread = False, None
            raise

    def wait(self) -> None:
        """Wait until all jobs are done; raises the exception of a job."""
        if self._last_job is not None:
            self._last_job.wait()

    def untrack_jobs(self) -> None:
        """Stop tracking the jobs added so far. They still run, because other ranks may wait for their messages."""
        self._last_job = None

    def fail(self, failure: BaseException) -> None:
        """Fail all later jobs with the exception of a job. Called before waits for that job return."""
        self._failure = failure
        if self.finish_before_exit:
            _failed_workers.add(self)

    def mark_failure_raised(self) -> None:
        """Record that a wait raises the failure, so that the end of the process does not raise it again."""
        _failed_workers.discard(self)

    def reset_after_fork(self) -> None:
        """Reset after a fork: the child process has neither the threads nor the connections."""
        # New locks: another thread of the parent process may have held the old ones.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._jobs.clear()
        self._earlier_threads.clear()
        self._accepts_jobs = self._runs_job = False

    def join(self, timeout: float | None = None) -> bool:
        """End the thread when all jobs are done; wait at most ``timeout`` seconds, and return whether it has ended."""
        with self._lock:
            self._ends_when_idle = True
            self._changed.notify()
        # A thread without jobs may still run: on a loaded machine until the interpreter has shut down, and if it then
        # tries to run Python, the process ends by std::terminate.
        threads = [*self._earlier_threads, *([] if self._thread is None else [self._thread])]
        for thread in threads:
            thread.join(timeout)
        return not any(thread.is_alive() for thread in threads)

    @torch.no_grad()  # grad mode is per thread
    def _run_jobs(self) -> None:
        while (job := self._next_job()) is not None:
            if self._failure is None:
                job.run()
            else:
                job.fail_with(self._failure)

    def _next_job(self) -> Job | None:
        """Pop the next job; None if none was added within ``_IDLE_TIMEOUT`` seconds."""
        with self._lock:
            if self._thread is not threading.current_thread():  # it started too late: another thread has replaced it
                return None
            self._runs_job = False
            if not self._jobs and not self._ends_when_idle:
                self._changed.wait(_IDLE_TIMEOUT)
            # Under the lock: otherwise ``add`` could leave a job to a thread that ends.
            self._runs_job = self._accepts_jobs = bool(self._jobs)
            return self._jobs.popleft() if self._jobs else None


def _has_started(thread: threading.Thread) -> bool:
    """Return whether a thread whose ``start`` has raised runs anyway: a listed thread starts in a moment, or never."""
    deadline = time.monotonic() + _START_TIMEOUT
    while not thread.is_alive() and thread in threading.enumerate() and time.monotonic() < deadline:
        time.sleep(_POLL)
    return thread.is_alive() or (thread.ident is not None and thread not in threading.enumerate())


def _next_worker_number() -> int:
    """Return the number of a new worker thread, the same on all ranks."""
    if not torch.distributed.is_initialized():
        return 0
    numbers = _worker_numbers.setdefault(torch.distributed.group.WORLD, itertools.count())
    return next(numbers) % _WORKERS


def running_workers() -> list[WorkerThread]:
    """Return the worker threads with unfinished jobs; all others have ended."""
    return [worker for worker in list(_workers) if not worker.join(0 if worker.busy else _START_TIMEOUT)]


def unraised_failures() -> list[BaseException]:
    """Return the exceptions that no wait has raised, of threads that finish before exit, and mark them as raised."""
    failures = [worker._failure for worker in _failed_workers if worker._failure is not None]
    _failed_workers.clear()
    return failures


def _reset_after_fork() -> None:
    """Reset all state in a forked process, which has the objects, but not the threads."""
    for worker in list(_workers):
        worker.reset_after_fork()
    _workers.clear()
    _failed_workers.clear()
    _exit_tasks.clear()
    _finalizers.clear()


os.register_at_fork(after_in_child=_reset_after_fork)


# Endings ##########################################################################################


def register_exit_task(task: ExitTask) -> None:
    """Register an object whose transfers must be complete before the process ends."""
    _exit_tasks.add(task)
    if multiprocessing.parent_process() is not None and not _finalizers:
        _finalizers.append(multiprocessing.util.Finalize(None, _end, exitpriority=0))


def complete_before_exit(after_an_error: bool) -> BaseException | None:
    """Complete transfers that other ranks need, and end all threads that run transfers. See Note [Endings].

    Args:
        after_an_error: whether the script ends by an exception.

    Returns:
        The first failure of an owed transfer, if it has not been raised and the script does not end by an exception.

    Raises:
        KeyboardInterrupt: a signal has ended the wait. Threads have been ended anyway.
    """
    failures: list[BaseException] = []
    try:
        for task in list(_exit_tasks):
            try:
                task.synchronize(_GRACE_PERIOD if after_an_error else None)
            except Exception as error:
                failures.append(error)
        workers = [worker for worker in running_workers() if worker.finish_before_exit]
        if not _join_all(workers, _WARN_AFTER):
            tasks = ", and ".join(sorted({worker.description for worker in workers if not worker.join(0)}))
            logger.warning(
                f"This rank is exiting, but {tasks}. Waiting for at most the timeout of the process group; press "
                f"Ctrl-C to exit now."
            )
            _join_all(workers, None)
        if not after_an_error:
            _join_all(running_workers(), _GRACE_PERIOD)
    finally:
        _end_threads()  # also after Ctrl-C: a thread that is left would abort the process
    _exit_tasks.clear()
    failures += unraised_failures()
    return None if after_an_error or not failures else failures[0]


def _join_all(workers: Sequence[WorkerThread], seconds: float | None) -> bool:
    """Join all of them, at most ``seconds`` in total; return whether they have ended."""
    deadline = None if seconds is None else time.monotonic() + seconds
    # A list: a generator would stop at the first one that has not ended, and not join the others.
    return all(
        [worker.join(None if deadline is None else max(0.0, deadline - time.monotonic())) for worker in workers]
    )


def _end_threads() -> None:
    deadline = time.monotonic() + _JOIN_TIMEOUT
    while (unfinished := running_workers()) and time.monotonic() < deadline:
        close_all_connections()
        unfinished[0].join(0.05)
    if unfinished:
        _exit_with_error(f"could not end {len(unfinished)} thread(s) that wait for messages")


def failure_message(failure: BaseException) -> str:
    """Return the message for a failed owed transfer."""
    if isinstance(failure, ExplainedError):
        return str(failure)
    return (
        f"Updated parameters of the last step were not received, because another rank failed, or exited before it "
        f"took that step: {failure}"
    )


def _exit_with_error(reason: str) -> None:
    """End the process with an error when exceptions can no longer be raised."""
    logger.error(reason)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)


@atexit.register
def _end() -> None:
    # Python sets ``sys.last_type`` when it prints an uncaught exception.
    after_an_error = sys.exc_info()[0] not in (None, SystemExit) or hasattr(sys, "last_type")
    try:
        failure = complete_before_exit(after_an_error)
    except KeyboardInterrupt:
        return
    if failure is not None:
        _exit_with_error(failure_message(failure))
