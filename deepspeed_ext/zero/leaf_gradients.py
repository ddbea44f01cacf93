# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""When the gradients of a leaf module are complete, whatever its inputs are.

Note [The end of a leaf's backward]
    ZeRO-3 reduces the gradients of a leaf module, zeros for those that were not used, when its backward is done. It
    takes that from ``register_full_backward_hook``, which PyTorch calls too early, before there are gradients, where
    no positional input needs a gradient: token ids, a frozen embedding, inputs by keyword. What is reduced then are
    zeros, and the gradients that come later crash (0.15.4 to 0.17.6 refused such modules; 0.19.8 does not).

    Here a call of the module is over when all inputs that need gradients have got theirs, keyword arguments included;
    with its last call the module is. Autograd runs what was recorded last first, so nothing of the module is left by
    then; if something is (a second output whose gradient comes later), the module waits. A module that waits, and
    one without any such input, is done when the backward is: before ZeRO's epilogue, in the order of the modules,
    which is the same on all ranks.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import count_used_parameters_in_backward
from deepspeed.runtime.zero.utils import apply_to_tensors_only
from deepspeed.utils import z3_leaf_parameter
from torch import Tensor, nn

from deepspeed_ext.zero.chunks import Block, Chunk, blocks_of

_ATTRIBUTE = "paro_leaf_gradients"  # of the optimizer
_WAITS = -1  # a number that no module has, in a parameter's set of active modules


class _Call:
    """One call of a leaf module."""

    def __init__(self, leaf: "_Leaf") -> None:
        self.leaf = leaf
        self.inputs = 0  # that need gradients ...
        self.positional = False  # ... and whether one of them is seen by DeepSpeed, too
        self.seen = False  # whether its backward has begun


class _Input(torch.autograd.Function):
    """An input of a leaf module, unchanged; its gradient is the module's last."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, call: _Call) -> Tensor:
        ctx.call = call
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        call = ctx.call
        call.inputs -= 1
        if call.inputs == 0:
            call.leaf.call_is_over(call)
        return (*gradients, None)


class _Leaf:
    """A leaf module and its trainable parameters."""

    def __init__(self, owner: "LeafGradients", module: nn.Module, params: Sequence[Any]) -> None:
        self.owner = owner
        self.module = module
        self.params = list(params)
        self.waiting = False  # for the end of the backward
        self._open: weakref.WeakSet[_Call] = weakref.WeakSet()  # calls that autograd will come back to
        self.hooks = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after),
        ]
        self._call: _Call | None = None

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._call = None
        if not torch.is_grad_enabled():
            return None
        self._call = call = _Call(self)

        def watch(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            call.inputs += 1
            return _Input.apply(tensor, call)

        args = apply_to_tensors_only(watch, args)
        call.positional = call.inputs > 0
        kwargs = apply_to_tensors_only(watch, kwargs)
        if call.inputs:
            self._open.add(call)
        return args, kwargs

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        call, self._call = self._call, None
        if call is None or call.inputs:
            return

        def begin(_: Tensor) -> None:
            if not call.seen:
                call.seen = self.waiting = True
                self.owner.backward_has_begun()

        def watch(tensor: Tensor) -> Tensor:
            if tensor.requires_grad:
                tensor.register_hook(begin)
            return tensor

        apply_to_tensors_only(watch, output)

    def call_is_over(self, call: _Call) -> None:
        """All inputs have their gradients: the parameters have theirs, or the module waits."""
        self._open.discard(call)
        if self._open:
            pass
        elif any(_comes_later(param) for param in self.params if param.grad is None):
            self.waiting = True
            for entry in self.owner.entries(self.module):
                entry.ds_active_sub_modules.add(_WAITS)
        else:
            self.owner.reduce(self.params)
        if not call.positional:
            self.owner.release(self.module)

    def end_of_backward(self, in_buckets: set[int]) -> None:
        """Reduce what has waited; also what has come in without any call of the module.

        Args:
            in_buckets: ds_ids of parameters whose gradients have been handed over, and not moved yet.
        """
        left = [param for param in self.params if param.ds_id not in in_buckets]
        if not self.waiting and all(param.grad is None for param in left):
            return
        self.waiting = False
        self.owner.reduce(left)
        held = [entry for entry in self.owner.entries(self.module) if _WAITS in entry.ds_active_sub_modules]
        for entry in held:
            entry.ds_active_sub_modules.discard(_WAITS)
            if not entry.ds_persist and not entry.ds_active_sub_modules:
                entry.partition()


class LeafGradients:
    """Reduces the gradients of leaf modules, in the place of ZeRO-3's own hooks. See Note [The end of a leaf's
    backward].

    Args:
        optimizer: a stage-3 optimizer, whose hooks exist; those of leaf modules are removed.
        entries: what the coordinator fetches for a module.
    """

    def __init__(self, optimizer: Any, entries: Callable[[nn.Module], Sequence[Any]]) -> None:
        self._optimizer = optimizer
        self.entries = entries
        for hook in optimizer._leaf_module_hooks:
            hook.remove()
        self._blocks = blocks_of(optimizer.module)
        self._waiting: list[Chunk] = []  # for the end of the backward
        experts: set[int] = set()
        for block in self._blocks:
            block.reduce = functools.partial(self._reduce_chunk, block)
            experts.update(id(expert) for chunk in block.chunks for expert in chunk.experts)
        leaves = {module: params for module, params in optimizer.leaf_parameters.items() if id(module) not in experts}
        self._leaves = [_Leaf(self, module, params) for module, params in leaves.items()]
        optimizer._leaf_module_hooks = [hook for leaf in self._leaves for hook in leaf.hooks]
        self._others = [
            param
            for group in optimizer.fp16_groups
            for param in group
            if param.requires_grad and not z3_leaf_parameter(param)
        ]

    def reduce(self, params: Sequence[Any]) -> None:
        """Hand the gradients of a module over, as the hook of a parameter does."""
        optimizer = self._optimizer
        refresh = optimizer.should_refresh_expected_hook_count()
        optimizer.reenter_backward_if_needed()
        optimizer.reduce_leaf(params)
        expected = optimizer._max_expected_hooks_seen
        if refresh and torch._C._current_graph_task_id() != -1:
            expected = count_used_parameters_in_backward(self._others) + len(self._leaves)
        optimizer.update_hook_state_and_maybe_run_epilogue(expected)

    def backward_has_begun(self) -> None:
        """A module that waits for the end of the backward may be the only one that sees it."""
        self._optimizer.reenter_backward_if_needed()
        self._optimizer._backward_hook_state.queue_post_backward_callback()

    def release(self, module: nn.Module) -> None:
        """Release a module where DeepSpeed, which looks at positional inputs only, would not."""
        self._optimizer.parameter_offload.post_sub_module_backward_function(module)

    def _reduce_chunk(self, block: Block, chunk: Chunk) -> None:
        """Experts have been left in a backward; if it is not the last one of their block, they wait for the end."""
        if getattr(block.module, "applied_pre_backward_ref_cnt", 0):  # DeepSpeed's count; the same on all ranks
            self._waiting.append(chunk)
            return
        params = [param for _, param in chunk.named_parameters() if param.requires_grad]
        if any(_comes_later(param) for param in params if param.grad is None):
            raise RuntimeError(
                "Experts of a module that is fetched in chunks are still to run backward when their chunk is left: "
                "autograd does not run them last to first. Raise zero_optimization.stage3_leaf_bytes until the module "
                "is one unit."
            )
        if params:
            self.reduce(params)

    def end_of_backward(self) -> None:
        """Reduce all that waits; the same modules on all ranks, in one order."""
        for block in self._blocks:
            block.finish()
        if self._optimizer._coalesce_grad_reduction or not (self._leaves or self._waiting):
            return
        in_buckets = {param.ds_id for bucket in self._optimizer.ipg_buckets.values() for param in bucket.params}
        chunks = {chunk: None for chunk in self._waiting}
        self._waiting.clear()
        for chunk in chunks:
            params = [param for _, param in chunk.named_parameters() if param.requires_grad]
            self.reduce([param for param in params if param.ds_id not in in_buckets])
        for leaf in self._leaves:
            leaf.end_of_backward(in_buckets)


def watch_leaves(optimizer: Any) -> None:
    """Have a stage-3 optimizer's leaf modules watched by ours."""
    from deepspeed.runtime.zero import partitioned_param_coordinator

    def entries(module: nn.Module) -> list[Any]:
        return list(partitioned_param_coordinator.iter_params(module, recurse=True))

    if not hasattr(optimizer, "reduce_leaf"):
        optimizer.reduce_leaf = lambda params: _reduce_one_by_one(optimizer, params)
    setattr(optimizer, _ATTRIBUTE, LeafGradients(optimizer, entries))


