# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Micro-steps of an accumulation: one backward each, whose last buckets may overlap the next one."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from deepspeed_ext.zero.context import Context


class FamilyGradients(Protocol):
    """Gradients of one parameter family that are being reduced."""

    @property
    def has_sent(self) -> bool:
        """Whether gradients of this accumulation have been sent as if they were complete."""

    def drain(self) -> None:
        """Wait for all buckets."""


class AccumulatingOptimizer(Protocol):
    """An optimizer that accumulates gradients over micro-batches, as DeepSpeed's and ``ParoOptimizer``."""

    _backward_active_depth: int
    gradients: Mapping[str, FamilyGradients]  # gradients that are being reduced, by family

    def is_gradient_accumulation_boundary(self) -> bool: ...
    def sync_gradients(self) -> None: ...


class MicroSteps:
    """The micro-steps of one optimizer.

    Args:
        context: shared constants.

    Attributes:
        has_begun: whether a backward has begun. A pipeline's engine ends some backwards twice.
        last_was_declared: whether an accumulation's last backward was declared before it ran.
        overlap: whether the last buckets of a micro-step may be sent during the next one. This requires that gradients
            are not read between the two.
        on_end: called after each micro-step but the last of an accumulation.
    """

    def __init__(self, context: Context, optimizer: AccumulatingOptimizer) -> None:
        self.has_begun = False
        self.overlap = False
        self.on_end: Callable[[], None] | None = None
        self._flush_follows = False  # whether this backward is the last one before a boundary that the caller declares
        self._context, self._optimizer = context, optimizer
        self.last_was_declared = False

    @property
    def is_last(self) -> bool:
        """Whether the last backward of an accumulation is running, if the engine has declared it. A backward inside a
        forward is not counted, because it runs before the declaration."""
        optimizer = self._optimizer
        return self._flush_follows or (
            optimizer._backward_active_depth > 0 and optimizer.is_gradient_accumulation_boundary()
        )

    @contextmanager
    def before_flush(self, last: bool) -> Iterator[None]:
        """Context of a backward whose boundary the caller declares afterwards, as a pipeline's flush does.

        Args:
            last: whether it is the last backward before the boundary.
        """
        self._flush_follows = last
        try:
            yield
        finally:
            self._flush_follows = False

    def end_micro_step(self) -> None:
        """End a micro-step whose buckets have been flushed; at the accumulation boundary reduce g -> os.

        Raises:
            RuntimeError: the boundary was canceled during the backward.
        """
        boundary, self.has_begun = self._optimizer.is_gradient_accumulation_boundary(), False
        self.last_was_declared = boundary or self._flush_follows
        if boundary:
            self._optimizer.sync_gradients()
        elif not self._flush_follows and any(gradients.has_sent for gradients in self._optimizer.gradients.values()):
            raise RuntimeError(
                "The accumulation boundary was canceled during a backward, but gradients are already being reduced "
                "between groups. Call set_gradient_accumulation_boundary before the backward, or set "
                "zero_optimization.overlap_comm to false."
            )
        elif not self.overlap:
            self.finish_buckets()
        if self.on_end is not None and not boundary:
            self.on_end()

    def finish_buckets(self) -> None:
        """Wait for the buckets that are being reduced, in order on the current stream."""
        with self._context.reductions.after_current():
            for gradients in self._optimizer.gradients.values():
                gradients.drain()
        self._context.reductions.wait()  # or the current stream would read incomplete sums
