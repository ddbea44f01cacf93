# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The sub-keys of ``zeropp_loco_param``, validated. Pure: no torch, no DeepSpeed."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

KEY = "zero_optimization.zeropp_loco_param"
SMALLEST_BLOCK, LARGEST_BLOCK = 32, 4096


@dataclass(frozen=True)
class LocoSettings:
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

    err_beta: float = 0.8
    reset_T: int = 1024
    bits: int = 4
    block_size: int = 128
    error_bits: int = 8
    error_feedback: bool = True
    hadamard: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is out of bounds or of another type."""
        _number("err_beta", self.err_beta, 0 <= _real(self.err_beta) < 1, "a number in [0, 1)")
        _integer("reset_T", self.reset_T, lambda value: value >= 1, "an integer of at least 1 (optimizer steps)")
        _integer("bits", self.bits, lambda value: value in (4, 8), "4 or 8")
        _integer("error_bits", self.error_bits, lambda value: value in (8, 16), "8 or 16")
        _integer(
            "block_size",
            self.block_size,
            lambda value: SMALLEST_BLOCK <= value <= LARGEST_BLOCK and not value & (value - 1),
            f"a power of two from {SMALLEST_BLOCK} to {LARGEST_BLOCK} (elements)",
        )
        for name in ("error_feedback", "hadamard"):
            if not isinstance(getattr(self, name), bool):
                raise _refused(name, getattr(self, name), "true or false")

    @classmethod
    def parse(cls, section: object) -> "LocoSettings":
        """Return the settings of what stands under the key.

        Raises:
            ValueError: not a dictionary, an unknown sub-key, or a value that is out of bounds.
        """
        if not isinstance(section, Mapping):
            raise ValueError(
                f"{KEY} must be a dictionary of {', '.join(_NAMES)} (each may be left out), got {section!r} of type "
                f"{type(section).__name__}."
            )
        for name in section:
            if name not in _NAMES:
                close = difflib.get_close_matches(str(name), _NAMES, n=1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise ValueError(f"{KEY} has no key {name!r}: its keys are {', '.join(_NAMES)}.{hint}")
        return cls(**section)

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

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for checkpoints and logs."""
        return asdict(self)


_NAMES = tuple(field.name for field in fields(LocoSettings))


def _real(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else float("nan")


def _number(name: str, value: object, valid: bool, expected: str) -> None:
    if not valid:
        raise _refused(name, value, expected)


def _integer(name: str, value: object, valid: Callable[[int], bool], expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not valid(value):
        raise _refused(name, value, expected)


def _refused(name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{KEY}.{name} must be {expected}, got {value!r} of type {type(value).__name__}.")
