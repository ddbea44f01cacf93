# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The reduce hop between groups in few bits: one all-to-all, with payload and scales in the same message.

Note [Quantized sums]
    If every group has all optimizer states, groups exchange sums of gradients instead of parameters. The sums are
    quantized with error feedback: the rank that has a sum keeps its quantization error, and adds it to the next sums.
    This is the server's error of 1-bit Adam (arXiv:2102.02888), averaged as LoCo averages errors of gradients.
"""

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.timer import NoopTimer
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_ext.comm.hops import ReduceHop, SumsGather, Transfer, all_gather
from deepspeed_ext.comm.spans import Contents, Spans
from deepspeed_ext.config.settings import LocoSettings
from deepspeed_ext.deepspeed_types import Timers
from deepspeed_ext.loco import ops
from deepspeed_ext.loco.feedback import ErrorFeedback, split_rows
from deepspeed_ext.loco.ops import require_kernels
from deepspeed_ext.loco.reference import Packing
from deepspeed_ext.loco.sampling import Sampling, compensate

COMPRESS_TIMER, DECOMPRESS_TIMER = "loco_compress", "loco_decompress"


class LocoHop(ReduceHop):
    """Sums in 4 or 8 bits with error feedback; see Note [Arithmetic of a block] in ``reference.py``.

    A rank's own part is quantized, too, so a sum does not depend on its owner. An all-reduce is this reduction,
    followed by a gather of the sums (``SumsGather``).

    Args:
        group: process group.
        name: prefix of its records in the comms logger.
        settings: bits, blocks, error feedback.
        device: where the error feedback is kept; None: where gradients are.
        pinned: see ``ErrorFeedback``.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        name: str,
        settings: LocoSettings,
        device: str | None = None,
        pinned: bool = False,
    ) -> None:
        super().__init__(group, name)
        self.settings = settings
        self.packing = Packing(settings.bits, settings.block_size)
        self.errors: ErrorFeedback = ErrorFeedback(settings, device, pinned)
        self.keeps_zeros = not settings.hadamard  # a rotation spreads values over their neighbors
        self.sampling = Sampling()
        self.timers: Timers = NoopTimer()
        require_kernels(get_accelerator().device_name(), self.collectives.group, LocoSettings.key)

    def reduce_scatter(self, flat: Tensor, splits: Sequence[int], contents: Contents = ()) -> Transfer:
        if self.size == 1 or not flat.numel():
            return flat
        sizes = [self.packing.row_bytes(split) for split in splits]
        # Uninitialized: the operator writes every byte, padding included.
        wire = torch.empty(sum(sizes), dtype=torch.uint8, device=flat.device)
        self.timers(COMPRESS_TIMER).start()
        with self.collectives.labeled("loco_compress"):
            self._compress(flat, wire, splits, sizes, contents)
        self.timers(COMPRESS_TIMER).stop()
        dtype, width, part_bytes = flat.dtype, splits[self.rank], sizes[self.rank]
        del flat  # it has been packed: the caller can free it while the message is in flight
        pieces = wire.new_empty(self.size * part_bytes)
        yield self.collectives.all_to_all(pieces, wire, sizes, "loco_reduce_scatter")
        out = torch.empty(width, dtype=dtype, device=pieces.device)
        self.timers(DECOMPRESS_TIMER).start()
        if width:
            with self.collectives.labeled("loco_decompress"):
                ops.decompress(pieces.view(self.size, part_bytes), out, self.packing, hadamard=self.settings.hadamard)
        self.timers(DECOMPRESS_TIMER).stop()
        return out

    def _compress(
        self, flat: Tensor, wire: Tensor, splits: Sequence[int], sizes: Sequence[int], contents: Contents
    ) -> None:
        self.sampling.count(flat.nbytes, wire.nbytes)
        options: dict[str, Any] = {"hadamard": self.settings.hadamard}
        rows = list(zip(split_rows(flat, splits, splits), split_rows(wire, splits, sizes), strict=True))
        old_rows: list[Tensor | None] = [None] * len(rows)
        new_rows = old_rows  # without feedback, neither is used
        if self.settings.error_feedback and contents:
            options |= {"beta": self.settings.err_beta, "unit": self.scale.value()}
            old_buffer, new_buffer = self.errors.buffers(contents, splits, flat.device)
            error_sizes = self.errors.sizes(splits)
            new_rows = list(split_rows(new_buffer, splits, error_sizes))
            old_rows = old_rows if old_buffer is None else list(split_rows(old_buffer, splits, error_sizes))
        for (gradient, packed), error, new_error in zip(rows, old_rows, new_rows, strict=True):
            width = gradient.shape[1]
            unit, hadamard = options.get("unit", 1.0), self.settings.hadamard
            sample = None
            if (blocks := self.sampling.blocks(width, self.packing)) is not None:  # before the error is overwritten
                block_size = self.packing.block_size
                sample = compensate(gradient, error, blocks, unit=unit, block_size=block_size, hadamard=hadamard)
            ops.compress(gradient, packed, self.packing, error=error, new_error=new_error, **options)
            if sample is not None:
                self.sampling.record_error(sample, packed[:1], width, self.packing, hadamard)
        if options.get("beta") is not None:  # not applied until ``finish_step``: a skipped step keeps the old error
            self.errors.store(contents, new_buffer)


class QuantizedSums(SumsGather):
    """Sums of gradients in 4 or 8 bits, with error feedback. See Note [Quantized sums].

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
        self.sampling = Sampling()

    def gather(self, hop: ReduceHop, sums: Tensor, spans: Spans) -> Transfer:
        width = sums.numel()
        wire = self.packing.empty(1, width, sums)
        with hop.collectives.labeled("loco_compress"):
            self._compress(hop, sums, wire, spans)
        codes = yield from all_gather(hop.collectives, wire.view(-1), operation="sums_all_gather")
        gathered = torch.zeros(hop.size, width, dtype=sums.dtype, device=sums.device)  # ``apply`` adds to it
        with hop.collectives.labeled("loco_decompress"):
            ops.apply(codes.view(hop.size, -1), gathered, self.packing)
        return gathered.view(-1)

    def _compress(self, hop: ReduceHop, sums: Tensor, wire: Tensor, spans: Spans) -> None:
        self.sampling.count(sums.nbytes, wire.nbytes)
        contents, splits = (spans,), [sums.numel()]
        if not spans:
            ops.compress(sums.view(1, -1), wire, self.packing)
            return
        unit, (old_buffer, new_buffer) = (hop.scale.value(), self.errors.buffers(contents, splits, sums.device))
        error = None if old_buffer is None else old_buffer.view(1, -1)
        sample = None
        if (blocks := self.sampling.blocks(sums.numel(), self.packing)) is not None:
            sample = compensate(sums.view(1, -1), error, blocks, unit=unit, block_size=self.packing.block_size)
        beta, new_error = self.settings.err_beta, new_buffer.view(1, -1)
        ops.compress(sums.view(1, -1), wire, self.packing, error=error, new_error=new_error, beta=beta, unit=unit)
        if sample is not None:
            self.sampling.record_error(sample, wire, sums.numel(), self.packing)
        self.errors.store(contents, new_buffer)
