# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What stands in the place of DeepSpeed's symbols.

Each function takes the original and returns its replacement, which looks for our keys and calls the original if there
are none. The hooks of a fork use the same functions. Nothing of ours is imported before it is needed: most of it
imports DeepSpeed, which may be just being imported.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any


def lazily(target: str) -> Callable[..., Callable[..., Any]]:
    """Return what puts a function of ours in the place of an original, which that takes first.

    Args:
        target: ``module:function``, imported when it is called. If there is a ``require``, it takes that by name.
    """
    module, _, name = target.partition(":")

    def replace(original: Callable[..., Any], require: Callable[[], None] | None = None) -> Callable[..., Any]:
        known = {} if require is None else {"require": require}
        behavior: Callable[..., Any] | None = None

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            nonlocal behavior
            if behavior is None:  # looked up once: ZeRO-3's prefetching calls one of these for each parameter
                behavior = getattr(importlib.import_module(module), name)
            return behavior(original, *args, **kwargs, **known)

        return replacement

    replace.__module__, replace.__name__ = module, name
    return replace
