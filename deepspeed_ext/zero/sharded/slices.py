# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""This rank's shards of parameters with p = I or G: ZeRO's chunks, or slices of several chunks.

Note [Rows]
    ZeRO-3 partitions each parameter into chunks, over the process group that shards its optimizer states: with
    os = G a rank holds chunk r of n, with os = I chunk i of m, as ``ds_tensor``. If p = os that is all. With p = I and
    os = G a rank holds its I-slice, k chunks of n: one *row* for each group. Its own row j is ``ds_tensor``: a view,
    not a copy. An optimizer step changes row j. Then one all-gather between groups completes the slice
    (``gather_updates``), and forward and backward gather inside the group only.

    The slices of the trainable parameters of a sub-group form one block, (k, elements of the sub-group). Its row j is
    the sub-group's flat partition. It is gathered in *windows*, spans of columns with as many elements as a bucket,
    so that a model with one sub-group is sent in parts, too. A window of all columns is gathered in place; any other
    through a buffer of its size, of which side streams have two at a time.

    Gathers are started after the step. The first use of a parameter waits for the gathers of its windows. If a host
    thread runs transfers, windows are gathered one after the other. Gathers for use wait for them in another thread.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.comm.hops import Update
from deepspeed_ext.comm.layout import FlatLayout
from deepspeed_ext.comm.packing import concat_aligned, fill_up
from deepspeed_ext.comm.parameter_bucket import ParameterBucket, bucket_of
from deepspeed_ext.comm.process_groups import data_parallel_ranks
from deepspeed_ext.comm.spans import BufferSpan, Span
from deepspeed_ext.comm.transfer_queue import ActiveTransfer, TransferQueue
from deepspeed_ext.deepspeed_types import ZeroParameter
from deepspeed_ext.strategy import Placement, full_bucket
from deepspeed_ext.zero.context import Context
from deepspeed_ext.zero.families import Family
from deepspeed_ext.zero.sharded.coordinator import GroupCoordinator
from deepspeed_ext.zero.sharded.parameter_chunks import repartition
from deepspeed_ext.zero.sharded.row_storage import DeviceRows
from deepspeed_ext.zero.shards import Window, in_forward_order
from deepspeed_ext.zero.updates_in_flight import register


class _RowUpdate(NamedTuple):
    """This rank's updated row of a block, 1D without its padding; see ``Slices.set_row``."""

    updated: Tensor
    current: Tensor
    in_full: bool

    def row(self, window: Span) -> Tensor:
        """Return a window of the updated row, on the device, without the padding at its end."""
        device = get_accelerator().current_device_name()
        return self.updated[window.start : window.stop].to(device=device, dtype=self.current.dtype)

    def padded_row(self, window: Span) -> Tensor:
        """Return the row with padding."""
        row = self.row(window)
        return torch.nn.functional.pad(row, (0, window.numel - row.numel()))

    def update(self, window: Span, rows: DeviceRows) -> Update:
        """Return the update of a window to be encoded, without its padding."""
        previous = self.current[window.start : window.stop]
        (on_device,) = rows.to_device([previous.view(1, -1)], previous.dtype)
        return Update(lambda: self.row(window), on_device.view(-1), previous.numel())


