# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Exact reductions: ordered ones, and those of each backend.

An ordered sum is taken in fp32, in rank order, and rounded once. The reference is here. ``loco.ops`` loads kernels
(``csrc``), which give the same bits for all numbers; only the bits of NaNs may differ.
"""

from collections.abc import Callable, Sequence

import torch
from deepspeed import comm as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_ext.comm import collectives
from deepspeed_ext.comm.hops import GatherHop, ReduceHop, Transfer
from deepspeed_ext.comm.packing import concat_padded
from deepspeed_ext.comm.spans import Contents, Spans

NAMESPACE = "deepspeed_paro"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of kernels
# Elements that a link sends during the latency of a ring step: 64 KB in 6 microseconds at 10 GB/s.
_ELEMENTS_PER_STEP = 1 << 15


def sum_reference(parts: Tensor, out: Tensor) -> None:
    """See ``sum_parts``; writes the sum to ``out``, 1D."""
    # Not ``parts.sum(0, dtype=torch.float32)``: on the CPU it adds 8 parts or more in another order (torch 2.13).
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    out.copy_(total)


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define("sum_parts(Tensor parts, Tensor(a!) out) -> ()")
_library.impl("sum_parts", sum_reference, "CompositeExplicitAutograd")
# Like all operators of the library, it only writes into its arguments.
torch.library.register_fake(f"{NAMESPACE}::sum_parts", lambda parts, out: None, lib=_library)


def sum_parts(parts: Tensor) -> Tensor:
    """Return the sum of parts, in their dtype; runs a kernel if there is one for the device.

    Args:
        parts: (parts, width), the part of each rank in rank order; at least one part, rows without gaps.

    Returns:
        1D of ``width`` elements.
    """
    out = parts.new_empty(parts.shape[1])
    if out.dtype not in DTYPES:
        sum_reference(parts, out)
    elif out.numel():
        torch.ops.deepspeed_paro.sum_parts(parts, out)
    return out


class AllToAllReduce(ReduceHop):
    """An ordered reduction: an all-to-all and a local sum in fp32, in rank order. Also the default for gloo.

    It receives the bytes of a ring reduce-scatter. gloo's reduce-scatter sends the bytes of an all-reduce, twice as
    many (measured at the interface). Unequal parts cost nothing extra. Until the sum, a rank holds the parts of all
    ranks: as many elements as ``flat``.
    """

    def reduce_scatter(self, flat: Tensor, splits: Sequence[int], contents: Contents = ()) -> Transfer:
        """Sum all parts of this rank; see ``ReduceHop``."""
        if self.size == 1 or not flat.numel():
            return flat
        width = splits[self.rank]
        parts = flat.new_empty(self.size * width)
        yield self.collectives.all_to_all(parts, flat, splits, "reduce_scatter")
        return sum_parts(parts.view(self.size, width))


class NativeReduce(ReduceHop):
    """A reduction for backends with a reduce-scatter (NCCL). Unequal parts are padded, or use rooted reduces."""

    def lengths(self, splits: Sequence[int]) -> list[int]:
        """Return equal lengths if they are cheaper; see ``ReduceHop``."""
        if splits.count(splits[0]) == self.size and not splits[0] % self.multiple:
            return list(splits)  # as those of most buckets
        filled = super().lengths(splits)
        longest, rooted = max(filled), sum(length > 0 for length in filled)
        # A padded reduce-scatter receives (size-1)*longest elements per rank, in size-1 steps. Rooted reduces, one to
        # the owner of each part, receive about the complete bucket, and each of them passes through all ranks.
        # The choice depends on ``splits`` only, so all ranks start the same collectives.
        steps = self.size - 1
        padded = steps * (longest + _ELEMENTS_PER_STEP) <= sum(filled) + rooted * steps * _ELEMENTS_PER_STEP
        return [longest] * self.size if padded else filled

    def reduce_scatter(self, flat: Tensor, splits: Sequence[int], contents: Contents = ()) -> Transfer:
        """Reduce by one collective, or one per part; see ``ReduceHop``."""
        if self.size == 1 or not flat.numel():
            return flat
        lengths, width = self.lengths(splits), splits[self.rank]
        if lengths != list(splits):
            flat = concat_padded(flat.split(list(splits)), lengths)
        if len(set(lengths)) == 1:
            part = flat.new_empty(lengths[0])
            handle = self.collectives.start("reduce_scatter", dist.reduce_scatter_tensor, part, flat)
            yield self.collectives.observe("reduce_scatter", flat.nbytes - part.nbytes, handle)
            return part[:width]
        parts = flat.split(lengths)
        yield self.collectives.reduce_each(parts)
        return parts[self.rank][:width].clone()  # a view would keep the bucket's memory through the next hop

    def all_reduce(self, flat: Tensor, spans: Spans = ()) -> Transfer:
        """Use the backend's all-reduce if the sums are gathered without loss; see ``ReduceHop``."""
        return (yield from _all_reduce(self, flat) if self.sums.exact else super().all_reduce(flat, spans))


def _all_reduce(hop: ReduceHop, flat: Tensor) -> Transfer:
    if hop.size > 1 and flat.numel():
        received = 2 * flat.nbytes * (hop.size - 1) / hop.size
        handle = hop.collectives.start("all_reduce", dist.all_reduce, flat)
        yield hop.collectives.observe("all_reduce", received, handle)
    return flat


class AllReduceReduce(ReduceHop):
    """A reduction for ``reduce_scatter: false``: an all-reduce of the bucket, of which a rank keeps its part."""

    def reduce_scatter(self, flat: Tensor, splits: Sequence[int], contents: Contents = ()) -> Transfer:
        """All-reduce the bucket, and keep this rank's part; see ``ReduceHop``."""
        flat = yield from self.all_reduce(flat)
        return flat.split(list(splits))[self.rank].clone() if self.size > 1 else flat

    def all_reduce(self, flat: Tensor, spans: Spans = ()) -> Transfer:
        """Use the backend's all-reduce; see ``ReduceHop``."""
        return (yield from _all_reduce(self, flat))


MakeReduce = Callable[[ProcessGroup | None, str, bool], ReduceHop]  # first arguments of ``make_reduce``
MakeGather = Callable[[ProcessGroup | None, str], GatherHop]  # process group and name


def make_reduce(
    group: ProcessGroup | None, name: str, reduce_scatter: bool = True, ordered: bool = False
) -> ReduceHop:
    """Make an exact reduction.

    Args:
        group, name: see ``Hop``.
        reduce_scatter: DeepSpeed's key of that name.
        ordered: whether sums are taken in rank order with every backend; otherwise the backend decides.
    """
    if ordered or (reduce_scatter and collectives.backend_of(group) == "gloo"):
        return AllToAllReduce(group, name)
    return (NativeReduce if reduce_scatter else AllReduceReduce)(group, name)
