# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Notifies a recorder of communications and of waits for them, while steps are recorded.

A recorder also observes communications that ``deepspeed.comm`` starts; ``is_ours`` distinguishes the two.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

from torch.distributed import ProcessGroup


class Watcher(Protocol):
    """Observes communications and waits."""

    def started(self, name: str, group: ProcessGroup, nbytes: float, handle: Any) -> Any:
        """Return a handle that replaces that of a communication that has just been started.

        Args:
            name: hop and operation.
            group: process group of the communication.
            nbytes: bytes that this rank receives.
            handle: has a method ``wait``.
        """

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context in which this thread waits for another one's communications."""


_watcher: Watcher | None = None
_ours: ContextVar[bool] = ContextVar("whether what is started is one of our communications", default=False)


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Notify ``watcher`` within this context.

    Raises:
        RuntimeError: there is another watcher.
    """
    global _watcher
    if _watcher is not None:
        raise RuntimeError(
            "communications are watched already: only one engine of a process can be recorded at a time"
        )
    _watcher = watcher
    try:
        yield
    finally:
        _watcher = None


@contextmanager
def ours() -> Iterator[None]:
    """Mark communications that this thread starts in this context as ours."""
    token = _ours.set(True)
    try:
        yield
    finally:
        _ours.reset(token)


def is_ours() -> bool:
    """Whether this thread is starting one of our communications."""
    return _ours.get()


def started(name: str, group: ProcessGroup, nbytes: float, handle: Any) -> Any:
    """Return the handle of a communication that has just been started; see ``Watcher.started``."""
    watcher = _watcher  # read once: another thread may remove it in between
    return handle if watcher is None else watcher.started(name, group, nbytes, handle)


def waiting() -> AbstractContextManager[None]:
    """Return a context in which this thread waits for another one; see ``Watcher.waiting``."""
    watcher = _watcher  # read once, as in ``started``
    return nullcontext() if watcher is None else watcher.waiting()
