# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""ZeRO optimizers whose ranks hold a part of the model: a stage of a pipeline, or slices of tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.constants import PIPE_REPLICATED
from torch import Tensor


class ModelParallel:
    """Such an optimizer; the class to mix it into comes after it."""

    complete_gradients: Callable[[], None] = staticmethod(lambda: None)
    """Called at the accumulation boundary, when gradients are where the optimizer's states are: adds what else belongs
    to them."""

    overlaps_micro_steps = False
    """Whether the last buckets of a micro-step may stay on the wire under the next one: where nobody reads gradients
    between the two, and the host need not wait for the device."""

    _put_off: bool | None = None  # whether a sum over the parts was asked for; None where it is taken at once

    def _model_parallel_all_reduce(self, tensor: Tensor, op: Any) -> None:
        if self._put_off is None:
            super()._model_parallel_all_reduce(tensor, op)
        else:
            self._put_off = True

    def _norm_of_all_parts(self, norm_of_this: Callable[[], Tensor]) -> Tensor:
        """The norm over all parts of the model; -1 if it is invalid in one of them.

        DeepSpeed takes a sum over the parts for each parameter group or sub-group, of which stages of a pipeline have
        different numbers: ranks would wait for each other forever. So it is one sum.

        Args:
            norm_of_this: gives the norm over the data-parallel ranks of this part, in which what other parts have as
                well counts in one of them.
        """
        self._put_off = False
        try:
            norm = norm_of_this()
            others = self._put_off  # not where the data-parallel ranks are those of all parts
        finally:
            self._put_off = None
        invalid = ~torch.isfinite(norm) | (norm < 0)
        total = torch.stack([torch.where(invalid, 0.0, norm).square(), invalid.to(norm.dtype)])
        total = total.to(get_accelerator().current_device_name())
        if others:
            self._model_parallel_all_reduce(total, dist.ReduceOp.SUM)
        return torch.where(total[1] > 0, -1.0, total[0].sqrt()).to(norm.device)


def is_replica(param: Any) -> bool:
    """Whether another stage of the pipeline has the parameter as well, and counts it."""
    return bool(getattr(param, PIPE_REPLICATED, False))


@contextmanager
def ordered_by_streams(enough: bool) -> Iterator[None]:
    """In this context, if that is enough, DeepSpeed does not have the host wait for the device.

    It does so at the end of a micro-step, before buffers that a stream of reductions reads are given back. Ours are
    recorded on that stream, and what has been reduced is read behind it.
    """
    if not enough or get_accelerator().resolves_data_dependency():
        yield
        return
    with mock.patch.object(get_accelerator(), "resolves_data_dependency", lambda: True):
        yield
