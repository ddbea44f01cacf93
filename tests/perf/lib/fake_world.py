# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""One of any number of ranks, on torch's fake process group: collectives end at once, and are counted. Results have
the right shape and dtype only. No counted number depends on values."""

import functools
import os
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import distributed
from torch.testing._internal.distributed import fake_pg
from torch.utils._python_dispatch import TorchDispatchMode

# Of each collective: which argument says how many bytes there are in all, and how often each rank receives them.
_WHOLE = dict.fromkeys(("all_gather_into_tensor", "all_gather", "all_to_all_single", "reduce", "broadcast"), (0, 1))
_WHOLE |= {"reduce_scatter_tensor": (1, 1), "reduce_scatter": (1, 1), "all_reduce": (0, 2)}
_MADE = ("new_group", "split_group")


class FakeWorld:
    """A process group of ``ranks`` fake ranks in groups of ``group_size``; this process is the first rank.

    Attributes:
        messages: number of collectives by kind of group: "intra", "inter", "world", "other".
        received: bytes that this rank would receive, by that kind; in a ring, a rank receives all parts but its own.
        made: number of calls that created groups.
    """

    def __init__(self, ranks: int, group_size: int) -> None:
        self.ranks, self.group_size = ranks, group_size
        self.messages, self.received = Counter[str](), Counter[str]()
        self.made = Counter[str]()
        self._kinds: dict[Any, str] = {}
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(group_size))
        distributed.init_process_group("fake", rank=0, world_size=ranks, store=fake_pg.FakeStore())
        # Never undone: this process does nothing else, and DeepSpeed keeps some of these functions.
        for name in (*_WHOLE, *_MADE):
            mock.patch.object(distributed, name, self._counted(name, getattr(distributed, name))).start()

    def reset(self) -> None:
        for counter in (self.messages, self.received, self.made):
            counter.clear()

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.made[name] += name in _MADE
            if name not in _MADE:
                self._count(name, args, kwargs)
            if name == "reduce_scatter_tensor":  # torch 2.10 leaves NaNs, for which steps are skipped
                out, full = args[:2]
                out.copy_(full.flatten()[: out.numel()].view_as(out))
            return original(*args, **kwargs)

        return counted

    def _count(self, name: str, args: Any, kwargs: Any) -> None:
        position, times = _WHOLE[name]
        data = (argument for argument in kwargs.values() if isinstance(argument, (torch.Tensor, list)))
        full = args[position] if len(args) > position else next(data)
        tensors = full if isinstance(full, (list, tuple)) else [full]
        size = distributed.get_world_size(kwargs.get("group"))
        nbytes = sum(argument.numel() * argument.element_size() for argument in tensors)
        group = kwargs.get("group")
        if group not in self._kinds:  # a real collective takes no time for it
            self._kinds[group] = self._kind(group, size)
        kind = self._kinds[group]
        self.messages[kind] += 1
        self.received[kind] += round(times * nbytes * (size - 1) / size)

    def _kind(self, group: Any, size: int) -> str:
        if size == self.ranks:
            return "world"
        first_two = distributed.get_process_group_ranks(group)[:2]
        step = first_two[1] - first_two[0] if size > 1 else 0
        kinds = {(self.group_size, 1): "intra", (self.ranks // self.group_size, self.group_size): "inter"}
        return kinds.get((size, step), "other")


class OperatorCount(TorchDispatchMode):
    """Counts torch operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))
