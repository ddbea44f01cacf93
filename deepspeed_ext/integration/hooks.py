# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Serve the hooks of a DeepSpeed that has them: see ``fork.py``."""

import contextlib
from collections.abc import Callable
from typing import Any

from deepspeed_ext.integration import activation, fork, patcher, patches
from deepspeed_ext.integration.symbols import signature_of

_replaced: list[Any] = []  # replacements, in the order of their hooks
_unknown: list[str] = []  # hooks without a row in the table of patches


def replaced(version: int, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of a function of DeepSpeed: the decorator of its hook calls this.

    The function is returned unchanged if the package is switched off, if no patch has the name, or if the signature is
    not the expected one. If the version of the hooks is not ours, only the gates are replaced: they reject our keys.

    Args:
        version: of the hooks.
        name: the label of a patch.
        function: DeepSpeed's.
    """
    if activation.is_off():
        return function
    patch = next((patch for patch in patches.REPLACED if fork.label(patch) == name), None)
    if patch is None or patch.replace is None:
        _unknown.append(f"{name} at {function.__module__}.{function.__qualname__}")
        return function
    if not patch.gate and (version != fork.VERSION or signature_of(function) != patch.signature):
        return function
    replacement = patch.replace(function, *((patcher.require,) if patch.takes_require else ()))
    setattr(replacement, fork.MARK, name)
    _replaced.append(replacement)
    return replacement


def surplus() -> list[str]:
    """Return the hooks that no patch corresponds to; all modules of the table must have been imported."""
    known = set()
    for patch in patches.REPLACED:
        with contextlib.suppress(AttributeError):  # the symbol is gone, which the patch itself reports
            value = patch.locate()[2]
            known.add(id(getattr(value, "__func__", value)))
    others = [one for one in _replaced if id(one) not in known]
    names = [f"{getattr(one, fork.MARK)} at {one.__module__}.{one.__qualname__}" for one in others]
    return [f"no patch corresponds to the hook {name}" for name in (*_unknown, *names)]
