# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A thread of the host that runs transfers, where no device does; see Note [Side streams] in ``transfer_queue.py``.

gloo's messages can't be asked whether they have arrived: a second hop starts when somebody has waited for the first.

Note [Endings]
    After its last step a rank may have nothing left to do, while another one has not taken that step yet: the updated
    parameters that the late rank is going to wait for need both. So a rank that ends first completes what it *owes*:
    the updates of steps that it has taken. It does so on every way out that Python sees: ``destroy_process_group``,
    which closes the connections, and otherwise ``atexit``, which comes after the end of the script, ``sys.exit``, an
    exception and SIGINT. A process of ``multiprocessing`` has its finalizers instead: one that is forked ends without
    ``atexit``.

    A save that goes on beside the training is owed as well: the others wait for this rank's files. No timeout applies
    to a disk that is slow, only to votes between the ranks.

    That ends. All that is owed has been started by this rank, and needs of the others only that they take the same
    step. If one of them dies its connections are closed, which is an error here; if one hangs the process group's
    timeout is. Stock's step would have waited for the same ranks, for as long. A device cannot be told that a peer has
    died, and stock's host does not wait for it: after an exception what is on a device gets some seconds.

    Gradients are owed to nobody, for who ends does not take their step. After a script that ends well, other ranks may
    be in the backward that has sent them, so they get some seconds. After an exception they get none: the other ranks
    wait for something that this one will not send, and would do so until it is gone.

    No thread may be left when the interpreter is torn down. Until Python 3.14 a thread that comes back to it then is
    ended by ``pthread_exit``, which unwinds through functions of torch that let nothing pass: the process aborts. So
    the connections that threads wait on are closed, and the threads are joined.

    What is owed and did not arrive is a failure of the run. If nobody has been told of it, ``destroy_process_group``
    raises it. At ``atexit`` nothing can be raised, so the process exits with status 1, and what was registered with
    ``atexit`` before the engine was made does not run.
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

from deepspeed_ext.comm import watching
from deepspeed_ext.comm.collectives import break_off_all, tagged

# Ranks make their queues in one order, so those of a world have the same numbers on all ranks.
_numbers: "weakref.WeakKeyDictionary[object, Iterator[int]]" = weakref.WeakKeyDictionary()
_all: "weakref.WeakSet[Background]" = weakref.WeakSet()  # a thread that runs keeps its own
_failed: "set[Background]" = set()  # those whose failure nobody knows of yet
THREAD = "deepspeed_ext transfers"  # the name of threads
PARAMETERS = "updated parameters of its last step are on their way to or from ranks that take that step later"
_CHANNELS = 2**15 - 1  # queues, and jobs of each, that tags tell from one another
_JOBS = 2**16
_COMES = 10.0  # seconds that a thread may take to begin on a loaded machine
_LOOKS = 0.001  # seconds
# Seconds for which a thread waits for its next job: to start another one, the host that trains waits for it to begin.
_LINGERS = 0.2

_SILENCE = 10.0  # seconds after which a rank says what it waits for
_PATIENCE = 10.0  # seconds that gradients get, and after an exception what is on a device
_JOINING = 10.0  # seconds for threads whose connections have been closed


class Owing(Protocol):
    """What has transfers that other ranks need."""

    def synchronize(self, limit: float | None = None) -> None:
        """Make the host wait for those that no thread completes; with a limit, for at most so many seconds."""


_owing: "weakref.WeakSet[Owing]" = weakref.WeakSet()
_finalizers: list[multiprocessing.util.Finalize] = []  # of this process, if it is one of multiprocessing


class Explained(Exception):
    """A failure whose text needs no other words, wherever it is told."""


