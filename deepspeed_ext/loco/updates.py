# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Updated parameters that cross between groups as what receivers lack: in a few bits, or in as many as it takes."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_ext.comm.hops import Agree, Transfer, Update, UpdateHop, all_gather
from deepspeed_ext.comm.packing import fill_up
from deepspeed_ext.loco import ops
from deepspeed_ext.loco.kernels import require_kernels
from deepspeed_ext.loco.packing import Packing
from deepspeed_ext.loco.sampling import Sampling
from deepspeed_ext.loco.settings import UPDATES_KEY, UpdateSettings


class DifferenceHop(UpdateHop):
    """Gathers of updates as differences.

    Args:
        group: process group.
        name: in the records of the comms logger.
        settings: of the differences.

    Attributes:
        sent: what was sent in a step.
        on_step: called at the end of each step.
    """

    def __init__(self, group: ProcessGroup | None, name: str, settings: UpdateSettings) -> None:
        super().__init__(group, name)
        self.sent = Sampling()
        self.on_step: Callable[[], None] = lambda: None
        self.whole_every = settings.resync_T
        require_kernels(get_accelerator().device_name(), self.collectives.group, UPDATES_KEY)

    def all_gather(self, shard: Tensor, out: Tensor | None = None) -> Transfer:
        """Gather differences, or parameters that travel as they are; see ``GatherHop``."""
        differences = shard.dtype == torch.uint8
        return all_gather(self.collectives, shard, out, "difference_all_gather" if differences else "all_gather")

    def write(self, arrived: Tensor, held: Tensor) -> None:
        with self.collectives.labeled("loco_apply"):
            self._write(arrived, held)

    @abstractmethod
    def _write(self, arrived: Tensor, held: Tensor) -> None: ...

    def finish_step(self) -> None:
        self.on_step()


class QuantizedDifferences(DifferenceHop):
    """Differences in 4 or 8 bits; see Note [Differences] in ``reference.py``. Arguments as of ``DifferenceHop``."""

    def __init__(self, group: ProcessGroup | None, name: str, settings: UpdateSettings) -> None:
        super().__init__(group, name, settings)
        assert isinstance(settings.bits, int)
        self.packing = Packing(settings.bits, settings.difference_block)

    def encode(self, updates: Sequence[Update], agree: Agree) -> list[Tensor]:
        return [self._encode(update) for update in updates]

    def _encode(self, update: Update) -> Tensor:
        updated, held, width = update.updated(), update.held, update.held.numel()
        size = self.packing.row_bytes(update.most)
        if not width:  # another rank has some
            return torch.zeros(size, dtype=torch.uint8, device=held.device)
        wire = self.packing.empty(1, width, held)
        self.sent.count(held.nbytes, wire.nbytes)
        given = self.sent.given(width, self.packing, partial(_difference, updated, held, self.packing.block_size))
        with self.collectives.labeled("loco_difference"):
            ops.difference(updated.view(1, -1), held.view(1, -1), wire, self.packing)
        if given is not None:
            self.sent.note(given, wire, width, self.packing)
        return torch.nn.functional.pad(wire.view(-1), (0, size - wire.numel()))

    def _write(self, arrived: Tensor, held: Tensor) -> None:
        size = self.packing.row_bytes(held.shape[1])
        ops.apply(arrived[:, :size].contiguous(), held, self.packing)


def _difference(updated: Tensor, held: Tensor, block_size: int, blocks: range) -> Tensor:
    some = slice(blocks.stop * block_size)
    return updated[some].float() - held[some].float()


class LosslessDifferences(DifferenceHop):
    """Differences in as many bits as they need; see Note [Lossless updates] in ``lossless.py``.

    All updates of a step are measured first; ranks agree on lengths, for which the host waits for the device, once.
    Arguments as of ``DifferenceHop``.
    """

    def encode(self, updates: Sequence[Update], agree: Agree) -> list[Tensor]:
        if not updates:
            return []
        with self.collectives.labeled("loco_difference"):
            headers, lengths = zip(*map(self._measure, updates), strict=True)
        found: list[int] = agree(torch.stack(lengths)).tolist()
        with self.collectives.labeled("loco_difference"):
            return [
                self._pack(update, header, fill_up(length, self.multiple))
                for update, header, length in zip(updates, headers, found, strict=True)
            ]

    @staticmethod
    def _measure(update: Update) -> tuple[Tensor, Tensor]:
        """Return a row's header and length."""
        return ops.header_of(ops.measure(update.updated().view(1, -1), update.held.view(1, -1)))

    def _pack(self, update: Update, header: Tensor, length: int) -> Tensor:
        held = update.held
        if not held.numel():  # another rank has some
            return torch.zeros(length, dtype=torch.uint8, device=held.device)
        wire = torch.empty(1, length, dtype=torch.uint8, device=held.device)
        self.sent.count(held.nbytes, wire.nbytes)
        ops.pack(update.updated().view(1, -1), held.view(1, -1), header, wire)
        return wire.view(-1)

    def _write(self, arrived: Tensor, held: Tensor) -> None:
        ops.apply_lossless(arrived.contiguous(), held)
