# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""All-gathers of updated parameters of flat buffers after a step: os -> N."""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from deepspeed import comm as dist
from torch import Tensor, nn

from deepspeed_ext.comm.hops import Transfer, Update
from deepspeed_ext.comm.packing import align, record_on_current_stream
from deepspeed_ext.comm.redistribution import ParameterRedistribution
from deepspeed_ext.comm.spans import Span
from deepspeed_ext.strategy import Placement
from deepspeed_ext.zero.context import Context
from deepspeed_ext.zero.families import Family
from deepspeed_ext.zero.flat.buffers import FlatBuffer, FlatBuffers
from deepspeed_ext.zero.flat.update_gathers import UpdateGathers
from deepspeed_ext.zero.outer import OuterHooks
from deepspeed_ext.zero.resync import Resync, ResyncRequester
from deepspeed_ext.zero.shards import Window


class FlatGroups(list[Tensor]):
    """DeepSpeed's list of flat buffers, which gathers itself; see ``integration/seams.py``.

    Args:
        updates: all-gathers of updated parameters.
    """

    def __init__(self, buffers: Sequence[Tensor], updates: "FlatUpdates") -> None:
        super().__init__(buffers)
        self._updates = updates

    def all_gather(self) -> bool:
        """All-gather updated parameters; return False if DeepSpeed must do so over its own group."""
        return self._updates.gather()


def has_own_partition(buffer: FlatBuffer, resync: Resync) -> bool:
    """Whether this rank's partition of a flat buffer is a separate tensor."""
    return buffer.striped or not resync.always_in_full


class WeightOwner(Protocol):
    """An optimizer whose weights user code may set."""

    resync: Resync
    outer: OuterHooks


def notify_of_set_weights(buffers: Iterable[FlatBuffer], owner: WeightOwner) -> None:
    """Notify the owner's parts when user code sets weights with DeepSpeed's ``safe_set_full_...``."""
    owner_ref = weakref.ref(owner)  # parameters may outlive the engine
    for buffer in buffers:
        for param in buffer.params:
            mapped: Any = param
            span = buffer.member(param).in_shard
            mapped.set_full_hp_param = _with_notification(mapped.set_full_hp_param, owner_ref, buffer.number, span)


def _with_notification(
    change: Callable[..., None], owner_ref: "weakref.ref[WeightOwner]", number: int, span: Span
) -> Callable[..., None]:
    @functools.wraps(change)
    def set_and_notify(value: Tensor, optim_state_key: str | None = None, *args: Any, **kwargs: Any) -> None:
        owner = owner_ref()
        if owner is not None:
            owner.resync.request()  # before the change: it waits for readers of the weights
        change(value, optim_state_key, *args, **kwargs)
        if owner is not None and optim_state_key is None:
            owner.outer.copy_weights(number, span)

    return set_and_notify


