# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Bandwidths in the records of DeepSpeed's comms logger, over the ranks that a collective has.

DeepSpeed derives them from the size of a message and the number of all ranks, whatever group a collective ran over.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from unittest import mock

_ranks: ContextVar[int | None] = ContextVar("ranks of the group that a collective is started over", default=None)


@contextmanager
def counted_over(ranks: int) -> Iterator[None]:
    """Record collectives that are started in this context as over so many ranks."""
    token = _ranks.set(ranks)
    try:
        yield
    finally:
        _ranks.reset(token)


def bandwidths(calculate: Callable[..., tuple[float, float]], *record: object) -> tuple[float, float]:
    """Return what DeepSpeed's ``calc_bw_log`` makes of a record, in Gbps: of the algorithm, and of the bus.

    Args:
        calculate: that function; it asks for the number of all ranks.
        record: its arguments.
    """
    from deepspeed import comm

    ranks = _ranks.get()
    if ranks is None:
        return calculate(*record)
    with mock.patch.object(comm, "get_world_size", lambda group=None: ranks):
        return calculate(*record)
