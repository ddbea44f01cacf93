# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Bytes that a rank receives from its own group and from others, told by the arguments of collectives.

What ``scripts.emulation.traffic`` reads from sockets has the frames of messages in it, beside which the models of the
fuzzer are small.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils import _pytree as pytree

# Of a process group's methods: the argument that has what all ranks have together, and how often a rank receives it.
# On gloo our own all-gathers and all-to-alls are pairwise, which ``recv`` tells.
_WHOLE = {
    **dict.fromkeys(("allgather", "_allgather_base", "allgather_into_tensor_coalesced", "all_gather_single"), (0, 1)),
    **dict.fromkeys(("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"), (1, 1)),
    **dict.fromkeys(("alltoall", "alltoall_base", "all_to_all_single", "broadcast", "reduce"), (0, 1)),
    **dict.fromkeys(("allreduce", "allreduce_coalesced"), (0, 2)),
}


@dataclass
class Received:
    """Bytes from ranks of one's own group, and of others; and in how many messages."""

    intra: float = 0.0
    inter: float = 0.0
    messages: int = 0


@contextlib.contextmanager
def counted(group_size: int) -> Iterator[Received]:
    """Count what is received in this context, where groups are of so many consecutive ranks."""
    from torch.distributed import get_process_group_ranks, get_rank

    received, own = Received(), get_rank() // group_size

    def counting_pairs(receive: Callable[..., Any]) -> Callable[..., Any]:
        def recv(group: Any, tensors: list[Tensor], source: int, *args: Any) -> Any:
            elsewhere = get_process_group_ranks(group)[source] // group_size != own
            number = sum(one.numel() * one.element_size() for one in tensors)
            received.inter += number * elsewhere
            received.intra += number * (not elsewhere)
            received.messages += 1
            return receive(group, tensors, source, *args)

        return recv

    def counting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        place, times = _WHOLE[name]

        def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
            members = get_process_group_ranks(group)
            others = sum(rank // group_size != own for rank in members)
            tensors = [one for one in pytree.tree_leaves(args[place]) if isinstance(one, Tensor)]
            each = times * sum(one.numel() * one.element_size() for one in tensors) / len(members)
            received.inter += each * others
            received.intra += each * (len(members) - 1 - others)
            received.messages += 1
            return method(group, *args, **kwargs)

        return collective

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(ProcessGroup, "recv", counting_pairs(ProcessGroup.recv)))
        for name in _WHOLE:
            if hasattr(ProcessGroup, name):
                patches.enter_context(
                    mock.patch.object(ProcessGroup, name, counting(name, getattr(ProcessGroup, name)))
                )
        yield received
