# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Buckets of gradients that are reduced between groups at the accumulation boundary, in one order on all ranks.

Note [Early reduction]
    Gradients that are sent between groups at the accumulation boundary are completed one by one during the backward of
    the last micro-batch. Ranks may get gradients in different orders, and not all of them, but all ranks must sum the
    same elements. So gradients are divided into *buckets*, fixed for the run, the model's last parameters first. A
    bucket is sent when all its members are complete on this rank and all buckets before it have been sent. The
    remaining buckets are sent when the backward ends, in the same order. So the order is the same on all ranks
    whatever each has used; only the times differ.

    Since times differ, no rank's host may wait for a sent bucket within a micro-step: the rank that it waits for may
    be waiting for it. So buckets are sent by queues that need no attention (``TransferQueue.unattended``).

    With p = I and g = G each micro-step ends with such a boundary: Note [Pieces] in ``sharded/gradients.py``.

    Neither buckets nor their order depend on whether they are sent early. So results are bitwise identical, including
    error feedback.

Note [Order learned in the first step]
    A member that no rank uses would delay all buckets after its own, and so would one that gets its gradient late. So
    after the first step buckets are sorted by the times at which they were complete, on the latest rank; those with
    members that no rank has used are the last. Neither sums nor error feedback depend on the order of buckets.

    A parameter may get several gradients in one backward if modules share it and each is checkpointed reentrantly. Its
    bucket must not be sent before the last gradient, which cannot be recognized. If that may happen
    (``single_gradient`` false),
    nothing is sent early in the first step, and a member that has had several gradients delays its bucket forever
    after.

    If keeping all buckets would take too much memory, they are sent early in the first step, too. If a member gets
    another gradient afterwards, its bucket is sent again after the backward, with only that gradient
    (``buckets_to_resend``). Flags of these buckets are reduced, and the host waits for the result. So this is done in
    the first step only, unless the host waits for each bucket anyway.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

Bucket = TypeVar("Bucket")
Resend = Literal["never", "in the first step", "always"]


