# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Log lines and progress bars of rank 0.

A bar is written to stderr if that is a terminal, so logs and pipes have none.
"""

import logging
import os
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

from tqdm import tqdm

_Item = TypeVar("_Item")


def log_on_rank_0(message: str, level: int = logging.INFO) -> None:
    """Log a message on rank 0 by DeepSpeed's logger, which hides INFO by default."""
    from deepspeed.utils import log_dist  # late: commands show bars without DeepSpeed

    log_dist(f"deepspeed_ext: {message}", ranks=[0], level=level)


def warn_on_rank_0(message: str) -> None:
    """Log a warning on rank 0."""
    log_on_rank_0(message, logging.WARNING)


def progress_bar(total: int, label: str, unit: str) -> "tqdm[Any]":
    """Return a bar that the caller advances by ``update`` and closes as a context.

    Args:
        total: number of items.
        label: operation, in a word or two.
        unit: unit of an item.
    """
    return tqdm(total=total, desc=label, unit=unit, disable=_disabled())


def track_progress(items: Collection[_Item], label: str, unit: str) -> Iterable[_Item]:
    """Return the items, and advance a bar after each.

    Args:
        items: items to process.
        label, unit: as for ``progress_bar``.
    """
    bar_items: Iterable[_Item] = tqdm(items, desc=label, unit=unit, disable=_disabled())
    return bar_items


def _disabled() -> bool | None:
    """Return tqdm's ``disable``: None makes it check whether stderr is a terminal."""
    return True if os.environ.get("RANK", "0") != "0" else None
