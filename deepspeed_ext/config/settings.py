# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Keys with sub-keys, and our keys of ``checkpoint``, as pydantic models. Pure: no torch, no DeepSpeed.

A field's description lists the values that it accepts, for errors. The string below the field gives its meaning. The
tables of keys on pages have both.
"""

import difflib
import json
import os
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from annotated_types import Predicate
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deepspeed_ext.config.keys import LOCO, OUTER, QUANTIZED_UPDATES, REPORT, SECTION

EXACT: Literal["exact"] = "exact"
# Values of ``paro_reduce``: the levels whose reductions sum in rank order, of "intra" and "inter".
BACKEND, ORDERED, ORDERED_EVERYWHERE = "backend", "ordered", "ordered_everywhere"
ORDERED_LEVELS: dict[str, tuple[str, ...]] = {BACKEND: (), ORDERED: ("inter",), ORDERED_EVERYWHERE: ("intra", "inter")}
# For differences, and for everything in 8 bits. Gradient sums in 4 bits need smaller blocks: with blocks of 128,
# training ends 0.65 % from exact training. Measured by tests/perf/convergence.py.
_BLOCK, _SUM_BLOCK = 128, 32
# Bits per parameter for a lossless update at a learning rate of 3e-4; from 1.2 at 1e-5 to 6 at 1e-3. Measured by
# tests/perf/lossless_updates.py.
EXACT_BITS = 3.6
MAX_TRANSFER_NUMEL = 2**26  # elements that an outer step sends at once: this bounds the memory of a transfer
REPORT_VARIABLE = "DEEPSPEED_EXT_REPORT"
UNRECORDED_STEPS = 3  # unrecorded steps on each side of the recorded steps, for comparison
_Model = TypeVar("_Model", bound=BaseModel)
_Own = TypeVar("_Own", bound="Settings")


def wrong_value_error(key: str, expected: str, value: object) -> ValueError:
    """Return the error for a value that is out of bounds or of another type."""
    return ValueError(f"{key} must be {expected}, got {value!r} of type {type(value).__name__}.")


def unknown_key_error(where: str, key: object, keys_of_section: Iterable[str], whose: str = "its keys") -> ValueError:
    """Return the error for an unknown key."""
    keys_of_section = list(keys_of_section)
    close = difflib.get_close_matches(str(key).lower(), keys_of_section, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return ValueError(f"{where} has no key {key!r}: {whose} are {', '.join(keys_of_section)}.{hint}")


def parse(kind: type[_Model], values: object, where: str, key_format: str = "{where}.{key}") -> _Model:
    """Return a model of the user's values.

    Args:
        kind: the model; the descriptions of its fields state the expected values.
        values: the keys and their values.
        where: the name of the section, for errors.
        key_format: format of a key's name.

    Raises:
        ValueError: it is no dictionary, or has an unknown key, or a value is out of bounds or has another type.
    """
    fields = kind.model_fields
    if not isinstance(values, Mapping):
        raise wrong_value_error(where, expected_dictionary(kind), values)
    for key in values:
        if key not in fields:
            raise unknown_key_error(where, key, fields)
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "value_error":  # raised by one of our validators, with a complete message
            raise first["ctx"]["error"] from None
        key = str(first["loc"][0])
        raise wrong_value_error(
            key_format.format(where=where, key=key), fields[key].description or "", values[key]
        ) from None


def expected_dictionary(kind: type[BaseModel]) -> str:
    """Return the expected value for a model, for errors."""
    return f"a dictionary of {', '.join(kind.model_fields)} (each may be left out)"


class Settings(BaseModel):
    """The sub-keys of one key, or our keys of one section; ``key`` is its name."""

    model_config = ConfigDict(strict=True, frozen=True)  # 4 is neither true nor "4"
    key: ClassVar[str]

    @classmethod
    def parse(cls: type[_Own], values: object, where: str = "", key_format: str = "{where}.{key}") -> _Own:
        """Return the user's settings, or settings that are parsed already; see ``parse``."""
        return values if isinstance(values, cls) else parse(cls, values, where or cls.key, key_format)

    def as_dict(self, only_set: bool = False) -> dict[str, Any]:
        """Return plain values, for checkpoints and logs; if ``only_set``, only those that the user has set."""
        return self.model_dump(exclude_unset=only_set)


def _one_of(*values: object) -> Predicate:
    """Return a restriction of a type to these values; pydantic's Literal takes 4.0 for 4."""
    return Predicate(values.__contains__)


def key_field(expected: str, shown: str = "", **bounds: Any) -> Any:
    """Return a field of a key.

    Args:
        expected: the expected value, for errors.
        shown: the default in tables of keys, if it is not a value.
        bounds: bounds for pydantic's ``Field``.
    """
    return Field(description=expected, json_schema_extra={"shown": shown} if shown else None, **bounds)


