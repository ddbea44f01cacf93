# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Memory of a rank's parameter rows: on the device, or on the host with some of them cached on the device.

Note [Rows on the host]
    With ``offload_param`` slices are in host memory, pinned if configured. For use, they are copied to the
    device and gathered there, inside the group. Updated rows are sent between groups from the device, too, a window at
    a time: so device memory holds windows in flight, two at most, and never a full slice. A received window is copied
    to the host on the stream of its transfer, and readers wait for that stream. So the host does not wait, except
    before it reads rows itself (``Slices.settle``).

    A copy between pinned memory and the device is ordered by its stream only if the host has no part in it. The host
    would have to gather rows with gaps between them, or change their dtype. It would do this immediately, while
    received windows are still being written. So rows are copied one by one, in their dtype; neighbors in a row are
    copied together.

    Cached rows on the device (``paro_parameter_cache_bytes``) are copies: the host has all rows.
"""

from collections.abc import Callable, Iterable

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.comm.hops import Transfer
from deepspeed_ext.comm.redistribution import ParameterRedistribution
from deepspeed_ext.comm.spans import Span

OnReceived = Callable[[Tensor], None]


class DeviceRows:
    """Rows on the device, where they are used and received.

    Args:
        redistribution: hops that complete the rows.
        cached: ds_ids of the parameters whose rows are cached on the device, if rows are on the host.
    """

    on_host = False
    is_stream_ordered = True  # whether copies of them are ordered by streams, without a wait of the host

    def __init__(self, redistribution: ParameterRedistribution, cached: frozenset[int] = frozenset()) -> None:
        self.redistribution = redistribution
        self.cache = RowCache(cached)

    def store(self, rows: Tensor, lasting: bool) -> Tensor:
        """Store rows, which are on the device with any strides; return them in this memory.

        Args:
            rows: a parameter's rows, (rows, chunk).
            lasting: whether they stay there, and are not moved into a flat buffer soon.
        """
        return rows.contiguous()

    def to_storage(self, flat: Tensor) -> Tensor:
        """Return a flat buffer in this memory."""
        return flat

    def to_device(self, runs: Iterable[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Return rows on the device; each (rows, width)."""
        device = get_accelerator().current_device_name()
        return [run.to(device=device, dtype=dtype, non_blocking=True) for run in runs]

    def gather(self, rows: Tensor, on_received: OnReceived, updated: Callable[[], Tensor] | None = None) -> Transfer:
        """All-gather a window of a block G -> I, without encoding.

        Args:
            rows: stored rows, (rows, width); written.
            on_received: called with the rows on the device, if they are stored on the host.
            updated: returns this rank's row, 1D, of its dtype and on the device, if a step cannot write it in place.
                Here it can.
        """
        return self.redistribution.gather_g_to_i_in_place(rows)

    def update(self, code: Tensor, rows: Tensor, on_received: OnReceived) -> Transfer:
        """All-gather the encoded updates of each group's row G -> I.

        Args:
            code: encoded update of this rank's row.
            rows, on_received: see ``gather``.
        """
        return self.redistribution.gather_encoded_g_to_i(code, rows)


class HostRows(DeviceRows):
    """Rows in host memory, which may be pinned. See Note [Rows on the host]."""

    on_host = True

    def __init__(self, redistribution: ParameterRedistribution, cached: frozenset[int], pinned: bool) -> None:
        super().__init__(redistribution, cached)
        self._pinned = self.is_stream_ordered = pinned

    def store(self, rows: Tensor, lasting: bool) -> Tensor:
        """Copy rows to the host; rows that are moved soon need not be pinned."""
        copy = torch.empty(rows.shape, dtype=rows.dtype, device="cpu").copy_(rows)
        return self.to_storage(copy) if lasting else copy

    def to_storage(self, flat: Tensor) -> Tensor:
        """Return a tensor in host memory, pinned if configured."""
        return get_accelerator().pin_memory(flat) if self._pinned else flat

    def to_device(self, runs: Iterable[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Copy rows to the device, one by one."""
        return [self._on_device(run).to(dtype) for run in runs]

    def _on_device(self, rows: Tensor) -> Tensor:
        copy = rows.new_empty(rows.shape, device=get_accelerator().current_device_name())
        self._copy(rows, copy)
        return copy

    def _copy(self, source: Tensor, target: Tensor) -> None:
        if source.is_contiguous() and target.is_contiguous():
            target.copy_(source, non_blocking=self._pinned)
            return
        for source_row, target_row in zip(source, target, strict=True):
            target_row.copy_(source_row, non_blocking=self._pinned)

    def gather(self, rows: Tensor, on_received: OnReceived, updated: Callable[[], Tensor] | None = None) -> Transfer:
        """Gather a window on the device, and copy it to the host."""
        shard = self._on_device(rows[self.redistribution.row]) if updated is None else updated()
        gathered = yield from self.redistribution.inter.all_gather(shard)
        return self._store_window(gathered.view(rows.shape), rows, on_received)

    def update(self, code: Tensor, rows: Tensor, on_received: OnReceived) -> Transfer:
        """Update a window on the device, and copy it to the host."""
        previous = self._on_device(rows)  # overlaps the previous window's communication
        return self._store_window(
            (yield from self.redistribution.gather_encoded_g_to_i(code, previous)), rows, on_received
        )

    def _store_window(self, window: Tensor, rows: Tensor, on_received: OnReceived) -> Tensor:
        self._copy(window, rows)
        on_received(window)
        return window.new_empty(0)  # empty, to free the window's memory


class RowCache:
    """Copies of some parameters' rows on the device; ``selected``: ds_ids of these parameters."""

    def __init__(self, selected: frozenset[int]) -> None:
        self._selected = selected
        self._rows: dict[int, Tensor] = {}  # ds_id: (rows, chunk)

    def __contains__(self, ds_id: int) -> bool:
        return ds_id in self._rows

    def __getitem__(self, ds_id: int) -> Tensor:
        return self._rows[ds_id]

    def store(self, ds_id: int, rows: Tensor) -> None:
        """Copy all of a parameter's rows, from any device."""
        if ds_id not in self._selected:
            return
        if ds_id not in self._rows:
            device = get_accelerator().current_device_name()
            self._rows[ds_id] = torch.empty(rows.shape, dtype=rows.dtype, device=device)
        self._rows[ds_id].copy_(rows)

    def store_columns(self, ds_id: int, columns: Span, rows: Tensor) -> None:
        """Copy received columns of a parameter's rows.

        Args:
            rows: values of these columns, on the device.
        """
        if (cached := self._rows.get(ds_id)) is not None:
            columns.of(cached).copy_(rows)

    def clear(self) -> None:
        """Drop all copies."""
        self._rows.clear()
