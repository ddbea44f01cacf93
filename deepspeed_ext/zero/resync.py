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


def request_all() -> None:
    """Request that the next update of each engine of this process is sent in full."""
    for resync in _all:
        resync.request()


class _Vote:
    """All-reduced resync requests of a group's ranks; copied to the host asynchronously."""

    def __init__(self, requested: bool, group: ProcessGroup | None) -> None:
        result = all_reduce_max(
            torch.full((1,), float(requested), device=get_accelerator().current_device_name()), group
        )
        self._result, self._copied = result, None
        if not get_accelerator().is_synchronized_device():
            self._result = get_accelerator().pin_memory(torch.empty(1))
            self._result.copy_(result, non_blocking=True)
            self._copied = get_accelerator().Event()
            self._copied.record()

    def result(self) -> bool:
        """Wait for the copy, and return the result."""
        if self._copied is not None:
            self._copied.synchronize()  # or the host would read pinned memory that is not written yet
        return bool(self._result.item())


class ResyncRequester:
    """Forwards resync requests from hooks of modules and parameters while the optimizer is alive (weak reference).
    In a copied module it does nothing."""

    def __init__(self, resync: "Resync | None" = None) -> None:
        self._resync = None if resync is None else weakref.ref(resync)

    def __call__(self, *_: object) -> None:
        resync = None if self._resync is None else self._resync()
        if resync is not None:
            resync.request()

    def __reduce__(self) -> tuple[type["ResyncRequester"], tuple[()]]:
        return ResyncRequester, ()


class Resync:
    """Decides which updates are sent in full. See Note [Resync].

    Args:
        context: shared constants. Updates are sent between groups if p is not G and os is G.

    Attributes:
        in_full: whether the next update is sent in full.
    """

    def __init__(self, context: Context) -> None:
        encoded = context.strategy.p < context.strategy.os == Placement.G
        differences = [family.gather.differences for family in context.families.values() if encoded]
        self._every = min((codec.resync_interval for codec in differences if codec), default=None)
        self._context = context
        self._updates_since_resync = 0
        self._requested = False
        self._vote: _Vote | None = None
        self.in_full = True
        if self._every is not None:
            _all.add(self)

    @property
    def always_in_full(self) -> bool:
        """Whether all updates are sent in full."""
        return self._every is None

    def request(self) -> None:
        """Request that the next update is sent in full, on all ranks. Called before user code sets weights."""
        self._context.before_change()
        self._requested = True

    def reduce_requests(self) -> None:
        """Reduce requests of all ranks, at the beginning of a step. Collective."""
        if self._every is not None:
            self._vote = _Vote(self._requested, self._context.topology.world)

    def begin_update(self, stepping: bool) -> None:
        """Set ``in_full`` for the next update; in a step, after ``reduce_requests``. The result is the same on all
        ranks.

        Args:
            stepping: whether the update is from an optimizer step.
        """
        if self._every is None:
            return
        self._updates_since_resync += 1
        requested = stepping and self._vote is not None and self._vote.result()
        self.in_full = not stepping or requested or self._updates_since_resync >= self._every
        if self.in_full:
            self._updates_since_resync, self._requested = 0, False
