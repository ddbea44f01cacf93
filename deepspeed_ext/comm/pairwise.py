# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""An all-to-all of messages between pairs of ranks, for gloo.

gloo's collectives send before they say that they are ready to receive. Then the rank that comes last puts its whole
message before these words, and the other one waits for it: the link is used in one direction at a time (measured: up
to twice the time). Here all receives are posted first.
"""

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

from deepspeed import comm as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# Messages between two ranks are received in the order in which they were sent, those of each tag by themselves.
_tag: ContextVar[int] = ContextVar("tag of messages that are started", default=0)
_launch = threading.Lock()  # DeepSpeed's comms logger has one timer for all messages of a name


@contextmanager
def tagged(tag: int) -> Iterator[None]:
    """Match messages that this thread starts in this context with those of the same tag only."""
    token = _tag.set(tag)
    try:
        yield
    finally:
        _tag.reset(token)


class Handles:
    """Several started communications as one handle; may be waited for again."""

    def __init__(self, handles: Iterable[Any]) -> None:
        self._handles = list(handles)

    def wait(self) -> None:
        """Wait for all of them."""
        for handle in self._handles:
            handle.wait()


# A connection breaks if a message that was announced is not taken. So whoever drops a transfer does not drop its
# messages: they are kept until somebody has waited for them, or the group is gone.
_under_way: "weakref.WeakKeyDictionary[ProcessGroup, set[PairwiseHandles]]" = weakref.WeakKeyDictionary()


class PairwiseHandles(Handles):
    """The messages of a pairwise all-to-all."""

    def __init__(self, group: ProcessGroup, handles: Iterable[Any]) -> None:
        super().__init__(handles)
        self._others = _under_way.setdefault(group, set())
        self._others.add(self)

    def wait(self) -> None:
        """Wait for all messages, once."""
        super().wait()
        self._handles.clear()  # a second wait for such a message would block
        self._others.discard(self)

    def break_off(self) -> None:
        """Close the connections of the group if a message is still under way: whoever waits for one gets an error."""
        for handle in list(self._handles):
            with suppress(RuntimeError):
                handle.wait(timedelta(milliseconds=1))


def break_off_all() -> None:
    """Close the connections of all groups over which messages are under way.

    gloo cannot take a message back, but a wait that ends by its time ends all waits for messages of the same group.
    """
    with _launch:  # a thread may start a group's first messages
        under_way = [handles for started in _under_way.values() for handles in list(started)]
    for handles in under_way:
        handles.break_off()


def pairwise_all_to_all(
    group: ProcessGroup, received: Sequence[Tensor], sent: Sequence[Tensor], log_name: str
) -> PairwiseHandles:
    """Start an all-to-all of messages between pairs of ranks, and return its handle.

    Args:
        group: process group.
        received: from each rank, contiguous.
        sent: to each rank, contiguous.
        log_name: for the records of the comms logger.
    """
    rank, size = dist.get_rank(group=group), len(sent)
    received[rank].copy_(sent[rank])
    # Each rank begins with the next one, so that not all begin with the same.
    others = [((rank + step) % size, (rank - step) % size) for step in range(1, size)]
    receives = [(dist.irecv, received[source], source) for _, source in others]
    sends = [(dist.isend, sent[target], target) for target, _ in others]
    started = [
        dist.P2POp(operation, part, dist.get_global_rank(group, peer), group, _tag.get())
        for operation, part, peer in receives + sends
        if part.numel()
    ]
    with _launch:
        return PairwiseHandles(group, dist.batch_isend_irecv(started, log_name=log_name) if started else ())
