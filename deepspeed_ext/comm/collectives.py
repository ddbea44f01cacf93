# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Collectives of one process group, started in the way that suits its backend.

Note [Pairwise messages]
    gloo's collectives send before they announce that they are ready to receive. The last rank's announcement then
    queues behind its complete message, and the other rank waits for it: the link is used in one direction at a time
    (measured: up to twice the time). So an all-to-all consists of messages between pairs of ranks, and all receives
    are posted first.
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

from deepspeed_ext.comm import observers
from deepspeed_ext.comm.packing import WIDEST_LOAD


def backend_of(group: ProcessGroup | None) -> str:
    """Return the backend for tensors of the accelerator; a group may have one for each device type."""
    device = get_accelerator().device_name().partition(":")[0]
    backends = dict(
        entry.split(":") for entry in torch.distributed.get_backend_config(group).split(",") if ":" in entry
    )
    return backends.get(device, torch.distributed.get_backend(group))


def is_pairwise(group: ProcessGroup | None) -> bool:
    """Return whether messages between pairs of ranks replace a group's collectives: with gloo on the host.

    Such messages are matched by tag; otherwise all ranks must start a group's collectives in one order. gloo's
    point-to-point messages take host tensors only, its collectives others too.
    """
    return backend_of(group) == "gloo" and get_accelerator().device_name() == "cpu"


class Collectives:
    """Starts collectives over one process group, and returns their handles.

    DeepSpeed's comms logger records each as ``{name}_{operation}``, and profiler traces label it
    ``paro::{name}_{operation}``.

    Args:
        group: process group; None for all ranks.
        name: for example "intra" or "inter".

    Attributes:
        multiple: elements; buckets are sent fastest if their parts start at multiples of it.
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
        """Label this context in profiler traces; yields the name for the comms logger."""
        name = f"{self.name}_{operation}"
        # To record takes the host as long as a small collective.
        label = record_function(f"paro::{name}") if torch.autograd._profiler_enabled() else nullcontext()
        with label, observers.package_communication():
            yield name

    def start(self, operation: str, collective: Callable[..., Any], *arguments: Any) -> Any:
        """Start a function of ``deepspeed.comm`` over the group."""
        with self.labeled(operation) as log_name:
            return collective(*arguments, group=self.group, async_op=True, log_name=log_name)

    def observe(self, operation: str, nbytes: float, handle: Any) -> Any:
        """Notify the observer of a communication by which this rank receives ``nbytes``, and return the handle to wait
        for: the observer's, if there is one."""
        return observers.on_start(f"{self.name}_{operation}", self.group, nbytes, handle)

    def all_gather(self, gathered: Tensor, shard: Tensor, operation: str = "all_gather") -> Any:
        """Start an all-gather.

        Args:
            gathered: 1D of ``size * shard.numel()`` elements.
            shard: 1D, contiguous; may be this rank's part of ``gathered``.
            operation: name in logs and traces.
        """
        nbytes = (self.size - 1) * shard.nbytes
        if not self.pairwise:
            handle = self.start(operation, dist.all_gather_into_tensor, gathered, shard)
            return self.observe(operation, nbytes, handle)
        with self.labeled(operation) as name:
            handle = pairwise_all_to_all(self.group, gathered.split(shard.numel()), [shard] * self.size, name)
        return self.observe(operation, nbytes, handle)

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
            operation: name in logs and traces.
            received_splits: lengths of the parts of ``received``; by default all ranks have the same ``splits``.
        """
        output_splits = [splits[self.rank]] * self.size if received_splits is None else list(received_splits)
        nbytes = (sum(output_splits) - output_splits[self.rank]) * received.element_size()
        if not self.pairwise:
            handle = self.start(operation, dist.all_to_all_single, received, sent, output_splits, list(splits))
            return self.observe(operation, nbytes, handle)
        with self.labeled(operation) as name:
            handle = pairwise_all_to_all(self.group, received.split(output_splits), sent.split(list(splits)), name)
        return self.observe(operation, nbytes, handle)

    def reduce_each(self, parts: Sequence[Tensor]) -> Any:
        """Start a rooted reduce of each part to the rank of its number.

        If possible they are one launch; otherwise each waits until the one before it has passed through all ranks.
        """
        coalesced = _can_coalesce(self.group, parts[0].device)
        ranks = get_process_group_ranks(self.group)  # get_global_rank would search them for each part
        with get_coalescing_manager(self.group, parts[0].device, [], True) if coalesced else nullcontext() as launch:
            handles = [
                self.start("reduce_scatter", dist.reduce, part, ranks[owner])
                for owner, part in enumerate(parts)
                if part.numel()
            ]
        nbytes = sum(part.nbytes for part in parts) * (self.size - 1) / self.size  # each part passes through all ranks
        return self.observe("reduce_scatter", nbytes, launch if coalesced else Handles(handles))


def _can_coalesce(group: ProcessGroup, device: torch.device) -> bool:
    """Return whether the backend can coalesce collectives; not while DeepSpeed's comms logger times each one."""
    return not comms_logger.enabled and group._get_backend(device).supports_coalescing


