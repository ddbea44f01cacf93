# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Flat buffers of ZeRO-1/2, which may be striped; see Note [Stripes] in ``comm/layout.py``.

In DeepSpeed a rank's partition is a view of one span of the flat buffer. For a striped buffer it is a separate tensor,
of the same size on every rank, and DeepSpeed's tables list its parameters and their offsets. Buffers of one stripe are
DeepSpeed's, unchanged.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, cast

from deepspeed import comm as dist
from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state
from deepspeed.utils.tensor_fragment import fragment_address, tensor_fragment
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed_ext.comm.layout import FlatLayout, Piece
from deepspeed_ext.comm.packing import fill_up
from deepspeed_ext.comm.spans import Span
from deepspeed_ext.deepspeed_types import MappedParameter
from deepspeed_ext.strategy import Placement
from deepspeed_ext.zero.context import Context
from deepspeed_ext.zero.families import DENSE, Family, name_in_all
from deepspeed_ext.zero.flat.stage12_view import Stage12View
from deepspeed_ext.zero.shards import FlatShard, InterGroupSpan, Member, Window, in_forward_order, inter_group_spans_of

# Number of stripes of a buffer if buckets are as large as a few layers or larger ...
_STRIPES = 16
# ... unless a rank's part of a stripe had fewer elements than this: a message should be worth its latency.
_MIN_PART = 1 << 15
# Classes of optimizers whose results depend on norms of whole shards.
_NORMALIZING = {"Adafactor", "CAME", "FusedLamb", "LAMB", "Lamb", "LARS", "NovoGrad", "Prodigy"}


