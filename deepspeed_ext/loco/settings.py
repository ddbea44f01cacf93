# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The sub-keys of ``zeropp_loco_param`` and ``paro_quantized_updates``, validated. Pure: no torch, no DeepSpeed."""

from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from deepspeed_ext.values import EXACTLY, made, one_of

KEY = "zero_optimization.zeropp_loco_param"
UPDATES_KEY = "zero_optimization.paro_quantized_updates"
EXACT: Literal["exact"] = "exact"
# For differences, and for everything in 8 bits. Sums of gradients in 4 bits take smaller blocks: with blocks of 128,
# training ends 0.65 % from exact training. Measured by tests/perf/convergence.py.
_BLOCK, _BLOCK_OF_SUMS = 128, 32
# Bits that a parameter takes without loss at a learning rate of 3e-4; from 1.2 at 1e-5 to 6 at 1e-3. Measured by
# tests/perf/lossless_updates.py.
EXACT_BITS = 3.6
_Own = TypeVar("_Own", bound="_Settings")
_Bits = Annotated[int, one_of(4, 8)]
_BlockSize = Annotated[int, one_of(*(2**power for power in range(5, 13)))]
_BLOCK_SIZE = Field(description="a power of two from 32 to 4096 (elements)")
_Steps = Annotated[int, Field(ge=1, description="an integer of at least 1 (optimizer steps)")]
_Flag = Annotated[bool, Field(description="true or false")]


class _Settings:
    """The sub-keys of one key, as a dataclass. ``key``: the key's name."""

    key: ClassVar[str]

    @classmethod
    def parse(cls: type[_Own], section: object) -> _Own:
        """Return the settings that the key's value gives; ValueError: see ``made``."""
        return made(cls, section, cls.key)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for checkpoints and logs."""
        return asdict(self)  # type: ignore[call-overload]


@dataclass(frozen=True, config=EXACTLY)
class LocoSettings(_Settings):
    """How gradients are quantized between groups.

    Attributes:
        err_beta: weight of the old error in its moving average, in [0, 1).
        reset_T: optimizer steps after which all errors are set to zero, at least 1.
        bits: bits of a gradient on the wire, 4 or 8.
        block_size: elements that share a scale, a power of two from 32 to 4096.
        error_bits: bits of a kept error, 8 (with a scale for each block) or 16.
        error_feedback: whether errors are kept at all.
        hadamard: whether each 32 elements are rotated first, so that one large element does not cost the others
            their precision.
    """

    key: ClassVar[str] = KEY

    err_beta: Annotated[float, Field(ge=0, lt=1, description="a number in [0, 1)")] = 0.8
    reset_T: _Steps = 1024
    bits: Annotated[_Bits, Field(description="4 or 8")] = 4
    block_size: Annotated[_BlockSize, _BLOCK_SIZE] = _BLOCK
    error_bits: Annotated[int, one_of(8, 16), Field(description="8 or 16")] = 8
    error_feedback: _Flag = True
    hadamard: _Flag = False

    @property
    def wire_bits(self) -> float:
        """Return the bits that a gradient takes on the wire: its own, and its share of a scale of 16 bits."""
        return self.bits + 16 / self.block_size

    @property
    def kept_bits(self) -> float:
        """Return the bits that a gradient's error takes, including its share of a scale."""
        if not self.error_feedback:
            return 0.0
        return self.error_bits + (16 / self.block_size if self.error_bits == 8 else 0)


@dataclass(frozen=True, config=EXACTLY)
class UpdateSettings(_Settings):
    """How updated parameters, or sums of gradients that come back, are quantized between groups.

    Attributes:
        bits: bits of a parameter's difference on the wire, 4 or 8; or "exact": as many as it takes to lose nothing.
        block_size: elements that share a scale, a power of two from 32 to 4096; None: the best for what is sent.
        resync_T: optimizer steps after which parameters travel unquantized, once, and the errors of sums are dropped;
            at least 1.
    """

    key: ClassVar[str] = UPDATES_KEY

    @classmethod
    def parse(cls, section: object) -> "UpdateSettings":
        """Parse the key, and also refuse ``block_size`` with "exact", which has no blocks; see ``_Settings``."""
        found = super().parse(section)
        if found.bits == EXACT and "block_size" in section:  # type: ignore[operator] # a mapping, or it was refused
            raise ValueError(
                f'{cls.key}.block_size is for bits 4 and 8, and differences without loss (bits "{EXACT}") have no '
                f"blocks. Remove block_size."
            )
        return found

    bits: Annotated[_Bits | Literal["exact"], Field(description=f'4, 8 or "{EXACT}"')] = 4
    block_size: Annotated[_BlockSize | None, _BLOCK_SIZE] = None
    resync_T: _Steps = 1024

    @property
    def difference_block(self) -> int:
        """Return the elements of a difference that share a scale."""
        return self.block_size or _BLOCK

    @property
    def sums(self) -> LocoSettings:
        """Return how sums of gradients that come back are quantized: as LoCo quantizes gradients.

        With LoCo's moving average of errors, the noise of a sum has 1.1 times the variance of a quantization. If
        errors were added whole, it would have twice that variance.
        """
        assert isinstance(self.bits, int)
        block = self.block_size or (_BLOCK_OF_SUMS if self.bits == 4 else _BLOCK)
        return LocoSettings(reset_T=self.resync_T, bits=self.bits, block_size=block)

    @property
    def wire_bits(self) -> float:
        """Return the bits that a parameter takes on the wire: its own, and its share of its block's scale.

        For "exact" this is an estimate, ``EXACT_BITS``.
        """
        return EXACT_BITS if isinstance(self.bits, str) else self.bits + 16 / self.difference_block


def of_outer_steps(bits: int) -> tuple[LocoSettings, UpdateSettings]:
    """Return how an outer step quantizes the changes of a group's weights, and the outer weights that come back.

    Args:
        bits: of an element that crosses, 4 or 8.
    """
    return LocoSettings(bits=bits, block_size=_BLOCK), UpdateSettings(bits=bits)
