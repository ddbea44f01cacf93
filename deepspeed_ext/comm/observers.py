# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Notifies a recorder of communications and of waits for them, while steps are recorded.

A recorder also observes communications that ``deepspeed.comm`` starts; ``is_package_communication`` distinguishes them
from ours.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

from torch.distributed import ProcessGroup


class Observer(Protocol):
    """Observes communications and waits."""

    def on_start(self, name: str, group: ProcessGroup, nbytes: float, handle: Any) -> Any:
        """Return a handle that replaces that of a communication that has just been started.

        Args:
            name: hop and operation.
            nbytes: bytes that this rank receives.
            handle: has a method ``wait``.
        """

    def on_wait(self) -> AbstractContextManager[None]:
        """Return a context in which this thread waits for another one's communications."""


_observer: Observer | None = None
_from_package: ContextVar[bool] = ContextVar(
    "whether this thread is starting one of our communications", default=False
)


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Notify ``observer`` within this context.

    Raises:
        RuntimeError: there is another observer.
    """
    global _observer
    if _observer is not None:
        raise RuntimeError(
            "communications are already being recorded: only one engine of a process can be recorded at a time"
        )
    _observer = observer
    try:
        yield
    finally:
        _observer = None


@contextmanager
def package_communication() -> Iterator[None]:
    """Mark communications that this thread starts in this context as ours."""
    token = _from_package.set(True)
    try:
        yield
    finally:
        _from_package.reset(token)


def is_package_communication() -> bool:
    """Return whether this thread is starting one of our communications."""
    return _from_package.get()


def on_start(name: str, group: ProcessGroup, nbytes: float, handle: Any) -> Any:
    """Return the handle of a communication that has just been started; see ``Observer.on_start``."""
    observer = _observer  # read once: another thread may remove it in between
    return handle if observer is None else observer.on_start(name, group, nbytes, handle)


def on_wait() -> AbstractContextManager[None]:
    """Return a context in which this thread waits for another one; see ``Observer.on_wait``."""
    observer = _observer  # read once, as in ``on_start``
    return nullcontext() if observer is None else observer.on_wait()
