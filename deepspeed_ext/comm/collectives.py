# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The collectives of one process group, started in the way that suits its backend."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
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
from deepspeed_ext.comm.pairwise import Handles, pairwise_all_to_all


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
