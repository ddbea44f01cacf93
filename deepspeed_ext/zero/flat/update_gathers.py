# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""All-gathers of windows of updated parameters after an optimizer step, and waits for them.

Note [Updates under the forward]
    With ``paro_overlap_updates`` a step ends once the gathers of its updates have been started, window by window in
    the order of the forward. A module waits for the windows of its own parameters when its forward begins, so the
    first layers run while later windows are in flight. Until then parameters are stale, so all known readers wait
    first: forwards, in training and in evaluation; ``state_dict`` and ``load_state_dict`` of every module, and with
    them everything that DeepSpeed saves and loads; ``GatheredParameters``; the end of each backward, and the next
    step. Waiting is not collective: all ranks have started the same gathers.

    A parameter may also be read without a call of a module: as an attribute of a module, or from ``parameters()``.
    Both read the module's ``_parameters``, which is replaced by a dictionary that waits for the parameters that it
    returns (``_WaitingParameters``). Code that stores a reference to a parameter must call
    ``deepspeed_ext.wait_for_updates()`` first.
"""

import weakref
from collections import Counter
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from functools import partial
from typing import Any, Protocol

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.compiler import is_compiling

from deepspeed_ext.comm.hops import Transfer
from deepspeed_ext.comm.transfer_queue import ActiveTransfer, TransferQueue
from deepspeed_ext.zero.shards import Window
from deepspeed_ext.zero.updates_in_flight import register, unregister


class WaitHook:
    """A module hook that waits for windows. In a copied or pickled module it does nothing.

    Some modules read parameters of their children without calling them, as torch's MultiheadAttention and the gate of
    DeepSpeed's MoE layers do. So a module also waits for all of its children that have not been called yet in its
    mode, because evaluation may run other code than training.

    Args:
        gathers: the gathers, referenced weakly; None in a copy.
        number: number of the last window that the module always waits for; -1 for none.
        children: hooks of its children.
    """

    def __init__(
        self, gathers: "UpdateGathers | None" = None, number: int = -1, children: Sequence["WaitHook"] = ()
    ) -> None:
        self._gathers = None if gathers is None else weakref.ref(gathers)
        self._number = number
        self._children = children
        self._called_in_modes: set[bool] = set()  # values of ``training`` in calls

    @torch.compiler.disable
    def __call__(self, module: nn.Module, *_: Any) -> None:
        self._called_in_modes.add(module.training)
        self._wait(module.training)

    def _wait(self, training: bool | None) -> None:
        gathers = None if self._gathers is None else self._gathers()
        if gathers is not None and gathers.in_flight:
            last = self.last(training)
            if last >= 0:
                gathers.wait_for(last)

    def last(self, training: bool | None = None) -> int:
        """Return the number of the last window to wait for in a mode; with None, the last of all children."""
        return max(
            [
                self._number,
                *(child.last(training) for child in self._children if training not in child._called_in_modes),
            ]
        )

    def __reduce__(self) -> tuple[type["WaitHook"], tuple[()]]:
        self._wait(None)  # the module's parameters are copied next
        return WaitHook, ()


class _WaitingParameters(dict[str, Any]):
    """The parameters of a module; waits for a parameter before returning it. A copied or pickled one is a plain
    dictionary.

    A compiled forward does not wait here, but in its module hooks. Every forward reads parameters here, so the fast
    path only checks cached references.

    Args:
        parameters: the module's parameters, by name.
        gathers: the gathers, referenced weakly.
    """

    def __init__(self, parameters: Mapping[str, Any], gathers: "UpdateGathers") -> None:
        super().__init__(parameters)
        self._gathers = weakref.ref(gathers)
        self._started, self._waited_for = gathers._started, gathers._waited_for
        self._last = max(gathers._last_window_of.get(id(param), -1) for param in parameters.values())

    def __getitem__(self, name: str) -> Any:
        param = dict.__getitem__(self, name)
        if not is_compiling() and self._started and self._waited_for.get(None, -1) < self._last:
            self._wait((param,))
        return param

    def get(self, name: str, default: Any = None) -> Any:
        param = super().get(name, default)
        if not is_compiling():
            self._wait((param,))
        return param

    def pop(self, name: str, *default: Any) -> Any:
        self.get(name)
        return super().pop(name, *default)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override] # a view of dict's own class
        self._wait_for_all()
        return super().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        self._wait_for_all()
        return super().values()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (self.copy(),)

    def belongs_to(self, gathers: "UpdateGathers") -> bool:
        """Whether it waits for these gathers."""
        return self._gathers() is gathers

    def _wait_for_all(self) -> None:
        if not is_compiling():
            self._wait(super().values())

    def _wait(self, params: Iterable[Any]) -> None:
        gathers = self._gathers()
        if gathers is not None and gathers.in_flight:
            gathers.wait_for_params(params)


def _children_first(module: nn.Module, visited: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield a module and its submodules, children first. Reversing ``modules()`` would not do this for a shared child.

    Args:
        visited: modules to skip; yielded modules are added.
    """
    if module not in visited:
        visited.add(module)
        for child in module.children():
            yield from _children_first(child, visited)
        yield module


class WindowTransfers(Protocol):
    """Transfers of windows of updated parameters."""

    def gather_window(self, window: Window) -> Transfer:
        """All-gather a window of all ranks' partitions."""

    def write_window(self, window: Window, cells: Tensor) -> None:
        """Write a gathered window to its flat buffer."""


