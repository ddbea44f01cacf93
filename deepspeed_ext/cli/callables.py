# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Import the functions that a command line names."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any


def import_callable(text: str) -> Callable[..., Any]:
    """Return the function of that name; the current directory is searched, too.

    Raises:
        ValueError: the text is not of the form, or names nothing that can be imported.
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
