# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Parameters of a stage-1/2 optimizer of ours after a step: os -> N."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from deepspeed import comm as dist
from torch import Tensor, nn

from deepspeed_ext.comm.hops import Transfer, Update
from deepspeed_ext.comm.packing import aligned, read_here
from deepspeed_ext.comm.reshard import ParameterReshard
from deepspeed_ext.strategy import Placement
from deepspeed_ext.zero.families import Family
from deepspeed_ext.zero.stage12_states import Stage12States
from deepspeed_ext.zero.updates import Updates
from deepspeed_ext.zero.whole_updates import Asking
from deepspeed_ext.zero.windows import Window, windows_in_forward_order


class _FlatGroups(list[Tensor]):
    """The flat parameter buffers, which know how to gather themselves; see ``integration/seams/strategies.py``."""

    def __init__(self, buffers: list[Tensor], optimizer: "Stage12Updates") -> None:
        super().__init__(buffers)
        self._optimizer = optimizer

    def all_gather(self) -> bool:
        """Gather updated parameters; False where the parent's own gather over its group does it."""
        return self._optimizer._gather_parameters()


class Stage12Updates(Stage12States):
    """Such an optimizer, ``Stage12Optimizer``."""

    bit16_groups_flat: list[Tensor]  # the parent's

    def _make_updates(self, overlap: bool) -> None:
        """Make what moves parameters after a step.

        Args:
            overlap: whether a step may end before they have arrived.
        """
        self.bit16_groups_flat = _FlatGroups(self.bit16_groups_flat, self)
        ranks = [dist.get_world_size(group=group) for group in self.real_dp_process_group]
        self._update_windows = [
            window
            for window in self._windows(ranks, self.allgather_bucket_size)
            if ranks[window.buffer] > 1 or self.has_own_partition(window.buffer)  # else it is in its place already
        ]
        self._codes: dict[Window, Tensor] = {}  # what is sent of each, until it is
        self.updates = Updates(
            self._update_windows,
            self._gather_window,
            self._place_window,
            self.overlap_comm,
            overlap and self.strategy.os != Placement.N,
            all(family.gather.pairwise for family in self.families.values()),
        )
        self._watching: list[Any] = []  # hooks that hear of parameters that somebody has written
        self._give_partitions_up()

    # A rank's own partitions exist from a step until its gather #####################################

    def _hold_partitions(self) -> None:
        for own in self._own_partitions():
            own.untyped_storage().resize_(own.nbytes)

    def _give_partitions_up(self) -> None:
        for own in self._own_partitions():
            own.untyped_storage().resize_(0)

    def _own_partitions(self) -> list[Tensor]:
        """Return those that are tensors of their own; none while parameters are offloaded."""
        held = enumerate(self.parallel_partitioned_bit16_groups)
        return [self.own_partition(group) for group, parts in held if parts and self.has_own_partition(group)]

    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        """Take the step, with partitions to write to."""
        self.finish_updates()
        self._hold_partitions()
        try:
            return super().step(closure)
        finally:
            if not (self.updates.ahead and self.whole.now):
                self._give_partitions_up()

    def finish_updates(self) -> None:
        """Have the current stream come behind the arrival of all updates."""
        self.updates.drain()
        if self.updates.ahead:
            self._give_partitions_up()

    def update_lp_params(self) -> None:
        """Have all ranks hold the optimizer's weights, rounded to the dtype of the parameters. Collective."""
        self.finish_updates()
        self._hold_partitions()
        super().update_lp_params()
        self.updates.drain()
        self._give_partitions_up()

    def _restore_from_bit16_weights(self) -> None:
        """Take the optimizer's weights from the model's, once these have arrived."""
        self.finish_updates()
        self._hold_partitions()
        super()._restore_from_bit16_weights()
        self._give_partitions_up()

    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        """Bring back what ``offload_states`` has moved; partitions are made anew for that."""
        self.finish_updates()
        super().reload_states(*args, **kwargs)
        self._give_partitions_up()

    # os -> N ########################################################################################

    def _gather_parameters(self) -> bool:
        """Gather updated parameters between groups, then inside, in windows of ``allgather_bucket_size``.

        Returns:
            False if the parent's all-gather over its own group does it without staging: in one hop, and as it is, into
            flat buffers of which the partitions are views.
        """
        if self.strategy.os == Placement.N:
            return False
        as_parent = self.strategy.os != Placement.G or all(map(self._in_one_hop, self.families.values()))
        if as_parent and not self.updates.ahead and not any(map(self.is_striped, range(len(self.layouts)))):
            return False
        self.updates.drain()
        self.whole.begin(self._stepping)
        for name, family in self.families.items():
            windows = [window for window in self._update_windows if self.family_names[window.buffer] == name]
            if windows and not self._is_whole(windows[0]):
                codes = family.gather.encode([self._update(window) for window in windows], self.strategy.p)
                self._codes.update(zip(windows, codes, strict=True))
                del codes
        self.updates.start()
        return True

    @staticmethod
    def _in_one_hop(family: Family) -> bool:
        """Whether an all-gather over all ranks of a family is one hop, and exact."""
        sizes = family.topology.sizes
        return sizes.groups == 1 or (sizes.group_size == 1 and family.gather.exact)

    def _reshard_of(self, window: Window) -> ParameterReshard:
        return self.families[self.family_names[window.buffer]].gather

    def _is_whole(self, window: Window) -> bool:
        """Whether a window travels as it is: in this step, or always, where nothing crosses of its family."""
        return self.whole.now or self._reshard_of(window).differences is None

    def _gather_window(self, window: Window) -> Transfer:
        reshard = self._reshard_of(window)
        if self._is_whole(window):
            own = self.own_partition(window.buffer).detach().narrow(0, window.start, window.width)
            sent = aligned(own, reshard.multiple)
        else:
            sent = read_here(self._codes.pop(window))
        return (yield from reshard.gather(sent, self.strategy.os, self.strategy.p))

    def _update(self, window: Window) -> Update:
        """Return what this rank sends of a window; the last cells of a buffer may end early."""
        row, col = self._own_cell(window.buffer)
        layout, flat = self.layouts[window.buffer], self.bit16_groups_flat[window.buffer].detach()
        own = self.own_partition(window.buffer).detach().narrow(0, window.start, window.width)
        cell, held = row * layout.cols + col, own[:0]
        for numbers, windows in layout.held(flat, window.start, window.width):
            if numbers.start <= cell < numbers.stop:
                held = windows[cell - numbers.start]
        return Update(lambda: own[: held.numel()], held, window.width)

    def _place_window(self, window: Window, cells: Tensor) -> None:
        layout, flat = self.layouts[window.buffer], self.bit16_groups_flat[window.buffer].detach()
        if not self._is_whole(window):
            codes = cells.view(layout.cols, layout.rows, -1).transpose(0, 1).flatten(0, 1)
            for numbers, held in layout.held(flat, window.start, window.width):
                self._reshard_of(window).write(codes[numbers], held)
            return
        layout.place(flat, window.start, cells.view(layout.cols, layout.rows, -1)[..., : window.width])

    def _windows(self, rows: Sequence[int], most: int) -> list[Window]:
        placed = [
            {self._places[id(p)]: (self._offsets[self.get_param_id(p)], p.numel()) for p in params}
            for params in self.bit16_groups
        ]
        return windows_in_forward_order(self.layouts, rows, most, placed)

    def watch(self, module: nn.Module) -> None:
        """Have a model's modules wait for their parameters, where a step ends before these have arrived, and tell when
        they have been loaded."""
        if self.updates.ahead:
            self.updates.watch(module, self._places)
        if not self.whole.always:
            for used in module.modules():
                self._watching.append(used.register_load_state_dict_post_hook(Asking(self.whole)))

    def _link_all_hp_params(self) -> None:
        """Also hear when somebody sets the optimizer's weights by DeepSpeed's ``safe_set_full_...``."""
        super()._link_all_hp_params()
        for params in [] if self.whole.always else self.bit16_groups:
            for param in params:
                param.set_full_hp_param = self._heard(param.set_full_hp_param)

    def _heard(self, change: Callable[..., None]) -> Callable[..., None]:
        ask = Asking(self.whole)

        @functools.wraps(change)
        def changed(*args: Any, **kwargs: Any) -> None:
            ask()
            change(*args, **kwargs)

        return changed

    def checkpoint_event_prologue(self) -> None:
        """Have parameters arrive before the engine saves or loads them."""
        self.updates.drain()

    def send_whole(self) -> None:
        """Have all ranks hold the optimizer's weights, where they may hold something else; see ``ParoOptimizer``."""
        if not self.whole.always:
            self._require_parameters()
            self.update_lp_params()

    def destroy(self) -> None:
        """Also leave the model alone."""
        for hook in self._watching:
            hook.remove()
        super().destroy()
