# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients that come back between groups in few bits.

If every group has all optimizer states, no parameters cross between groups, but sums of gradients do. They are
quantized with error feedback: the rank that has a sum keeps what quantization takes from it, and adds it to the next
sums. This is the server's error of 1-bit Adam (arXiv:2102.02888), averaged as LoCo averages errors of gradients.
"""

from functools import partial

import torch
from torch import Tensor

from deepspeed_ext.comm.hops import ReduceHop, SumsGather, Transfer, all_gather
from deepspeed_ext.comm.spans import Spans
from deepspeed_ext.config.settings import LocoSettings
from deepspeed_ext.loco import ops
from deepspeed_ext.loco.feedback import ErrorFeedback
from deepspeed_ext.loco.packing import Packing
from deepspeed_ext.loco.sampling import Sampling, compensated


class QuantizedSums(SumsGather):
    """Sums of gradients that come back in 4 or 8 bits, with error feedback.

    Args:
        settings: bits, blocks, error feedback.
        device: where the error feedback is kept; None: where gradients are.
        pinned: see ``ErrorFeedback``.
    """

    exact = False

    def __init__(self, settings: LocoSettings, device: str | None = None, pinned: bool = False) -> None:
        self.settings = settings
        self.packing = Packing(settings.bits, settings.block_size)
        self.errors: ErrorFeedback = ErrorFeedback(settings, device, pinned)
        self.sent = Sampling()

    def gather(self, hop: ReduceHop, sums: Tensor, spans: Spans) -> Transfer:
        width = sums.numel()
        wire = self.packing.empty(1, width, sums)
        with hop.collectives.labeled("loco_compress"):
            self._compress(hop, sums, wire, spans)
        arrived = yield from all_gather(hop.collectives, wire.view(-1), operation="sums_all_gather")
        gathered = torch.zeros(hop.size, width, dtype=sums.dtype, device=sums.device)
        with hop.collectives.labeled("loco_decompress"):
            ops.apply(arrived.view(hop.size, -1), gathered, self.packing)
        return gathered.view(-1)

    def _compress(self, hop: ReduceHop, sums: Tensor, wire: Tensor, spans: Spans) -> None:
        self.sent.count(sums.nbytes, wire.nbytes)
        contents, splits = (spans,), [sums.numel()]
        if not spans:
            ops.compress(sums.view(1, -1), wire, self.packing)
            return
        unit, (old, new) = hop.scale(), self.errors.buffers(contents, splits, sums.device)
        error = None if old is None else old.view(1, -1)
        give = partial(compensated, sums.view(1, -1), error, unit, self.packing.block_size, False)
        given = self.sent.given(sums.numel(), self.packing, give)
        beta, new_error = self.settings.err_beta, new.view(1, -1)
        ops.compress(sums.view(1, -1), wire, self.packing, error=error, new_error=new_error, beta=beta, unit=unit)
        if given is not None:
            self.sent.note(given, wire, sums.numel(), self.packing)
        self.errors.keep(contents, new)
