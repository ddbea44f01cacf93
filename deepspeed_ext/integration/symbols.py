# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Description of a DeepSpeed symbol that we replace, and paths of the classes with most of them."""

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deepspeed_ext.overrides import plain_signature

MARK = "__deepspeed_ext__"  # attribute of a replacement: True, or its label if a fork's hook has made it

ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
PIPELINE = "deepspeed.runtime.pipe.engine:PipelineEngine"
STAGES = "deepspeed.runtime.pipe.module:PipelineModule"
ZERO12 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
ZERO3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"


@dataclass(frozen=True)
class Patch:
    """A symbol of DeepSpeed that we replace.

    Attributes:
        target: module and qualified name, separated by a colon.
        purpose: purpose of the replacement, as a verb phrase.
        signature: expected signature, without annotations; any other is refused.
        replace: makes the replacement from the original; None if our code replaces the symbol only during a call.
        gate: whether it is replaced even if its signature has changed, because it receives our keys and raises errors.
        takes_require: whether ``replace`` also takes ``patcher.require``, to call it when one of our keys is used.
    """

    target: str
    purpose: str
    signature: str
    replace: Callable[..., Callable[..., Any]] | None = None
    gate: bool = False
    takes_require: bool = False

    @property
    def module(self) -> str:
        """The dotted name of the module."""
        return self.target.partition(":")[0]

    @property
    def path(self) -> str:
        """The dotted path of the symbol."""
        return self.target.replace(":", ".")

    @property
    def label(self) -> str:
        """The name of the replacement in a fork's hook: without the package, or ``seams``."""
        assert self.replace is not None
        path = f"{self.replace.__module__}.{self.replace.__name__}"
        return path.removeprefix(f"{__package__}.seams.").removeprefix(f"{__package__.partition('.')[0]}.")

    def is_hooked(self) -> bool:
        """Whether the symbol's current value is the replacement that a fork's hook has made."""
        try:
            *_, value = self.locate()
        except AttributeError:
            return False
        return getattr(getattr(value, "__func__", value), MARK, None) == self.label

    def locate(self) -> tuple[Any, str, Callable[..., Any]]:
        """Return the owner, the attribute's name and the current value of the symbol.

        Raises:
            AttributeError: the symbol does not exist.
        """
        owner: Any = importlib.import_module(self.module)
        *parents, name = self.target.partition(":")[2].split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        # Not ``getattr``, which would turn a staticmethod into its function.
        return owner, name, inspect.getattr_static(owner, name)

    def problem(self) -> str | None:
        """Return how the symbol differs from our expectation; None if it does not."""
        try:
            *_, value = self.locate()
        except (AttributeError, ImportError):
            return f"{self.path} no longer exists (used for: {self.purpose})"
        signature = signature_of(getattr(value, "__func__", value))
        if signature != self.signature:
            return f"{self.path} has signature {signature}, expected {self.signature} (used for: {self.purpose})"
        return None


@functools.cache  # every configuration with our keys checks all of the same functions again
def signature_of(function: Callable[..., Any]) -> str:
    """Return names, kinds and defaults of a function's parameters."""
    return str(plain_signature(function))
