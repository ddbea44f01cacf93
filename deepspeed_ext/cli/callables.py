# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Functions that a command line names."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any


def named(text: str) -> Callable[..., Any]:
    """The function of that name, looked for in the current directory, too.

    Raises:
        ValueError: not of the form, or it cannot be imported.
    """
    module, _, name = text.partition(":")
    if not module or not name:
        raise ValueError(f"expected PACKAGE.MODULE:FUNCTION, got {text!r}.")
    sys.path.insert(0, os.getcwd())
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{text!r} cannot be imported: {error}.") from error
    return found
