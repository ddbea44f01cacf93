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
from deepspeed_ext.comm.collectives import break_off_all, tagged

# Ranks create their queues in one order, so the queues of a world have the same numbers on all ranks.
_numbers: "weakref.WeakKeyDictionary[object, Iterator[int]]" = weakref.WeakKeyDictionary()
_all: "weakref.WeakSet[Background]" = weakref.WeakSet()  # a running thread keeps its own alive
_failed: "set[Background]" = set()  # instances with a failure that has not been raised yet
THREAD = "deepspeed_ext transfers"  # the name of threads
PARAMETERS = "updated parameters of its last step are on their way to or from ranks that take that step later"
_CHANNELS = 2**15 - 1  # number of queues, and of jobs of each, with distinct tags
_JOBS = 2**16
_COMES = 10.0  # seconds that a thread may take to start on a loaded machine
_LOOKS = 0.001  # seconds between polls
# Seconds for which a thread waits for its next job: starting another thread blocks the training thread until it runs.
_LINGERS = 0.2

_SILENCE = 10.0  # seconds after which a rank logs what it waits for
_PATIENCE = 10.0  # seconds for gradients, and after an exception for transfers on a device
_JOINING = 10.0  # seconds for threads whose connections have been closed


class Owing(Protocol):
    """An object with transfers that other ranks need."""

    def synchronize(self, limit: float | None = None) -> None:
        """Make the host wait for transfers that no thread completes, at most ``limit`` seconds."""


_owing: "weakref.WeakSet[Owing]" = weakref.WeakSet()
_finalizers: list[multiprocessing.util.Finalize] = []  # of this process, if it is one of multiprocessing


class Explained(Exception):
    """An error whose message is complete."""


class Job:
    """A job of a ``Background`` thread.

    Args:
        background: the owner.
        run: the function to call.
        tag: tag of its messages.
    """

    def __init__(self, background: "Background", run: Callable[[], None], tag: int) -> None:
        self._background = background
        self._run: Callable[[], None] | None = run
        self._tag = tag
        self._over = threading.Event()
        self._failure: BaseException | None = None

    @property
    def over(self) -> bool:
        """Whether it is done, or has failed."""
        return self._over.is_set()

    @property
    def failed(self) -> bool:
        """Whether it has raised an exception."""
        return self._failure is not None

    def wait_within(self, seconds: float | None) -> bool:
        """Wait until it is done, at most ``seconds``; return whether it is done or has failed."""
        if not self.over:
            with observers.on_wait():
                self._over.wait(seconds)
        return self.over

    def wait(self) -> None:
        """Wait until it is done; raises its exception."""
        self.wait_within(None)
        if self._failure is not None:
            self._background.failure_told()
            raise self._failure

    def do(self) -> None:
        """Run the job."""
        assert self._run is not None
        try:
            with tagged(self._tag):
                self._run()
        except BaseException as error:  # whatever it is, waits for the job must return
            self._failure = error
            self._background.fail(error)
        self._end()

    def give_up(self, failure: BaseException) -> None:
        """Fail with ``failure``, without running."""
        self._failure = failure
        self._end()

    def _end(self) -> None:
        self._run = None  # free the objects that it references
        self._over.set()


