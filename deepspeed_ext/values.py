# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Settings that users write, checked by pydantic, and what an error says of them. Pure."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from annotated_types import Predicate
from pydantic import ConfigDict, ValidationError

EXACTLY = ConfigDict(strict=True)  # of pydantic's dataclasses: 4 is neither true nor "4"
_Made = TypeVar("_Made")


def one_of(*allowed: object) -> Predicate:
    """Return what restricts a type to some values; pydantic's Literal takes 4.0 for 4."""
    return Predicate(allowed.__contains__)


def must_be(key: str, expected: str, value: object, hint: str = "") -> ValueError:
    """Return the error for a value that is out of bounds or of another type."""
    return ValueError(f"{key} must be {expected}, got {value!r} of type {type(value).__name__}.{hint and ' '}{hint}")


def no_key(where: str, key: object, known: Iterable[str], whose: str = "its keys") -> ValueError:
    """Return the error for a key that is not known."""
    known = list(known)
    close = difflib.get_close_matches(str(key).lower(), known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return ValueError(f"{where} has no key {key!r}: {whose} are {', '.join(known)}.{hint}")


def made(kind: type[_Made], given: object, where: str, inside: str = "{where}.{key}") -> _Made:
    """Return one of pydantic's dataclasses of what a user has written.

    Args:
        kind: its fields have descriptions: what a value must be.
        given: by the names of the fields.
        where: it stands.
        inside: how to name a key there.

    Raises:
        ValueError: it is no dictionary, or has an unknown key, lacks one, or has a value of another type.
    """
    fields: Mapping[str, Any] = kind.__pydantic_fields__  # type: ignore[attr-defined]
    required = ", ".join(name for name, field in fields.items() if field.is_required())
    if not isinstance(given, Mapping):
        left_out = f"all but {required}" if required else "each"
        raise must_be(where, f"a dictionary of {', '.join(fields)} ({left_out} may be left out)", given)
    for key in given:
        if key not in fields:
            raise no_key(where, key, fields)
    try:
        return kind(**given)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        if first["type"] == "missing":
            raise ValueError(f"{where} lacks {key}; {required} are required.") from None
        raise must_be(inside.format(where=where, key=key), fields[key].description, given[key]) from None
