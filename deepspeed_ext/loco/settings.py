# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The sub-keys of ``zeropp_loco_param`` and ``paro_quantized_updates``, validated. Pure: no torch, no DeepSpeed."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, TypeVar

KEY = "zero_optimization.zeropp_loco_param"
UPDATES_KEY = "zero_optimization.paro_quantized_updates"
SMALLEST_BLOCK, LARGEST_BLOCK = 32, 4096
EXACT = "exact"
# Of differences, and of all that takes 8 bits. Sums of gradients in 4 bits take smaller blocks: with these they end
# 0.65 % from exact training. Measured by tests/perf/updates_convergence.py.
_BLOCK, _BLOCK_OF_SUMS = 128, 32
# What a parameter takes without loss at a learning rate of 3e-4; from 1.2 at 1e-5 to 6 at 1e-3. Measured by
# tests/perf/lossless_updates.py.
EXACT_BITS = 3.6
_Own = TypeVar("_Own", bound="_Settings")


class _Settings:
    """Sub-keys of one key, as a dataclass. ``key``: what they stand under."""

    key: ClassVar[str]

    @classmethod
    def parse(cls: type[_Own], section: object) -> _Own:
        """Return the settings of what stands under the key.

        Raises:
            ValueError: not a dictionary, an unknown sub-key, or a value that is out of bounds.
        """
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        if not isinstance(section, Mapping):
            raise ValueError(
                f"{cls.key} must be a dictionary of {', '.join(names)} (each may be left out), got {section!r} of "
                f"type {type(section).__name__}."
            )
        for name in section:
            if name not in names:
                close = difflib.get_close_matches(str(name), names, n=1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise ValueError(f"{cls.key} has no key {name!r}: its keys are {', '.join(names)}.{hint}")
        return cls(**section)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for checkpoints and logs."""
        return asdict(self)  # type: ignore[call-overload]

    def _integer(self, name: str, valid: Callable[[int], bool], expected: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not valid(value):
            raise self._refused(name, expected)

    def _block_size(self) -> None:
        self._integer(
            "block_size",
            lambda value: SMALLEST_BLOCK <= value <= LARGEST_BLOCK and not value & (value - 1),
            f"a power of two from {SMALLEST_BLOCK} to {LARGEST_BLOCK} (elements)",
        )

    def _refused(self, name: str, expected: str) -> ValueError:
        value = getattr(self, name)
        return ValueError(f"{self.key}.{name} must be {expected}, got {value!r} of type {type(value).__name__}.")


@dataclass(frozen=True)
class LocoSettings(_Settings):
    """How gradients are quantized between groups.

    Attributes:
        err_beta: weight of the old error in its moving average, in [0, 1).
        reset_T: optimizer steps after which all errors are set to zero, at least 1.
        bits: of a gradient on the wire, 4 or 8.
        block_size: elements that share a scale, a power of two from 32 to 4096.
        error_bits: of an error that is kept, 8 (with a scale for each block) or 16.
        error_feedback: whether errors are kept at all.
        hadamard: whether each 32 elements are rotated first, so that one large element does not cost the others
            their precision.
    """

    key: ClassVar[str] = KEY

    err_beta: float = 0.8
    reset_T: int = 1024
    bits: int = 4
    block_size: int = _BLOCK
    error_bits: int = 8
    error_feedback: bool = True
    hadamard: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is out of bounds or of another type."""
        if not 0 <= _real(self.err_beta) < 1:
            raise self._refused("err_beta", "a number in [0, 1)")
        self._integer("reset_T", lambda value: value >= 1, "an integer of at least 1 (optimizer steps)")
        self._integer("bits", lambda value: value in (4, 8), "4 or 8")
        self._integer("error_bits", lambda value: value in (8, 16), "8 or 16")
        self._block_size()
        for name in ("error_feedback", "hadamard"):
            if not isinstance(getattr(self, name), bool):
                raise self._refused(name, "true or false")

    @property
    def wire_bits(self) -> float:
        """Return the bits that a gradient takes on the wire: its own, and its part of its block's scale of 16 bits."""
        return self.bits + 16 / self.block_size

    @property
    def kept_bits(self) -> float:
        """Return the bits that are kept of a gradient's error, that of a scale included."""
        if not self.error_feedback:
            return 0.0
        return self.error_bits + (16 / self.block_size if self.error_bits == 8 else 0)


@dataclass(frozen=True)
class UpdateSettings(_Settings):
    """How updated parameters are quantized between groups, or sums of gradients where these come back.

    Attributes:
        bits: of a parameter's difference on the wire, 4 or 8; or "exact": as many as it takes to lose nothing.
        block_size: elements that share a scale, a power of two from 32 to 4096; None: what suits what is sent.
        resync_T: optimizer steps after which parameters travel as they are, once, and what sums lack is forgotten; at
            least 1.
    """

    key: ClassVar[str] = UPDATES_KEY

    @classmethod
    def parse(cls, section: object) -> "UpdateSettings":
        """Also refuse blocks where there are none; see ``_Settings``."""
        found = super().parse(section)
        if found.bits == EXACT and "block_size" in section:  # type: ignore[operator] # a mapping, or it was refused
            raise ValueError(
                f'{cls.key}.block_size is for bits 4 and 8, and differences without loss (bits "{EXACT}") have no '
                f"blocks. Remove block_size."
            )
        return found

    bits: int | str = 4
    block_size: int | None = None
    resync_T: int = 1024

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is out of bounds or of another type."""
        if not isinstance(self.bits, str):
            self._integer("bits", lambda value: value in (4, 8), f'4, 8 or "{EXACT}"')
        elif self.bits != EXACT:
            raise self._refused("bits", f'4, 8 or "{EXACT}"')
        if self.block_size is not None:
            self._block_size()
        self._integer("resync_T", lambda value: value >= 1, "an integer of at least 1 (optimizer steps)")

    @property
    def difference_block(self) -> int:
        """Return the elements of a difference that share a scale."""
        return self.block_size or _BLOCK

    @property
    def sums(self) -> LocoSettings:
        """Return how sums of gradients are quantized that come back: as LoCo quantizes gradients.

        With LoCo's average of errors a sum gets 1.1 times the variance of a quantization as noise, where an error that
        is added as a whole makes it twice that.
        """
        assert isinstance(self.bits, int)
        block = self.block_size or (_BLOCK_OF_SUMS if self.bits == 4 else _BLOCK)
        return LocoSettings(reset_T=self.resync_T, bits=self.bits, block_size=block)

    @property
    def wire_bits(self) -> float:
        """Return the bits that a parameter takes on the wire: its own, and its part of its block's scale.

        What takes none but those it needs is taken to need ``EXACT_BITS``.
        """
        return EXACT_BITS if isinstance(self.bits, str) else self.bits + 16 / self.difference_block


def _real(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else float("nan")