class Boundary(Generic[Bucket]):
    """The buckets of one accumulation. See Note [Early reduction] and Note [Order learned in the first step].

    Args:
        buckets: in the order in which they are sent.
        members: gives the members of a bucket; a member may be in several buckets, and a bucket without members is
            always complete.
        early: whether buckets may be sent before the boundary.
        single_gradient: whether a member gets at most one gradient in a backward.
        name: gives the name of a member, for errors.
        advice: what to do if a member gets another gradient after its bucket was sent, for the error.
        resend: when buckets may be sent again after a member has got another gradient.

    Attributes:
        buckets: in the order in which they are sent.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        members: Callable[[Bucket], Iterable[Hashable]],
        *,
        early: bool,
        single_gradient: bool = True,
        name: Callable[[Any], str] = str,
        advice: str = "",
        resend: Resend = "never",
    ) -> None:
        self._members_of = members
        self._early = early
        self._single_gradient = single_gradient
        self._name, self._advice = name, advice
        self._resend = resend
        # When members got gradients in the first step: the number of gradients before in the backward.
        self._times: dict[Hashable, int] = {}
        self._with_several_gradients: set[Hashable] = set()  # members that have ever got several in one backward
        self._has_learned = False
        self._arrange(buckets)

    def _arrange(self, buckets: Iterable[Bucket]) -> None:
        self.buckets = list(buckets)
        self._members = [frozenset(self._members_of(bucket)) for bucket in self.buckets]
        self._numbers: dict[Hashable, list[int]] = {}  # numbers of each member's buckets
        for number, members in enumerate(self._members):
            for member in members:
                self._numbers.setdefault(member, []).append(number)
        self.clear()

    def clear(self) -> None:
        """Reset for the next accumulation: no member is complete, and no bucket has been sent."""
        self._missing = [len(members) for members in self._members]  # numbers of incomplete members
        self._complete: set[Hashable] = set()
        self._with_gradient: set[Hashable] = set()  # members with a gradient of this backward
        self._late_buckets: set[int] = set()  # numbers of sent buckets that have got another gradient since
        self._next = 0  # number of the first bucket that has not been sent
        self._count = 0  # gradients of this backward

    @property
    def has_sent(self) -> bool:
        """Whether a bucket has been sent."""
        return self._next > 0

    def mark_ready(self, members: Iterable[Hashable], is_timed: bool = True) -> list[Bucket]:
        """Record members with a gradient of the last micro-batch; return the buckets to send now, in order.

        Args:
            members: those with a gradient.
            is_timed: whether ``learn_order`` is to consider when they had it.

        Raises:
            RuntimeError: a member got another gradient after its bucket was sent, which may not be sent again.
        """
        if not self._early:
            return []
        first = self._next
        for member in members:
            if is_timed and not self._has_learned:
                self._times[member] = max(self._times.get(member, 0), self._count)
                self._count += 1
            self._reject_late(member)
            if self._single_gradient or self._is_complete(member):
                self._complete_member(member)
        return self.buckets[first : self._next]

    def _reject_late(self, member: Hashable) -> None:
        """Reject a gradient whose bucket has been sent, or record that the bucket must be sent again."""
        sent = [number for number in self._numbers.get(member, ()) if number < self._next]
        if sent and not self.may_resend:
            raise RuntimeError(
                f"Parameter {self._name(member)} got another gradient in a backward after its first had been reduced"
                f"{self._advice}"
            )
        self._late_buckets.update(sent)

    def _is_complete(self, member: Hashable) -> bool:
        """Whether this is a member's last gradient in this backward, judging from earlier backwards."""
        if member in self._with_gradient:
            self._with_several_gradients.add(member)
        self._with_gradient.add(member)
        return (self._has_learned or self.may_resend) and member not in self._with_several_gradients

    @property
    def may_resend(self) -> bool:
        """Whether buckets may be sent again in this backward."""
        return self._resend == "always" or (self._resend == "in the first step" and not self._has_learned)

    def _complete_member(self, member: Hashable) -> None:
        if member not in self._complete:
            self._complete.add(member)
            for number in self._numbers.get(member, ()):
                self._missing[number] -= 1
        # Strictly in order: another order on one rank would hang the reductions, or sum different buckets.
        while self._next < len(self._missing) and not self._missing[self._next]:
            self._next += 1

    def pop_remaining(self) -> list[Bucket]:
        """Return the buckets that have not been sent, in order, and reset: the backward has ended."""
        remaining, late = self.buckets[self._next :], self._late_buckets
        self.clear()
        self._late_buckets = late  # for ``buckets_to_resend``
        return remaining

    def buckets_to_resend(self, max_over_ranks: Callable[[Tensor], Tensor]) -> list[Bucket]:
        """Return the buckets to send again, in order, after ``pop_remaining``. Collective if there may be any.

        Args:
            max_over_ranks: see ``learn_order``. Buckets in flight must have been received: other ranks may wait for
                them first.
        """
        if not self.may_resend:
            return []
        late = max_over_ranks(
            torch.tensor([float(number in self._late_buckets) for number in range(len(self.buckets))])
        )
        self._late_buckets.clear()
        return [bucket for bucket, resend in zip(self.buckets, late.tolist(), strict=True) if resend]

    def learn_order(self, max_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Sort the buckets after the first step in which gradients were timed. Collective until then.

        Args:
            max_over_ranks: gives the elementwise maximum over all ranks.
        """
        if not self._early or self._has_learned or not self.buckets:
            return
        members = list(dict.fromkeys(member for bucket in self.buckets for member in self._members_of(bucket)))
        own = torch.tensor([float(self._times.get(member, -1)) for member in members])
        latest = dict(zip(members, max_over_ranks(own).tolist(), strict=True))
        if max(latest.values(), default=-1) < 0:
            return  # nothing was timed

        def time_of(bucket: Bucket) -> float:
            times = [latest[member] for member in self._members_of(bucket)]
            return float("inf") if -1 in times else max(times, default=-1)

        # A stable sort by reduced times, so the new order is the same on all ranks.
        self._arrange(sorted(self.buckets, key=time_of))
        self._has_learned = True
        self._times.clear()
