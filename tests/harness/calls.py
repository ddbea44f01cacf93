# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Patches that call another function with each call of one, by which tests observe, delay, or fail it."""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock


def before(owner: Any, name: str, act: Callable[..., Any]) -> Any:
    """Patch a function: each call first calls ``act``, with the same arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return original(*args, **kwargs)

    return mock.patch.object(owner, name, call)


def after(owner: Any, name: str, act: Callable[..., Any]) -> Any:
    """Patch a function: each call then calls ``act``, with its result and the same arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        act(result, *args, **kwargs)
        return result

    return mock.patch.object(owner, name, call)
