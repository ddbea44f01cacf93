# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""ZeRO-1/2's flat buffers, divided into stripes where that serves; see Note [Stripes] in ``comm/layout.py``.

DeepSpeed takes a rank's partition as one stretch of the flat buffer, of which it is a view. Of a buffer with stripes
it is a tensor of its own, of the same size on every rank, and DeepSpeed's tables say which parameters are in it, and
where. Buffers of one stripe are DeepSpeed's as they are.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

from deepspeed import comm as dist
from deepspeed.utils.tensor_fragment import fragment_address, tensor_fragment
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed_ext.comm.layout import FlatLayout, Piece
from deepspeed_ext.comm.owners import Cells
from deepspeed_ext.comm.packing import fill_up
from deepspeed_ext.deepspeed_types import MappedParameter
from deepspeed_ext.strategy import Placement
from deepspeed_ext.zero.crossing_spans import CrossingSpan, crossing_spans_of
from deepspeed_ext.zero.families import Family, name_in_all
from deepspeed_ext.zero.flat_shards import FlatShard, Member

# A buffer has this number of stripes where buckets are as large as a few layers or larger ...
_STRIPES = 16
# ... unless a rank's part of one had less elements than this: what is sent should be worth its latency.
_LEAST = 1 << 15


def stripe_starts(offsets: Sequence[int], numels: Sequence[int], bucket: int, ranks: int) -> tuple[int, ...]:
    """Return where stripes of whole parameters start in a flat buffer.

    Args:
        offsets, numels: of its parameters, in order.
        bucket: elements of a stripe at most, unless one parameter has more.
        ranks: among which each is divided.
    """
    most = min(bucket, max(-(-sum(numels) // _STRIPES), _LEAST * ranks))
    starts = [0]
    for offset, numel in zip(offsets, numels, strict=True):
        if offset + numel - starts[-1] > most and offset > starts[-1] and numel:
            starts.append(offset)
    return tuple(starts)


class FlatBuffer:
    """The flat buffer of a parameter group: where its parameters are, and what of them is a rank's.

    Args:
        number: of the parameter group.
        family: whose parameters they are.
        params, offsets, numels: of the buffer, in order; while it is made a parameter may have no elements by itself.
        alignment: what DeepSpeed aligns its length to.
        os: placement of the optimizer's states.
        group: process group over which these are sharded.
        bucket: elements of a stripe at most; None for DeepSpeed's own stretches.

    Attributes:
        numel: elements, without padding after the last parameter.
        rank: this rank's number in ``group``.
        layout: how the buffer is divided.
        zeros_layout: how DeepSpeed would divide it, in whose order checkpoints are.
        shard_numel: elements of a rank's partition.
    """

    def __init__(
        self,
        number: int,
        family: Family,
        params: Sequence[nn.Parameter],
        offsets: Sequence[int],
        numels: Sequence[int],
        alignment: int,
        os: Placement,
        group: ProcessGroup,
        bucket: int | None,
    ) -> None:
        self.number, self.family, self.params, self.group = number, family, list(params), group
        self._offsets, self._numels, self._os = list(offsets), list(numels), os
        self._places = {id(param): place for place, param in enumerate(params)}
        self.numel = offsets[-1] + numels[-1]
        self.rank = int(dist.get_rank(group=group))
        aligned, topology = fill_up(self.numel, alignment), family.topology
        self.layout = self.zeros_layout = FlatLayout.of(aligned, os, topology)
        starts = (0,) if bucket is None else stripe_starts(offsets, numels, bucket, topology.sizes.ranks)
        if len(starts) > 1 and self.layout.rows * self.layout.cols > 1:
            self.layout = FlatLayout.of(self.numel, os, topology, starts)
        self.shard_numel = aligned if os == Placement.N else self.layout.chunk

    @property
    def striped(self) -> bool:
        """Whether partitions are not DeepSpeed's stretches."""
        return len(self.layout.starts) > 1 and self._os != Placement.N

    @property
    def filling(self) -> int:
        """Elements after the last parameter, beside those of DeepSpeed's alignment."""
        return self.layout.rows * self.layout.cols * self.layout.chunk - self.numel if self.striped else 0

    @property
    def cell(self) -> tuple[int, int]:
        """Row and column of the chunk whose optimizer states this rank has."""
        return divmod(self.rank, self.family.topology.sizes.group_size)

    def offset(self, param: nn.Parameter) -> int:
        """Return where a parameter starts."""
        return self._offsets[self._places[id(param)]]

    def has(self, param: nn.Parameter) -> bool:
        """Whether a parameter is in it."""
        return id(param) in self._places

    # This rank's partition ########################################################################

    @cached_property
    def _pieces(self) -> dict[int, Piece]:
        """By id of the parameter, its piece in this rank's partition."""
        found: dict[int, Piece] = {}
        for cell in self.layout.cells_of(*self.cell):
            first = bisect_right(self._offsets, cell.start) - 1
            for place in range(first, bisect_left(self._offsets, cell.start + cell.numel)):
                start = max(self._offsets[place], cell.start)
                end = min(self._offsets[place] + self._numels[place], cell.start + cell.numel)
                if start < end:
                    column = cell.column + start - cell.start
                    found[id(self.params[place])] = Piece(cell.row, cell.col, column, start, end - start)
        return found

    def holds(self, param: nn.Parameter) -> bool:
        """Whether this rank's partition has an element of a parameter."""
        return id(param) in self._pieces

    def own_pieces(self) -> Iterator[tuple[nn.Parameter, int, Piece]]:
        """Yield parameters that are in this rank's partition, in its order; where they start in the buffer; what is in
        the partition."""
        for param, offset in zip(self.params, self._offsets, strict=True):
            if piece := self._pieces.get(id(param)):
                yield param, offset, piece

    def own_elements(self, param: nn.Parameter) -> tuple[int, int, int]:
        """Return which elements this rank's partition has of a parameter, (start, numel), and from where on."""
        offset = self.offset(param)
        if self._os == Placement.N:
            return 0, self._numels[self._places[id(param)]], offset
        piece = self._pieces.get(id(param))
        return (piece.start - offset, piece.numel, piece.column) if piece is not None else (0, 0, 0)

    def padding(self) -> Iterator[tuple[int, int]]:
        """Yield (start, length) of what belongs to no parameter in this rank's partition."""
        if not self.striped:
            if length := self._padded(self.shard_numel):
                yield self.shard_numel - length, length
            return
        ends = {piece.column: piece.column + piece.numel for piece in self.layout.cells_of(*self.cell)}
        for stripe in self.layout.stripes:
            end = ends.get(stripe.column, stripe.column)
            if end < stripe.column + stripe.width:
                yield end, stripe.column + stripe.width - end

    def _padded(self, chunk: int) -> int:
        """Return how many elements of this rank's stretch of ``chunk`` elements are padding."""
        return max(0, min(chunk, (self.rank + 1) * chunk - self.numel))

    def copy_own(self, flat: Tensor, own: Tensor) -> None:
        """Copy this rank's partition out of the flat buffer, 1D each; what is padding stays."""
        for piece in self.layout.cells_of(*self.cell):
            own.narrow(0, piece.column, piece.numel).copy_(flat.narrow(0, piece.start, piece.numel))

    def partitions(self, flat: Tensor) -> list[Tensor]:
        """Return this rank's partition of the flat buffer, which has stripes, and nothing for others, which nobody
        reads."""
        own = flat.new_zeros(self.layout.chunk)
        self.copy_own(flat, own)
        partitions = [flat.new_empty(0) for _ in range(self.layout.rows * self.layout.cols)]
        partitions[self.rank] = own
        return partitions

    def split(self, shard: Tensor) -> list[Tensor]:
        """Return a shard (1D) as DeepSpeed lists it: a tensor for each parameter in it, and for each padding."""
        parts, column = [], 0
        for param, _, piece in self.own_pieces():
            if piece.column > column:
                parts.append(_padding(shard.narrow(0, column, piece.column - column)))
            part = shard.narrow(0, piece.column, piece.numel)
            parts.append(part.view(param.shape) if piece.numel == param.numel() else part)
            column = piece.column + piece.numel
        if column < shard.numel():
            parts.append(_padding(shard.narrow(0, column, shard.numel() - column)))
        return parts

    def link(self, weights: Tensor, paddings_listed: bool, **fields: Any) -> None:
        """Tell parameters where their weights and states are, for DeepSpeed's ``safe_get_full_...``.

        Args:
            weights: the optimizer's, of this rank's partition, 1D.
            paddings_listed: whether the list of gradients (``split``) has paddings.
            fields: further ones of DeepSpeed's ``tensor_fragment``.
        """
        for other in self.params:
            cast(MappedParameter, other)._hp_mapping = None
        index, column = 0, 0
        for owned, offset, piece in self.own_pieces():
            param = cast(MappedParameter, owned)
            index += int(paddings_listed and piece.column > column)
            param._index_in_param_group = index
            index, column = index + 1, piece.column + piece.numel
            param._hp_mapping = tensor_fragment(
                lp_fragment=param.flatten().narrow(0, piece.start - offset, piece.numel),
                lp_fragment_address=fragment_address(start=piece.start - offset, numel=piece.numel),
                hp_fragment=weights.narrow(0, piece.column, piece.numel),
                hp_fragment_address=fragment_address(start=piece.column, numel=piece.numel),
                param_group_index=self.number,
                **fields,
            )

    # In DeepSpeed's order #########################################################################

    @property
    def zeros_chunk(self) -> int:
        """Elements of a rank's partition in DeepSpeed's order."""
        return self.zeros_layout.chunk if self.striped else self.shard_numel

    @property
    def zeros_padding(self) -> int:
        """Elements at the end of this rank's partition that are padding, in DeepSpeed's order."""
        return self._padded(self.zeros_chunk)

    def zeros_pieces(self) -> Iterator[tuple[nn.Parameter, int, int, int]]:
        """Yield the parameters of which this rank's partition has elements in DeepSpeed's order: which one, the first
        element of it, how many, and where they are in the partition."""
        begin = self.rank * self.zeros_chunk
        for param, offset, numel in zip(self.params, self._offsets, self._numels, strict=True):
            start, end = max(offset, begin), min(offset + numel, begin + self.zeros_chunk)
            if start < end:
                yield param, start - offset, end - start, start - begin

    # What others ask for ##########################################################################

    def flat_shard(self) -> FlatShard:
        """Return what is in this rank's partition."""
        return FlatShard(self.number, self.number, tuple(map(self._member, self.params)))

    def _member(self, param: nn.Parameter) -> Member:
        cells = None
        if self._os != Placement.N:
            stripe = self.layout.stripe_of(self.offset(param))
            cells = Cells(stripe.start - self.offset(param), stripe.width)
        return Member(param, tuple(param.shape), cells, *self.own_elements(param))

    def crossing_spans(self, names: Mapping[nn.Parameter, str]) -> Iterator[CrossingSpan]:
        """Yield where elements of parameters are among the gradients of this rank that cross between groups."""
        col = self.family.gather.col
        for param, offset in zip(self.params, self._offsets, strict=True):
            name = name_in_all(param, names[param])
            yield from crossing_spans_of(name, param.numel(), self.layout, col, self.number, offset)


def buffer_of(buffers: Sequence[FlatBuffer], param: nn.Parameter) -> FlatBuffer:
    """Return the buffer that a parameter is in."""
    return next(buffer for buffer in buffers if buffer.has(param))


def _padding(part: Tensor) -> Tensor:
    part._zero_padding = True  # type: ignore[attr-defined] # DeepSpeed's mark: it counts in no norm
    return part