class Background:
    """Runs jobs one at a time on a thread, in the order in which they were added.

    The thread ends when it has had no job for a moment, or when it is joined and no job is left.

    Messages of its jobs have tags that are the same on all ranks and differ from those of other threads: messages
    match whichever thread starts first.

    Jobs after a failed one fail with the same exception, because other ranks would wait for another message.

    Args:
        owed: whether other ranks need the jobs' messages, even if this rank's script has ended; see Note [Endings].
        what: description of the owed jobs, for log messages.
    """

    def __init__(self, owed: bool = False, what: str = PARAMETERS) -> None:
        self.owed, self.what = owed, what
        # A separate lock: a signal between lines of a condition's own ``with`` would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._jobs: deque[Job] = deque()
        self._last: Job | None = None
        self._thread: threading.Thread | None = None  # the last thread
        self._earlier: list[threading.Thread] = []  # earlier threads that have not ended
        self._takes = False  # whether the thread will run jobs that are added
        self._doing = False  # whether the thread is running a job
        self._leaves = False  # whether the thread ends as soon as there are no jobs
        self._failure: BaseException | None = None  # of the first job that failed
        self._first_tag = 1 + _channel() * _JOBS  # tag 0 is for messages outside of jobs
        self._added = itertools.count()
        _all.add(self)

    @property
    def busy(self) -> bool:
        """Whether a thread runs jobs, and has not completed all of them."""
        with self._lock:
            return self._takes and (self._doing or bool(self._jobs))

    @property
    def joined(self) -> bool:
        """Whether a caller waits for the end of the thread, for example at the end of the process."""
        return self._leaves

    def next_tag(self) -> int:
        """Return a tag for messages of a job, the same on all ranks."""
        return self._first_tag + next(self._added) % _JOBS

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
                self._last = job
                if self._takes:
                    self._changed.notify()
                else:
                    self._begin()
            except BaseException:
                if not self._takes:  # a wait for a job without a thread would never end
                    self._jobs.clear()
                    self._last = None
                raise
        return job

    def _begin(self) -> None:
        thread = threading.Thread(target=self._do_all, name=THREAD, daemon=True)
        self._earlier = [other for other in (*self._earlier, self._thread) if other is not None and other.is_alive()]
        try:
            self._takes, self._leaves, self._thread = True, False, thread
            thread.start()
        except BaseException:  # the system has no more threads, or a signal while ``start`` waits for the thread
            if not _has_begun(thread):
                self._takes, self._thread = False, None
            raise

    def wait(self) -> None:
        """Wait until all jobs are done; raises the exception of a job."""
        if self._last is not None:
            self._last.wait()

    def forget(self) -> None:
        """Stop tracking the jobs added so far. They still run, because other ranks may wait for their messages."""
        self._last = None

    def fail(self, failure: BaseException) -> None:
        """Fail all later jobs with the exception of a job. Called before waits for that job return."""
        self._failure = failure
        if self.owed:
            _failed.add(self)

    def failure_told(self) -> None:
        """Called before a wait raises the failure."""
        _failed.discard(self)

    def have_no_thread(self) -> None:
        """Reset after a fork: the child process has neither the threads nor the connections."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._jobs.clear()
        self._earlier.clear()
        self._takes = self._doing = False

    def join(self, timeout: float | None = None) -> bool:
        """End the thread when all jobs are done; wait at most ``timeout`` seconds, and return whether it has ended."""
        with self._lock:
            self._leaves = True
            self._changed.notify()
        # A thread without jobs may still run: on a loaded machine until the interpreter has shut down, and if it then
        # tries to run Python, the process ends by std::terminate.
        threads = [*self._earlier, *([] if self._thread is None else [self._thread])]
        for thread in threads:
            thread.join(timeout)
        return not any(thread.is_alive() for thread in threads)

    @torch.no_grad()  # grad mode is per thread
    def _do_all(self) -> None:
        while (job := self._next()) is not None:
            if self._failure is None:
                job.do()
            else:
                job.give_up(self._failure)

    def _next(self) -> Job | None:
        """Pop the next job; None if none was added within ``_LINGERS`` seconds."""
        with self._lock:
            if self._thread is not threading.current_thread():  # it started too late: another thread has replaced it
                return None
            self._doing = False
            if not self._jobs and not self._leaves:
                self._changed.wait(_LINGERS)
            # Under the lock: otherwise ``add`` could leave a job to a thread that ends.
            self._doing = self._takes = bool(self._jobs)
            return self._jobs.popleft() if self._jobs else None


def _has_begun(thread: threading.Thread) -> bool:
    """Return whether a thread whose ``start`` has raised runs anyway: a listed thread starts in a moment, or never."""
    deadline = time.monotonic() + _COMES
    while not thread.is_alive() and thread in threading.enumerate() and time.monotonic() < deadline:
        time.sleep(_LOOKS)
    return thread.is_alive() or (thread.ident is not None and thread not in threading.enumerate())


def _channel() -> int:
    """Return the number of a new queue, the same on all ranks."""
    if not torch.distributed.is_initialized():
        return 0
    numbers = _numbers.setdefault(torch.distributed.group.WORLD, itertools.count())
    return next(numbers) % _CHANNELS


def running() -> list[Background]:
    """Return those with unfinished jobs; the threads of the others have ended."""
    return [background for background in list(_all) if not background.join(0 if background.busy else _COMES)]


def untold_failures() -> list[BaseException]:
    """Return exceptions of owed jobs that no wait has raised, and mark them as raised."""
    failures = [background._failure for background in _failed if background._failure is not None]
    _failed.clear()
    return failures


def _forget_all() -> None:
    """Reset all state in a forked process, which has the objects, but not the threads."""
    for background in list(_all):
        background.have_no_thread()
    _all.clear()
    _failed.clear()
    _owing.clear()
    _finalizers.clear()


os.register_at_fork(after_in_child=_forget_all)


# Endings ##########################################################################################


def owe(owing: Owing) -> None:
    """Complete this object's transfers before the process ends."""
    _owing.add(owing)
    if multiprocessing.parent_process() is not None and not _finalizers:
        _finalizers.append(multiprocessing.util.Finalize(None, _end, exitpriority=0))


