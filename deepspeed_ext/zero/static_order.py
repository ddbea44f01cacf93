# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The order in which gradients cross at the accumulation boundary: one that all ranks know.

Note [Leaving early]
    What crosses between groups at the accumulation boundary is complete, piece by piece, while the backward of the
    last micro-batch runs. Ranks may get gradients in different orders, and not all of them; what is summed must be the
    same on all ranks. So it is divided into *units*, fixed for the run, the model's last parameters first. A unit
    leaves when all its members are complete here and all units before it have left. What has not left when the
    backward ends leaves then, in the same order. So the order is the same on all ranks whatever each has used; only
    the times differ.

    Since times differ nobody may have the host wait, within a micro-step, for what has left: the rank that it waits
    for may wait for it. So units leave by schedules that nobody needs to attend to (``Schedule.unattended``).

    Neither units nor their order depend on whether they leave early: bits are the same, those of kept errors too.
"""

from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

_Member = TypeVar("_Member", bound=Hashable)


def idle(members: Sequence[_Member], used: Container[_Member], largest: Callable[[Tensor], Tensor]) -> set[_Member]:
    """Return the members that no rank has used: they would hold back all that comes behind them. Collective.

    Args:
        members: the same on all ranks.
        used: on this one.
        largest: gives the largest of all ranks' values, each by itself.
    """
    by_any = largest(torch.tensor([float(member in used) for member in members]))
    return {member for member, found in zip(members, by_any.tolist(), strict=True) if not found}


class StaticOrder:
    """Units of what crosses. See Note [Leaving early].

    Args:
        units: members of each, in the order in which they leave; a member may be in several units, and a unit without
            members is complete at any time.
    """

    def __init__(self, units: Iterable[Iterable[Hashable]]) -> None:
        self._members = [frozenset(unit) for unit in units]
        self._units_of: dict[Hashable, list[int]] = {}
        for number, unit in enumerate(self._members):
            for member in unit:
                self._units_of.setdefault(member, []).append(number)
        self.clear()

    def clear(self) -> None:
        """Begin anew: no member is complete, and no unit has left."""
        self._missing = [len(unit) for unit in self._members]
        self._complete: set[Hashable] = set()
        self._next = 0

    @property
    def begun(self) -> bool:
        """Whether a unit has left."""
        return self._next > 0

    def has_left(self, member: Hashable) -> bool:
        """Whether a unit with this member has left."""
        return any(number < self._next for number in self._units_of.get(member, ()))

    def ready(self, member: Hashable) -> list[int]:
        """Take a member as complete; to do so again changes nothing.

        Returns:
            Numbers of the units that leave now, in order.
        """
        if member not in self._complete:
            self._complete.add(member)
            for number in self._units_of.get(member, ()):
                self._missing[number] -= 1
        first = self._next
        while self._next < len(self._missing) and not self._missing[self._next]:
            self._next += 1
        return list(range(first, self._next))

    def rest(self) -> list[int]:
        """Return the numbers of the units that have not left, in order, and begin anew: all is complete."""
        left = list(range(self._next, len(self._missing)))
        self.clear()
        return left
