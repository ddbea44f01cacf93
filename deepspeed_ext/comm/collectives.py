# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The collectives of one process group, started in the way that suits its backend.

Note [Pairwise messages]
    gloo's collectives send before they say that they are ready to receive. Then the rank that comes last puts its
    whole message before these words, and the other one waits for it: the link is used in one direction at a time
    (measured: up to twice the time). So an all-to-all is made of messages between pairs of ranks, and all receives are
    posted first.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.comm import comms_logger
from deepspeed.comm.torch import get_coalescing_manager
from torch import Tensor
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.profiler import record_function

from deepspeed_ext.comm import watching
from deepspeed_ext.comm.packing import WIDEST_LOAD


def backend_of(group: ProcessGroup | None) -> str:
    """Return the backend for tensors of the accelerator; a group may have one for each kind of device."""
    device = get_accelerator().device_name().partition(":")[0]
    backends = dict(
        entry.split(":") for entry in torch.distributed.get_backend_config(group).split(",") if ":" in entry
    )
    return backends.get(device, torch.distributed.get_backend(group))


def is_pairwise(group: ProcessGroup | None) -> bool:
    """Return whether messages between pairs of ranks stand for a group's collectives, as gloo's do.

    Each message then finds its receiver; elsewhere all ranks must start a group's collectives in one order. gloo's own
    messages are for tensors of the host only, its collectives also for others.
    """
    return backend_of(group) == "gloo" and get_accelerator().device_name() == "cpu"


class Collectives:
    """Starts collectives over one process group, and returns their handles.

    Each is recorded by DeepSpeed's comms logger as ``{name}_{operation}``, and labeled ``paro::{name}_{operation}`` in
    a profiler's trace.

    Args:
        group: process group; None for all ranks.
        name: "intra" or "inter", for one.

    Attributes:
        multiple: elements; buckets travel fastest if their parts begin at multiples of it.
        pairwise: see ``is_pairwise``.
    """

    def __init__(self, group: ProcessGroup | None, name: str) -> None:
        self.group = dist.get_world_group() if group is None else group
        self.name = name
        self.size: int = dist.get_world_size(group=group)
        self.rank: int = dist.get_rank(group=group)
        self.pairwise = is_pairwise(self.group)
        self.multiple = 1 if backend_of(self.group) == "gloo" or self.size == 1 else WIDEST_LOAD

    @contextmanager
    def labeled(self, operation: str) -> Iterator[str]:
        """Label what runs in this context in a profiler's trace; gives the name for the comms logger's records."""
        name = f"{self.name}_{operation}"
        with record_function(f"paro::{name}"), watching.ours():
            yield name

    def start(self, operation: str, collective: Callable[..., Any], *arguments: Any) -> Any:
        """Start a function of ``deepspeed.comm`` over the group."""
        with self.labeled(operation) as log_name:
            return collective(*arguments, group=self.group, async_op=True, log_name=log_name)

    def watched(self, operation: str, nbytes: float, handle: Any) -> Any:
        """Return the handle of what has been started, by which this rank receives so many bytes: a recorder's, if
        there is one."""
        return watching.started(f"{self.name}_{operation}", self.group, nbytes, handle)

    def all_gather(self, gathered: Tensor, shard: Tensor, operation: str = "all_gather") -> Any:
        """Start an all-gather.

        Args:
            gathered: 1D of ``size * shard.numel()`` elements.
            shard: 1D, contiguous; may be this rank's part of ``gathered``.
            operation: what it is for.
        """
        nbytes = (self.size - 1) * shard.nbytes
        if not self.pairwise:
            handle = self.start(operation, dist.all_gather_into_tensor, gathered, shard)
            return self.watched(operation, nbytes, handle)
        with self.labeled(operation) as name:
            handle = pairwise_all_to_all(self.group, gathered.split(shard.numel()), [shard] * self.size, name)
        return self.watched(operation, nbytes, handle)

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        splits: Sequence[int],
        operation: str,
        received_splits: Sequence[int] | None = None,
    ) -> Any:
        """Start an all-to-all.

        Args:
            received: 1D, a part from each rank.
            sent: 1D, a part for each rank.
            splits: lengths of the parts of ``sent``.
            operation: what it is for.
            received_splits: lengths of the parts of ``received``; by default all ranks have the same ``splits``.
        """
        theirs = [splits[self.rank]] * self.size if received_splits is None else list(received_splits)
        nbytes = (sum(theirs) - theirs[self.rank]) * received.element_size()
        if not self.pairwise:
            handle = self.start(operation, dist.all_to_all_single, received, sent, theirs, list(splits))
            return self.watched(operation, nbytes, handle)
        with self.labeled(operation) as name:
            handle = pairwise_all_to_all(self.group, received.split(theirs), sent.split(list(splits)), name)
        return self.watched(operation, nbytes, handle)

    def reduce_each(self, parts: Sequence[Tensor]) -> Any:
        """Start a rooted reduce of each part to the rank of its number.

        All are one launch where that can be: else each waits for the one before it to go through all ranks.
        """
        together = _launches_together(self.group, parts[0].device)
        ranks = get_process_group_ranks(self.group)  # of which get_global_rank would look for each
        with get_coalescing_manager(self.group, parts[0].device, [], True) if together else nullcontext() as launch:
            handles = [
                self.start("reduce_scatter", dist.reduce, part, ranks[owner])
                for owner, part in enumerate(parts)
                if part.numel()
            ]
        nbytes = sum(part.nbytes for part in parts) * (self.size - 1) / self.size  # each goes through all ranks
        return self.watched("reduce_scatter", nbytes, launch if together else Handles(handles))


def _launches_together(group: ProcessGroup, device: torch.device) -> bool:
    """Whether the backend can start several collectives as one; not while DeepSpeed's comms logger times each."""
    return not comms_logger.enabled and group._get_backend(device).supports_coalescing


# Messages between pairs of ranks ##################################################################

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
    """Start an all-to-all of messages between pairs of ranks; see Note [Pairwise messages].

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
