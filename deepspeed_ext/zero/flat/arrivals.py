# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Windows of updated parameters on their way back from an optimizer step, and who waits for them.

Note [Updates under the forward]
    With ``paro_overlap_updates`` a step ends when the gathers of what it has changed have been started, window by
    window in the order of the forward. A module waits for those of its own parameters when its forward begins, so
    the first layers run while the others are on their way. Until then parameters are stale, so everything that is
    known to read them waits first: forwards, in training and in evaluation; ``state_dict`` and ``load_state_dict`` of
    every module, and with them whatever DeepSpeed saves and loads; ``GatheredParameters``; the end of each backward,
    and the next step. To wait is not collective: all ranks have started the same gathers.

    A parameter may also be read where no module is called: as an attribute of a module, or by going over
    ``parameters()``. Both look into the module's ``_parameters``, so these are a dictionary that waits for what it
    hands out (``_WaitingParameters``). Whoever has kept a parameter from before hands out nothing, and calls
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
from deepspeed_ext.comm.transfer_queue import Started, TransferQueue
from deepspeed_ext.zero.shards import Window
from deepspeed_ext.zero.updates_in_flight import announce, forget


class BeforeUse:
    """A hook of a module: waits for windows. A copy of the module, or a pickled one, needs none.

    Some modules read parameters of their parts without calling these, as torch's MultiheadAttention and the gate of
    DeepSpeed's MoE layers do. So a module waits, too, for all of its parts that nobody has called yet: in its mode,
    for there may be other code for evaluation than for training.

    Args:
        updates: weakly held; None in a copy.
        number: of the last window that the module waits for whatever has been called; -1 for none.
        parts: hooks of the modules in it.
    """

    def __init__(self, updates: "Arrivals | None" = None, number: int = -1, parts: Sequence["BeforeUse"] = ()) -> None:
        self._updates = None if updates is None else weakref.ref(updates)
        self._number = number
        self._parts = parts
        self._called: set[bool] = set()  # in which modes: whether in training

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
        """Return the number of the last window to wait for in a mode; with None, of the last one of all parts."""
        return max([self._number, *(part.last(training) for part in self._parts if training not in part._called)])

    def __reduce__(self) -> tuple[type["BeforeUse"], tuple[()]]:
        self._wait(None)  # the module's parameters are copied next
        return BeforeUse, ()


class _WaitingParameters(dict[str, Any]):
    """The parameters of a module, each of which arrives before it is handed out. A copy, or a pickled one, is a plain
    dictionary.

    A compiled forward reads past it, and waits by the hooks of its modules. Every forward reads here, so what tells
    that nothing is under way is held, and asked first.

    Args:
        parameters: of the module, by name.
        updates: weakly held.
    """

    def __init__(self, parameters: Mapping[str, Any], updates: "Arrivals") -> None:
        super().__init__(parameters)
        self._updates = weakref.ref(updates)
        self._started, self._reached = updates._started, updates._reached
        self._last = max(updates._last_of.get(id(param), -1) for param in parameters.values())

    def __getitem__(self, name: str) -> Any:
        found = dict.__getitem__(self, name)
        if not is_compiling() and self._started and self._reached.get(None, -1) < self._last:
            self._wait((found,))
        return found

    def get(self, name: str, default: Any = None) -> Any:
        found = super().get(name, default)
        if not is_compiling():
            self._wait((found,))
        return found

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
        """Whether it waits for these."""
        return self._updates() is updates

    def _wait_for_all(self) -> None:
        if not is_compiling():
            self._wait(super().values())

    def _wait(self, params: Iterable[Any]) -> None:
        updates = self._updates()
        if updates is not None and updates.begun:
            updates.wait_for_those(params)


def _parts_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield a module and all in it, each after all of its parts, which ``modules()`` reversed does not do for a part
    that several modules share.

    Args:
        seen: modules to leave out; those that are yielded are added.
    """
    if module not in seen:
        seen.add(module)
        for part in module.children():
            yield from _parts_first(part, seen)
        yield module


class WindowTransfers(Protocol):
    """Transfers of windows of updated parameters."""

    def gather_window(self, window: Window) -> Transfer:
        """Gather a window of all ranks' partitions."""

    def place_window(self, window: Window, cells: Tensor) -> None:
        """Write a gathered window to its flat buffer."""


