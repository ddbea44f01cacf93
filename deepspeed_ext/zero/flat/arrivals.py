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
    returns (``_WaitingParameters``). Code that has kept a reference to a parameter must call
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
from deepspeed_ext.zero.updates_in_flight import announce, forget


class BeforeUse:
    """A module hook that waits for windows. In a copied or pickled module it does nothing.

    Some modules read parameters of their children without calling them, as torch's MultiheadAttention and the gate of
    DeepSpeed's MoE layers do. So a module also waits for all of its children that have not been called yet in its
    mode, because evaluation may run other code than training.

    Args:
        updates: the gathers, referenced weakly; None in a copy.
        number: number of the last window that the module always waits for; -1 for none.
        parts: hooks of its children.
    """

    def __init__(self, updates: "Arrivals | None" = None, number: int = -1, parts: Sequence["BeforeUse"] = ()) -> None:
        self._updates = None if updates is None else weakref.ref(updates)
        self._number = number
        self._parts = parts
        self._called: set[bool] = set()  # values of ``training`` in calls

    @torch.compiler.disable
    def __call__(self, module: nn.Module, *_: Any) -> None:
        self._called.add(module.training)
        self._wait(module.training)

    def _wait(self, training: bool | None) -> None:
        updates = None if self._updates is None else self._updates()
        if updates is not None and updates.begun:
            last = self.last(training)
            if last >= 0:
                updates.wait_for(last)

    def last(self, training: bool | None = None) -> int:
        """Return the number of the last window to wait for in a mode; with None, the last of all children."""
        return max([self._number, *(part.last(training) for part in self._parts if training not in part._called)])

    def __reduce__(self) -> tuple[type["BeforeUse"], tuple[()]]:
        self._wait(None)  # the module's parameters are copied next
        return BeforeUse, ()


class _WaitingParameters(dict[str, Any]):
    """The parameters of a module; waits for a parameter before returning it. A copied or pickled one is a plain
    dictionary.

    A compiled forward does not wait here, but in its module hooks. Every forward reads parameters here, so the fast
    path only checks cached references.

    Args:
        parameters: the module's parameters, by name.
        updates: the gathers, referenced weakly.
    """

    def __init__(self, parameters: Mapping[str, Any], updates: "Arrivals") -> None:
        super().__init__(parameters)
        self._updates = weakref.ref(updates)
        self._started, self._reached = updates._started, updates._reached
        self._last = max(updates._last_of.get(id(param), -1) for param in parameters.values())

    def __getitem__(self, name: str) -> Any:
        param = dict.__getitem__(self, name)
        if not is_compiling() and self._started and self._reached.get(None, -1) < self._last:
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

    def is_of(self, updates: "Arrivals") -> bool:
        """Whether it waits for these gathers."""
        return self._updates() is updates

    def _wait_for_all(self) -> None:
        if not is_compiling():
            self._wait(super().values())

    def _wait(self, params: Iterable[Any]) -> None:
        updates = self._updates()
        if updates is not None and updates.begun:
            updates.wait_for_those(params)


def _parts_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield a module and its submodules, children first. Reversing ``modules()`` would not do this for a shared child.

    Args:
        seen: modules to skip; yielded modules are added.
    """
    if module not in seen:
        seen.add(module)
        for part in module.children():
            yield from _parts_first(part, seen)
        yield module


class WindowTransfers(Protocol):
    """Transfers of windows of updated parameters."""

    def gather_window(self, window: Window) -> Transfer:
        """All-gather a window of all ranks' partitions."""

    def place_window(self, window: Window, cells: Tensor) -> None:
        """Write a gathered window to its flat buffer."""