# Messages between pairs of ranks ##################################################################

# Messages between two ranks are received in the order of sending, separately for each tag.
_tag: ContextVar[int] = ContextVar("tag of messages that are started", default=0)
_launch_lock = threading.Lock()  # DeepSpeed's comms logger has one timer for all messages of a name


@contextmanager
def tagged(tag: int) -> Iterator[None]:
    """Set the tag of messages that this thread starts in this context; they match messages of this tag only."""
    token = _tag.set(tag)
    try:
        yield
    finally:
        _tag.reset(token)


class Handles:
    """Combines several communications into one handle; repeated waits are allowed."""

    def __init__(self, handles: Iterable[Any]) -> None:
        self._handles = list(handles)

    def wait(self) -> None:
        """Wait for all of them."""
        for handle in self._handles:
            handle.wait()


# A connection breaks if an announced message is not received. So dropping a transfer must not drop its messages:
# this reference keeps them until a wait completes them, or the group is destroyed.
_in_flight: "weakref.WeakKeyDictionary[ProcessGroup, set[PairwiseHandles]]" = weakref.WeakKeyDictionary()


class PairwiseHandles(Handles):
    """Handle of the messages of a pairwise all-to-all."""

    def __init__(self, group: ProcessGroup, handles: Iterable[Any]) -> None:
        super().__init__(handles)
        self._handles_of_group = _in_flight.setdefault(group, set())
        self._handles_of_group.add(self)

    def wait(self) -> None:
        """Wait for all messages, once."""
        super().wait()
        self._handles.clear()  # a second wait for such a message would block
        self._handles_of_group.discard(self)

    def close_connections(self) -> None:
        """Close the connections of the group if a message is in flight; all waits for its messages raise."""
        for handle in list(self._handles):  # a copy: a waiting thread clears the list
            with suppress(RuntimeError):
                handle.wait(timedelta(milliseconds=1))


def close_all_connections() -> None:
    """Close the connections of all groups with messages in flight.

    gloo cannot cancel a message, but a wait that times out ends all waits for messages of the same group.
    """
    with _launch_lock:  # a thread may add a group's first messages, which would change the dictionary during iteration
        in_flight = [handles for started in _in_flight.values() for handles in list(started)]
    for handles in in_flight:
        handles.close_connections()


def pairwise_all_to_all(
    group: ProcessGroup, received: Sequence[Tensor], sent: Sequence[Tensor], log_name: str
) -> PairwiseHandles:
    """Start an all-to-all of messages between pairs of ranks; see Note [Pairwise messages].

    Args:
        group: process group.
        received: output buffers, one from each rank, contiguous.
        sent: tensors, one for each rank, contiguous.
        log_name: name in the comms logger.
    """
    rank, size = dist.get_rank(group=group), len(sent)
    received[rank].copy_(sent[rank])  # gloo sends no messages to the same rank
    # Each rank starts with its successor, so that not all ranks start with the same peer.
    peers = [((rank + step) % size, (rank - step) % size) for step in range(1, size)]
    # Receives come first in the batch: see Note [Pairwise messages].
    receives = [(dist.irecv, received[source], source) for _, source in peers]
    sends = [(dist.isend, sent[target], target) for target, _ in peers]
    operations = [
        dist.P2POp(operation, part, dist.get_global_rank(group, peer), group, _tag.get())
        for operation, part, peer in receives + sends
        if part.numel()  # empty parts are empty on both sides
    ]
    with _launch_lock:
        return PairwiseHandles(group, dist.batch_isend_irecv(operations, log_name=log_name) if operations else ())
