# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Exact reductions, one for each kind of backend."""

from collections.abc import Callable, Sequence

from deepspeed import comm as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_ext.comm import collectives
from deepspeed_ext.comm.hops import GatherHop, ReduceHop, Transfer
from deepspeed_ext.comm.packing import joined
from deepspeed_ext.comm.spans import Contents, Spans

# Elements that a link carries while a step of a ring takes its latency: 64 KB in 6 microseconds at 10 GB/s.
_OF_A_STEP = 1 << 15


class AllToAllReduce(ReduceHop):
    """A reduction for gloo: an all-to-all and a local sum.

    gloo's reduce-scatter sends what an all-reduce would, twice the bytes (measured at the interface). Unequal parts
    cost nothing extra here, the sum is taken in fp32, and its order is fixed.
    """

    def reduce_scatter(self, flat: Tensor, splits: Sequence[int], contents: Contents = ()) -> Transfer:
        """Sum all parts of this rank; see ``ReduceHop``."""
        if self.size == 1 or not flat.numel():
            return flat
        mine = splits[self.rank]
        parts = flat.new_empty(self.size * mine)
        yield self.collectives.all_to_all(parts, flat, splits, "reduce_scatter")
        total = parts[:mine].float()
        for part in range(1, self.size):
            total += parts[part * mine : (part + 1) * mine]
        return total.to(flat.dtype)


class NativeReduce(ReduceHop):
    """A reduction for backends that have a reduce-scatter (NCCL): equal parts by it, unequal ones as is cheaper."""

    def lengths(self, splits: Sequence[int]) -> list[int]:
        """Return equal lengths where that is cheaper; see ``ReduceHop``."""
        filled = super().lengths(splits)
        longest, rooted = max(filled), sum(length > 0 for length in filled)
        # A rank receives (size-1)*longest by a padded reduce-scatter, in as many steps, and about all of the bucket by
        # rooted reduces, one to the owner of each part, each of which goes through all ranks.
        steps = self.size - 1
        padded = steps * (longest + _OF_A_STEP) <= sum(filled) + rooted * steps * _OF_A_STEP
        return [longest] * self.size if padded else filled

    def reduce_scatter(self, flat: Tensor, splits: Sequence[int], contents: Contents = ()) -> Transfer:
        """Sum by one collective, or one for each part; see ``ReduceHop``."""
        if self.size == 1 or not flat.numel():
            return flat
        lengths, mine = self.lengths(splits), splits[self.rank]
        if lengths != list(splits):
            flat = joined(flat.split(list(splits)), lengths)
        if len(set(lengths)) == 1:
            part = flat.new_empty(lengths[0])
            handle = self.collectives.start("reduce_scatter", dist.reduce_scatter_tensor, part, flat)
            yield self.collectives.watched("reduce_scatter", flat.nbytes - part.nbytes, handle)
            return part[:mine]
        parts = flat.split(lengths)
        yield self.collectives.reduce_each(parts)
        return parts[self.rank][:mine].clone()  # a view would keep the bucket through the next hop

    def all_reduce(self, flat: Tensor, spans: Spans = ()) -> Transfer:
        """Sum by the backend's all-reduce, unless sums come back otherwise; see ``ReduceHop``."""
        return (yield from _all_reduce(self, flat) if self.sums.exact else super().all_reduce(flat, spans))


def _all_reduce(hop: ReduceHop, flat: Tensor) -> Transfer:
    if hop.size > 1 and flat.numel():
        received = 2 * flat.nbytes * (hop.size - 1) / hop.size
        handle = hop.collectives.start("all_reduce", dist.all_reduce, flat)
        yield hop.collectives.watched("all_reduce", received, handle)
    return flat


class AllReduceReduce(ReduceHop):
    """A reduction for ``reduce_scatter: false``: an all-reduce of everything, of which a rank keeps its part."""

    def reduce_scatter(self, flat: Tensor, splits: Sequence[int], contents: Contents = ()) -> Transfer:
        """Sum everything, and keep this rank's part; see ``ReduceHop``."""
        flat = yield from self.all_reduce(flat)
        return flat.split(list(splits))[self.rank].clone() if self.size > 1 else flat

    def all_reduce(self, flat: Tensor, spans: Spans = ()) -> Transfer:
        """Sum by the backend's all-reduce; see ``ReduceHop``."""
        return (yield from _all_reduce(self, flat))


MakeReduce = Callable[[ProcessGroup | None, str, bool], ReduceHop]  # arguments as those of ``make_reduce``
MakeGather = Callable[[ProcessGroup | None, str], GatherHop]  # process group and name


def make_reduce(group: ProcessGroup | None, name: str, reduce_scatter: bool = True) -> ReduceHop:
    """Make the exact reduction for this group's backend; ``reduce_scatter`` is DeepSpeed's key of that name."""
    if not reduce_scatter:
        return AllReduceReduce(group, name)
    return (AllToAllReduce if collectives.backend_of(group) == "gloo" else NativeReduce)(group, name)
