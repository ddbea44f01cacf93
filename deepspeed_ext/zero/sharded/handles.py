# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Handles of gathered parameters, which DeepSpeed's coordinator waits for."""

from collections.abc import Sequence

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from deepspeed_ext.comm.parameter_bucket import ParameterBucket
from deepspeed_ext.comm.transfer_queue import Started, TransferQueue
from deepspeed_ext.deepspeed_types import ZeroParameter


class GatherHandle:
    """Parameters on their way; DeepSpeed's coordinator waits for it.

    Args:
        params: not available before, all of one dtype on the wire; they are marked as in flight.
        queue: of the gather. Completes gathers in the order that all ranks share; DeepSpeed may wait in any order.
        started: the gather of their cells side by side.
        bucket: where these are.
        parts: rows of the bucket that a rank has sent together.
        alone: whether parameters may be released one by one, and must not share memory.
    """

    def __init__(
        self,
        params: Sequence[ZeroParameter],
        queue: TransferQueue,
        started: Started,
        bucket: ParameterBucket,
        parts: int,
        alone: bool,
    ) -> None:
        self._params = params
        self._queue = queue
        self._bucket = bucket
        self._parts = parts
        self._copied = alone and bucket.rows * bucket.cols == 1 and len(params) > 1  # else one is a view of all
        for param in params:
            param.ds_status = ZeroParamStatus.INFLIGHT
        self._started: Started | None = started

    @torch.inference_mode(False)  # a parameter may persist, and be trained after an evaluation has gathered it
    @torch.no_grad()
    def wait(self, handle_dependency: bool = True) -> None:
        """Make the parameters available, on the current stream. ``handle_dependency`` needs no care: what was
        gathered is theirs, or is known to this stream."""
        if self._started is None:
            return
        flat, self._started = self._queue.finish(self._started), None
        cells = self._bucket.arrived(flat, self._parts)
        for param, whole in zip(self._params, self._bucket.unpack(cells), strict=True):
            mine = whole.clone() if self._copied else whole
            param.data = mine.view(param.ds_shape).to(param.ds_tensor.dtype)
            param.ds_status = ZeroParamStatus.AVAILABLE


class ResidentHandle:
    """Parameters that are replicated: one rank holds all of each, and what it holds is used as it is."""

    def __init__(self, params: Sequence[ZeroParameter]) -> None:
        self._params = params
        for param in params:
            param.ds_status = ZeroParamStatus.INFLIGHT

    def wait(self, handle_dependency: bool = True) -> None:
        """Make the parameters available."""
        for param in self._params:
            if param.ds_status == ZeroParamStatus.INFLIGHT:
                param.data = param.ds_tensor.data[: param.ds_numel].view(param.ds_shape)
                param.ds_status = ZeroParamStatus.AVAILABLE
