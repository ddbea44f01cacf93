# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Buffers for NCCL begin at multiples of 16 bytes, for any number of ranks; otherwise NCCL copies single elements.

No ranks run: hops record what they would have sent, and tensors have a size but no memory (the meta device).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.comm import backends, collectives
from deepspeed_ext.comm.backends import NativeReduce
from deepspeed_ext.comm.bucket_plan import plan_bucket
from deepspeed_ext.comm.hops import GatherHop
from deepspeed_ext.comm.layout import FlatLayout, windows
from deepspeed_ext.comm.packing import fill_up, joined
from deepspeed_ext.comm.redistribution import GradientRedistribution, ParameterRedistribution
from deepspeed_ext.comm.spans import Span
from deepspeed_ext.comm.transfer_queue import Started, TransferQueue
from deepspeed_ext.strategy import GroupSizes, Placement, Strategy
from deepspeed_ext.zero.flat.updates import FlatUpdates
from deepspeed_ext.zero.sharded.gathers import Gathers
from deepspeed_ext.zero.sharded.gradients import ShardedGradients
from deepspeed_ext.zero.sharded.rows import DeviceRows, RowCache
from deepspeed_ext.zero.sharded.slices import Slices
from deepspeed_ext.zero.shards import Window

pytestmark = pytest.mark.quick

BUCKET = 500_000_000  # DeepSpeed's default
RANKS = (2, 3, 4, 6, 7, 8, 11, 12, 24, 30, 48, 64, 96, 128, 250, 256, 510, 512, 1000, 1024, 2048, 3000, 4095, 4096)
# A model in which nothing divides: a matrix, norms of few elements, a large embedding.
NUMELS = (4096 * 1024 + 3, 4096, 1, 127, 600_000_001)


class Pointers:
    """Where the parts begin that collectives were given, in bytes from the start of an allocation.

    Attributes:
        as_they_are: whether messages of several parts must have been made so that no hop needs to copy them.
    """

    def __init__(self) -> None:
        self.begins: list[tuple[str, int]] = []
        self.as_they_are = True

    def note(self, group: Any, operation: str, collective: Any, *arguments: Any) -> Any:
        """Stands for ``Collectives.start``."""
        for tensor in (argument for argument in arguments if isinstance(argument, torch.Tensor)):
            assert tensor.is_contiguous() and tensor.numel()
            smallest = min(a.numel() for a in arguments if isinstance(a, torch.Tensor))
            starts = range(0, tensor.numel(), smallest if operation != "all_reduce" else tensor.numel())
            self.begins += [
                (f"{group.name} {operation}", (tensor.storage_offset() + start) * tensor.element_size())
                for start in starts
            ]
        return SimpleNamespace(wait=lambda: None)

    def joined(self, pieces: Any, lengths: Any) -> torch.Tensor:
        """Stands for ``joined``, by which a hop fills up a message."""
        assert len(list(lengths)) == 1 or not self.as_they_are
        return joined(pieces, lengths)

    def astray(self) -> set[str]:
        """Collectives with a part that does not begin at a multiple of 16 bytes."""
        assert self.begins
        return {name for name, begin in self.begins if begin % 16}


@contextmanager
def device(sizes: GroupSizes) -> Iterator[tuple[Pointers, GradientRedistribution, ParameterRedistribution]]:
    """The redistributions of the last rank, as on NCCL; tensors have no memory."""
    pointers = Pointers()
    with (
        mock.patch.object(collectives, "backend_of", lambda group: "nccl"),
        mock.patch.multiple(
            collectives.dist,
            get_world_size=lambda group: group,  # a group is its size
            get_rank=lambda group: group - 1,
        ),
        mock.patch.object(collectives, "get_process_group_ranks", range),
        mock.patch.object(collectives, "_launches_together", lambda group, device: False),
        mock.patch.object(backends, "joined", pointers.joined),
        mock.patch.object(
            collectives.Collectives, "start", lambda group, *arguments: pointers.note(group, *arguments)
        ),
        mock.patch.object(get_accelerator(), "current_device_name", lambda: "meta"),
    ):
        groups = {"intra": sizes.group_size, "inter": sizes.groups}
        intra, inter = (NativeReduce(group, name) for name, group in groups.items())
        gathers = (GatherHop(group, name) for name, group in groups.items())
        yield pointers, GradientRedistribution(intra, inter), ParameterRedistribution(*gathers)


def clusters() -> Iterator[GroupSizes]:
    """Of each number of ranks: nodes of the largest size up to 8 that divides it."""
    for ranks in RANKS:
        yield GroupSizes(ranks, max(size for size in range(1, 9) if not ranks % size))


dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def test_windows_begin_at_multiples_of_16_elements() -> None:
    for rows in range(2, 4097):
        for most in (BUCKET, 1 << 24):
            found = windows(Span(0, 3 * most // rows + 5), rows, most)
            assert sum(width for _, width in found) == 3 * most // rows + 5
            assert all(start % 16 == 0 and width * rows <= most for start, width in found)


@dtypes
def test_messages_of_replicated_parameters(dtype: torch.dtype) -> None:
    for cluster in clusters():
        for os in (Placement.G, Placement.I):
            astray = replicated(cluster, os, dtype)
            assert not astray, (cluster, os, astray)


def replicated(cluster: GroupSizes, os: Placement, dtype: torch.dtype) -> set[str]:
    """Buckets, the boundary and the gather after the step, with p = N."""
    topology = SimpleNamespace(sizes=cluster, rank=cluster.ranks - 1)
    shards = cluster.ranks if os == Placement.G else cluster.group_size
    numel = fill_up(sum(NUMELS), 2 * shards)  # as DeepSpeed does
    striped = FlatLayout.of(numel, os, topology, (0, numel // 3, numel // 2 + 1))
    with device(cluster) as (pointers, mine, gathers):
        for layout in (FlatLayout.of(numel, os, topology), striped):
            bucket = torch.empty(3_000_001, dtype=dtype, device="meta")
            plan = plan_bucket((layout,), ((0, Span(12_345_677, 1_000_001)), (0, Span(77, 2_000_000))))
            for target in (Placement.I, os):
                pointers.as_they_are = target == Placement.I  # a group's part may still be too unequal for the second
                message = mine.pack_bucket([bucket], plan, target)
                Started(mine.reduce_bucket(message, plan, target)).finish()
            slices = torch.empty(layout.rows, layout.chunk, dtype=dtype, device="meta")
            for span in layout.windows(layout.rows, BUCKET):
                sums = Started(mine.sync_slice(span.of(slices), dtype, os, span.start)).finish()
                if os == Placement.I:
                    Started(mine.gather_slice(sums.reshape(-1))).finish()
            flat = torch.empty(layout.rows * layout.cols * layout.chunk, dtype=dtype, device="meta")
            updates = FlatUpdates.__new__(FlatUpdates)
            updates._strategy = Strategy(Placement.N, os, os)
            updates._flat = lambda group, flat=flat: flat
            updates._own = lambda group, own=flat[: layout.chunk]: own
            updates._buffers = [SimpleNamespace(layout=layout, family=SimpleNamespace(gather=gathers))]
            updates._resync = SimpleNamespace(now=True)
            for span in layout.windows(shards, BUCKET):
                window = Window(0, span, ())
                gathered = Started(updates._gather_window(window)).finish()
                updates._place_window(window, gathered)
    return pointers.astray()


@dtypes
@pytest.mark.parametrize("name", ["IIG", "GGG", "III", "IGG"])
def test_messages_of_cut_parameters(name: str, dtype: torch.dtype) -> None:
    strategy = Strategy(*(Placement[letter] for letter in name))
    for cluster in clusters():
        astray = partitioned(cluster, strategy, dtype)
        assert not astray, (cluster, astray)


def partitioned(cluster: GroupSizes, strategy: Strategy, dtype: torch.dtype) -> set[str]:
    """Gathers, buckets, the boundary and the gather after the step, with p = I or G."""
    topology = SimpleNamespace(sizes=cluster)
    with device(cluster) as (pointers, mine, gathers):
        layouts = [FlatLayout.of(numel, strategy.os, topology) for numel in NUMELS]
        held = Slices.__new__(Slices)
        held.strategy, held.topology, held.redistribution = strategy, topology, gathers
        held._columns, held._windows, held._windows_of = {}, [], {}
        held._update_of, held._changed, held._updates = {}, {}, TransferQueue(overlap=True)
        shared = torch.empty(sum(layout.chunk for layout in layouts) + 1, dtype=dtype, device="meta")[1:]
        params, offset = [], 0
        for ds_id, (numel, layout) in enumerate(zip(NUMELS, layouts, strict=True)):
            chunk = shared[offset : offset + layout.chunk]
            chunk.ds_numel = layout.chunk
            params.append(
                SimpleNamespace(ds_id=ds_id, dtype=dtype, ds_numel=numel, ds_shape=(numel,), ds_tensor=chunk)
            )
            offset += layout.chunk
        held.params, held.bucket = params, BUCKET
        held._layouts = {param.ds_id: layout for param, layout in zip(params, layouts, strict=True)}
        rows = cluster.groups if held.sliced else 1
        held.rows, held.cache = DeviceRows(gathers), RowCache()
        held._slices = {param.ds_id: param.ds_tensor.expand(rows, -1) for param in params}
        used = Gathers.__new__(Gathers)
        used.slices, used._redistribution, used._topology, used._buckets = held, gathers, topology, {}
        used._path, used._queue = (strategy.p, Placement.N), TransferQueue(overlap=True)
        used._side_streams = gathers.hops(*used._path) > 1
        used.live = used.most_live = 0
        used._rounded = set()
        for some in (params, params[:3], *([param] for param in params)):
            used._start(some, dtype).wait()
        sub_groups = params[:3], params[3:]
        flats = [flat.numel() for some in sub_groups for flat in held.partitions(some)]
        held._blocks, buffer, offset = {}, torch.empty(sum(flats), dtype=dtype, device="meta"), 0
        for number, some in enumerate(sub_groups):
            _, offset = held.make_block(number, buffer, offset, some)
        held.written = lambda: None
        held.gather_updates()
        mean = ShardedGradients(
            params, held.layout, strategy, cluster.ranks, mine, 1 << 24, overlap=False, dtype=dtype
        )
        mean.place(torch.zeros(mean.rows * mean.numel, dtype=dtype, device="meta"))
        for some in (params, params[1:4]):
            mean.reduce([(param, torch.empty(param.ds_numel, dtype=dtype, device="meta")) for param in some], dtype)
        mean.end_backward(lambda values: values)
        mean.finish()
    return pointers.astray()
