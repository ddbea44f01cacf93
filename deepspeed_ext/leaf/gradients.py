# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Reduction of a leaf module's gradients once they are complete, for any inputs.

Note [The end of a leaf's backward]
    ZeRO-3 reduces the gradients of a leaf module when its backward is done, with zeros for unused parameters. It
    detects that by ``register_full_backward_hook``. If no positional input needs a gradient (token ids, a
    frozen embedding, keyword inputs), PyTorch calls that hook before there are gradients: zeros are reduced, and the
    later gradients crash (DeepSpeed 0.15.4 to 0.17.6 refused such modules; 0.19.8 does not).

    Here, all positional inputs of a call pass through one node of the autograd graph. Autograd runs nodes in the
    reverse order of their creation, so this node runs after all nodes of the call that can be reached.
    Keyword inputs are unchanged, because they may be containers that the module fills. If a call has no others,
    the gradient of each is hooked. The module is done when this was its last call in the running graph and no
    parameter will still get a gradient (for example, from a second output). If that never happens, the module is
    done at the end of the backward: before ZeRO's epilogue, in the order of the modules. All of this depends only on
    the running graph, which is the same on all ranks except for experts.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from types import NoneType
from typing import Any, Protocol, cast

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import count_used_parameters_in_backward
from deepspeed.runtime.zero import partitioned_param_coordinator
from deepspeed.runtime.zero.utils import apply_to_tensors_only
from deepspeed.utils import z3_leaf_parameter
from torch import Tensor, nn
from torch.autograd.graph import Node

from deepspeed_ext.config.keys import LEAF_BYTES, SECTION
from deepspeed_ext.deepspeed_types import LeafOptimizer, ZeroParameter
from deepspeed_ext.leaf.chunks import INCOMPLETE, Chunk, ChunkedModule, chunked_modules
from deepspeed_ext.leaf.modules import is_set_by_choice
from deepspeed_ext.leaf.windows import WindowedModule, WindowReducer, windowed_modules

_DELAYED = "paro_late_gradients"  # attribute of DeepSpeed's own optimizer: its ``DelayedGradients``


class LeafReducer(Protocol):
    """Reduces all gradients of a leaf module in one call; for DeepSpeed's optimizer, see ``DelayedGradients``."""

    @property
    def windows(self) -> WindowReducer:
        """Reduces windows of packed experts."""

    def reduce_leaf(self, params: Sequence[ZeroParameter]) -> None:
        """Put the complete gradients of a leaf module into buckets."""


class _Call:
    """One call of a module, while it is in an autograd graph."""

    def __init__(self, calls: "_Calls", node: Node) -> None:
        self.calls = calls
        self.node = weakref.ref(node)
        self.is_done = False


class _Context(torch.autograd.function.FunctionCtx):
    """Data of a call in the autograd graph."""

    call: _Call


class _Inputs(torch.autograd.Function):
    """Pass the positional inputs of a call through unchanged; its backward runs when the call's backward is done."""

    @staticmethod
    def forward(ctx: _Context, calls: "_Calls", *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = calls.begin(cast(Node, ctx))  # at run time the context is the node
        ctx.set_materialize_grads(False)  # inputs without a gradient get None, not zeros
        return tuple(tensor.detach() for tensor in tensors)  # new tensors, whose node is this call

    @staticmethod
    def backward(ctx: _Context, *gradients: Any) -> Any:
        ctx.call.is_done = True
        ctx.call.calls.end_call()
        return (None, *gradients)


class _Calls:
    """The calls of a module with positional inputs that need gradients. A leaf is notified when a backward ends."""

    def __init__(self, module: nn.Module, leaf: "_Leaf | None" = None) -> None:
        self._leaf = leaf
        self.latest_has_node = False  # whether the latest call is one of them
        self._calls: weakref.WeakSet[_Call] = weakref.WeakSet()
        self.hook = module.register_forward_pre_hook(self._before)

    def __deepcopy__(self, memo: object) -> "_Calls":
        return self  # hooks are copied with a model, but belong to its engine

    def begin(self, node: Node) -> _Call:
        """Record the call that this graph node represents."""
        call = _Call(self, node)
        self._calls.add(call)
        return call

    def end_call(self) -> None:
        """Called when the backward of a call ends."""
        if self._leaf is not None:
            self._leaf.end_positional_call()

    def count_remaining_calls(self) -> int:
        """Return the number of these calls that the running backward has not reached yet."""
        if torch._C._current_graph_task_id() == -1:
            return 0
        nodes = [call.node() for call in self._calls if not call.is_done]
        return sum(1 for node in nodes if node is not None and torch._C._will_engine_execute_node(node))

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        self.latest_has_node = False
        if not torch.is_grad_enabled():
            return None
        tensors: list[Tensor] = []
        apply_to_tensors_only(lambda tensor: tensors.append(tensor) if tensor.requires_grad else None, args)
        if not tensors:
            return None
        self.latest_has_node = True
        outputs = iter(_Inputs.apply(self, *tensors))
        return apply_to_tensors_only(lambda tensor: next(outputs) if tensor.requires_grad else tensor, args)


class _Leaf:
    """A leaf module and its trainable parameters."""

    def __init__(self, owner: "LeafGradients", module: nn.Module, params: Sequence[ZeroParameter]) -> None:
        self.owner = owner
        self.module = module
        self.params = list(params)
        self.is_delayed = False  # whether it is reduced at the end of the backward
        self._calls = _Calls(module, self)
        self.hooks = [self._calls.hook, module.register_forward_hook(self._after, with_kwargs=True)]

    def __deepcopy__(self, memo: object) -> "_Leaf":
        return self

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        """If no positional input of a call needs a gradient, hook its outputs and keyword inputs instead.

        Raises:
            TypeError: DeepSpeed finds no tensors in the output, so it would not gather a unit for the backward.
        """
        if is_set_by_choice(module) and not isinstance(output, (Tensor, tuple, list, dict, NoneType)):
            raise TypeError(
                f"{type(module).__name__} is fetched as one unit, so it must return a tensor, or a tuple, list, or "
                f"dictionary of tensors, but it returned a {type(output).__name__}. Set {SECTION}.{LEAF_BYTES} to 0."
            )
        if self._calls.latest_has_node or not torch.is_grad_enabled():
            return

        def begin(_: Tensor) -> None:
            self.is_delayed = True
            self.owner.begin_backward()

        def end(_: Tensor) -> None:
            if self.is_delayed and not self._awaits_gradients():
                self.is_delayed = False
                self.owner.reduce(self.params)
                self.owner.release(self.module)  # DeepSpeed's hook handles positional inputs only

        for tensor in _tensors(output):
            tensor.register_hook(begin)
        for tensor in _tensors(list(kwargs.values())):
            tensor.register_hook(end)

    def end_positional_call(self) -> None:
        """Reduce the gradients, or keep the parameters gathered until missing gradients exist."""
        if self._calls.count_remaining_calls():
            return
        if not self._awaits_gradients():
            self.owner.reduce(self.params)
            return
        self.is_delayed = True
        for entry in self.owner.entries(self.module):
            entry.ds_active_sub_modules.add(INCOMPLETE)  # or the coordinator would release it now

    def _awaits_gradients(self) -> bool:
        """Return whether the running backward will still compute a missing gradient."""
        return any(_awaits_gradient(param) for param in self.params if param.grad is None)

    def end_of_backward(self, in_buckets: set[int]) -> None:
        """Reduce delayed gradients, and those of parameters that were used without a call of the module.

        Args:
            in_buckets: ds_ids of parameters with gradients that are in a bucket already.
        """
        params = [param for param in self.params if param.ds_id not in in_buckets]
        if not self.is_delayed and all(param.grad is None for param in params):
            return
        self.is_delayed = False
        self.owner.reduce(params)
        incomplete = [entry for entry in self.owner.entries(self.module) if INCOMPLETE in entry.ds_active_sub_modules]
        for entry in incomplete:
            entry.ds_active_sub_modules.discard(INCOMPLETE)
            if not entry.ds_persist and not entry.ds_active_sub_modules:
                entry.partition()


def _tensors(nested: object) -> list[Tensor]:
    """Return the tensors that need gradients in nested lists, tuples and dictionaries."""
    if isinstance(nested, Tensor):
        return [nested] if nested.requires_grad else []
    if isinstance(nested, dict):
        nested = nested.values()
    elif not isinstance(nested, (list, tuple)):
        return []
    return [tensor for item in nested for tensor in _tensors(item)]


class LeafGradients:
    """Reduces the gradients of leaf modules, instead of ZeRO-3's own hooks. See Note [The end of a leaf's backward].

    Windows of experts pass their gradients to it (``ChunkReducer``, ``WindowHooks``).

    Args:
        optimizer: a stage-3 optimizer that has registered its hooks; hooks of leaf modules are removed.
    """

    def __init__(self, optimizer: LeafOptimizer, reducer: LeafReducer) -> None:
        self._optimizer, self._reducer = optimizer, reducer
        self.windows = reducer.windows
        for hook in optimizer._leaf_module_hooks:
            hook.remove()
        self._blocks = {block: _Calls(block.module) for block in chunked_modules(optimizer.module)}
        self._delayed_chunks: list[Chunk] = []  # reduced at the end of the backward
        experts: set[int] = set()
        self._trained_params: dict[Chunk, list[ZeroParameter]] = {}
        for block in self._blocks:
            block.reducer = self
            experts.update(id(expert) for chunk in block.chunks for expert in chunk.experts)
            for chunk in block.chunks:
                groups = (optimizer.leaf_parameters.get(expert, ()) for expert in chunk.experts)
                self._trained_params[chunk] = [param for params in groups for param in params]
        self._windowed = windowed_modules(optimizer.module)
        experts.update(id(windowed.module) for windowed in self._windowed)
        for windowed in self._windowed:
            windowed.hooks = self
        leaves = {module: params for module, params in optimizer.leaf_parameters.items() if id(module) not in experts}
        self._leaves = [_Leaf(self, module, params) for module, params in leaves.items()]
        optimizer._leaf_module_hooks = [hook for leaf in self._leaves for hook in leaf.hooks]
        optimizer._leaf_module_hooks += [calls.hook for calls in self._blocks.values()]
        self._other_params = [
            param
            for group in optimizer.fp16_groups
            for param in group
            if param.requires_grad and not z3_leaf_parameter(param)
        ]

    def entries(self, module: nn.Module) -> list[Any]:
        """Return the parameters and units that the coordinator fetches for a module."""
        return list(partitioned_param_coordinator.iter_params(module, recurse=True))

    def reduce(self, params: Sequence[ZeroParameter]) -> None:
        """Pass a module's gradients to the optimizer, as a parameter's hook does."""
        refresh = self._begin_hook()
        self._reducer.reduce_leaf(params)
        self._end_hook(refresh)

    def reduce_window(
        self, module: WindowedModule, number: int, gradients: Sequence[Tensor | None], last: bool
    ) -> None:
        """Pass a window's gradients to the optimizer, as a parameter's hook does; see ``WindowHooks``."""
        refresh = self._begin_hook()
        self.windows.reduce_window(module, number, gradients, last)
        self._end_hook(refresh)

    def _begin_hook(self) -> bool:
        """Begin a hook as DeepSpeed's do; return whether to count the expected hooks anew."""
        refresh = self._optimizer.should_refresh_expected_hook_count()
        self._optimizer.reenter_backward_if_needed()
        return refresh

    def _end_hook(self, refresh: bool) -> None:
        expected = self._optimizer._max_expected_hooks_seen
        if refresh and torch._C._current_graph_task_id() != -1:
            expected = count_used_parameters_in_backward(self._other_params) + len(self._leaves)
        self._optimizer.update_hook_state_and_maybe_run_epilogue(expected)

    def begin_backward(self) -> None:
        """Queue DeepSpeed's post-backward callback, even if no other hook does."""
        self._optimizer.reenter_backward_if_needed()
        self._optimizer._backward_hook_state.queue_post_backward_callback()

    def is_last_pass(self, block: ChunkedModule) -> bool:
        """Return whether the running backward, which has just entered a block, will not enter it again."""
        return self._blocks[block].count_remaining_calls() <= 1

    def release(self, module: nn.Module) -> None:
        """Release a module that DeepSpeed would keep, because its hook handles positional inputs only."""
        self._optimizer.parameter_offload.post_sub_module_backward_function(module)

    def reduce_chunk(self, chunk: Chunk, last: bool) -> None:
        """Reduce a window's experts: now in the last pass of their module, otherwise at the end of the backward."""
        params = self._trained_params[chunk]
        if not last:
            self._delayed_chunks.append(chunk)
        elif any(_awaits_gradient(param) for param in params if param.grad is None):
            raise RuntimeError(
                "Autograd does not run the experts of a module that is fetched in windows from last to first: some of "
                "them will run backward after their window has ended. Raise zero_optimization.stage3_leaf_bytes until "
                "the module is one unit."
            )
        elif params:
            self.reduce(params)

    def drop_chunk_gradients(self) -> None:
        """Drop gradients of listed experts after an interrupted backward.

        Gradients that are in a bucket already are kept; then the next backward fails, as in ZeRO-3 with leaf modules.
        """
        self._delayed_chunks.clear()
        in_buckets = _in_buckets(self._optimizer)
        for params in self._trained_params.values():
            for param in params:
                if param.ds_id not in in_buckets:
                    param.grad = None

    def end_open_passes(self) -> None:
        """End module passes that are still open, because the inputs need no gradient.

        Called before DeepSpeed clears its list of active modules. ``end_of_backward`` does not suffice: in
        ``coalesce_grad_reduction`` a backward has no epilogue that reduces.
        """
        for block in self._blocks:
            block.finish()
        for windowed in self._windowed:
            self.windows.end_windows(windowed)

    def end_of_backward(self) -> None:
        """Reduce all delayed gradients, in the same order on all ranks."""
        self.end_open_passes()
        if self._optimizer._coalesce_grad_reduction or not (self._leaves or self._delayed_chunks):
            return
        in_buckets = _in_buckets(self._optimizer)
        chunks = {chunk: None for chunk in self._delayed_chunks}
        self._delayed_chunks.clear()
        for chunk in chunks:
            # Gradients in a bucket would be reduced twice.
            self.reduce([param for param in self._trained_params[chunk] if param.ds_id not in in_buckets])
        for leaf in self._leaves:
            leaf.end_of_backward(in_buckets)


class DelayedGradients:
    """Delays the reduction of leaf modules whose gradients DeepSpeed's own stage 3 would reduce before they exist.

    Such a module is reduced at the end of the backward; DeepSpeed alone would crash. All other modules keep
    DeepSpeed's hooks.

    Args:
        optimizer: DeepSpeed's optimizer, which has registered its hooks.
    """

    def __init__(self, optimizer: LeafOptimizer) -> None:
        self._optimizer = optimizer
        self._delayed: dict[nn.Module, list[ZeroParameter]] = {}
        self._reducing_backward: dict[nn.Module, int] = {}  # backward in which DeepSpeed's hook has reduced it
        leaves = optimizer.leaf_parameters.items()
        for hook, (_, params) in zip(optimizer._leaf_module_hooks, leaves, strict=True):
            hooks = hook.hooks_dict_ref()
            hooks[hook.id] = self._hook(hooks[hook.id], params)

    def _hook(self, reduce: Callable[..., None], params: Sequence[ZeroParameter]) -> Callable[..., None]:
        """Return a hook that reduces, or delays that if no positional input needs a gradient."""

        # A function: copies of the model share it. They would copy an object, and the parameters in it.
        def after_backward(module: nn.Module, input_gradients: Sequence[Tensor | None], gradients: object) -> None:
            self._after_backward(reduce, params, module, input_gradients, gradients)

        return after_backward

    def _after_backward(
        self,
        reduce: Callable[..., None],
        params: Sequence[ZeroParameter],
        module: nn.Module,
        input_gradients: Sequence[Tensor | None],
        gradients: object,
    ) -> None:
        """Reduce or delay. Called before the module's backward if no positional input needs a gradient."""
        optimizer, backward = self._optimizer, torch._C._current_graph_task_id()
        if optimizer._coalesce_grad_reduction or any(gradient is not None for gradient in input_gradients):
            self._reducing_backward[module] = backward
            reduce(module, input_gradients, gradients)
            return
        was_reduced = self._reducing_backward.get(module) == backward
        self._delayed[module] = [param for param in params if not was_reduced or param.grad is not None]
        setattr(optimizer, _DELAYED, self)
        optimizer.reenter_backward_if_needed()
        optimizer._backward_hook_state.queue_post_backward_callback()

    def end_of_backward(self) -> None:
        """Reduce the delayed modules, in the order of their backwards."""
        in_buckets = _in_buckets(self._optimizer)
        delayed = [param for params in self._delayed.values() for param in params if param.ds_id not in in_buckets]
        self._delayed.clear()
        for param in zero_gradients(delayed):
            self._optimizer.reduce_ready_partitions_and_remove_grads(param)


def _in_buckets(optimizer: LeafOptimizer) -> set[int]:
    """Return the ds_ids of parameters with gradients that are in a bucket already."""
    return {param.ds_id for bucket in optimizer.ipg_buckets.values() for param in bucket.params}


def reduce_delayed_gradients(optimizer: LeafOptimizer) -> None:
    """Reduce leaf modules that ``DelayedGradients`` has delayed. Called before the epilogue of DeepSpeed's stage 3."""
    delayed = getattr(optimizer, _DELAYED, None)
    if delayed is not None:
        delayed.end_of_backward()


def zero_gradients(params: Sequence[ZeroParameter]) -> Iterator[ZeroParameter]:
    """Yield the parameters, after setting missing gradients to zeros, which take no memory."""
    zeros: dict[torch.dtype, Tensor] = {}
    for param in params:
        if param.grad is None:
            zero = zeros.get(param.dtype)
            if zero is None:
                zero = torch.zeros((), dtype=param.dtype, device=get_accelerator().current_device_name())
                zeros[param.dtype] = zero
            zeros_like = zero.expand(param.ds_shape)
            data, param.data = param.data, zeros_like  # a released parameter's data has another shape
            param.grad = zeros_like
            param.data = data
        yield param


def _awaits_gradient(param: nn.Parameter) -> bool:
    """Return whether the running backward will compute a gradient of the parameter."""
    if not param.requires_grad or torch._C._current_graph_task_id() == -1:
        return False
    with torch.enable_grad():  # otherwise the parameter has no edge
        node = torch.autograd.graph.get_gradient_edge(param).node
    return bool(torch._C._will_engine_execute_node(node))
