# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Updated parameters that may still be in flight after a step, of all engines of this process."""

import weakref
from typing import Protocol


class Arriving(Protocol):
    """Updated parameters that may still be in flight after a step."""

    def wait(self) -> None:
        """Make the current stream wait for all of them."""


_all: "weakref.WeakSet[Arriving]" = weakref.WeakSet()
_whole: "weakref.WeakSet[Arriving]" = weakref.WeakSet()  # those with p = N


def announce(updates: Arriving, whole: bool = False) -> None:
    """Make ``wait_for_updates`` also wait for these while they are referenced. ``whole``: whether p = N."""
    _all.add(updates)
    if whole:
        _whole.add(updates)


def forget(updates: Arriving) -> None:
    """Undo ``announce``."""
    _all.discard(updates)
    _whole.discard(updates)


def wait_for_updates() -> None:
    """Wait until the parameters of all engines of this process are those of their last step.

    Between a step and the next forward they may be stale with ``zero_optimization.paro_overlap_updates``, and with
    p = I. Not collective. On a device with streams the current stream waits; the host does not.

    Raises:
        RuntimeError: updates were not received, because another rank has ended or failed.
    """
    for updates in list(_all):
        updates.wait()


def wait_for_whole_parameters() -> None:
    """Wait for updates of engines with p = N, whose parameters may be read at any time."""
    for updates in list(_whole):
        updates.wait()
