# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Where a rank's rows of parameters are: on the device, or in host memory, with some of them on the device as well.

Note [Rows on the host]
    With ``offload_param`` slices are in host memory, pinned where that is asked for. What is used is copied to the
    device and gathered there, inside the group. Updated rows cross between groups on the device, too, a window at a
    time: so device memory holds the windows that are on their way, two at most, and never a whole slice. What arrives
    is copied to the host, on the stream of its transfer, and what reads it waits for that stream: nothing of this
    makes the host wait. Where the host itself reads, it waits first (``Slices.settle``).

    A copy between pinned memory and the device keeps its place in a stream only if nothing is left for the host to do.
    It would have to gather rows with gaps between them, or change their dtype, and would do so at once, while what
    arrives is still being written. So rows are copied one by one, as they are; what is side by side in a row goes
    together.

    What is on the device as well (``paro_parameter_cache_bytes``) is a copy: the host has all.
"""

from collections.abc import Callable, Iterable

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.comm.hops import Transfer
from deepspeed_ext.comm.redistribution import ParameterRedistribution
from deepspeed_ext.comm.spans import Span

Arrived = Callable[[Tensor], None]


class DeviceRows:
    """Rows on the device, where they are used and received.

    Args:
        redistribution: hops that complete the rows.
        cached: ds_ids of the parameters whose rows are on the device as well, if rows are on the host.
    """

    on_host = False
    keeps_order = True  # whether a copy of them is made in the order of a stream, and the host does not wait for it

    def __init__(self, redistribution: ParameterRedistribution, cached: frozenset[int] = frozenset()) -> None:
        self.redistribution = redistribution
        self.cache = RowCache(cached)

    def keep(self, rows: Tensor, lasting: bool) -> Tensor:
        """Return rows, on the device and of any strides, where they are held.

        Args:
            rows: of a parameter, (rows, chunk).
            lasting: whether they stay there, and are not moved into a flat buffer soon.
        """
        return rows.contiguous()

    def home(self, flat: Tensor) -> Tensor:
        """Return a flat buffer where it is held."""
        return flat

    def use(self, runs: Iterable[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Return rows on the device; each (rows, width)."""
        device = get_accelerator().current_device_name()
        return [run.to(device=device, dtype=dtype, non_blocking=True) for run in runs]

    def gather(self, rows: Tensor, arrived: Arrived, updated: Callable[[], Tensor] | None = None) -> Transfer:
        """Redistribute G -> I a window of a block, as it is.

        Args:
            rows: (rows, width), as they are held; written.
            arrived: called with the same on the device if that is not where they are held.
            updated: gives this rank's row, 1D, of its dtype and on the device, where a step could not write it in
                place; here it can.
        """
        return self.redistribution.complete_rows(rows)

    def update(self, code: Tensor, rows: Tensor, arrived: Arrived) -> Transfer:
        """Redistribute G -> I what each group has encoded of its own row.

        Args:
            code: of this rank's row.
            rows, arrived: see ``gather``.
        """
        return self.redistribution.update_rows(code, rows)


class HostRows(DeviceRows):
    """Rows in host memory, which may be pinned. See Note [Rows on the host]."""

    on_host = True

    def __init__(self, redistribution: ParameterRedistribution, cached: frozenset[int], pinned: bool) -> None:
        super().__init__(redistribution, cached)
        self._pinned = self.keeps_order = pinned

    def keep(self, rows: Tensor, lasting: bool) -> Tensor:
        """Copy rows to the host; those that do not stay there need not be pinned."""
        held = torch.empty(rows.shape, dtype=rows.dtype, device="cpu").copy_(rows)
        return self.home(held) if lasting else held

    def home(self, flat: Tensor) -> Tensor:
        """Return a tensor in host memory of the kind that is asked for."""
        return get_accelerator().pin_memory(flat) if self._pinned else flat

    def use(self, runs: Iterable[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Copy rows to the device, each by itself."""
        return [self._on_device(run).to(dtype) for run in runs]

    def _on_device(self, rows: Tensor) -> Tensor:
        found = rows.new_empty(rows.shape, device=get_accelerator().current_device_name())
        self._copy(rows, found)
        return found

    def _copy(self, source: Tensor, target: Tensor) -> None:
        if source.is_contiguous() and target.is_contiguous():
            target.copy_(source, non_blocking=self._pinned)
            return
        for one, other in zip(source, target, strict=True):
            other.copy_(one, non_blocking=self._pinned)

    def gather(self, rows: Tensor, arrived: Arrived, updated: Callable[[], Tensor] | None = None) -> Transfer:
        """Gather a window on the device, and copy it to the host."""
        mine = self._on_device(rows[self.redistribution.row]) if updated is None else updated()
        found = yield from self.redistribution.inter.all_gather(mine)
        return self._hold(found.view(rows.shape), rows, arrived)

    def update(self, code: Tensor, rows: Tensor, arrived: Arrived) -> Transfer:
        """Update a window on the device, and copy it to the host."""
        held = self._on_device(rows)  # under the communication
        return self._hold((yield from self.redistribution.update_rows(code, held)), rows, arrived)

    def _hold(self, found: Tensor, rows: Tensor, arrived: Arrived) -> Tensor:
        self._copy(found, rows)
        arrived(found)
        return found.new_empty(0)  # nothing that would keep the window's memory


class RowCache:
    """Copies on the device of some parameters' rows; ``wanted``: ds_ids of these parameters."""

    def __init__(self, wanted: frozenset[int]) -> None:
        self._wanted = wanted
        self._rows: dict[int, Tensor] = {}  # ds_id: (rows, chunk)

    def __contains__(self, ds_id: int) -> bool:
        return ds_id in self._rows

    def __getitem__(self, ds_id: int) -> Tensor:
        return self._rows[ds_id]

    def take(self, ds_id: int, rows: Tensor) -> None:
        """Copy a parameter's rows, whole, from anywhere."""
        if ds_id not in self._wanted:
            return
        if ds_id not in self._rows:
            device = get_accelerator().current_device_name()
            self._rows[ds_id] = torch.empty(rows.shape, dtype=rows.dtype, device=device)
        self._rows[ds_id].copy_(rows)

    def arrive(self, ds_id: int, inside: Span, rows: Tensor) -> None:
        """Take over columns of a parameter's rows that have arrived.

        Args:
            inside: the columns of its rows.
            rows: of these columns, on the device.
        """
        if (held := self._rows.get(ds_id)) is not None:
            inside.of(held).copy_(rows)

    def clear(self) -> None:
        """Forget all copies."""
        self._rows.clear()
