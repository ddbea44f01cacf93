# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""How many bytes gradients, updates and sums take between groups, quantized or not. Pure."""

from dataclasses import dataclass

from deepspeed_ext.config.settings import EXACT, LocoSettings, UpdateSettings
from deepspeed_ext.strategy import Direction, GroupSizes, Phase, Placement, Strategy, Volume

BITS = 8


@dataclass(frozen=True)
class Compression:
    """What crosses between groups in few bits.

    Attributes:
        loco: how gradients are quantized; None: they are not.
        updates: how updated parameters, or sums that come back, are quantized; None: they are not.
    """

    loco: LocoSettings | None = None
    updates: UpdateSettings | None = None

    @classmethod
    def parse(cls, loco: object, updates: object) -> "Compression":
        """Return the compression of the values of our two keys; None for a key that is not set.

        Raises:
            ValueError: a value is not valid.
        """
        return cls(
            None if loco is None else LocoSettings.parse(loco),
            None if updates is None else UpdateSettings.parse(updates),
        )

    @property
    def label(self) -> str:
        """Return what follows a strategy's name."""
        return label(self.loco is not None, self.updates is not None)

    def allows(self, strategy: Strategy) -> bool:
        """Return whether a strategy can be combined with it.

        With p = G no rank holds parameters that an update could differ from. Sums cannot be sent without loss.
        """
        if self.updates is None:
            return True
        return strategy.p != Placement.G and (strategy.os == Placement.G or self.updates.bits != EXACT)

    def volume(self, phase: Phase, gradient_bytes: float, parameter_bytes: float) -> Volume:
        """Return the bytes that a rank receives in a phase of a step.

        Reductions, and sums that come back, shrink between groups. Updated parameters that cross are decoded on the
        ranks that hold them, so with p = N they shrink inside the group as well. One update in ``resync_T`` travels
        unquantized.

        Args:
            phase: one of a strategy's phases.
            gradient_bytes, parameter_bytes: bytes of an element.
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
        """Return the bytes of error feedback that a rank holds during a step: the errors before and after it."""
        return 2 * self.saved_bytes(strategy, sizes, trainable)

    def saved_bytes(self, strategy: Strategy, sizes: GroupSizes, trainable: float) -> float:
        """Return the bytes of error feedback that a rank holds between steps, and saves."""
        if sizes.groups == 1:
            return 0.0  # nothing crosses
        kept = 0.0 if self.loco is None else self.loco.kept_bits / BITS * trainable / sizes.shards(Placement.I)
        if self.updates is not None and strategy.os != Placement.G:
            kept += self.updates.sums.kept_bits / BITS * trainable / sizes.shards(Placement.G)
        return kept


def label(loco: bool, updates: bool) -> str:
    """Return what follows a strategy's name with LoCo, and with updates in few bits."""
    return (" + LoCo" if loco else "") + (" + updates" if updates else "")


AS_IT_IS = Compression()
# As planned side by side: exact, with LoCo, and with updates in few bits as well.
FORMS = (AS_IT_IS, Compression(LocoSettings()), Compression(LocoSettings(), UpdateSettings()))
