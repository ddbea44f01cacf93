# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Reductions of the baselines, on gloo, with the bytes that they have on NCCL.

gloo's reduce-scatter sends the bytes of an all-reduce, and its rooted reduces more than NCCL's chains. A ring over
ranks that are numbered node by node crosses each link once, with (n - 1)/n of the bytes.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime.comm import coalesced_collectives
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

WINDOW = 2**17  # elements


def ring_reduce_scatter(parts: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks of the part with this rank's number, in its dtype; parts may differ in length.

    At each of n - 1 steps a rank sends a partial sum to its successor, in windows: a small bucket of ZeRO-1 and -2
    belongs to one rank, whose sum would cross links in turn. Receives come first, see Note [Pairwise messages].
    """
    size, rank = group.size(), group.rank()
    before, after = (dist.get_global_rank(group, (rank + shift) % size) for shift in (-1, 1))
    total, *added = [parts[(rank - 1 - step) % size].split(WINDOW) for step in range(size)]
    received = [[torch.empty_like(window) for window in part] for part in added]
    receives = [[dist.irecv(window, before, group) for window in part] for part in received]
    sends = []
    for step, part in enumerate(received):
        sends += [dist.isend(window, after, group) for window in total] if step == 0 else []
        for receive, window, own in zip(receives[step], part, added[step], strict=True):
            receive.wait()
            window.add_(own)
            if step < size - 2:
                sends.append(dist.isend(window, after, group))
        total = part
    for send in sends:
        send.wait()
    return torch.cat(list(total))


class RingReduceScatter(DefaultReduceScatter):
    """FSDP2's; in a node of two ranks it is a direct exchange."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        total = ring_reduce_scatter(input_tensor.chunk(group.size()), group)
        torch.div(total, group.size() if op == dist.ReduceOp.AVG else 1, out=output_tensor)


@contextmanager
def ring_reductions() -> Iterator[None]:
    """Make DeepSpeed reduce through rings here: reduce-scatters of ZeRO-3, and a bucket's reduces of ZeRO-1 and -2."""
    scatter = mock.patch.object(coalesced_collectives, "_torch_reduce_scatter_fn", _reduce_scatter)
    with scatter, mock.patch.object(DeepSpeedZeroOptimizer, "average_tensor", _average_tensor):
        yield


def _reduce_scatter(input_tensor: Tensor, output_tensor: Tensor, group: Any = None, **_: Any) -> None:
    group = group or dist.group.WORLD
    output_tensor.copy_(ring_reduce_scatter(input_tensor.chunk(group.size()), group))


_average_in_turn = DeepSpeedZeroOptimizer.average_tensor


def _average_tensor(optimizer: DeepSpeedZeroOptimizer, tensor: Tensor, dtype: torch.dtype) -> None:
    """Collect DeepSpeed's reduces of a bucket, run a ring, and let DeepSpeed store the results."""
    store, calls = optimizer.allreduce_and_copy, defaultdict[Any, list[tuple[int, list[Tensor], dict[str, Any]]]](list)

    def collect(pieces: list[Tensor], dtype: torch.dtype, *, rank: int, process_group: Any, **more: Any) -> None:
        calls[process_group].append((rank, pieces, more))

    with mock.patch.object(optimizer, "allreduce_and_copy", collect):
        _average_in_turn(optimizer, tensor, dtype)
    for group, stored in calls.items():
        parts = [[tensor.new_empty(0, dtype=dtype)] for _ in range(group.size())]
        for rank, pieces, _ in stored:
            parts[rank] += [piece.flatten().to(dtype) for piece in pieces]
        result = ring_reduce_scatter([torch.cat(part) for part in parts], group)
        for rank, pieces, more in stored:
            own = sum(piece.numel() for piece in pieces) if rank == group.rank() else 0
            reduced, result = result[:own], result[own:]
            with mock.patch.object(optimizer, "allreduce_bucket", lambda *_, reduced=reduced, **__: reduced):
                store(pieces, dtype, rank=rank, process_group=group, **more)