_Bits = Annotated[int, _one_of(4, 8)]
_BlockSize = Annotated[int, _one_of(*(2**power for power in range(5, 13)))]
_BLOCK_SIZE = key_field("a power of two from 32 to 4096 (elements)")
_Steps = Annotated[int, key_field("an integer of at least 1 (optimizer steps)", ge=1)]
_Flag = Annotated[bool, key_field("true or false")]


class LocoSettings(Settings):
    """Quantization of gradients between groups."""

    key: ClassVar[str] = f"{SECTION}.{LOCO}"

    err_beta: Annotated[float, key_field("a number in [0, 1)", ge=0, lt=1)] = 0.8
    """Weight of the old error in its moving average."""
    reset_T: _Steps = 1024
    """Optimizer steps after which all errors are set to zero."""
    bits: Annotated[_Bits, key_field("4 or 8")] = 4
    """Bits of a gradient that is sent."""
    block_size: Annotated[_BlockSize, _BLOCK_SIZE] = _BLOCK
    """Elements that share a scale."""
    error_bits: Annotated[int, _one_of(8, 16), key_field("8 or 16")] = 8
    """Bits of a kept error: 8 (with a scale for each block) or 16."""
    error_feedback: _Flag = True
    """Whether errors are kept at all."""
    hadamard: _Flag = False
    """Whether each 32 elements are rotated first, so that one large element does not cost the others their
    precision."""

    @property
    def wire_bits(self) -> float:
        """Return the bits that are sent for a gradient, including its share of a 16-bit scale."""
        return self.bits + 16 / self.block_size

    @property
    def error_feedback_bits(self) -> float:
        """Return the bits of a gradient's stored error, including its share of a scale."""
        if not self.error_feedback:
            return 0.0
        return self.error_bits + (16 / self.block_size if self.error_bits == 8 else 0)


class UpdateSettings(Settings):
    """Quantization of updated parameters, or of gathered gradient sums, between groups."""

    key: ClassVar[str] = f"{SECTION}.{QUANTIZED_UPDATES}"

    bits: Annotated[_Bits | Literal["exact"], key_field(f'4, 8 or "{EXACT}"')] = 4
    """Bits of a parameter's difference that is sent; "exact": as many as it takes to lose nothing."""
    block_size: Annotated[_BlockSize | None, _BLOCK_SIZE] = None
    """Elements that share a scale; None: the best for what is sent."""
    resync_T: _Steps = 1024
    """Optimizer steps after which parameters are sent unquantized, once, and the errors of sums are dropped."""

    @classmethod
    def parse(cls, values: object, where: str = "", key_format: str = "{where}.{key}") -> "UpdateSettings":
        """Parse the key, and also refuse ``block_size`` with "exact", which has no blocks; see ``Settings``."""
        settings = super().parse(values, where, key_format)
        if settings.bits == EXACT and "block_size" in settings.model_fields_set:
            raise ValueError(
                f'{cls.key}.block_size is for bits 4 and 8, and differences without loss (bits "{EXACT}") have no '
                f"blocks. Remove block_size."
            )
        return settings

    @property
    def difference_block(self) -> int:
        """Return the elements of a difference that share a scale."""
        return self.block_size or _BLOCK

    @property
    def sums(self) -> LocoSettings:
        """Return the settings for gradient sums that are gathered: those of LoCo for gradients.

        With LoCo's moving average of errors, the noise of a sum has 1.1 times the variance of a quantization. If
        errors were added in full, it would have twice that variance.
        """
        assert isinstance(self.bits, int)
        block = self.block_size or (_SUM_BLOCK if self.bits == 4 else _BLOCK)
        return LocoSettings(reset_T=self.resync_T, bits=self.bits, block_size=block)

    @property
    def wire_bits(self) -> float:
        """Return the bits that are sent for a parameter, including its share of its block's scale.

        For "exact" this is an estimate, ``EXACT_BITS``.
        """
        return EXACT_BITS if isinstance(self.bits, str) else self.bits + 16 / self.difference_block


