# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Bytes of gradients, updates and sums between groups, quantized or not. Pure."""

from dataclasses import dataclass

from deepspeed_ext.config.settings import EXACT, ORDERED, ORDERED_LEVELS, LocoSettings, UpdateSettings
from deepspeed_ext.strategy import Direction, GroupSizes, Phase, Placement, Strategy, Volume

BITS = 8


@dataclass(frozen=True)
class Compression:
    """Quantization of data between groups.

    Attributes:
        loco: settings for gradients; None if they are not quantized.
        updates: settings for updated parameters or gathered gradient sums; None if they are not quantized.
    """

    loco: LocoSettings | None = None
    updates: UpdateSettings | None = None

    @classmethod
    def parse(cls, loco: object, updates: object) -> "Compression":
        """Return the compression for the values of our two keys; None for a key that is not set.

        Raises:
            ValueError: a value is not valid.
        """
        return cls(
            None if loco is None else LocoSettings.parse(loco),
            None if updates is None else UpdateSettings.parse(updates),
        )

    @property
    def label(self) -> str:
        """Return the suffix of a strategy's name."""
        return label(self.loco is not None, self.updates is not None)

    def allows(self, strategy: Strategy) -> bool:
        """Return whether a strategy can be combined with this compression.

        With p = G no rank holds the old parameters that a difference needs. Sums cannot be sent losslessly.
        """
        if self.updates is None:
            return True
        return strategy.p != Placement.G and (strategy.os == Placement.G or self.updates.bits != EXACT)

    def allows_sums(self, ordered: tuple[str, ...]) -> bool:
        """Return whether ordered sums of these hops can be combined with this compression; see ``refused.py``."""
        return self.loco is None or ordered != ORDERED_LEVELS[ORDERED]

    def volume(self, phase: Phase, gradient_bytes: float, parameter_bytes: float) -> Volume:
        """Return the bytes that a rank receives in a phase of a step.

        Reductions and gathered sums shrink between groups. Updated parameters are decoded on the ranks that have p, so
        with p = N they shrink inside the group as well. One update in ``resync_T`` is sent unquantized.

        Args:
            phase: a phase of a strategy.
            gradient_bytes, parameter_bytes: bytes of an element.
        """
        intra, inter = phase.volume.intra, phase.volume.inter
        if phase.kind == Direction.REDUCE and self.loco is not None:
            return Volume(intra, inter * self.loco.wire_bits / (BITS * gradient_bytes))
        # Gathers for forward and backward are exact, and nothing is quantized within one group.
        if phase.kind == Direction.REDUCE or self.updates is None or phase.each_micro_step or not inter:
            return phase.volume
        if phase.name in ("gather updates", "gather whole updates"):
            exact_bits = BITS * parameter_bytes
            ratio = (
                self.updates.wire_bits + (exact_bits - self.updates.wire_bits) / self.updates.resync_T
            ) / exact_bits
            return Volume(intra * (ratio if phase.name == "gather updates" else 1.0), inter * ratio)
        return Volume(intra, inter * self.updates.sums.wire_bits / (BITS * gradient_bytes))

    def error_bytes(self, strategy: Strategy, sizes: GroupSizes, trainable: float) -> float:
        """Return the bytes of error feedback that a rank holds between steps, and saves."""
        if sizes.groups == 1:
            return 0.0  # nothing is sent between groups
        total = (
            0.0 if self.loco is None else self.loco.error_feedback_bits / BITS * trainable / sizes.shards(Placement.I)
        )
        if self.updates is not None and strategy.os != Placement.G:
            total += self.updates.sums.error_feedback_bits / BITS * trainable / sizes.shards(Placement.G)
        return total


def label(loco: bool, updates: bool) -> str:
    """Return the suffix of a strategy's name with LoCo, and with quantized updates."""
    return (" + LoCo" if loco else "") + (" + updates" if updates else "")


UNCOMPRESSED = Compression()
# The compressions that a plan compares: exact, with LoCo, and also with quantized updates.
COMPRESSIONS = (UNCOMPRESSED, Compression(LocoSettings()), Compression(LocoSettings(), UpdateSettings()))
