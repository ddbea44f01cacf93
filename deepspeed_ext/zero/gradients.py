# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Gradients on their way to the optimizer: N -> g in every micro-step or at the boundary, g -> os at the boundary."""

from torch import Tensor

from deepspeed_ext.comm.reshard import GradientReshard
from deepspeed_ext.comm.schedule import Schedule
from deepspeed_ext.strategy import Placement


def add_to(total: Tensor, part: Tensor) -> None:
    """Add what has arrived on the device to what is held there, or of an offloaded optimizer on the host."""
    if total.device == part.device:
        total.add_(part)
    else:  # adding on the host is slow
        total.copy_(total.to(part.device, non_blocking=True).add_(part), non_blocking=True)


class Gradients:
    """Buckets of gradients, and what has arrived of them.

    Args:
        reshard: hops of the data-parallel group.
        os: placement of the optimizer's states.
        arrives: placement in which buckets arrive.
        overlap: whether the hops of two buckets may overlap.
        relayed: whether they may on streams of their own, on which nothing has the host wait.
        background, completed: whether a thread of the host does, where there are no streams; see ``Schedule``.
    """

    def __init__(
        self,
        reshard: GradientReshard,
        os: Placement,
        arrives: Placement,
        overlap: bool,
        relayed: bool = True,
        background: bool = False,
        completed: bool = False,
    ) -> None:
        self._reshard = reshard
        self._os = os
        self._arrives = arrives
        self._schedule = Schedule(overlap, relayed, background, completed)

    def drain(self) -> None:
        """Wait for all buckets."""
        self._schedule.drain()

    def drop(self) -> None:
        """Drop what has been accumulated, and what is on the wire."""
        self._schedule.drop()
