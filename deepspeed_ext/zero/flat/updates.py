# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Updated parameters of flat buffers: os -> N, after a step."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from deepspeed import comm as dist
from torch import Tensor, nn

from deepspeed_ext.comm.hops import Transfer, Update
from deepspeed_ext.comm.packing import aligned, record_on_current_stream
from deepspeed_ext.comm.redistribution import ParameterRedistribution
from deepspeed_ext.strategy import Placement, Strategy
from deepspeed_ext.zero.families import Families, Family
from deepspeed_ext.zero.flat.arrivals import Arrivals
from deepspeed_ext.zero.flat.buffers import FlatBuffer, windows_in_forward_order
from deepspeed_ext.zero.resync import Asking, Resync
from deepspeed_ext.zero.shards import Window


class FlatGroups(list[Tensor]):
    """DeepSpeed's list of flat buffers, which gathers itself; see ``integration/seams.py``.

    Args:
        buffers: DeepSpeed's.
        all_gather: gathers updated parameters; False where DeepSpeed's own gather over its group does it.
    """

    def __init__(self, buffers: Sequence[Tensor], all_gather: Callable[[], bool]) -> None:
        super().__init__(buffers)
        self.all_gather = all_gather


def has_own_partition(buffer: FlatBuffer, resync: Resync) -> bool:
    """Whether this rank's partition of a flat buffer is a tensor of its own."""
    return buffer.striped or not resync.always


def tell_of_setters(buffers: Iterable[FlatBuffer], resync: Resync) -> None:
    """Ask for whole updates when somebody sets the optimizer's weights by DeepSpeed's ``safe_set_full_...``, before it
    is done."""
    for buffer in buffers:
        for param in buffer.params:
            owner: Any = param
            owner.set_full_hp_param = _telling(owner.set_full_hp_param, Asking(resync))


def _telling(change: Callable[..., None], ask: Asking) -> Callable[..., None]:
    @functools.wraps(change)
    def changed(*args: Any, **kwargs: Any) -> None:
        ask()
        change(*args, **kwargs)

    return changed


