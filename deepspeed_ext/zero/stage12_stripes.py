# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""ZeRO-1/2's partitions of flat buffers that are divided into stripes; see Note [Stripes] in ``comm/layout.py``.

The parent takes a rank's partition as one stretch of the flat buffer, of which it is a view. Of a buffer with stripes
it is a tensor of its own, of the same size on every rank, and the parent's tables say which parameters are in it, and
where. Buffers of one stripe are the parent's as they are.
"""

from abc import abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, cast
from unittest import mock

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.tensor_fragment import fragment_address, tensor_fragment
from torch import Tensor, nn

from deepspeed_ext.comm.layout import FlatLayout, Piece
from deepspeed_ext.comm.owners import Cells
from deepspeed_ext.comm.packing import fill_up
from deepspeed_ext.comm.process_groups import Topology
from deepspeed_ext.deepspeed_types import MappedParameter
from deepspeed_ext.strategy import Placement, Strategy
from deepspeed_ext.zero.crossing_spans import CrossingSpan, crossing_spans_of
from deepspeed_ext.zero.families import DENSE, Families, name_in_all
from deepspeed_ext.zero.flat_shards import FlatShard, Member
from deepspeed_ext.zero.optimizer import ParoOptimizer

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


class StripedPartitions(ParoOptimizer, DeepSpeedZeroOptimizer):
    """The part of a stage-1/2 optimizer of ours that DeepSpeed's partitions belong to.

    Attributes:
        layouts: of each flat buffer.
        zeros_layouts: those that the parent would give them, in whose order checkpoints are.
        family_names: of each flat buffer the family; see Note [Families] in ``families.py``.
    """

    strategy: Strategy
    families: Families
    family_names: list[str]
    layouts: list[FlatLayout]
    zeros_layouts: list[FlatLayout]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.layouts, self.zeros_layouts, self.family_names = [], [], []
        self._stripe_bucket = int(kwargs["reduce_bucket_size"])
        super().__init__(*args, **kwargs)

    def flatten_dense_tensors_aligned(
        self,
        tensor_list: Sequence[Tensor],
        alignment: int,
        use_cpu_data: bool = False,
        param_padding: Sequence[int] | None = None,
    ) -> Tensor:
        """Flatten tensors; a flat buffer that is being made, which names paddings, gets its layout."""
        if param_padding is None:
            return super().flatten_dense_tensors_aligned(tensor_list, alignment, use_cpu_data)
        paddings = list(param_padding)
        group = len(self.layouts)
        offsets = self.round_robin_bit16_offsets[group]
        numels = [meta.numel() for meta in self.round_robin_bit16_meta[group]]
        numel = offsets[-1] + numels[-1]
        aligned = fill_up(numel, alignment)
        row = self.optimizer.param_groups[group]
        self.family_names.append(row["name"] if self.has_moe_layers and self.is_moe_group(row) else DENSE)
        topology = self.topology_of(group)
        self.zeros_layouts.append(FlatLayout.of(aligned, self.strategy.os, topology))
        self.layouts.append(self.zeros_layouts[-1])
        # In another order they would not be stretches of the model. And bitsandbytes has scales for blocks of a shard.
        blocks = type(self.optimizer).__module__.startswith("bitsandbytes")
        if not (self.round_robin_gradients or any(paddings) or blocks):
            starts = stripe_starts(offsets, numels, self._stripe_bucket, topology.sizes.ranks)
            cells = self.layouts[-1].rows * self.layouts[-1].cols
            if len(starts) > 1 and cells > 1:
                self.layouts[-1] = FlatLayout.of(numel, self.strategy.os, topology, starts)
        if self.is_striped(group):
            paddings[-1] += self.layouts[-1].chunk * cells - numel
        return super().flatten_dense_tensors_aligned(tensor_list, alignment, use_cpu_data, paddings)

    def topology_of(self, group: int) -> Topology:
        """Return the process groups of the ranks that hold what is in a flat buffer."""
        return self.families[self.family_names[group]].topology

    def family_of_buffer(self, buffer: int) -> str:
        """Return the family of what is in a flat buffer; see ``ParoOptimizer``."""
        return self.family_names[buffer]

    def is_striped(self, group: int) -> bool:
        """Whether the partitions of a flat buffer are not the parent's stretches."""
        return len(self.layouts[group].starts) > 1 and self.strategy.os != Placement.N

    def has_own_partition(self, group: int) -> bool:
        """Whether this rank's partition of a flat buffer is a tensor of its own: where it has another order, or where
        the flat buffer must keep what others hold until an update has arrived."""
        return self.is_striped(group) or not self.whole.always

    def padding(self, group: int) -> Iterator[tuple[int, int]]:
        """Return (start, length) of what belongs to no parameter in this rank's partition."""
        if not self.is_striped(group):
            if self.groups_padding[group]:
                yield self.partition_size[group] - self.groups_padding[group], self.groups_padding[group]
            return
        layout = self.layouts[group]
        ends = {piece.column: piece.column + piece.numel for piece in layout.cells_of(*self._own_cell(group))}
        for stripe in layout.stripes:
            end = ends.get(stripe.column, stripe.column)
            if end < stripe.column + stripe.width:
                yield end, stripe.column + stripe.width - end

    def own_piece(self, group: int, param: nn.Parameter) -> Piece | None:
        """Return which elements of the flat buffer this rank's partition has of a parameter, and where."""
        return self._pieces[group].get(id(param))

    # What others ask for ############################################################################

    def crossing_spans(self) -> list[CrossingSpan]:
        """Return them; see ``ParoOptimizer``."""
        return [
            span
            for group, params in enumerate(self.round_robin_bit16_groups)
            for param in params
            for span in crossing_spans_of(
                name_in_all(param, self.param_names[param]),
                param.numel(),
                self.layouts[group],
                dist.get_rank(group=self.topology_of(group).intra),
                group,
                self._offsets[self.get_param_id(param)],
            )
        ]

    def owned_span(self, param: nn.Parameter) -> tuple[int, int]:
        """Return the elements whose optimizer states this rank has; see ``ParoOptimizer``."""
        start, numel, _ = self._in_shard(param)
        return start, start + numel

    def owned_gradient(self, param: nn.Parameter) -> Tensor:
        """Return the gradient of these elements; see ``ParoOptimizer``."""
        _, numel, column = self._in_shard(param)
        return self._shard(self._group_of(param)).narrow(0, column, numel)

    def flat_shards(self) -> list[FlatShard]:
        """Return what is in this rank's partitions; see ``FlatShards``."""
        return [
            FlatShard(group, group, tuple(self._member(group, param) for param in params))
            for group, params in enumerate(self.round_robin_bit16_groups)
        ]

    def _member(self, group: int, param: nn.Parameter) -> Member:
        offset, cells = self._offsets[self.get_param_id(param)], None
        if self.strategy.os != Placement.N:
            stripe = self.layouts[group].stripe_of(offset)
            cells = Cells(stripe.start - offset, stripe.width)
        return Member(param, tuple(param.shape), cells, *self._in_shard(param, group))

    def shard_weights(self, number: int) -> nn.Parameter:
        """Return this rank's partition of the optimizer's weights; see ``FlatShards``."""
        weights: nn.Parameter = self.single_partition_of_fp32_groups[number]
        return weights

    def shard_gradient(self, number: int) -> Tensor:
        """Return its gradient; see ``FlatShards``."""
        return self._shard(number)

    def _in_shard(self, param: nn.Parameter, group: int | None = None) -> tuple[int, int, int]:
        """Return which elements this rank's shard has of a parameter, (start, numel), and from where on."""
        offset = self._offsets[self.get_param_id(param)]
        if self.strategy.os == Placement.N:
            return 0, param.numel(), offset
        piece = self.own_piece(self._group_of(param) if group is None else group, param)
        return (piece.start - offset, piece.numel, piece.column) if piece is not None else (0, 0, 0)

    def _group_of(self, param: nn.Parameter) -> int:
        return next(i for i, params in enumerate(self.bit16_groups) if any(p is param for p in params))

    @abstractmethod
    def _shard(self, group: int) -> Tensor:
        """Return the gradients of the optimizer's shard of a parameter group, 1D."""

    # What the parent asks for ######################################################################

    def _shard_number(self, group: int) -> int:
        """Return this rank's number among those that share the optimizer states of a flat buffer."""
        return int(dist.get_rank(group=self.real_dp_process_group[group]))

    def _own_cell(self, group: int) -> tuple[int, int]:
        """Return row and column of the chunk of a flat buffer whose optimizer states this rank has."""
        return divmod(self._shard_number(group), self.topology_of(group).sizes.group_size)

    @cached_property
    def _pieces(self) -> list[dict[int, Piece]]:
        """For each flat buffer: by id of the parameter, its piece in this rank's partition."""
        found = []
        for group, layout in enumerate(self.layouts):
            params, offsets = self.round_robin_bit16_groups[group], self.round_robin_bit16_offsets[group]
            mine: dict[int, Piece] = {}
            for cell in layout.cells_of(*self._own_cell(group)):
                for number in range(
                    bisect_right(offsets, cell.start) - 1, bisect_left(offsets, cell.start + cell.numel)
                ):
                    start = max(offsets[number], cell.start)
                    end = min(
                        offsets[number] + self.round_robin_bit16_meta[group][number].numel(), cell.start + cell.numel
                    )
                    if start < end:
                        column = cell.column + start - cell.start
                        mine[id(params[number])] = Piece(cell.row, cell.col, column, start, end - start)
            found.append(mine)
        return found

    def get_data_parallel_partitions(self, tensor: Tensor, group_id: int) -> list[Tensor]:
        """Return this rank's partition of a flat buffer, and nothing for others, which nobody reads."""
        if not self.is_striped(group_id):
            partitions: list[Tensor] = super().get_data_parallel_partitions(tensor, group_id)
            if self.has_own_partition(group_id):
                rank = self._shard_number(group_id)
                partitions[rank] = partitions[rank].clone()
            return partitions
        layout = self.layouts[group_id]
        own = tensor.new_zeros(layout.chunk)
        self._copy_own(tensor, own, group_id)
        partitions = [tensor.new_empty(0) for _ in range(layout.rows * layout.cols)]
        partitions[self._shard_number(group_id)] = own
        return partitions

    def own_partition(self, group: int) -> Tensor:
        """Return this rank's partition of a flat buffer, 1D."""
        return self.parallel_partitioned_bit16_groups[group][self._shard_number(group)]

    def _copy_own(self, flat: Tensor, own: Tensor, group: int) -> None:
        for piece in self.layouts[group].cells_of(*self._own_cell(group)):
            own.narrow(0, piece.column, piece.numel).copy_(flat.narrow(0, piece.start, piece.numel))

    def get_partition_info(
        self,
        tensor_list: Sequence[nn.Parameter],
        partition_size: int,
        partition_id: int,
        param_padding: Sequence[int] | None = None,
    ) -> tuple[list[nn.Parameter], list[nn.Parameter], int]:
        """Return which parameters are in this rank's partition of the flat buffer that is being made."""
        group = len(self.partition_size)
        self.__dict__.pop("_pieces", None)  # of the buffers before
        if not self.is_striped(group):
            return super().get_partition_info(tensor_list, partition_size, partition_id, param_padding)
        within = [self.own_piece(group, param) is not None for param in tensor_list]
        pairs = list(zip(tensor_list, within, strict=True))
        return [param for param, here in pairs if here], [param for param, here in pairs if not here], 0

    def initialize_gradient_partition(self, i: int, param_group: Sequence[nn.Parameter], partition_id: int) -> None:
        """Fill the parent's tables with what this rank has of parameters: it reads of others where it sends to them,
        and with thousands of ranks they take seconds, and memory."""
        if partition_id != self._shard_number(i):
            return
        if not self.is_striped(i):
            super().initialize_gradient_partition(i, param_group, partition_id)
        else:
            for param, offset, piece in self._own_pieces(i):
                number = self.get_param_id(param)
                self.param_to_partition_ids[i][number] = [partition_id]
                self.total_grads_in_partition[i][partition_id] += 1
                self.is_grad_computed[i][partition_id][number] = False
                self.grad_partition_insertion_offset[i][partition_id][number] = piece.column
                self.grad_start_offset[i][partition_id][number] = piece.start - offset

    def get_first_param_index(
        self, group_id: int, param_group: Sequence[nn.Parameter], partition_id: int
    ) -> int | None:
        """Return which parameter is the first in this rank's partition, if any is."""
        if partition_id != self._shard_number(group_id):
            return None
        first: int | None = super().get_first_param_index(group_id, param_group, partition_id)
        return first

    def get_grad_position(
        self, group_id: int, tensor_list: Sequence[nn.Parameter], first_offset: int, partition_size: int
    ) -> None:
        """Fill the parent's table of where this rank's gradients are, with optimizer offload."""
        if not self.is_striped(group_id):
            super().get_grad_position(group_id, tensor_list, first_offset, partition_size)
            return
        for param, offset, piece in self._own_pieces(group_id):
            self.grad_position[self.get_param_id(param)] = [
                group_id,
                piece.start - offset,
                piece.column,
                piece.numel,
            ]

    def _own_pieces(self, group: int) -> Iterator[tuple[nn.Parameter, int, Piece]]:
        """Return parameters that are in this rank's partition, in its order; where they start in the buffer; what is
        in the partition."""
        pairs = zip(self.round_robin_bit16_groups[group], self.round_robin_bit16_offsets[group], strict=True)
        for param, offset in pairs:
            piece = self.own_piece(group, param)
            if piece is not None:
                yield param, offset, piece

    def split_shard(self, group: int, shard: Tensor) -> list[Tensor]:
        """Return a shard (1D) as the parent lists it: a tensor for each parameter in it, and for each padding."""
        parts, column = [], 0
        for param, _, piece in self._own_pieces(group):
            if piece.column > column:
                parts.append(_padding(shard.narrow(0, column, piece.column - column)))
            part = shard.narrow(0, piece.column, piece.numel)
            parts.append(part.view(param.shape) if piece.numel == param.numel() else part)
            column = piece.column + piece.numel
        if column < shard.numel():
            parts.append(_padding(shard.narrow(0, column, shard.numel() - column)))
        return parts

    def _link_all_hp_params(self) -> None:
        """Have parameters know where their weights and states are, for DeepSpeed's ``safe_get_full_...``.

        The parent goes by the model's order unless it has padded a parameter, so with ``round_robin_gradients`` it
        would name other parameters, also in universal checkpoints. Any padding has it look at the real places.
        """
        paddings = self.round_robin_bit16_padding
        in_any_order = [[1]] * len(paddings) if self.round_robin_gradients else paddings
        with mock.patch.object(self, "round_robin_bit16_padding", in_any_order):
            super()._link_all_hp_params()
        for group, flat in enumerate(self.single_partition_of_fp32_groups):
            if not self.is_striped(group):
                continue
            for other in self.bit16_groups[group]:
                cast(MappedParameter, other)._hp_mapping = None
            index, column = 0, 0
            for owned, offset, piece in self._own_pieces(group):
                param = cast(MappedParameter, owned)
                if piece.column > column and not self.cpu_offload:  # the list of gradients has paddings then
                    index += 1
                param._index_in_param_group = index
                index, column = index + 1, piece.column + piece.numel
                param._hp_mapping = tensor_fragment(
                    lp_fragment=param.flatten().narrow(0, piece.start - offset, piece.numel),
                    lp_fragment_address=fragment_address(start=piece.start - offset, numel=piece.numel),
                    hp_fragment=flat.narrow(0, piece.column, piece.numel),
                    hp_fragment_address=fragment_address(start=piece.column, numel=piece.numel),
                    gradient_dict=self.averaged_gradients,
                    offload_gradient_dict=self.offload_gradient_dict,
                    use_offload=self.cpu_offload,
                    param_group_index=group,
                )

    def _restore_from_bit16_weights(self) -> None:
        """Take the optimizer's weights from the model's, which somebody has just loaded."""
        for group, flat in enumerate(self.bit16_groups_flat):
            if self.has_own_partition(group):
                self._copy_own(flat, self.own_partition(group).zero_(), group)
        super()._restore_from_bit16_weights()

    def new_shard(self, group: int) -> Tensor:
        """Return zeros for the gradients of this rank's partition, 1D, on the device."""
        device = get_accelerator().current_device_name()
        return torch.zeros(self.partition_size[group], dtype=self.gradient_accumulation_dtype, device=device)


def _padding(part: Tensor) -> Tensor:
    part._zero_padding = True  # type: ignore[attr-defined] # the parent's mark: it counts in no norm
    return part
