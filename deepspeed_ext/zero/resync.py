# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Full updates of parameters, instead of quantized differences.

Note [Resync]
    Differences are quantized, and the next difference contains the error of the last one. So parameters stay close to
    the optimizer's weights while only steps change either. After any other change a difference may be as large as a
    parameter, and parameters would be wrong for some steps. So the next update is sent in full: after DeepSpeed's
    ``safe_set_full_...``, ``load_state_dict``, and ``GatheredParameters`` with a modifier rank. Also sent in full are
    updates outside of a step, as after a load; updates before a save, so that a checkpoint has the same weights as a
    run that continues; and one of every few updates, because scripts may change parameters in unknown ways.

    A script may load on one rank and broadcast to others, so requests of all ranks are reduced in each step, by an
    all-reduce of one element. It is started when a step begins, and read when the step has been queued on the device.
    The host then waits only for the device's gradients, not for its step.
"""

import weakref

import torch
from deepspeed.accelerator import get_accelerator
from torch.distributed import ProcessGroup

from deepspeed_ext.comm.agreement import all_reduce_max
from deepspeed_ext.strategy import Placement
from deepspeed_ext.zero.context import Context

_all: "weakref.WeakSet[Resync]" = weakref.WeakSet()


def ask_all() -> None:
    """Request that the next update of each engine of this process is sent in full."""
    for resync in _all:
        resync.ask()


class _Vote:
    """Whether any rank of a group has requested a resync; copied to the host asynchronously."""

    def __init__(self, asked: bool, group: ProcessGroup | None) -> None:
        result = all_reduce_max(torch.full((1,), float(asked), device=get_accelerator().current_device_name()), group)
        self._found, self._there = result, None
        if not get_accelerator().is_synchronized_device():
            self._found = get_accelerator().pin_memory(torch.empty(1))
            self._found.copy_(result, non_blocking=True)
            self._there = get_accelerator().Event()
            self._there.record()

    def result(self) -> bool:
        """Wait for the copy, and return the result."""
        if self._there is not None:
            self._there.synchronize()  # or the host would read pinned memory that is not written yet
        return bool(self._found.item())


class Asking:
    """Forwards resync requests from hooks of modules and parameters while the optimizer is alive (weak reference).
    In a copied module it does nothing."""

    def __init__(self, whole: "Resync | None" = None) -> None:
        self._whole = None if whole is None else weakref.ref(whole)

    def __call__(self, *_: object) -> None:
        resync = None if self._whole is None else self._whole()
        if resync is not None:
            resync.ask()

    def __reduce__(self) -> tuple[type["Asking"], tuple[()]]:
        return Asking, ()


class Resync:
    """Decides which updates are sent in full. See Note [Resync].

    Args:
        context: shared constants. Updates are sent between groups if p is not G and os is G.

    Attributes:
        now: whether the next update is sent in full.
    """

    def __init__(self, context: Context) -> None:
        crosses = context.strategy.p < context.strategy.os == Placement.G
        differences = [family.gather.differences for family in context.families.values() if crosses]
        self._every = min((codec.resync_interval for codec in differences if codec), default=None)
        self._context = context
        self._since = 0
        self._asked = False
        self._vote: _Vote | None = None
        self.now = True
        if self._every is not None:
            _all.add(self)

    @property
    def always(self) -> bool:
        """Whether all updates are sent in full."""
        return self._every is None

    def ask(self) -> None:
        """Request that the next update is sent in full, on all ranks. Called before user code sets weights."""
        self._context.before_change()
        self._asked = True

    def vote(self) -> None:
        """Reduce requests of all ranks, at the beginning of a step. Collective."""
        if self._every is not None:
            self._vote = _Vote(self._asked, self._context.topology.world)

    def begin(self, stepping: bool) -> None:
        """Set ``now`` for the next update; in a step, after ``vote``. The result is the same on all ranks.

        Args:
            stepping: whether the update is from an optimizer step.
        """
        if self._every is None:
            return
        self._since += 1
        asked = stepping and self._vote is not None and self._vote.result()
        self.now = not stepping or asked or self._since >= self._every
        if self.now:
            self._since, self._asked = 0, False
