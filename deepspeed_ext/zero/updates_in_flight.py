# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Updated parameters that may still be on their way after a step, of all engines of this process."""

import weakref
from typing import Protocol


class Arriving(Protocol):
    """Updated parameters that may still be on their way after a step."""

    def wait(self) -> None:
        """Make the current stream wait for all of them."""


_all: "weakref.WeakSet[Arriving]" = weakref.WeakSet()
_whole: "weakref.WeakSet[Arriving]" = weakref.WeakSet()  # with p = N


def announce(updates: Arriving, whole: bool = False) -> None:
    """Make ``wait_for_updates`` wait for these as well, for as long as they live. ``whole``: those with p = N."""
    _all.add(updates)
    if whole:
        _whole.add(updates)


def forget(updates: Arriving) -> None:
    """Undo ``announce``."""
    _all.discard(updates)
    _whole.discard(updates)


def wait_for_updates() -> None:
    """Wait until the parameters of all engines of this process are those of their last step.

    Between a step and the next forward they may not be with ``zero_optimization.paro_overlap_updates``, and with
    p = I. Not collective. On a device with streams the current stream waits; the host does not.

    Raises:
        RuntimeError: updates did not arrive, since another rank has ended or failed.
    """
    for updates in list(_all):
        updates.wait()


def wait_for_whole_parameters() -> None:
    """Do so for engines with p = N, whose parameters anybody may read at any time."""
    for updates in list(_whole):
        updates.wait()
