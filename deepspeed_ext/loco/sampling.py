# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Measures compression, and the quantization error on a sample, and reports both."""

from collections.abc import Sequence

import torch
from deepspeed import comm as dist
from torch import Tensor

from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.loco import reference
from deepspeed_ext.loco.reference import Packing

LOOK = 2**20  # elements of a sample


class Sampling:
    """Counts bytes sent since the last report, and samples the quantization error.

    The sample is taken from a step's first message: the first ``LOOK`` elements of its part for one group.

    Attributes:
        plain: bytes that would have been sent unquantized.
        wire: bytes that were sent instead, including those to this rank itself.
        look: whether to sample the next message.
        squares: two sums of squares over the sample, on its device: of the quantization error, and of the input,
            including errors of earlier messages. None if nothing was sampled.
    """

    def __init__(self) -> None:
        self.look = False
        self.begin()

    def begin(self, look: bool = False) -> None:
        """Start a new report; ``look``: whether to sample its first message."""
        self.plain = self.wire = 0
        self.squares: Tensor | None = None
        self.look = look

    def count(self, plain: int, wire: int) -> None:
        """Count the bytes of a message."""
        self.plain += plain
        self.wire += wire

    def blocks(self, width: int, packing: Packing) -> range | None:
        """Return the blocks of a message of ``width`` elements to sample, or None if it is not sampled."""
        look, self.look = self.look, False
        return _blocks(width, packing) if look and width else None

    def note(self, given: Tensor, packed: Tensor, width: int, packing: Packing, hadamard: bool = False) -> None:
        """Record the quantization error of the sample.

        Args:
            given: input of quantization in the sampled blocks, 1D, fp32.
            packed: the message, a row: (1, bytes).
            width, packing, hadamard: properties of the message.
        """
        sent = reference.decode(packed, width, packing, hadamard, _blocks(width, packing))
        lost = given - sent[0, : given.numel()]
        self.squares = torch.stack([lost.square().sum(), given.square().sum()])

    @property
    def compression(self) -> float:
        """Return the factor by which the bytes were reduced."""
        return self.plain / self.wire if self.wire else 1.0

    @property
    def relative_error(self) -> float:
        """Return the error of one quantization relative to its input, in the 2-norm. Waits for the device."""
        lost, total = (0.0, 0.0) if self.squares is None else self.squares.tolist()
        return (lost / total) ** 0.5 if total else 0.0


class StepReport:
    """Writes a step's sample to an engine's monitor, which writes on rank 0 only, and logs timers.

    Args:
        engine: owner of the monitor and the timers.
        sent: sample to write and restart.
        events: label of the events.
        timers: names of timers that are logged when DeepSpeed prints.
    """

    def __init__(self, engine: Engine, sent: Sampling, events: str, timers: Sequence[str] = ()) -> None:
        self._engine, self._sent, self._events, self._timers = engine, sent, events, timers
        self._monitored = engine.monitor.enabled and dist.get_rank() == 0
        sent.begin(self._monitored)

    def end_step(self) -> None:
        """Called at the end of each step."""
        engine, sent = self._engine, self._sent
        if self._monitored and sent.wire:
            values = {"relative_error": sent.relative_error, "compression": sent.compression}
            samples = engine.global_samples
            engine.monitor.write_events([(f"{self._events}/{name}", value, samples) for name, value in values.items()])
        sent.begin(self._monitored)
        every = engine.steps_per_print()  # None by default
        if self._timers and every and engine.global_steps % every == 0:
            engine.timers.log(self._timers)


def compensated(
    rows: Tensor, error: Tensor | None, blocks: range, *, unit: float, block_size: int, hadamard: bool = False
) -> Tensor:
    """Return the input of quantization, errors included, of the first row's first blocks: 1D, fp32.

    Call it before ``ops.compress``, which overwrites the error.

    Args:
        rows: (rows, width).
        error: see ``ops.compress``.
        blocks: a range that starts with the first block.
        unit, block_size, hadamard: see ``ops.compress``.
    """
    inputs = rows[0, : blocks.stop * block_size].float()
    if error is None:
        return inputs
    old = reference.decode_error(error[:1], rows.shape[1], block_size, hadamard, blocks)
    return inputs + unit * old[0, : inputs.numel()]


def _blocks(width: int, packing: Packing) -> range:
    return range(min(packing.blocks(width), max(1, LOOK // packing.block_size)))
