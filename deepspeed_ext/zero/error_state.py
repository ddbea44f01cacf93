# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Tells reductions that remember what became of what they have reduced."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from deepspeed_ext.comm.hops import Memory, Run
from deepspeed_ext.comm.reshard import FlatLayout, Moves


class Whereabouts(NamedTuple):
    """Where elements of a parameter are among the gradients of this rank that cross between groups."""

    name: str  # of the parameter
    start: int  # within the parameter
    run: Run


class Remembering:
    """A ZeRO optimizer whose moves may remember; the class to mix it into comes after it."""

    _moves: Moves
    _stepping = False

    def connect_memory(self) -> None:
        """Once the moves are there."""
        self._moves.inter.scale = self._gradient_scale

    @property
    def memory(self) -> Memory:
        """Of the hop between groups."""
        return self._moves.inter.memory

    def _gradient_scale(self) -> float:
        scaler = self.torch_autocast_gradscaler
        return float(self.loss_scale) * (scaler.get_scale() if scaler else 1.0)

    def step(self, closure: Any = None) -> Any:
        """DeepSpeed's, of which the memory hears whether it was skipped."""
        self._stepping = True
        try:
            done = super().step(closure)
        finally:
            self._stepping = False
        self.memory.finish_step(not self.overflow)
        return done

    @property
    def keeps_zeros(self) -> bool:
        """Whether padding, which is zero, is zero when it has been reduced."""
        return self._moves.inter.keeps_zeros

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """DeepSpeed's. What moves remember goes along."""
        super().offload_states(*args, **kwargs)
        self.memory.offload()

    def destroy(self) -> None:
        """DeepSpeed's; and forget."""
        self._moves.inter.memory = Memory()
        super().destroy()

    def gradients_dropped(self) -> None:
        """What was reduced will not be applied, outside of a step, which tells itself."""
        if not self._stepping:
            self.memory.finish_step(False)

    def whereabouts(self) -> list[Whereabouts]:
        """Of all trained parameters."""
        raise NotImplementedError


def whereabouts_of(
    name: str, numel: int, layout: FlatLayout, col: int, buffer: int, offset: int, start: int
) -> Iterable[Whereabouts]:
    """Of a parameter that is, or is a part of, a flat buffer.

    Args:
        name: of the parameter.
        numel: its elements.
        layout: of the flat buffer.
        col: this rank's column.
        buffer: its number in runs.
        offset: of the parameter in the flat buffer.
        start: of the flat buffer's chunk in the rank's shard.
    """
    for row in range(layout.rows):
        first = (row * layout.cols + col) * layout.chunk
        begin, end = max(first, offset), min(first + layout.chunk, offset + numel)
        if begin < end:
            yield Whereabouts(name, begin - offset, Run(buffer, row, start + begin - first, end - begin))
