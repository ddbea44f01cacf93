# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Experts that are packed into 3-D parameters, fetched in windows of full experts.

Note [Windows]
    The output of a mixture with packed experts (transformers 5) is the sum of the outputs of each expert for its
    tokens. So a pass of the module is a loop over windows of experts. For each window, a substitute of the
    module, with the window's parameters only, runs the module's own forward on the tokens of these experts, with any
    selected implementation. While one window computes, the next is gathered. The forward runs the windows from
    first to last and the backward from last to first. All ranks run all windows, used or not, because ranks may use
    different experts.

    To autograd, a pass is one node. Inside it each window has its own graph. The storage of the window's weights is
    freed after the forward; the backward of the window fetches them again. So nothing depends on the order in which
    autograd would run experts. Under a non-reentrant checkpoint, tensors saved by these graphs would have to be
    restored from the checkpoint, window by window. There, the node saves its inputs only, and the backward of a window
    runs its forward again.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

_WINDOWS = "paro_windows"  # attribute of a module: its ``WindowedModule``
_PARALLEL = "_is_expert_parallel"


class Fetch(Protocol):
    """A window that is being gathered."""

    def wait(self, weights: Sequence[Tensor]) -> None:
        """Wait for the window, and write it to these weights, each (experts of the window, ...)."""

    def release(self) -> None:
        """Called when the window is no longer in use."""


class WindowFetcher(Protocol):
    """Gathers windows out of the shards of packed parameters."""

    def begin_pass(self, module: "WindowedModule") -> None:
        """Prepare for a forward or backward of a module."""

    def end_pass(self, module: "WindowedModule") -> None:
        """Free memory that a pass has used."""

    def fetch(self, module: "WindowedModule", number: int) -> Fetch:
        """Start to gather a window."""


class WindowReducer(Protocol):
    """Reduces the gradients of windows."""

    def reduce_window(
        self, module: "WindowedModule", number: int, gradients: Sequence[Tensor | None], last: bool
    ) -> None:
        """Reduce the gradients of a window: one for each parameter of the module, None for an unused parameter.

        The backward runs window 0 last. ``last``: whether the running backward will not enter the module again.
        """

    def end_windows(self, module: "WindowedModule") -> None:
        """Reduce, at the end of a backward, gradients of windows that wait for a further pass of the module."""

    def drop_window_gradients(self, module: "WindowedModule") -> None:
        """Drop gradients of an interrupted backward."""


class WindowHooks(Protocol):
    """Keeps DeepSpeed's records of a backward while windows are reduced."""

    windows: WindowReducer

    def begin_backward(self) -> None:
        """Called when the backward of a module begins."""

    def reduce_window(
        self, module: "WindowedModule", number: int, gradients: Sequence[Tensor | None], last: bool
    ) -> None:
        """Reduce the gradients of a window as a hook of its module; see ``WindowReducer``."""


@dataclass(eq=False)
class _WindowState:
    """The data of a window that a pass keeps for its backward."""

    tokens: Tensor  # 1D, int64: index of the token of each assignment to an expert
    assignments: Tensor  # 1D, int64: flat index of each assignment in (tokens, k)
    experts: Tensor  # (assignments, 1), int64: the expert's number in the window
    weights: list[Tensor] = field(default_factory=list)  # without their storage between fetches
    hidden: Tensor | None = None
    routing_weights: Tensor | None = None
    output: Tensor | None = None  # with its graph; None if no token chose these experts, or nothing is kept


class _Context(torch.autograd.function.FunctionCtx):
    """Data of a pass in the autograd graph."""

    windows: "WindowedModule"
    states: list[_WindowState] | None
    is_done: bool
    cast: tuple[str, bool, torch.dtype]
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class _Pass(torch.autograd.Function):
    """One pass of a windowed module; see Note [Windows]."""

    @staticmethod
    def forward(
        ctx: Any,
        windows: "WindowedModule",
        dummy: Tensor,
        hidden: Tensor,
        expert_index: Tensor,
        routing_weights: Tensor,
    ) -> Tensor:
        ctx.windows, ctx.is_done = windows, False
        ctx.save_for_backward(hidden, expert_index, routing_weights)
        device = hidden.device.type
        ctx.cast = device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        # With hooks for saved tensors, as under a non-reentrant checkpoint, only inputs are saved.
        keeps_graphs = torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        output_sum, states = windows.run(hidden, expert_index, routing_weights, keeps_graphs)
        ctx.states = states if keeps_graphs else None
        windows.passes.add(ctx)
        return output_sum

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden, expert_index, routing_weights = ctx.saved_tensors
        ctx.is_done = True
        with torch.autocast(ctx.cast[0], ctx.cast[2], ctx.cast[1], cache_enabled=False):
            states, ctx.states = ctx.states, None
            needed = ctx.needs_input_grad[2], ctx.needs_input_grad[4]
            input_grads = ctx.windows.run_backward(
                gradient, hidden, expert_index, routing_weights, states, needs_grads=needed
            )
        return None, None, input_grads[0], None, input_grads[1]