def complete(after_an_error: bool) -> BaseException | None:
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
        for owing in list(_owing):
            try:
                owing.synchronize(_PATIENCE if after_an_error else None)
            except Exception as error:
                failures.append(error)
        owed = [background for background in running() if background.owed]
        if not _joined(owed, _SILENCE):
            tasks = ", and ".join(sorted({background.what for background in owed if not background.join(0)}))
            logger.warning(
                f"This rank has ended, but {tasks}. It waits for that, for at most the timeout of the process group. "
                f"Ctrl-C ends it at once."
            )
            _joined(owed, None)
        if not after_an_error:
            _joined(running(), _PATIENCE)
    finally:
        _end_threads()
    _owing.clear()
    failures += untold_failures()
    return None if after_an_error or not failures else failures[0]


def _joined(some: Sequence[Background], seconds: float | None) -> bool:
    """Join all of them, at most ``seconds`` in total; return whether they have ended."""
    deadline = None if seconds is None else time.monotonic() + seconds
    # A list: a generator would stop at the first one that has not ended, and not join the others.
    return all(
        [background.join(None if deadline is None else max(0.0, deadline - time.monotonic())) for background in some]
    )


def _end_threads() -> None:
    deadline = time.monotonic() + _JOINING
    while (unfinished := running()) and time.monotonic() < deadline:
        break_off_all()
        unfinished[0].join(0.05)
    if unfinished:
        _exit(f"{len(unfinished)} thread(s) that wait for messages could not be ended")


def failed(failure: BaseException) -> str:
    """Return the message for a failed owed transfer."""
    if isinstance(failure, Explained):
        return str(failure)
    return (
        f"Updated parameters of the last step did not arrive, since another rank ended before it had taken that step, "
        f"or failed: {failure}"
    )


def _exit(why: str) -> None:
    """End the process with an error when exceptions can no longer be raised."""
    logger.error(why)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)


@atexit.register
def _end() -> None:
    # Python sets ``sys.last_type`` when it prints an uncaught exception.
    after_an_error = sys.exc_info()[0] not in (None, SystemExit) or hasattr(sys, "last_type")
    try:
        failure = complete(after_an_error)
    except KeyboardInterrupt:
        return
    if failure is not None:
        _exit(failed(failure))
