# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Types of command-line arguments."""

import argparse
import functools
import json
import os
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def import_callable(text: str) -> Callable[..., Any]:
    """Return the function of that name; the current directory is searched, too.

    If the function raises a ValueError, this becomes the cause of a RuntimeError: our ValueErrors are printed without
    a traceback.

    Raises:
        ValueError: the text has another form, or cannot be imported.
    """
    if not all(text.partition(":")):
        raise ValueError(f"expected PACKAGE.MODULE:FUNCTION, got {text!r}.")
    sys.path.insert(0, os.getcwd())
    try:
        function: Callable[..., Any] = pkgutil.resolve_name(text)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{text!r} cannot be imported: {error}.") from error

    @functools.wraps(function)
    def call_function(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ValueError as error:
            raise RuntimeError(f"{text} has failed.") from error

    return call_function


def number(kind: Callable[[str], float], zero: bool = False) -> Callable[[str], float]:
    """Return a parser of a number above 0, or of at least 0 if ``zero`` is allowed."""

    def read(text: str) -> float:
        value = kind(text)
        if not (value > 0 or (zero and value == 0)):
            raise argparse.ArgumentTypeError(f"must be {'at least' if zero else 'above'} 0, got {value}")
        return value

    read.__name__ = kind.__name__  # argparse prints it if the text is no number
    return read


def counts(text: str) -> list[int]:
    """Return numbers above 0 that are separated by commas, such as 8,4."""
    return [int(number(int)(part)) for part in text.split(",")]


def count(text: str) -> int:
    """Return a number of parameters written as 7000000000, 7e9 or 7B."""
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    factor = scale.get(text[-1:].upper(), 1)
    try:
        return int(float(text if factor == 1 else text[:-1]) * factor)
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"expected a number of parameters such as 7e9 or 7B, got {text!r}") from error


def sub_key(text: str, alone: str) -> tuple[str, object]:
    """Return the name and the value of KEY=VALUE; the value is parsed as JSON, or else is the text itself.

    Args:
        text: the argument.
        alone: the key of a value without a key.
    """
    key, equals, value = text.partition("=")
    if not equals:
        key, value = alone, text
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def new_file(text: str) -> Path:
    """Return the path of a file whose folder exists on the first rank of a launch, which writes it."""
    path = Path(text)
    if os.environ.get("RANK", "0") == "0" and not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder for {text}")
    return path
