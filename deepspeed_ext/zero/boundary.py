# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What crosses at the accumulation boundary, in one order that all ranks know, and when it may leave.

Note [Leaving early]
    What crosses between groups at the accumulation boundary is complete, piece by piece, while the backward of the
    last micro-batch runs. Ranks may get gradients in different orders, and not all of them; what is summed must be the
    same on all ranks. So it is divided into *buckets*, fixed for the run, the model's last parameters first. A bucket
    leaves when all its members are complete here and all buckets before it have left. What has not left when the
    backward ends leaves then, in the same order. So the order is the same on all ranks whatever each has used; only
    the times differ.

    Since times differ no rank's host may wait, within a micro-step, for what has left: the rank that it waits
    for may wait for it. So buckets leave by queues that nobody needs to attend to (``TransferQueue.unattended``).

    With p = I and g = G all that is such a boundary in each micro-step: Note [Pieces] in ``sharded/gradients.py``.

    Neither buckets nor their order depend on whether they leave early: bits are the same, those of kept errors too.

Note [What the first step teaches]
    A member that no rank uses would hold back all buckets after its own. The first step tells which these are; from
    then on their buckets are the last. That changes the order of buckets, and not what they hold: no sum depends on
    it, and no kept error.

    A parameter may get several gradients in one backward: one that modules share, each of which is checkpointed
    reentrantly. It must not leave before the last one, of which nothing tells. Where that may happen (``once`` false)
    nothing leaves early in the first step, and a member that has had several holds its bucket back ever after.

    Where all buckets would take too much memory they leave early in the first step, too (``again``). A bucket of which
    a member gets another gradient afterwards leaves again, with that alone, when the backward has ended. Ranks agree
    on which these are, for which the host waits: in the first step, and where it waits for each bucket anyway.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

Bucket = TypeVar("Bucket")
Again = Literal["never", "in the first step", "always"]


class Boundary(Generic[Bucket]):
    """The buckets of one accumulation. See Note [Leaving early] and Note [What the first step teaches].

    Args:
        buckets: in the order in which they leave.
        members: gives the members of a bucket; a member may be in several, and a bucket without any is complete at
            any time.
        early: whether buckets may leave before the boundary.
        once: whether a member gets one gradient in a backward at most.
        name: gives the name of a member, for errors.
        again: when buckets may leave again, of which a member has got another gradient.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        members: Callable[[Bucket], Iterable[Hashable]],
        *,
        early: bool,
        once: bool = True,
        name: Callable[[Any], str] = str,
        again: Again = "never",
    ) -> None:
        self._members_of = members
        self._early = early
        self._once = once
        self._name = name
        self._again = again
        self._used: set[Hashable] = set()  # by this rank, in the first step
        self._several: set[Hashable] = set()  # members that have had several gradients in one backward, ever
        self._learned = False
        self._arrange(buckets)

    def _arrange(self, buckets: Iterable[Bucket]) -> None:
        self._buckets = list(buckets)
        self._members = [frozenset(self._members_of(bucket)) for bucket in self._buckets]
        self._numbers: dict[Hashable, list[int]] = {}  # of the buckets of each member
        for number, members in enumerate(self._members):
            for member in members:
                self._numbers.setdefault(member, []).append(number)
        self.clear()

    def clear(self) -> None:
        """Begin anew: no member is complete, and no bucket has left."""
        self._missing = [len(members) for members in self._members]
        self._complete: set[Hashable] = set()
        self._had: set[Hashable] = set()  # members with a gradient of this backward
        self._late: set[int] = set()  # numbers of buckets of which a member has got another gradient after they left
        self._next = 0

    @property
    def begun(self) -> bool:
        """Whether a bucket has left."""
        return self._next > 0

    def ready(self, members: Iterable[Hashable]) -> list[Bucket]:
        """Take members that have got a gradient of the last micro-batch; return the buckets that leave now, in order.

        Raises:
            RuntimeError: a member has left before, and may have several gradients.
        """
        if not self._early:
            return []
        first = self._next
        for member in members:
            if not self._learned:
                self._used.add(member)
            if self._once or self._is_complete(member):
                self._take(member)
        return self._buckets[first : self._next]

    def _is_complete(self, member: Hashable) -> bool:
        """Whether no other gradient of a member comes in this backward, as far as earlier ones tell."""
        left = [number for number in self._numbers.get(member, ()) if number < self._next]
        if left and not self.may_leave_again:
            raise RuntimeError(
                f"The parameter {self._name(member)} got another gradient in a backward, after it was reduced between "
                f"groups, and in the first step of this run it got one only. Set zero_optimization.overlap_comm to "
                f"false: then it may."
            )
        self._late.update(left)
        if member in self._had:
            self._several.add(member)
        self._had.add(member)
        return (self._learned or self.may_leave_again) and member not in self._several

    @property
    def may_leave_again(self) -> bool:
        """Whether buckets may leave again, in this backward."""
        return self._again == "always" or (self._again == "in the first step" and not self._learned)

    def _take(self, member: Hashable) -> None:
        if member not in self._complete:
            self._complete.add(member)
            for number in self._numbers.get(member, ()):
                self._missing[number] -= 1
        while self._next < len(self._missing) and not self._missing[self._next]:
            self._next += 1

    def rest(self) -> list[Bucket]:
        """Return the buckets that have not left, in order, and begin anew: the backward has ended."""
        left, late = self._buckets[self._next :], self._late
        self.clear()
        self._late = late
        return left

    def again(self, largest: Callable[[Tensor], Tensor]) -> list[Bucket]:
        """Return the buckets that leave again, in order, after ``rest``. Collective where there may be some.

        Args:
            largest: as of ``learn``. Those that left before must have arrived: other ranks may wait for them first.
        """
        if not self.may_leave_again:
            return []
        late = largest(torch.tensor([float(number in self._late) for number in range(len(self._buckets))]))
        self._late.clear()
        return [bucket for bucket, again in zip(self._buckets, late.tolist(), strict=True) if again]

    def learn(self, largest: Callable[[Tensor], Tensor]) -> None:
        """Take the first step of which the last micro-batch was known as it was. Collective, once.

        Args:
            largest: gives the largest of all ranks' values, each by itself.
        """
        if not self._early or self._learned or not self._buckets:
            return
        members = list(dict.fromkeys(member for bucket in self._buckets for member in self._members_of(bucket)))
        used_by_any = largest(torch.tensor([float(member in self._used) for member in members]))
        unused = {member for member, used in zip(members, used_by_any.tolist(), strict=True) if not used}
        self._arrange(sorted(self._buckets, key=lambda bucket: not unused.isdisjoint(self._members_of(bucket))))
        self._learned = True
        self._used.clear()
