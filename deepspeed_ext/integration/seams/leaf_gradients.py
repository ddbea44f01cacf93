# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""When the gradients of a leaf module are reduced."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed_ext.deepspeed_types import LeafOptimizer


def watch_our_leaves(create: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(create)
    def create_reduce_and_remove_grad_hooks(self: "LeafOptimizer") -> None:
        from deepspeed_ext.leaf.gradients import LeafReducer, watch_leaves

        create(self)
        if isinstance(self, LeafReducer):  # one of ours: DeepSpeed's own reduce as without us
            watch_leaves(self)

    return create_reduce_and_remove_grad_hooks


def reduce_what_waits(epilogue: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(epilogue)
    def independent_gradient_partition_epilogue(self: "LeafOptimizer") -> None:
        from deepspeed_ext.leaf.gradients import end_of_backward

        end_of_backward(self)
        epilogue(self)

    return independent_gradient_partition_epilogue
