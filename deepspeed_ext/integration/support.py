# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Whether this DeepSpeed is one that we know: asked where one of our keys is used, answered by who has patched it."""

from collections.abc import Callable

checks: list[Callable[[], None]] = []  # each raises if not; none in a DeepSpeed that has these features built in


def require() -> None:
    """Called when one of our keys is used.

    Raises:
        RuntimeError: this DeepSpeed is not one that we know, or a symbol has moved or changed.
    """
    for check in checks:
        check()