class FlatUpdates:
    """What comes back after a step.

    A rank's partition of a flat buffer is a tensor of its own where it has another order than the buffer, or where the
    buffer must keep what others hold until an update has arrived. Its memory is there from a step until its gather.

    Args:
        buffers: all.
        families: of their parameters.
        strategy: one with p = N.
        resync: tells which updates travel whole.
        places: of trained parameters in the model, by their ids.
        flat: gives a flat buffer, 1D, by its number.
        own: gives this rank's partition of it, 1D; None while parameters are offloaded.
        most: elements of a window at most.
        overlap: whether windows may overlap each other.
        ahead: whether a step may end before parameters have arrived.

    Attributes:
        arrivals: windows on their way.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        families: Families,
        strategy: Strategy,
        resync: Resync,
        places: Mapping[int, int],
        flat: Callable[[int], Tensor],
        own: Callable[[int], Tensor | None],
        most: int,
        overlap: bool,
        ahead: bool,
    ) -> None:
        self._buffers, self._families, self._strategy, self._resync = buffers, families, strategy, resync
        self._places, self._flat, self._own = places, flat, own
        ranks = [dist.get_world_size(group=buffer.group) for buffer in buffers]
        windows = windows_in_forward_order(buffers, ranks, most, places)
        self._windows = [  # another one is in its place already
            window
            for window in windows
            if ranks[window.buffer] > 1 or has_own_partition(buffers[window.buffer], resync)
        ]
        self._codes: dict[Window, Tensor] = {}  # what is sent of each, until it is
        self.arrivals = Arrivals(
            self._windows,
            self._gather_window,
            self._place_window,
            overlap,
            ahead and strategy.os != Placement.N,
            all(family.gather.pairwise for family in families.values()),
        )
        self._watching: list[Any] = []  # hooks that are told of parameters that somebody has written
        self.give_up()

    # This rank's partitions #######################################################################

    def _owned(self) -> Iterator[tuple[FlatBuffer, Tensor]]:
        """Yield those that are tensors of their own."""
        for buffer in self._buffers:
            own = self._own(buffer.number)
            if own is not None and has_own_partition(buffer, self._resync):
                yield buffer, own

    def _hold(self) -> None:
        for _, own in self._owned():
            own.untyped_storage().resize_(own.nbytes)

    def give_up(self) -> None:
        """Free their memory."""
        for _, own in self._owned():
            own.untyped_storage().resize_(0)

    @contextmanager
    def partitions(self, stepping: bool = False) -> Iterator[None]:
        """Hold this rank's partitions in this context; in a step, also until their gather has read them."""
        self.settle()
        self._hold()
        try:
            yield
        finally:
            if not (stepping and self.arrivals.ahead and self._resync.now):
                self.give_up()

    def take_weights(self) -> None:
        """Take this rank's partitions from flat buffers that somebody has just loaded."""
        for buffer, own in self._owned():
            buffer.copy_own(self._flat(buffer.number), own.zero_())

    # os -> N ######################################################################################

    def settle(self) -> None:
        """Make the current stream wait for the arrival of all updates."""
        self.drain()
        if self.arrivals.ahead:
            self.give_up()

    def drain(self) -> None:
        """Do so, and keep this rank's partitions if they are there."""
        self.arrivals.drain()

    def gather(self, stepping: bool) -> bool:
        """Gather updated parameters between groups, then inside, window by window.

        Returns:
            False if DeepSpeed's all-gather over its own group does it without staging: in one hop, and as it is, into
            flat buffers of which the partitions are views.
        """
        if self._strategy.os == Placement.N:
            return False
        as_parent = self._strategy.os != Placement.G or all(map(_in_one_hop, self._families.values()))
        if as_parent and not self.arrivals.ahead and not any(buffer.striped for buffer in self._buffers):
            return False
        self.drain()
        self._resync.begin(stepping)
        for family in self._families.values():
            windows = [window for window in self._windows if self._buffers[window.buffer].family is family]
            if windows and not self._is_whole(windows[0]):
                codes = family.gather.encode([self._update(window) for window in windows], self._strategy.p)
                self._codes.update(zip(windows, codes, strict=True))
                del codes
        self.arrivals.start()
        return True

    def _redistribution_of(self, window: Window) -> ParameterRedistribution:
        return self._buffers[window.buffer].family.gather

    def _is_whole(self, window: Window) -> bool:
        """Whether a window travels as it is: in this step, or always, where nothing crosses of its family."""
        return self._resync.now or self._redistribution_of(window).differences is None

    def _own_part(self, window: Window) -> Tensor:
        own = self._own(window.buffer)
        assert own is not None
        return window.span.of(own.detach())

    def _gather_window(self, window: Window) -> Transfer:
        redistribution = self._redistribution_of(window)
        if self._is_whole(window):
            sent = aligned(self._own_part(window), redistribution.multiple)
        else:
            sent = record_on_current_stream(self._codes.pop(window))
        return (yield from redistribution.gather(sent, self._strategy.os, self._strategy.p))

    def _update(self, window: Window) -> Update:
        """Return what this rank sends of a window; the last cells of a buffer may end early."""
        buffer, flat = self._buffers[window.buffer], self._flat(window.buffer).detach()
        row, col = buffer.cell
        own = self._own_part(window)
        cell, held = row * buffer.layout.cols + col, own[:0]
        for numbers, windows in buffer.layout.held(flat, window.span):
            if numbers.start <= cell < numbers.stop:
                held = windows[cell - numbers.start]
        return Update(lambda: own[: held.numel()], held, window.span.numel)

    def _place_window(self, window: Window, cells: Tensor) -> None:
        layout, flat = self._buffers[window.buffer].layout, self._flat(window.buffer).detach()
        if not self._is_whole(window):
            codes = cells.view(layout.cols, layout.rows, -1).transpose(0, 1).flatten(0, 1)
            for numbers, held in layout.held(flat, window.span):
                self._redistribution_of(window).write(codes[numbers], held)
            return
        layout.place(flat, window.span.start, cells.view(layout.cols, layout.rows, -1)[..., : window.span.numel])

    # The model ####################################################################################

    def watch(self, module: nn.Module) -> None:
        """Make a model's modules wait for their parameters, where a step ends before these have arrived, and tell when
        they have been loaded."""
        if self.arrivals.ahead:
            self.arrivals.watch(module, self._places)
        if not self._resync.always:
            for used in module.modules():
                self._watching.append(used.register_load_state_dict_post_hook(Asking(self._resync)))

    def drop(self) -> None:
        """Wait for what is on its way, and remove the hooks from the model."""
        self.arrivals.drop()
        for hook in self._watching:
            hook.remove()


def _in_one_hop(family: Family) -> bool:
    """Whether an all-gather over all ranks of a family is one hop, and exact."""
    sizes = family.topology.sizes
    return sizes.groups == 1 or (sizes.group_size == 1 and family.gather.exact)