class Arrivals:
    """Gathers of updated parameters.

    Args:
        windows: in the order in which they travel.
        transfers: gathers and places a window.
        overlap: whether windows may overlap each other.
        ahead: whether a step ends before they have arrived; see Note [Updates under the forward].
        threads: whether a thread of the host may take them then, where there are no streams.
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
        self._queue = TransferQueue(overlap or ahead, side_streams=True, background=ahead and threads, owed=True)
        self._started: list[Started] = []
        self._reached: dict[Any, int] = {}  # stream, None without: number of the last window that it has waited for
        self._last_of: dict[int, int] = {}  # id of a parameter: number of the last window with elements of it
        self._reading = True
        self._hooks: list[Any] = []
        self._watched: list[nn.Module] = []
        if ahead:
            announce(self, whole=True)

    def start(self) -> None:
        """Gather all windows; wait for them unless they arrive by themselves."""
        self.drain()
        self._started.clear()
        self._reached.clear()
        for window in self._windows:
            transfer, arrive = self._transfers.gather_window(window), partial(self._transfers.place_window, window)
            if self.ahead:
                self._started.append(self._queue.start(transfer, arrive))
            else:
                self._queue.submit(transfer, arrive)
        if not self.ahead:
            self._queue.drain()

    @property
    def begun(self) -> bool:
        """Whether some stream may still have to wait for a window."""
        return bool(self._started)

    def wait_for(self, number: int) -> None:
        """Make the current stream wait until windows 0 to ``number`` have arrived."""
        stream = None if get_accelerator().is_synchronized_device() else get_accelerator().current_stream()
        if self._reached.get(stream, -1) >= number:
            return
        if number >= len(self._started):
            self.drain()
        else:
            self._queue.wait(self._started[number])  # they arrive in order
        self._reached[stream] = number

    def wait_for_those(self, params: Iterable[Any]) -> None:
        """Make the current stream wait until parameters have arrived, if these are read."""
        last = max((self._last_of.get(id(param), -1) for param in params), default=-1)
        if last >= 0 and self._reading:
            self.wait_for(last)

    def unread(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that goes over parameters and does not read them, so that nothing has to arrive for it.

        Args:
            method: of an object that may keep what is returned; it is held weakly.
        """
        found = weakref.WeakMethod(method)

        def called(*args: Any, **kwargs: Any) -> Any:
            bound = found()
            assert bound is not None
            self._reading = False
            try:
                return bound(*args, **kwargs)
            finally:
                self._reading = True

        return called

    def wait(self) -> None:
        """See ``wait_for_updates``."""
        self.drain()

    def drain(self) -> None:
        """Make the current stream wait until all windows have arrived."""
        if self._started:
            self._queue.drain()
            if get_accelerator().is_synchronized_device():  # else other streams have to wait as well
                self._started.clear()

    def watch(self, module: nn.Module, places: Mapping[int, int]) -> None:
        """Make the modules of a model wait for what they use.

        Args:
            module: the model.
            places: of its trained parameters, by their ids.
        """
        last = {place: number for number, window in enumerate(self._windows) for place in window.members}
        everything = BeforeUse(self, len(self._windows))
        parents = Counter(part for used in module.modules() for part in used.children())
        hooks: dict[int, BeforeUse] = {}
        for used in _parts_first(module, set()):
            own = list(used.parameters(recurse=False))
            # A layer that has been called may still be read uncalled: by a module that has parameters of its own, so
            # computes by itself, and may do so now this way, now that; or where another module has called it.
            read = [part for part in used.children() if (own or parents[part] > 1) and not list(part.children())]
            numbers = [last[places[id(p)]] for p in own if places.get(id(p)) in last]
            number = max([-1, *numbers, *(hooks[id(part)].last() for part in read)])
            parts = [hooks[id(part)] for part in used.children()]
            hook = hooks[id(used)] = BeforeUse(self, number, parts)
            if numbers or parts:
                self._hooks.append(used.register_forward_pre_hook(hook, prepend=True))
            self._hooks.append(used.register_state_dict_pre_hook(everything))
            self._hooks.append(used.register_load_state_dict_pre_hook(everything))
        # Layers of a pipeline may be functions of tied weights, which no module's forward tells of.
        if any(not isinstance(layer, nn.Module) for layer in getattr(module, "forward_funcs", ())):
            self._hooks.append(module.register_forward_pre_hook(everything, prepend=True))
        self._last_of = {id(p): last[places[id(p)]] for p in module.parameters() if places.get(id(p)) in last}
        for used in module.modules():
            params: Any = used.__dict__.get("_parameters")
            # Of a class of somebody else's, nothing is known.
            if type(params) in (dict, _WaitingParameters) and any(id(p) in self._last_of for p in params.values()):
                used.__dict__["_parameters"] = _WaitingParameters(params, self)
                self._watched.append(used)

    def drop(self) -> None:
        """Wait for what is on its way, and remove the hooks from the model."""
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