class OuterSettings(Settings):
    """Outer optimizer; the terms are those of DiLoCo (arXiv:2311.08105) and Streaming DiLoCo (arXiv:2501.18512)."""

    key: ClassVar[str] = f"{SECTION}.{OUTER}"

    steps: Annotated[int, key_field("an integer of at least 1 (inner steps)", ge=1)] = 30
    """Inner steps from one outer step to the next."""
    lr: Annotated[float, key_field("a number above 0", gt=0)] = 0.7
    """Learning rate of the outer optimizer, SGD with momentum."""
    momentum: Annotated[float, key_field("a number in [0, 1)", ge=0, lt=1)] = 0.9
    """Momentum of the outer optimizer."""
    nesterov: _Flag = True
    """Whether it is Nesterov's momentum."""
    warmup_steps: Annotated[int, key_field("an integer of at least 0 (steps)", ge=0)] = 0
    """Steps at the beginning that average gradients over all groups, as the strategy alone does."""
    bits: Annotated[int, _one_of(4, 8, 16, 32), key_field("4, 8, 16 or 32")] = 32
    """Bits of an element that is sent between groups."""
    fragments: Annotated[int, key_field("an integer of at least 1", ge=1)] = 1
    """Parts of the model that are sent by turns."""
    delay: Annotated[int, key_field("an integer of at least 0 (inner steps)", ge=0)] = 0
    """Inner steps from the sending of a fragment to its use, which hide the transfer."""
    offload: Annotated[Literal["none", "cpu"], key_field('"none" or "cpu"')] = "none"
    """"cpu" keeps anchors and the outer optimizer's states on the host."""

    @classmethod
    def parse(cls, values: object, where: str = "", key_format: str = "{where}.{key}") -> "OuterSettings":
        """Parse the key, and also refuse fragments that cannot be sent by turns; see ``Settings``."""
        settings = super().parse(values, where, key_format)
        names = ("steps", "fragments", "delay")
        steps, fragments, delay = (key_format.format(where=where or cls.key, key=key) for key in names)
        if settings.fragments > settings.steps:
            raise ValueError(
                f"{fragments} must be at most {steps}, since at most one fragment is sent after each inner step; got "
                f"{settings.fragments} fragments and {settings.steps} steps."
            )
        most = settings.steps // settings.fragments
        if settings.delay >= most and settings.delay:
            raise ValueError(
                f"{delay} must be less than steps / fragments, after which the next fragment is sent: with "
                f"{settings.steps} steps and {settings.fragments} fragments less than {most}, got {settings.delay}."
            )
        return settings

    @property
    def offsets(self) -> tuple[int, ...]:
        """Return the number of inner steps, modulo ``steps``, after which each fragment is sent; 0 for the last."""
        return tuple((i + 1) * self.steps // self.fragments % self.steps for i in range(self.fragments))


def outer_step_settings(bits: int) -> tuple[LocoSettings, UpdateSettings]:
    """Return an outer step's settings for a group's pseudo-gradients, and for the gathered outer weights.

    Args:
        bits: bits of an element that is sent, 4 or 8.
    """
    return LocoSettings(bits=bits, block_size=_BLOCK), UpdateSettings(bits=bits)


class ReportSettings(Settings):
    """The steps that are recorded, and the folder of the report."""

    key: ClassVar[str] = f"{SECTION}.{REPORT}"

    folder: Annotated[str, key_field("the path of a folder", min_length=1)] = "paro_report"
    """Folder in which rank 0 writes the report."""
    after: Annotated[int, key_field("an integer of at least 2 (optimizer steps)", ge=2)] = 10
    """Optimizer steps of warm-up, before the first one that is timed."""
    steps: _Steps = 3
    """Optimizer steps that are recorded."""
    probe: _Flag = True
    """Whether the links are measured afterwards, which takes some seconds, for the planner's predictions."""

    @property
    def first(self) -> int:
        """Return the number of the first recorded step, counted from 0."""
        return self.after + UNRECORDED_STEPS

    @property
    def last(self) -> int:
        """Return the number of the step after which the report is written."""
        return self.first + self.steps + UNRECORDED_STEPS - 1

    @classmethod
    def from_environment_or_config(cls, zero_config: Any) -> "ReportSettings | None":
        """Return the settings in the environment variable, else those of a parsed section, else None.

        Raises:
            ValueError: the variable's value is not valid.
        """
        text = os.environ.get(REPORT_VARIABLE)
        if text is None:
            return getattr(zero_config, REPORT, None)
        try:
            values = json.loads(text)
        except ValueError as error:
            raise wrong_value_error(REPORT_VARIABLE, "a dictionary in JSON, {} for the defaults", text) from error
        return cls.parse(values, REPORT_VARIABLE)

    def as_variable(self) -> str:
        """Return the environment variable's value for these settings."""
        return json.dumps(self.as_dict())


class SaveSettings(Settings):
    """Our keys in the section ``checkpoint``."""

    key: ClassVar[str] = "checkpoint"

    async_save: _Flag = False
    """Training continues [during saves](../checkpoint/asynchronous.md)."""
    memory_folder: Annotated[str, Predicate(os.path.isabs), key_field("an absolute path")] = "/dev/shm"
    """With `async_save`: folder of all jobs' [saves in memory](../checkpoint/in_memory.md)."""
    memory_copies: Annotated[int, key_field("an integer of at least 0", ge=0)] = 1
    """Number of other groups that have a copy of each in-memory file that only one group has."""
    trusted: _Flag = False
    """Loads accept [any class](../checkpoint/README.md#trust) in files, whose code they run."""
    verify: _Flag = False
    """Loads compare not only sizes, but also [digests](../checkpoint/README.md#digests) of files."""
