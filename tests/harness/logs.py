# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The lines that a rank writes to DeepSpeed's log; everything here runs inside rank processes."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


def is_ours(line: str) -> bool:
    """Whether a line says who has written it, and that this package is the writer."""
    return "deepspeed_ext" in line


@contextmanager
def logged() -> Iterator[list[tuple[str, str]]]:
    """Level and message of each line of DeepSpeed's logger from INFO on, whatever level is shown."""
    from deepspeed.utils import logger

    lines: list[tuple[str, str]] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