def stripe_starts(offsets: Sequence[int], numels: Sequence[int], bucket: int, ranks: int) -> tuple[int, ...]:
    """Return the offsets of stripes in a flat buffer; each consists of complete parameters.

    Args:
        offsets, numels: offsets and numbers of elements of its parameters, in order.
        bucket: maximum number of elements of a stripe, unless one parameter has more.
        ranks: number of ranks that share each stripe.
    """
    max_numel = min(bucket, max(-(-sum(numels) // _STRIPES), _MIN_PART * ranks))
    starts = [0]
    for offset, numel in zip(offsets, numels, strict=True):
        if offset + numel - starts[-1] > max_numel and offset > starts[-1] and numel:
            starts.append(offset)
    return tuple(starts)


class Flattening(NamedTuple):
    """DeepSpeed's flattening of a parameter group."""

    params: Sequence[nn.Parameter]  # in the order of the buffer; possibly without storage while it is being built
    offsets: Sequence[int]  # offsets of the parameters in the buffer
    numels: Sequence[int]  # elements of the parameters
    alignment: int  # multiple of elements to which the buffer is padded
    keeps_partitions: bool  # whether the buffer keeps DeepSpeed's own partitions, independent of the bucket size


class FlatBuffer:
    """The flat buffer of a parameter group: the layout of its parameters, and this rank's part of them.

    Args:
        context: shared constants.
        number: number of the parameter group.
        family: family of its parameters.
        flattening: DeepSpeed's flattening.
        group: process group over which the optimizer states are sharded.

    Attributes:
        numel: elements, without padding after the last parameter.
        rank: this rank's number in ``group``.
        layout: layout of the buffer.
        stock_layout: DeepSpeed's layout, which is the order of checkpoints.
        shard_numel: elements of a rank's partition.
    """

    def __init__(
        self, context: Context, *, number: int, family: Family, flattening: Flattening, group: ProcessGroup
    ) -> None:
        params, offsets, numels, alignment, keeps_partitions = flattening
        self.number, self.family, self.params, self.group = number, family, list(params), group
        self._offsets, self._os = list(offsets), context.strategy.os
        self._spans = [Span(*span) for span in zip(offsets, numels, strict=True)]
        self._indices = {id(param): index for index, param in enumerate(params)}
        self.numel = offsets[-1] + numels[-1]
        self.rank = int(dist.get_rank(group=group))
        aligned, topology = fill_up(self.numel, alignment), family.topology
        self.layout = self.stock_layout = FlatLayout.from_placement(aligned, self._os, topology)
        ranks = topology.sizes.ranks
        starts = (0,) if keeps_partitions else stripe_starts(offsets, numels, context.reduce_bucket, ranks)
        if len(starts) > 1 and self.layout.rows * self.layout.cols > 1:
            self.layout = FlatLayout.from_placement(self.numel, self._os, topology, starts)
        # With os = N a rank's partition is the entire buffer, whatever the layout of gradient messages.
        self._shard_layout = FlatLayout(aligned, 1, 1) if self._os == Placement.N else self.layout
        self._stock_shard_layout = self.stock_layout if self.striped else self._shard_layout
        self.shard_numel = self._shard_layout.chunk

    @property
    def striped(self) -> bool:
        """Whether partitions differ from DeepSpeed's."""
        return len(self.layout.starts) > 1 and self._os != Placement.N

    @property
    def extra_padding(self) -> int:
        """Padding after the last parameter, in addition to DeepSpeed's alignment."""
        return self.layout.rows * self.layout.cols * self.layout.chunk - self.numel if self.striped else 0

    @property
    def row_and_col(self) -> tuple[int, int]:
        """Row and column of this rank's chunk of optimizer states."""
        return divmod(self.rank, self.family.topology.sizes.group_size)

    def offset(self, param: nn.Parameter) -> int:
        """Return a parameter's offset in the buffer."""
        return self._offsets[self._indices[id(param)]]

    @property
    def replicas(self) -> int:
        """Number of data-parallel ranks that hold each expert of the buffer; 1 for dense parameters, whose norms
        DeepSpeed computes over ``group``."""
        return self.family.topology.sizes.ranks // dist.get_world_size(group=self.group) if self.has_experts else 1

    @property
    def has_experts(self) -> bool:
        """Whether the parameters are experts of expert parallelism."""
        return self.family.name != DENSE

    def has(self, param: nn.Parameter) -> bool:
        """Whether a parameter is in the buffer."""
        return id(param) in self._indices

    # This rank's partition ########################################################################

    @cached_property
    def _pieces(self) -> dict[int, Piece]:
        return dict(self._pieces_in(self._shard_layout))

    def _pieces_in(self, layout: FlatLayout) -> Iterator[tuple[int, Piece]]:
        """Yield each parameter's index and its piece in this rank's chunk, in the order of the chunk."""
        for cell in layout.cells_of(*divmod(self.rank, layout.cols)):
            first = bisect_right(self._offsets, cell.span.start) - 1
            for index in range(first, bisect_left(self._offsets, cell.span.stop)):
                span = self._spans[index].common(cell.span)
                if span.numel:
                    yield index, cell._replace(column=cell.column + span.start - cell.span.start, span=span)

    def _member(self, index: int, layout: FlatLayout, piece: Piece | None) -> Member:
        """Return a parameter in the chunks of a layout. ``piece``: this rank's part of it."""
        param, offset = self.params[index], self._offsets[index]
        span, column = (Span(0, 0), 0) if piece is None else (piece.span.shifted(-offset), piece.column)
        stripe = None if self._os == Placement.N else layout.stripe_of(offset).shifted(-offset)
        return Member(param, tuple(param.shape), stripe, span, column)

    def member(self, param: nn.Parameter) -> Member:
        """Return a parameter, with this rank's part of it, which may be empty."""
        index = self._indices[id(param)]
        return self._member(index, self._shard_layout, self._pieces.get(index))

    def own_members(self) -> Iterator[Member]:
        """Yield the parameters with elements in this rank's partition, in its order."""
        for index, piece in self._pieces.items():
            yield self._member(index, self._shard_layout, piece)

    def holds(self, param: nn.Parameter) -> bool:
        """Whether this rank's partition has an element of a parameter."""
        return self._indices[id(param)] in self._pieces

    def padding(self) -> Iterator[Span]:
        """Yield the padding in this rank's partition."""
        if not self.striped:
            if length := self._padding_in(self.shard_numel):
                yield Span(self.shard_numel - length, length)
            return
        ends = {piece.column: piece.columns.stop for piece in self.layout.cells_of(*self.row_and_col)}
        for stripe in self.layout.stripes:
            padding = Span.between(ends.get(stripe.column, stripe.column), stripe.column + stripe.width)
            if padding.numel:
                yield padding

    def _padding_in(self, chunk: int) -> int:
        """Return the amount of padding in this rank's ``chunk`` elements in DeepSpeed's order."""
        return max(0, min(chunk, (self.rank + 1) * chunk - self.numel))

    def copy_partition(self, flat: Tensor, own: Tensor) -> None:
        """Copy this rank's partition out of the flat buffer, 1D each; padding is not written."""
        for piece in self.layout.cells_of(*self.row_and_col):
            piece.columns.of(own).copy_(piece.span.of(flat))

    def partitions(self, flat: Tensor) -> list[Tensor]:
        """Return this rank's partition of a striped flat buffer, and empty ones of other ranks, which are not read."""
        own = flat.new_zeros(self.layout.chunk)  # padding stays zero
        self.copy_partition(flat, own)
        partitions = [flat.new_empty(0) for _ in range(self.layout.rows * self.layout.cols)]
        partitions[self.rank] = own
        return partitions

    def split(self, shard: Tensor) -> list[Tensor]:
        """Split a shard (1D) into DeepSpeed's list: a tensor for each parameter in it, and for each padding."""
        parts, end = [], 0
        for param, _, _, span, offset in self.own_members():
            if offset > end:
                parts.append(_padding(shard[end:offset]))
            end = offset + span.numel
            part = shard[offset:end]
            parts.append(part.view(param.shape) if span.numel == param.numel() else part)
        if end < shard.numel():
            parts.append(_padding(shard[end:]))
        return parts

    def link(self, weights: Tensor, paddings_listed: bool, **fields: Any) -> None:
        """Link parameters to their weights and states, for DeepSpeed's ``safe_get_full_...``.

        Args:
            weights: the optimizer's weights of this rank's partition, 1D.
            paddings_listed: whether the list of gradients (``split``) has paddings.
            fields: further fields of DeepSpeed's ``tensor_fragment``.
        """
        # Drop the parent's links, which assume DeepSpeed's partitions.
        for other in self.params:
            cast(MappedParameter, other)._hp_mapping = None
        index, end = 0, 0
        for member in self.own_members():
            param = cast(MappedParameter, member.param)
            index += int(paddings_listed and member.offset > end)
            param._index_in_param_group = index
            index, end = index + 1, member.in_shard.stop
            param._hp_mapping = tensor_fragment(
                lp_fragment=member.span.of(param.flatten()),
                lp_fragment_address=fragment_address(**member.span._asdict()),
                hp_fragment=member.in_shard.of(weights),
                hp_fragment_address=fragment_address(**member.in_shard._asdict()),
                param_group_index=self.number,
                **fields,
            )

    # In DeepSpeed's order #########################################################################

    @property
    def stock_chunk(self) -> int:
        """Elements of a rank's partition in DeepSpeed's order."""
        return self._stock_shard_layout.chunk

    @property
    def stock_padding(self) -> int:
        """Elements at the end of this rank's partition that are padding, in DeepSpeed's order."""
        return self._padding_in(self.stock_chunk)

    def stock_members(self) -> Iterator[Member]:
        """Yield the parameters with elements in this rank's partition in DeepSpeed's order."""
        return self.members_in(self._stock_shard_layout)

    def members_in(self, layout: FlatLayout) -> Iterator[Member]:
        """Yield the parameters with elements in this rank's chunk of another layout, in its order."""
        for index, piece in self._pieces_in(layout):
            yield self._member(index, layout, piece)

    # Queries ######################################################################################

    def flat_shard(self) -> FlatShard:
        """Return the contents of this rank's partition."""
        return FlatShard(self.number, self.number, tuple(map(self.member, self.params)))

    def inter_group_spans(self, names: Mapping[nn.Parameter, str]) -> Iterator[InterGroupSpan]:
        """Yield the spans of parameters among the gradients that this rank sends between groups."""
        col = self.family.gather.col
        for param, offset in zip(self.params, self._offsets, strict=True):
            name = name_in_all(param, names[param])
            yield from inter_group_spans_of(name, param.numel(), self.layout, col, buffer=self.number, offset=offset)


class FlatBuffers(list[FlatBuffer]):
    """All flat buffers of an optimizer, one for each parameter group, in order.

    Args:
        context: shared constants.
        optimizer: the optimizer whose buffers they are.

    Attributes:
        positions: positions of trained parameters in the model, by their ids.
    """

    def __init__(self, context: Context, optimizer: Stage12View) -> None:
        super().__init__()
        self._context, self._optimizer = context, optimizer
        self.positions: dict[int, int] = {}

    def add(self, params: Sequence[nn.Parameter], alignment: int, has_padding: bool) -> FlatBuffer:
        """Add the buffer of the next parameter group, and return it.

        Args:
            params, alignment: see ``Flattening``.
            has_padding: whether DeepSpeed pads a parameter.
        """
        number, optimizer = len(self), self._optimizer
        row = optimizer.optimizer.param_groups[number]
        # In another order stripes would not be spans of the model. bitsandbytes has scales for blocks of a shard, and
        # others divide by norms of a shard.
        kind = type(optimizer.optimizer)
        keeps_partitions = (
            optimizer.round_robin_gradients
            or has_padding
            or kind.__module__.startswith("bitsandbytes")
            or any(base.__name__ in _NORMALIZING for base in kind.__mro__)
        )
        numels = [meta.numel() for meta in optimizer.round_robin_bit16_meta[number]]
        self.append(
            FlatBuffer(
                self._context,
                number=number,
                family=self._context.families[
                    row["name"] if optimizer.has_moe_layers and optimizer.is_moe_group(row) else DENSE
                ],
                flattening=Flattening(
                    params, optimizer.round_robin_bit16_offsets[number], numels, alignment, keeps_partitions
                ),
                group=optimizer.real_dp_process_group[number],
            )
        )
        return self[number]

    def number_parameters(self, params: Iterable[nn.Parameter]) -> None:
        """Record the order of trained parameters in the model."""
        self.positions = {id(param): index for index, param in enumerate(params)}

    @property
    def striped(self) -> Iterator[FlatBuffer]:
        """The buffers whose partitions differ from DeepSpeed's."""
        return (buffer for buffer in self if buffer.striped)

    def params(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of all buffers."""
        return (param for buffer in self for param in buffer.params)

    def buffer_of(self, param: nn.Parameter) -> FlatBuffer:
        """Return the buffer with a parameter."""
        return next(buffer for buffer in self if buffer.has(param))

    def windows(self, rows: Sequence[int], max_numel: int) -> list[Window]:
        """Return the windows of all buffers, in the order of the model's parameters.

        A backward completes them in reverse order: the first of a window's parameters gets its gradient last.

        Args:
            rows: number of rows of each buffer that are sent.
            max_numel: maximum number of elements (of all rows) of a window.
        """
        windows: list[Window] = []
        for buffer, count in zip(self, rows, strict=True):
            offsets = sorted(
                (buffer.offset(param), self.positions[id(param)]) for param in buffer.params if param.numel()
            )
            for number, (span, *_) in enumerate(buffer.layout.stripes):
                first, end = (bisect_left(offsets, (bound,)) for bound in (span.start, span.stop))
                members = tuple(sorted(index for _, index in offsets[first:end]))
                windows += [
                    Window(buffer.number, span, members) for span in buffer.layout.windows(count, max_numel, number)
                ]
        return in_forward_order(windows)

    # DeepSpeed's tables ###############################################################################

    def fill_tables(self, number: int) -> None:
        """Enter this rank's parts of parameters of a striped buffer."""
        rank, optimizer = self[number].rank, self._optimizer
        for member in self[number].own_members():
            param_id = optimizer.get_param_id(member.param)
            optimizer.param_to_partition_ids[number][param_id] = [rank]
            optimizer.total_grads_in_partition[number][rank] += 1
            optimizer.is_grad_computed[number][rank][param_id] = False
            optimizer.grad_partition_insertion_offset[number][rank][param_id] = member.offset
            optimizer.grad_start_offset[number][rank][param_id] = member.span.start

    def fill_positions(self, number: int) -> None:
        """Enter the positions of this rank's gradients in a striped buffer, with optimizer offload."""
        for param, _, _, span, offset in self[number].own_members():
            self._optimizer.grad_position[self._optimizer.get_param_id(param)] = [
                number,
                span.start,
                offset,
                span.numel,
            ]

    def link_stripes(self) -> None:
        """Link parameters of striped buffers to the optimizer's weights, for ``safe_get_full_...``."""
        for buffer in self.striped:
            buffer.link(
                self._optimizer.single_partition_of_fp32_groups[buffer.number],
                not self._optimizer.cpu_offload,  # with offload there is no list of gradients
                gradient_dict=self._optimizer.averaged_gradients,
                offload_gradient_dict=self._optimizer.offload_gradient_dict,
                use_offload=self._optimizer.cpu_offload,
            )

    def link_states(self) -> bool:
        """Link parameters to existing optimizer states, and return whether all buffers have states.

        The parent links only after the first step: after a load, or a reload from the host,
        ``safe_get_full_optimizer_state`` would not find any.
        """
        weights = self._optimizer.single_partition_of_fp32_groups
        states = [self._optimizer.optimizer.state.get(partition) or {} for partition in weights]
        for buffer, partition, state in zip(self, weights, states, strict=True):
            lazy_init_hp_params_optimizer_state(buffer.params, partition, {partition: state})
        return all(states)


def _padding(part: Tensor) -> Tensor:
    part._zero_padding = True  # type: ignore[attr-defined] # DeepSpeed excludes marked tensors from norms
    return part