class Arrivals:
    """All-gathers of updated parameters.

    Args:
        windows: windows in the order in which they are sent.
        transfers: gathers a window, and writes it.
        overlap: whether windows may overlap each other.
        ahead: whether a step ends before they have been received; see Note [Updates under the forward].
        threads: whether a host thread may then run transfers on devices without streams.
    """

    def __init__(
        self,
        windows: Sequence[Window],
        transfers: WindowTransfers,
        *,
        overlap: bool,
        ahead: bool,
        threads: bool = False,
    ) -> None:
        self._windows = windows
        self._transfers = transfers
        self.ahead = ahead
        self._queue = TransferQueue(
            overlap or ahead, side_streams=True, on_thread=ahead and threads, finish_before_exit=True
        )
        self._started: list[ActiveTransfer] = []
        self._reached: dict[Any, int] = {}  # stream (or None): number of the last window that it has waited for
        self._last_of: dict[int, int] = {}  # id of a parameter: number of the last window with elements of it
        self._reading = True
        self._hooks: list[Any] = []
        self._watched: list[nn.Module] = []
        if ahead:
            announce(self, whole=True)

    def start(self) -> None:
        """All-gather all windows, and wait for them unless the step may end before."""
        self.drain()
        self._started.clear()
        self._reached.clear()
        for window in self._windows:
            transfer, deliver = self._transfers.gather_window(window), partial(self._transfers.place_window, window)
            if self.ahead:
                self._started.append(self._queue.start(transfer, deliver))
            else:
                self._queue.submit(transfer, deliver)
        if not self.ahead:
            self._queue.drain()

    @property
    def begun(self) -> bool:
        """Whether a stream may still have to wait for a window."""
        return bool(self._started)

    def wait_for(self, number: int) -> None:
        """Make the current stream wait for windows 0 to ``number``."""
        stream = None if get_accelerator().is_synchronized_device() else get_accelerator().current_stream()
        if self._reached.get(stream, -1) >= number:
            return
        if number >= len(self._started):
            self.drain()
        else:
            self._queue.wait(self._started[number])  # windows are received in order
        self._reached[stream] = number

    def wait_for_those(self, params: Iterable[Any]) -> None:
        """Make the current stream wait for parameters, except inside methods of ``unread``."""
        last = max((self._last_of.get(id(param), -1) for param in params), default=-1)
        if last >= 0 and self._reading:
            self.wait_for(last)

    def unread(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method that iterates over parameters without reading their values, so that it does not wait.

        Args:
            method: a method, referenced weakly, because its object may keep the wrapper.
        """
        method_ref = weakref.WeakMethod(method)

        def called(*args: Any, **kwargs: Any) -> Any:
            bound = method_ref()
            assert bound is not None
            self._reading = False
            try:
                return bound(*args, **kwargs)
            finally:
                self._reading = True

        return called

    def wait(self) -> None:
        """Make the current stream wait for all windows, for ``wait_for_updates``."""
        self.drain()

    def drain(self) -> None:
        """Make the current stream wait for all windows."""
        if self._started:
            self._queue.drain()
            if get_accelerator().is_synchronized_device():  # otherwise other streams must also wait
                self._started.clear()

    def watch(self, module: nn.Module, places: Mapping[int, int]) -> None:
        """Make the modules of a model wait for the parameters that they use.

        Args:
            module: the model.
            places: positions of its trained parameters, by their ids.
        """
        last = {place: number for number, window in enumerate(self._windows) for place in window.members}
        everything = BeforeUse(self, len(self._windows))
        parents = Counter(part for used in module.modules() for part in used.children())
        hooks: dict[int, BeforeUse] = {}
        for used in _parts_first(module, set()):
            own = list(used.parameters(recurse=False))
            # Parameters of a child that has been called may still be read without a call: by a module that has its own
            # parameters, and so may compute with either, or if another module has called the child.
            read = [part for part in used.children() if (own or parents[part] > 1) and not list(part.children())]
            numbers = [last[places[id(p)]] for p in own if places.get(id(p)) in last]
            number = max([-1, *numbers, *(hooks[id(part)].last() for part in read)])
            parts = [hooks[id(part)] for part in used.children()]
            hook = hooks[id(used)] = BeforeUse(self, number, parts)
            if numbers or parts:
                # Prepended, because other hooks may read parameters.
                self._hooks.append(used.register_forward_pre_hook(hook, prepend=True))
            self._hooks.append(used.register_state_dict_pre_hook(everything))
            self._hooks.append(used.register_load_state_dict_pre_hook(everything))
        # Layers of a pipeline may be functions of tied weights, which run without a module's forward.
        if any(not isinstance(layer, nn.Module) for layer in getattr(module, "forward_funcs", ())):
            self._hooks.append(module.register_forward_pre_hook(everything, prepend=True))
        self._last_of = {id(p): last[places[id(p)]] for p in module.parameters() if places.get(id(p)) in last}
        for used in module.modules():
            params: Any = used.__dict__.get("_parameters")
            # Other classes of dictionaries are left alone.
            if type(params) in (dict, _WaitingParameters) and any(id(p) in self._last_of for p in params.values()):
                used.__dict__["_parameters"] = _WaitingParameters(params, self)
                self._watched.append(used)

    def drop(self) -> None:
        """Wait for windows in flight, and remove the hooks from the model."""
        self.drain()
        self._started.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for used in self._watched:
            params = used.__dict__["_parameters"]
            if isinstance(params, _WaitingParameters) and params.is_of(self):
                used.__dict__["_parameters"] = dict(params)
        self._watched.clear()
        forget(self)
