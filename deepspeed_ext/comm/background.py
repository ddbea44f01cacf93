# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A thread of the host that runs transfers, where no device does; see Note [Side streams] in ``transfer_queue.py``.

gloo's messages can't be asked whether they have arrived: a second hop starts when somebody has waited for the first.
"""

import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import torch

from deepspeed_ext.comm import watching
from deepspeed_ext.comm.pairwise import tagged

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
        owed: whether other ranks need what the jobs send, even if this rank's script has ended; see Note [Endings] in
            ``endings.py``.
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


os.register_at_fork(after_in_child=_forget_all)
