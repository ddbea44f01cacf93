# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""In what form things cross between groups, as far as it tells in bytes. Pure."""

from dataclasses import dataclass

from deepspeed_ext.loco.settings import EXACT, LocoSettings, UpdateSettings
from deepspeed_ext.strategy import Direction, GroupSizes, Phase, Placement, Strategy, Volume

BITS = 8


@dataclass(frozen=True)
class Compression:
    """What crosses in few bits.

    Attributes:
        loco: gradients do; None: as they are.
        updates: updated parameters do, or sums that come back; None: as they are.
    """

    loco: LocoSettings | None = None
    updates: UpdateSettings | None = None

    @property
    def label(self) -> str:
        """Return what follows a strategy's name."""
        return label(self.loco is not None, self.updates is not None)

    def allows(self, strategy: Strategy) -> bool:
        """Whether a strategy may have it.

        Where parameters are released, nobody holds what updates differ from. Sums do not come back without loss.
        """
        if self.updates is None:
            return True
        return strategy.p != Placement.G and (strategy.os == Placement.G or self.updates.bits != EXACT)

    def volume(self, phase: Phase, gradient_bytes: float, parameter_bytes: float) -> Volume:
        """Return the bytes that a rank receives in a phase of a step.

        Reductions shrink between groups. So do sums that come back. Updated parameters that cross are decoded where
        they are held: with p = N they go through the hop inside the group in that form as well. One update of
        ``resync_T`` travels as it is.

        Args:
            phase: one of a strategy's.
            gradient_bytes, parameter_bytes: of an element.
        """
        intra, inter = phase.volume.intra, phase.volume.inter
        if phase.kind == Direction.REDUCE and self.loco is not None:
            return Volume(intra, inter * self.loco.wire_bits / (BITS * gradient_bytes))
        if phase.kind == Direction.REDUCE or self.updates is None or phase.each_micro_step or not inter:
            return phase.volume
        if phase.name == "gather updates":
            plain = BITS * parameter_bytes
            shrunk = (self.updates.wire_bits + (plain - self.updates.wire_bits) / self.updates.resync_T) / plain
            return Volume(intra * shrunk, inter * shrunk)
        return Volume(intra, inter * self.updates.sums.wire_bits / (BITS * gradient_bytes))

    def kept_bytes(self, strategy: Strategy, sizes: GroupSizes, trainable: float) -> float:
        """Return the bytes of errors that a rank keeps, before and after a step."""
        kept = 0.0 if self.loco is None else self.loco.kept_bits / BITS * trainable / sizes.shards(Placement.I)
        if self.updates is not None and strategy.os != Placement.G:
            kept += self.updates.sums.kept_bits / BITS * trainable / sizes.shards(Placement.G)
        return 2 * kept


def label(loco: bool, updates: bool) -> str:
    """Return what follows the name of a strategy with LoCo, and with updates in few bits."""
    return (" + LoCo" if loco else "") + (" + updates" if updates else "")


AS_IT_IS = Compression()