class FlatUpdates:
    """All-gathers updated parameters after a step.

    A rank's partition of a flat buffer is a separate tensor if its order differs from that of the buffer, or if the
    buffer must keep the values that other ranks have until an update is received. Its memory exists from a step until
    its gather.

    Args:
        context: shared constants; a strategy with p = N.
        resync: decides which updates are sent in full.
        flat: DeepSpeed's list of flat buffers, 1D.
        partitions: DeepSpeed's list of the partitions of each flat buffer; empty while parameters are offloaded.

    Attributes:
        gathers: windows that are being gathered.
        flat: the list of flat buffers that DeepSpeed should use, which gathers itself.
    """

    def __init__(
        self,
        context: Context,
        *,
        buffers: FlatBuffers,
        resync: Resync,
        flat: Sequence[Tensor],
        partitions: Sequence[Sequence[Tensor]],
    ) -> None:
        self._context, self._buffers, self._resync = context, buffers, resync
        self.flat, self._partitions = FlatGroups(flat, self), partitions
        self._stepping = False
        ranks = [dist.get_world_size(group=buffer.group) for buffer in buffers]
        windows = buffers.windows(ranks, context.gather_bucket)
        self._windows = [  # other windows are already updated in the flat buffer
            window
            for window in windows
            if ranks[window.buffer] > 1 or has_own_partition(buffers[window.buffer], resync)
        ]
        self._codes: dict[Window, Tensor] = {}  # encoded differences until they are sent
        self.gathers = UpdateGathers(
            self._windows,
            self,
            overlap=context.overlap,
            overlap_updates=context.overlap_updates and context.strategy.os != Placement.N,
            threads=all(family.gather.pairwise for family in context.families.values()),
        )
        self._hooks: list[Any] = []  # hooks that run when user code has loaded parameters
        self.free_partitions()

    # This rank's partitions #######################################################################

    def _partition(self, buffer: FlatBuffer) -> Tensor | None:
        """Return this rank's partition of a flat buffer, 1D; None while parameters are offloaded."""
        partitions = self._partitions[buffer.number]
        return partitions[buffer.rank] if partitions else None

    def _separate_partitions(self) -> Iterator[tuple[FlatBuffer, Tensor]]:
        """Yield the partitions that are separate tensors."""
        for buffer in self._buffers:
            own = self._partition(buffer)
            if own is not None and has_own_partition(buffer, self._resync):
                yield buffer, own

    def _allocate_partitions(self) -> None:
        for _, own in self._separate_partitions():
            own.untyped_storage().resize_(own.nbytes)

    def free_partitions(self) -> None:
        """Free the memory of separate partitions."""
        for _, own in self._separate_partitions():
            own.untyped_storage().resize_(0)

    @contextmanager
    def partitions(self, stepping: bool = False) -> Iterator[None]:
        """Allocate this rank's partitions in this context; in a step, also until their gather has read them."""
        self.wait_and_free()  # gathers in flight still read the partitions
        self._allocate_partitions()
        outer_stepping, self._stepping = self._stepping, stepping
        try:
            yield
        finally:
            self._stepping = outer_stepping
            # Full updates in flight still read the partitions; ``wait_and_free`` frees them.
            if not (stepping and self.gathers.overlap_updates and self._resync.in_full):
                self.free_partitions()

    def copy_weights(self) -> None:
        """Copy this rank's partitions from flat buffers that were just loaded."""
        for buffer, own in self._separate_partitions():
            buffer.copy_partition(self.flat[buffer.number], own.zero_())  # padding must be zero

    # os -> N ######################################################################################

    def wait_and_free(self) -> None:
        """Make the current stream wait for all updates, and free partitions that they have read."""
        self.drain()
        if self.gathers.overlap_updates:
            self.free_partitions()

    def drain(self) -> None:
        """Make the current stream wait for all updates, and keep partitions that are allocated."""
        self.gathers.drain()

    def gather(self) -> bool:
        """All-gather updated parameters between groups, then inside, window by window.

        Returns:
            False if DeepSpeed's all-gather over its own group suffices: one exact hop, into flat buffers whose
            partitions are views of them.
        """
        if self._context.strategy.os == Placement.N:
            return False
        as_parent = self._context.strategy.os != Placement.G or all(map(_in_one_hop, self._context.families.values()))
        if as_parent and not self.gathers.overlap_updates and not any(buffer.striped for buffer in self._buffers):
            return False
        self.drain()  # earlier gathers write to the flat buffers, against which differences are computed
        self._resync.begin_update(self._stepping)
        for family in self._context.families.values():
            windows = [window for window in self._windows if self._buffers[window.buffer].family is family]
            if windows and not self._is_sent_in_full(windows[0]):
                codes = family.gather.encode([self._update(window) for window in windows], self._context.strategy.p)
                self._codes.update(zip(windows, codes, strict=True))
                del codes
        self.gathers.start()
        return True

    def _redistribution_of(self, window: Window) -> ParameterRedistribution:
        return self._buffers[window.buffer].family.gather

    def _is_sent_in_full(self, window: Window) -> bool:
        """Whether a window is sent in full: in this step, or always if its family sends no differences."""
        return self._resync.in_full or self._redistribution_of(window).differences is None

    def _window_of_partition(self, window: Window) -> Tensor:
        own = self._partition(self._buffers[window.buffer])
        assert own is not None
        return window.span.of(own.detach())

    def gather_window(self, window: Window) -> Transfer:
        """Gather a window of all ranks' partitions; see ``WindowTransfers``."""
        redistribution = self._redistribution_of(window)
        if self._is_sent_in_full(window):
            message = align(self._window_of_partition(window), redistribution.multiple)
        else:
            message = record_on_current_stream(self._codes.pop(window))  # allocated on the stream that encoded it
        return (yield from redistribution.gather(message, self._context.strategy.os, self._context.strategy.p))

    def _update(self, window: Window) -> Update:
        """Return this rank's update of a window; the last cells of a buffer may be shorter."""
        buffer, flat = self._buffers[window.buffer], self.flat[window.buffer].detach()
        row, col = buffer.row_and_col
        own = self._window_of_partition(window)
        cell, current = row * buffer.layout.cols + col, own[:0]
        for numbers, windows in buffer.layout.window_views(flat, window.span):
            if numbers.start <= cell < numbers.stop:
                current = windows[cell - numbers.start]
        return Update(lambda: own[: current.numel()], current, window.span.numel)

    def write_window(self, window: Window, cells: Tensor) -> None:
        """Write a gathered window to its flat buffer; see ``WindowTransfers``."""
        layout, flat = self._buffers[window.buffer].layout, self.flat[window.buffer].detach()
        if not self._is_sent_in_full(window):
            codes = cells.view(layout.cols, layout.rows, -1).transpose(0, 1).flatten(0, 1)
            for numbers, current in layout.window_views(flat, window.span):
                self._redistribution_of(window).write(codes[numbers], current)
            return
        layout.unpack_window(
            flat, window.span.start, cells.view(layout.cols, layout.rows, -1)[..., : window.span.numel]
        )

    # The model ####################################################################################

    def install_hooks(self, module: nn.Module) -> None:
        """Install module hooks, which wait for parameters in flight, and request a resync after a load."""
        if self.gathers.overlap_updates:
            self.gathers.install_hooks(module, self._buffers.positions)
        if not self._resync.always_in_full:
            for submodule in module.modules():
                self._hooks.append(submodule.register_load_state_dict_post_hook(ResyncRequester(self._resync)))

    def drop(self) -> None:
        """Wait for updates in flight, and remove the hooks from the model."""
        self.gathers.drop()
        for hook in self._hooks:
            hook.remove()


def _in_one_hop(family: Family) -> bool:
    """Whether an all-gather over all ranks of a family is one exact hop."""
    sizes = family.topology.sizes
    return sizes.groups == 1 or (sizes.group_size == 1 and family.gather.exact)
