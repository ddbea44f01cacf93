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

SAMPLE_NUMEL = 2**20  # elements of a sample


class Sampling:
    """Counts bytes sent since the last report, and samples the quantization error.

    The sample is taken from a step's first message: the first ``SAMPLE_NUMEL`` elements of its part for one group.

    Attributes:
        unquantized_bytes: bytes that would have been sent unquantized.
        wire_bytes: bytes that were sent instead, including those to this rank itself.
        samples_next: whether to sample the next message.
        squares: two sums of squares over the sample, on its device: of the quantization error, and of the input,
            including errors of earlier messages. None if nothing was sampled.
    """

    def __init__(self) -> None:
        self.samples_next = False
        self.restart()

    def restart(self, samples_next: bool = False) -> None:
        """Start a new report; ``samples_next``: whether to sample its first message."""
        self.unquantized_bytes = self.wire_bytes = 0
        self.squares: Tensor | None = None
        self.samples_next = samples_next

    def count(self, unquantized_bytes: int, wire_bytes: int) -> None:
        """Count the bytes of a message."""
        self.unquantized_bytes += unquantized_bytes
        self.wire_bytes += wire_bytes

    def blocks(self, width: int, packing: Packing) -> range | None:
        """Return the blocks of a message of ``width`` elements to sample, or None if it is not sampled."""
        samples_next, self.samples_next = self.samples_next, False  # one message per report
        return _blocks(width, packing) if samples_next and width else None

    def record_error(
        self, quantizer_input: Tensor, packed: Tensor, width: int, packing: Packing, hadamard: bool = False
    ) -> None:
        """Record the quantization error of the sample.

        Args:
            quantizer_input: input of quantization in the sampled blocks, 1D, fp32.
            packed: the message, a row: (1, bytes).
            width, packing, hadamard: properties of the message.
        """
        decoded = reference.decode(packed, width, packing, hadamard, _blocks(width, packing))
        error = quantizer_input - decoded[0, : quantizer_input.numel()]
        self.squares = torch.stack([error.square().sum(), quantizer_input.square().sum()])

    @property
    def compression(self) -> float:
        """Return the factor by which the bytes were reduced."""
        return self.unquantized_bytes / self.wire_bytes if self.wire_bytes else 1.0

    @property
    def relative_error(self) -> float:
        """Return the error of one quantization relative to its input, in the 2-norm. Waits for the device."""
        lost, total = (0.0, 0.0) if self.squares is None else self.squares.tolist()
        return (lost / total) ** 0.5 if total else 0.0


class StepReport:
    """Writes a step's sample to an engine's monitor, which writes on rank 0 only, and logs timers.

    Args:
        engine: owner of the monitor and the timers.
        sampling: sample to write and restart.
        events: label of the events.
        timers: names of timers that are logged when DeepSpeed prints.
    """

    def __init__(self, engine: Engine, sampling: Sampling, events: str, timers: Sequence[str] = ()) -> None:
        self._engine, self._sampling, self._events, self._timers = engine, sampling, events, timers
        # Other ranks take no sample: reading it would make their host wait for the device.
        self._monitored = engine.monitor.enabled and dist.get_rank() == 0
        sampling.restart(self._monitored)

    def end_step(self) -> None:
        """Called at the end of each step."""
        engine, sampling = self._engine, self._sampling
        if self._monitored and sampling.wire_bytes:
            values = {"relative_error": sampling.relative_error, "compression": sampling.compression}
            samples = engine.global_samples
            engine.monitor.write_events([(f"{self._events}/{name}", value, samples) for name, value in values.items()])
        sampling.restart(self._monitored)
        interval = engine.steps_per_print()  # None by default
        if self._timers and interval and engine.global_steps % interval == 0:
            engine.timers.log(self._timers)


def compensate(
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
    old_error = reference.decode_error(error[:1], rows.shape[1], block_size, hadamard, blocks)
    return inputs + unit * old_error[0, : inputs.numel()]


def _blocks(width: int, packing: Packing) -> range:
    return range(min(packing.blocks(width), max(1, SAMPLE_NUMEL // packing.block_size)))
