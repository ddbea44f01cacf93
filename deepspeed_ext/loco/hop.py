# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The reduce hop between groups in few bits: one all-to-all, in which payload and scales travel together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.timer import NoopTimer
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_ext.comm.agreement import any_rank
from deepspeed_ext.comm.hops import Contents, ReduceHop, Transfer
from deepspeed_ext.deepspeed_types import Timers
from deepspeed_ext.loco import ops, reference
from deepspeed_ext.loco.feedback import ErrorFeedback, split_rows
from deepspeed_ext.loco.packing import Packing
from deepspeed_ext.loco.settings import KEY, LocoSettings

LOOK = 2**20  # elements that are looked at
COMPRESS_TIMER, DECOMPRESS_TIMER = "loco_compress", "loco_decompress"


@dataclass
class Sent:
    """What was sent since the last report.

    Attributes:
        plain: bytes that gradients would have had.
        wire: bytes that were sent instead, to this rank itself included.
        squares: of what was looked at, two sums, on its device: of what quantization has taken, and of what it was
            given, errors of earlier buckets included; None: nothing was.
    """

    plain: int = 0
    wire: int = 0
    squares: Tensor | None = None

    @property
    def compression(self) -> float:
        """Return how many times fewer bytes were sent."""
        return self.plain / self.wire if self.wire else 1.0

    @property
    def relative_error(self) -> float:
        """Return what one quantization loses, in the 2-norm; error feedback sends it later. Blocks until it is known.

        It is a sample: the first ``LOOK`` elements of what a step's first bucket has for one group.
        """
        lost, whole = (0.0, 0.0) if self.squares is None else self.squares.tolist()
        return (lost / whole) ** 0.5 if whole else 0.0


class LocoHop(ReduceHop):
    """Sums in 4 or 8 bits with error feedback; see Note [Arithmetic of a block] in ``reference.py``.

    A rank's own part is quantized, too, so a sum does not depend on who owns it. An all-reduce is this reduction, and
    a gather of the sums as they are.

    Args:
        group: process group.
        name: in the records of the comms logger.
        settings: bits, blocks, feedback.
        device: where errors are kept; None: where gradients are.
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
        self.keeps_zeros = not settings.hadamard  # a rotation spreads what its neighbors have
        self.sent = Sent()
        self.look = False  # whether to measure what quantization takes from the next bucket
        self.timers: Timers = NoopTimer()
        ops.load_kernels()
        self._check_kernels()

    def _check_kernels(self) -> None:
        """Raise on all ranks of the group, before there are gradients, if one of them would in its first reduction."""
        device = get_accelerator().device_name()
        if device == "cpu":
            return
        lacking = ops.lacks_kernels(device)
        if any_rank(lacking, self.collectives.group):
            raise RuntimeError(
                f"The kernels of LoCo were built for the CPU only{'' if lacking else ' on another rank'}, but "
                f"gradients are on {device}. {ops.BUILD_THEM} Or remove {KEY}."
            )

    def reduce_scatter(self, flat: Tensor, splits: Sequence[int], contents: Contents = ()) -> Transfer:
        if self.size == 1 or not flat.numel():
            return flat
        sizes = [self.packing.row_bytes(split) for split in splits]
        wire = torch.empty(sum(sizes), dtype=torch.uint8, device=flat.device)
        self.timers(COMPRESS_TIMER).start()
        with self.collectives.labeled("loco_compress"):
            self._compress(flat, wire, splits, sizes, contents)
        self.timers(COMPRESS_TIMER).stop()
        dtype, width, mine = flat.dtype, splits[self.rank], sizes[self.rank]
        del flat  # the caller's, which may be freed meanwhile
        pieces = wire.new_empty(self.size * mine)
        yield self.collectives.all_to_all(pieces, wire, sizes, "loco_reduce_scatter")
        out = torch.empty(width, dtype=dtype, device=pieces.device)
        self.timers(DECOMPRESS_TIMER).start()
        if width:
            with self.collectives.labeled("loco_decompress"):
                ops.decompress(pieces.view(self.size, mine), out, self.packing, hadamard=self.settings.hadamard)
        self.timers(DECOMPRESS_TIMER).stop()
        return out

    def _compress(
        self, flat: Tensor, wire: Tensor, splits: Sequence[int], sizes: Sequence[int], contents: Contents
    ) -> None:
        self.sent.plain += flat.nbytes
        self.sent.wire += wire.nbytes
        options: dict[str, Any] = {"hadamard": self.settings.hadamard}
        rows = list(zip(split_rows(flat, splits, splits), split_rows(wire, splits, sizes), strict=True))
        before: list[Tensor | None] = [None] * len(rows)
        after = before
        if self.settings.error_feedback and contents:
            options |= {"beta": self.settings.err_beta, "unit": self.scale()}
            old, new = self.errors.buffers(contents, splits, flat.device)
            kept = self.errors.sizes(splits)
            after = list(split_rows(new, splits, kept))
            before = before if old is None else list(split_rows(old, splits, kept))
        for (gradient, packed), error, new_error in zip(rows, before, after, strict=True):
            look, self.look = self.look, False
            given = self._compensated(gradient, error, options.get("unit", 1.0)) if look else None
            ops.compress(gradient, packed, self.packing, error=error, new_error=new_error, **options)
            if given is not None:
                self._note(given, packed, gradient.shape[1])
        if options.get("beta") is not None:
            self.errors.keep(contents, new)

    def _compensated(self, gradient: Tensor, error: Tensor | None, unit: float) -> Tensor:
        """Return what is quantized of the first row's first blocks, before the error is overwritten: 1D, fp32."""
        width, blocks = gradient.shape[1], self._looked_at(gradient.shape[1])
        given = gradient[0, : blocks.stop * self.settings.block_size].float()
        if error is None:
            return given
        old = reference.decode_error(error[:1], width, self.settings.block_size, self.settings.hadamard, blocks)
        return given + unit * old[0, : given.numel()]

    def _note(self, given: Tensor, packed: Tensor, width: int) -> None:
        sent = reference.decode(packed[:1], width, self.packing, self.settings.hadamard, self._looked_at(width))
        lost = given - sent[0, : given.numel()]
        self.sent.squares = torch.stack([lost.square().sum(), given.square().sum()])

    def _looked_at(self, width: int) -> range:
        return range(min(self.packing.blocks(width), max(1, LOOK // self.settings.block_size)))