class WindowedModule:
    """A module with packed experts that are fetched in windows. See Note [Windows].

    Args:
        module: its own parameters are the packed experts. Its forward takes hidden states (tokens, width), the experts
            of each token (tokens, k), and their routing weights (tokens, k).
        windows: the experts of each window, in order; together all experts.

    Attributes:
        params: the packed parameters.
        fetcher: set with the parameters' shards.
        hooks: set with an optimizer; None without one.
    """

    fetcher: WindowFetcher
    hooks: WindowHooks | None = None

    def __init__(self, module: nn.Module, windows: Sequence[Sequence[int]]) -> None:
        self.module = module
        self.windows = [tuple(window) for window in windows]
        self.names = [name for name, _ in module.named_parameters(recurse=False)]
        # Stored, because reading a module's parameter during a forward would make ZeRO-3 gather it.
        self.params: list[Any] = list(module.parameters(recurse=False))
        self.passes: weakref.WeakSet[Any] = weakref.WeakSet()
        experts = sum(len(window) for window in self.windows)
        position_of_expert = {e: (w, at) for w, window in enumerate(self.windows) for at, e in enumerate(window)}
        # One column per expert, and a last one for assignments to no expert of this module.
        self._table = torch.tensor(
            [position_of_expert.get(e, (len(self.windows), 0)) for e in range(experts + 1)]
        ).T.contiguous()

    def __deepcopy__(self, memo: object) -> "WindowedModule":
        return self  # belongs to the engine, as hooks do

    def __call__(self, hidden_states: Tensor, expert_index: Tensor, routing_weights: Tensor) -> Tensor:
        """Run the module.

        Raises:
            ValueError: an argument has an unexpected shape.
        """
        if hidden_states.dim() != 2 or expert_index.dim() != 2 or expert_index.shape != routing_weights.shape:
            raise ValueError(
                f"{type(self.module).__name__} is fetched in windows of experts, which needs hidden states of shape "
                f"(tokens, width), and expert indices and routing weights of shape (tokens, k); got "
                f"{tuple(hidden_states.shape)}, {tuple(expert_index.shape)} and {tuple(routing_weights.shape)}. Raise "
                f"zero_optimization.stage3_leaf_bytes until the module fits."
            )
        trained = any(param.requires_grad for param in self.params)
        if not torch.is_grad_enabled() or not (
            trained or hidden_states.requires_grad or routing_weights.requires_grad
        ):
            with torch.no_grad():
                return self.run(hidden_states, expert_index, routing_weights, False)[0]
        dummy = torch.empty(0, requires_grad=trained)  # makes autograd call the backward if only weights need it
        return cast(Tensor, _Pass.apply(self, dummy, hidden_states, expert_index, routing_weights))

    def run(
        self, hidden: Tensor, expert_index: Tensor, routing_weights: Tensor, keeps_graphs: bool
    ) -> tuple[Tensor, list[_WindowState]]:
        """Return the module's output, and the windows; with ``keeps_graphs``, with their graphs for the backward."""
        output_sum = torch.zeros_like(hidden, requires_grad=False)
        states = self._make_states(expert_index)
        for _, state in self._in_order(states, forward=True):
            if len(state.tokens):
                with torch.set_grad_enabled(keeps_graphs):
                    output = self._compute(state, hidden, routing_weights, keeps_graphs)
                output_sum.index_add_(0, state.tokens, output.detach().to(output_sum.dtype))
            self._free_weights(state)
        return output_sum, states

    def run_backward(
        self,
        gradient: Tensor,
        hidden: Tensor,
        expert_index: Tensor,
        routing_weights: Tensor,
        states: list[_WindowState] | None,
        *,
        needs_grads: tuple[bool, bool],
    ) -> list[Tensor | None]:
        """Run the windows backward and reduce their gradients; return the gradients of hidden states and shares."""
        assert self.hooks is not None
        self.hooks.begin_backward()
        recompute = states is None
        states = self._make_states(expert_index) if states is None else states
        input_grads = [
            torch.zeros_like(tensor) if needed else None
            for tensor, needed in zip((hidden, routing_weights), needs_grads, strict=True)
        ]
        last = not self._runs_again()
        for number, state in self._in_order(states, forward=False):
            gradients: list[Tensor | None] = [None] * len(state.weights)
            if len(state.tokens):
                if recompute:
                    with torch.enable_grad():
                        self._compute(
                            state,
                            hidden.requires_grad_(needs_grads[0]),
                            routing_weights.requires_grad_(needs_grads[1]),
                            True,
                        )
                gradients = self._differentiate(state, gradient, input_grads)
            self._free_weights(state)
            state.weights.clear()
            if any(param.requires_grad for param in self.params):
                self.hooks.reduce_window(self, number, gradients, last)
        return input_grads

    def drop_gradients(self) -> None:
        """Drop gradients of an interrupted backward. Called when a new forward of the model begins."""
        if self.hooks is not None:
            self.hooks.windows.drop_window_gradients(self)

    def _differentiate(
        self, state: _WindowState, gradient: Tensor, input_grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Return the gradients of a window's weights; add the gradients of its inputs to ``input_grads``."""
        assert state.output is not None and state.hidden is not None and state.routing_weights is not None
        inputs = [state.hidden, state.routing_weights, *state.weights]
        differentiable = [tensor for tensor in inputs if tensor.requires_grad]
        grads = iter(torch.autograd.grad(state.output, differentiable, gradient[state.tokens], allow_unused=True))
        state.output = None  # frees the window's graph
        results = [next(grads) if tensor.requires_grad else None for tensor in inputs]
        if input_grads[0] is not None and results[0] is not None:
            input_grads[0].index_add_(0, state.tokens, results[0])
        if input_grads[1] is not None and results[1] is not None:
            input_grads[1].view(-1)[state.assignments] = results[1].view(-1)
        state.hidden = state.routing_weights = None
        return results[2:]

    def _compute(self, state: _WindowState, hidden: Tensor, routing_weights: Tensor, keeps_graphs: bool) -> Tensor:
        """Run the module's forward on the tokens of a window."""
        state.hidden = hidden.detach()[state.tokens].requires_grad_(keeps_graphs and hidden.requires_grad)
        state.routing_weights = (
            routing_weights.detach()
            .reshape(-1)[state.assignments, None]
            .requires_grad_(keeps_graphs and routing_weights.requires_grad)
        )
        substitute = object.__new__(type(self.module))
        substitute.__dict__.update(self.module.__dict__)
        for attribute in ("forward", _WINDOWS):
            substitute.__dict__.pop(attribute, None)
        substitute.__dict__["_parameters"] = dict(zip(self.names, state.weights, strict=True))
        substitute.__dict__["num_experts"] = len(state.weights[0])
        if _PARALLEL in substitute.__dict__:
            substitute.__dict__[_PARALLEL] = False  # assignments to no expert here have been removed already
        # Disable outer hooks: tensors that they save cannot be restored window by window.
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            output: Tensor = type(self.module).forward(substitute, state.hidden, state.experts, state.routing_weights)
        if keeps_graphs and output.requires_grad:
            state.output = output
        return output

    def _in_order(self, states: Sequence[_WindowState], forward: bool) -> Any:
        """Yield each window with its weights, while the next one is gathered."""
        numbers = list(range(len(states)))[:: 1 if forward else -1]
        self.fetcher.begin_pass(self)
        try:
            next_fetch: Fetch | None = self.fetcher.fetch(self, numbers[0])
            for position, number in enumerate(numbers):
                current_fetch, next_fetch = cast(Fetch, next_fetch), None
                if position + 1 < len(numbers):
                    next_fetch = self.fetcher.fetch(self, numbers[position + 1])
                self._allocate_weights(states[number], number)
                current_fetch.wait([weight.data for weight in states[number].weights])
                yield number, states[number]
                current_fetch.release()
        finally:
            self.fetcher.end_pass(self)

    def _allocate_weights(self, state: _WindowState, number: int) -> None:
        """Allocate storage for a window's weights."""
        if state.weights:  # the same tensors, because the forward's graph references them
            for weight in state.weights:
                weight.untyped_storage().resize_(weight.numel() * weight.element_size())
            return
        for param in self.params:
            shape = (len(self.windows[number]), *getattr(param, "ds_shape", param.shape)[1:])
            weight = torch.empty(shape, dtype=param.dtype, device=state.tokens.device)
            state.weights.append(weight.requires_grad_(param.requires_grad))

    @staticmethod
    def _free_weights(state: _WindowState) -> None:
        # Only the storage: the graph references the tensors until its backward.
        for weight in state.weights:
            weight.untyped_storage().resize_(0)

    def _make_states(self, expert_index: Tensor) -> list[_WindowState]:
        """Return the windows, each with the tokens of its experts."""
        if self._table.device != expert_index.device:
            self._table = self._table.to(expert_index.device)
        flat = expert_index.reshape(-1).clamp(0, self._table.shape[1] - 1)
        window, expert = self._table[:, flat]
        order = torch.argsort(window, stable=True)
        counts = torch.bincount(window, minlength=len(self.windows) + 1).tolist()[: len(self.windows)]
        states, start = [], 0
        for count in counts:
            assigned = order[start : start + count]
            states.append(_WindowState(assigned // expert_index.shape[1], assigned, expert[assigned, None]))
            start += count
        return states

    def _runs_again(self) -> bool:
        """Return whether the running backward will enter the module again."""
        nodes = [cast(Node, context) for context in self.passes if not context.is_done]
        return any(torch._C._will_engine_execute_node(node) for node in nodes)


class _Forward:
    """Replaces the forward of a windowed module. In a copy of the module, it becomes the copy's plain forward."""

    def __init__(self, windowed: WindowedModule) -> None:
        self._windowed = windowed
        self._names = list(inspect.signature(type(windowed.module).forward).parameters)[1:]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        return self._windowed(*(arguments[name] for name in self._names))

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Tensor]:
        copied_module = memo.get(id(self._windowed.module))  # a module's attributes are copied after it is in the memo
        return self if copied_module is None else functools.partial(type(copied_module).forward, copied_module)


def experts_in(module: nn.Module) -> int:
    """Return a module's ``num_experts``; 0 if it has none."""
    experts = getattr(module, "num_experts", 0)
    return experts if isinstance(experts, int) else 0


def why_no_windows(module: nn.Module) -> str | None:
    """Return the reason why packed experts cannot be fetched in windows; "" if they can, None without any."""
    params = list(module.parameters(recurse=False))
    shapes = [getattr(param, "ds_shape", param.shape) for param in params]
    experts = experts_in(module)
    if experts < 2 or not any(len(s) == 3 and s[0] == experts for s in shapes):
        return None
    if any(len(shape) not in (2, 3) or shape[0] != experts for shape in shapes):
        return f"not every parameter has a first dimension of its {experts} experts"
    if len({(param.dtype, param.device) for param in params}) > 1:
        return "its parameters have several dtypes or devices"
    if not all(getattr(param, "allreduce", True) for param in params):
        return "its experts are already sharded over ranks"
    if any(True for child in module.children() for _ in child.parameters()):
        return "its submodules have parameters, too"
    if "forward" in module.__dict__:
        return "its forward has been replaced"
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    is_supported = len(names) == 3 and names[0] == "hidden_states" and "ind" in names[1] and "weight" in names[2]
    if not is_supported:
        return f"its forward takes ({', '.join(names)}), not hidden states, indices of experts and their weights"
    return ""


def windows_of(experts: int, bytes_each: int, budget: int) -> list[list[int]]:
    """Return windows of experts that fit the budget; none if no expert fits.

    Windows are strided, so that each has experts in the chunks of all ranks.
    """
    most_experts = budget // bytes_each
    count = -(-experts // most_experts) if most_experts else 0
    return [list(range(number, experts, count)) for number in range(count)]


def set_windows(module: nn.Module, windows: Sequence[Sequence[int]]) -> None:
    """Fetch a module's packed experts in these windows from now on."""
    module.__dict__[_WINDOWS] = windowed = WindowedModule(module, windows)
    module.__dict__["forward"] = _Forward(windowed)


def unset_windows(module: nn.Module) -> bool:
    """Undo ``set_windows``, and return whether there was anything to undo."""
    if module.__dict__.pop(_WINDOWS, None) is None:
        return False
    module.__dict__.pop("forward", None)
    return True


def windowed_modules(model: nn.Module) -> list[WindowedModule]:
    """Return a model's modules with packed experts in windows, in order."""
    return [module.__dict__[_WINDOWS] for module in model.modules() if _WINDOWS in module.__dict__]
