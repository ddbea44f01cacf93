# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Flat rings, on gloo, with the bytes that they have on NCCL: reductions of the baselines, and an all-gather.

gloo's reduce-scatter sends the bytes of an all-reduce, and its rooted reduces more than NCCL's chains. A ring over
ranks that are numbered node by node crosses each link once, with (n - 1)/n of the bytes.
"""

import time
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


def ring_reduce_scatter(parts: Sequence[Tensor], group: dist.ProcessGroup, delay: float = 0.0) -> Tensor:
    """Return the sum over ranks of the part with this rank's number, in its dtype; parts may differ in length.

    At each of n - 1 steps a rank sends a partial sum to its successor. Receives come first, see Note [Pairwise
    messages]. Smaller messages of equal parts took as long, measured with 4 ranks at 100 and 1,000 Mbit/s.
    ``delay``: seconds that messages to this rank take in addition.
    """
    size, rank = group.size(), group.rank()
    before, after = _neighbors(group)
    added = [parts[(rank - 2 - step) % size] for step in range(size - 1)]
    received = [torch.empty_like(part) for part in added]
    receives = [dist.irecv(part, before, group) for part in received]
    total, sends = parts[rank - 1], []
    for receive, partial_sum, own in zip(receives, received, added, strict=True):
        sends.append(dist.isend(total, after, group))
        receive.wait()
        time.sleep(delay)
        total = partial_sum.add_(own)
    for send in sends:
        send.wait()
    return total


def ring_all_gather(gathered: Tensor, shard: Tensor, group: dist.ProcessGroup, delay: float = 0.0) -> None:
    """All-gather shards in rank order; each is passed on as soon as it has been received, without a copy."""
    rank, parts = group.rank(), gathered.chunk(group.size())
    before, after = _neighbors(group)
    passed_on = [parts[rank - step] for step in range(group.size())]
    receives = [dist.irecv(part, before, group) for part in passed_on[1:]]
    passed_on[0].copy_(shard)
    sends = []
    for part, receive in zip(passed_on, receives, strict=False):  # the last part ends here
        sends.append(dist.isend(part, after, group))
        receive.wait()
        time.sleep(delay)
    for send in sends:
        send.wait()


def _neighbors(group: dist.ProcessGroup) -> tuple[int, int]:
    before, after = (dist.get_global_rank(group, (group.rank() + shift) % group.size()) for shift in (-1, 1))
    return before, after


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
