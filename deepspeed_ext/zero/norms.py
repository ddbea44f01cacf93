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


class PartsReduction(Enum):
    """Handling of DeepSpeed's reductions over the parts of a model."""

    RUN = "outside of norms and overflow checks: the reduction runs"
    RUN_AND_REPEAT = "during an overflow check: it runs, and is repeated over the replicas"
    DEFERRED = "while a norm is computed, before DeepSpeed reduces: one sum over all parts follows at the end"
    PENDING = "after DeepSpeed would have reduced a part of the norm: the sum at the end is required"


class Norms:
    """The norm and the overflow flag of one optimizer.

    Args:
        context: shared constants.
    """

    def __init__(self, context: Context) -> None:
        self._replicas = context.topology.replica_group(context.strategy.os)  # ranks with the same states, if any
        self._skip_group = self._replicas  # ranks that skip a step together
        self._state = PartsReduction.RUN

    def set_skip_group(self, ranks: ProcessGroup | None) -> None:
        """Skip a step if gradients have overflowed on any of these ranks, instead of on a replica only."""
        self._skip_group = ranks

    def reduce(self, tensor: Tensor, op: dist.ReduceOp, reduce_parts: Reduce) -> None:
        """Replace DeepSpeed's ``_model_parallel_all_reduce``. ``reduce_parts``: DeepSpeed's method."""
        if self._state in (PartsReduction.DEFERRED, PartsReduction.PENDING):
            self._state = PartsReduction.PENDING
            return
        reduce_parts(tensor, op)
        if self._state is PartsReduction.RUN_AND_REPEAT and self._skip_group is not None:
            dist.all_reduce(tensor, op=op, group=self._skip_group)

    @contextmanager
    def _in_state(self, state: PartsReduction) -> Iterator[None]:
        self._state = state
        try:
            yield
        finally:
            self._state = PartsReduction.RUN

    def overflow(self, local_overflow: Callable[[], bool]) -> bool:
        """Whether any replica has an overflow. The host waits for the device only once."""
        with self._in_state(PartsReduction.RUN_AND_REPEAT):
            return bool(local_overflow())

    def norm(self, local_norm: Callable[[], Tensor], reduce_parts: Reduce) -> Tensor:
        """Return the norm over all parts of the model, the maximum over all replicas.

        It is infinite, DeepSpeed's invalid norm, if it is invalid in one part or for one replica.

        Args:
            local_norm: gives the norm over the data-parallel ranks of this part; parameters that other parts also have
                count in only one of them.
            reduce_parts: DeepSpeed's reduction over the parts.
        """
        norm = self._norm_of_all_parts(local_norm, reduce_parts)
        # Replicas that clip by different norms diverge.
        return norm if self._replicas is None else all_reduce_max(norm, self._replicas)

    def _norm_of_all_parts(self, local_norm: Callable[[], Tensor], reduce_parts: Reduce) -> Tensor:
        """Return the norm over all parts of the model.

        DeepSpeed reduces over the parts once for each parameter group or sub-group. Stages of a pipeline have
        different numbers of these, so ranks would hang. Therefore there is one sum.
        """
        with self._in_state(PartsReduction.DEFERRED):
            norm = local_norm()
            pending = self._state is PartsReduction.PENDING  # false if the data-parallel ranks have all parts
        invalid = ~torch.isfinite(norm) | (norm < 0)
        total = torch.stack([torch.where(invalid, 0.0, norm).square(), invalid.to(norm.dtype)])
        total = total.to(get_accelerator().current_device_name())
        if pending:
            reduce_parts(total, dist.ReduceOp.SUM)
        return torch.where(total[1] > 0, torch.inf, total[0].sqrt()).to(norm.device)


def without_duplicates(norm: Tensor, times: float) -> Tensor:
    """Return a norm that counts each element once instead of ``times``; -1, an invalid norm, is unchanged."""
    if times == 1:
        return norm
    return torch.where(norm < 0, norm, norm / times**0.5)
