# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""All ranks over gloo on the host, beside the process groups that train: for what goes on while these are busy."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor, distributed
from torch.distributed import ReduceOp

from deepspeed_ext.comm.disjoint_groups import timeout_of

NAME = "deepspeed_ext on the host"  # of its process groups
_LONGEST = 4096  # bytes of a text that is told


@dataclass
class Vote:
    """A minimum over all ranks that is on its way.

    Attributes:
        value: of this rank; of all, once it has arrived.
        work: what it is waited for by.
    """

    value: Tensor
    work: Any

    def result(self) -> int:
        """Wait, and return it."""
        self.work.wait()
        return int(self.value.item())


class HostChannel:
    """A ``Channel`` of one thread of each rank, which calls it in the same order as those of the others.

    A thread must have one of its own. The group is called directly, and not by ``deepspeed.comm``: so it also serves
    a thread that outlives ``destroy_process_group``, and the comms logger times nothing that runs beside the training.

    Making one is collective over all ranks.
    """

    def __init__(self) -> None:
        self.rank, self.world = int(dist.get_rank()), int(dist.get_world_size())
        self._group: Any = distributed.new_group(backend="gloo", timeout=timeout_of(None), group_desc=NAME)

    def close(self) -> None:
        """End the process group, with its threads and connections. Called when nothing is under way; not collective.

        What this rank has sent still arrives: another one may be in the last call.
        """
        group, self._group = self._group, None  # which also closes the connections
        if group is not None:
            with suppress(ValueError):  # ``destroy_process_group`` has ended all
                distributed.destroy_process_group(group)

    def start_min(self, value: int) -> Vote:
        """Begin to find the smallest of all ranks' values."""
        return self._start(value, ReduceOp.MIN)

    def all_reduce_min(self, value: int) -> int:
        """Return the smallest of all ranks' values."""
        return self._start(value, ReduceOp.MIN).result()

    def all_reduce_sum(self, value: int) -> int:
        """Return the sum of all ranks' values."""
        return self._start(value, ReduceOp.SUM).result()

    def broadcast_text(self, text: str, source: int) -> str:
        """Return the text of rank ``source``, on all ranks; of a long one the beginning."""
        content = torch.zeros(_LONGEST, dtype=torch.uint8)
        mine = torch.tensor(list(text.encode()[:_LONGEST]), dtype=torch.uint8)
        content[: mine.numel()] = mine
        options = distributed.BroadcastOptions()
        options.rootRank = source
        self._group.broadcast([content], options).wait()
        return bytes(content.tolist()).rstrip(b"\0").decode(errors="replace")

    def exchange(self, sent: Tensor | None, target: int, received: Tensor | None, source: int) -> None:
        """Send a tensor to one rank while another one is received from a rank; None for nothing."""
        started = []
        if received is not None:
            started.append(self._group.recv([received], source, 0))
        if sent is not None:
            started.append(self._group.send([sent], target, 0))
        for one in started:
            one.wait()

    def _start(self, value: int, operation: Any) -> Vote:
        held = torch.tensor([value], dtype=torch.int64)
        options = distributed.AllreduceOptions()
        options.reduceOp = operation
        return Vote(held, self._group.allreduce([held], options))
