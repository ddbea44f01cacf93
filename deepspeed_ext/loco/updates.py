# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Encodes updated parameters as differences to the receivers' values, quantized or without loss."""

from collections.abc import Sequence

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.comm.collectives import Collectives
from deepspeed_ext.comm.hops import MaxOverRanks, Update
from deepspeed_ext.comm.packing import fill_up
from deepspeed_ext.config.settings import UpdateSettings
from deepspeed_ext.loco import lossless, ops
from deepspeed_ext.loco.ops import require_kernels
from deepspeed_ext.loco.reference import Packing
from deepspeed_ext.loco.sampling import Sampling, StepReport


class _Differences:
    """Common part of quantized and lossless differences.

    Args:
        collectives: collectives of the hop that sends the differences.
        settings: settings of the differences.

    Attributes:
        sampling: counts the bytes sent in a step.
        report: reports each step; None for no reports.
    """

    def __init__(self, collectives: Collectives, settings: UpdateSettings) -> None:
        self.collectives = collectives
        self.sampling = Sampling()
        self.report: StepReport | None = None
        self.resync_interval = settings.resync_T
        require_kernels(get_accelerator().device_name(), collectives.group, UpdateSettings.key)

    def finish_step(self) -> None:
        """Report; see ``Differences``."""
        if self.report is not None:
            self.report.end_step()


class QuantizedDifferences(_Differences):
    """Differences in 4 or 8 bits; see Note [Differences] in ``reference.py``. For arguments see ``_Differences``."""

    def __init__(self, collectives: Collectives, settings: UpdateSettings) -> None:
        super().__init__(collectives, settings)
        assert isinstance(settings.bits, int)
        self.packing = Packing(settings.bits, settings.difference_block)

    def encode(self, updates: Sequence[Update], max_over_ranks: MaxOverRanks) -> list[Tensor]:
        """Quantize each update's difference; see ``Differences``."""
        return [self._encode(update) for update in updates]

    def _encode(self, update: Update) -> Tensor:
        updated, replica, width = update.updated(), update.replica, update.replica.numel()
        size = self.packing.row_bytes(update.most_numel)
        if not width:  # other ranks have elements: send zeros, because the all-gather needs equal lengths
            return torch.zeros(size, dtype=torch.uint8, device=replica.device)
        wire = self.packing.empty(1, width, replica)
        self.sampling.count(replica.nbytes, wire.nbytes)
        sample = None
        if (blocks := self.sampling.blocks(width, self.packing)) is not None:
            sampled = slice(blocks.stop * self.packing.block_size)
            sample = updated[sampled].float() - replica[sampled].float()
        with self.collectives.labeled("loco_difference"):
            ops.difference(updated.view(1, -1), replica.view(1, -1), wire, self.packing)
        if sample is not None:
            self.sampling.record_error(sample, wire, width, self.packing)
        # All ranks must gather the same number of bytes.
        return torch.nn.functional.pad(wire.view(-1), (0, size - wire.numel()))

    def write(self, codes: Tensor, replica: Tensor) -> None:
        """Add received differences to this rank's values; see ``Differences``."""
        size = self.packing.row_bytes(replica.shape[1])  # received codes may be padded to a longer row
        with self.collectives.labeled("loco_apply"):
            ops.apply(codes[:, :size].contiguous(), replica, self.packing)


class HalfDifferences:
    """Differences in bf16 of weights in fp32; the rounding error of one is sent with the next one."""

    resync_interval = 0  # no update is sent unencoded

    def encode(self, updates: Sequence[Update], max_over_ranks: MaxOverRanks) -> list[Tensor]:
        """Return each update's difference in bf16, as bytes; see ``Differences``."""
        # The rounding error stays in the owner's fp32 weights, so the next difference includes it.
        return [(update.updated() - update.replica).bfloat16().view(torch.uint8) for update in updates]

    def write(self, codes: Tensor, replica: Tensor) -> None:
        """Add received differences to this rank's values; see ``Differences``."""
        replica.add_(codes.contiguous().view(torch.bfloat16))

    def finish_step(self) -> None:
        """Report nothing; see ``Differences``."""


class LosslessDifferences(_Differences):
    """Differences in as few bits as possible; see Note [Lossless updates] in ``lossless.py``.

    All updates of a step are measured first. Then the maximum length over ranks is computed; for this, the host waits
    for the device once per step. For arguments see ``_Differences``.
    """

    def encode(self, updates: Sequence[Update], max_over_ranks: MaxOverRanks) -> list[Tensor]:
        """Encode each update; see ``Differences``."""
        if not updates:
            return []
        with self.collectives.labeled("loco_difference"):
            headers, lengths = zip(*map(self._measure, updates), strict=True)
        # The host waits only here: it needs lengths to allocate.
        longest: list[int] = max_over_ranks(torch.stack(lengths)).tolist()
        with self.collectives.labeled("loco_difference"):
            # Equal lengths on all ranks, as the all-gather requires.
            return [
                self._pack(update, header, fill_up(length, self.collectives.multiple))
                for update, header, length in zip(updates, headers, longest, strict=True)
            ]

    @staticmethod
    def _measure(update: Update) -> tuple[Tensor, Tensor]:
        """Return a row's header and length."""
        return lossless.header_of(ops.measure(update.updated().view(1, -1), update.replica.view(1, -1)))

    def _pack(self, update: Update, header: Tensor, length: int) -> Tensor:
        replica = update.replica
        if not replica.numel():  # other ranks have elements: send zeros, because the all-gather needs equal lengths
            return torch.zeros(length, dtype=torch.uint8, device=replica.device)
        wire = torch.empty(1, length, dtype=torch.uint8, device=replica.device)
        self.sampling.count(replica.nbytes, wire.nbytes)
        ops.pack(update.updated().view(1, -1), replica.view(1, -1), header, wire)
        return wire.view(-1)

    def write(self, codes: Tensor, replica: Tensor) -> None:
        """Decode received updates; see ``Differences``."""
        with self.collectives.labeled("loco_apply"):
            ops.apply_lossless(codes.contiguous(), replica)