class Slices:
    """Shards of the parameters of one family. See Note [Rows].

    Args:
        params: ZeRO parameters of the family, trainable and frozen.
        rows: memory of the shards.
        coordinator: DeepSpeed's coordinator, whose stream gathers parameters for use.
    """

    def __init__(
        self,
        context: Context,
        *,
        family: Family,
        params: Iterable[ZeroParameter],
        rows: DeviceRows,
        coordinator: GroupCoordinator,
    ) -> None:
        strategy, topology = context.strategy, family.topology
        self.strategy, self.topology = strategy, topology
        self.redistribution, self.rows = rows.redistribution, rows
        self.bucket = max(1, context.gather_bucket)
        # Whether parameters are stored as slices of several rows.
        self.has_slices = strategy.p == Placement.I and strategy.os == Placement.G and topology.sizes.groups > 1
        self.row_count = topology.sizes.groups if self.has_slices else 1  # rows of a parameter's shard
        self._coordinator = coordinator
        self.params = list(params)
        any_layout = FlatLayout.from_placement(0, strategy.os, topology)
        self._rows_and_cols = any_layout.rows, any_layout.cols
        self._slices: dict[int, Tensor] = {}  # ds_id: the I-slice, (k, chunk)
        self._blocks: dict[int, Tensor] = {}  # number of the sub-group: (k, elements and padding)
        self._columns: dict[int, BufferSpan] = {}  # ds_id: block and columns of its slice
        self._windows: list[Window] = []  # in the order in which they are sent
        self._windows_of: dict[int, list[int]] = {}  # ds_id: numbers of the windows of its slice
        # Gathers between groups after a step: one after the other, because the first one is needed first.
        self._updates = TransferQueue(
            overlap=True,
            side_streams=rows.is_stream_ordered,
            on_thread=self.redistribution.pairwise,
            finish_before_exit=True,
        )
        self._update_of: dict[int, ActiveTransfer] = {}  # number of the window: the gather into it
        self._row_updates: dict[int, _RowUpdate] = {}  # number of the block: its update to send
        register(self)

    def layout(self, param: ZeroParameter) -> FlatLayout:
        """Return the parameter's division into cells, which p does not change."""
        return FlatLayout.from_placement(param.ds_numel, self.strategy.os, self.topology)

    def layout_of(self, params: Iterable[ZeroParameter], separate: bool = False) -> ParameterBucket:
        """Return the layout of parameters side by side; see ``ParameterBucket``."""
        return bucket_of(*self._rows_and_cols, tuple([param.ds_numel for param in params]), separate)

    def shard_parameters(self) -> None:
        """Shard every parameter over the group of its optimizer states, with zeros in the padding, and make slices if
        the strategy has any. Collective."""
        group = self.topology.shard_group(self.strategy.os)
        rank, ranks = dist.get_rank(group=group), data_parallel_ranks(group)
        needs_repartition = {
            id(other): data_parallel_ranks(other) != ranks for other in {p.ds_process_group for p in self.params}
        }
        for param in self.params:
            if needs_repartition[id(param.ds_process_group)]:
                repartition(param, group)
            chunk = param.ds_tensor.ds_numel
            param.ds_tensor[max(0, param.ds_numel - rank * chunk) :].zero_()  # DeepSpeed does not initialize padding
        for batch in self.batches(self.params) if self.has_slices else ():
            for param, slice_ in self._gather_slices(batch):
                self._store_slice(param, self.rows.store(slice_, lasting=not param.requires_grad))

    def release(self, param: ZeroParameter) -> None:
        """Return a parameter to DeepSpeed, with unchanged sharding."""
        if self.has_slices:
            param.ds_tensor.data = param.ds_tensor.data.clone()  # a view would keep the slice's memory

    def drop_slices(self) -> None:
        """Drop all slices, after their parameters are released."""
        self._slices.clear()
        self.rows.cache.clear()
        self.drop_blocks()

    def order_gathers(self) -> None:
        """Order gathers for use after everything that the current stream has written to the shards."""
        self._coordinator.wait_for_current()

    def _store_slice(self, param: ZeroParameter, slice_: Tensor) -> None:
        self._slices[param.ds_id] = slice_
        param.ds_tensor.data = slice_[self.redistribution.row]
        self.rows.cache.store(param.ds_id, slice_)

    def shard_of(self, param: ZeroParameter) -> Tensor:
        """Return this rank's shard of the parameter: (rows, chunk), one row without slices."""
        return self._slices[param.ds_id] if self.has_slices else param.ds_tensor.view(1, -1)

    def batches(self, params: Iterable[ZeroParameter]) -> list[list[ZeroParameter]]:
        """Return the parameters in batches of one dtype and about ``bucket`` elements (of full parameters)."""
        batches: list[list[ZeroParameter]] = []
        filled: dict[torch.dtype, tuple[list[ZeroParameter], float]] = {}
        for param in params:
            dtype = param.ds_tensor.dtype
            batch, numel = filled.get(dtype, ([], math.inf))
            if numel + param.ds_numel > self.bucket:
                batch, numel = [], 0
                batches.append(batch)
            batch.append(param)
            filled[dtype] = batch, numel + param.ds_numel
        return batches

    # Blocks: the optimizer's side #####################################################################

    def partitions(self, sub_group: Sequence[ZeroParameter]) -> list[Tensor]:
        """Return the shards of a sub-group's parameters, to be moved into a flat buffer.

        Slices are released here: they have no memory until ``make_block`` makes them views of their block.
        """
        if not self.has_slices:
            return [param.ds_tensor for param in sub_group]
        width, padded_width = self._block_width(sub_group)
        slices = [self._slices.pop(param.ds_id) for param in sub_group]
        block = slices[0].new_zeros(self.row_count * padded_width)
        torch.cat(slices, dim=1, out=block.view(-1, padded_width)[:, :width])
        for param in sub_group:
            param.ds_tensor.data = block.new_empty(0)
        return [block]

    def _block_width(self, sub_group: Sequence[ZeroParameter]) -> tuple[int, int]:
        """Return the elements of a row of its block; and with padding, which aligns rows for hops."""
        width = sum(param.ds_tensor.ds_numel for param in sub_group)
        return width, fill_up(width, self.redistribution.multiple if self.has_slices else 1)

    def make_block(
        self, number: int, buffer: Tensor, offset: int, sub_group: Sequence[ZeroParameter]
    ) -> tuple[Tensor, int]:
        """Use a part of the flat buffer of ``partitions`` as the block of a sub-group.

        Returns:
            The sub-group's flat partition, 1D, which an optimizer step changes: row j of the block; and the end of
            the block.
        """
        block = self._make_views(buffer, offset, sub_group)
        self._blocks[number] = block
        column = 0
        for param in sub_group:
            self._columns[param.ds_id] = number, Span(column, param.ds_tensor.ds_numel)
            column += param.ds_tensor.ds_numel
        self._windows.clear()
        width, _ = self._block_width(sub_group)
        return block[self.redistribution.row if self.has_slices else 0, :width], offset + block.numel()

    def make_views(self, buffer: Tensor, offset: int, sub_group: Sequence[ZeroParameter]) -> int:
        """Make parameters views of a flat buffer from ``offset`` on, as ``make_block`` does, on any device; return
        their end. Nothing is gathered into it."""
        return offset + self._make_views(buffer, offset, sub_group).numel()

    def _make_views(self, buffer: Tensor, offset: int, sub_group: Sequence[ZeroParameter]) -> Tensor:
        """Make a sub-group's parameters views of a part of a flat buffer; return it, (rows, elements and padding)."""
        rows, (_, padded_width) = self.row_count, self._block_width(sub_group)
        block = buffer.narrow(0, offset, rows * padded_width).view(rows, padded_width)
        column = 0
        for param in sub_group:
            numel = param.ds_tensor.ds_numel
            shard = block[:, column : column + numel]
            if self.has_slices:
                self._store_slice(param, shard)
            else:
                param.ds_tensor.data = shard[0]
            column += numel
        return block

    def steps_in_place(self, resync: bool) -> bool:
        """Whether a step writes this rank's row in place, because the row itself is sent.

        Args:
            resync: whether updates are sent without encoding in this step.
        """
        unencoded = resync or self.redistribution.differences is None
        return unencoded and not (self.has_slices and self.rows.on_host)

    def drop_blocks(self) -> None:
        """Release the buffer of ``make_block``."""
        self._blocks, self._columns = {}, {}
        self._windows.clear()
        self.drop_row_updates()

    @torch.no_grad()
    def complete(self) -> None:
        """Complete all slices after this rank's rows were changed outside of a step, for example by a checkpoint.

        This includes slices of frozen parameters, which no step changes.
        """
        self.gather_updates()
        if self.has_slices:
            for batch in self.batches(param for param in self.params if param.ds_id not in self._columns):
                for param, slice_ in self._gather_slices(batch):
                    self.shard_of(param).copy_(slice_)
                    self.rows.cache.store(param.ds_id, slice_)
            self.wait_on_host()
            self.order_gathers()

    def _gather_slices(self, params: Sequence[ZeroParameter]) -> list[tuple[Any, Tensor]]:
        """All-gather their ``ds_tensor`` G -> I; return each parameter and its slice, (k, chunk)."""
        chunks = concat_aligned([param.ds_tensor.view(1, -1) for param in params], self.redistribution.multiple)
        chunks = chunks.to(get_accelerator().current_device_name())
        gathered = ActiveTransfer(self.redistribution.gather_g_to_i(chunks)).finish()
        rows = gathered.view(self.topology.sizes.groups, chunks.numel())
        numels = [param.ds_tensor.ds_numel for param in params]
        return list(zip(params, rows[:, : sum(numels)].split(numels, dim=1), strict=True))

    @torch.no_grad()
    def gather_updates(self) -> None:
        """Start to redistribute os -> p after a step: complete the slices from the groups' rows, if there are slices.

        All gathers are started here, in one order on all ranks, whatever parameters a rank will use. So ranks with
        different data do not wait for each other. The order is that of the model: parameter groups split each layer's
        parameters, and in their order the first layer would wait for the last group's blocks.
        """
        self.order_gathers()  # gathers for use read rows that the step has just written
        self.drain()
        self._gather_windows(range(len(self._ordered_windows())))

    @torch.no_grad()
    def gather_updates_of(self, number: int) -> None:
        """Start the gathers of one sub-group, in a step that updates sub-groups in one order on all ranks."""
        self.order_gathers()
        self._gather_windows(
            [index for index, window in enumerate(self._ordered_windows()) if window.buffer == number]
        )

    def set_row(self, number: int, updated: Tensor, current: Tensor, in_full: bool) -> None:
        """Store this rank's updated row of a block. The next gather sends its difference to the other ranks.

        Until then the row keeps the values that the other ranks have.

        Args:
            number: number of the block.
            updated: the updated row, of any dtype and device, 1D.
            current: the row without its padding, 1D.
            in_full: whether it is sent without encoding.
        """
        in_full = in_full or self.redistribution.differences is None
        self._row_updates[number] = _RowUpdate(updated, current, in_full)

    def drop_row_updates(self) -> None:
        """Drop updated rows of a step that has not ended."""
        self._row_updates.clear()

    def _ordered_windows(self) -> list[Window]:
        """Return the windows of all blocks, in the order of the model's parameters. See Note [Rows]."""
        if self.has_slices and not self._windows:
            total = sum(param.ds_numel for param in self.params if param.ds_id in self._columns)
            max_columns = max(1, full_bucket(self.bucket, total) // self.topology.sizes.ranks)
            self._windows = in_forward_order(
                window for block in self._blocks for window in self._split_block(block, max_columns)
            )
            self._windows_of = {ds_id: [] for ds_id in self._columns}
            for number, window in enumerate(self._windows):
                for ds_id in window.members:
                    self._windows_of[ds_id].append(number)
        return self._windows

    def _split_block(self, number: int, max_columns: int) -> Iterator[Window]:
        """Yield the windows of a block, of about equal width, up to about ``max_columns``: a window for the end of a
        large parameter alone would be a tiny message."""
        columns_of = [(ds_id, columns) for ds_id, (block, columns) in self._columns.items() if block == number]
        padded_width = self._blocks[number].shape[1]
        width = fill_up(-(-padded_width // max(1, round(padded_width / max_columns))), self.redistribution.multiple)
        for start in range(0, padded_width, max(1, width)):
            window = Span(start, width).common(Span(0, padded_width))
            members = sorted(ds_id for ds_id, columns in columns_of if window.common(columns).numel)
            yield Window(number, window, tuple(members))

    def _gather_windows(self, numbers: Sequence[int]) -> None:
        windows = {number: self._windows[number] for number in numbers}
        code_of = self._encode(windows)
        changes = {
            block: self._row_updates.pop(block, None) for block in {window.buffer for window in windows.values()}
        }
        for number, window in windows.items():
            rows, change = window.span.of(self._blocks[window.buffer].detach()), changes[window.buffer]
            on_received = partial(self._copy_to_cache, window)
            if number in code_of:
                code, width = code_of.pop(number)
                transfer = self.rows.update(code, rows[:, :width], on_received)
            else:
                updated = None if change is None else partial(change.padded_row, window.span)
                transfer = self.rows.gather(rows, on_received, updated)
            self._update_of[number] = self._updates.start(transfer)

    def _encode(self, windows: Mapping[int, Window]) -> dict[int, tuple[Tensor, int]]:
        """Return encoded updates and their numbers of elements, by window, for windows that are sent encoded."""
        changes = {number: self._row_updates.get(window.buffer) for number, window in windows.items()}
        updates = {
            number: change.update(windows[number].span, self.rows)
            for number, change in changes.items()
            if change is not None and not change.in_full
        }
        codes = self.redistribution.encode(list(updates.values()), Placement.I) if updates else []
        return {number: (code, updates[number].most_numel) for number, code in zip(updates, codes, strict=True)}

    def _copy_to_cache(self, window: Window, received: Tensor) -> None:
        """Copy a received window, on the device, into the cached rows."""
        for ds_id in window.members:
            columns = self._columns[ds_id][1]
            common = window.span.common(columns)
            self.rows.cache.store_columns(
                ds_id, common.shifted(-columns.start), common.shifted(-window.span.start).of(received)
            )

    def drain(self) -> None:
        """Wait for all gathers. Required before row j changes again."""
        for update in list(self._update_of.values()):  # a copy: a thread that gathers for use pops entries
            self._updates.finish(update)
        self._update_of.clear()

    def wait_on_host(self) -> None:
        """Make the host wait as well, before it reads rows in host memory."""
        self.drain()
        if self.rows.on_host:
            self._updates.synchronize()

    # Reading and writing ##############################################################################

    def to_device(self, params: Sequence[ZeroParameter], dtype: torch.dtype) -> list[Tensor]:
        """Return the rows of parameters on the device, side by side in their order: (rows, width) each.

        Callers wait for their updates first; see ``wait_for_updates``.
        """
        if not (self.has_slices and self.rows.on_host):
            return self.rows.to_device([self.shard_of(param) for param in params], dtype)
        on_device: list[Tensor] = []
        for cached, run in itertools.groupby(params, key=lambda param: param.ds_id in self.rows.cache):
            if cached:
                on_device += [self.rows.cache[param.ds_id].to(dtype) for param in run]
            else:
                on_device += self.rows.to_device(self._runs(run), dtype)
        return on_device

    def _runs(self, params: Iterable[ZeroParameter]) -> Iterator[Tensor]:
        """Yield shards of parameters; neighbors in a block together."""
        block, columns = -1, Span(0, 0)
        for param in params:
            number, span = self._columns.get(param.ds_id, (-1, Span(0, 0)))
            if number == block >= 0 and span.start == columns.stop:
                columns = Span(columns.start, columns.numel + span.numel)
                continue
            if block >= 0:
                yield columns.of(self._blocks[block].detach())
            if number < 0:
                yield self.shard_of(param)
            block, columns = number, span
        if block >= 0:
            yield columns.of(self._blocks[block].detach())

    def wait(self) -> None:
        """Make the current stream wait for the gathers of all windows; see ``wait_for_updates``."""
        self._wait_for_windows(list(self._update_of))

    def wait_for_updates(self, params: Iterable[ZeroParameter]) -> None:
        """Make the current stream wait for the gathers of the parameters' windows."""
        self._wait_for_windows(sorted({number for p in params for number in self._windows_of.get(p.ds_id, ())}))

    def _wait_for_windows(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            update = self._update_of.get(number)
            if update is not None:
                self._updates.finish(update)  # on each stream that reads the window
                if get_accelerator().is_synchronized_device():
                    self._update_of.pop(number, None)

    @torch.no_grad()
    def write_rows(self, param: ZeroParameter) -> None:
        """Write the value of a gathered parameter into this rank's rows of it."""
        layout, flat = self.layout(param), param.data.reshape(-1)
        padding = layout.rows * layout.cols * layout.chunk - layout.numel
        padded = torch.nn.functional.pad(flat, (0, padding)) if padding else flat
        rows = padded.view(layout.rows, layout.cols, layout.chunk)[:, self.redistribution.col]
        self.shard_of(param).copy_(rows)
        self.rows.cache.store(param.ds_id, rows)
