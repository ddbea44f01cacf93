# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""How a process ends while transfers are under way.

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
import logging
import multiprocessing
import multiprocessing.util
import os
import sys
import time
import weakref
from collections.abc import Sequence
from typing import Protocol

from deepspeed.utils import logger

from deepspeed_ext.comm.background import Background, Explained, running, untold_failures
from deepspeed_ext.comm.pairwise import break_off_all

_SILENCE = 10.0  # seconds after which a rank says what it waits for
_PATIENCE = 10.0  # seconds that gradients get, and after an exception what is on a device
_JOINING = 10.0  # seconds for threads whose connections have been closed


class Owing(Protocol):
    """What has transfers that other ranks need."""

    def synchronize(self, limit: float | None = None) -> None:
        """Make the host wait for those that no thread completes; with a limit, for at most so many seconds."""


_owing: "weakref.WeakSet[Owing]" = weakref.WeakSet()
_finalizers: list[multiprocessing.util.Finalize] = []  # of this process, if it is one of multiprocessing


def _forget_all() -> None:
    """Called in a forked process, which has none of the connections."""
    _owing.clear()
    _finalizers.clear()


os.register_at_fork(after_in_child=_forget_all)


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
