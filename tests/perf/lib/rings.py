# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Flat rings on gloo, with the bytes that they have on NCCL: an all-gather, and reductions of the baselines. gloo's
reduce-scatter sends the bytes of an all-reduce, and its rooted reduces more than NCCL's chains. A ring over ranks that
are numbered node by node crosses each link once, with (n - 1)/n of the bytes."""

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

WINDOW = 2**17  # elements


def ring_reduce_scatter(parts: Sequence[Tensor], group: dist.ProcessGroup, delay: float = 0.0) -> Tensor:
    """Return the sum over ranks of the part with this rank's number, in its dtype; parts may differ in length."""
    size, rank = group.size(), group.rank()
    added = [parts[(rank - 2 - step) % size] for step in range(size - 1)]
    return _pass_around(parts[rank - 1], [torch.empty_like(part) for part in added], added, group, delay)


def ring_all_gather(gathered: Tensor, shard: Tensor, group: dist.ProcessGroup, delay: float = 0.0) -> None:
    """All-gather shards of equal length in rank order, each received in its place."""
    parts, rank = gathered.chunk(group.size()), group.rank()
    _pass_around(parts[rank].copy_(shard), [parts[rank - step] for step in range(1, len(parts))], (), group, delay)


def _pass_around(
    part: Tensor, received: Sequence[Tensor], added: Sequence[Tensor], group: dist.ProcessGroup, delay: float
) -> Tensor:
    """Send a part to the successor, then each received one after an addition, if any; return the last one. Parts are
    sent in windows: a small bucket of ZeRO-1 and -2 belongs to one rank, whose sum would cross links in turn. Receives
    come first, see Note [Pairwise messages]. ``delay``: seconds by which parts arrive later."""
    before, after = (dist.get_global_rank(group, (group.rank() + shift) % group.size()) for shift in (-1, 1))
    steps = [buffer.split(WINDOW) for buffer in received]
    receives = [[dist.irecv(window, before, group) for window in windows] for windows in steps]
    sends = [dist.isend(window, after, group) for window in part.split(WINDOW) if received]
    for step, windows in enumerate(steps):
        for number, (receive, window) in enumerate(zip(receives[step], windows, strict=True)):
            receive.wait()
            time.sleep(0 if number else delay)
            if added:
                window.add_(added[step].split(WINDOW)[number])
            if step < len(steps) - 1:
                sends.append(dist.isend(window, after, group))
    for send in sends:
        send.wait()
    return [part, *received][-1]


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
