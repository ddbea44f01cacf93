# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""When updated parameters travel as they are, though they might as what receivers lack.

Note [Resync]
    A difference is quantized: what it lacks comes with the next one. So what is held is close to the optimizer's
    weights as long as these move by steps. Where somebody else has moved them, or what is held, a difference may be
    as large as a parameter, and some steps would pass until it is all there. The next update is sent whole then: after
    DeepSpeed's ``safe_set_full_...``, ``load_state_dict``, and ``GatheredParameters`` with a modifier rank. So is what
    is sent outside of a step, as after a load; what is sent before a checkpoint is saved, so that it holds the same
    weights as a run that goes on; and one update of so many, for nobody knows what a script does.

    A script may load on one rank and broadcast to the others, so ranks ask each other at each step: that takes an
    all-reduce of one element. It is started when a step begins, and looked at when the step has been given to the
    device: the host waits for the device's gradients by then, not for its step.
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
    """Make the next update of each engine of this process travel whole."""
    for one in _all:
        one.ask()


class _Vote:
    """Whether one of the ranks of a group has asked; on its way to the host."""

    def __init__(self, asked: bool, group: ProcessGroup | None) -> None:
        found = all_reduce_max(torch.full((1,), float(asked), device=get_accelerator().current_device_name()), group)
        self._found, self._there = found, None
        if not get_accelerator().is_synchronized_device():
            self._found = get_accelerator().pin_memory(torch.empty(1))
            self._found.copy_(found, non_blocking=True)
            self._there = get_accelerator().Event()
            self._there.record()

    def result(self) -> bool:
        """Return it, and wait for it if need be."""
        if self._there is not None:
            self._there.synchronize()
        return bool(self._found.item())


class Asking:
    """Asks, as long as there is somebody to ask: for hooks of modules and of parameters, which may outlive the engine
    and must not keep it. One of a copy of the module does not."""

    def __init__(self, whole: "Resync | None" = None) -> None:
        self._whole = None if whole is None else weakref.ref(whole)

    def __call__(self, *_: object) -> None:
        whole = None if self._whole is None else self._whole()
        if whole is not None:
            whole.ask()

    def __reduce__(self) -> tuple[type["Asking"], tuple[()]]:
        return Asking, ()


class Resync:
    """Tells which updates travel whole. See Note [Resync].

    Args:
        context: shared constants. Updates are sent between groups if p is not G and os is G.

    Attributes:
        now: whether the update that is sent next is whole.
    """

    def __init__(self, context: Context) -> None:
        crosses = context.strategy.p < context.strategy.os == Placement.G
        differences = [family.gather.differences for family in context.families.values() if crosses]
        self._every = min((one.whole_every for one in differences if one), default=None)
        self._context = context
        self._since = 0
        self._asked = False
        self._vote: _Vote | None = None
        self.now = True
        if self._every is not None:
            _all.add(self)

    @property
    def always(self) -> bool:
        """Whether all do."""
        return self._every is None

    def ask(self) -> None:
        """Make the next update travel whole, on all ranks. Called before somebody sets the optimizer's weights."""
        self._context.before_change()
        self._asked = True

    def vote(self) -> None:
        """Ask all ranks, at the beginning of a step. Collective."""
        if self._every is not None:
            self._vote = _Vote(self._asked, self._context.topology.world)

    def begin(self, stepping: bool) -> None:
        """Decide on the update that is sent next (``now``); in a step, after ``vote``. The same on all ranks.

        Args:
            stepping: whether it is that of an optimizer step.
        """
        if self._every is None:
            return
        self._since += 1
        asked = stepping and self._vote is not None and self._vote.result()
        self.now = not stepping or asked or self._since >= self._every
        if self.now:
            self._since, self._asked = 0, False
