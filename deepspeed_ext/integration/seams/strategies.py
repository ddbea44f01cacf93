# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Which optimizer is made, which of DeepSpeed's functions ask it, and what ZeRO-3 does with leaf modules beside it."""

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from torch import Tensor, nn

    from deepspeed_ext.deepspeed_types import Engine, LeafOptimizer


def keep_in_zero(sanity_check: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(sanity_check)
    def _do_optimizer_sanity_check(self: "Engine", basic_optimizer: object) -> Any:
        wrapper = sanity_check(self, basic_optimizer)
        from deepspeed.runtime.engine import BFLOAT16, ZERO_OPTIMIZATION

        from deepspeed_ext.config.section import active_strategy

        return ZERO_OPTIMIZATION if wrapper == BFLOAT16 and active_strategy(self._config) else wrapper

    return _do_optimizer_sanity_check


def make_our_optimizer(configure: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(configure)
    def _configure_zero_optimizer(self: "Engine", optimizer: object) -> Any:
        from deepspeed_ext.config.section import active_strategy, record_optimizer

        strategy = active_strategy(self._config)
        if "deepspeed_ext.leaf.modules" in sys.modules:
            from deepspeed_ext.leaf.modules import unset_leaves

            unset_leaves(self.module)  # of an engine before this one
        if strategy is None:
            if self.zero_optimization_partition_weights() and "deepspeed_ext.zero.sharded.slices" in sys.modules:
                from deepspeed_ext.zero.sharded.slices import repartition_for_stock

                repartition_for_stock(self.module)
            return configure(self, optimizer)
        from deepspeed_ext.config.implied import warn_without_zero_init
        from deepspeed_ext.loco.setup import gather_hop, inter_hop, outer_hops
        from deepspeed_ext.zero.factory import configure_with

        warn_without_zero_init(self._config, strategy, self.module)
        hops = gather_hop(self, strategy), inter_hop(self, strategy), functools.partial(outer_hops, self)
        made = configure_with(strategy, *hops, configure, self, optimizer)
        record_optimizer(self._config)
        return made

    return _configure_zero_optimizer


def gather_our_parameters(all_gather_dp_groups: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(all_gather_dp_groups)
    def gather(groups_flat: object, *args: Any, **kwargs: Any) -> None:
        own = getattr(groups_flat, "all_gather", None)
        if own is None or not own():
            all_gather_dp_groups(groups_flat, *args, **kwargs)

    return gather


def compare_within_group(assert_ints_same: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(assert_ints_same)
    def assert_ints_same_as_other_ranks(ints: list[int]) -> None:
        from deepspeed_ext.zero.sharded.coordinator import assert_same_in_group

        if not assert_same_in_group(ints):
            assert_ints_same(ints)

    return assert_ints_same_as_other_ranks


def modify_in_all_groups(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(
        self: Any, params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
    ) -> None:
        from deepspeed_ext.zero.arrivals import wait_for_whole_parameters
        from deepspeed_ext.zero.resync import ask_all
        from deepspeed_ext.zero.sharded.modifier_rank import listed, replicated, sharded_over_all

        wait_for_whole_parameters()
        if modifier_rank is not None:
            ask_all()
        if not enabled:  # DeepSpeed does not look at the parameters, and they may come once: ``model.parameters()``
            init(self, params, modifier_rank, fwd_module, enabled)
            return
        params = listed(params)
        with sharded_over_all(replicated(params)):
            init(self, params, modifier_rank, fwd_module, enabled)

    return __init__


def broadcast_to_all_groups(leave: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(leave)
    def _exit(self: Any, *exc: object) -> Any:
        from deepspeed_ext.zero.sharded import modifier_rank

        if self.src_rank is not None:
            modifier_rank.broadcast_to_replicas(modifier_rank.replicated(self.params), self.src_rank_by_group)
        return leave(self, *exc)

    return _exit


def choose_leaves(choose: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(choose)
    def _set_z3_leaf_modules_by_threshold(
        self: "DeepSpeedZeRoOffload", module: "nn.Module", zero_module_granularity_threshold: int
    ) -> None:
        from deepspeed_ext.zero.sharded.coordinator import is_coordinating

        if not is_coordinating():
            choose(self, module, zero_module_granularity_threshold)
            return
        from deepspeed_ext.leaf.setup import by_granularity

        by_granularity(self, module, zero_module_granularity_threshold)

    return _set_z3_leaf_modules_by_threshold


def call_without_detour(wrapped: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(wrapped)  # not lazily: torch.compile looks into what is imported by a statement only
    def zero3_linear_wrap(input: "Tensor", weight: "Tensor", bias: "Tensor | None" = None) -> Any:
        from deepspeed_ext.leaf.linear import linear

        return linear(wrapped, input, weight, bias)

    return zero3_linear_wrap


def watch_our_leaves(create: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(create)
    def create_reduce_and_remove_grad_hooks(self: "LeafOptimizer") -> None:
        from deepspeed_ext.leaf.gradients import LateGradients, LeafReducer, watch_leaves

        create(self)
        if isinstance(self, LeafReducer):
            watch_leaves(self)
        else:
            LateGradients(self)

    return create_reduce_and_remove_grad_hooks


def reduce_what_waits(epilogue: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(epilogue)
    def independent_gradient_partition_epilogue(self: "LeafOptimizer") -> None:
        from deepspeed_ext.leaf.gradients import end_of_backward

        end_of_backward(self)
        epilogue(self)

    return independent_gradient_partition_epilogue


def complete_transfers_first(destroy: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        from torch.distributed import GroupMember

        if group not in (None, GroupMember.WORLD) or "deepspeed_ext.comm.endings" not in sys.modules:
            destroy(group)
            return
        from deepspeed_ext.comm import endings

        failure = endings.complete(after_an_error=sys.exc_info()[0] is not None)
        destroy(group)
        if failure is not None:
            raise RuntimeError(endings.failed(failure)) from failure

    return destroy_process_group
