# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Norms and overflow flags, reduced over all ranks that must step in the same way.

A model may have several parts: stages of a pipeline, slices of tensors. Replicas are the ranks with the same optimizer
states. They have the same gradients, unless a backend rounds differently in two groups. If one of them skipped a step,
or clipped by another norm, they would diverge permanently.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_ext.comm.agreement import all_reduce_max
from deepspeed_ext.zero.context import Context

Reduce = Callable[[Tensor, dist.ReduceOp], None]  # reduction over the parts of a model, in place


class OverParts(Enum):
    """Handling of DeepSpeed's reductions over the parts of a model."""

    AT_ONCE = "it runs"
    REPEATED = "it runs, and again over the replicas: an overflow is looked for"
    PUT_OFF = "nothing yet: the norm of all parts takes one sum at its end"
    OWED = "nothing yet, and the sum is owed"


class Norms:
    """The norm and the overflow flag of one optimizer.

    Args:
        context: shared constants.
    """

    def __init__(self, context: Context) -> None:
        self._replicas = context.topology.replica_group(context.strategy.os)  # ranks with the same states, if any
        self._overflowing = self._replicas  # ranks that skip a step together
        self._state = OverParts.AT_ONCE

    def skip_together(self, ranks: ProcessGroup | None) -> None:
        """Skip a step if gradients of any of these ranks have overflowed, not only those of a replica."""
        self._overflowing = ranks

    def reduce(self, tensor: Tensor, op: dist.ReduceOp, over_parts: Reduce) -> None:
        """Replace DeepSpeed's ``_model_parallel_all_reduce``. ``over_parts``: DeepSpeed's method."""
        if self._state in (OverParts.PUT_OFF, OverParts.OWED):
            self._state = OverParts.OWED
            return
        over_parts(tensor, op)
        if self._state is OverParts.REPEATED and self._overflowing is not None:
            dist.all_reduce(tensor, op=op, group=self._overflowing)

    @contextmanager
    def _asked(self, state: OverParts) -> Iterator[None]:
        self._state = state
        try:
            yield
        finally:
            self._state = OverParts.AT_ONCE

    def overflow(self, of_this: Callable[[], bool]) -> bool:
        """Whether any replica has an overflow. The host waits for the device only once."""
        with self._asked(OverParts.REPEATED):
            return bool(of_this())

    def norm(self, of_this: Callable[[], Tensor], over_parts: Reduce) -> Tensor:
        """Return the norm over all parts of the model, the maximum over all replicas.

        It is infinite, DeepSpeed's invalid norm, if it is invalid in one part or for one replica.

        Args:
            of_this: gives the norm over the data-parallel ranks of this part; parameters that other parts also have
                count in only one of them.
            over_parts: DeepSpeed's reduction over the parts.
        """
        norm = self._of_all_parts(of_this, over_parts)
        # Replicas that clip by different norms diverge.
        return norm if self._replicas is None else all_reduce_max(norm, self._replicas)

    def _of_all_parts(self, of_this: Callable[[], Tensor], over_parts: Reduce) -> Tensor:
        """Return the norm over all parts of the model.

        DeepSpeed reduces over the parts once for each parameter group or sub-group. Stages of a pipeline have
        different numbers of these, so ranks would hang. Therefore there is one sum.
        """
        with self._asked(OverParts.PUT_OFF):
            norm = of_this()
            owed = self._state is OverParts.OWED  # false if the data-parallel ranks are those of all parts
        invalid = ~torch.isfinite(norm) | (norm < 0)
        total = torch.stack([torch.where(invalid, 0.0, norm).square(), invalid.to(norm.dtype)])
        total = total.to(get_accelerator().current_device_name())
        if owed:
            over_parts(total, dist.ReduceOp.SUM)
        return torch.where(total[1] > 0, torch.inf, total[0].sqrt()).to(norm.device)


def without_duplicates(norm: Tensor, times: float) -> Tensor:
    """Return a norm that counts each element once instead of ``times``; -1, an invalid norm, is unchanged."""
    if times == 1:
        return norm
    return torch.where(norm < 0, norm, norm / times**0.5)