def end_of_backward(optimizer: Any) -> None:
    """Before the epilogue of a stage-3 optimizer."""
    watcher = getattr(optimizer, _ATTRIBUTE, None)
    if watcher is not None:
        watcher.end_of_backward()


def zero_gradients(params: Sequence[Any]) -> Iterator[Any]:
    """The parameters, those without a gradient with one that is zero and takes no memory."""
    zeros: dict[Any, Tensor] = {}
    for param in params:
        if param.grad is None:
            zero = zeros.get(param.dtype)
            if zero is None:
                zero = zeros[param.dtype] = torch.zeros(
                    (), dtype=param.dtype, device=get_accelerator().current_device_name()
                )
            whole = zero.expand(param.ds_shape)
            if param.data.shape == whole.shape:
                param.grad = whole
            else:  # released already
                data, param.data = param.data, whole
                param.grad = whole
                param.data = data
        yield param


def _reduce_one_by_one(optimizer: Any, params: Sequence[Any]) -> None:
    for param in zero_gradients(params):
        param.grad = param.grad.contiguous()
        optimizer.reduce_ready_partitions_and_remove_grads(param)


def _comes_later(param: Any) -> bool:
    """Whether the backward that runs now will give the parameter a gradient."""
    if torch._C._current_graph_task_id() == -1:
        return False
    with torch.enable_grad():
        node = torch.autograd.graph.get_gradient_edge(param).node
    return bool(torch._C._will_engine_execute_node(node))
