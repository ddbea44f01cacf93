# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A thread of the host that runs transfers, where no device does; see Note [Relays] in ``schedule.py``.

gloo's messages can't be asked whether they have arrived: a second hop starts when somebody has waited for the first.
"""

import atexit
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import torch

from deepspeed_ext.comm.pairwise import tagged

_PATIENCE = 10.0  # seconds that an ending process gives what others may still read

# Ranks make their schedules in one order, so those of a world have the same numbers on all ranks.
_numbers: "weakref.WeakKeyDictionary[object, Iterator[int]]" = weakref.WeakKeyDictionary()
_running: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()
_CHANNELS = 2**15 - 1  # schedules, and jobs of each, that tags tell from one another
_JOBS = 2**16


class Job:
    """Something that the thread does.

    Args:
        run: what.
        tag: of its messages.
    """

    def __init__(self, run: Callable[[], None], tag: int) -> None:
        self._run: Callable[[], None] | None = run
        self._tag = tag
        self._over = threading.Event()
        self._failure: BaseException | None = None

    def wait(self) -> None:
        """Wait until it is done; raises what it has raised."""
        self._over.wait()
        if self._failure is not None:
            raise self._failure

    def do(self) -> None:
        """Do it."""
        assert self._run is not None
        try:
            with tagged(self._tag):
                self._run()
        except BaseException as error:
            self._failure = error
        self._end()

    def give_up(self, failure: BaseException) -> None:
        """Have it fail by this, without doing it."""
        self._failure = failure
        self._end()

    @property
    def failure(self) -> BaseException | None:
        """What it has raised."""
        return self._failure

    def _end(self) -> None:
        self._run = None  # and what it refers to
        self._over.set()


class Background:
    """Does jobs one after the other, in the order in which they were added, on a thread that ends when none is left.

    Messages of its jobs have tags that are the same on all ranks, and differ from those of other threads: whichever
    starts first, each message finds its receiver.

    What comes behind a job that has failed fails by the same exception: other ranks would wait for another message.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: deque[Job] = deque()
        self._last: Job | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._first_tag = 1 + _channel() * _JOBS
        self._added = itertools.count()

    def next_tag(self) -> int:
        """Return a tag for messages of a job, the same on all ranks."""
        return self._first_tag + next(self._added) % _JOBS

    def add(self, run: Callable[[], None], tag: int | None = None) -> Job:
        """Have something done; returns at once.

        Args:
            run: what.
            tag: of ``next_tag``, where something of it has been started.
        """
        job = Job(run, self.next_tag() if tag is None else tag)
        with self._lock:
            self._jobs.append(job)
            self._last = job
            if self._thread is None:
                self._thread = threading.Thread(target=self._do_all, name="deepspeed_ext transfers", daemon=True)
                _running.add(self._thread)
                self._thread.start()
        return job

    def wait(self) -> None:
        """Wait until all is done; raises what a job has raised."""
        if self._last is not None:
            self._last.wait()

    def forget(self) -> None:
        """Nobody will wait for what was added so far; it is done all the same, since other ranks may wait."""
        self._last = None

    @torch.no_grad()
    def _do_all(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._thread = None
                    return
                job = self._jobs.popleft()
            if self._failure is None:
                job.do()
                self._failure = job.failure
            else:
                job.give_up(self._failure)


def _channel() -> int:
    """Return the number of a new schedule, the same on all ranks."""
    if not torch.distributed.is_initialized():
        return 0
    numbers = _numbers.setdefault(torch.distributed.group.WORLD, itertools.count())
    return next(numbers) % _CHANNELS


@atexit.register
def _finish() -> None:
    """Give other ranks what they may wait for. The interpreter must not end under a thread that comes back to it."""
    end = time.monotonic() + _PATIENCE
    for thread in list(_running):
        thread.join(max(0.0, end - time.monotonic()))