class Job:
    """Something that the thread does.

    Args:
        background: whose job it is.
        run: what.
        tag: of its messages.
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
        """Whether it has raised something."""
        return self._failure is not None

    def wait_within(self, seconds: float | None) -> bool:
        """Wait until it is done, at most so many seconds; return whether it is, or has failed."""
        if not self.over:
            with watching.waiting():
                self._over.wait(seconds)
        return self.over

    def wait(self) -> None:
        """Wait until it is done; raises what it has raised."""
        self.wait_within(None)
        if self._failure is not None:
            self._background.failure_told()
            raise self._failure

    def do(self) -> None:
        """Do it."""
        assert self._run is not None
        try:
            with tagged(self._tag):
                self._run()
        except BaseException as error:
            self._failure = error
            self._background.fail(error)
        self._end()

    def give_up(self, failure: BaseException) -> None:
        """Fail by this, without doing it."""
        self._failure = failure
        self._end()

    def _end(self) -> None:
        self._run = None  # and what it refers to
        self._over.set()


class Background:
    """Does jobs one after the other, in the order in which they were added, on a thread.

    It ends when it has had none for a moment, or when somebody joins it and none is left.

    Messages of its jobs have tags that are the same on all ranks, and differ from those of other threads: whichever
    starts first, each message finds its receiver.

    What comes after a job that has failed fails by the same exception: other ranks would wait for another message.

    Args:
        owed: whether other ranks need what the jobs send, even if this rank's script has ended; see Note [Endings].
        what: what they do that is owed, for messages.
    """

    def __init__(self, owed: bool = False, what: str = PARAMETERS) -> None:
        self.owed, self.what = owed, what
        # Held by itself: a signal between lines of a condition's own ``with`` would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._jobs: deque[Job] = deque()
        self._last: Job | None = None
        self._thread: threading.Thread | None = None  # the last one
        self._earlier: list[threading.Thread] = []  # those before it that have not ended
        self._takes = False  # whether it will take what is added
        self._doing = False  # whether it has taken one that is not over
        self._leaves = False  # whether it ends as soon as there are none
        self._failure: BaseException | None = None
        self._first_tag = 1 + _channel() * _JOBS
        self._added = itertools.count()
        _all.add(self)

    @property
    def busy(self) -> bool:
        """Whether there is a thread that does what was added, and has not done all of it."""
        with self._lock:
            return self._takes and (self._doing or bool(self._jobs))

    @property
    def joined(self) -> bool:
        """Whether somebody waits for the end of the thread, as the end of the process does."""
        return self._leaves

    def next_tag(self) -> int:
        """Return a tag for messages of a job, the same on all ranks."""
        return self._first_tag + next(self._added) % _JOBS

    def add(self, run: Callable[[], None], tag: int | None = None) -> Job:
        """Give the thread something to do; returns at once.

        Args:
            run: what.
            tag: of ``next_tag``, where something of it has been started.
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
                if not self._takes:  # nobody must wait for what nobody does
                    self._jobs.clear()
                    self._last = None
                raise
        return job

    def _begin(self) -> None:
        thread = threading.Thread(target=self._do_all, name=THREAD, daemon=True)
        self._earlier = [one for one in (*self._earlier, self._thread) if one is not None and one.is_alive()]
        try:
            self._takes, self._leaves, self._thread = True, False, thread
            thread.start()
        except BaseException:  # the system has no more of them; or a signal, as ``start`` waits for it to begin
            if not _has_begun(thread):
                self._takes, self._thread = False, None
            raise

    def wait(self) -> None:
        """Wait until all is done; raises what a job has raised."""
        if self._last is not None:
            self._last.wait()

    def forget(self) -> None:
        """Nobody will wait for what was added so far; it is done all the same, since other ranks may wait."""
        self._last = None

    def fail(self, failure: BaseException) -> None:
        """Fail from now on by what a job has raised. Called before anybody who waits for the job is told."""
        self._failure = failure
        if self.owed:
            _failed.add(self)

    def failure_told(self) -> None:
        """Called when somebody who waits is told of the failure."""
        _failed.discard(self)

    def have_no_thread(self) -> None:
        """Be as new, in a process that has none of the threads, and no connections."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._jobs.clear()
        self._earlier.clear()
        self._takes = self._doing = False

    def join(self, timeout: float | None = None) -> bool:
        """Let the thread end when all is done; wait for that, at most so many seconds, and return whether it has."""
        with self._lock:
            self._leaves = True
            self._changed.notify()
        # A thread that takes no more jobs may still run: on a loaded machine until the interpreter has been torn down,
        # and an attempt to run Python then ends the process by std::terminate.
        threads = [*self._earlier, *([] if self._thread is None else [self._thread])]
        for thread in threads:
            thread.join(timeout)
        return not any(thread.is_alive() for thread in threads)

    @torch.no_grad()
    def _do_all(self) -> None:
        while (job := self._next()) is not None:
            if self._failure is None:
                job.do()
            else:
                job.give_up(self._failure)

    def _next(self) -> Job | None:
        """Take the next job; None if there is none for a moment."""
        with self._lock:
            if self._thread is not threading.current_thread():  # it began too late: another one is at work
                return None
            self._doing = False
            if not self._jobs and not self._leaves:
                self._changed.wait(_LINGERS)
            self._doing = self._takes = bool(self._jobs)
            return self._jobs.popleft() if self._jobs else None


def _has_begun(thread: threading.Thread) -> bool:
    """Whether a thread whose ``start`` has raised runs all the same: a listed one begins in a moment, or never."""
    ends = time.monotonic() + _COMES
    while not thread.is_alive() and thread in threading.enumerate() and time.monotonic() < ends:
        time.sleep(_LOOKS)
    return thread.is_alive() or (thread.ident is not None and thread not in threading.enumerate())


def _channel() -> int:
    """Return the number of a new queue, the same on all ranks."""
    if not torch.distributed.is_initialized():
        return 0
    numbers = _numbers.setdefault(torch.distributed.group.WORLD, itertools.count())
    return next(numbers) % _CHANNELS


def running() -> list[Background]:
    """Return those that have something to do; the threads of the others have ended."""
    return [background for background in list(_all) if not background.join(0 if background.busy else _COMES)]


def untold_failures() -> list[BaseException]:
    """Return what jobs that other ranks need have raised, where nobody has been told; it is told by this."""
    failures = [background._failure for background in _failed if background._failure is not None]
    _failed.clear()
    return failures


def _forget_all() -> None:
    """Called in a forked process, which has the objects, but not the threads."""
    for background in list(_all):
        background.have_no_thread()
    _all.clear()
    _failed.clear()
    _owing.clear()
    _finalizers.clear()


os.register_at_fork(after_in_child=_forget_all)


# Endings ##########################################################################################


def owe(owing: Owing) -> None:
    """Complete what this object has under way before the process ends."""
    _owing.add(owing)
    if multiprocessing.parent_process() is not None and not _finalizers:
        _finalizers.append(multiprocessing.util.Finalize(None, _end, exitpriority=0))


def complete(after_an_error: bool) -> BaseException | None:
    """Complete what other ranks need of this one, and end all threads that run transfers. See Note [Endings].

    Args:
        after_an_error: whether the script ends by an exception.

    Returns:
        The first failure of what was owed, if nobody has been told of it and the script does not end by another one.

    Raises:
        KeyboardInterrupt: a signal has ended the wait. Threads have been ended all the same.
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
            left = ", and ".join(sorted({one.what for one in owed if not one.join(0)}))
            logger.warning(
                f"This rank has ended, but {left}. It waits for that, for at most the timeout of the process group. "
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
    """Wait for all of them, for at most so many seconds; return whether they have ended."""
    end = None if seconds is None else time.monotonic() + seconds
    return all([one.join(None if end is None else max(0.0, end - time.monotonic())) for one in some])


def _end_threads() -> None:
    end = time.monotonic() + _JOINING
    while (left := running()) and time.monotonic() < end:
        break_off_all()
        left[0].join(0.05)
    if left:
        _exit(f"{len(left)} thread(s) that wait for messages could not be ended")


def failed(failure: BaseException) -> str:
    """Say that what was owed did not arrive."""
    if isinstance(failure, Explained):
        return str(failure)
    return (
        f"Updated parameters of the last step did not arrive, since another rank ended before it had taken that step, "
        f"or failed: {failure}"
    )


def _exit(why: str) -> None:
    """End the process with an error, where nothing can be raised any more."""
    logger.error(why)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)


@atexit.register
def _end() -> None:
    # The second is set when Python prints an exception that nobody has caught.
    after_an_error = sys.exc_info()[0] not in (None, SystemExit) or hasattr(sys, "last_type")
    try:
        failure = complete(after_an_error)
    except KeyboardInterrupt:
        return
    if failure is not None:
        _exit(failed(failure))
