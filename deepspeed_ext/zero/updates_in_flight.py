# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Updated parameters that may still be in flight after a step, of all engines of this process."""

import weakref
from typing import Protocol


class PendingUpdates(Protocol):
    """Updated parameters that may still be in flight after a step."""

    def wait(self) -> None:
        """Make the current stream wait for all of them."""


_all: "weakref.WeakSet[PendingUpdates]" = weakref.WeakSet()
_replicated: "weakref.WeakSet[PendingUpdates]" = weakref.WeakSet()  # updates with p = N


def register(updates: PendingUpdates, replicated: bool = False) -> None:
    """Make ``wait_for_updates`` also wait for these while they are referenced. ``replicated``: whether p = N."""
    _all.add(updates)
    if replicated:
        _replicated.add(updates)


def unregister(updates: PendingUpdates) -> None:
    """Undo ``register``."""
    _all.discard(updates)
    _replicated.discard(updates)


def wait_for_updates() -> None:
    """Wait until the parameters of all engines of this process have the values of their last step.

    Between a step and the next forward they may be stale with ``zero_optimization.paro_overlap_updates``, and with
    p = I. Not collective. On a device with streams the current stream waits; the host does not.

    Raises:
        RuntimeError: updates were not received, because another rank has ended or failed.
    """
    for updates in list(_all):
        updates.wait()


def wait_for_replicated_parameters() -> None:
    """Wait for updates of engines with p = N, whose parameters may be read at any time."""
    for updates in list(_replicated):
        updates.wait()