class UpdateGathers:
    """All-gathers of updated parameters.

    Args:
        windows: windows in the order in which they are sent.
        transfers: gathers a window, and writes it.
        overlap: whether windows may overlap each other.
        overlap_updates: whether a step ends before they have been received; see Note [Updates under the forward].
        threads: whether a host thread may then run transfers on devices without streams.
    """

    def __init__(
        self,
        windows: Sequence[Window],
        transfers: WindowTransfers,
        *,
        overlap: bool,
        overlap_updates: bool,
        threads: bool = False,
    ) -> None:
        self._windows = windows
        self._transfers = transfers
        self.overlap_updates = overlap_updates
        self._queue = TransferQueue(
            overlap or overlap_updates,
            side_streams=True,
            on_thread=overlap_updates and threads,
            finish_before_exit=True,
        )
        self._started: list[ActiveTransfer] = []
        self._waited_for: dict[Any, int] = {}  # stream (or None): number of the last window that it has waited for
        self._last_window_of: dict[int, int] = {}  # id of a parameter: number of the last window with elements of it
        self._waits_on_read = True
        self._hooks: list[Any] = []
        self._hooked_modules: list[nn.Module] = []
        if overlap_updates:
            register(self, replicated=True)

    def start(self) -> None:
        """All-gather all windows, and wait for them unless the step may end before."""
        self.drain()
        self._started.clear()
        self._waited_for.clear()
        for window in self._windows:
            transfer, deliver = self._transfers.gather_window(window), partial(self._transfers.write_window, window)
            if self.overlap_updates:
                self._started.append(self._queue.start(transfer, deliver))
            else:
                self._queue.submit(transfer, deliver)
        if not self.overlap_updates:
            self._queue.drain()

    @property
    def in_flight(self) -> bool:
        """Whether a stream may still have to wait for a window."""
        return bool(self._started)

    def wait_for(self, number: int) -> None:
        """Make the current stream wait for windows 0 to ``number``."""
        stream = None if get_accelerator().is_synchronized_device() else get_accelerator().current_stream()
        if self._waited_for.get(stream, -1) >= number:
            return
        if number >= len(self._started):
            self.drain()
        else:
            self._queue.wait(self._started[number])  # windows are received in order
        self._waited_for[stream] = number

    def wait_for_params(self, params: Iterable[Any]) -> None:
        """Make the current stream wait for parameters, except inside methods of ``without_waiting``."""
        last = max((self._last_window_of.get(id(param), -1) for param in params), default=-1)
        if last >= 0 and self._waits_on_read:
            self.wait_for(last)

    def without_waiting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method that iterates over parameters without reading their values, so that it does not wait.

        Args:
            method: a method, referenced weakly, because its object may keep the wrapper.
        """
        method_ref = weakref.WeakMethod(method)

        def call_without_waiting(*args: Any, **kwargs: Any) -> Any:
            bound = method_ref()
            assert bound is not None
            self._waits_on_read = False
            try:
                return bound(*args, **kwargs)
            finally:
                self._waits_on_read = True

        return call_without_waiting

    def wait(self) -> None:
        """Make the current stream wait for all windows, for ``wait_for_updates``."""
        self.drain()

    def drain(self) -> None:
        """Make the current stream wait for all windows."""
        if self._started:
            self._queue.drain()
            if get_accelerator().is_synchronized_device():  # otherwise other streams must also wait
                self._started.clear()

    def install_hooks(self, module: nn.Module, positions: Mapping[int, int]) -> None:
        """Make the modules of a model wait for the parameters that they use.

        Args:
            positions: positions of its trained parameters, by their ids.
        """
        last = {position: number for number, window in enumerate(self._windows) for position in window.members}
        wait_for_all = WaitHook(self, len(self._windows))
        parents = Counter(child for submodule in module.modules() for child in submodule.children())
        hooks: dict[int, WaitHook] = {}
        for submodule in _children_first(module, set()):
            own = list(submodule.parameters(recurse=False))
            # Parameters of a child that has been called may still be read without a call: by a module that has its own
            # parameters, and so may compute with either, or if another module has called the child.
            read_children = [
                child for child in submodule.children() if (own or parents[child] > 1) and not list(child.children())
            ]
            numbers = [last[positions[id(p)]] for p in own if positions.get(id(p)) in last]
            number = max([-1, *numbers, *(hooks[id(child)].last() for child in read_children)])
            children = [hooks[id(child)] for child in submodule.children()]
            hook = hooks[id(submodule)] = WaitHook(self, number, children)
            if numbers or children:
                # Prepended, because other hooks may read parameters.
                self._hooks.append(submodule.register_forward_pre_hook(hook, prepend=True))
            self._hooks.append(submodule.register_state_dict_pre_hook(wait_for_all))
            self._hooks.append(submodule.register_load_state_dict_pre_hook(wait_for_all))
        # Layers of a pipeline may be functions of tied weights, which run without a module's forward.
        if any(not isinstance(layer, nn.Module) for layer in getattr(module, "forward_funcs", ())):
            self._hooks.append(module.register_forward_pre_hook(wait_for_all, prepend=True))
        self._last_window_of = {
            id(p): last[positions[id(p)]] for p in module.parameters() if positions.get(id(p)) in last
        }
        for submodule in module.modules():
            params: Any = submodule.__dict__.get("_parameters")
            # Other classes of dictionaries are left alone.
            if type(params) in (dict, _WaitingParameters) and any(
                id(p) in self._last_window_of for p in params.values()
            ):
                submodule.__dict__["_parameters"] = _WaitingParameters(params, self)
                self._hooked_modules.append(submodule)

    def drop(self) -> None:
        """Wait for windows in flight, and remove the hooks from the model."""
        self.drain()
        self._started.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for submodule in self._hooked_modules:
            params = submodule.__dict__["_parameters"]
            if isinstance(params, _WaitingParameters) and params.belongs_to(self):
                submodule.__dict__["_parameters"] = dict(params)
        self._hooked_modules.clear()
        unregister(self)
