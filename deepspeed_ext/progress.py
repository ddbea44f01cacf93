# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Progress of what takes long: a bar on the terminal of the first rank, and nothing elsewhere.

A bar is written to stderr, and only if that is a terminal: logs and pipes get none.
"""

import os
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

from tqdm import tqdm

_Item = TypeVar("_Item")


def bar(total: int, what: str, unit: str) -> "tqdm[Any]":
    """Return a bar that its owner moves by ``update``, and closes, as a context.

    Args:
        total: how many there are.
        what: is done with them, in a word or two.
        unit: of one.
    """
    return tqdm(total=total, desc=what, unit=unit, disable=_disabled())


def followed(items: Collection[_Item], what: str, unit: str) -> Iterable[_Item]:
    """Return the items, and move a bar with each that has been worked on.

    Args:
        items: to work on.
        what, unit: as for ``bar``.
    """
    shown: Iterable[_Item] = tqdm(items, desc=what, unit=unit, disable=_disabled())
    return shown


def _disabled() -> bool | None:
    """Return what tqdm takes: None lets it look whether stderr is a terminal."""
    return True if os.environ.get("RANK", "0") != "0" else None
